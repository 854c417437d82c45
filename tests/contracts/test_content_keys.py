"""Law 2: a key is a hash of everything that can change a sample's tensors; what changed is never found again."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from qie.encode import Encoder
from qie.precompute import precompute
from qie.pretrained import open_pretrained
from qie.recipe import Recipe
from qie.shards.shard_set import ShardSet
from qie.types import Row
from tests.stubs import RECIPES, StubEncoder, StubSource

ROW = Row(0, "a", b"target", (b"one", b"two"), "make it night", b"mask")


@pytest.fixture
def recipe(family: str) -> Recipe:
    return RECIPES[family]


@pytest.mark.parametrize(
    "change",
    [
        {"target": b"target "},
        {"controls": (b"one", b"two ")},
        {"controls": (b"two", b"one")},
        {"controls": (b"one",)},
        {"controls": (b"onetwo",)},
        {"controls": (b"one", b"two", b"two")},
        {"prompt": "make it Night"},
        {"prompt": "make it  night"},
        {"mask": None},
        {"mask": b"MASK"},
        {"mask": None, "controls": (b"mask", b"one", b"two")},
    ],
    ids=str,
)
def test_a_changed_input_changes_the_key(change: dict, recipe: Recipe) -> None:
    assert recipe.key(replace(ROW, **change)) != recipe.key(ROW)


def test_a_control_is_told_from_none(recipe: Recipe) -> None:
    """As of a family that makes images of text alone."""
    assert len({recipe.key(replace(ROW, controls=controls)) for controls in ((), (b"",), (b"", b""))}) == 3


def test_no_two_families_have_a_key_in_common() -> None:
    assert len({recipe.key(ROW) for recipe in RECIPES.values()}) == len(RECIPES) == 3


def test_neither_index_nor_name_nor_unicode_form_changes_the_key(recipe: Recipe) -> None:
    composed, decomposed = (replace(ROW, prompt=prompt) for prompt in ("caf\u00e9", "cafe\u0301"))
    assert recipe.key(composed) == recipe.key(decomposed)
    assert recipe.key(replace(ROW, index=7, name="b")) == recipe.key(ROW)


@pytest.mark.parametrize("field", [field.name for field in fields(Recipe)])
def test_every_field_of_the_recipe_changes_digest_and_key_and_is_explained(field: str, recipe: Recipe) -> None:
    value = getattr(recipe, field)
    other = replace(recipe, **{field: value + 1 if isinstance(value, int) else f"{value}x"})
    assert other.digest != recipe.digest
    assert other.key(ROW) != recipe.key(ROW)
    (line,) = recipe.explain(other)
    assert line.startswith(f"{field}: ")


def test_the_key_is_the_one_that_the_format_gives(recipe: Recipe) -> None:
    """Written out by hand from docs/format.md: a changed key would orphan every shard there is."""
    import hashlib

    def sha(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()

    lines = [recipe.full_digest, f"prompt {sha(b'make it night')}", f"target {sha(b'target')}", f"mask {sha(b'mask')}"]
    lines += [f"control {sha(b'one')}", f"control {sha(b'two')}"]
    assert recipe.key(ROW) == sha("\n".join(lines).encode())


@pytest.mark.parametrize("around", ["{} ", "  {}", "\t{}\r\n", "\u00a0{}\u3000"])
def test_blanks_around_a_prompt_are_no_part_of_it(around: str, recipe: Recipe) -> None:
    assert recipe.key(replace(ROW, prompt=around.format(ROW.prompt))) == recipe.key(ROW)


def recipe_of(model: Path) -> Recipe:
    cpu = torch.device("cpu")
    return Encoder.open(open_pretrained(str(model)), vae_device=cpu, text_device=cpu).recipe


@pytest.mark.parametrize("component", ["vae", "text_encoder"])
def test_one_changed_bit_of_an_encoders_weights_changes_the_recipe(
    tiny_model: Path, tmp_path: Path, component: str
) -> None:
    import shutil

    shutil.copytree(tiny_model, tmp_path / "model")
    path = sorted((tmp_path / "model" / component).glob("*.safetensors"))[-1]
    before = recipe_of(tmp_path / "model")
    assert before == recipe_of(tiny_model), "where a model lies does not count"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    after = recipe_of(tmp_path / "model")
    (line,) = before.explain(after)
    assert line.startswith(f"{component}: ")


def test_a_changed_row_is_encoded_again_and_no_other(tmp_path: Path, recipe: Recipe) -> None:
    source = StubSource.of(20)
    precompute(source, StubEncoder(recipe), tmp_path, rows=(0, 20), shard_size=8)
    changed = source.changed(5, prompt="another").changed(13, controls=(b"other",))
    encoder = StubEncoder(recipe)

    report = precompute(changed, encoder, tmp_path, rows=(0, 20), shard_size=8)

    assert encoder.encoded == [5, 13]
    assert (report.encoded, report.reused, report.shards_written, report.shards_kept) == (2, 18, 2, 1)
    assert [entry.key for entry in ShardSet.open([tmp_path]).entries] == [recipe.key(row) for row in changed.rows]

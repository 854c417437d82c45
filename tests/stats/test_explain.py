"""Why a row is in shards or not: what changed is named, and nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

from qie.cli import precompute as precompute_command
from qie.cli import stats
from qie.data.variants import Variants
from qie.precompute import Settings, precompute
from qie.recipe import Recipe
from qie.shards.discovery import find_indexes
from qie.stats import Explanation, explain_rows
from tests.builders import rewrite_index
from tests.conftest import AREA_PX
from tests.stubs import RECIPE, StubEncoder, StubSource

ROWS = 6
SOURCE = StubSource.of(ROWS).changed(5, mask=b"mask 5")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    precompute(SOURCE, StubEncoder(), tmp_path / "shards", rows=(0, ROWS), settings=Settings(), shard_size=4)
    return tmp_path / "shards"


def explain(shards: Path, source: StubSource = SOURCE, recipe: Recipe = RECIPE) -> Explanation:
    return explain_rows(source, recipe, find_indexes([shards]))


def named(found: Explanation) -> dict[int, list[str]]:
    """What each row that is no hit differs in."""
    return {one.row: [cause.what for cause in one.causes] for one in found.verdicts if one.state != "hit"}


def test_unchanged_rows_are_hits_wherever_they_moved_and_whatever_they_are_called_and_a_new_one_is_a_miss(
    shards: Path,
) -> None:
    found = explain(shards)
    assert (found.states, found.causes, found.faults) == ({"hit": ROWS}, {}, [])

    first, *others = SOURCE.rows
    moved = [*others, replace(first, name="renamed")]
    found = explain(shards, StubSource(tuple(replace(row, index=number) for number, row in enumerate(moved))))
    assert found.states == {"hit": ROWS}

    moved_and_changed = StubSource((SOURCE.rows[1], SOURCE.rows[0])).changed(1, prompt="another")
    assert named(explain(shards, moved_and_changed)) == {1: ["prompt"]}, "found by its name"

    found = explain(shards, StubSource.of(ROWS + 1).changed(5, mask=b"mask 5"))
    assert found.states == {"hit": ROWS, "miss": 1}
    assert "in none of the shards" in str(found.verdicts[-1].causes[0])


@pytest.mark.parametrize(
    ("row", "change", "what", "how"),
    [
        (1, {"target": b"another"}, "target", "changed"),
        (1, {"controls": (b"another",)}, "control 1", "changed"),
        (1, {"controls": (b"control 1", b"more")}, "control 2", "is new"),
        (1, {"controls": ()}, "control 1", "is gone"),
        (1, {"prompt": "another"}, "prompt", "changed"),
        (1, {"mask": b"new"}, "mask", "is new"),
        (5, {"mask": None}, "mask", "is gone"),
        (5, {"mask": b"another"}, "mask", "changed"),
    ],
)
def test_a_changed_input_is_named_and_makes_its_row_stale_alone(
    shards: Path, row: int, change: dict[str, object], what: str, how: str
) -> None:
    found = explain(shards, SOURCE.changed(row, **change))

    assert found.states == {"hit": ROWS - 1, "stale": 1}
    (stale,) = [one for one in found.verdicts if one.state == "stale"]
    assert stale.row == row
    assert [(cause.what, cause.how) for cause in stale.causes] == [(what, how)]


def test_each_changed_field_of_the_recipe_is_named_with_what_it_was_and_is(shards: Path) -> None:
    found = explain(shards, recipe=replace(RECIPE, areas_px=(64,), vae="9" * 64))

    assert found.states == {"stale": ROWS}
    assert found.causes == {"vae": ROWS, "areas_px": ROWS}
    assert {cause.how for one in found.verdicts for cause in one.causes} == {
        "was (4096,), is (64,)",
        "was 111111111111…, is 999999999999…",
    }


def test_inputs_and_recipe_that_changed_together_are_told_apart(shards: Path) -> None:
    source = SOURCE.changed(1, target=b"another").changed(2, prompt="another")

    found = explain(shards, source, replace(RECIPE, multiple_px=16))

    assert named(found) == {
        0: ["multiple_px"],
        1: ["target", "multiple_px"],
        2: ["prompt", "multiple_px"],
        **{row: ["multiple_px"] for row in range(3, ROWS)},
    }


def test_of_shards_of_several_recipes_the_nearest_is_compared(shards: Path, tmp_path: Path) -> None:
    other = replace(RECIPE, multiple_px=16, background="#000000")
    precompute(SOURCE, StubEncoder(other), tmp_path / "other", rows=(0, ROWS), settings=Settings(), shard_size=4)

    found = explain_rows(SOURCE, replace(other, compiled=True), find_indexes([shards, tmp_path / "other"]))

    assert (found.states, found.causes) == ({"stale": ROWS}, {"compiled": ROWS})


def test_rows_that_were_skipped_and_rows_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    source = StubSource.of(3).changed(0, target=b"broken").changed(1, target=b"missing")
    precompute(source, StubEncoder(), tmp_path, rows=(0, 3), settings=Settings(), shard_size=4)

    found = explain(tmp_path, source)
    mended = explain(tmp_path, StubSource.of(3))

    assert [one.state for one in found.verdicts] == ["skipped", "unreadable", "hit"]
    assert "the target is damaged: broken" in str(found.verdicts[0].causes[0])
    assert "no control image" in str(found.verdicts[1].causes[0])
    assert [one.state for one in mended.verdicts] == ["miss", "miss", "hit"]
    assert "was skipped: no control image" in str(mended.verdicts[1].causes[0])


def test_each_variant_of_a_row_is_explained(tmp_path: Path) -> None:
    variants = Variants(count=2)
    source = StubSource.of(2).changed(0, more_prompts=("more",))
    settings = Settings(variants=variants)
    precompute(source, StubEncoder(), tmp_path, rows=(0, 2), settings=settings, shard_size=4)

    found = explain_rows(
        source.changed(0, more_prompts=("other",)), RECIPE, find_indexes([tmp_path]), variants=variants
    )

    assert [(one.row, one.variant, one.state) for one in found.verdicts] == [
        (0, 0, "hit"),
        (0, 1, "stale"),
        (1, 0, "hit"),
    ]
    assert found.causes == {"prompt": 1}


def test_an_index_that_does_not_list_inputs_still_tells_recipes_from_inputs(shards: Path) -> None:
    for path in shards.glob("*.json"):

        def strip(values: dict) -> None:
            for one in values["samples"]:
                del one["inputs"]

        rewrite_index(path, strip)

    changed = SOURCE.changed(1, target=b"another")

    assert explain(shards).states == {"hit": ROWS}
    assert named(explain(shards, changed)) == {1: ["an input"]}
    assert explain(shards, recipe=replace(RECIPE, multiple_px=16)).causes == {"multiple_px": ROWS}


def test_an_index_that_cannot_be_read_is_a_fault_and_its_rows_are_misses(shards: Path) -> None:
    (shards / "00000000-00000004.json").write_text("{")

    found = explain(shards)

    assert found.states == {"miss": 4, "hit": 2}
    assert len(found.faults) == 1 and "00000000-00000004.json" in found.faults[0]


def test_after_one_image_one_prompt_one_size_and_one_weight_the_command_names_exactly_these(
    tiny_edit: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    shutil.copytree(tiny_edit, tmp_path / "model")
    config = {
        "model": {"pretrained_model_name_or_path": str(tmp_path / "model")},
        "data": {"source": str(tmp_path / "photos"), "area_px": AREA_PX, "allow_tiny": True},
        "cache": {"cache_dir": str(tmp_path / "shards"), "vae_encoder_device": "cpu", "text_encoder_device": "cpu"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    options = ["--config", str(tmp_path / "config.yaml")]
    done = CliRunner().invoke(precompute_command.main, [*options, "--end-idx", "4", "--quiet"])
    assert done.exit_code == 0, done.output
    explaining = [str(tmp_path / "shards"), "--explain", str(tmp_path / "photos"), *options, "--json"]
    before = json.loads(CliRunner().invoke(stats.main, explaining).stdout)
    assert before["states"] == {"hit": 4, "miss": 8}

    targets = sorted((tmp_path / "photos" / "training_images").glob("*.png"))
    Image.open(targets[1]).transpose(Image.Transpose.ROTATE_180).save(targets[1])
    targets[2].with_suffix(".txt").write_text("make it something else")
    (weights,) = (tmp_path / "model" / "vae").glob("*.safetensors")
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, weights)

    result = CliRunner().invoke(stats.main, [*explaining, "--set", f"data.area_px={AREA_PX // 4}"])

    after = json.loads(result.stdout)
    causes = [{cause["what"] for cause in one["causes"]} for one in after["verdicts"][:4]]
    assert result.exit_code == 0
    assert after["states"] == {"stale": 4, "miss": 8}
    assert causes == [
        {"areas_px", "vae"},
        {"areas_px", "vae", "target"},
        {"areas_px", "vae", "prompt"},
        {"areas_px", "vae"},
    ]


def test_the_lines_name_each_row_its_state_and_its_causes(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = StubSource.of(ROWS + 1).changed(1, prompt="another", mask=b"new").changed(5, mask=b"mask 5")

    stats._print_explanation(explain(shards, source))

    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["row 0 (row0): hit", "row 1 (row1): stale: prompt changed; mask is new"]
    assert lines[6] == "row 6 (row6): miss: row is in none of the shards, by content or by name"
    assert lines[7] == f"under recipe {RECIPE.digest}: 5 hit, 1 stale, 1 miss"
    assert lines[8:] == ["          1  prompt", "          1  mask", "          1  row"]

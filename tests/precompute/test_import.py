"""`qie import`: caches of qwen-image-finetune as shards, built here as that project's code writes them.

Its layout is that of `EmbeddingCacheManager.save_cache_embedding` and `QwenImageEditTrainer.cache_step`, read in its
repository (TsienDragon/qwen-image-finetune, src/qflux/data/cache_manager.py and src/qflux/trainer/), and of the
releases before: src/data/cache_manager.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from diffusers import QwenImageEditPipeline

from qie.cli import one_command, train
from qie.data.sources import open_source
from qie.precompute import Settings, precompute
from qie.shards.discovery import published
from qie.shards.reader import Shard
from qie.stats import summarise
from qie.training.model import trainable
from qie.types import Sample
from tests.builders import ROOT, assert_same, make_sample
from tests.stubs import StubEncoder, StubSource
from tests.training.runs import losses

PLACES = {
    "image_latents": "image",
    "control_latents": "controls",
    "prompt_embeds": "prompt",
    "prompt_embeds_mask": "prompt",
    "empty_prompt_embeds": "prompt",
    "empty_prompt_embeds_mask": "prompt",
}
"""Tensor -> the hash by which it is found."""
BEFORE = {"image_latents": "pixel_latent", "control_latents": "control_latent", "prompt_embeds": "prompt_embed"}
SIZE = ("--size", "48x32", "--control-size", "48x32")
"""Of the samples of `make_sample`: 4×6 in latent pixels of which each 2×2 is a token, and a token is 16 px wide."""


def bring(*arguments: object, family: str = "edit", code: int = 0) -> Result:
    """`qie import`, whose exit code is `code`."""
    done = CliRunner().invoke(one_command.main, ["import", *map(str, arguments), "--family", family, "--quiet"])
    assert done.exit_code == code, done.output
    return done


def packed(latent: torch.Tensor) -> torch.Tensor:
    _, _, height, width = latent.shape
    return QwenImageEditPipeline._pack_latents(latent[None], 1, 16, height, width)[0]


def tensors(sample: Sample) -> dict[str, torch.Tensor]:
    return {
        "image_latents": packed(sample.pixel_latent),
        "control_latents": torch.cat([packed(latent) for latent in sample.control_latent]),
        "prompt_embeds": sample.prompt_embed,
        "prompt_embeds_mask": sample.prompt_embeds_mask.long(),
        "empty_prompt_embeds": sample.empty_prompt_embed,
        "empty_prompt_embeds_mask": sample.empty_prompt_embeds_mask.long(),
    }


def save(cache: Path, name: str, sample: Sample, **more: object) -> None:
    """A row as `save_cache_embedding` writes it, with whatever else is in its metadata."""
    metadata: dict[str, object] = {"version": "2.0"}
    for tensor, values in tensors(sample).items():
        metadata[tensor] = f"{PLACES[tensor]}{name}"
        path = cache / tensor / f"{metadata[tensor]}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(values.detach().cpu().to(torch.float16), path)
    (cache / "metadata").mkdir(exist_ok=True)
    (cache / "metadata" / f"{name}.json").write_text(json.dumps(metadata | more, indent=2))


def cache_of(folder: Path, count: int = 4) -> Path:
    for number in range(count):
        save(folder, f"row{number}", make_sample(number))
    return folder


def imported(folder: Path) -> list[Sample]:
    shards = [Shard(index) for index in published(folder)]
    return [shard.load(entry) for shard in shards for entry in shard.index.samples]


def assert_imported(one: Sample, original: Sample) -> None:
    """All tensors, bit for bit; the prompt is lost, and the key another."""
    assert one.key != original.key
    assert_same(one, replace(original, key=one.key, prompt=""))


def reasons(folder: Path) -> dict[str, str]:
    return {one.name: one.reason for index in published(folder) for one in Shard(index).index.skipped}


def test_every_tensor_of_a_cache_is_imported_bit_for_bit(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "cache")
    done = bring(cache, "--output", tmp_path / "new", *SIZE, "--shard-size", 3)
    assert done.stdout.startswith("4 of 4 rows imported, 0 refused; recipe ")
    for number, sample in enumerate(imported(tmp_path / "new")):
        assert_imported(sample, make_sample(number))
    shards = list(map(Shard, published(tmp_path / "new")))
    assert [entry.name for shard in shards for entry in shard.index.samples] == [f"row{n}" for n in range(4)]
    assert summarise(published(tmp_path / "new"), verify=True).faults == []


def test_sizes_come_from_the_cache_where_it_has_them_in_tokens_or_pixels(tmp_path: Path) -> None:
    one, two = make_sample(0), make_sample(1, target=(2, 8), controls=((4, 6), (6, 2)))
    save(tmp_path / "cache", "a", one, img_shapes=[[[3, 32, 48], [3, 32, 48]]])
    save(tmp_path / "cache", "b", two, img_shapes=[[1, 1, 4], [1, 2, 3], [1, 3, 1]])
    save(tmp_path / "cache", "c", two, img_shapes="main")
    (tmp_path / "cache" / "img_shapes").mkdir()
    torch.save(torch.tensor([[1, 1, 4], [1, 2, 3], [1, 3, 1]]).half(), tmp_path / "cache" / "img_shapes" / "main.pt")
    bring(tmp_path / "cache", "--output", tmp_path / "new", family="edit_plus")
    samples = imported(tmp_path / "new")
    for sample, original in zip(samples, (one, two, two), strict=True):
        assert_imported(sample, original)
    assert samples[1].key == samples[2].key
    assert len(Shard(published(tmp_path / "new")[0]).index.files) == 2, "equal tensors are one record"


def test_older_caches_are_imported_too(tmp_path: Path) -> None:
    """With metadata beside the folders; and without any, where the files of a row have one name."""
    described, bare = tmp_path / "described", tmp_path / "bare"
    cache_of(described, 2)
    for path in (described / "metadata").iterdir():
        path.rename(described / f"{path.stem}_metadata.json")
    (described / "metadata").rmdir()
    for number in range(2):
        for tensor, values in tensors(make_sample(number)).items():
            kind = tensor.replace("prompt_embeds", "prompt_embed") if tensor == "empty_prompt_embeds" else tensor
            path = bare / BEFORE.get(kind, kind) / f"{number}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(values[None], path, _use_new_zipfile_serialization=number == 0)
    for cache in (described, bare):
        bring(cache, "--output", tmp_path / f"new {cache.name}", *SIZE)
        for number, sample in enumerate(imported(tmp_path / f"new {cache.name}")):
            assert_imported(sample, make_sample(number))


def test_padding_is_dropped_and_only_tokens_of_equal_bits_are_stored_once(tmp_path: Path) -> None:
    """-0 equals 0, but is another."""
    padded, prompt = make_sample(0, tokens=2100, width=2), torch.zeros(9, 8).half()
    zeros = replace(make_sample(1), prompt_embed=prompt, empty_tail=-prompt[:4], shared_prefix=3)
    cache = tmp_path / "cache"
    save(cache, "a", padded)
    save(cache, "b", zeros)
    torch.save(torch.cat([torch.ones(2100), torch.zeros(5)]).half(), cache / "prompt_embeds_mask/prompta.pt")
    filled = torch.cat([padded.prompt_embed, padded.prompt_embed.new_zeros(5, 2)])
    torch.save(filled, cache / "prompt_embeds/prompta.pt")
    bring(cache, "--output", tmp_path / "new", *SIZE)
    for one, original in zip(imported(tmp_path / "new"), (padded, zeros), strict=True):
        assert_imported(one, original)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_does_nothing_and_is_named_and_the_rest_is_imported(tmp_path: Path, zipped: bool) -> None:
    cache = cache_of(tmp_path / "cache")
    hostile = cache / "prompt_embeds" / "promptrow1.pt"
    torch.save({"x": Touch(tmp_path / "ran")}, hostile, _use_new_zipfile_serialization=zipped)
    (cache / "image_latents" / "imagerow2.pt").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    output = bring(cache, "--output", tmp_path / "new", *SIZE, code=1)
    assert not (tmp_path / "ran").exists()
    assert output.stdout.startswith("2 of 4 rows imported, 2 refused")
    assert "refused row1: prompt_embeds/promptrow1.pt asks to run " in output.stderr
    assert "refused row2: image_latents/imagerow2.pt " in output.stderr
    assert_imported(imported(tmp_path / "new")[1], make_sample(3))
    assert set(reasons(tmp_path / "new")) == {"row1", "row2"}, "the shards keep account of what was refused"
    assert summarise(published(tmp_path / "new"), verify=True).faults == []


def _write(name: str, content: object):
    return lambda cache: torch.save(content, cache / name)


def _metadata(**changes: object):
    def change(cache: Path) -> None:
        path = cache / "metadata" / "row1.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


IMAGE, PROMPT, MASK = "image_latents/imagerow1.pt", "prompt_embeds/promptrow1.pt", "prompt_embeds_mask/promptrow1.pt"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda cache: (cache / PROMPT).unlink(), f"{PROMPT} is missing"),
        (lambda cache: (cache / PROMPT).write_bytes((cache / PROMPT).read_bytes()[:300]), "no tensor that can be read"),
        (lambda cache: (cache / PROMPT).write_bytes(b""), "no tensor that can be read"),
        (lambda cache: (cache / "metadata/row1.json").write_text("[1"), "metadata/row1.json is no metadata"),
        (lambda cache: (cache / "metadata/row1.json").write_text("[1]"), "metadata/row1.json is no metadata"),
        (lambda cache: (cache / "metadata/row1.json").write_text("{}"), "it has no image_latents"),
        (_metadata(image_latents="../../x"), "names a file that cannot be the cache's: '../../x'"),
        (_metadata(img_shapes="../x"), "names a file that cannot be the cache's"),
        (_metadata(img_shapes=[[1, -2, -3], [1, 2, 3]]), "its img_shapes are malformed"),
        (_metadata(img_shapes=[["a"]]), "its img_shapes are malformed"),
        (_metadata(img_shapes=[]), "its img_shapes are malformed"),
        (_metadata(img_shapes=[[1, 3, 3], [1, 2, 3]]), "pixel_latent is [6, 64], which is not 48×48 px"),
        (_metadata(img_shapes=[[1, 2, 3]] * 3), "it has 2 controls, which edit does not take"),
        (_metadata(img_shapes=[[1, 2, 3]]), "its img_shapes are malformed"),
        (_write(IMAGE, torch.zeros(6, 32)), "pixel_latent is [6, 32], which is not 48×32 px packed to 64 channels"),
        (_write(IMAGE, torch.zeros(16, 1, 4, 6)), "pixel_latent is [16, 1, 4, 6], expected 2 dimensions"),
        (_write(IMAGE, torch.full((6, 64), float("nan"))), "pixel_latent contains NaN or infinity"),
        (_write(IMAGE, torch.zeros(1).expand(10**9, 64)), f"{IMAGE} holds no plain tensor"),
        (_write(IMAGE, {"x": torch.zeros(6, 64)}), f"{IMAGE} holds no plain tensor"),
        (_write(IMAGE, torch.eye(6).to_sparse()), f"{IMAGE} holds no"),  # torch 2.11 does not even read it
        (_write(PROMPT, torch.zeros(9, 4)), "prompt_embed and empty_prompt_embed have other widths"),
        (_write(MASK, torch.zeros(9)), "prompt_embed's mask is not that of 9 tokens"),
        (_write(MASK, torch.tensor([0, 1] + [1] * 7)), "prompt_embed's mask is not that of 9 tokens"),
        (_write(MASK, torch.full((9,), float("nan"))), "prompt_embed's mask is not that of 9 tokens"),
        (_write(MASK, torch.ones(8)), "prompt_embed's mask is not that of 9 tokens"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_reason(tmp_path: Path, spoil, reason: str) -> None:
    cache = cache_of(tmp_path / "cache", 3)
    spoil(cache)
    done = bring(cache, "--output", tmp_path / "new", *SIZE, code=1)
    assert reason in reasons(tmp_path / "new")["row1"]
    assert f"refused row1: {reasons(tmp_path / 'new')['row1']}\n" in done.stderr
    assert len(imported(tmp_path / "new")) == 2


def test_rows_without_sizes_or_without_what_belongs_together_are_refused_and_files_of_no_row_counted(
    tmp_path: Path,
) -> None:
    cache = cache_of(tmp_path / "cache", 2)
    (cache / "metadata" / "\x1b[31m.json").write_text("{}")
    torch.save(torch.zeros(1), cache / "image_latents" / "left over.pt")
    output = bring(cache, "--output", tmp_path / "new", code=1)
    assert output.stderr.count("give --size and --control-size") == 2
    assert "1 files belong to no row" in output.stderr
    assert "it has no image_latents" in output.stderr and "\x1b" not in output.stderr, (
        "a name cannot command a terminal"
    )
    shutil.rmtree(cache / "metadata")
    done = bring(cache, "--output", tmp_path / "other", *SIZE, code=1)
    assert "refused imagerow0: control_latents/imagerow0.pt is missing" in done.stderr


def test_wrong_usage_folders_that_are_no_cache_and_outputs_of_other_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        done = bring(tmp_path / folder, "--output", tmp_path / "new", code=2)
        assert "error: this is no cache of qwen-image-finetune" in done.stderr
    cache = cache_of(tmp_path / "cache", 2)
    for words in (["--size", "96"], ["--size", "96x8"], ["--size", "48x32"], ["--shard-size", "0"]):
        bring(cache, "--output", tmp_path / "new", *words, code=2)
    bring(cache, "--output", tmp_path / "new", *SIZE)
    before = {path: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    bring(cache, "--output", tmp_path / "new", *SIZE)  # again: the same
    done = bring(cache, "--output", tmp_path / "new", *SIZE, "--model", "another", code=2)
    assert "another recipe" in done.stderr
    done = bring(cache, "--output", tmp_path / "new", *SIZE, "--shard-size", "1", code=2)
    assert "the output holds other shards" in done.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "new").iterdir()} == before


def test_an_imported_sample_is_never_taken_for_a_row_that_is_encoded(tmp_path: Path) -> None:
    encoder, source = StubEncoder(), StubSource.of(2)
    for row in source.rows:
        save(tmp_path / "cache", row.name, encoder.encode(row), img_shapes=[[1, 2, 2], [1, 2, 2]])
    bring(tmp_path / "cache", "--output", tmp_path / "new", family="edit_plus", code=1)  # of odd sizes, one of the two
    encoder = StubEncoder()
    precompute(source, encoder, tmp_path / "mine", rows=(0, 2), settings=Settings(reuse=[str(tmp_path / "new")]))
    assert encoder.encoded == [0, 1]


def test_an_imported_cache_trains_and_one_without_null_prompts_where_no_caption_is_dropped(
    tiny_edit: Path, encoder, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first releases left it: four tensors a row."""
    row = open_source(photos).read(0)
    sample = encoder.encode(row)
    target, control = (next((photos / part).glob(f"{row.name}.*g")) for part in ("training_images", "control_images"))
    named = {  # as `EmbeddingCacheManager._get_file_hash` of those releases names them
        kind: hashlib.md5(f"{path}_{path.stat().st_mtime}_{prompt}".encode()).hexdigest()
        for kind, path, prompt in (
            ("pixel_latent", target, ""),
            ("control_latent", control, ""),
            ("prompt_embed", target, row.prompt),
            ("prompt_embeds_mask", target, row.prompt),
        )
    }
    for kind, values in tensors(sample).items():
        folder = tmp_path / "cache" / BEFORE.get(kind, kind)
        folder.mkdir(parents=True)  # a later release opened it, too
        if not kind.startswith("empty"):
            torch.save(values, folder / f"{named[folder.name]}.pt")
    sizes = [f"{8 * width}x{8 * height}" for height, width in (sample.shape.target, *sample.shape.controls)]
    size = ("--size", sizes[0], "--control-size", sizes[1])
    said = bring(tmp_path / "cache", "--output", tmp_path / "new", *size, "--dataset", photos, code=1)
    assert "no null prompt in 1 of 12 rows: train with data.caption_dropout_rate: 0" in said.stderr
    assert said.stdout.startswith("1 of 12 rows imported, 11 refused")
    [one] = imported(tmp_path / "new")
    assert len(one.empty_prompt_embed) == 0 and one.prompt == sample.prompt
    done = bring(tmp_path / "cache", "--output", tmp_path / "no", *size, "--dataset", tmp_path, code=2)
    assert "this is not a dataset of qwen-image-finetune" in done.stderr
    assert summarise(published(tmp_path / "new"), verify=True).faults == []
    read = [sys.executable, ROOT / "tools" / "read_shard.py", next((tmp_path / "new").glob("*.tar")), one.key]
    assert "empty_prompt_embed " in subprocess.run(read, check=True, capture_output=True, text=True).stdout
    settings = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 2}},
        "train": {"mixed_precision": "no", "max_steps": 1, "output_dir": str(tmp_path / "run")},
        "validation": {"rows": 0},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    words = [str(tmp_path / "new"), "--accept-recipe", "--config", str(tmp_path / "config.yaml")]
    with monkeypatch.context() as patch:
        patch.setattr(trainable, "load_transformer", lambda *_: pytest.fail("weights were read"))
        refused = CliRunner().invoke(train.main, [*words, "--set", "data.caption_dropout_rate=0.1"])
        assert refused.exit_code == 2 and "samples have no null prompt" in refused.output
    assert CliRunner().invoke(train.main, words).exit_code == 0

    shapes = [(3, 8 * height, 8 * width) for height, width in (sample.shape.target, *sample.shape.controls)]
    for name in ("row0", "row1"):
        save(tmp_path / "later", name, sample, img_shapes=shapes)
    bring(tmp_path / "later", "--output", tmp_path / "whole")
    assert_imported(imported(tmp_path / "whole")[0], sample)
    words[0] = str(tmp_path / "whole")
    words += ["--set", "data.caption_dropout_rate=0.5", "--set", "train.max_steps=2"]
    result = CliRunner().invoke(train.main, [*words, "--set", f"train.output_dir={tmp_path / 'second run'}"])
    assert result.exit_code == 0, result.output
    found = losses(tmp_path / "second run")
    assert len(found) == 2 and all(map(math.isfinite, found))

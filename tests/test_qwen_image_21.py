"""Qwen-Image-2.1 from rows to shards: rows without controls, what is stored, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from PIL import Image

from qie import pretrained
from qie.cli import precompute, predict, stats, train
from qie.data.batch import collate
from qie.data.plan import PlannedBatch
from qie.data.sources import open_source
from qie.encode import Encoder, EncoderOptions
from qie.errors import ConfigError, RowError, UsageError
from qie.precompute import precompute as precompute_rows
from qie.pretrained import open_pretrained
from qie.shards.record import decode, encode
from qie.shards.tensors import Sizes, bytes_by_name, tensor_bytes
from qie.types import Row
from tests.builders import assert_same
from tests.conftest import AREA_PX
from tests.training.runs import mixed_rows

CPU = torch.device("cpu")


def picture(size: tuple[int, int] = (160, 120), colour: str = "#4080c0") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return content.getvalue()


def row(controls: int, prompt: str = "make it night") -> Row:
    files = tuple(picture((150 + 20 * number, 90), f"#{number}0a0{number}0") for number in range(controls))
    return Row(0, "row", picture(), files, prompt)


@pytest.mark.parametrize("controls", range(4))
def test_a_row_with_any_number_of_controls_or_none_survives_its_record(controls: int, encoder_21) -> None:
    given = row(controls)
    sample, facts = encoder_21.encode(given), encoder_21.inspect(given)
    record = encode(sample, encoder_21.recipe.digest)
    assert_same(decode(memoryview(bytearray(record)), "here"), sample)
    assert (facts.key, facts.shape, facts.tokens) == (sample.key, sample.shape, len(sample.prompt_embed))
    assert len(sample.image_slots) == len(sample.control_latent) == controls
    assert sample.prompt_embed.dtype == torch.bfloat16 and sample.pixel_latent.dtype == torch.float16
    assert ("control_latent" in tensor_bytes(sample)) == (controls > 0)
    sides = [side for size in (sample.shape.target, *sample.shape.controls) for side in size]
    assert all(side % 2 == 0 for side in sides), "the transformer takes 2×2 latent pixels a token of the text encoder"


def test_a_row_of_the_released_sizes_takes_at_most_1_9_mb() -> None:
    """1024², one control, 80 tokens and the template's 9."""
    sizes = Sizes(64, 64, 64 * 64, 89, 15, 9, 4096, False, text_alone=True)
    assert sum(bytes_by_name(sizes).values()) < 1.85e6


@pytest.mark.parametrize("name", ["encoder", "encoder_plus"])
def test_other_families_refuse_a_row_without_controls(name: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(RowError, match="0 control images") as caught:
        request.getfixturevalue(name).encode(row(0))
    assert caught.value.hint == "every row needs an image to edit"


def test_with_a_shared_prefix_embeddings_are_those_of_full_passes_but_for_rounding(encoder_21) -> None:
    sharing = Encoder(encoder_21.pretrained, replace(encoder_21.recipe, share_prefix=True), CPU, CPU)
    for controls in (0, 2):
        one, other = encoder_21.encode(row(controls)), sharing.encode(row(controls))
        assert one.shared_prefix == other.shared_prefix and one.image_slots == other.image_slots
        for mine, theirs in ((one.prompt_embed, other.prompt_embed), (one.empty_tail, other.empty_tail)):
            # Both were rounded to BF16, of which a last bit is 1/256.
            assert (mine.float() - theirs.float()).abs().max() <= mine.float().abs().max() / 128


def test_several_rows_together_are_the_rows_alone_but_for_rounding(encoder_21) -> None:
    together = Encoder(encoder_21.pretrained, replace(encoder_21.recipe, batch_size=3), CPU, CPU)
    rows = [row(controls, prompt) for controls, prompt in ((0, "a cat"), (2, "make it night, with stars"), (1, "b"))]
    for one, other in zip(map(encoder_21.encode, rows), together.encode_together(rows), strict=True):
        assert one.prompt_embed.shape == other.prompt_embed.shape and one.image_slots == other.image_slots
        worst = (one.prompt_embed.float() - other.prompt_embed.float()).abs().max()
        assert worst <= one.prompt_embed.float().abs().max() / 128


def test_a_longer_prompt_than_the_table_of_positions_holds_is_refused(encoder_21) -> None:
    with pytest.raises(RowError, match="too long") as caught:
        encoder_21.inspect(row(1, "é" * 9000))
    height, width = encoder_21.inspect(row(1)).shape.controls[0]
    assert caught.value.expected == f"at most {8191 - max(height, width)} tokens"


def test_in_a_batch_each_null_prompt_is_that_of_its_row_s_controls(encoder_21) -> None:
    """Joined of the text that a prompt shares with it, and of its own tail."""
    for controls in range(3):
        rows = [row(controls, prompt) for prompt in ("make it night, with stars", " a", "\u00e9")]
        batch = collate([encoder_21.encode(one) for one in rows], PlannedBatch((0, 1, 2), (1.0,) * 3))
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in rows[0].controls]
        whole = encoder_21.embed(images, "")
        is_text, before = torch.ones(len(whole), dtype=torch.bool), 0
        for slot, latent in zip(batch.image_slots, batch.control_latent, strict=True):
            count = latent.shape[-2] * latent.shape[-1] // 4
            is_text[slot + before : slot + before + count] = False
            before += count
        for found, length in zip(batch.empty_prompt_embed, batch.empty_lengths, strict=True):
            assert (found[:length] - whole[is_text].bfloat16()).abs().max() <= whole.abs().max() / 128
            assert not found[length:].any()


def test_an_image_that_the_text_encoder_would_resize_is_refused(encoder_21, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would not fit the latent's. Below 256², the released processor enlarges images."""
    monkeypatch.setattr(encoder_21.text._processor, "size", {"shortest_edge": 65536, "longest_edge": 16777216})
    with pytest.raises(RowError, match="resizes control 1"):
        encoder_21.inspect(row(1))
    assert encoder_21.inspect(row(0)).tokens


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"text_area_px": 16384}, "data.text_area_px"),
        ({"multiple_px": 16}, "data.multiple_px"),
        ({"buckets_px": ((128, 144),)}, "data.buckets_px"),
    ],
)
def test_sizes_that_do_not_fit_the_family_are_refused(options: dict, key: str, tiny_21: Path) -> None:
    sizes = {"areas_px": None if "buckets_px" in options else (AREA_PX,)}
    with pytest.raises(ConfigError) as caught:
        Encoder.open(
            open_pretrained(str(tiny_21)), vae_device=CPU, text_device=CPU, options=EncoderOptions(**sizes | options)
        )
    assert caught.value.where == key


@pytest.mark.parametrize("found", ["0.41.0", "0.9", "0.41.2.dev0"])
def test_an_older_diffusers_is_refused(found: str, tiny_21: Path, tiny_edit: Path, monkeypatch) -> None:
    monkeypatch.setattr(pretrained, "version", lambda name: found)
    with pytest.raises(UsageError, match=r"Qwen-Image-2.1 needs diffusers >= 0.42") as caught:
        open_pretrained(str(tiny_21))
    assert caught.value.exit_code == 2 and caught.value.found == f"diffusers {found}"
    if found != "0.9":
        open_pretrained(str(tiny_edit))


def run(command, *arguments: object) -> Result:
    return CliRunner().invoke(command.main, [str(argument) for argument in arguments])


def test_the_commands_precompute_and_describe_and_refuse_another_family(
    tiny_21: Path, tiny_edit: Path, photos: Path, tmp_path: Path
) -> None:
    shared = ["--set", f"model.pretrained_model_name_or_path={tiny_21}", "--set", "data.allow_tiny=true"]
    shared += ["--set", f"data.area_px={AREA_PX}", "--set", "cache.thumbnail_px=32", "--set", f"data.source={photos}"]
    config = tmp_path / "config.yaml"
    config.write_text("model: {}\n")
    output = tmp_path / "shards"
    made = run(precompute, "--config", config, *shared, "--output", output, "--end-idx", 4, "--quiet")
    assert made.exit_code == 0, made.output
    told = run(stats, output, "--verify", "--html", tmp_path / "page.html", "--vae", tiny_21)
    assert told.exit_code == 0, told.output
    assert " px from " in told.stdout and "prompt_embed" in told.stdout
    shutil.copytree(photos / "training_images", tmp_path / "alone" / "training_images")
    alone = [*shared[:-1], f"data.source={tmp_path / 'alone'}", "--output", tmp_path / "alone-shards", "--end-idx", 2]
    counted = run(precompute, "--config", config, *alone, "--dry-run")
    assert counted.exit_code == 0 and "2 rows: 2 samples can be encoded" in counted.output
    assert run(precompute, "--config", config, *alone, "--quiet").exit_code == 0
    told = run(stats, tmp_path / "alone-shards", "--verify", "--compact", "--html", tmp_path / "alone.html")
    assert (
        told.exit_code == 0
        and " px from text" in told.stdout
        and "<dd>text</dd>" in (tmp_path / "alone.html").read_text()
    )
    assert all(">tokens of text<" in (tmp_path / f"{name}.html").read_text() for name in ("page", "alone"))
    other = run(train, output, "--config", config, *shared, "--set", f"model.pretrained_model_name_or_path={tiny_edit}")
    assert other.exit_code == 2 and "the shards are for another model family" in other.output


def test_rows_of_text_alone_and_of_one_and_two_controls_go_through_all_commands(
    tiny_21: Path, photos: Path, tmp_path: Path
) -> None:
    source, config, shards = mixed_rows(photos, tmp_path / "rows"), tmp_path / "config.yaml", tmp_path / "shards"
    values = {
        "model": {"pretrained_model_name_or_path": str(tiny_21)},
        "data": {"source": str(source), "area_px": AREA_PX, "allow_tiny": True, "batch_size": 2},
        "cache": {"cache_dir": str(shards)},
        "train": {"max_steps": 4, "draws_per_sample": 2, "mixed_precision": "no", "output_dir": str(tmp_path / "run")},
        "validation": {"rows": 2, "every": 2, "samples": [{"prompt": "a cat"}], "sample_steps": 2},
    }
    config.write_text(yaml.safe_dump(values))

    def done(command, *arguments: object) -> str:
        result = run(command, *arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert done(precompute, "--config", config).startswith("12 rows: 12 samples encoded, 0 reused, 0 skipped")
    assert done(precompute, "--config", config).startswith("12 rows: 0 samples encoded, 12 reused, 0 skipped")
    told = done(stats, shards, "--plan", "--batch-size", 2)
    assert "tail pad: 6 steps over 12 samples, 0 places padded" in told
    assert json.loads(done(stats, shards, "--json"))["shapes"] == {
        "160×96 px from text": 4,
        "160×96 px from 160×96": 4,
        "160×96 px from 160×96 + 160×96": 4,
    }
    assert ": 12 hit\n" in done(stats, shards, "--explain", source, "--config", config)

    assert "done after 4 steps" in done(train, "--config", config)
    done(train, "--config", config, "--resume", "latest", "--set", "train.max_steps=6")
    adapter, image = tmp_path / "run" / "checkpoint-000006", photos / "control_images" / "cat-sepia.png"
    for number, images in enumerate(((), ("--image", image), ("--image", image, "--image", image))):
        made = [tmp_path / f"{number} {kind}.png" for kind in ("plain", "tuned")]
        request = ["--config", config, *images, "--prompt", "make it night", "--steps", 2, "--quiet"]
        done(predict, *request, "--output", made[0])
        done(predict, *request, "--output", made[1], "--lora", adapter)
        assert made[0].read_bytes() != made[1].read_bytes()


def test_what_training_cannot_do_is_one_error_before_weights_are_read(
    tiny_21: Path, tiny_edit: Path, photos: Path, encoder_21, encoder, tmp_path: Path
) -> None:
    shards = {encoder_21: tmp_path / "of 2.1", encoder: tmp_path / "of edit"}
    for one, folder in shards.items():
        precompute_rows(open_source(photos), one, folder, rows=(0, 3))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": {"area_px": AREA_PX, "allow_tiny": True}, "validation": {"rows": 0}}))

    def refused(model: Path, folder: Path, *more: str) -> str:
        words = [
            "--set",
            f"model.pretrained_model_name_or_path={model}",
            "--set",
            f"train.output_dir={tmp_path / 'run'}",
        ]
        result = run(train, folder, "--config", config, *words, *more)
        assert result.exit_code == 2 and "Traceback" not in result.output
        return result.output

    for model, folder in ((tiny_edit, shards[encoder_21]), (tiny_21, shards[encoder])):
        for accepting in ((), ("--accept-recipe",)):
            told = refused(model, folder, *accepting)
            assert "error: the shards are for another model family, whose samples this one cannot read" in told
            assert "to do:    train the model that they were encoded for" in told
    for trying in ((), ("--dry-run",)):
        told = refused(tiny_edit, shards[encoder], "--set", "train.draws_per_sample=2", *trying)
        assert "this model has no prefix that several draws could share" in told
        assert "where:    train.draws_per_sample" in told and "data.batch_size" in told
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_source_without_controls_is_refused_for_an_edit_and_the_hint_names_the_family_that_takes_it(
    tiny_edit: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos / "training_images", tmp_path / "alone" / "training_images")
    (tmp_path / "rows.jsonl").write_text('{"target": "x.png", "prompt": "x"}\n')
    (tmp_path / "config.yaml").write_text(f"model: {{pretrained_model_name_or_path: {tiny_edit}}}\n")
    for source in ("alone", "rows.jsonl"):
        result = run(precompute, "--config", tmp_path / "config.yaml", "--source", tmp_path / source)
        assert result.exit_code == 2
        assert "rows without controls are text-to-image, which Qwen-Image-2.1 alone is trained for" in result.output

"""What Python and notebooks print of rows, samples, batches and so on: facts, never the content."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from qie.data.batch import collate
from qie.data.opening import open_stream
from qie.data.plan import PlannedBatch
from qie.shards.pictures import SmallPictures, encode_pictures
from qie.shards.shard_set import ShardSet
from qie.stats import Summary
from qie.types import Row, Sample
from tests.builders import make_recipe, make_sample, make_skipped, write_shard
from tests.stats.pages import write_colours

HOSTILE = "</td><script>alert(1)</script>\u202e" + "x" * 5000
MEGABYTES = torch.zeros(16, 1, 256, 256, dtype=torch.float16)


def large(prompt: str = "make it night", **changes: object) -> Sample:
    return replace(make_sample(prompt=prompt, masked=True), pixel_latent=MEGABYTES, **changes)


def test_a_row_shows_its_prompt_and_how_large_its_files_are() -> None:
    row = Row(3, "cat", b"\0" * 2_000_000, (b"\0" * 1000, b""), "make it night", b"mask")
    assert repr(row) == "<Row 3 'cat': 'make it night', target 2.0 MB, controls 1.0 kB + 0 B, mask 4 B>"
    assert repr(Row(0, "a", b"", (), HOSTILE)).count("x") < 60


def test_a_sample_shows_its_key_its_prompt_and_its_tensors_not_their_values() -> None:
    sample = large()
    assert repr(sample) == (
        f"<Sample {sample.key[:12]}: 'make it night', pixel_latent [16, 1, 256, 256] float16, "
        "control_latent [16, 1, 4, 6] float16, prompt_embed [9, 8] float16, loss_mask [4, 6] uint8, 2.1 MB>"
    )
    several = repr(make_sample(controls=((4, 6), (2, 2))))
    assert "control_latent 1 [16, 1, 4, 6] float16, control_latent 2 [16, 1, 2, 2] float16" in several


def test_a_batch_has_the_prompts_of_its_samples_and_shows_some_of_them() -> None:
    prompts = [f"prompt {number}" for number in range(6)]
    batch = collate([make_sample(1, prompt=one) for one in prompts], PlannedBatch(tuple(range(6)), (1.0,) * 6))
    assert batch.prompts == tuple(prompts) == batch.to(torch.device("cpu"), torch.float32).prompts
    assert repr(batch).startswith(
        "<Batch of 6: 'prompt 0', 'prompt 1', 'prompt 2', 'prompt 3' and 2 more, pixel_latent [6, "
    )
    assert re.search(r"prompt_embed \[6, 9, 8\] float16, [\d.]+ kB>$", repr(batch))
    assert repr(batch.to(torch.device("meta"), torch.float16)).endswith(" kB, meta>")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shard(tmp_path / "shards", [make_sample(0), make_sample(1), None])
    write_shard(tmp_path / "shards", [make_sample(2)], start=3)
    return tmp_path / "shards"


def test_shards_and_streams_show_counts_and_places(shards: Path) -> None:
    opened = ShardSet.open(shards)
    assert repr(opened) == f"<ShardSet of 3 samples in 2 shards, edit_plus, recipe {make_recipe().digest}, {shards}>"
    stream = open_stream(shards, batch_size=2, seed=7)
    assert repr(stream) == "<Stream of 3 samples in batches of 2: epoch 0, position 0, seed 7>"
    next(iter(stream))
    assert repr(replace(stream, world_size=2, rank=1)).endswith("seed 7, rank 1 of 2>")
    assert "position 1" in repr(stream)


def test_a_summary_shows_counts(shards: Path) -> None:
    (shards / "00000003-00000004.tar").unlink()
    found = Summary.of(shards)
    assert re.fullmatch(
        r"<Summary: 2 samples of 3 rows in 1 shard, [\d.]+ kB; 0 excluded, 1 skipped, 1 fault>", repr(found)
    )


# Notebooks


def test_a_notebook_shows_a_sample_with_its_small_pictures_and_whatever_it_says_as_text(tmp_path: Path) -> None:
    colours = [Image.new("RGB", (24, 16), name) for name in ("teal", "navy")]
    pictures = encode_pictures(SmallPictures(colours[0], (colours[1],)))
    write_shard(tmp_path, [make_sample(prompt=HOSTILE), replace(make_sample(1), pictures=pictures)])
    hostile, pictured = (ShardSet.open(tmp_path).load(position)._repr_html_() for position in range(2))
    assert "<script" not in hostile and "&lt;script&gt;" in hostile and "\u202e" not in hostile
    assert len(hostile) < 20_000 and "<img" not in hostile
    assert re.findall(r'<img src="data:image/jpeg;base64,[^"]+" width="24" height="16" alt="([^"]+)"', pictured) == [
        "control 1",
        "target",
    ]
    assert "[16, 1, 256, 256]" in large()._repr_html_()


def test_pictures_that_cannot_be_read_are_not_shown_and_those_of_earlier_shards_are(tmp_path: Path) -> None:
    assert "<img" not in large(pictures=b"none")._repr_html_()
    write_colours(tmp_path, ["a prompt"])
    assert ShardSet.open(tmp_path).load(0)._repr_html_().count("<img") == 1


def test_a_notebook_shows_a_row_as_pictures_and_says_which_is_none() -> None:
    picture = io.BytesIO()
    Image.new("RGB", (3000, 2000), "teal").save(picture, "PNG")
    image = picture.getvalue()
    page = Row.of(target=image, controls=[b"<b>none"], prompt=HOSTILE, mask=image, rejected=image)._repr_html_()
    assert re.findall(r'width="192" height="128" alt="(\w+)"', page) == ["target", "rejected", "mask"]
    assert "control 1 cannot be shown" in page and "<script" not in page and len(page) < 20_000


def test_a_notebook_shows_a_summary_with_reasons_and_faults_as_text(tmp_path: Path) -> None:
    write_shard(tmp_path, [make_sample(0), *[None] * 3])
    (tmp_path / "00000004-00000005.json").write_text(HOSTILE)
    page = Summary.of(tmp_path)._repr_html_()
    assert make_skipped(1).reason in page and "1 fault<" in page and "<script" not in page
    assert "No faults found." in Summary.of(tmp_path / "00000000-00000004.tar")._repr_html_()

"""Law 1: raw rows through the live encoder, and the same rows precomputed and read back, are the same batches."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from qie.config import Config
from qie.data.opening import open_stream
from qie.data.sources import open_source
from qie.data.stream import Stream
from qie.families import FAMILIES
from qie.precompute import precompute
from qie.pretrained import open_pretrained
from qie.shards.shard_set import ShardSet
from qie.stream_chooser import Telling, open_training_stream
from qie.types import Batch
from tests.conftest import AREA_PX
from tests.stream.checks import spoil
from tests.training.runs import ADAPTER, Bench, checkpoint, lines, losses


def assert_same(first: Batch, second: Batch) -> None:
    for field in fields(Batch):
        mine, theirs = getattr(first, field.name), getattr(second, field.name)
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype and torch.equal(one, other), field.name
            else:
                assert one == other, field.name


def batches(stream, count: int) -> list[Batch]:
    iterator = stream.forever()
    return [next(iterator) for _ in range(count)]


def assert_live_equals_cached(place: Path, encoder, shards: Path, batch_size: int) -> list[Batch]:
    source = open_source(place, text_to_image=FAMILIES[encoder.recipe.family].min_controls == 0)
    precompute(source, encoder, shards, rows=(0, len(source)), shard_size=5)
    settings = {"batch_size": batch_size, "seed": 3, "validation_rows": 1}
    cached, live = open_stream(shards, **settings), open_stream(source, encoder=encoder, **settings)
    assert len(cached) == len(live) and cached.samples.masked == live.samples.masked
    count = len(cached) + 2  # into the second epoch
    read, encoded = batches(cached, count), batches(live, count)
    for one, other in zip(read, encoded, strict=True):
        assert_same(one, other)
    return read


def test_live_and_cached_batches_are_bit_identical(photos: Path, family_encoder, tmp_path: Path) -> None:
    read = assert_live_equals_cached(photos, family_encoder, tmp_path / "shards", batch_size=2)
    assert any(batch.prompt_embeds_mask is not None for batch in read), (
        "no batch had padding: the test shows too little"
    )
    assert min(batch.prompt_embed.float().std() for batch in read) > 0.3


def test_so_they_are_with_several_controls_a_mask_and_a_broken_row(photos: Path, encoder_plus, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(photos, folder)
    targets = sorted((folder / "training_images").glob("*.png"))[:4]
    for path in sorted((folder / "training_images").iterdir()):
        if path.with_suffix(".png") not in targets:
            path.unlink()
    control = folder / "control_images"
    shutil.copy(control / targets[1].name, control / f"{targets[0].stem}_control_1.png")
    shutil.copy(targets[0], control / f"{targets[0].stem}_mask.png")
    targets[2].write_bytes(targets[2].read_bytes()[:5000])

    read = assert_live_equals_cached(folder, encoder_plus, tmp_path / "shards", batch_size=1)

    assert ShardSet.open([tmp_path / "shards"]).masked
    assert {len(batch.control_latent) for batch in read} <= {1, 2}
    assert len({key for batch in read for key in batch.keys}) == 2, "of four rows one is broken and one is kept out"


def test_so_they_are_with_and_without_controls_and_with_transparent_targets(
    photos: Path, encoder_21, tmp_path: Path
) -> None:
    names = [f"{number}.png" for number in range(6)]
    for path, name in zip(sorted((photos / "training_images").glob("*.png")), names, strict=False):
        shutil.copy(path, tmp_path / name)
    transparent = Image.open(tmp_path / names[5]).convert("RGB")
    transparent.putalpha(Image.linear_gradient("L").resize(transparent.size))
    transparent.save(tmp_path / names[5])
    rows = [
        {"target": name, "control": names[:number], "prompt": f"do {number}"}
        for number, name in zip((0, 0, 1, 2, 3, 1), names, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    read = assert_live_equals_cached(tmp_path / "rows.jsonl", encoder_21, tmp_path / "shards", batch_size=1)

    assert {len(batch.control_latent) for batch in read} >= {0, 1} and {len(batch.image_slots) for batch in read} >= {0}
    assert all(batch.prompt_embed.dtype == batch.empty_prompt_embed.dtype == torch.bfloat16 for batch in read)


@pytest.fixture(scope="module")
def whole(photos: Path, family_encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of all photographs."""
    folder = tmp_path_factory.mktemp("whole") / "shards"
    precompute(open_source(photos), family_encoder, folder, rows=(0, 12), shard_size=5)
    return folder


@pytest.mark.parametrize(
    ("family", "damage", "order"),
    [
        *(("edit", damage, "shuffle") for damage in ("missing", "empty", "partial", "index", "tar", "record")),
        ("edit", "partial", "blocks"),
        ("edit_plus", "partial", "shuffle"),
        ("qwen_image_21", "partial", "shuffle"),
    ],
    indirect=["family"],
)
def test_what_shards_lack_is_encoded_live_and_the_batches_are_those_of_whole_shards(
    photos: Path, tiny_model: Path, family_encoder, whole: Path, tmp_path: Path, damage: str, order: str
) -> None:
    """By the chooser that qie-train, Python and qie.legacy share, with one line that says why.

    What is damage to a shard is the same for every family.
    """
    data = {"source": str(photos), "area_px": AREA_PX, "allow_tiny": True, "batch_size": 2}
    data |= {"text_area_px": family_encoder.recipe.text_area_px}
    values = {
        "model": {"pretrained_model_name_or_path": str(tiny_model)},
        "data": data | {"order": order, "block_size": 1},
        "validation": {"rows": 1},
    }
    pretrained, said = open_pretrained(str(tiny_model)), []

    def training_stream(shards: Path) -> Stream:
        config = Config.model_validate(values | {"cache": {"cache_dir": str(shards)}})
        return open_training_stream(config, pretrained, Accelerator(cpu=True), telling=Telling(say=said.append))

    shards = Path(shutil.copytree(whole, tmp_path / "shards"))
    spoil(shards, damage)
    cached, mixed = training_stream(whole), training_stream(shards)
    for one, other in zip(batches(cached, len(cached)), batches(mixed, len(cached)), strict=True):
        assert_same(one, other)
    assert mixed.state_dict() == cached.state_dict(), "each goes on from the other's checkpoint"
    lines = [line for line in said if "encoded live" in line]
    lacking = {"missing": "12 of 12 ", "empty": "12 of 12 ", "record": "a record is damaged"}.get(damage, "5 of 12 ")
    assert len(lines) == 1 and lines[0].startswith(lacking)
    assert "00000005-00000010" in lines[0] or damage in ("missing", "empty", "partial")


def test_training_live_and_on_shards_gives_the_same_losses_and_weights(
    photos: Path, tiny_model: Path, family_encoder, tmp_path: Path
) -> None:
    """Of 2.1, rows with no, one and two controls, and two draws of each in a step."""
    bench = Bench.make(tmp_path, tiny_model, photos, family_encoder, rows=12)
    mixed = FAMILIES[family_encoder.recipe.family].min_controls == 0
    source = str(tmp_path / "rows" / "rows.jsonl" if mixed else photos)
    settings = {"data__batch_size": 2, "data__caption_dropout_rate": 0.3, "data__control_dropout_rate": 0.3}
    settings |= {"data__source": source, "train__max_steps": 6}
    bench.train(tmp_path / "live", cache__use_cache=False, **settings)
    bench.train(tmp_path / "cached", **settings)
    assert lines(tmp_path / "live") == lines(tmp_path / "cached")
    adapters = [checkpoint(tmp_path / one, 6) / ADAPTER for one in ("live", "cached")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert len(set(losses(tmp_path / "cached"))) == 6


@pytest.mark.gpu
def test_on_a_gpu_live_and_cached_batches_agree_bit_for_bit(photos: Path, tiny_edit: Path, tmp_path: Path) -> None:
    from qie.encode import Encoder, EncoderOptions
    from qie.pretrained import open_pretrained

    gpu = torch.device("cuda:0")
    options = EncoderOptions(areas_px=(16384,))
    encoder = Encoder.open(open_pretrained(str(tiny_edit)), vae_device=gpu, text_device=gpu, options=options)
    assert encoder.recipe.vae_dtype == "bfloat16"
    assert_live_equals_cached(photos, encoder, tmp_path / "shards", batch_size=2)

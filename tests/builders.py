"""Small recipes, samples, entries and shards for tests. Everything follows from its seed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from qie.errors import RowError
from qie.recipe import Recipe, canonical_json, json_hash
from qie.shards.index import Entry, ShardIndex, Skipped
from qie.shards.record import encode
from qie.shards.writer import ShardWriter
from qie.stores import Folder
from qie.types import Row, Sample, Shape

if TYPE_CHECKING:
    from qie.encode.encoder import Encoder, PreparedRow

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Recipe(
    family="edit_plus",
    vae="a" * 64,
    text_encoder="b" * 64,
    tokenizer="c" * 64,
    processor="d" * 64,
    areas_px=(1024 * 1024,),
    text_area_px=384 * 384,
    vae_dtype="float32",
    text_dtype="bfloat16",
    template="e" * 64,
    resampling="f" * 64,
)
RECIPE_21 = replace(RECIPE, family="qwen_image_21", text_area_px=None, prompt_dtype="bfloat16")
TENSORS = (
    "pixel_latent",
    "prompt_embed",
    "prompt_embeds_mask",
    "empty_prompt_embed",
    "empty_prompt_embeds_mask",
    "loss_mask",
    "thumbnail",
)


def make_recipe(**changes: Any) -> Recipe:
    return replace(RECIPE, **changes)


def make_sample(
    seed: int = 0,
    *,
    target: tuple[int, int] = (4, 6),
    controls: tuple[tuple[int, int], ...] = ((4, 6),),
    tokens: int = 9,
    empty_tokens: int = 7,
    shared_prefix: int = 5,
    width: int = 8,
    masked: bool = False,
    paired: bool = False,
    prompt: str | None = None,
    clipped: int = 0,
    recipe: Recipe = RECIPE,
) -> Sample:
    """A sample whose values span what FP16 holds, as latents and hidden states with massive activations do."""
    generator = torch.Generator().manual_seed(seed)
    prompt = f"make it {seed} × bluer" if prompt is None else prompt
    embed = _values(generator, tokens, width)
    empty = torch.cat([embed[:shared_prefix], _values(generator, empty_tokens - shared_prefix, width)])
    loss_mask = torch.randint(0, 2, target, generator=generator, dtype=torch.uint8) * 255
    small = recipe.thumbnail_size(Shape(target, controls))
    return Sample(
        key=recipe.key(Row(seed, "", f"target {seed}".encode(), (b"control",), prompt)),
        prompt=prompt,
        pixel_latent=_values(generator, 16, 1, *target),
        control_latent=tuple(_values(generator, 16, 1, *size) for size in controls),
        rejected_latent=_values(torch.Generator().manual_seed(~seed), 16, 1, *target) if paired else None,
        prompt_embed=embed,
        prompt_embeds_mask=torch.ones(tokens, dtype=torch.bool),
        empty_tail=empty[shared_prefix:],
        empty_prompt_embeds_mask=torch.ones(empty_tokens, dtype=torch.bool),
        shared_prefix=shared_prefix,
        loss_mask=loss_mask if masked else None,
        clipped=clipped,
        thumbnail=torch.randint(0, 256, (*small, 3), generator=generator, dtype=torch.uint8) if small else None,
    )


def make_sample_21(
    seed: int = 0,
    *,
    target: tuple[int, int] = (4, 6),
    controls: tuple[tuple[int, int], ...] = ((4, 6),),
    slots: tuple[int, ...] | None = None,
    recipe: Recipe = RECIPE_21,
    **changes: Any,
) -> Sample:
    """A sample of Qwen-Image-2.1, with any number of controls: embeddings of text alone."""
    joint = make_sample(seed, target=target, controls=controls or ((2, 2),), recipe=recipe, **changes)
    generator = torch.Generator().manual_seed(seed)
    return replace(
        joint,
        pixel_latent=_values(generator, 64, 1, *target),
        control_latent=tuple(_values(generator, 64, 1, *size) for size in controls),
        prompt_embed=joint.prompt_embed.bfloat16() * 1e9,
        empty_tail=joint.empty_tail.bfloat16() * 1e9,
        image_slots=tuple(range(1, len(controls) + 1)) if slots is None else slots,
    )


def make_entry(sample: Sample, row: int, name: str | None = None) -> Entry:
    return Entry.of(sample, Row(row, f"row {row}" if name is None else name, b"", (), ""))


def make_skipped(row: int, reason: str = "the target is no image") -> Skipped:
    return Skipped(row, f"row {row}", reason)


def write_shard(
    directory: Folder | str | Path, samples: Iterable[Sample | None], *, start: int = 0, recipe: Recipe = RECIPE
) -> ShardIndex:
    """Publish a shard of consecutive rows from `start`; None is a row that is skipped."""
    samples = list(samples)
    with ShardWriter(directory, start, start + len(samples), recipe) as shard:
        for row, sample in enumerate(samples, start):
            if sample is None:
                shard.skip(make_skipped(row))
            else:
                shard.add(make_entry(sample, row), encode(sample, recipe.digest), sample.pictures)
        return shard.publish()


def plant_shard(folder: Path, samples: Iterable[Sample | None], *, start: int = 0) -> None:
    """Put a shard into a folder as a copy does: a writer refuses rows that are there."""
    with TemporaryDirectory() as aside:
        write_shard(aside, samples, start=start)
        shutil.copytree(aside, folder, dirs_exist_ok=True)


def write_variants(
    folder: Folder | str | Path, rows: Iterable[Iterable[Sample | None]], *, start: int = 0, source: str = ""
) -> ShardIndex:
    """Publish a shard of consecutive rows from `start`, each given as its variants; None is one that is skipped."""
    rows = [list(variants) for variants in rows]
    with ShardWriter(folder, start, start + len(rows), RECIPE) as shard:
        for row, variants in enumerate(rows, start):
            for variant, sample in enumerate(variants):
                if sample is None:
                    shard.skip(replace(make_skipped(row), variant=variant, source=source))
                else:
                    entry = replace(make_entry(sample, row), variant=variant, source=source)
                    shard.add(entry, encode(sample, RECIPE.digest))
        return shard.publish()


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], object], *, own_hash: bool = False) -> None:
    """Change what an index says; it then has no hash of its own, as one from before there was one, unless asked for."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("this_sha256", None)
    change(values)
    if own_hash:
        values["this_sha256"] = json_hash(values)
    path.write_text((canonical_json if own_hash else json.dumps)(values) + "\n", encoding="utf-8")


def without_fast_hashes(index: dict[str, Any]) -> None:
    """Make an index's values those of before there was an XXH3-128; a change for `rewrite_index`."""
    for member in index["files"].values():
        del member["xxh3_128"]


def without_own_hash(text: str) -> str:
    """An index as it was written before it had a hash of its own."""
    return text[: text.index(',"this_sha256":')] + "}"


def split_record(record: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A record taken apart by hand: the header without metadata, what qie says in the metadata, the tensors' bytes."""
    length = int.from_bytes(record[:8], "little")
    header = json.loads(record[8 : 8 + length])
    return header, json.loads(header.pop("__metadata__")["qie"]), record[8 + length :]


def join_record(header: dict[str, Any], about: object, body: bytes) -> bytes:
    """The inverse of `split_record`, for records that no library would write."""
    text = json.dumps(header | {"__metadata__": {"qie": json.dumps(about)}}).encode()
    return len(text).to_bytes(8, "little") + text + body


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have the same type, shape and bits: -0 is not 0."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))


def assert_same(one: Sample, other: Sample) -> None:
    """That two samples agree in everything, tensors bit for bit."""
    fields = ("key", "prompt", "shared_prefix", "clipped", "shape", "image_slots")
    assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]
    assert len(one.control_latent) == len(other.control_latent)
    assert all(map(same_bits, one.control_latent, other.control_latent))
    for name in TENSORS:
        assert same_bits(getattr(one, name), getattr(other, name)), name


def prepared(encoder: Encoder, row: Row) -> PreparedRow:
    """What both models and the sample get of a row's images: quick, as no weights are needed."""
    prepare, *_ = encoder.stages
    (found,) = prepare.work([row])
    if isinstance(found, RowError):
        raise found
    return found


def assert_prepared_alike(one: PreparedRow, other: PreparedRow) -> None:
    """Bit for bit, so that the samples are, too."""
    parts = [
        (row.target, *row.controls, row.patches.values, row.patches.grids, row.loss_mask, row.thumbnail)
        for row in (one, other)
    ]
    assert all(map(same_bits, *parts)) and len(parts[0]) == len(parts[1])


def mutated_json(text: str, dice: random.Random) -> str:
    """The text after one of its values, at any depth, became another, went, or came twice."""
    values = json.loads(text)
    places = list(_places(values))
    holder, name = dice.choice(places)
    junk = [None, True, -1, 0, 2**70, 1.5, float("inf"), float("nan"), "", "8", "\ud800", [], [8], {}, {"row": 8}]
    change = dice.randrange(8)
    if change == 0:
        del holder[name]
    elif change == 1 and isinstance(holder, list):
        holder.append(holder[name])
    elif change == 2:
        other_holder, other_name = dice.choice(places)
        holder[name] = json.loads(json.dumps(other_holder[other_name]))
    else:
        holder[name] = dice.choice(junk)
    return json.dumps(values)


def _values(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Normal values, every eighth or so far out; the first are the ends of FP16 and both zeros, if there is room."""
    values = torch.randn(size, generator=generator)
    far = torch.rand(size, generator=generator) < 0.125
    values = torch.where(far, values * torch.exp(6 * torch.rand(size, generator=generator)), values).half()
    ends = torch.tensor([65504.0, -65504.0, 6e-8, -0.0, 0.0], dtype=torch.float16)
    if values.numel() > len(ends):
        values.view(-1)[: len(ends)] = ends[torch.randperm(len(ends), generator=generator)]
    return values


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside some JSON."""
    for name in values if isinstance(values, dict) else range(len(values)):
        yield values, name
        if isinstance(values[name], (dict, list)):
            yield from _places(values[name])

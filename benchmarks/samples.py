"""Samples as they come of 1024², of random bits: their content costs nothing to read and cannot be compressed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from qie.recipe import Recipe
from qie.shards.index import Entry
from qie.shards.record import encode
from qie.shards.writer import ShardWriter
from qie.types import Row, Sample

WIDTH = 3584
"""Of a token as Qwen2.5-VL gives it."""
IMAGE_TOKENS = 1369
"""What Qwen2.5-VL makes of an image of 1024², which is resized to 1036²."""
TAIL, NULL = 29, 5
"""Tokens behind the images: of the prompt, and of the null prompt."""
SLOT = 5
"""Of Qwen-Image-2.1, tokens before the first control."""
SAME = "0" * 64
RECIPE = Recipe("edit", SAME, SAME, SAME, SAME, (1024 * 1024,), None, "float32", "float32", SAME, SAME)
RECIPE_21 = replace(RECIPE, family="qwen_image_21", prompt_dtype="bfloat16")


def made(
    number: int,
    tokens: int,
    *,
    side: int = 128,
    width: int = WIDTH,
    tail: int = TAIL,
    controls: int = 1,
    channels: int = 16,
) -> Sample:
    """The sample of row `number`: latents of side² of the target and each control, a prompt of so many tokens."""
    generator = torch.Generator().manual_seed(number)

    def half(*size: int) -> torch.Tensor:
        bits = torch.randint(-(2**15), 2**15, size, generator=generator, dtype=torch.int16)
        return (bits & ~0x4000).view(torch.float16)  # within ±2: without infinities

    shared = tokens - tail
    return Sample(
        key=RECIPE.key(Row(number, "", b"%d" % number, (b"",), "")),
        prompt="make the sky a little darker",
        pixel_latent=half(channels, 1, side, side),
        control_latent=tuple(half(channels, 1, side, side) for _ in range(controls)),
        prompt_embed=half(tokens, width),
        prompt_embeds_mask=torch.ones(tokens, dtype=torch.bool),
        empty_tail=half(NULL, width),
        empty_prompt_embeds_mask=torch.ones(shared + NULL, dtype=torch.bool),
        shared_prefix=shared,
    )


def made_newer(number: int, tokens: int, *, side: int, width: int, tail: int, controls: int) -> Sample:
    """One of Qwen-Image-2.1: text alone, in bfloat16, with controls among the first tokens, which all prompts share."""
    sample = made(number, tokens, side=side, width=width, tail=tail, controls=controls, channels=64)
    return replace(
        sample,
        prompt_embed=sample.prompt_embed.bfloat16(),
        empty_tail=sample.empty_tail.bfloat16(),
        image_slots=tuple(range(SLOT, SLOT + controls)),
    )


def record_of(sample: Sample, recipe: Recipe = RECIPE) -> bytes:
    return encode(sample, recipe.digest)


def write_shards(folder: Path, count: int, tokens: int, shard_size: int) -> Iterator[tuple[Sample, bytes]]:
    """Write so many samples; gives each with its record, for whoever stores the same in another way."""
    for first in range(0, count, shard_size):
        numbers = range(first, min(first + shard_size, count))
        with ShardWriter(folder, numbers.start, numbers.stop, RECIPE) as shard:
            for number in numbers:
                sample = made(number, tokens)
                record = record_of(sample)
                shard.add(Entry.of(sample, Row(number, str(number), b"", (), "")), record)
                yield sample, record
            shard.publish()


def exhaust(samples: Iterator[object]) -> None:
    """For the writing alone."""
    for _ in itertools.islice(samples, None):
        pass

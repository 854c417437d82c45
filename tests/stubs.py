"""An encoder and a source without models and files, for tests of everything around them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from qie.errors import RowError
from qie.families import FAMILIES
from qie.recipe import Recipe
from qie.stages import Stage, Stages
from qie.types import Facts, Row, Sample, Shape

RECIPE = Recipe(
    family="edit",
    vae="1" * 64,
    text_encoder="2" * 64,
    tokenizer="3" * 64,
    processor="4" * 64,
    areas_px=(4096,),
    text_area_px=None,
    vae_dtype="float32",
    text_dtype="float32",
    template="5" * 64,
    resampling="6" * 64,
)
RECIPES = {
    name: replace(RECIPE, family=name, prompt_dtype=None if family.prompt_dtype == "float16" else family.prompt_dtype)
    for name, family in FAMILIES.items()
}
SHAPES = (Shape((4, 4), ((4, 4),)), Shape((4, 6), ((4, 6),)), Shape((4, 4), ((2, 4), (4, 2))))
SHAPES_WITH_NONE = (*SHAPES, Shape((4, 4), ()))


class StubEncoder:
    """Tensors of a row from its key, of the recipe's family: quick, and different for every content. Counts what it
    encodes.

    Of a family that takes rows without controls, some samples have none, whatever the row says.
    """

    def __init__(self, recipe: Recipe = RECIPE) -> None:
        self.recipe = recipe
        self._family = FAMILIES[recipe.family]
        self._shapes = SHAPES if self._family.min_controls else SHAPES_WITH_NONE
        self.encoded: list[int] = []

    @property
    def stages(self) -> Stages[list[Row], list[Sample | RowError]]:
        return Stages.of(Stage("encode", self.encode_together))

    def inspect(self, row: Row) -> Facts:
        if row.target == b"broken":
            raise RowError("the target is damaged: broken")
        key = self.recipe.key(row)
        return Facts(key, self._shapes[int(key[:8], 16) % len(self._shapes)], 5 + int(key[8], 16))

    def encode_together(self, rows: list[Row]) -> list[Sample | RowError]:
        results: list[Sample | RowError] = []
        for row in rows:
            try:
                results.append(self.encode(row))
            except RowError as error:
                results.append(error)
        return results

    def encode(self, row: Row) -> Sample:
        key, shape, length, *_ = self.inspect(row)
        self.encoded.append(row.index)
        generator = torch.Generator().manual_seed(int(hashlib.sha256(key.encode()).hexdigest()[:15], 16))

        def draw(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        prefix, channels = 4, self._family.latent_channels
        of_text = getattr(torch, self._family.prompt_dtype)
        prompt = draw(length, 8, dtype=of_text)
        empty = torch.cat([prompt[:prefix], draw(2, 8, dtype=of_text)])
        return Sample(
            key=key,
            prompt=row.prompt,
            pixel_latent=draw(channels, 1, *shape.target),
            control_latent=tuple(draw(channels, 1, *size) for size in shape.controls),
            prompt_embed=prompt,
            prompt_embeds_mask=torch.ones(length, dtype=torch.bool),
            empty_tail=empty[prefix:],
            empty_prompt_embeds_mask=torch.ones(len(empty), dtype=torch.bool),
            shared_prefix=prefix,
            image_slots=tuple(range(1, len(shape.controls) + 1)) if self._family.interleaved else None,
        )


@dataclass(frozen=True)
class StubSource:
    """Rows held in memory."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, count: int) -> StubSource:
        return cls(
            tuple(Row(n, f"row{n}", f"target {n}".encode(), (f"control {n}".encode(),), f"p{n}") for n in range(count))
        )

    def changed(self, index: int, **fields: object) -> StubSource:
        rows = list(self.rows)
        rows[index] = replace(rows[index], **fields)
        return StubSource(tuple(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.rows[index].name

    def part(self, index: int) -> str:
        return self.rows[index].source

    def read(self, index: int) -> Row:
        row = self.rows[index]
        if row.target == b"missing":
            raise RowError("no control image", where=row.name)
        return row


def without(source: StubSource, lost: Collection[int]) -> StubSource:
    """A source that lost some rows; the others are numbered anew."""
    left = [row for row in source.rows if row.index not in lost]
    return StubSource(tuple(replace(row, index=number) for number, row in enumerate(left)))

"""Variants of a row: its captions, and its images mirrored or cropped. Pure: a row in, rows out."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from qie.types import Augment, Row


@dataclass(frozen=True)
class Variants:
    """Which variants of a row are stored.

    Attributes:
        count: the maximum number.
        flip: further variants are mirrored, every other one by chance.
        crop: the smallest part of a picture's sides that further variants keep; 1 for all of it.
    """

    count: int = 1
    flip: bool = False
    crop: float = 1.0

    def of(self, row: Row) -> list[Row]:
        """The variants of a row, numbered from 0, which is the row as it is with its first caption.

        Without augmentation there are as many as the row has captions, up to `count`; with it, `count`, and captions
        take turns. What is done to a picture follows from the row's content and the variant's number alone.
        """
        prompts = (row.prompt, *row.more_prompts)
        augments = self.flip or self.crop < 1
        count = self.count if augments else min(self.count, len(prompts))
        return [
            replace(
                row,
                prompt=prompts[number % len(prompts)],
                more_prompts=(),
                variant=number,
                augment=self._draw(row, number) if augments and number else None,
            )
            for number in range(count)
        ]

    def _draw(self, row: Row, number: int) -> Augment | None:
        """What is done to the pictures of a variant; None if chance wants nothing."""
        dice = random.Random(f"{row.target_hash} {row.control_hashes} {number}")  # noqa: S311 - a pure function is wanted
        flip = dice.random() < 0.5 and self.flip
        kept = dice.uniform(self.crop, 1)
        left, top = dice.uniform(0, 1 - kept), dice.uniform(0, 1 - kept)
        box = (left, top, left + kept, top + kept)
        augment = Augment(flip, tuple(round(side, 6) for side in box))  # type: ignore[arg-type]
        return None if augment == Augment() else augment

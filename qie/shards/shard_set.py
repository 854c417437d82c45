"""Many shards of one recipe as one sequence of samples, ready to be planned and read a million at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from qie.errors import ShardError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.index import Entry, Skipped
from qie.shards.parts import Part, open_parts, require_disjoint
from qie.shards.reader import Shard, Tar, checked_sample
from qie.shards.storage import find_indexes
from qie.shards.table import PIXEL_BYTES, Columns, Table
from qie.types import Facts, Sample

Verify = Literal["off", "first", "always"]


class ShardSet:
    """Samples by position, in the order of shards and rows.

    Attributes:
        recipe: of all shards.
        table: what their indexes say of the samples.
        skipped: rows that are not among them.
        verify: when a record's hash is checked: never, when it is first read, or always. When a record is first read,
            its header is checked in any case.

    Raises:
        RecipeMismatchError: the shards are of several recipes; says which and how they differ.
        ShardError: two shards claim the same row, or there is no sample at all.
    """

    def __init__(self, parts: Iterable[Part], verify: Verify = "first") -> None:
        parts = list(parts)
        require_disjoint((tar.file, rows) for part in parts for tar, rows in zip(part.tars, part.rows, strict=True))
        self.skipped: list[Skipped] = [gone for part in parts for gone in part.skipped]
        parts = [part for part in parts if len(part.table)]
        if not parts:
            raise ShardError("the shards hold no samples", hint="see their skipped rows with qie-stats")
        self.recipe: Recipe = parts[0].recipe
        for part in parts[1:]:
            self.recipe.require_equal(
                part.recipe, part.tars[0].file, f"train on one recipe at a time; {parts[0].tars[0].file} differs"
            )
        self.table = Table.joined([part.table for part in parts])
        self.verify: Verify = verify
        self._tars = [part.tars[number] for part in parts for number in range(int(part.table.shards[-1]) + 1)]
        self._seen = bytearray(len(self.table))

    @classmethod
    def open(
        cls, places: str | Path | Iterable[str | Path], *, verify: Verify = "first", cache: ShardCache | None = None
    ) -> ShardSet:
        """The shards in one or several folders, globs or brace patterns.

        Args:
            places: paths or URLs.
            verify: see `ShardSet`.
            cache: where remote shards are kept on the local disk; without one, each sample is a request.
        """
        return cls(open_parts(find_indexes(places), cache), verify)

    def trust(self, before: ShardSet) -> None:
        """Do not check again what `before` has checked, whose shards are the first ones here."""
        self._seen[: len(before)] = before._seen

    def __len__(self) -> int:
        return len(self.table)

    @property
    def columns(self) -> Columns:
        return self.table.columns

    @property
    def digests(self) -> NDArray[np.uint8]:
        """[N, 32]: the keys."""
        return self.table.keys

    @property
    def masked(self) -> bool:
        """Whether a sample has a loss mask."""
        return bool(self.table.masked.any())

    @cached_property
    def keys(self) -> list[str]:
        return [self.table.key(position) for position in range(len(self))]

    def facts(self, position: int) -> Facts:
        """What its index says of a sample."""
        shape = self.table.shape_names[self.table.shapes[position]]
        masked = bool(self.table.masked[position])
        return Facts(self.table.key(position), shape, int(self.table.tokens[position]), masked)

    @cached_property
    def entries(self) -> list[Entry]:
        """What the indexes say, whole: read again, and large."""
        shards = [Shard(tar.file.with_suffix(".json")) for tar in self._tars]
        return [entry for shard in shards for entry in shard.index.samples]

    def load(self, position: int) -> Sample:
        """The sample at a position, 0 to len - 1, its record checked by `verify` and its header in any case.

        Raises:
            ShardError: the record is damaged or another sample's; names shard, key and offset.
            StoreError: it cannot be fetched.
        """
        tar, start, stop = self._place(position)
        where = f"{tar.file}, {self.table.key(position)}, at {start}"
        record = self._record(position, tar, start, stop, where, check=self.verify != "off")
        shape = self.table.shape_names[self.table.shapes[position]]
        sample = checked_sample(record, self.table.key(position), shape, where)
        self._require_layout(position, sample, record, where)
        self._seen[position] = 1
        return sample

    def fetch(self, position: int) -> Sample:
        """The same, for training: once it was loaded, its tensors are taken from where the index says that they are,
        without parsing its header, so it has no prompt; nor has it a thumbnail."""
        if not self._seen[position]:
            return replace(self.load(position), thumbnail=None)
        tar, start, stop = self._place(position)
        where = f"{tar.file}, {self.table.key(position)}, at {start}"
        record = self._record(position, tar, start, stop, where, check=self.verify == "always")
        return self._views(position, record)

    def _place(self, position: int) -> tuple[Tar, int, int]:
        start = int(self.table.offsets[position])
        return self._tars[self.table.shards[position]], start, start + int(self.table.sizes[position])

    def _record(self, position: int, tar: Tar, start: int, stop: int, where: str, *, check: bool) -> memoryview:
        record = tar.read(start, stop)
        if not check:
            return record
        expected = bytes(self.table.hashes[position])
        sound = hashlib.sha256(record).digest() == expected
        if not sound and tar.forget_copy():
            record = tar.read(start, stop)  # once more: the copy on this disk may be at fault
            sound = hashlib.sha256(record).digest() == expected
        if not sound:
            raise ShardError(
                "a record is damaged",
                where=where,
                expected=f"SHA-256 {expected.hex()}",
                hint="copy the shard again, or delete it with its index and run qie-precompute again",
            )
        return record

    def _views(self, position: int, record: memoryview) -> Sample:
        """The tensors of a record by the order in which safetensors writes them: by type, then by name."""
        table = self.table
        shape = table.shape_names[table.shapes[position]]
        tokens, empty_tokens = int(table.tokens[position]), int(table.empty_tokens[position])
        prefix, width = int(table.prefixes[position]), int(table.widths[position])
        height, breadth = shape.target
        thumbnail = self.recipe.thumbnail_size(shape)
        sizes = [
            sum(PIXEL_BYTES * h * w for h, w in shape.controls),
            2 * (empty_tokens - prefix) * width,
            PIXEL_BYTES * height * breadth,
            2 * tokens * width,
            height * breadth * int(table.masked[position]),
            3 * thumbnail[0] * thumbnail[1] if thumbnail else 0,
            empty_tokens,
            tokens,
        ]
        at = len(record) - sum(sizes)
        parts = []
        for size in sizes:
            parts.append(record[at : at + size])
            at += size
        half, bits = torch.float16, torch.bool
        controls, offset = [], 0
        for h, w in shape.controls:
            size = PIXEL_BYTES * h * w
            part = parts[0][offset : offset + size]
            controls.append(torch.frombuffer(part, dtype=half).view(-1, 1, h, w))
            offset += size
        tail = torch.frombuffer(parts[1], dtype=half) if sizes[1] else torch.empty(0, dtype=half)
        empty_mask = torch.frombuffer(parts[6], dtype=bits) if sizes[6] else torch.empty(0, dtype=bits)
        return Sample(
            key=table.key(position),
            prompt="",
            pixel_latent=torch.frombuffer(parts[2], dtype=half).view(-1, 1, height, breadth),
            control_latent=tuple(controls),
            prompt_embed=torch.frombuffer(parts[3], dtype=half).view(tokens, width),
            prompt_embeds_mask=torch.frombuffer(parts[7], dtype=bits),
            empty_tail=tail.view(-1, width),
            empty_prompt_embeds_mask=empty_mask,
            shared_prefix=prefix,
            loss_mask=torch.frombuffer(parts[4], dtype=torch.uint8).view(height, breadth) if sizes[4] else None,
        )

    def _require_layout(self, position: int, sample: Sample, record: memoryview, where: str) -> None:
        """Raise ShardError unless the tensors lie where `_views` takes them from."""
        views = self._views(position, record)
        pairs = [
            (sample.pixel_latent, views.pixel_latent),
            *zip(sample.control_latent, views.control_latent, strict=True),
            (sample.prompt_embed, views.prompt_embed),
            (sample.prompt_embeds_mask, views.prompt_embeds_mask),
            (sample.empty_tail, views.empty_tail),
            (sample.empty_prompt_embeds_mask, views.empty_prompt_embeds_mask),
        ]
        if sample.loss_mask is not None and views.loss_mask is not None:
            pairs.append((sample.loss_mask, views.loss_mask))
        same = (sample.loss_mask is None) == (views.loss_mask is None) and sample.shared_prefix == views.shared_prefix
        if not same or any(
            one.shape != other.shape or (one.numel() and one.data_ptr() != other.data_ptr()) for one, other in pairs
        ):
            raise ShardError(
                "the record's tensors lie elsewhere than its index says",
                where=where,
                expected="F16 before U8 before BOOL, each by name, of the sizes in the index",
            )

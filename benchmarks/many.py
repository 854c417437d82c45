"""A folder of very many samples that opens and reads as if each had been encoded: tiny ones, a few of them linked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from samples import RECIPE, made, record_of

from qie.shards.compact_index import CompactShard, write_compact
from qie.shards.index import Entry, ShardIndex, shard_stem
from qie.shards.sample_table import Table
from qie.shards.writer import ShardWriter
from qie.stores import LocalFolder
from qie.types import Row

SHARD_SIZE = 64
MOST_LINKS = 50_000
"""To one file; file systems allow little more."""


def generate(folder: Path, count: int, indexes: bool) -> int:
    """Write shards for at least `count` samples, and their compacted index; how many samples there are.

    Their tars are links to a few files. With `indexes`, each shard's own index is there, too; without, it is an empty
    file, and the samples are opened from the compacted index alone.
    """
    folder.mkdir(parents=True)
    base, tar = _base(folder.parent / f"{folder.name}-base")
    numbers = range(-(-count // SHARD_SIZE))
    for number in numbers:
        stem = shard_stem(number * SHARD_SIZE, (number + 1) * SHARD_SIZE)
        if number % MOST_LINKS == 0:
            tar = Path(shutil.copy(tar, tar.with_name(f"{number}.tar")))
        os.link(tar, folder / f"{stem}.tar")
        (folder / f"{stem}.json").write_text(_moved(base, number).to_json() + "\n" if indexes else "")
    place = LocalFolder(folder)
    write_compact(place, RECIPE, compacted(base, len(numbers), lambda stem: place.stamp(f"{stem}.json") or ""))
    return len(numbers) * SHARD_SIZE


def generate_index(folder: Path, count: int) -> int:
    """Write the compacted index of such shards alone; how many samples it tells of."""
    folder.mkdir(parents=True)
    base, _ = _base(folder.parent / f"{folder.name}-base")
    return write_compact(LocalFolder(folder), RECIPE, compacted(base, -(-count // SHARD_SIZE), lambda stem: stem))[2]


def compacted(base: ShardIndex, shards: int, stamp: Callable[[str], str]) -> Iterator[tuple[list[CompactShard], Table]]:
    """What a compacted index says of so many shards like one, a thousand at a time."""
    for start in range(0, shards, 1000):
        numbers, facts = range(start, min(start + 1000, shards)), []
        for number in numbers:
            rows = number * SHARD_SIZE, (number + 1) * SHARD_SIZE
            stem = shard_stem(*rows)
            facts.append(CompactShard(stem, base.filesize, base.sha256, stamp(stem), (), rows))
        yield facts, _table(base, len(numbers), start)


def _base(folder: Path) -> tuple[ShardIndex, Path]:
    with ShardWriter(folder, 0, SHARD_SIZE, RECIPE) as shard:
        for number in range(SHARD_SIZE):
            sample = made(number, 12 + number % 5, side=4, width=8, tail=4)
            shard.add(Entry.of(sample, Row(number, str(number), b"", (), "")), record_of(sample))
        index = shard.publish()
    return index, folder / f"{shard_stem(0, SHARD_SIZE)}.tar"


def _moved(index: ShardIndex, number: int) -> ShardIndex:
    """The same of later rows."""
    first = number * SHARD_SIZE
    samples = tuple(replace(entry, row=entry.row + first) for entry in index.samples)
    return replace(index, start=first, stop=first + SHARD_SIZE, samples=samples)


def _table(index: ShardIndex, times: int, first: int) -> Table:
    """Of so many shards like one, the first of them numbered `first`."""
    table = Table.joined([Table.of(index, "")] * times)
    return replace(table, rows=np.arange(times * SHARD_SIZE, dtype=np.int64) + first * SHARD_SIZE)

"""A folder of very many samples that opens and reads as if each had been encoded: tiny ones, a few of them linked."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from samples import RECIPE, made, record_of

from qie.shards.compact_index import Compact, CompactShard, write_compact
from qie.shards.index import Entry, ShardIndex, shard_stem
from qie.shards.sample_table import COLUMNS, Table
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
    stamps = LocalFolder(folder).stamps()
    shards = []
    for number in numbers:
        rows = number * SHARD_SIZE, (number + 1) * SHARD_SIZE
        stem = shard_stem(*rows)
        shards.append(CompactShard(stem, base.filesize, base.sha256, stamps[f"{stem}.json"], (), rows))
    write_compact(LocalFolder(folder), Compact(RECIPE, tuple(shards), _table(base, len(numbers))))
    return len(numbers) * SHARD_SIZE


def bytes_of_a_row() -> int:
    """What a sample takes in a table, and in a compacted index: by the types of the columns."""
    with tempfile.TemporaryDirectory() as folder:
        index, _ = _base(Path(folder))
        return int(sum(getattr(_table(index, 1), name).nbytes for name in COLUMNS)) // SHARD_SIZE


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


def _table(index: ShardIndex, times: int) -> Table:
    one = Table.of(index, "")
    columns = {name: np.concatenate([getattr(one, name)] * times) for name in COLUMNS}
    columns["rows"] = np.arange(times * SHARD_SIZE, dtype=np.int64)
    columns["shards"] = (columns["rows"] // SHARD_SIZE).astype(np.int32)
    return Table(**columns, shape_names=one.shape_names, source_names=one.source_names)

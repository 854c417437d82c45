"""The one door to data: shards or raw rows in, a stream out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from qie.data.samples import LiveSamples, RowEncoder, Samples
from qie.data.sources import Source, open_source
from qie.data.stream import Stream
from qie.data.variants import Versions
from qie.shards.reader import ShardSet


def open_stream(
    data: str | Path | Source | Iterable[str | Path],
    *,
    batch_size: int = 1,
    encoder: RowEncoder | None = None,
    versions: Versions | None = None,
    progress: Callable[[int], object] = lambda done: None,
    **settings: Any,
) -> Stream:
    """A stream over shards, or, given an `encoder`, over raw rows.

    Args:
        data: without an encoder, directories, globs or brace patterns of shards (one or several); with one, a source or
            its folder.
        batch_size: samples per batch of this process.
        encoder: encodes rows live, ahead in the background.
        versions: which versions of raw rows there are; one each without.
        progress: called with the number of rows looked at while raw rows are scanned.
        settings: further fields of `Stream`, such as seed, tail, rank and world_size.

    Raises:
        UsageError: nothing was found.
        ShardError: shards are damaged, or of several recipes.
    """
    place = isinstance(data, (str, Path))
    samples: Samples
    if encoder is not None:
        source = open_source(cast("str | Path", data)) if place else cast(Source, data)
        samples = LiveSamples.scan(source, encoder, versions, progress)
    else:
        samples = ShardSet.open(cast("list[str | Path]", [data] if place else data))
    return Stream(samples, batch_size, **settings)

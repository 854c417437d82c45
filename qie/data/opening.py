"""A stream that is opened by hand: `qie.open_stream`. `qie.stream_chooser` opens those of a configuration.

Over shards it imports neither the configuration nor sources of rows: they would double the time to the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qie.data.kept_samples import Keep, KeptSamples
from qie.data.stream import Samples, Stream
from qie.data.variants import Variants
from qie.shards.cache import ShardCache
from qie.shards.shard_set import ShardSet, Verify

if TYPE_CHECKING:
    from qie.data.live import RowEncoder
    from qie.data.sources import Source

Places = str | Path | Iterable[str | Path]


def open_stream(
    data: Places | Source = (),
    *,
    batch_size: int = 1,
    encoder: RowEncoder | None = None,
    shards: Places | None = None,
    index: str | Path | None = None,
    variants: Variants | None = None,
    verify: Verify = "first",
    cache: ShardCache | None = None,
    keep: Keep | None = None,
    progress: Callable[[int], object] = lambda done: None,
    **settings: Any,
) -> Stream:
    """A stream over shards, or, given an `encoder`, over raw rows.

    Args:
        data: without an encoder, folders, globs or brace patterns of shards (one or several), paths or URLs; with one,
            a source or its place.
        batch_size: samples per batch of this process.
        encoder: encodes rows live, ahead in the background.
        shards: where rows are looked for, by content, before they are encoded; only with an encoder.
        index: a compacted index that is taken at its word, see `ShardSet.open`; only without an encoder. `data` is then
            the folder of its shards, or () for that in which it lies.
        variants: which variants of raw rows there are; one each without.
        verify: when records are checked against their hashes, see `ShardSet`.
        cache: keeps remote shards on the local disk.
        keep: keeps samples in memory after their first use.
        progress: called with the number of rows looked at while raw rows are scanned.
        settings: rank, world_size, prefetch, threads and preserved of a `Stream`, and fields of `PlanSettings`: seed,
            tail, order, weights, validation_rows and others.

    Raises:
        UsageError: nothing was found.
        ShardError: shards are damaged, or of several recipes.
        StoreError: a store cannot be reached.
    """
    samples: Samples
    if encoder is None:
        samples = ShardSet.open(_listed(cast(Places, data)), index=index, verify=verify, cache=cache)
    else:
        from qie.data.live import LiveSamples, look_at_rows
        from qie.data.sources import open_source

        source = open_source(data) if isinstance(data, (str, Path)) else cast("Source", data)
        stored = None if shards is None else ShardSet.open(_listed(shards), verify=verify, cache=cache)
        variants = variants or Variants()
        known = look_at_rows(source, encoder, variants, progress, stored)
        samples = LiveSamples(source, encoder, variants, known, stored)
        settings["threads"] = max(settings.get("threads", 2), len(encoder.stages))
    return Stream.over(samples, batch_size, kept=KeptSamples(keep) if keep else None, **settings)


def _listed(places: Places) -> Iterable[str | Path]:
    return [places] if isinstance(places, (str, Path)) else places

"""The stream that a configuration asks for: over shards, over shards that are being written, or over raw rows.

Encoders are imported only where rows are encoded: who trains on shards loads none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from accelerate import Accelerator

from qie.cli.common import Progress
from qie.config import Config, required
from qie.data.follow import FollowingStream, GrowingSamples
from qie.data.stream import Stream
from qie.errors import UsageError
from qie.opening import (
    cached_stream,
    live_stream,
    open_encoder,
    open_rows,
    reading,
    require_family,
    stream_settings,
    versions,
)
from qie.stages import quick_turns
from qie.stores import open_folder

SOURCE = "SHARDS, cache.cache_dir, or a source of rows"


@contextmanager
def training_stream(
    config: Config, family: str, shards: tuple[str, ...], accelerator: Accelerator, *, follow: bool, quiet: bool
) -> Iterator[Stream]:
    """This process's batches.

    Raises:
        ConfigError: neither shards nor rows are named.
        RecipeMismatchError: the shards are of another model family.
    """
    cached = config.cache.use_cache and not config.cache.write_through
    places = shards or ((config.cache.cache_dir,) if cached and config.cache.cache_dir else ())
    if config.train.epochs and (follow or (config.cache.write_through and not places)):
        raise UsageError(
            "how long an epoch is will only be known when all shards are written",
            where="train.epochs",
            hint="give train.max_steps instead",
        )
    if not (follow or places):
        quick_turns()  # encoders work beside the training step
    if follow:
        yield _followed(config, family, places, stream_settings(config, accelerator), quiet)
    elif places:
        yield cached_stream(config, family, accelerator, places)
    elif config.cache.write_through:
        with _written_through(config, stream_settings(config, accelerator), quiet) as stream:
            yield stream
    else:
        yield _live(config, accelerator, quiet)


def _followed(
    config: Config, family: str, places: tuple[str, ...], settings: dict[str, Any], quiet: bool
) -> FollowingStream:
    if len(places) != 1:
        raise UsageError("--follow needs one folder of shards", expected="that of qie-precompute", found=list(places))
    rows = len(open_rows(config, "the source that qie-precompute encodes, to know how many rows there will be"))
    samples = GrowingSamples(
        open_folder(places[0]),
        rows,
        **reading(config),
        timeout_s=config.cache.follow_timeout_s,
        say=lambda line: None if quiet else click.echo(line, err=True),
    )
    stream = FollowingStream(samples, **settings)
    require_family(samples.recipe, family, places)
    return stream


@contextmanager
def _written_through(config: Config, settings: dict[str, Any], quiet: bool) -> Iterator[FollowingStream]:
    """Rows are encoded and written in the background; the first epoch trains on them as they come."""
    from qie.precompute import Report, Settings, precompute

    if settings["world_size"] > 1:
        raise UsageError(
            "cache.write_through is for one process",
            hint="with several, run qie-precompute beside them and train with --follow",
        )
    folder = open_folder(required(config.cache.cache_dir, "cache.cache_dir", "where cache.write_through writes"))
    source, encoder = open_rows(config, SOURCE), open_encoder(config)
    failures: list[BaseException] = []
    current = [0]

    def count(report: Report) -> None:
        current[0] = report.rows

    def write() -> None:
        try:
            chosen = Settings(versions=versions(config))
            precompute(source, encoder, folder, rows=(0, len(source)), settings=chosen, progress=count)
        except BaseException as error:  # raised by whoever waits for shards
            failures.append(error)

    def alive() -> None:
        if failures:
            raise failures[0]

    writer = threading.Thread(target=write, name="qie-write-through", daemon=True)
    writer.start()
    samples = GrowingSamples(
        folder,
        len(source),
        **reading(config),
        timeout_s=config.cache.follow_timeout_s,
        poll_s=0.2,
        alive=alive,
        current=lambda: current[0],
        say=lambda line: None if quiet else click.echo(line, err=True),
    )
    yield FollowingStream(samples, **settings)


def _live(config: Config, accelerator: Accelerator, quiet: bool) -> Stream:
    source = open_rows(config, SOURCE)
    with Progress("looking at", len(source), "rows", quiet=quiet) as progress:
        stream = live_stream(config, accelerator, source, progress.at)
    for row in stream.samples.skipped:
        click.echo(f"skipped row {row.row} ({row.name}): {row.reason}", err=True)
    return stream

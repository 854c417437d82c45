"""qie-precompute: rows in, shards out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from qie.cli.common import Progress, config_option, explained, human_bytes, quiet_libraries, quiet_option, set_option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from qie.data.sources import Source
    from qie.encode import Encoder
    from qie.precompute import Report
    from qie.shards.index import Skipped


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@config_option
@click.option("--source", metavar="FOLDER", help="Rows to encode; default data.source.")
@click.option("--output", metavar="DIR", help="Where the shards go; default cache.cache_dir.")
@click.option("--start-idx", default=0, show_default=True, metavar="A", help="First row of this run.")
@click.option("--end-idx", type=int, metavar="B", help="Row to stop before; default all rows.")
@click.option("--shard-size", default=64, show_default=True, type=click.IntRange(1), help="Rows per shard.")
@click.option("--vae-device", metavar="DEVICE", help="Overrides cache.vae_encoder_device.")
@click.option("--text-device", metavar="DEVICE", help="Overrides cache.text_encoder_device.")
@click.option(
    "--on-error",
    type=click.Choice(["skip", "stop"]),
    default="skip",
    show_default=True,
    help="Rows that cannot be encoded.",
)
@click.option("--dry-run", is_flag=True, help="Read and check every row of the range; encode and write nothing.")
@set_option
@quiet_option
@explained
def main(
    config_path: str,
    source: str | None,
    output: str | None,
    start_idx: int,
    end_idx: int | None,
    shard_size: int,
    vae_device: str | None,
    text_device: str | None,
    on_error: str,
    dry_run: bool,
    overrides: tuple[str, ...],
    quiet: bool,
) -> None:
    """Encode rows [A, B) of a source once, and write them as shards.

    Ranges can run anywhere, in any order, again after a crash: what is published and unchanged is not encoded again.

    Exits with 0 when every row is in a shard, 1 when rows were skipped (they are listed), 2 when nothing could be done.
    """
    from qie.cli.assemble import open_encoder
    from qie.config import load_config, required
    from qie.data.sources import open_source
    from qie.paths import local_path
    from qie.precompute import precompute, resolve_range

    devices = {"cache.vae_encoder_device": vae_device, "cache.text_encoder_device": text_device}
    config = load_config(config_path, [*overrides, *(f"{key}={value}" for key, value in devices.items() if value)])
    rows_from = open_source(source or required(config.data.source, "data.source", "a folder of rows, or --source"))
    directory = local_path(output or required(config.cache.cache_dir, "cache.cache_dir", "a folder, or --output"))
    first, last = resolve_range(start_idx, end_idx, len(rows_from))
    quiet_libraries()
    encoder = open_encoder(config)
    if dry_run:
        sys.exit(_dry_run(rows_from, encoder, first, last, quiet))
    with Progress("encoding", last - first, "rows", quiet=quiet) as progress:
        report = precompute(
            rows_from,
            encoder,
            directory,
            rows=(first, last),
            shard_size=shard_size,
            on_error="stop" if on_error == "stop" else "skip",
            progress=lambda done: progress.at(done.rows, f"{len(done.skipped)} skipped" if done.skipped else ""),
        )
    _print(report, directory)
    _list_skipped(report.skipped)
    sys.exit(1 if report.skipped else 0)


def _print(report: Report, directory: Path) -> None:
    click.echo(
        f"{report.encoded} rows encoded, {report.reused} there already, {len(report.skipped)} skipped; "
        f"{report.shards_written} shards written ({human_bytes(report.bytes_written)}), "
        f"{report.shards_kept} kept, in {directory}"
    )
    if report.shards_busy:
        click.echo(f"{report.shards_busy} shards are being written by another run and were left to it")
    if report.clipped:
        click.echo(f"{report.clipped} values were beyond FP16's range and were clipped; qie-stats says where")


def _dry_run(source: Source, encoder: Encoder, first: int, last: int, quiet: bool) -> int:
    """Check rows and count shapes; returns the exit code."""
    from collections import Counter

    from qie.errors import RowError
    from qie.shards.index import Skipped

    shapes: Counter[str] = Counter()
    skipped = []
    with Progress("checking", last - first, "rows", quiet=quiet) as progress:
        for number in range(first, last):
            try:
                shapes[str(encoder.inspect(source.read(number))[1])] += 1
            except RowError as error:
                skipped.append(Skipped(number, source.name(number), error.what))
            progress.at(number + 1 - first)
    good, recipe = sum(shapes.values()), encoder.recipe.digest
    click.echo(f"rows [{first}, {last}): {good} can be encoded, {len(skipped)} cannot; recipe {recipe}")
    for shape, count in shapes.most_common():
        click.echo(f"  {count:6d} × {shape}")
    _list_skipped(skipped)
    return 1 if skipped else 0


def _list_skipped(skipped: Sequence[Skipped], most: int = 20) -> None:
    for row in skipped[:most]:
        click.echo(f"skipped row {row.row} ({row.name}): {row.reason}", err=True)
    if len(skipped) > most:
        click.echo(f"… and {len(skipped) - most} more; qie-stats lists them all", err=True)

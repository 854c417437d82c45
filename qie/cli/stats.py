"""qie-stats: what shards hold, and whether they are sound."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from qie.cli.common import Progress, explained, human_bytes, quiet_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qie.stats import Summary
    from qie.stores import File


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shards", nargs=-1, required=True)
@click.option("--verify", is_flag=True, help="Rehash every shard against its index.")
@click.option("--compact", is_flag=True, help="Write one index of all shards into each folder: it opens in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@quiet_option
@explained
def main(shards: tuple[str, ...], verify: bool, compact: bool, as_json: bool, quiet: bool) -> None:
    """Summarise SHARDS: folders, globs, or patterns with {000..999} braces, paths or URLs.

    Exits with 1 when anything is wrong: unreadable or damaged shards, rows held twice, mixed recipes.
    """
    import json

    from qie.shards.storage import find_indexes
    from qie.stats import summarise

    indexes = find_indexes(shards)
    with Progress("verifying" if verify else "reading", len(indexes), "shards", quiet=quiet or not verify) as progress:
        summary = summarise(indexes, verify=verify, progress=progress.at)
    if compact and not summary.faults:
        _compact(indexes, quiet or as_json)
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print(summary, verify)
    sys.exit(1 if summary.faults else 0)


def _compact(indexes: Sequence[File], quiet: bool) -> None:
    from qie.shards.compact import write_compact
    from qie.shards.parts import compacted

    for folder in {index.folder.url: index.folder for index in indexes}.values():
        file = write_compact(folder, compacted(folder))
        if not quiet:
            click.echo(f"compacted: {file}")


def _print(summary: Summary, verified: bool) -> None:
    per_sample = summary.bytes / summary.samples if summary.samples else 0
    lines = [
        ("shards", f"{summary.shards}, {human_bytes(summary.bytes)}"),
        ("rows", f"{summary.rows}: " + ", ".join(f"[{start}, {stop})" for start, stop in summary.ranges)),
        ("samples", f"{summary.samples}, {human_bytes(per_sample)} each"),
        ("skipped", f"{sum(summary.skipped.values())}"),
        ("recipes", ", ".join(summary.recipes)),
        ("tokens", ", ".join(f"{name} {value}" for name, value in summary.tokens.items())),
        ("clipped", f"{summary.clipped} values"),
    ]
    if summary.records != summary.samples:
        lines.insert(3, ("records", f"{summary.records}: rows of equal content share one"))
    for name, value in lines:
        click.echo(f"{name:<9} {value}")
    click.echo("bytes per sample")
    for name, size in summary.tensor_bytes.items():
        click.echo(f"  {human_bytes(size):>9}  {name}")
    click.echo("shapes")
    for shape, count in summary.shapes.items():
        click.echo(f"  {count:9d}  {shape}")
    for note, count in summary.notes.items():
        click.echo(f"note: {count} × {note}")
    for shard, row, name, reason in summary.skipped_rows:
        click.echo(f"skipped row {row} ({name}) in {shard}: {reason}")
    for fault in summary.faults:
        click.echo(f"fault: {fault}", err=True)
    if verified and not summary.faults:
        click.echo("verified: every shard is what its index says")


if __name__ == "__main__":
    main()

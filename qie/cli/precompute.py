"""qie-precompute: rows in, shards out."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from qie.cli.common import JsonLog, command, config_option, quiet_option, set_option, typed_again
from qie.cli.progress import Progress
from qie.cli.terminal import echo, tell_next, tell_summary
from qie.quantities import human_bytes, human_count, human_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qie.config import Config
    from qie.data.sources import Source
    from qie.precompute import Report, Settings
    from qie.precompute.estimate import PrecomputeEstimate
    from qie.recipe import Recipe
    from qie.shards.grid import Range
    from qie.shards.index import Skipped
    from qie.stores import Folder


@command
@config_option
@click.option("--source", metavar="SOURCE", help="Rows to encode; default: data.source.")
@click.option("--output", metavar="DIR|URL", help="Where to write shards; default: cache.cache_dir.")
@click.option("--start-idx", type=int, metavar="A", help="First row to encode; default: 0.")
@click.option("--end-idx", type=int, metavar="B", help="Row to stop before; default: the end of the source.")
@click.option("--part", metavar="I/N", help="Encode part I of N. Parts 1/N to N/N together hold all rows.")
@click.option("--shard-size", default=64, show_default=True, type=click.IntRange(1, 10**6), help="Rows per shard.")
@click.option("--vae-device", metavar="DEVICE", help="Overrides cache.vae_encoder_device.")
@click.option("--text-device", metavar="DEVICE", help="Overrides cache.text_encoder_device.")
@click.option(
    "--devices", metavar="LIST", help="Run one worker process per device: cuda:0,cuda:1, or pairs VAE+TEXT,…, or all."
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Run on this machine, or on the Ray cluster at RAY_ADDRESS.",
)
@click.option("--reuse", multiple=True, metavar="DIR|URL", help="Copy the records of unchanged rows from older shards.")
@click.option(
    "--on-error",
    type=click.Choice(["skip", "stop"]),
    default="skip",
    show_default=True,
    help="What to do with a row that cannot be encoded.",
)
@click.option("--retry-skipped", is_flag=True, help="Try the skipped rows of published shards again.")
@click.option(
    "--trust-published", is_flag=True, help="Keep published shards without comparing their rows with the source."
)
@click.option(
    "--prune", is_flag=True, help="Make the shards of a source that lost rows, of records that the output has."
)
@click.option("--dry-run", is_flag=True, help="Check every row, estimate bytes and time, and write nothing.")
@click.option("--log", "log_path", metavar="FILE", help="Append progress to FILE as JSON lines.")
@set_option
@quiet_option
def main(
    config_path: str,
    source: str | None,
    output: str | None,
    dry_run: bool,
    log_path: str | None,
    overrides: tuple[str, ...],
    quiet: bool,
    **options: Any,
) -> None:
    """Encode the rows of a source once, and write them as shards.

    Runs over rows [A, B), or over part I of N, can start on any machine and in any order. Run the command again after a
    crash: it does not encode published, unchanged rows again.

    The exit code is 0 if every row is in a shard, 1 if rows were skipped (they are listed), 2 if nothing could be done.
    """
    if prepare := click.get_current_context().obj:
        prepare()
    from qie.config import load_config, required
    from qie.from_config import open_rows, precompute_config
    from qie.quiet_libraries import quiet_libraries
    from qie.stores import open_folder

    config = load_config(config_path, [*overrides, *_devices(options)])
    if source:
        config = config.model_copy(update={"data": config.data.model_copy(update={"source": source})})
    rows = open_rows(config, "a folder, a CSV file, …, or --source")
    folder = open_folder(output or required(config.cache.cache_dir, "cache.cache_dir", "a folder, or --output"))
    wanted = _wanted(options, len(rows), dry_run)
    if wanted is None:
        return
    quiet_libraries()
    settings, devices = _settings(config, options), options["devices"]
    _tell_overview(config, rows, folder, wanted, options | {"dry_run": dry_run}, quiet)
    if dry_run:
        _estimate(config, rows, folder, wanted, settings, devices, quiet)
    with Progress("encoding", wanted[1] - wanted[0], "rows", quiet=quiet) as progress, JsonLog(log_path) as log:
        run = partial(precompute_config, config, rows, folder, settings=settings, rows=wanted, devices=devices)
        run = partial(
            run, prune=options["prune"], engine=options["engine"], shard_size=options["shard_size"], say=progress.say
        )
        report = _followed(run, wanted[1] - wanted[0], progress, log)
    _print(report, folder)
    some = report.encoded or report.reused
    _finish(report.skipped, lambda: _tell_next(folder, len(rows), quiet or not some))


def _estimate(
    config: Config, rows: Source, folder: Folder, wanted: Range, settings: Settings, devices: str | None, quiet: bool
) -> NoReturn:
    """Print what a run would do; exit with 1 if rows cannot be encoded."""
    from qie.from_config import open_encoder, recipe_there, worker_configs
    from qie.precompute.estimate import estimate_precompute

    encoder = open_encoder(worker_configs(config, devices)[0] if devices else config, like=recipe_there(folder))
    with Progress("checking", wanted[1] - wanted[0], "rows", quiet=quiet) as progress:
        found = estimate_precompute(rows, encoder, folder, rows=wanted, settings=settings, progress=progress.at)
    _print_estimate(found, encoder.recipe)
    again, quiet = typed_again("precompute", flags=["--dry-run"]), quiet or not found.shapes
    _finish(
        found.skipped,
        lambda: tell_next(*again, quiet=quiet) if found.fresh else _tell_next(folder, len(rows), quiet),
    )


def _tell_overview(
    config: Config, rows: Source, folder: Folder, wanted: Range, options: dict[str, Any], quiet: bool
) -> None:
    from qie.data.sources import source_notes
    from qie.from_config import open_model
    from qie.precompute.overview import overview_lines

    if not quiet:
        workers = "those of the Ray cluster" if options["engine"] == "ray" else options["devices"]
        lines = list(overview_lines(config, open_model(config, ()), rows, folder, wanted, workers))
        watched = [] if options["dry_run"] else [("to watch", shlex.join(["qie", "watch", str(folder)]))]
        tell_summary([*lines, *watched], quiet=False)
    for note in source_notes(rows):
        echo(f"note: {note}", err=True)


def _tell_next(folder: Folder, rows: int, quiet: bool) -> None:
    """The rows that no shard holds yet, or the training."""
    from qie.precompute.overview import rows_there

    if quiet:
        return
    typed, there = click.get_current_context().params, rows_there(folder, (0, rows))
    stops, starts = [0, *(stop for _, stop in there)], [*(start for start, _ in there), rows]
    gap = next(((stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start), None)
    if gap and typed["part"] is None:
        bounds = ["--start-idx", str(gap[0]), *(["--end-idx", str(gap[1])] if gap[1] < rows else [])]
        tell_next(*typed_again("precompute", options=["--start-idx", "--end-idx"]), *bounds)
        return
    sets = [word for text in typed["overrides"] for word in ("--set", text)]
    sets += ["--set", f"data.source={typed['source']}"] if typed["source"] else []
    place = [typed["output"]] if typed["output"] else []
    later = "# once the other parts are there, too" if gap else ""
    tell_next("qie", "train", "--config", typed["config_path"], *sets, *place, rest=later)


def _check_prune(options: dict[str, Any], dry_run: bool) -> None:
    """Raise UsageError for what does not go with --prune."""
    from qie.errors import UsageError

    given = {
        "--dry-run": dry_run,
        "--trust-published": options["trust_published"],
        "--engine ray": options["engine"] == "ray",
    }
    given |= {f"--{name.replace('_', '-')}": options[name] is not None for name in ("start_idx", "end_idx", "part")}
    other = next((name for name, there in given.items() if there), None)
    if options["prune"] and other:
        raise UsageError(f"--prune cannot be combined with {other}", hint="it compares all rows with all shards")


def _wanted(options: dict[str, Any], rows: int, dry_run: bool) -> Range | None:
    """The rows of this run; None, after a line that says so, for a part without any."""
    from qie.errors import UsageError
    from qie.precompute import resolve_part, resolve_range

    _check_prune(options, dry_run)
    part, start, stop = options["part"], options["start_idx"], options["end_idx"]
    if part is None:
        return resolve_range(start or 0, stop, rows)
    if (start, stop) != (None, None):
        raise UsageError("--part cannot be combined with --start-idx or --end-idx")
    first, last = resolve_part(part, rows, options["shard_size"])
    if first == last:
        echo(f"part {part} holds no rows: the source has {rows}, in fewer shards than parts")
        return None
    return first, last


def _devices(options: dict[str, Any]) -> list[str]:
    """The devices that the command line names for this process, as overrides of the configuration."""
    from qie.errors import UsageError

    named = {"cache.vae_encoder_device": options["vae_device"], "cache.text_encoder_device": options["text_device"]}
    if options["devices"] and (any(named.values()) or options["engine"] == "ray"):
        raise UsageError("--devices cannot be combined with --vae-device, --text-device or --engine ray")
    return [f"{key}={value}" for key, value in named.items() if value]


def _settings(config: Config, options: dict[str, Any]) -> Settings:
    from qie.from_config import variants
    from qie.precompute import Settings

    names = ("on_error", "retry_skipped", "trust_published", "reuse")
    return Settings(variants=variants(config), **{name: options[name] for name in names})


def _followed(run: Callable[..., Report], rows: int, progress: Progress, log: JsonLog) -> Report:
    from qie.precompute.counts import Pace

    pace = Pace(rows)

    def follow(report: Report) -> None:
        if pace.at(report):
            progress.begin(pace.compared, pace.total)
        progress.at(report.rows, *_notes(report))
        log.at(lambda: pace.to_dict() | report.to_dict())

    report = run(progress=follow)
    pace.at(report)
    log.last(pace.to_dict() | report.to_dict())
    return report


def _notes(report: Report) -> list[str]:
    """The notes after the progress: rows skipped, the busiest stage, bytes written, and the other stages."""
    skipped = [f"{len(report.skipped)} skipped"] if report.skipped else []
    busy = [f"{human_count(report.shards_busy, 'shard')} being written by another run"] if report.shards_busy else []
    written = [human_bytes(report.bytes_written)] if report.bytes_written else []
    stages = [
        f"{name} busy {100 * share:.0f} %"
        for name, load in sorted(report.loads.items(), key=lambda one: -one[1].share(report.seconds))
        if (share := load.share(report.seconds)) >= 0.01
    ]
    return [*skipped, *busy, *stages[:1], *written, *stages[1:]]


def _print(report: Report, folder: object) -> None:
    echo(
        f"{human_count(report.rows, 'row')}: {human_count(report.encoded, 'sample')} encoded, "
        f"{report.reused:,} reused, {len(report.skipped):,} skipped; "
        f"{human_count(report.shards_written, 'shard')} written ({human_bytes(report.bytes_written)}), "
        f"{report.shards_kept:,} kept, in {folder}"
    )
    if report.encoded and report.bottleneck:
        load = report.loads[report.bottleneck]
        echo(
            f"{report.rows / report.seconds:.2f} rows/s in {human_time(report.seconds)}; "
            f"bottleneck: {report.bottleneck}, busy {load.share(report.seconds):.0%} of the time"
        )
    if report.clipped:
        echo(f"{report.clipped} values were beyond FP16's range and were clipped; qie-stats says where")
    for note, count in report.notes.most_common():
        echo(f"note: {count} × {note}")


def _print_estimate(found: PrecomputeEstimate, recipe: Recipe) -> None:
    samples, fresh = found.shapes.total(), found.fresh.total()
    echo(f"{found.rows} rows: {samples} samples can be encoded, {len(found.skipped)} cannot; recipe {recipe.digest}")
    for shape, count in found.shapes.most_common():
        echo(f"  {count:6d} × {shape.in_pixels(recipe.latent_scale)}")
    if found.with_rejected:
        echo(f"  {found.with_rejected:6d} with a rejected target")
    size = "" if found.bytes is None else f", about {human_bytes(found.bytes)} in all"
    echo(f"{fresh} to encode, {samples - fresh} to reuse{size}")
    if found.encoding_s is not None and fresh:
        echo(f"about {human_time(found.encoding_s)} on one set of devices, once the weights are loaded")


def _finish(skipped: Sequence[Skipped], last: Callable[[], None], most: int = 20) -> NoReturn:
    for row in skipped[:most]:
        echo(f"skipped row {row.row} ({row.name}): {row.reason}", err=True)
    if len(skipped) > most:
        echo(f"… and {len(skipped) - most} more; qie-stats lists them all", err=True)
    last()
    sys.exit(1 if skipped else 0)


def run() -> None:
    """The command in a process of its own, which does nothing else afterwards."""
    from qie.quiet_libraries import spare_imports

    main(obj=spare_imports)


if __name__ == "__main__":
    run()

"""qie-stats: the content and the integrity of shards, the reasons for missing rows, and the plan of an epoch."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import suppress
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from qie.cli.common import command, quiet_option, set_option
from qie.cli.progress import Progress
from qie.cli.terminal import echo
from qie.quantities import human_bytes, human_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from qie.html_report.decoding import VaeDecoder
    from qie.stats import EpochPlan, Explanation, Pairs, Summary
    from qie.stores import File, Folder

GALLERY = 24
ALL = -1
WORST = 3
"""Pairs of each kind of warning that are printed; --json and --html have more."""


class _Gallery(click.IntRange):
    """A number of samples, or all."""

    def __init__(self) -> None:
        super().__init__(0, 100)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return ALL if value in (ALL, "all") else int(super().convert(value, param, ctx))


@command
@click.argument("shards", nargs=-1, required=True)
@click.option("--verify", is_flag=True, help="Read every sample as training would, and check every hash.")
@click.option(
    "--compact", is_flag=True, help="Write one index of all shards into each folder, which then opens in seconds."
)
@click.option(
    "--source", "whole", metavar="SOURCE", help="Source of the rows; reports rows that are missing at its end."
)
@click.option(
    "--explain",
    "source",
    metavar="SOURCE",
    help="Instead, list the rows of SOURCE that the shards hold under --config, and say what changed in the others.",
)
@click.option("--config", "config_path", metavar="FILE", help="YAML configuration, for --explain.")
@set_option
@click.option(
    "--exclude",
    multiple=True,
    metavar="KEY|ROW",
    help="Instead, leave a sample out of training, by its key, the beginning of it, or its row; repeatable.",
)
@click.option("--include", multiple=True, metavar="KEY|ROW", help="Instead, undo --exclude; repeatable.")
@click.option("--plan", is_flag=True, help="Instead, show steps, padding and bytes of an epoch.")
@click.option(
    "--batch-size", type=click.IntRange(1), default=1, show_default=True, help="Batch size per process, for --plan."
)
@click.option("--world", type=click.IntRange(1), default=1, show_default=True, help="Number of processes, for --plan.")
@click.option(
    "--html", metavar="FILE", help="Also write a page with the summary, histograms, and samples with pictures."
)
@click.option(
    "--gallery",
    type=_Gallery(),
    metavar="N|all",
    default=GALLERY,
    show_default=True,
    help="Number of samples on the page, up to 100, or all rows, to be searched, sorted and paged.",
)
@click.option(
    "--vae",
    metavar="MODEL_DIR",
    help="A model, or a VAE, that decodes pictures for samples without any (cache.thumbnail_px).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@quiet_option
def main(shards: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Summarise SHARDS: folders, globs, or patterns with braces such as {a,b}/*.tar, paths or URLs.

    The exit code is 1 if anything is wrong: unreadable or damaged shards, missing or repeated rows, mixed recipes.
    """
    from qie.shards.discovery import find_indexes

    _check(options, as_json)
    if options["compact"] and not (options["verify"] or options["html"] or options["whole"] or as_json):
        sys.exit(1 if _compact(_folders(shards), quiet) else 0)
    indexes = find_indexes(shards)
    if options["exclude"] or options["include"]:
        _exclude(indexes, options["exclude"], options["include"], quiet)
    elif options["source"]:
        _explain(indexes, options, as_json, quiet)
    elif options["plan"]:
        _plan(indexes, options, as_json)
    else:
        _summarise(shards, indexes, options, as_json, quiet)


def _check(options: dict[str, Any], as_json: bool) -> None:
    from qie.errors import UsageError

    names = {"verify": "verify", "compact": "compact", "html": "html", "whole": "source", "plan": "plan"}
    chosen = [f"--{option}" for name, option in names.items() if options[name] not in (None, False)]
    if options["exclude"] or options["include"]:
        chosen += ["--explain"] if options["source"] else []
        if chosen or as_json:
            mine = "--exclude" if options["exclude"] else "--include"
            raise UsageError(
                f"{mine} cannot be combined with {chosen[0] if chosen else '--json'}",
                hint="run them one after the other",
            )
    if options["source"]:
        if chosen:
            raise UsageError(f"--explain cannot be combined with {chosen[0]}", hint="run them one after the other")
        if not options["config_path"]:
            raise UsageError("--explain needs --config", hint="pass the configuration that qie-precompute uses")
    elif options["config_path"] or options["overrides"]:
        raise UsageError("--config and --set need --explain", hint="name the rows with --explain SOURCE")
    if options["plan"] and len(chosen) > 1:
        raise UsageError(f"--plan cannot be combined with {chosen[0]}", hint="run them one after the other")
    if not options["plan"] and (options["batch_size"], options["world"]) != (1, 1):
        raise UsageError("--batch-size and --world need --plan")
    if options["html"] is None and (options["vae"] is not None or options["gallery"] != GALLERY):
        raise UsageError("--vae and --gallery need --html", hint="name the page with --html FILE")


def _summarise(
    shards: Sequence[str], indexes: Sequence[File], options: dict[str, Any], as_json: bool, quiet: bool
) -> None:
    from qie.stats import summarise

    rows = _count(options["whole"]) if options["whole"] is not None else None
    page = None if options["html"] is None else _open_page(options)
    gc.freeze()  # or the collector would walk all imported objects again and again while indexes come and go
    verify = options["verify"]
    quick = not verify and len(indexes) < 1000
    with Progress("verifying" if verify else "reading", len(indexes), "shards", quiet=quiet or quick) as progress:
        summary = summarise(indexes, verify=verify, progress=progress.at)
    if rows is not None:
        summary = summary.beside(rows)
    if page:
        summary = _write_page(page, shards, indexes, summary, options, quiet or as_json)
    if options["compact"] and not summary.faults:
        _compact({index.folder.url: index.folder for index in indexes}.values(), quiet or as_json)
    if as_json:
        _print_json(summary.to_dict())
    else:
        _print(summary, verify)
    if page and not quiet and not as_json:
        echo(f"page      {page[0]}")
    sys.exit(1 if summary.faults or summary.missing else 0)


def _open_page(options: dict[str, Any]) -> tuple[Path, VaeDecoder | None]:
    """The page's file, and the decoder of its pictures, checked before any work."""
    from qie.html_report.page import check_place

    path = check_place(options["html"])
    if options["vae"] is None:
        return path, None
    from qie.html_report.decoding import VaeDecoder
    from qie.quiet_libraries import quiet_libraries

    quiet_libraries()
    return path, VaeDecoder(options["vae"])


def _write_page(
    page: tuple[Path, VaeDecoder | None],
    shards: Sequence[str],
    indexes: Sequence[File],
    summary: Summary,
    options: dict[str, Any],
    quiet: bool,
) -> Summary:
    from qie.html_report.gallery import LOOKED_AT, pairs_looked_at
    from qie.html_report.page import write_report

    path, decoder = page
    whole = options["gallery"] == ALL
    gallery = GALLERY if whole else options["gallery"]
    due = max(gallery, LOOKED_AT) + gallery + pairs_looked_at(summary.pairs.worst) + whole * summary.samples
    with Progress("looking", due, "samples", quiet=quiet) as progress:
        return write_report(
            path,
            indexes,
            summary,
            shards,
            gallery=gallery,
            all_rows=whole,
            decoder=decoder,
            verified=options["verify"],
            progress=progress.at,
        )


def _count(place: str) -> int:
    from qie.data.sources import guess, open_source
    from qie.errors import SourceError

    try:
        return len(open_source(place, text_to_image=True))  # of any family: to count them is to read none
    except SourceError:  # of another layout than qie's own, which the configuration names
        return guess(place, text_to_image=True).rows


def _explain(indexes: Sequence[File], options: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Exits with 1 for rows and indexes that cannot be read; a missing row is an answer."""
    from qie.config import load_config
    from qie.from_config import open_encoder, open_rows, variants
    from qie.quiet_libraries import quiet_libraries
    from qie.stats import explain_rows

    quiet_libraries()
    config = load_config(options["config_path"], options["overrides"])
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": options["source"]})})
    rows, recipe = open_rows(config, "rows"), open_encoder(config).recipe
    with Progress("comparing", len(rows), "rows", quiet=quiet) as progress:
        found = explain_rows(rows, recipe, indexes, variants=variants(config), progress=progress.at)
    if as_json:
        _print_json(found.to_dict())
    else:
        _print_explanation(found)
    sys.exit(1 if found.faults or "unreadable" in found.states else 0)


def _exclude(indexes: Sequence[File], exclude: Sequence[str], include: Sequence[str], quiet: bool) -> None:
    from qie.stats import change_excluded

    changed = change_excluded(indexes, exclude, include)
    if quiet:
        return
    for what, samples in (("excluded", changed.excluded), ("included", changed.included)):
        for one in samples:
            variant = f", variant {one.variant}" if one.variant else ""
            echo(f"{what} row {one.row} ({one.name}{variant}) in {one.folder}: {one.key}")
    for file, keys in changed.lists:
        are = "key is" if keys == 1 else "keys are"
        echo(f"{keys} {are} excluded now" + (f": {file}" if keys else f" in {file.folder}"))


def _plan(indexes: Sequence[File], options: dict[str, Any], as_json: bool) -> None:
    from qie.stats import preview_epoch

    plans = preview_epoch(indexes, batch_size=options["batch_size"], world=options["world"])
    if as_json:
        _print_json([plan.to_dict() for plan in plans])
        return
    for plan in plans:
        _print_plan(plan)


def _compact(folders: Iterable[Folder], quiet: bool) -> bool:
    """Whether rows are missing between shards, which is told."""
    from qie.shards.shard_set import compact_folder

    lacking = False
    for folder in folders:
        with Progress("compacting", 0, "shards", quiet=quiet) as progress:
            file, shards, samples, missing = compact_folder(folder, progress.begin, progress.at)
        lacking = lacking or bool(missing)
        for start, stop in missing:
            echo(f"missing   [{start}, {stop}) in {folder}")
        if not quiet:
            echo(f"compacted: {file}, {shards} shards, {samples} samples, {human_bytes(file.size() or 0)}")
    return lacking


def _folders(places: Sequence[str]) -> list[Folder]:
    """The folders of shards that are named. A list of all their shards is made only where not a folder was named."""
    from qie.shards.discovery import find_indexes, index_names
    from qie.stores import StoreError, is_glob, open_folder, spelled_out

    found: dict[str, Folder] = {}
    for name in (name for place in places for name in spelled_out(place)):
        folders: list[Folder] = []
        if not is_glob(name) and not name.endswith((".tar", ".json")):
            folder = open_folder(name)
            with suppress(StoreError):
                folders = [folder] if index_names(folder.names()) else []
        # Where there are none, it says what is there instead.
        folders = folders or [index.folder for index in find_indexes(name)]
        found |= {folder.url: folder for folder in folders}
    return list(found.values())


def _print_json(value: object) -> None:
    echo(*json.dumps(value, indent=2).split("\n"), whole=True)


def _print(summary: Summary, verified: bool) -> None:
    lines = [
        ("shards", f"{summary.shards}, {human_bytes(summary.bytes)}"),
        ("rows", f"{summary.rows}: " + ", ".join(f"[{start}, {stop})" for start, stop in summary.ranges)),
        ("samples", f"{summary.samples}, {human_bytes(summary.bytes_per_sample)} each"),
        *([("rejected", _with_rejected(summary))] if summary.with_rejected else []),
        ("skipped", f"{sum(summary.skipped.values())}"),
        *([("excluded", f"{summary.excluded}")] if summary.excluded else []),
        ("recipes", ", ".join(f"{recipe} in {count}" for recipe, count in summary.recipes.items())),
        ("tokens", ", ".join(f"{name} {value}" for name, value in summary.tokens.items())),
        ("clipped", f"{summary.clipped} values in {summary.clipped_samples} samples"),
    ]
    if summary.duplicates:
        lines.insert(3, ("content", f"{summary.duplicates} samples repeat others; {summary.records} records"))
    for name, value in lines:
        echo(f"{name:<9} {value}")
    for folder, start, stop in summary.missing:
        echo(f"missing   [{start}, {stop}) in {folder}")
    echo("bytes per sample")
    for name, size in summary.tensor_bytes.items():
        echo(f"  {human_bytes(size):>9}  {name}, {human_bytes(summary.tensor_bytes_total[name])} in all")
    echo("shapes")
    _print_counts(summary.shapes)
    if 1 < len(summary.buckets) < len(summary.shapes):
        echo("buckets: sizes of targets")
        _print_counts(summary.buckets)
    if len(summary.sources) > 1:
        echo("sources")
        _print_counts(summary.sources)
    for note, count in summary.notes.items():
        echo(f"note: {count} × {note}")
    _print_pairs(summary.pairs)
    if summary.skipped:
        echo("skipped, by reason")
        _print_counts(summary.skipped)
    for shard, row, name, reason in summary.skipped_rows:
        echo(f"skipped row {row} ({name}) in {shard}: {reason}")
    for fault in summary.faults:
        echo(f"fault: {fault}", err=True)
    if verified and not summary.faults:
        echo("verified: every shard matches its index")
    if verified and summary.unhashed:
        echo(f"note: {summary.unhashed} indexes have no hash of their own: an earlier qie wrote them")


def _with_rejected(summary: Summary) -> str:
    some, have = summary.with_rejected < summary.samples, "has" if summary.with_rejected == 1 else "have"
    return f"{summary.with_rejected} {'of the samples' if some else 'samples'} {have} a rejected target"


def _print_pairs(pairs: Pairs) -> None:
    from qie.stats import KINDS

    if pairs.compared or pairs.warnings:
        found = "" if pairs.warnings else ": each lies on its control as an edit should"
        echo(f"pairs     {pairs.compared:,} compared, {human_count(pairs.captions, 'caption')}{found}")
    if pairs.compared and pairs.not_compared:
        echo(f"note: {pairs.not_compared} pairs are not compared: an earlier qie encoded them, or they were imported")
    for kind, count in pairs.warnings.items():
        echo(f"  {count:9d}  {KINDS[kind]}")
        for one in [one for one in pairs.worst if one.kind == kind][:WORST]:
            echo(f"             {one.what}: {one.words}")
            echo(
                f"               qie-stats {quote(one.folder)} {' '.join(f'--exclude {key}' for key in one.excluding)}"
            )


def _print_counts(counts: dict[str, int]) -> None:
    for name, count in counts.items():
        echo(f"  {count:9d}  {name}")


def _print_explanation(found: Explanation) -> None:
    for one in found.verdicts:
        variant = f", variant {one.variant}" if one.variant else ""
        causes = ": " + "; ".join(map(str, one.causes)) if one.causes else ""
        echo(f"row {one.row} ({one.name}{variant}): {one.state}{causes}")
    echo(f"under recipe {found.recipe}: " + ", ".join(f"{count} {state}" for state, count in found.states.items()))
    for cause, count in found.causes.items():
        echo(f"  {count:9d}  {cause}")
    for fault in found.faults:
        echo(f"fault: {fault}", err=True)


def _print_plan(plan: EpochPlan) -> None:
    left = f"{plan.fillers} places padded with weight 0" if plan.tail == "pad" else f"{plan.dropped} samples dropped"
    echo(f"tail {plan.tail}: {plan.steps} steps over {plan.samples} samples, {left}")
    echo(f"  padding   {plan.padding:.1%} of {plan.tokens} prompt tokens")
    echo(f"  per step  {human_bytes(plan.bytes_per_step)} of records, at most {human_bytes(plan.largest_step_bytes)}")


if __name__ == "__main__":
    main()

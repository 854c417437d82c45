"""The sections of the page: each a function of the summary, or of a look into records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import erf, sqrt
from shlex import quote

from qie.families import FAMILIES
from qie.html_report.all_rows import KEY_SHOWN, MOST_PROMPT, as_script
from qie.html_report.charts import coverage_strip, histogram, legend, whiskers
from qie.html_report.gallery import Card, Look, SmallPicture
from qie.html_report.latents import BINS, LatentStatistics
from qie.html_report.markup import Html, counted, cut, foreign, join, long_list, note, panel, table, tag
from qie.quantities import human_bytes
from qie.stats import KINDS, Summary

MOST_FAULTS = 100
MOST_SKIPPED = 200
MOST_FOLDERS = 12
MOST_NAMES = 20
MOST_RECIPES = 4
MOST_PLACES = 3
MOST_PATH = 120

PARTS = {
    "coverage": "Rows covered",
    "distributions": "Distributions",
    "pairs": "Pairs",
    "samples": "Samples",
    "skipped": "Skipped rows",
    "recipe": "Recipe",
}
"""The page's parts and their headings; faults stand before them, if there are any."""

_HASH_SHOWN = 16


def header(summary: Summary, places: Sequence[str], *, verified: bool, looked_at: int) -> Html:
    """The shards' places, the verdict, and the counts."""
    title = ", ".join(cut(place, MOST_PATH) for place in places[:MOST_PLACES])
    if len(places) > MOST_PLACES:
        title += f" and {len(places) - MOST_PLACES:,} more"
    return tag(
        "header",
        tag("p", "Contents of the shards", class_="soft"),
        tag("h1", tag("bdi", title)),
        _verdict(summary, verified, looked_at),
        _tiles(summary),
        tag("nav", tag("ul", *(tag("li", tag("a", text, href=f"#{name}")) for name, text in PARTS.items()))),
    )


def faults(summary: Summary) -> Html:
    """The faults; empty without any."""
    if not summary.faults:
        return join()
    lines = [tag("li", foreign(fault, 1000)) for fault in summary.faults[:MOST_FAULTS]]
    left = len(summary.faults) - len(lines)
    body = [
        long_list("Faults", tag("ol", *lines)),
        note(f"and {left:,} more faults: qie-stats prints them all") if left else "",
    ]
    return section("faults", panel(*body, class_="panel faults"))


def coverage(summary: Summary) -> Html:
    """Which rows are there, folder by folder."""
    shown = summary.coverage[:MOST_FOLDERS]
    parts = [coverage_strip(part) for part in shown]
    if len(summary.coverage) > len(shown):
        parts.append(note(f"and {len(summary.coverage) - len(shown):,} more folders"))
    return section("coverage", panel(*parts, legend()))


def sizes(summary: Summary) -> Html:
    """Sizes of targets and controls, and bytes of each tensor."""
    shapes = counted(summary.shapes, "target from controls", "samples", MOST_NAMES)
    totals = {name: f"{human_bytes(size)}" for name, size in summary.tensor_bytes.items()}
    tensors = counted(summary.tensor_bytes, "tensor", "a sample", MOST_NAMES, totals)
    parts = [panel(tag("h3", "Sizes"), shapes), panel(tag("h3", "Bytes in a sample"), tensors)]
    if len(summary.sources) > 1:
        parts.append(panel(tag("h3", "Sources"), counted(summary.sources, "source", "samples", MOST_NAMES)))
    if summary.notes:
        parts.append(panel(tag("h3", "Notes of the encoder"), counted(summary.notes, "note", "samples", MOST_NAMES)))
    return tag("div", *parts, class_="pair")


def skipped(summary: Summary) -> Html:
    """Rows that are in no shard, and why."""
    if not summary.skipped_rows:
        return section("skipped", note("No row was skipped."))
    rows = [
        (str(row), foreign(name), foreign(reason), foreign(shard, MOST_PATH))
        for shard, row, name, reason in summary.skipped_rows[:MOST_SKIPPED]
    ]
    left = len(summary.skipped_rows) - len(rows)
    return section(
        "skipped",
        panel(tag("h3", "By reason"), counted(summary.skipped, "reason", "rows", MOST_NAMES)),
        panel(
            long_list("Skipped rows", table(("row", "name", "reason", "shard"), rows, sort=True)),
            note(f"and {left:,} more skipped rows: qie-stats --json lists them all") if left else "",
        ),
    )


def recipes(summary: Summary) -> Html:
    """The recipes of the samples."""
    shown = list(summary.recipe_fields.items())[:MOST_RECIPES]
    parts = [
        panel(tag("h3", f"{digest}, in {_count(summary.recipes[digest], 'shard')}", class_="code"), _fields(fields))
        for digest, fields in shown
    ]
    if len(summary.recipe_fields) > len(shown):
        parts.append(note(f"and {len(summary.recipe_fields) - len(shown):,} more recipes"))
    return section("recipe", *parts) if parts else join()


def section(name: str, *children: str) -> Html:
    """A part of the page under its heading, which the page links to."""
    return tag("section", tag("h2", PARTS.get(name, name.capitalize())), *children, id=name)


def _verdict(summary: Summary, verified: bool, looked_at: int) -> Html:
    if summary.faults:
        words = tag("strong", _count(len(summary.faults), "fault"))
        return tag("p", words, " ", tag("a", "See below.", href="#faults"), class_="verdict bad")
    how = (
        "Every shard was rehashed."
        if verified
        else (f"Indexes were read, and {_count(looked_at, 'record')} checked; --verify rehashes every shard.")
    )
    return tag("p", tag("strong", "No faults found."), " ", tag("span", how), class_="verdict good")


def _tiles(summary: Summary) -> Html:
    tokens = summary.tokens
    beside = [f"{summary.duplicates:,} repeat others"] if summary.duplicates else []
    beside += [f"{summary.excluded:,} excluded"] if summary.excluded else []
    beside += [f"{summary.with_rejected:,} with a rejected target"] if summary.with_rejected else []
    tiles = {
        "samples": (f"{summary.samples:,}", ", ".join(beside)),
        "rows": (
            f"{summary.rows:,}",
            f"{len(summary.skipped_rows):,} skipped" if summary.skipped_rows else "none skipped",
        ),
        "shards": (f"{summary.shards:,}", human_bytes(summary.bytes)),
        "a sample": (human_bytes(summary.bytes_per_sample), _count(len(summary.shapes), "shape")),
        "prompt tokens": (f"{tokens['median']:,}", f"{tokens['min']:,} to {tokens['max']:,}") if tokens else ("–", ""),
        "clipped": (f"{summary.clipped:,}", f"values, in {_count(summary.clipped_samples, 'sample')}"),
    }
    pairs = [
        tag("div", tag("dt", name), tag("dd", large, tag("small", small))) for name, (large, small) in tiles.items()
    ]
    return tag("dl", *pairs, class_="tiles")


def _fields(fields: Mapping[str, object]) -> Html:
    rows = [(name, tag("span", foreign(_plain(value)), class_="code")) for name, value in fields.items()]
    return table(("field", "value"), rows)


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:_HASH_SHOWN]}…" if len(text) == 64 else text


def _count(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def lengths(summary: Summary) -> Html:
    """The lengths of prompts."""
    title = tag("h3", "Prompt lengths")
    if not summary.lengths:
        return panel(title, note("There are no samples."))
    label = f"Histogram of prompt lengths of {summary.samples:,} samples, with their percentiles below."
    text_alone = all(FAMILIES[str(recipe["family"])].interleaved for recipe in summary.recipe_fields.values())
    unit = "tokens of text" if text_alone else "tokens, images included"
    drawing = histogram(summary.lengths, label, unit, "samples", whole=True)
    numbers = table(list(summary.tokens), [[f"{value:,}" for value in summary.tokens.values()]], numbers=range(8))
    return panel(title, drawing, tag("div", numbers, class_="close"))


def latents(found: LatentStatistics | None) -> Html:
    """The values of the targets' latents, altogether and by channel."""
    if found is None:
        return panel(tag("h3", "Latents"), note("No record could be read."))
    mean = sum(found.means) / len(found.means)
    power = sum(deviation**2 + one**2 for deviation, one in zip(found.deviations, found.means, strict=True))
    deviation = sqrt(max(power / len(found.means) - mean**2, 0))
    facts = f"{found.values:,} values of {found.samples:,} samples, mean {mean:.3f}, standard deviation {deviation:.3f}"
    beyond = f"; {found.beyond:,} beyond ±{found.limit:g}" if found.beyond else ""
    label = f"Histogram of latent values: {facts}{beyond}."
    channels = [
        (str(n), f"{m:.3f}", f"{d:.3f}") for n, (m, d) in enumerate(zip(found.means, found.deviations, strict=True))
    ]
    return join(
        panel(
            tag("h3", "Values of latents"),
            histogram(_bins(found), label, "value", "values", curve=_normal(found)),
            note(f"{facts}{beyond}. Dashed: a normal distribution of mean 0 and deviation 1."),
        ),
        panel(
            tag("h3", "Latents by channel"),
            whiskers(
                found.means, found.deviations, "Mean and deviation by channel, as in the table.", "channel", "value"
            ),
            note("Dot: mean; line: one standard deviation on both sides. Dashed: ±1."),
            tag(
                "details",
                tag("summary", "as a table"),
                table(("channel", "mean", "deviation"), channels, numbers=(1, 2)),
            ),
        ),
    )


def gallery(look: Look, summary: Summary, other_vae: bool, all_rows: Mapping[str, object] | None = None) -> Html:
    """Samples, with their pictures if there are any.

    With `all_rows`, all of them take the place of some as soon as the page's script runs.
    """
    parts = []
    if look.cards and not any(card.pictures for card in look.cards):
        parts.append(_no_pictures())
    if other_vae and any(card.decoded for card in look.cards):
        parts.append(note("The VAE that decoded the pictures is not the one that encoded them: colours may be off."))
    if look.cards:
        cards = [_card(card) for card in look.cards]
        words = None if all_rows else "Show samples with these words"
        parts.append(tag("ul", *cards, class_="gallery", data_filter=words))
    some = note(f"{len(look.cards):,} of {summary.samples:,} samples, spread evenly over the shards.")
    if all_rows is None:
        return section("samples", some, *parts)
    data = tag("script", Html(as_script(all_rows)), type="application/json", id="all-rows")
    return section("samples", tag("div", some, *parts, data))


def pairs(look: Look, summary: Summary) -> Html:
    """What is warned of in pairs of target and control, the worst with their pictures."""
    found = summary.pairs
    parts = [note(f"{found.compared:,} targets were compared with their controls as they were encoded.")]
    if found.not_compared:
        parts.append(note(f"{found.not_compared:,} were not: an earlier qie encoded them, or they were imported."))
    if not found.warnings:
        return section("pairs", *parts, note("Nothing to warn of."))
    counts = {KINDS[kind]: count for kind, count in found.warnings.items()}
    parts.append(panel(counted(counts, "warning", "samples", len(KINDS))))
    for kind in found.warnings:
        if cards := look.pairs.get(kind):
            parts += [tag("h3", KINDS[kind].capitalize()), tag("ul", *map(_card, cards), class_="gallery")]
    return section("pairs", *parts)


def _no_pictures() -> Html:
    return panel(
        tag(
            "p",
            "These shards hold no pictures. For some, pass ",
            tag("code", "--vae MODEL_DIR"),
            ", which decodes the latents of these samples; or set ",
            tag("code", "cache.thumbnail_px: 160"),
            " and run qie-precompute into another folder, which stores them beside each sample.",
        ),
    )


def _card(card: Card) -> Html:
    entry = card.entry
    name = f"row {entry.row}" + (f", variant {entry.variant}" if entry.variant else "")
    target, _, controls = card.size.partition(" px from ")
    facts = {
        "name": foreign(entry.name, 80),
        "source": foreign(entry.source, 80) if entry.source else "",
        "size": f"{target} px",
        "from": f"{controls} px" if entry.shape.controls else "text",
        "tokens": f"{entry.tokens:,}",
        "clipped": f"{entry.clipped:,}" if entry.clipped else "",
        "key": tag("code", entry.key[:12]),
    }
    listed = [part for key, value in facts.items() if value for part in (tag("dt", key), tag("dd", value))]
    return tag(
        "li",
        tag("div", *_shots(card, name), class_="shots"),
        tag(
            "div",
            tag("h3", name),
            tag("p", cut(card.prompt, MOST_PROMPT), class_="prompt", dir="auto"),
            tag("dl", *listed),
            *(tag("p", foreign(one, 200), class_="reason") for one in (card.warning, *entry.notes) if one),
            tag("p", tag("code", _exclusion(card)), class_="command", data_copy=""),
            class_="about",
        ),
        data_key=entry.key[:KEY_SHOWN],
        data_folder=quote(card.folder),
    )


def _exclusion(card: Card) -> str:
    """The command that leaves a sample out of training."""
    return f"qie-stats {quote(card.folder)} --exclude {card.entry.key[:KEY_SHOWN]}"


def _shots(card: Card, name: str) -> list[Html]:
    """The controls, the target under its mask, and beside it the rejected target."""
    if card.pictures is None:
        return [tag("span", "no picture")]
    controls, mask = card.pictures.controls, card.pictures.mask
    made = [
        tag("div", _image(one, f"control{f' {number}' if len(controls) > 1 else ''} of {name}"), class_="shot control")
        for number, one in enumerate(controls, start=1)
    ]
    over = _image(mask, "its mask", class_="mask") if mask else ""
    target = tag("div", _image(card.pictures.target, f"target of {name}"), over, class_="shot target")
    if rejected := card.pictures.rejected:
        worse = tag("div", _image(rejected, f"rejected target of {name}"), class_="shot rejected")
        target = tag("div", target, worse, class_="both")
    return [*made, target]


def _image(picture: SmallPicture, alt: str, class_: str | None = None) -> Html:
    return tag("img", src=picture.uri, width=picture.width, height=picture.height, alt=alt, class_=class_)


def _bins(found: LatentStatistics) -> list[tuple[float, float, int]]:
    width = 2 * found.limit / BINS
    return [
        (-found.limit + number * width, -found.limit + (number + 1) * width, count)
        for number, count in enumerate(found.histogram)
    ]


def _normal(found: LatentStatistics) -> list[float]:
    """How many of the values a standard normal distribution would put into each bin."""
    return [found.values * (_below(stop) - _below(start)) for start, stop, _ in _bins(found)]


def _below(value: float) -> float:
    return (1 + erf(value / sqrt(2))) / 2

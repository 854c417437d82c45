"""The parts of the page that follow from a look into records: histograms and the gallery."""

from __future__ import annotations

from math import erf, sqrt

from qie.report.charts import histogram, whiskers
from qie.report.latents import BINS, LatentStatistics
from qie.report.looking import Card, Look
from qie.report.markup import Html, cut, join, tag
from qie.report.sections import section
from qie.report.tables import foreign, note, panel, table
from qie.stats import Summary

MOST_PROMPT = 400


def lengths(summary: Summary) -> Html:
    """How long prompts are."""
    title = tag("h3", "Prompt lengths")
    if not summary.lengths:
        return panel(title, note("There are no samples."))
    label = f"Histogram of prompt lengths of {summary.samples:,} samples; their percentiles stand below."
    drawing = histogram(summary.lengths, label, "tokens, images included", "samples", whole=True)
    numbers = table(list(summary.tokens), [[f"{value:,}" for value in summary.tokens.values()]], numbers=range(8))
    return panel(title, drawing, tag("div", numbers, class_="close"))


def latents(found: LatentStatistics | None) -> Html:
    """What values the targets' latents have, altogether and by channel."""
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
            note(f"{facts}{beyond}. Dashed: what a normal distribution of mean 0 and deviation 1 would give."),
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


def gallery(look: Look, summary: Summary, other_vae: bool) -> Html:
    """Samples, with their pictures if there are any."""
    parts = [note(f"{len(look.cards):,} of {summary.samples:,} samples, spread evenly over the shards.")]
    if look.cards and not any(card.picture for card in look.cards):
        parts.append(_no_pictures())
    if other_vae and any(card.picture and "thumbnail" not in card.entry.tensor_bytes for card in look.cards):
        parts.append(note("The VAE that decoded the pictures is not the one that encoded them: colours may be off."))
    if look.cards:
        cards = [_card(card) for card in look.cards]
        parts.append(tag("ul", *cards, class_="gallery", data_filter="Show samples with these words"))
    return section("samples", *parts)


def _no_pictures() -> Html:
    return panel(
        tag(
            "p",
            "These shards hold no thumbnails. For pictures, give ",
            tag("code", "--vae MODEL_DIR"),
            ", which decodes the latents of what is shown here; or set ",
            tag("code", "cache.thumbnail_px: 96"),
            " and precompute, which stores a small picture with each sample.",
        ),
    )


def _card(card: Card) -> Html:
    entry = card.entry
    name = f"row {entry.row}" + (f", variant {entry.variant}" if entry.variant else "")
    target, _, controls = str(entry.shape).partition(" px from ")
    facts = {
        "name": foreign(entry.name, 80),
        "source": foreign(entry.source, 80) if entry.source else "",
        "size": f"{target} px",
        "from": f"{controls} px",
        "tokens": f"{entry.tokens:,}",
        "clipped": f"{entry.clipped:,}" if entry.clipped else "",
        "key": tag("code", entry.key[:12]),
    }
    listed = [part for key, value in facts.items() if value for part in (tag("dt", key), tag("dd", value))]
    return tag(
        "li",
        tag("div", _image(card, name), class_="picture"),
        tag(
            "div",
            tag("h3", name),
            tag("p", cut(card.prompt, MOST_PROMPT), class_="prompt", dir="auto"),
            tag("dl", *listed),
            class_="about",
        ),
    )


def _image(card: Card, name: str) -> Html:
    picture = card.picture
    if picture is None:
        return tag("span", "no picture")
    return tag("img", src=picture.uri, width=picture.width, height=picture.height, alt=f"target of {name}")


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

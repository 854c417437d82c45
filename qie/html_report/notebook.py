"""What a notebook shows of rows, samples and summaries. Pages have styles; this has none but its own few."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress

from PIL import Image, ImageOps

from qie.errors import ShardError
from qie.html_report.gallery import SmallPicture
from qie.html_report.markup import MOST_CHARACTERS, Html, cut, foreign, join, table, tag
from qie.image_formats import IMAGE_FORMATS
from qie.quantities import human_bytes, human_count
from qie.shards.pictures import decode_pictures
from qie.stats import Summary
from qie.types import Row, Sample, tensors_of

MOST_FAULTS = 10
MOST_NAMES = 10


def row_html(row: Row) -> Html:
    """Its controls, target and mask as pictures, and its prompt."""
    files = {f"control {number}": one for number, one in enumerate(row.controls, start=1)} | {"target": row.target}
    for what in ("rejected", "mask"):
        if (content := getattr(row, what)) is not None:
            files[what] = content
    pictures = [_file(content, what) for what, content in files.items()]
    return tag("div", *pictures, _prompt(row.prompt), tag("p", f"row {row.index}, ", foreign(row.name)))


def _file(content: bytes, what: str) -> Html:
    try:
        with Image.open(io.BytesIO(content), formats=tuple(IMAGE_FORMATS)) as image:
            return _picture(SmallPicture.of(ImageOps.exif_transpose(image)), what)
    except Exception as error:  # Pillow's decoders raise whatever they meet
        return tag("p", f"{what} cannot be shown: ", foreign(str(error)))


def sample_html(sample: Sample) -> Html:
    """Its small pictures, where it has some, prompt, key, and the sizes of its tensors."""
    rows = [
        (name, str(list(one.shape)), str(one.dtype).removeprefix("torch."), human_bytes(one.nbytes))
        for name, one in tensors_of(sample).items()
    ]
    return tag(
        "div",
        *(_picture(SmallPicture.of(image), what) for what, image in _pictures(sample).items()),
        _prompt(sample.prompt),
        tag("p", tag("code", sample.key)),
        *(tag("p", foreign(note)) for note in sample.notes),
        table(("tensor", "shape", "type", "bytes"), rows),
    )


def summary_html(summary: Summary) -> Html:
    """The counts, the most frequent shapes and reasons, and the first faults."""
    tokens, clipped = summary.tokens, human_count(summary.clipped_samples, "sample")
    facts = {
        "samples": f"{summary.samples:,}",
        "rows": f"{summary.rows:,}",
        "shards": f"{summary.shards:,}, {human_bytes(summary.bytes)}",
        "a sample": human_bytes(summary.bytes_per_sample),
        "prompt tokens": f"{tokens['median']:,} ({tokens['min']:,} to {tokens['max']:,})" if tokens else "",
        "with a rejected target": f"{summary.with_rejected:,}" if summary.with_rejected else "",
        "excluded": f"{summary.excluded:,}" if summary.excluded else "",
        "skipped": f"{len(summary.skipped_rows):,}",
        "clipped": f"{human_count(summary.clipped, 'value')}, in {clipped}" if summary.clipped else "",
        "recipe": ", ".join(summary.recipes),
    }
    faults = [tag("li", foreign(fault)) for fault in summary.faults[:MOST_FAULTS]]
    left = len(summary.faults) - len(faults)
    return tag(
        "div",
        table(("", ""), [(name, value) for name, value in facts.items() if value]),
        _counts("shape", "samples", summary.shapes),
        _counts("skipped for", "rows", summary.skipped),
        tag("p", tag("strong", human_count(len(summary.faults), "fault"))) if faults else tag("p", "No faults found."),
        tag("ul", *faults) if faults else "",
        tag("p", f"and {left:,} more") if left else "",
    )


def _counts(name: str, unit: str, counts: Mapping[str, int]) -> Html:
    shown = list(counts.items())[:MOST_NAMES]
    left = len(counts) - len(shown)
    body = table((name, unit), [(foreign(key), f"{count:,}") for key, count in shown])
    return join(body, tag("p", f"and {left:,} more")) if left else body if shown else join()


def _pictures(sample: Sample) -> dict[str, Image.Image]:
    if sample.pictures is None:
        return {} if sample.thumbnail is None else {"target": Image.fromarray(sample.thumbnail.numpy())}
    with suppress(ShardError):
        found = decode_pictures(sample.pictures, sample.key)
        controls = {f"control {number}": one for number, one in enumerate(found.controls, start=1)}
        others = {"rejected": found.rejected, "mask": found.mask}
        return {**controls, "target": found.target, **{what: one for what, one in others.items() if one}}
    return {}


def _prompt(prompt: str) -> Html:
    return tag("p", tag("bdi", cut(prompt, MOST_CHARACTERS)), dir="auto")


def _picture(picture: SmallPicture, what: str) -> Html:
    return tag("img", src=picture.uri, width=picture.width, height=picture.height, alt=what, title=what)

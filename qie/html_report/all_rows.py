"""All rows for the page to browse: their facts as columns, their pictures in chunks that are loaded as they are seen.

A page that was opened as a file may not fetch, but it may load scripts: so facts and chunks are scripts, each the call
of one function with JSON. Few rows go into the page itself.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from qie.errors import QieError, one_line, shown
from qie.html_report.gallery import PICTURE_PX, Decode
from qie.html_report.markup import cut
from qie.shards.index import Entry, Skipped
from qie.shards.pictures import SmallPictures, encode_pictures, spots_of
from qie.shards.reader import Shard
from qie.stats import KINDS, excluded_in, warning_of
from qie.stores import File, LocalFolder, StoreError

CHUNK = 16
"""Samples whose pictures are loaded together: about 0.3 MB."""
MOST_INLINE = 128
"""So many rows, with about 2.5 MB of pictures, are in the page itself; pictures of more in files beside it."""
MOST_PROMPT = 400
MOST_NAME = 80
KEY_SHOWN = 16
"""Of a key in a command: more than nine, or digits alone would be a row's number."""

_FACTS, _PICTURES = "facts.js", "pictures-{:05d}.js"
_OURS = ("facts.js", "pictures-")

Chunk = list[Any]
"""For each sample its pictures, or null: width, height, `[name, x, width, height]` of each picture, JPEG in Base64."""


@dataclass
class _Columns:
    """The facts of all rows, as the page gets them: those with a sample first, then those without.

    Attributes:
        numbers: what stands for each text of a kind that comes again and again.
        columns: by name, a value for each row.
        reasons: for rows that have any, their numbers, by the row's place.
    """

    numbers: dict[str, dict[Any, int]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    reasons: dict[int, list[int]] = field(default_factory=dict)

    def number(self, kind: str, value: Any) -> int:
        known = self.numbers.setdefault(kind, {})
        return known.setdefault(value, len(known))

    def add(self, reasons: Sequence[str], **values: Any) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)
        if reasons:
            self.reasons[len(self.columns["row"]) - 1] = [self.number("reason", _text(one, 200)) for one in reasons]


def write_all_rows(
    indexes: Sequence[File],
    folder: LocalFolder,
    *,
    rows: int,
    decode: Decode | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> tuple[dict[str, Any], list[str]]:
    """Read facts, prompts and pictures of all rows; of many, write them to a folder.

    Args:
        indexes: of the shards. Those that cannot be read are left out.
        folder: for the files beside the page, which is made if it is needed; those of an earlier page go.
        rows: how many there are.
        decode: makes the pictures of a sample that has none.
        progress: called with the number of samples read.

    Returns:
        What the page holds itself, and what was found damaged on the way, a line each.
    """
    inline = rows <= MOST_INLINE
    _clean(folder)
    columns, faults, chunks = _Columns(), list[str](), list[Chunk]()
    skipped: list[tuple[File, Skipped]] = []
    excluded = excluded_in(indexes, [])
    chunk: Chunk = []
    for done, (shard, entry) in enumerate(_iter_samples(indexes, skipped), start=1):
        reasons = [*entry.notes]
        reasons += [KINDS[warning[0]]] if (warning := warning_of(entry)) else []
        reasons += ["excluded"] if entry.key in excluded else []
        reasons += ["values beyond FP16 were clipped"] if entry.clipped else []
        _add_sample(columns, shard, entry, reasons, faults)
        chunk.append(_attempt(shard, entry, decode, faults))
        if len(chunk) == CHUNK:
            _keep(chunk, chunks, None if inline else folder)
            chunk = []
        progress(done)
    if chunk:
        _keep(chunk, chunks, None if inline else folder)
    samples = len(columns.columns.get("row", ()))
    for file, gone in skipped:
        _add_skipped(columns, file, gone)
    facts = _facts(columns, samples)
    if inline:
        return {"facts": facts, "chunks": [*chunks], "size": CHUNK}, faults
    folder.write(_FACTS, f"qieFacts({as_script(facts)});\n".encode())
    return {"folder": folder.root.name, "size": CHUNK, "rows": len(facts["row"])}, faults


def _iter_samples(indexes: Sequence[File], skipped: list[tuple[File, Skipped]]) -> Iterator[tuple[Shard, Entry]]:
    """All samples; what is skipped is added to a list. The summary has told of shards that cannot be read."""
    for index in indexes:
        try:
            shard = Shard(index)
        except QieError:
            continue
        skipped += [(index, one) for one in shard.index.skipped]
        for entry in shard.index.samples:
            yield shard, entry


def _add_sample(columns: _Columns, shard: Shard, entry: Entry, reasons: Sequence[str], faults: list[str]) -> None:
    try:
        prompt = shard.prompt(entry)
    except QieError as error:
        faults.append(one_line(error))
        prompt, reasons = "", [*reasons, "damaged"]
    scale = shard.index.recipe.latent_scale
    target, _, controls = entry.shape.in_pixels(scale).partition(" px from ")
    area = entry.shape.target[0] * entry.shape.target[1] * scale**2
    columns.add(
        reasons,
        row=entry.row,
        variant=entry.variant,
        name=_text(entry.name, MOST_NAME),
        source=columns.number("source", _text(entry.source, MOST_NAME)),
        size=columns.number("size", (f"{target} px", controls.removesuffix(" px"), area)),
        tokens=entry.tokens,
        key=entry.key[:KEY_SHOWN],
        folder=columns.number("folder", quote(shard.file.folder.url)),
        prompt=_text(prompt, MOST_PROMPT),
    )


def _add_skipped(columns: _Columns, file: File, gone: Skipped) -> None:
    columns.add(
        [f"skipped: {gone.reason}"],
        row=gone.row,
        variant=gone.variant,
        name=_text(gone.name, MOST_NAME),
        source=columns.number("source", _text(gone.source, MOST_NAME)),
        size=columns.number("size", ("", "", 0)),
        tokens=0,
        key="",
        folder=columns.number("folder", quote(file.folder.url)),
        prompt="",
    )


def _attempt(shard: Shard, entry: Entry, decode: Decode | None, faults: list[str]) -> list[Any] | None:
    """The pictures of a sample, as the page gets them."""
    try:
        jpeg = shard.pictures_jpeg(entry)
        if jpeg is None:
            pictures = shard.pictures(entry)  # of an earlier qie
            if pictures is None and decode is not None:
                pictures = _decoded(shard, entry, decode)
            if pictures is None:
                return None
            jpeg = encode_pictures(pictures)
        (width, height), spots = spots_of(jpeg, f"{shard.file}, {entry.key}")
    except QieError as error:
        faults.append(one_line(error))
        return None
    return [width, height, [list(spot) for spot in spots], base64.b64encode(jpeg).decode()]


def _decoded(shard: Shard, entry: Entry, decode: Decode) -> SmallPictures:
    sample = shard.load(entry)
    latents = [sample.pixel_latent, *sample.control_latent]
    if sample.rejected_latent is not None:
        latents.append(sample.rejected_latent)
    images = [decode(latent.clone()) for latent in latents]
    for image in images:
        image.thumbnail((PICTURE_PX, PICTURE_PX))
    controls = 1 + len(sample.control_latent)
    return SmallPictures(images[0], tuple(images[1:controls]), rejected=next(iter(images[controls:]), None))


def _facts(columns: _Columns, samples: int) -> dict[str, Any]:
    """All columns; keys, which are equally long, in one text."""
    found = {name: values for name, values in columns.columns.items() if name != "key"}
    empty = {name: list[Any]() for name in ("row", "variant", "name", "source", "size", "tokens", "folder", "prompt")}
    names = {f"{kind}s": list(values) for kind, values in columns.numbers.items()}
    return (
        {"sources": [], "sizes": [], "folders": [], "reasons": []}
        | names
        | empty
        | found
        | {"samples": samples, "keys": "".join(columns.columns.get("key", ())), "why": columns.reasons}
    )


def _keep(chunk: Chunk, chunks: list[Chunk], folder: LocalFolder | None) -> None:
    if folder is None:
        chunks.append(chunk)
    else:
        chunks.append([])  # counted
        number = len(chunks) - 1
        folder.write(_PICTURES.format(number), f"qiePictures({number}, {as_script(chunk)});\n".encode())


def _clean(folder: LocalFolder) -> None:
    """Delete what an earlier page left, and nothing else."""
    try:
        names = [name for name in folder.listing() if name.startswith(_OURS) and name.endswith(".js")]
    except StoreError:
        return
    for name in names:
        folder.delete(name)


def _text(text: str, most: int) -> str:
    return shown(cut(text, most))


def as_script(value: object) -> str:
    """As JavaScript reads it, too: in ASCII, and without a character that could end a script."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")

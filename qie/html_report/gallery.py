"""A look into a bounded number of records, spread over all shards, for facts that no index holds."""

from __future__ import annotations

import base64
import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from PIL import Image

from qie.errors import QieError, ShardError, one_line
from qie.html_report.latents import LatentCounts, LatentStatistics
from qie.shards.discovery import rows_of
from qie.shards.index import Entry
from qie.shards.pictures import SmallPictures
from qie.shards.reader import Shard, checked_sample
from qie.shards.tensors import CHANNELS, is_text_alone
from qie.stats import PairWarning, Summary, excluded_in
from qie.stores import File

PICTURE_PX = 192
"""Longest side; larger ones are made smaller, so that a hundred fit into a page."""

_QUALITY = 88

PAIRS_OF_A_KIND, ROWS_OF_A_WARNING = 6, 3
"""Cards of each kind of warning about pairs; of rows with one caption."""

LOOKED_AT = 64
"""Records that are read, unless a larger gallery is asked for."""

Decode = Callable[[torch.Tensor], Image.Image]
"""Decodes a latent as it is stored, [C, 1, H, W], to its picture."""


@dataclass(frozen=True)
class SmallPicture:
    """A JPEG and its size in pixels."""

    width: int
    height: int
    jpeg: bytes

    @classmethod
    def of(cls, image: Image.Image, most_px: int = PICTURE_PX) -> SmallPicture:
        """An image, its longest side at most `most_px`."""
        small = image.convert("RGB")
        small.thumbnail((most_px, most_px), Image.Resampling.LANCZOS)
        content = io.BytesIO()
        small.save(content, "JPEG", quality=_QUALITY, subsampling=0, optimize=True)
        return cls(small.width, small.height, content.getvalue())

    @property
    def uri(self) -> str:
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode()}"


@dataclass(frozen=True)
class CardPictures:
    """The pictures of a card: what was there, what it should become, where the loss counts, what is liked less."""

    controls: tuple[SmallPicture, ...]
    target: SmallPicture
    mask: SmallPicture | None = None
    rejected: SmallPicture | None = None

    @classmethod
    def of(cls, pictures: SmallPictures) -> CardPictures:
        """Those that a shard holds."""
        mask, rejected = (None if one is None else SmallPicture.of(one) for one in (pictures.mask, pictures.rejected))
        return cls(tuple(map(SmallPicture.of, pictures.controls)), SmallPicture.of(pictures.target), mask, rejected)


@dataclass(frozen=True)
class Card:
    """A sample of the gallery.

    Attributes:
        entry: what its index says.
        size: of target and controls, in pixels.
        prompt: as it was encoded.
        pictures: None where the shard holds none and nothing decodes latents.
        decoded: whether they were decoded from latents.
        folder: of its shard, as a user would type it.
        warning: about the pair of target and control; empty for none.
    """

    entry: Entry
    size: str
    prompt: str
    pictures: CardPictures | None
    decoded: bool = False
    folder: str = "."
    warning: str = ""


@dataclass(frozen=True)
class Look:
    """The content of some records.

    Attributes:
        latents: of all that could be read; None if none could.
        cards: of some of them.
        pairs: cards of the worst pairs of target and control, by the kind of warning.
        faults: records that are damaged, a line each.
        done: how many records were read and latents decoded.
    """

    latents: LatentStatistics | None
    cards: list[Card]
    faults: list[str]
    done: int = 0
    pairs: dict[str, list[Card]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _SmallPart:
    """The small part of a record, which is kept."""

    entry: Entry
    size: str
    prompt: str
    latent: torch.Tensor
    controls: tuple[torch.Tensor, ...]
    rejected: torch.Tensor | None
    pictures: SmallPictures | None
    folder: str


def look_at(
    indexes: Sequence[File],
    summary: Summary,
    *,
    gallery: int,
    decode: Decode | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> Look:
    """Read `LOOKED_AT` records, or `gallery` if that is more: of the same shards the same ones each time.

    Args:
        indexes: of the shards.
        summary: of the same shards; one that is known to have a fault is blamed no second time.
        gallery: how many samples become cards.
        decode: makes the pictures of a sample that has none.
        progress: called with the number of records read and latents decoded.
    """
    counts, kept, faults, done = LatentCounts(), list[_SmallPart](), list[str](), 0
    excluded = excluded_in(indexes, []) if summary.excluded else frozenset()
    for file, read in _read(indexes, max(gallery, LOOKED_AT), excluded):
        progress(done := done + 1)
        if isinstance(read, _SmallPart):
            counts.add(read.latent)
            kept.append(read)
        elif not _is_blamed(file, summary):
            faults.append(one_line(read))
    cards = []
    for one in (kept[place] for place in spread(gallery, len(kept))):
        cards.append(_card(one, decode))
        progress(done := done + 1)
    pairs: dict[str, list[Card]] = {}
    for warning, part in _read_warned(indexes, summary.pairs.worst):
        pairs.setdefault(warning.kind, []).append(replace(_card(part, decode), warning=warning.words))
        progress(done := done + 1)
    return Look(counts.statistics(), cards, faults, done, pairs)


def _card(part: _SmallPart, decode: Decode | None) -> Card:
    pictures = _pictures(part, decode)
    decoded = part.pictures is None and pictures is not None
    return Card(part.entry, part.size, part.prompt, pictures, decoded, part.folder)


def pairs_looked_at(warnings: Sequence[PairWarning]) -> int:
    """How many records are read for warnings, at most."""
    return len(list(_shown_rows(warnings)))


def _shown_rows(warnings: Sequence[PairWarning]) -> Iterator[tuple[PairWarning, int]]:
    """The warnings that have cards, of each kind the worst, and a row of theirs."""
    room = dict.fromkeys((one.kind for one in warnings), PAIRS_OF_A_KIND)
    for one in warnings:
        for row in one.rows[: min(room[one.kind], ROWS_OF_A_WARNING)]:
            room[one.kind] -= 1
            yield one, row


def _read_warned(indexes: Sequence[File], warnings: Sequence[PairWarning]) -> Iterator[tuple[PairWarning, _SmallPart]]:
    """The records that warnings are about. What cannot be read is left out: `--verify` blames it."""
    for warning, row in _shown_rows(warnings):
        with suppress(QieError):
            for file in indexes:
                start, stop = rows_of(file)
                if file.folder.url != warning.folder or not start <= row < stop:
                    continue
                shard, wanted = Shard(file), (row, warning.variant)
                for entry in (one for one in shard.index.samples if (one.row, one.variant) == wanted):
                    if isinstance(part := _attempt(shard, entry), _SmallPart):
                        yield warning, part


def spread(count: int, among: int) -> list[int]:
    """`count` of the numbers below `among`, evenly spread; all of them if there are no more."""
    count = min(count, among)
    return [(2 * number + 1) * among // (2 * count) for number in range(count)]


def _read(
    indexes: Sequence[File], count: int, excluded: frozenset[str]
) -> Iterator[tuple[File, _SmallPart | QieError]]:
    """Records of each shard that are not excluded, in proportion to its rows; or the error of the shard or record."""
    stops = list(accumulate(stop - start for start, stop in map(rows_of, indexes)))
    due = Counter(bisect_right(stops, row) for row in spread(count, stops[-1]))
    for place, wanted in sorted(due.items()):
        file = indexes[place]
        try:
            shard = Shard(file)
        except QieError as error:
            yield file, error
            continue
        entries = [entry for entry in shard.index.samples if entry.key not in excluded]
        for number in spread(wanted, len(entries)):
            yield file, _attempt(shard, entries[number])


def _attempt(shard: Shard, entry: Entry) -> _SmallPart | QieError:
    where = f"{shard.file}, {entry.key}"
    try:
        # A copy of the record, since the larger part of it is to be forgotten again; torch wants one that is writable.
        record = memoryview(bytearray(shard.verified_record(entry)))
        sample = checked_sample(record, entry.key, entry.shape, where)
        channels = CHANNELS[is_text_alone(shard.index.recipe)]
        if len(sample.pixel_latent) != channels or not torch.isfinite(sample.pixel_latent).all():
            raise ShardError("a latent has another number of channels, or holds NaN or infinity", where=where)
        pictures = shard.pictures(entry)
    except QieError as error:
        return error
    size = entry.shape.in_pixels(shard.index.recipe.latent_scale)
    controls = tuple(one.clone() for one in sample.control_latent) if pictures is None else ()
    rejected = sample.rejected_latent if pictures is None else None
    latent, folder = sample.pixel_latent.clone(), shard.file.folder.url
    rejected = None if rejected is None else rejected.clone()
    return _SmallPart(entry, size, sample.prompt, latent, controls, rejected, pictures, folder)


def _is_blamed(file: File, summary: Summary) -> bool:
    start, _ = rows_of(file)
    return any(
        part.folder == file.folder.url and any(first <= start < stop for first, stop in part.faulty)
        for part in summary.coverage
    )


def _pictures(kept: _SmallPart, decode: Decode | None) -> CardPictures | None:
    if kept.pictures is not None:
        return CardPictures.of(kept.pictures)
    if decode is None:
        return None
    target, *controls = (SmallPicture.of(decode(one)) for one in (kept.latent, *kept.controls))
    rejected = None if kept.rejected is None else SmallPicture.of(decode(kept.rejected))
    return CardPictures(tuple(controls), target, rejected=rejected)

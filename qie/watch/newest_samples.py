"""The samples that were written last, with their pictures and prompts, from a few of the newest shards."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from qie.errors import QieError
from qie.shards.index import Entry, member_name, pictures_name
from qie.shards.reader import Shard
from qie.stores import File, Folder
from qie.watch.live_page import WebFile

NEWEST = 10
SHARDS = 3
"""So many shards are opened at most."""

_HEAD_BYTES = 1 << 15
_PICTURE = re.compile(r"([0-9a-f]{64})\.jpg")


@dataclass(frozen=True)
class NewSample:
    """A sample of a new shard; `stem` is the shard's name."""

    stem: str
    key: str
    row: int
    variant: int
    name: str
    size: str
    prompt: str
    picture: str | None


@dataclass
class NewestSamples:
    """Keeps the newest samples of a folder. Opens a shard when it is among the newest, and once."""

    folder: Folder
    samples: list[NewSample] = field(default_factory=list)
    _stems: tuple[str, ...] = ()
    _shards: dict[str, Shard] = field(default_factory=dict)

    def look(self, stems: Sequence[str]) -> list[NewSample]:
        """The last samples of the shards `stems`, the newest shard first. One that cannot be read is left out: the
        indexes' faults are told elsewhere."""
        wanted = tuple(stems[:SHARDS])
        if wanted != self._stems:
            self._shards = {stem: shard for stem in wanted if (shard := self._opened(stem)) is not None}
            # A shard that was just being replaced is tried again at the next look.
            self._stems = wanted if len(self._shards) == len(wanted) else ()
            found = [(stem, entry) for stem, shard in self._shards.items() for entry in reversed(shard.index.samples)]
            self.samples = [self._sample(stem, entry) for stem, entry in found[:NEWEST]]
        return self.samples

    def picture(self, name: str) -> WebFile | None:
        """The controls and the target of a sample, side by side, by the name that it was given."""
        match = _PICTURE.fullmatch(name)
        for shard in self._shards.values() if match else ():
            entry = shard.by_key.get(match[1]) if match else None
            if entry is not None:
                try:
                    content = _jpeg(shard, entry)
                except QieError:
                    return None
                return WebFile(content, "image/jpeg") if content else None
        return None

    def stem_of(self, key: str) -> str | None:
        """The shard of a sample that is shown."""
        return next((one.stem for one in self.samples if one.key == key), None)

    def _opened(self, stem: str) -> Shard | None:
        if stem in self._shards:
            return self._shards[stem]
        try:
            return Shard(File(self.folder, f"{stem}.json"))
        except QieError:
            return None

    def _sample(self, stem: str, entry: Entry) -> NewSample:
        shard = self._shards[stem]
        size = entry.shape.in_pixels(shard.index.recipe.latent_scale)
        picture = f"{entry.key}.jpg" if _has_picture(shard, entry) else None
        return NewSample(stem, entry.key, entry.row, entry.variant, entry.name, size, _prompt(shard, entry), picture)


def _has_picture(shard: Shard, entry: Entry) -> bool:
    """Whether a picture can be had without all of the record. Those of an earlier qie lie in it."""
    old = "thumbnail" in entry.tensor_bytes and shard.file.path is not None
    return old or pictures_name(entry.key) in shard.index.pictures


def _jpeg(shard: Shard, entry: Entry) -> bytes | None:
    """The controls and the target, side by side, as they are stored; or the target alone. Raises ShardError for what
    no browser should be given."""
    found = shard.pictures(entry)
    content = shard.pictures_jpeg(entry)
    if found is not None and content is None:
        drawn = io.BytesIO()
        found.target.save(drawn, "JPEG", quality=88)
        content = drawn.getvalue()
    return content


def _prompt(shard: Shard, entry: Entry) -> str:
    """From the head of the record, which is read without the rest; empty where that does not say."""
    member = shard.index.files[member_name(entry.key)]
    try:
        head = bytes(shard.tar.read(member.offset, member.offset + min(member.size, _HEAD_BYTES)))
        length = int.from_bytes(head[:8], "little")
        prompt = json.loads(json.loads(head[8 : 8 + length])["__metadata__"]["qie"])["prompt"]
    except (QieError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return prompt if isinstance(prompt, str) else ""

"""The samples that were written last, with their pictures and prompts, from a few of the newest shards."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from qie.errors import QieError
from qie.html_report.gallery import SmallPicture
from qie.shards.index import Entry, member_name, pictures_name
from qie.shards.reader import Shard
from qie.stores import File, Folder
from qie.watch.live_page import WebFile

NEWEST = 10
MOST_PICTURES = 10
_HEAD_BYTES = 1 << 15
_PICTURE = re.compile(r"([0-9a-f]{64})-(\d)\.jpg")


@dataclass(frozen=True)
class NewSample:
    """A sample of a new shard.

    Attributes:
        stem: name of the shard.
        size: of target and controls, in words.
        pictures: names of those of the controls, of the target, and of the rejected target; none where there are none.
        paired: whether the last of them is the rejected target's.
    """

    stem: str
    key: str
    row: int
    variant: int
    name: str
    size: str
    prompt: str
    pictures: list[str]
    paired: bool


@dataclass
class NewestSamples:
    """Keeps the newest samples of a folder, and those before: a page that shows them may still ask. Opens a shard when
    it is among the newest, and once."""

    folder: Folder
    samples: list[NewSample] = field(default_factory=list)
    _stems: tuple[str, ...] = ()
    _shards: dict[str, Shard] = field(default_factory=dict)
    _places: dict[str, tuple[Shard, Entry]] = field(default_factory=dict)
    _before: dict[str, tuple[Shard, Entry]] = field(default_factory=dict)
    _jpegs: dict[str, list[bytes]] = field(default_factory=dict)

    def look(self, stems: Sequence[str]) -> list[NewSample]:
        """The last samples of the shards `stems`, the newest shard first. One that cannot be read is left out: the
        indexes' faults are told elsewhere."""
        wanted = tuple(stems[:NEWEST])
        if wanted != self._stems:
            found: list[tuple[Shard, Entry]] = []
            shards, whole = dict[str, Shard](), True
            for stem in wanted:
                if len(found) < NEWEST:
                    if (shard := self._opened(stem)) is None:
                        whole = False  # perhaps just being replaced: it is tried again at the next look
                        continue
                    shards[stem] = shard
                    found += [(shard, entry) for entry in reversed(shard.index.samples)]
            self._shards, self._stems = shards, wanted if whole else ()
            found = found[:NEWEST]
            self.samples = [_sample(shard, entry) for shard, entry in found]
            self._before, self._places = self._places, {entry.key: (shard, entry) for shard, entry in found}
            self._jpegs = {key: jpegs for key, jpegs in self._jpegs.items() if self._place(key)}
        return self.samples

    def picture(self, name: str) -> WebFile | None:
        """A picture by the name that it was given."""
        match = _PICTURE.fullmatch(name)
        place = self._place(match[1]) if match else None
        if match is None or place is None:
            return None
        key, number = match[1], int(match[2])
        if key not in self._jpegs:
            self._jpegs[key] = _jpegs(*place)
        jpegs = self._jpegs[key]
        return WebFile(jpegs[number], "image/jpeg") if number < len(jpegs) else None

    def index_of(self, key: str) -> File | None:
        """The index of the shard of a sample that is shown."""
        place = self._place(key)
        return None if place is None else place[0].file.with_suffix(".json")

    def _place(self, key: str) -> tuple[Shard, Entry] | None:
        return self._places.get(key) or self._before.get(key)

    def _opened(self, stem: str) -> Shard | None:
        if stem in self._shards:
            return self._shards[stem]
        try:
            return Shard(File(self.folder, f"{stem}.json"))
        except QieError:
            return None


def _sample(shard: Shard, entry: Entry) -> NewSample:
    size = entry.shape.in_pixels(shard.index.recipe.latent_scale)
    names = [f"{entry.key}-{number}.jpg" for number in range(_pictures_of(shard, entry))]
    stem, prompt = shard.file.stem, _prompt(shard, entry)
    return NewSample(stem, entry.key, entry.row, entry.variant, entry.name, size, prompt, names, _is_pair(entry))


def _pictures_of(shard: Shard, entry: Entry) -> int:
    """How many can be had without all of the record. Those of an earlier qie, of targets alone, lie in it."""
    if pictures_name(entry.key) in shard.index.pictures:
        return min(len(entry.shape.controls) + 1 + _is_pair(entry), MOST_PICTURES)
    return int("thumbnail" in entry.tensor_bytes and shard.file.path is not None)


def _is_pair(entry: Entry) -> bool:
    return "rejected_latent" in entry.tensor_bytes


def _jpegs(shard: Shard, entry: Entry) -> list[bytes]:
    """The controls and both targets, written anew: what a browser gets is what this process could read."""
    try:
        found = shard.pictures(entry)
    except QieError:
        return []
    if found is None:
        return []
    shown = (*found.controls, found.target, found.rejected)
    return [SmallPicture.of(one).jpeg for one in shown if one is not None]


def _prompt(shard: Shard, entry: Entry) -> str:
    """From the head of the record, which is read without the rest; empty where that does not say."""
    member = shard.index.files[member_name(entry.key)]
    try:
        head = bytes(shard.tar.read(member.offset, member.offset + min(member.size, _HEAD_BYTES)))
        length = int.from_bytes(head[:8], "little")
        prompt = json.loads(json.loads(head[8 : 8 + length])["__metadata__"]["qie"])["prompt"]
    except (QieError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return prompt.encode("utf-8", "replace").decode() if isinstance(prompt, str) else ""

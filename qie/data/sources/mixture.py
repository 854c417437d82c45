"""Several sources as one, in the order they are given."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path

from qie.data.sources.layouts import Layout, Names
from qie.data.sources.resolve import readable
from qie.data.sources.source import Source, source_notes
from qie.errors import RowError, SourceError
from qie.types import Row


@dataclass(frozen=True)
class SourceSpec:
    """One source of a mixture.

    Attributes:
        source: anything that `open_source` understands.
        name: its name in the mixture; the name of its file or folder when None.
        weight: how often its rows are drawn, relative to those of the others; sources only carry it.
        preset, columns, root: how it is read, see `open_source`.
        replace: words of its prompts, and what stands in their place. Of a preserved source's rows and captions, only
            those that have such words are there.
        preserve: the model is to keep what it did with these rows before training; sources only carry it.
    """

    source: str
    name: str | None = None
    weight: float = 1.0
    preset: str | None = None
    columns: Names | Mapping[str, object] | None = None
    root: str | None = None
    replace: Mapping[str, str] | None = None
    preserve: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise SourceError(
                "an entry of the mixture names no source", expected="source: a path or URL", found=self.source
            )
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise SourceError("the name of a source is not text", where=self.source, found=repr(self.name))
        number = isinstance(self.weight, (int, float)) and not isinstance(self.weight, bool)
        if not number or not math.isfinite(self.weight) or self.weight <= 0:
            raise SourceError(
                "the weight of a source is not a positive number", where=self.source, found=repr(self.weight)
            )
        words = self.replace or {}
        if not isinstance(words, Mapping) or not all(isinstance(one, str) for pair in words.items() for one in pair):
            raise SourceError("words are replaced by words", where=self.source, found=repr(words))
        if "" in words:
            raise SourceError("no words are to be replaced", where=self.source, found=repr(dict(words)))

    @classmethod
    def of(cls, spec: str | Path | SourceSpec | Mapping[str, object]) -> SourceSpec:
        """A spec as it may be written. Raises SourceError for another type, or fields that are unknown or wrong."""
        if isinstance(spec, SourceSpec):
            return spec
        if isinstance(spec, (str, Path)):
            return cls(str(spec))
        known = [field.name for field in fields(cls)]
        if not isinstance(spec, Mapping) or "source" not in spec or set(spec) - set(known):
            found = ", ".join(map(str, spec)) if isinstance(spec, Mapping) else type(spec).__name__
            raise SourceError("an entry of the mixture is malformed", expected=", ".join(known), found=found)
        values = dict(spec)
        if isinstance(values["source"], Path):
            values["source"] = str(values["source"])
        return cls(**values)  # type: ignore[arg-type]

    @property
    def layout(self) -> Layout:
        """How it is read. Raises SourceError for an unknown preset or role."""
        return Layout.of(self.preset, self.columns, self.root)

    @property
    def title(self) -> str:
        """Its name in the mixture."""
        return readable(self.name or _stem(self.source))


@dataclass(frozen=True)
class Reworded:
    """The rows of a source, with other words in their prompts.

    Attributes:
        source: the rows.
        words: what is replaced, and by what.
        required: only rows, and of their captions those, that have such words are there.
    """

    source: Source
    words: Mapping[str, str]
    required: bool = False

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    @property
    def notes(self) -> list[str]:
        return source_notes(self.source)

    def read(self, index: int) -> Row:
        row = self.source.read(index)
        prompts = [row.prompt, *row.more_prompts]
        if self.required:
            prompts = [prompt for prompt in prompts if any(words in prompt for words in self.words)]
        if not prompts:
            raise RowError(
                "its prompt has none of the words to replace", where=row.name, expected=" or ".join(self.words)
            )
        first, *more = map(self._of, prompts)
        return replace(row, prompt=first, more_prompts=tuple(more))

    def _of(self, prompt: str) -> str:
        for words, others in self.words.items():
            prompt = prompt.replace(words, others)
        return prompt


@dataclass(frozen=True)
class MixturePart:
    """A source in a mixture, its name there, and its weight."""

    name: str
    weight: float
    source: Source


@dataclass(frozen=True)
class Mixture:
    """The rows of several sources, one source after the other. Indices count through all of them."""

    parts: tuple[MixturePart, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, sources: Sequence[tuple[SourceSpec, Source]]) -> Mixture:
        """A mixture of opened sources. Raises SourceError when there are none, or two have one name."""
        parts = tuple(
            MixturePart(
                spec.title,
                spec.weight,
                Reworded(source, dict(spec.replace), required=spec.preserve) if spec.replace else source,
            )
            for spec, source in sources
        )
        if not parts:
            raise SourceError("the mixture has no sources")
        names = [part.name for part in parts]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise SourceError(
                    "two sources of the mixture have the same name",
                    where=sources[number][0].source,
                    found=f"{name}, also the name of {sources[names.index(name)][0].source}",
                    hint="give each its own name: {source: …, name: …}",
                )
        return cls(parts, tuple(accumulate(len(part.source) for part in parts)))

    def __len__(self) -> int:
        return self.stops[-1]

    def name(self, index: int) -> str:
        part, within = self._find(index)
        return part.source.name(within)

    def part(self, index: int) -> str:
        return self._find(index)[0].name

    @property
    def notes(self) -> list[str]:
        return [f"{part.name}: {note}" for part in self.parts for note in source_notes(part.source)]

    def read(self, index: int) -> Row:
        part, within = self._find(index)
        return replace(part.source.read(within), index=range(len(self))[index], source=part.name)

    def _find(self, index: int) -> tuple[MixturePart, int]:
        index = range(len(self))[index]
        number = bisect_right(self.stops, index)
        return self.parts[number], index - (self.stops[number] - len(self.parts[number].source))


def _stem(place: str) -> str:
    """The last part of a place that is a name and no pattern, without its ending."""
    for part in reversed(place.partition("?")[0].rstrip("/").split("/")):
        stem = re.sub(r"\.(csv|jsonl|ndjson|parquet|tar)$", "", part.partition("@")[0], flags=re.IGNORECASE)
        if stem not in ("", ".", "..", "~") and not re.search(r"[*?\[{]", stem):
            return stem
    return "source"

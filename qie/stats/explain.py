"""Why a row is or is not in shards: the inputs, or the fields of the recipe, that changed since they were written."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from qie.data.sources import Source, source_name
from qie.data.variants import Variants
from qie.errors import QieError, RowError, one_line
from qie.recipe import Recipe, brief
from qie.shards.excluded import EXCLUDED_NAME
from qie.shards.index import ShardIndex, Skipped, read_index, row_inputs
from qie.stages import Pipeline, Stage
from qie.stats.summary import excluded_in
from qie.stores import File
from qie.types import Row

READERS = 16

State = Literal["hit", "excluded", "stale", "miss", "skipped", "unreadable"]


@dataclass(frozen=True)
class Cause:
    """A reason why a row is not a hit.

    Attributes:
        what: an input (target, control n, prompt, mask, augment), a field of the recipe, or row.
        how: what became of it.
    """

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what} {self.how}"


@dataclass(frozen=True)
class Verdict:
    """The state of one variant of a row in the shards.

    Attributes:
        row, variant, name, source: as the source calls it now.
        state: hit: its record is there. excluded: it is, and an exclude list leaves it out. stale: there is one of the
            row as it was, or by another recipe. miss: there is none. skipped: encoding it failed before. unreadable:
            the source cannot give it now.
        causes: empty for a hit.
    """

    row: int
    variant: int
    name: str
    source: str
    state: State
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Verdicts on all rows of a source.

    Attributes:
        recipe: digest of the recipe asked for.
        verdicts: in the order of rows and variants.
        faults: indexes that cannot be read, a line each; their rows count as missing.
    """

    recipe: str
    verdicts: list[Verdict]
    faults: list[str]

    @property
    def states(self) -> dict[str, int]:
        """State -> number of rows."""
        return dict(Counter(verdict.state for verdict in self.verdicts))

    @property
    def causes(self) -> dict[str, int]:
        """Changed input or field -> number of rows."""
        return dict(Counter(cause.what for verdict in self.verdicts for cause in verdict.causes).most_common())

    def to_dict(self) -> dict[str, Any]:
        return {"states": self.states, "causes": self.causes} | asdict(self)


def explain_rows(
    source: Source,
    recipe: Recipe,
    indexes: Sequence[File],
    *,
    variants: Variants | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> Explanation:
    """Compare the rows of a source, under a recipe, with what shards hold.

    A row is found by its content; else it is compared with the row of its name, of those with that name the one that
    differs least. Rows are read, but not decoded.
    """
    variants = variants or Variants()
    known = _Known.of(indexes)

    def look(number: int) -> list[Verdict]:
        try:
            rows = variants.of(source.read(number))
        except RowError as error:
            name, part = source.name(number), source_name(source, number)
            return [Verdict(number, 0, name, part, "unreadable", (Cause("row", f"cannot be read: {error.what}"),))]
        return [Verdict(number, row.variant, row.name, row.source, *known.verdict(row, recipe)) for row in rows]

    verdicts = []
    for done, found in enumerate(Pipeline(Stage("look", look, READERS)).run(range(len(source))), start=1):
        verdicts += found
        progress(done)
    return Explanation(recipe.digest, verdicts, known.faults)


class _Older(NamedTuple):
    """The content of a row as an older entry records it."""

    recipe: Recipe
    key: str
    inputs: dict[str, str]


@dataclass
class _Known:
    """The entries of shards, by content and by the name of their row."""

    keys: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    entries: dict[tuple[str, str, int], list[_Older]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[tuple[str, str, int], Skipped] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    excluded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, indexes: Sequence[File]) -> _Known:
        known = cls()
        known.excluded = excluded_in(indexes, known.faults)
        for index in Pipeline(Stage("read", _attempt, READERS)).run(indexes):
            if isinstance(index, QieError):
                known.faults.append(one_line(index))
            else:
                known.add(index)
        return known

    def add(self, index: ShardIndex) -> None:
        for entry in index.samples:
            self.keys.add(entry.key)
            older = _Older(index.recipe, entry.key, entry.inputs)
            self.entries[entry.source, entry.name, entry.variant].append(older)
        for gone in index.skipped:
            self.skipped[gone.source, gone.name, gone.variant] = gone
            if gone.key is not None:
                self.reasons[gone.key] = gone.reason

    def verdict(self, row: Row, recipe: Recipe) -> tuple[State, tuple[Cause, ...]]:
        key, place = recipe.key(row), (row.source, row.name, row.variant)
        if key in self.keys and key in self.excluded:
            return "excluded", (Cause("row", f"is left out by {EXCLUDED_NAME}"),)
        if key in self.keys:
            return "hit", ()
        if key in self.reasons:
            return "skipped", (Cause("row", f"cannot be encoded: {self.reasons[key]}"),)
        if place in self.entries:
            compared = [tuple(_causes(row, recipe, older)) for older in self.entries[place]]
            return "stale", min(compared, key=len)
        if place in self.skipped:
            return "miss", (Cause("row", f"was skipped: {self.skipped[place].reason}"),)
        return "miss", (Cause("row", "is in none of the shards, by content or by name"),)


def _attempt(file: File) -> ShardIndex | QieError:
    try:
        return read_index(file)
    except QieError as error:
        return error


def _causes(row: Row, recipe: Recipe, older: _Older) -> Iterator[Cause]:
    """The differences between a row and an entry of other content."""
    now, then = row_inputs(row), older.inputs
    if then:
        for name in [*now, *(then.keys() - now.keys())]:
            if now.get(name) != then.get(name):
                yield Cause(name, "is new" if name not in then else "is gone" if name not in now else "changed")
    elif older.recipe.key(row) != older.key:
        yield Cause("an input", "changed; indexes without inputs do not say which")
    for one in fields(Recipe):
        old, new = getattr(older.recipe, one.name), getattr(recipe, one.name)
        if old != new:
            yield Cause(one.name, f"was {brief(old)}, is {brief(new)}")

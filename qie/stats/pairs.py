"""Warnings of what spoils an edit's training: pairs that do not lie on each other, and captions that repeat.

All of it is counted from indexes. None of it is a fault of the shards: an edit may mean to zoom, or to paint beyond the
picture, and a set may have one caption on purpose.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from qie.shards.index import Entry
from qie.stores import File
from qie.types import PAIR_WARNINGS, Pair

KINDS = {
    **PAIR_WARNINGS,
    "repeated_caption": "one caption on several edits, where most stand alone",
    "several_captions": "one target under several captions, where most have one",
}
"""Kinds of warnings, in the order in which they are told."""

WORST = 12
"""Of each kind that are named."""

_LEAST_EDITS = 3  # two rows of a large set may well ask for the same
_KEY_SHOWN = 16
_ROWS_SHOWN = 4


@dataclass(frozen=True)
class PairWarning:
    """One warning.

    Attributes:
        kind: one of `KINDS`.
        rows: of which rows of the folder; of a caption that repeats, the first ones.
        name: what the source calls the row; empty for several.
        folder: of the shard, as a user would type it.
        key: of the sample; empty for several rows.
        words: what was found, with its numbers.
        amount: how much of it; comparable within a kind.
        variant: of the row.
    """

    kind: str
    rows: list[int]
    name: str
    folder: str
    key: str
    words: str
    amount: float
    variant: int = 0

    @property
    def excluding(self) -> list[str]:
        """What `--exclude` takes to leave the samples out."""
        return [self.key[:_KEY_SHOWN]] if self.key else [str(row) for row in self.rows]

    @property
    def what(self) -> str:
        """Which rows it is of, for people."""
        if not self.key:
            return f"row{'s' * (len(self.rows) > 1)} {', '.join(map(str, self.rows))}"
        return f"row {self.rows[0]} ({self.name}{f', variant {self.variant}' if self.variant else ''})"


@dataclass(frozen=True)
class Pairs:
    """How targets lie on their controls, and how captions repeat.

    Attributes:
        compared: samples whose target was compared with its controls when they were encoded.
        not_compared: samples with controls that were not: an earlier qie encoded them, or they were imported.
        captions: different captions of samples with controls.
        warnings: kind -> samples.
        worst: the worst of each kind, at most `WORST`.
    """

    compared: int = 0
    not_compared: int = 0
    captions: int = 0
    warnings: dict[str, int] = field(default_factory=dict)
    worst: list[PairWarning] = field(default_factory=list)


@dataclass
class PairTally:
    """The counts so far."""

    compared: int = 0
    not_compared: int = 0
    warnings: Counter[str] = field(default_factory=Counter)
    worst: dict[str, list[PairWarning]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    shards: array[int] = field(default_factory=lambda: array("I"))
    rows: array[int] = field(default_factory=lambda: array("Q"))
    prompts: array[int] = field(default_factory=lambda: array("Q"))
    targets: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, file: File, entries: Sequence[Entry]) -> None:
        """Count the samples of a shard."""
        number = len(self.folders)
        self.folders.append(file.folder.url)
        for entry in entries:
            if not entry.shape.controls:
                continue
            self.compared += entry.pair is not None
            self.not_compared += entry.pair is None
            if found := warning_of(entry):
                self._warn(
                    PairWarning(
                        found[0], [entry.row], entry.name, file.folder.url, entry.key, *found[1:], entry.variant
                    )
                )
            if "prompt" in entry.inputs and entry.variant == 0:  # the variants of a row have captions of their own
                self.shards.append(number)
                self.rows.append(entry.row)
                self.prompts.append(int(entry.inputs["prompt"], 16))
                self.targets.append(int(entry.inputs["target"], 16))

    def _warn(self, warning: PairWarning) -> None:
        self.warnings[warning.kind] += 1
        kept = self.worst.setdefault(warning.kind, [])
        kept.append(warning)
        if len(kept) >= 2 * WORST:
            self.worst[warning.kind] = _largest(kept)

    def pairs(self) -> Pairs:
        prompts, targets = (np.frombuffer(one, np.uint64) for one in (self.prompts, self.targets))
        captions = self._repeated("repeated_caption", prompts, targets, _LEAST_EDITS)
        self._repeated("several_captions", targets, prompts, 2)
        return Pairs(
            compared=self.compared,
            not_compared=self.not_compared,
            captions=captions,
            warnings={kind: self.warnings[kind] for kind in KINDS if self.warnings[kind]},
            worst=[warning for kind in KINDS for warning in _largest(self.worst.get(kind, []))],
        )

    def _repeated(self, kind: str, values: NDArray[np.uint64], others: NDArray[np.uint64], least: int) -> int:
        """Warn of values that stand beside `least` others or more, if most samples have a value that stands beside one.
        Returns how many different values there are."""
        if not len(values):
            return 0
        order = np.lexsort((others, values))
        values, others = values[order], others[order]
        new = np.append(True, values[1:] != values[:-1])
        group = np.cumsum(new) - 1
        different = np.bincount(group[new | np.append(True, others[1:] != others[:-1])])
        sizes, starts = np.bincount(group), np.flatnonzero(new)
        if 2 * sizes[different == 1].sum() < len(values):
            return len(starts)
        many = np.flatnonzero(different >= least)
        self.warnings[kind] += int(sizes[many].sum())
        worst = many[np.argsort(-different[many], kind="stable")[:WORST]]
        self.worst[kind] = [
            self._of_group(kind, np.sort(order[starts[one] : starts[one] + sizes[one]]), int(different[one]))
            for one in worst
        ]
        return len(starts)

    def _of_group(self, kind: str, places: NDArray[np.int64], different: int) -> PairWarning:
        shard = self.shards[int(places[0])]
        rows = [
            self.rows[place] for place in places.tolist() if self.folders[self.shards[place]] == self.folders[shard]
        ]
        about = f"of {len(places)} rows" if len(places) > _ROWS_SHOWN else ""
        told = {
            "repeated_caption": f"one caption for {different} different targets",
            "several_captions": f"one target under {different} captions",
        }[kind]
        words = " ".join([told, f"({about})"] if about else [told])
        return PairWarning(kind, rows[:_ROWS_SHOWN], "", self.folders[shard], "", words, float(different))


def _largest(warnings: Sequence[PairWarning]) -> list[PairWarning]:
    return heapq.nlargest(WORST, warnings, key=attrgetter("amount"))


def warning_of(entry: Entry) -> tuple[str, str, float] | None:
    """The kind of what is wrong with a pair, in words, and how much of it."""
    pair, inputs = entry.pair or Pair(), entry.inputs
    control = f"control {pair.control}"
    if pair.proportions is not None:
        words = f"the target's proportions are {pair.proportions:.3f} of those of {control}"
        return "proportions", words, abs(math.log(max(pair.proportions, 1e-9)))
    if pair.warning in ("shifted", "scaled"):
        return pair.warning, *_movement(pair, control)
    # Of pairs that nobody compared, files say at least this.
    same = [name for name, digest in inputs.items() if name.startswith("control") and digest == inputs["target"]]
    if same or pair.identical:
        return "identical", f"the target is the same as {same[0] if same else control}", 0.0
    return None


def _movement(pair: Pair, control: str) -> tuple[str, float]:
    (x, y), scale = pair.shift_px or (0, 0), pair.scale or 1.0
    agreeing = f"{pair.agreement or 0.0:.0%} of the places that can be compared agree"
    if pair.warning == "shifted":
        return f"the target is shifted by {x}, {y} px against {control}; {agreeing}", math.hypot(x, y)
    how = "enlarged" if scale > 1 else "reduced"
    beside = f", its middle shifted by {x}, {y} px" if x or y else ""
    return f"the target is {how} by {abs(scale - 1):.1%} against {control}{beside}; {agreeing}", abs(scale - 1)

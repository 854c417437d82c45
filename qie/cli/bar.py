"""tqdm's bar with a line that fits its terminal: the numbers that matter come first, what has no room is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm
from tqdm.utils import disp_len

from qie.cli.terminal import harmless
from qie.quantities import human_time

BAR_COLUMNS = 8
"""A narrower bar shows nothing that the numbers do not."""
MOST_COLUMNS = 120


class Bar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar, which draws, counts, and makes room for lines above it; its text is `bar_format`."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.notes: Sequence[str] = ()
        self._what = what
        super().__init__(total=total, unit=unit, dynamic_ncols=True, leave=False)

    @property
    def format_dict(self) -> Any:
        """What tqdm shows."""
        values = dict(super().format_dict)
        done, total = values["n"], values["total"] or 0
        rate = values["rate"] or (done - values["initial"]) / max(values["elapsed"], 1e-9)
        # The last column stays free: some terminals wrap a line that fills it.
        columns = min((values["ncols"] or 80) - 1, MOST_COLUMNS)
        pace, notes = pace_of(rate, total - done, self.unit), [harmless(note) for note in self.notes if note]
        text = bar_format(self._what, done, total, self.unit, pace, notes, columns)
        return values | {"bar_format": text, "ncols": columns}


def bar_format(
    what: str, done: int, total: int, unit: str, pace: Sequence[str], notes: Sequence[str], columns: int
) -> str:
    """A line of progress that fits, as tqdm's bar_format: the bar itself takes the room that is left.

    Of what does not fit, the first to go are the notes but the first, then the name of the unit, the rate, the first
    note, and the time left.
    """
    rate, left = pace if pace else ("", "")
    first, *more = notes or ("",)
    wanted = [left, first, rate, unit, *more]  # the most important first
    shown: list[int] = []

    def line(places: Sequence[int]) -> tuple[str, str]:
        parts = [wanted[place] for place in (2, 0, 1, *range(4, len(wanted))) if place in places and wanted[place]]
        return f"{what} {done}/{total}" + (f" {unit}" if 3 in places else ""), ", ".join(parts)

    for place, text in enumerate(wanted):
        if text and disp_len(", ".join(line([*shown, place]))) <= columns:
            shown.append(place)
    head, tail = (text.replace("{", "{{").replace("}", "}}") for text in line(shown))
    room = columns - disp_len(f"{head} || {tail}")
    return f"{head} |{{bar}}| {tail}".rstrip() if room >= BAR_COLUMNS else ", ".join(filter(None, (head, tail)))


def pace_of(rate: float | None, left: int, unit: str) -> list[str]:
    """Units a second, or seconds a unit, and the time that so many more take; nothing as long as nothing is done."""
    if not rate:
        return []
    seconds = left / rate
    fast = f"{rate:.{0 if rate >= 10 else 1}f}/s"
    slow = f"{1 / rate:.{0 if rate < 0.1 else 1}f} s a {unit[:-1]}"
    return [fast if rate >= 1 else slow, f"{seconds:.0f} s left" if seconds < 60 else f"{human_time(seconds)} left"]

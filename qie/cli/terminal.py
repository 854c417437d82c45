"""The lines that a command shows, on a terminal in colour and folded at its edge."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from typing import IO, Any

import click

COLOURS = {
    r"(error|fault):": "red",
    r"mend(?=  )|\d+ of \d+ to mend$": "red",
    r"missing(?=   )": "red",
    r"warning:": "magenta",
    r"ok(?=   )|nothing to mend$": "green",
    r"verified:": "green",
    r"next:": "cyan",
}
"""Beginnings of lines, and their colours on a terminal. Nobody needs them: the words say it. Plain red, magenta, green
and cyan can be read on a light and on a dark background, where yellow, blue and bold ones cannot."""


ERASED = "\r\x1b[K"
"""Erases a terminal's line, with the ^C that the terminal has written behind a bar."""


def is_terminal(stream: IO[str]) -> bool:
    """Whether lines on a stream are read by a person, on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns_of(stream: IO[str]) -> int:
    """The width of a terminal, of which the last column stays free: some terminals wrap a line that fills it."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or shutil.get_terminal_size().columns) - 1


def echo(*lines: object, err: bool = False, whole: bool = False) -> None:
    """Print lines. Commands print through this function only: names and reasons come from foreign files, and must
    neither control the terminal nor look like a line of ours.

    On a terminal a line is folded between words; `whole` ones are not: commands and JSON, which are copied.
    """
    stream = sys.stderr if err else sys.stdout
    terminal = is_terminal(stream)
    coloured = terminal and not os.environ.get("NO_COLOR")
    with _above_bars():
        for line in lines:
            text = harmless(line)
            text = text if whole or not terminal else folded(text, columns_of(stream))
            click.echo(_coloured(text) if coloured else text, err=err, color=coloured or None)


def erase_line() -> None:
    """Erase the line of a bar on a terminal, with the ^C that may stand behind it; nothing in a log."""
    if is_terminal(sys.stderr):
        sys.stderr.write(ERASED)


def harmless(text: object) -> str:
    """A text as it is shown: on one line, and with nothing in it that controls a terminal."""
    from qie.errors import shown

    return shown(str(text)).replace("\n", "\\n")


def folded(line: str, columns: int) -> str:
    """A line on as many as it needs, the others indented to where its text begins."""
    if len(line) <= columns:
        return line
    indent, label = len(line) - len(line.lstrip()) + 2, re.compile(r" *\S+( \S+)? {2,}| *[a-z ]{1,7}: +").match(line)
    while label and label.end() <= columns // 3:
        indent, label = label.end(), re.compile(r"\S+( \S+)? {2,}").match(line, label.end())
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=" " * indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _coloured(line: str) -> str:
    for pattern, colour in COLOURS.items():
        if match := re.match(pattern, line):
            return click.style(match[0], fg=colour) + line[match.end() :]
    return line


def warn(text: object) -> None:
    """A warning: what is odd, and what to do. It is shown with --quiet, too."""
    echo(f"warning: {text}", err=True)


class Warnings:
    """Warnings of the beginning, which are gathered until the summary has been shown. Later ones are shown at once."""

    def __init__(self) -> None:
        self._gathered: list[str] | None = []

    def warn(self, text: str) -> None:
        """Gather a warning, or show it."""
        if self._gathered is None:
            warn(text)
        else:
            self._gathered.append(text)

    def show(self, most: int = 20) -> None:
        """Show what was gathered."""
        gathered, self._gathered = self._gathered or [], None
        for text in gathered[:most]:
            warn(text)
        if len(gathered) > most:
            warn(f"… and {len(gathered) - most} more")


def tell_next(*words: str, rest: str = "", quiet: bool = False) -> None:
    """The closing line: the command to type now. `rest` is shown as it is, for what only the user can fill in."""
    if not quiet:
        echo(f"next: {shlex.join(words)}{rest and ' '}{rest}", err=True, whole=True)


def tell_summary(lines: Sequence[tuple[str, str]], *, quiet: bool) -> None:
    """The opening lines of a command: what each is about, and what there is."""
    if not quiet:
        echo(*(f"{what:<10} {text}" for what, text in lines), err=True)


def _above_bars() -> Any:
    """While lines are printed, bars make room for them."""
    if "tqdm" not in sys.modules:
        return nullcontext()
    from tqdm import tqdm

    return tqdm.external_write_mode()

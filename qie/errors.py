"""The tree of errors. Catching `QieError` catches everything that qie raises on purpose.

    QieError                      exit code 1: the data or the run has a problem
    ├── UsageError                exit code 2: the command line, or a path on it, is wrong
    │   ├── GoneError             an attribute of earlier programs; also an AttributeError
    │   ├── ConfigError           the configuration file or a --set
    │   ├── SourceError           the rows cannot be opened at all
    │   └── ModelError            a model lacks a component, or is of another kind
    ├── RowError                  one row cannot be encoded; a run skips and counts it
    └── ShardError                a shard or an index is missing, damaged or foreign
        └── RecipeMismatchError   shards of another recipe (exit code 2: nothing was damaged, the wrong ones were named)

Every error says what is wrong and, if known, where, what was expected, what was found and what to do.
"""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"
"""Without these two, emoji fall apart and Persian is misspelt."""


def shown(text: str) -> str:
    r"""Text with escapes such as \u202e for characters that are invisible, control a terminal, or reverse text.

    Spaces of all kinds, line ends, and joiners of letters stay.
    """
    return text if text.isprintable() else "".join(char if _stays(char) else repr(char)[1:-1] for char in text)


def one_line(text: object, most: int | None = None) -> str:
    """A message, such as a library's error, on one line of at most so many characters."""
    return " ".join(str(text).split())[:most]


def _stays(char: str) -> bool:
    return char.isprintable() or char in "\n\t" or char in _JOINERS or unicodedata.category(char) == "Zs"


class QieError(Exception):
    """An error that qie explains to the user instead of showing a traceback.

    Args:
        what: the fault, one sentence without a full stop.
        where: file, shard, key, row or config key.
        expected: the value or state that was expected.
        found: the value or state that was found.
        hint: advice to the user.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        """As it is shown: whatever a file says stands in its own fact, and steers no terminal."""
        facts = {"where": self.where, "expected": self.expected, "found": self.found, "to do": self.hint}
        lines = [f"  {name + ':':<10}{_indented(fact, 12)}" for name, fact in facts.items() if fact is not None]
        return "\n".join([_indented(self.what, 2), *lines])


def _indented(fact: object, columns: int) -> str:
    return shown(str(fact)).replace("\n", "\n" + " " * columns)


class UsageError(QieError):
    """The command line, or something it names, is wrong. Nothing was done."""

    exit_code = 2


class GoneError(UsageError, AttributeError):
    """An attribute that does not exist. It is also an AttributeError, for `hasattr` and the default of `getattr`."""


class ConfigError(UsageError):
    """The configuration file or a `--set` is wrong."""


class SourceError(UsageError):
    """Rows cannot be opened: a missing folder, an unknown layout."""


class ModelError(UsageError):
    """A pretrained model cannot be used: a missing component, a wrong class, a family that does not fit."""


class RowError(QieError):
    """One row cannot be encoded. `what` is the reason that the list of skipped rows keeps."""


class ShardError(QieError):
    """A shard or its index is missing, damaged or not written by qie."""


class RecipeMismatchError(ShardError):
    """Shards have another recipe than the expected one, or several."""

    exit_code = 2

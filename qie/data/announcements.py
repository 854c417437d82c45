"""What the first process of a run found, told to the others, so that one of them looks and not all.

No collective: processes ask for more shards at moments of their own, and one that waited in a collective for a process
that trains would wait forever. What is told stands in the key-value server that the processes met at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from qie.errors import QieError

TOLD_TOGETHER = 64
"""Names that one entry holds at most: others begin to read what is told while the first process still looks."""
_END = "end"


class KeyValues(Protocol):
    """The methods of torch's `Store` that nobody waits in."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...


class Announcements:
    """Names, in the order in which the first process found them.

    Attributes:
        first: whether this process is the one that looks and tells.

    Raises:
        QieError: the server is gone, with the process or the launcher that held it.
    """

    def __init__(self, server: KeyValues, *, first: bool) -> None:
        self.first = first
        self._server, self._entries = server, 0
        self._names = deque[str]()

    def add(self, name: str) -> None:
        """Tell a name, by the next `send` at the latest."""
        self._names.append(name)
        if len(self._names) == TOLD_TOGETHER:
            self.send()

    def send(self) -> None:
        """Tell what was added."""
        if self._names:
            with _reached():
                self._server.set(str(self._entries), "/".join(self._names))
            self._entries += 1
            self._names.clear()

    def end(self) -> None:
        """Tell that nothing more will be told."""
        with _reached():
            self._server.set(_END, "")

    @property
    def ended(self) -> bool:
        """Whether nothing more will be told than what can be read by now."""
        with _reached():
            return self._server.check([_END])

    def next(self) -> str | None:
        """The next name; the same again until `done`. None: nothing more was told yet."""
        with _reached():
            if not self._names and self._server.check([str(self._entries)]):
                self._names.extend(self._server.get(str(self._entries)).decode().split("/"))
                self._entries += 1
        return self._names[0] if self._names else None

    def done(self) -> None:
        """Go on to the name after this one."""
        self._names.popleft()


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise QieError(
            "the process that looks for new shards cannot be reached",
            found=str(error).partition("\n")[0],
            hint="see what the first process of the run said when it ended",
        ) from error

"""One file in a folder of some store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qie.stores.folder import Folder, open_folder


@dataclass(frozen=True)
class File:
    """Where a file lies; it need not be there."""

    folder: Folder
    name: str

    @classmethod
    def at(cls, place: str | Path | File) -> File:
        """The file that a path or URL names."""
        if isinstance(place, File):
            return place
        folder, _, name = str(place).rpartition("/")
        return cls(open_folder(folder or ("/" if str(place).startswith("/") else ".")), name)

    def __str__(self) -> str:
        path = self.path
        return str(path) if path else f"{self.folder.url.rstrip('/')}/{self.name}"

    @property
    def path(self) -> Path | None:
        """On the local disk; None elsewhere."""
        return self.folder.path(self.name)

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    def with_suffix(self, suffix: str) -> File:
        return File(self.folder, str(PurePosixPath(self.name).with_suffix(suffix)))

    def size(self) -> int | None:
        """In bytes; None when there is no such file."""
        return self.folder.size(self.name)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """See `Folder.read`."""
        return self.folder.read(self.name, start, stop)

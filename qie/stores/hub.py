"""Files in repositories of the Hugging Face Hub.

Each write is a commit; a file is there when its commit is. Reading takes the token of `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from qie.errors import QieError, UsageError, one_line
from qie.stores.contract import WHOLE_BYTES, MissingError, StoreError, checked, checked_range, require_whole
from qie.stores.object_errors import MAX_CAUSE
from qie.stores.retry import patiently

_KINDS = ("datasets", "spaces", "buckets")
_PASSING_STATUS = (408, 425, 429)
# The Hub's file system says of a missing repository, too, that a file is not found.
_NO_REPOSITORY = ("RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "BucketNotFoundError")
_FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_FINAL_NAMES = ("OfflineModeIsEnabled", "LocalTokenNotFoundError", "EntryNotFoundError")

_COPY_BYTES = 4 * 2**20

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HubFolder:
    """A folder of a repository. See `qie.stores.Folder`.

    Args:
        url: as a user would type it.
        root: the folder in the words of the file system.
        filesystem: an fsspec file system; by default huggingface_hub's.
    """

    url: str
    root: str
    filesystem: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, url: str, filesystem: Any = None) -> HubFolder:
        """The folder of a URL. Raises UsageError when it names no repository."""
        plain = url.rstrip("/")
        parts = plain.partition("://")[2].split("/")
        if parts[0] == "models":
            parts = parts[1:]
        if len(parts) < (3 if parts[0] in _KINDS else 2):
            raise UsageError("a URL names no repository", where=url, expected="such as hf://datasets/owner/name/folder")
        return cls(plain, checked("/".join(parts)), filesystem)

    def __str__(self) -> str:
        return self.url

    def path(self, name: str) -> None:
        checked(name)

    def child(self, name: str) -> HubFolder:
        return HubFolder(f"{self.url}/{checked(name)}", self._at(name), self.filesystem)

    def names(self) -> list[str]:
        return sorted(name for name, *_ in self._entries())

    def listing(self) -> dict[str, int]:
        return dict(sorted((name, size) for name, size, kind, _ in self._entries() if kind == "file"))

    def stamps(self) -> dict[str, str]:
        return {name: f"{size} {blob}" for name, size, kind, blob in self._entries() if kind == "file"}

    def folders(self) -> list[str]:
        return sorted(name for name, _, kind, _ in self._entries() if kind == "directory")

    def _entries(self) -> Iterator[tuple[str, int, str, str]]:
        def act() -> list[dict[str, Any]]:
            files = self._fresh(self.root)
            return [entry for entry in files.ls(self.root, detail=True) if _bare(entry["name"]) != _bare(self.root)]

        try:
            entries = self._ask(self.url, act)
        except MissingError:
            return
        for entry in entries:
            yield entry["name"].rpartition("/")[2], int(entry["size"] or 0), entry["type"], _blob(entry)

    def size(self, name: str) -> int | None:
        facts = self._info(name)
        return int(facts["size"]) if facts else None

    def stamp(self, name: str) -> str | None:
        facts = self._info(name)
        return f"{int(facts['size'])} {_blob(facts)}" if facts else None

    def _info(self, name: str) -> dict[str, Any] | None:
        """What the Hub says of a file; None when no such file."""
        at = self._at(name)
        try:
            facts: dict[str, Any] = self._ask(self._url(name), lambda: self._fresh(at).info(at))
        except MissingError:
            return None
        return facts if facts["type"] == "file" else None

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, most: int = WHOLE_BYTES, size: int | None = None
    ) -> bytes:
        del size  # to compare it would be a request more
        checked_range(name, start, stop)
        if stop is None and start == 0:
            return self._ask(self._url(name), lambda: self._whole(self._at(name), most))
        size = self.size(name) if stop is None or start == stop else None
        if size is None and (stop is None or start == stop):
            raise MissingError("no such file", where=self._url(name))
        end = size if stop is None else stop
        assert end is not None
        content = b""
        if end > start:
            content = self._ask(self._url(name), lambda: self._range(self._at(name), start, end))
        if len(content) != end - start or (size is not None and size < end):
            what = "more bytes came than were asked for" if len(content) > end - start else "a file is too short"
            found = start + len(content) if content else size
            raise StoreError(what, where=self._url(name), expected=f"{end} bytes", found=found)
        return content

    def _whole(self, at: str, most: int) -> bytes:
        files = self._files()
        if files.isdir(at):  # of which the Hub would send the web page
            raise FileNotFoundError(at)
        with files.open(at, "rb", block_size=0) as file:  # 0: as a stream, without asking for its size first
            content = bytes(file.read(most + 1))
        require_whole(len(content), at, most)
        return content

    def _range(self, at: str, start: int, stop: int) -> bytes:
        try:
            content = self._part(at, start, stop)
        except FileNotFoundError:
            content = b""
        if len(content) == stop - start:
            return content
        # What it remembers of the file may be from before another wrote it.
        self._fresh(at)
        return self._part(at, start, stop)

    def _part(self, at: str, start: int, stop: int) -> bytes:
        with self._files().open(at, "rb", cache_type="none") as file:  # no read-ahead of megabytes
            file.seek(start)
            return bytes(file.read(stop - start))

    def write(self, name: str, content: bytes) -> None:
        at = self._at(name)
        self._ask(self._url(name), lambda: self._files().pipe_file(at, content))

    def upload(self, name: str, path: Path) -> None:
        at = self._at(name)
        if not path.is_file():
            raise StoreError("a file cannot be copied", where=path, found="no such file")
        self._ask(self._url(name), lambda: self._files().put_file(str(path), at))

    def download(self, name: str, path: Path) -> None:
        at = self._at(name)
        self._ask(self._url(name), lambda: self._copy(at, path))

    def _copy(self, at: str, path: Path) -> None:
        files = self._files()
        if files.isdir(at):  # of which the Hub would send the web page
            raise FileNotFoundError(at)
        with files.open(at, "rb", block_size=0) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)

    def create(self, name: str, content: bytes) -> bool:
        """Looks, then writes: the Hub knows no conditional write. Of two who create at once, both may succeed."""
        if self.size(name) is not None:
            return False
        self.write(name, content)
        return True

    def delete(self, name: str) -> None:
        at = self._at(name)
        if self.size(name) is None:
            return
        try:
            self._ask(self._url(name), lambda: self._files().rm_file(at))
        except MissingError:
            return

    def _files(self) -> Any:
        if self.filesystem is not None:
            return self.filesystem
        from huggingface_hub import HfFileSystem

        return HfFileSystem()  # one per thread, which it keeps itself

    def _fresh(self, at: str) -> Any:
        """The file system, without what it remembers of a path: others write there, too."""
        files = self._files()
        files.invalidate_cache(at)
        return files

    def _ask(self, url: str, act: Callable[[], _Result]) -> _Result:
        """Act, again where that helps. Raises StoreError, and MissingError for a missing file."""
        try:
            return patiently(act, _passes)
        except QieError:
            raise
        except Exception as error:  # those of huggingface_hub, of its HTTP client, of fsspec and of the system
            line = one_line(error, MAX_CAUSE) or type(error).__name__
            if _no_repository(error) or _status(error) in (401, 403):
                what, hint = "no such repository, or no access to it", "set HF_TOKEN, or run hf auth login"
                raise StoreError(what, where=url, found=line, hint=hint) from error
            if isinstance(error, FileNotFoundError) or "EntryNotFoundError" in _names(error):
                raise MissingError("no such file", where=url) from error
            raise StoreError("a request to the Hub failed", where=url, found=line) from error

    def _at(self, name: str) -> str:
        return f"{self.root}/{checked(name)}"

    def _url(self, name: str) -> str:
        return f"{self.url}/{checked(name)}"


def _blob(entry: dict[str, Any]) -> str:
    return str(entry.get("blob_id") or entry.get("created") or "")


def _bare(path: str) -> str:
    return path.strip("/")


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _no_repository(error: BaseException | None) -> bool:
    while error is not None:
        if _names(error) & set(_NO_REPOSITORY):
            return True
        error = error.__cause__
    return False


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _passes(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    if isinstance(error, (QieError, *_FINAL)) or _names(error) & set(_FINAL_NAMES) or _no_repository(error):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore")

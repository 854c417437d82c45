"""Files in object stores and on web servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from qie.errors import UsageError
from qie.stores.connection import Connection
from qie.stores.contract import (
    WHOLE_BYTES,
    MissingError,
    StoreError,
    UnlistedError,
    WholeFilesError,
    checked,
    checked_range,
    require_whole,
)
from qie.stores.object_errors import no_bucket, passes, status, store_error
from qie.stores.retry import interruptibly, patiently

PART_BYTES = 8 * 2**20
MAX_PARTS = 9_000  # S3 allows 10,000
PARALLEL_PARTS = 4

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ObjectFolder:
    """The objects of a bucket, or the files of a web host, below a prefix. See `qie.stores.Folder`.

    obstore repeats requests itself, and continues where a body broke off. What it does not repeat, and the whole of it
    once more, is repeated here: a listing whose body broke off, a deletion, a conditional put.
    """

    url: str
    prefix: str
    connection: Connection = field(compare=False, repr=False)

    @classmethod
    def open(cls, url: str) -> ObjectFolder:
        """The folder of a URL. Raises UsageError when it names no bucket or host, or holds a login or a query."""
        scheme, _, rest = url.partition("://")
        scheme = scheme.lower()
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        web = scheme in ("http", "https")
        if not bucket:
            raise UsageError("a URL names no bucket", where=url, expected=f"such as {scheme}://name/path")
        if "@" in bucket or (web and set("?#") & set(rest)):
            raise UsageError(
                "a URL has a login or a query",
                where=f"{scheme}://{bucket.rpartition('@')[2].partition('?')[0]}/…",
                hint="name a folder; files are asked for below it",
            )
        plain = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        if prefix:
            prefix = checked(unquote(prefix) if web else prefix)
        return cls(plain, prefix, Connection(scheme, bucket))

    def __str__(self) -> str:
        return self.url

    @property
    def _web(self) -> bool:
        return self.connection.scheme in ("http", "https")

    def path(self, name: str) -> None:
        checked(name)

    def child(self, name: str) -> ObjectFolder:
        return ObjectFolder(self._url(name), self._key(name), self.connection)

    def names(self) -> list[str]:
        found = self._entries()
        paths = [*(entry["path"] for entry in found["objects"]), *found["common_prefixes"]]
        return sorted(path.rpartition("/")[2] for path in paths if path != self.prefix)

    def listing(self) -> dict[str, int]:
        # A folder's marker, an object of no bytes with the folder's own name, is no file in it.
        found = [(entry["path"], entry["size"]) for entry in self._entries()["objects"] if entry["path"] != self.prefix]
        return dict(sorted((path.rpartition("/")[2], size) for path, size in found))

    def stamps(self) -> dict[str, str]:
        return {entry["path"].rpartition("/")[2]: _stamp(entry) for entry in self._entries()["objects"]}

    def stamp(self, name: str) -> str | None:
        facts = self._head(name)
        return _stamp(facts) if facts else None

    def folders(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self._entries()["common_prefixes"])

    def _entries(self) -> Any:
        import obstore

        if self._web:
            raise UnlistedError("a folder cannot be listed over http", where=self.url, hint="name its files")
        return self._ask(self.url, lambda: obstore.list_with_delimiter(self.connection.store(), self.prefix or None))

    def size(self, name: str) -> int | None:
        facts = self._head(name)
        return int(facts["size"]) if facts else None

    def _head(self, name: str) -> Any:
        """What the store says of a file; None when no such file."""
        import obstore

        key = self._key(name)
        try:
            return self._ask(self._url(name), lambda: obstore.head(self.connection.store(), key))
        except MissingError:
            return None

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, most: int = WHOLE_BYTES, size: int | None = None
    ) -> bytes:
        del size  # to compare it would be a request more
        checked_range(name, start, stop)
        if start == stop:
            return self._nothing(name, start)
        url, content = self._url(name), None
        try:
            content = self._ask(url, lambda: self._get(name, start, stop, most))
        except StoreError as error:
            if not isinstance(error.__cause__, Exception) or status(error.__cause__) != 416:
                raise
        if content is None:  # the store says that there is nothing from `start` on
            return self._nothing(name, start if stop is None else stop)
        if stop is not None and len(content) != stop - start:
            raise StoreError("a file is too short", where=url, expected=f"{stop} bytes", found=start + len(content))
        return content

    def _get(self, name: str, start: int, stop: int | None, most: int = WHOLE_BYTES) -> bytes:
        import obstore

        key, store = self._key(name), self.connection.store()
        if stop is not None:
            return bytes(obstore.get(store, key, options={"range": (start, stop)}).bytes())
        if start:
            return bytes(obstore.get(store, key, options={"range": {"offset": start}}).bytes())
        found = obstore.get(store, key)
        require_whole(int(found.meta["size"]), self._url(name), most)
        return bytes(found.bytes())

    def _nothing(self, name: str, needed: int) -> bytes:
        """No bytes, of a file that is there and has at least `needed`."""
        size = self.size(name)
        if size is None:
            raise MissingError("no such file", where=self._url(name))
        if size < needed:
            raise StoreError("a file is too short", where=self._url(name), expected=f"{needed} bytes", found=size)
        return b""

    def write(self, name: str, content: bytes) -> None:
        import obstore

        key = self._key(name)
        self._refuse_web(name)
        self._ask(self._url(name), lambda: obstore.put(self.connection.store(), key, content))

    def upload(self, name: str, path: Path) -> None:
        import obstore

        key = self._key(name)
        self._refuse_web(name)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StoreError("a file cannot be copied", where=path, found=error.strerror) from error
        part = max(PART_BYTES, size // MAX_PARTS + 1)
        self._ask(
            self._url(name),
            lambda: obstore.put(self.connection.store(), key, path, chunk_size=part, max_concurrency=PARALLEL_PARTS),
        )

    def download(self, name: str, path: Path) -> None:
        key = self._key(name)
        self._ask(self._url(name), lambda: _copy(self.connection.store(), key, path))

    def create(self, name: str, content: bytes) -> bool:
        key, url = self._key(name), self._url(name)
        self._refuse_web(name)
        doubtful = False

        def attempt() -> bool:
            nonlocal doubtful
            try:
                return self._put_new(key, content)
            except FileExistsError:
                # Ours, if an earlier attempt was done and only its answer was lost.
                return doubtful and self._get(name, 0, None) == content
            except Exception:
                doubtful = True
                raise

        return self._ask(url, attempt)

    def _put_new(self, key: str, content: bytes) -> bool:
        """Raises FileExistsError when there is such a file."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        # Without obstore's retries: they would hide that an attempt may have been done.
        store = self.connection.store(retries=False)
        try:
            obstore.put(store, key, content, mode="create")
            return True
        except AlreadyExistsError as error:
            if passes(error):
                raise
            raise FileExistsError(key) from error
        except Exception as error:
            if not isinstance(error, NotSupportedError) and status(error) != 501:
                raise
        # A service that knows no conditions. Two who create at once may then both succeed.
        try:
            obstore.head(store, key)
        except FileNotFoundError:
            obstore.put(store, key, content)
            return True
        raise FileExistsError(key)

    def delete(self, name: str) -> None:
        import obstore

        key = self._key(name)
        self._refuse_web(name)
        try:
            self._ask(self._url(name), lambda: obstore.delete(self.connection.store(), key))
        except MissingError:
            return

    def _ask(self, url: str, act: Callable[[], _Result]) -> _Result:
        """Act, again where that helps. Raises StoreError, and MissingError for a missing file."""
        try:
            return patiently(lambda: interruptibly(act), passes)
        except (StoreError, UsageError):
            raise
        except Exception as error:  # obstore's errors share no base
            if isinstance(error, FileNotFoundError) and not no_bucket(error):
                raise MissingError("no such file", where=url) from error
            if type(error).__name__ == "NotSupportedError" and "Range" in str(error):
                raise WholeFilesError(
                    "the web server sends only whole files",
                    where=url,
                    hint="keep whole shards on this machine's disk (cache.local_dir), or serve them by one that knows "
                    "ranges, such as nginx",
                ) from error
            raise store_error(error, url) from error

    def _refuse_web(self, name: str) -> None:
        if self._web:
            raise StoreError("files cannot be written over http", where=self._url(name))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{checked(name)}" if self.prefix else checked(name)

    def _url(self, name: str) -> str:
        return f"{self.url}/{quote(checked(name)) if self._web else checked(name)}"


def _stamp(entry: Any) -> str:
    return f"{entry['size']} {entry['e_tag'] or entry['last_modified']}"


def _copy(store: Any, key: str, path: Path) -> None:
    """One request, however large the file."""
    import obstore

    with path.open("wb") as file:
        for part in obstore.get(store, key).stream(min_chunk_size=PART_BYTES):
            file.write(part)

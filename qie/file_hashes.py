"""Hashes of large files, in parallel, and remembered: hashing a 16 GB encoder takes seconds once and nothing later."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from qie.paths import cache_folder, open_own

RACY_S = 2.0
"""A file changed so recently may change again without a new mtime; its hash is not remembered."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def memory_path() -> Path:
    """Where hashes are remembered: `$XDG_CACHE_HOME/qie/hashes.json`. It may be deleted at any time."""
    return cache_folder() / "hashes.json"


def file_hashes(paths: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 of each file, 64 hex characters. A file is hashed again when its path, size, mtime, ctime or inode is
    another: a file that was renamed over it may have the size and the mtime of the one before."""
    paths = list(paths)
    memory = _recall()
    identities = {path: _identity(path) for path in paths}
    fresh = [path for path in paths if identities[path] not in memory]
    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(fresh, pool.map(_hash, fresh), strict=True))
    new = {identities[path]: digest for path, digest in hashes.items() if _settled(path, identities[path])}
    if new:
        _remember(new)
    return {path: hashes.get(path) or memory[identities[path]] for path in paths}


def bytes_to_hash(paths: Iterable[Path]) -> int:
    """The bytes that `file_hashes` would read: those of files whose hashes are not remembered."""
    memory = _recall()
    return sum(path.stat().st_size for path in paths if _identity(path) not in memory)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"


def _settled(path: Path, identity: str) -> bool:
    return time.time() - path.stat().st_mtime > RACY_S and _identity(path) == identity


def _recall() -> dict[str, str]:
    try:
        memory = json.loads(memory_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # no home; damaged; nested too deeply
        return {}
    pairs = memory.items() if isinstance(memory, dict) else ()
    return {name: digest for name, digest in pairs if isinstance(digest, str) and _DIGEST.fullmatch(digest)}


def _remember(new: dict[str, str]) -> None:
    """Add to what is remembered, one process and thread after the other, so that none undoes what another has added."""
    with suppress(OSError, RuntimeError):  # no home, or a read-only one, only means hashing again
        path = memory_path()
        partial = path.with_suffix(".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = {name.rsplit("|", 4)[0] for name in new}
            kept = {name: digest for name, digest in _recall().items() if name.rsplit("|", 4)[0] not in files}
            with open_own(partial) as file:
                file.truncate(0)
                file.write(json.dumps(kept | new, indent=0).encode())
            partial.replace(path)

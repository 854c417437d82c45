"""Samples that are left out: a list of keys beside the shards, which themselves stay as they are.

The plan is made of all samples, as before, so that a key on the list changes no other sample's place: see
`PlannedBatch.without`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from qie.errors import ShardError, shown
from qie.shards.sample_table import CHUNK
from qie.stores import File, Folder, MissingError, StoreError
from qie.stores.object_errors import DENIED

EXCLUDED_NAME = "excluded.txt"

_LINE = re.compile(r"([0-9a-fA-F]{64})[ \t]*(?:#(.*))?", re.ASCII)


def read_excluded(folder: Folder) -> dict[str, str]:
    """The keys on a folder's list, and what is said of each; empty without a list.

    Raises:
        ShardError: a line is neither a key nor a comment.
        StoreError: the list cannot be read.
    """
    file = File(folder, EXCLUDED_NAME)
    try:
        text = file.read().decode("utf-8", "replace")
    except MissingError:
        return {}
    except StoreError as error:
        if error.what == DENIED:  # so answers a store in which nothing may be listed, of a file that is not there
            return {}
        raise
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        match = _LINE.fullmatch(line)
        if match:
            found[match[1].lower()] = (match[2] or "").strip()
        elif line and not line.startswith("#"):
            raise ShardError(
                "the list of excluded samples has a line that is no key",
                where=f"{file}, line {number}",
                expected="64 hex characters, then perhaps # and a note",
                found=repr(line[:80]),
                hint="correct the line, or delete it",
            )
    return found


def excluded_keys(folders: Iterable[Folder]) -> frozenset[bytes]:
    """The keys on the lists of some folders: content that one leaves out is left out of all of them."""
    return frozenset(bytes.fromhex(key) for folder in folders for key in read_excluded(folder))


def write_excluded(folder: Folder, keys: Mapping[str, str]) -> None:
    """Write a folder's list: keys, and what is said of each. Without any there is no list."""
    if not keys:
        folder.delete(EXCLUDED_NAME)
        return
    lines = [f"{key} # {note}" if note else key for key, note in keys.items()]
    folder.write(EXCLUDED_NAME, ("\n".join(lines) + "\n").encode())


def noted(row: int, name: str) -> str:
    """What a list says of a sample: its row, and today's date."""
    return f"row {row} {shown(' '.join(name.split()))}, {datetime.now(UTC):%Y-%m-%d}"


def positions_of(digests: NDArray[np.uint8], keys: Collection[bytes]) -> NDArray[np.int64]:
    """The positions of some keys among [N, 32] digests, rising; looked for in parts, and for no key not at all."""
    found = [np.zeros(0, np.int64)]
    wanted = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
    heads = _heads(wanted)
    for start in range(0, len(digests), CHUNK) if len(wanted) else ():
        # "sort": the other way takes the difference of the largest and the smallest, which NumPy 2.0 lets overflow.
        alike = start + np.flatnonzero(np.isin(_heads(digests[start : start + CHUNK]), heads, kind="sort"))
        found.append(alike[[bytes(digests[position]) in keys for position in alike.tolist()]])
    return np.concatenate(found)


def _heads(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The first eight bytes of each."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64).ravel()

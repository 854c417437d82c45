"""The two hashes of a record: SHA-256 says which bytes it is, XXH3-128 that they arrived as they were written.

What damages files (a disk, a link, a wrong range) does not aim at a hash, and XXH3-128 reads as fast as memory does,
seven to ten times as fast as SHA-256. So reading for training checks it alone; see docs/decisions/0063.
"""

from __future__ import annotations

import hashlib

import xxhash

SHA256_BYTES = 32
XXH3_BYTES = 16
NONE = bytes(XXH3_BYTES)
"""Of a record whose index was written before it had an XXH3-128."""


def xxh3_128(content: bytes | memoryview) -> bytes:
    """The XXH3-128 of a record, in its canonical order, big-endian."""
    # Not by one call: before xxhash 4 that would keep Python's lock.
    hashed = xxhash.xxh3_128()
    hashed.update(content)
    return hashed.digest()


def missed(
    record: bytes | memoryview, sha256: bytes, xxh3: bytes, *, both: bool = False, found: bytes | None = None
) -> str:
    """The hash that a record should have and has not; empty for a sound one.

    Args:
        record: its bytes.
        sha256, xxh3: as its index says. Where it says no XXH3-128 (`NONE`), SHA-256 is checked.
        both: check both, where there are two.
        found: its XXH3-128, if it is known.
    """
    if xxh3 != NONE and (found or xxh3_128(record)) != xxh3:
        return f"XXH3-128 {xxh3.hex()}"
    if (both or xxh3 == NONE) and hashlib.sha256(record).digest() != sha256:
        return f"SHA-256 {sha256.hex()}"
    return ""

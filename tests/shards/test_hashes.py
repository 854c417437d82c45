"""A record's two hashes: which is checked, and what a damaged record is told to lack."""

from __future__ import annotations

import hashlib

import pytest

from qie.shards.hashes import NONE, missed, xxh3_128

RECORD = bytes(range(256)) * 300
SHA256, XXH3 = hashlib.sha256(RECORD).digest(), xxh3_128(RECORD)


def test_xxh3_128_is_big_endian_as_its_specification_prints_it() -> None:
    assert xxh3_128(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert xxh3_128(memoryview(RECORD)) == XXH3


@pytest.mark.parametrize("both", [False, True])
def test_a_flipped_bit_is_found_by_the_fast_hash_and_without_one_by_sha256(both: bool) -> None:
    for place in (0, 1000, len(RECORD) - 1):
        damaged = bytearray(RECORD)
        damaged[place] ^= 1
        assert missed(bytes(damaged), SHA256, XXH3, both=both) == f"XXH3-128 {XXH3.hex()}"
        assert missed(bytes(damaged), SHA256, NONE, both=both) == f"SHA-256 {SHA256.hex()}"
    assert not missed(RECORD, SHA256, XXH3, both=both)
    assert not missed(RECORD, SHA256, NONE, both=both)


def test_a_wrong_sha256_beside_a_right_fast_hash_is_found_where_both_are_checked() -> None:
    other = hashlib.sha256(b"other").digest()
    assert not missed(RECORD, other, XXH3)
    assert missed(RECORD, other, XXH3, both=True) == f"SHA-256 {other.hex()}"
    assert missed(RECORD, SHA256, xxh3_128(b"other"), both=True) == f"XXH3-128 {xxh3_128(b'other').hex()}"

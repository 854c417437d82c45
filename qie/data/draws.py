"""Chance: which rows an epoch draws, in which order, which of their variants, and which rows are kept for validation.

All of it is a pure function of numbers. Of numpy only the bits of Philox are used, a counter-based generator: numpy
promises to keep those, but not how its own shuffles use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qie.errors import UsageError
from qie.shards.table import Columns

Numbers = NDArray[np.signedinteger[Any]]

# What chance is used for: each use has numbers of its own.
DRAWS, BATCHES, VERSIONS, PASSES, BLOCKS = range(5)


def draw(
    columns: Columns,
    seed: int,
    epoch: int,
    source_weights: Sequence[float] | None,
    leave_out: NDArray[np.bool_] | None,
    shuffled: bool,
) -> tuple[Numbers, NDArray[np.int64] | None]:
    """Positions of an epoch's samples in the order of rows, and how often each row is among them (None: once)."""
    position: Any = np.int32 if len(columns) < 2**31 else np.int64
    kept: Numbers = np.arange(len(columns), dtype=position)
    kept = kept if leave_out is None else kept[~leave_out]
    first = starts(columns.rows[kept])
    if source_weights is None:
        times, chosen = None, first
    else:
        times = _times(columns.sources[kept[first]], source_weights, seed, epoch, shuffled)
        chosen = np.repeat(first, times)
    if len(first) == len(kept):
        return (kept if times is None else kept[chosen]), times
    variants = np.diff(first, append=len(kept))
    variants = variants if times is None else np.repeat(variants, times)
    # The upper half of a random number is a fraction of 2³².
    random = (raw_bits(VERSIONS, seed, epoch, len(chosen)) >> np.uint64(32)).view(np.int64)
    return kept[chosen + (random * variants >> 32)], times


def _times(
    sources: NDArray[np.int32], weights: Sequence[float], seed: int, epoch: int, shuffled: bool
) -> NDArray[np.int64]:
    """How often the epoch draws each row, so that over epochs a row of a source of weight w comes w times each.

    A source is an endless sequence, one permutation of its n rows after another; epoch e takes its places
    from ⌊nwe⌋ to ⌊nw(e+1)⌋. Of a permutation that is taken as a whole, the order is of no consequence: the draws are
    shuffled anyway, so it is not computed.

    Args:
        sources: [rows] each row's source.
        weights: by source.
        shuffled: False leaves the rows in order in every pass.
    """
    exact = [_exact(weight) for weight in weights]
    times = np.zeros(len(sources), np.int64)
    numbers, appeared = np.unique(narrow(sources), return_index=True)
    for part, number in enumerate(numbers[np.argsort(appeared)].tolist()):
        mine = np.flatnonzero(sources == number)
        n = len(mine)
        begin, end = (floor(n * exact[number] * e) for e in (epoch, epoch + 1))
        whole, after = -(-begin // n), end // n
        times[mine] += max(0, after - whole)
        for start, stop in [(begin, whole * n), (after * n, end)] if whole <= after else [(begin, end)]:
            order = np.arange(n)
            if shuffled and start < stop:
                order = permutation(raw_bits(PASSES, seed, start // n, n, part))
            times[mine[order[start % n :][: stop - start]]] += 1
    return times


def _exact(weight: float) -> Fraction:
    """The weight as it was meant: 0.1 is a tenth and 0.3333333333333333 a third, for any number of rows and epochs."""
    exact = Fraction(float(weight)).limit_denominator(10**6) if isfinite(weight) else Fraction(0)
    if exact <= 0:
        raise UsageError(
            "a source's weight is not a positive number",
            expected="how often an epoch draws each of its rows, such as 1, 2 or 0.5",
            found=weight,
        )
    return exact


def held_out(
    keys: NDArray[np.uint8], rows: NDArray[np.integer[Any]], count: int
) -> tuple[list[int], NDArray[np.bool_]]:
    """Rows to keep out of training: those whose first variant has one of the `count` smallest keys.

    A key is a hash, so this is a fair draw; and it is a function of content alone, so the same rows are kept out when
    they are reordered, and rows of equal content (equal first keys) never stand on both sides.

    Args:
        keys: [N, 32] each sample's key, compared as bytes.
        rows: [N] the sample's row; variants of a row stand together, the first first.
        count: number of contents.

    Returns:
        Positions of the first variants by (key, position), and [N] which samples belong to these rows.
    """
    first = starts(rows)
    heads = _words(keys[first, :8]).ravel()
    # At least `count` contents lie at or below the count-th smallest head; only they are compared in full.
    smallest = np.sort(heads)
    smallest = smallest[starts(smallest)][: max(count, 0)]
    candidates = np.flatnonzero(heads <= smallest[-1]) if len(smallest) else np.zeros(0, np.int64)
    words = _words(keys[first[candidates]])
    by_key = np.lexsort(words.T[::-1])
    words = words[by_key]
    contents = np.cumsum(np.append(True, (words[1:] != words[:-1]).any(axis=1))[: len(words)])
    chosen = candidates[by_key[contents <= count]]
    mask = np.zeros(len(first), np.bool_)
    mask[chosen] = True
    return first[chosen].tolist(), np.repeat(mask, np.diff(first, append=len(rows)))


def raw_bits(use: int, seed: int, number: int, count: int, part: int = 0) -> NDArray[np.uint64]:
    """`count` random numbers of 64 bits. Philox is counter-based: the numbers of one epoch need no other epoch's.

    NumPy promises to keep a bit generator's raw numbers, but not its shuffles.
    """
    key = np.array([seed, number], np.uint64)
    raw: NDArray[np.uint64] = np.random.Philox(key=key, counter=[0, 0, part, use]).random_raw(count)
    return raw


def permutation(raw: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The order of random numbers, which are overwritten: what is appended moves nothing else.

    Their last bits give way to their index: sorting one array takes a tenth of the time of `argsort`, and no two are
    equal.
    """
    bits = np.uint64(max(32, len(raw).bit_length()))
    raw >>= bits
    raw <<= bits
    raw |= np.arange(len(raw), dtype=np.uint64)
    raw.sort()
    raw &= (np.uint64(1) << bits) - np.uint64(1)
    return raw.view(np.int64)


def apart(raw: NDArray[np.uint64], times: NDArray[np.int64] | None) -> NDArray[np.uint64]:
    """Random numbers for draws that keep a row's c draws apart: one in each c-th part of the epoch."""
    if times is None or times.max(initial=1) == 1:
        return raw
    often = np.repeat(times, times).astype(np.uint64)
    nth = (np.arange(len(raw)) - np.repeat(np.cumsum(times) - times, times)).astype(np.uint64)
    return raw // often + nth * (np.uint64(2**64 - 1) // often)


def starts(numbers: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Where each stretch of one number begins, such as a row's variants."""
    return np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)])


def _words(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Keys [N, 8·k] as [N, k] integers that compare as their bytes do."""
    return np.ascontiguousarray(keys).view(">u8").astype(np.uint64)


def narrow(numbers: NDArray[Any]) -> NDArray[Any]:
    """In as few bytes as they need: up to two, NumPy sorts by radix."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))

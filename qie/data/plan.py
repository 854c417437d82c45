"""The plan: the list of global batches of one epoch. Pure: numbers in, numbers out, no reading.

An epoch is a function of (columns, seed, epoch, global batch size, settings), whoever computes it. A process takes its
slice of each global batch, so the number of processes changes nothing but who computes what.

Random numbers decide which rows an epoch draws, their order and their variants, and which rows are kept for validation.
They come from the raw bits of Philox, a counter-based generator: numpy promises to keep these bits, but not the way its
own shuffles use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor, isfinite
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from qie.errors import UsageError
from qie.shards.sample_table import CHUNK, Columns, Growing

PLAN_VERSION = 2
"""Raised when the same samples and seed would be ordered otherwise: a breaking change."""

Numbers = NDArray[np.signedinteger[Any]]

Tail = Literal["pad", "drop"]
Order = Literal["shuffle", "blocks", "sequence"]

MAX_GLOBAL_BATCH = 65_536

_NAMED_SHAPES = 8

# What chance is used for: each use has numbers of its own.
DRAWS, BATCHES, VARIANTS, PASSES, BLOCKS, COPIES = range(6)


@dataclass(frozen=True)
class PlannedBatch:
    """One global batch.

    Attributes:
        positions: samples, by their position in the stream.
        weights: 0 for a sample that only fills the batch up, and equal for all others, so that the mean of weighted
            losses over the batch, in however many parts it is computed, is the mean loss of the real samples.
    """

    positions: tuple[int, ...]
    weights: tuple[float, ...]

    def slice(self, rank: int, world_size: int) -> PlannedBatch:
        """The part of process `rank` of `world_size`, which divides the batch."""
        share, over = divmod(len(self.positions), world_size)
        assert not over, f"{len(self.positions)} samples for {world_size} processes"
        mine = slice(rank * share, (rank + 1) * share)
        return PlannedBatch(self.positions[mine], self.weights[mine])

    def without(self, excluded: Callable[[int], bool]) -> PlannedBatch:
        """The same global batch without some samples: each one's place is filled by the real sample before it, with
        weight 0, or by the first one. Nothing where no real sample is left."""
        out = [excluded(position) for position in self.positions]
        if not any(out):
            return self
        real = [weight > 0 and not gone for weight, gone in zip(self.weights, out, strict=True)]
        if not any(real):
            return PlannedBatch((), ())
        filler, positions = self.positions[real.index(True)], []
        for position, mine, gone in zip(self.positions, real, out, strict=True):
            filler = position if mine else filler
            positions.append(filler if gone else position)
        weight = len(real) / sum(real)
        return PlannedBatch(tuple(positions), tuple(weight if mine else 0.0 for mine in real))


@dataclass(frozen=True, eq=False)
class Plan(Sequence[PlannedBatch]):
    """The batches of an epoch, as arrays.

    Attributes:
        positions: [batches, global batch size] int32, or int64 from 2³¹ samples on.
        filled: [batches] how many of a batch's samples are real; the others repeat them with weight 0.
    """

    positions: Numbers
    filled: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, number: int) -> PlannedBatch: ...

    @overload
    def __getitem__(self, number: slice) -> Plan: ...

    def __getitem__(self, number: int | slice) -> PlannedBatch | Plan:
        if isinstance(number, slice):
            return Plan(self.positions[number], self.filled[number])
        positions, real = self.positions[number].tolist(), int(self.filled[number])
        weights = (len(positions) / real,) * real + (0.0,) * (len(positions) - real)
        return PlannedBatch(tuple(positions), weights)

    def windows(self) -> Iterator[Plan]:
        """All batches; those of `qie.data.windows.WindowedPlan` come in parts."""
        yield self


def plan_epoch(
    columns: Columns,
    *,
    seed: int,
    epoch: int,
    global_batch_size: int,
    tail: Tail = "pad",
    order: Order = "shuffle",
    block_size: int = 16,
    source_weights: Sequence[float] | None = None,
    leave_out: NDArray[np.int64] | None = None,
    similar_lengths: int = 64,
) -> Plan:
    """The batches of an epoch, each of a single shape.

    Args:
        columns: the samples.
        seed, epoch: decide the order, which rows a fractional weight draws, and which variant of a row is shown.
        global_batch_size: samples per batch over all processes.
        tail: what becomes of the last samples of a shape when they fill no batch: `pad` repeats them with weight 0, so
            that everything drawn is used; `drop` leaves them out of this epoch. Which they are is left to chance, but
            in a sequence.
        order: `shuffle` everything; `blocks`, for stores where reading far apart is slow: shards are shuffled, and
            samples and batches within each `block_size` of them in turn, what fills no batch going on to the next; or
            `sequence`: samples by position, a batch when its last sample comes, incomplete ones at the end.
        source_weights: of each source, how often an epoch draws each of its rows; None is once. See `draw`.
        leave_out: positions of samples that no batch holds, rising. A row with nothing else counts for no weight.
        similar_lengths: this many batches of a shape are filled by prompt length together, which keeps padding small;
            not in a sequence.

    Raises:
        UsageError: a weight is not positive; the batch is too large; or no batch at all comes out, then it names the
            largest shapes.
    """
    require_batch_size(global_batch_size)
    assert block_size > 0
    drawn, times = draw(columns, seed, epoch, source_weights, leave_out, shuffled=order != "sequence")
    windows: NDArray[Any] = np.zeros(len(drawn), np.uint8)
    if order != "sequence":
        drawn = drawn[permutation(apart(raw_bits(DRAWS, seed, epoch, len(drawn)), times))]
    if order == "blocks":
        windows = _windows(columns.blocks, seed, epoch, block_size)[drawn]
        by_window = np.argsort(windows, kind="stable")
        drawn, windows = drawn[by_window], windows[by_window]
    similar = 1 if order == "sequence" else similar_lengths
    most = 1 if times is None else int(times.max(initial=1))
    batches, filled, last = batches_of(columns, drawn, windows, global_batch_size, tail, similar, most)
    if not len(filled):
        raise no_batches(columns, drawn_of_shapes(columns, drawn), global_batch_size)
    if order == "sequence":
        when = np.argsort(last, kind="stable")
    else:
        by_chance = permutation(raw_bits(BATCHES, seed, epoch, len(filled)))
        when = by_chance[np.argsort(windows[last[by_chance]], kind="stable")]
    return Plan(drawn[batches[when]], filled[when])


class SequencePrefix:
    """The batches of `order="sequence"` that are complete, perhaps none: they stay when further samples come.

    For streams that follow shards while these are written. `seed` and `epoch` decide only which variants are shown.
    """

    def __init__(self, global_batch_size: int, seed: int = 0, epoch: int = 0) -> None:
        require_batch_size(global_batch_size)
        self.plan = Plan(np.zeros((0, global_batch_size), np.int32), np.zeros(0, np.int32))
        self._chance = seed, epoch
        self._samples = self._rows = 0
        self._waiting: Numbers = np.zeros(0, np.int32)
        self._batches = Growing({"positions": self.plan.positions, "filled": self.plan.filled})

    def extend(self, columns: Columns, leave_out: NDArray[np.int64] | None = None) -> Plan:
        """The same of more samples: those before, and whole rows behind them. Costs what is new.

        Args:
            columns, leave_out: of all samples, as for `plan_epoch`.
        """
        start, self._samples = self._samples, len(columns)
        out = None if leave_out is None else leave_out[leave_out >= start] - start
        new, _ = draw(columns.since(start), *self._chance, None, out, shuffled=False, rows_before=self._rows)
        self._rows += len(new)
        drawn = np.concatenate([self._waiting, (new + np.int64(start)).astype(position_type(columns))])
        windows = np.zeros(len(drawn), np.uint8)
        batches, filled, last = batches_of(columns, drawn, windows, self.plan.positions.shape[1], "drop", 1, 1)
        waiting = np.ones(len(drawn), np.bool_)
        waiting[batches] = False
        self._waiting, when = drawn[waiting], np.argsort(last)
        self.plan = Plan(**self._batches.append({"positions": drawn[batches[when]], "filled": filled[when]}))
        return self.plan


def require_batch_size(global_batch_size: int) -> None:
    """Raise UsageError for a global batch that no plan can hold: a place in it costs memory, filled or not."""
    assert global_batch_size > 0
    if global_batch_size > MAX_GLOBAL_BATCH:
        raise UsageError(
            "the global batch is too large",
            expected=f"at most {MAX_GLOBAL_BATCH} samples: data.batch_size, or --batch-size, times processes",
            found=global_batch_size,
            hint="lower the batch size",
        )


def _windows(blocks: NDArray[np.int32], seed: int, epoch: int, size: int) -> NDArray[Any]:
    """[N] which window of `size` shards, in an order by chance, each sample's shard is in."""
    first = starts(blocks)
    windows = np.empty(len(first), np.int64)
    windows[permutation(raw_bits(BLOCKS, seed, epoch, len(first)))] = np.arange(len(first)) // size
    return narrow(np.repeat(windows, np.diff(first, append=len(blocks))))


def batches_of(
    columns: Columns, drawn: Numbers, windows: NDArray[Any], size: int, tail: Tail, similar: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Batches of indices into `drawn`, how many of each are real, and the index at which each was complete.

    Args:
        windows: the window of each draw, in their order.
        similar: stretches of so many batches are sorted by length.
        most: how often a row is drawn at most; stretches are made so short that its draws are in different ones.
    """
    shapes = shape_numbers(columns)[columns.shapes[drawn]]
    by_shape = np.argsort(shapes, kind="stable")
    counts = np.bincount(shapes, minlength=len(columns.shape_names))
    rest = counts % size
    incomplete = np.flatnonzero(rest)
    # The tail is what the shuffle put last. It is cut off before sorting by length, or it would be the longest.
    column, real = np.arange(size), rest[incomplete, None]
    tails = (np.cumsum(counts) - rest)[incomplete, None] + column % real
    whole = np.ones(len(drawn), np.bool_)
    whole[tails[column < real]] = False
    full = by_shape[whole].reshape(-1, size)
    last = full[:, -1].copy()
    if similar > 1:
        full = _sorted_by_length(full, columns.lengths[drawn[full]], shapes[last], windows[last], similar, most)
    filled = np.full(len(full), size, np.int32)
    if tail == "drop":
        return full, filled, last
    # A tail is filled with its own samples, which are read anyway and pad nothing further.
    return (
        np.concatenate([full, by_shape[tails]]),
        np.concatenate([filled, rest[incomplete].astype(np.int32)]),
        np.concatenate([last, np.full(len(tails), len(drawn) - 1)]),
    )


def drawn_of_shapes(columns: Columns, drawn: Numbers) -> NDArray[np.int64]:
    """How many of some samples each shape has, in the order of `shape_numbers`."""
    return np.bincount(shape_numbers(columns)[columns.shapes[drawn]], minlength=len(set(columns.shape_names)))


def shape_numbers(columns: Columns) -> NDArray[Any]:
    """A number for each of the columns' names of shapes: equal for equal shapes, and rising with them."""
    place = {shape: number for number, shape in enumerate(sorted(set(columns.shape_names)))}
    return narrow(np.array([place[shape] for shape in columns.shape_names], np.int64))


def _sorted_by_length(
    full: NDArray[np.int64],
    lengths: NDArray[np.int32],
    shapes: NDArray[Any],
    windows: NDArray[Any],
    similar: int,
    most: int,
) -> NDArray[np.int64]:
    """Batches [B, size] filled again by length, in stretches of at most `similar` of one shape and window."""
    runs = np.flatnonzero(np.append(True, (shapes[1:] != shapes[:-1]) | (windows[1:] != windows[:-1]))[: len(full)])
    sizes = np.diff(runs, append=len(full))
    stretch = np.repeat(np.clip(sizes // most, 1, similar), sizes)
    number = np.cumsum((np.arange(len(full)) - np.repeat(runs, sizes)) % stretch == 0)
    by_length = np.lexsort((narrow(lengths.ravel()), np.repeat(narrow(number), full.shape[1])))
    return full.ravel()[by_length].reshape(full.shape)


def no_batches(columns: Columns, counts: NDArray[np.int64], size: int) -> UsageError:
    """The error that no shape fills a batch, where so many samples are drawn of each that `shape_numbers` numbers."""
    shapes = sorted(set(columns.shape_names))
    found = sorted((-count, shape) for count, shape in zip(counts.tolist(), shapes, strict=True) if count)
    named = [f"{-count} of {shape.in_pixels(columns.latent_scale)}" for count, shape in found[:_NAMED_SHAPES]]
    more = [f"and {len(found) - _NAMED_SHAPES} more shapes"] if len(found) > _NAMED_SHAPES else []
    smaller = "lower data.batch_size, or set data.tail to pad"
    return UsageError(
        "0 batches: no shape has enough samples for one",
        expected=f"{size} samples of one shape",
        found=", ".join(named + more) or "no samples",
        hint=smaller if len(columns) else "qie-precompute --dry-run says why no row can be encoded",
    )


def draw(
    columns: Columns,
    seed: int,
    epoch: int,
    source_weights: Sequence[float] | None,
    leave_out: NDArray[np.int64] | None,
    shuffled: bool,
    rows_before: int = 0,
) -> tuple[Numbers, NDArray[np.int64] | None]:
    """Positions of an epoch's samples in the order of rows, and how often each row is among them (None: once).

    With `rows_before`, the samples stand behind those of so many drawn rows, whose random numbers they do not take.
    """
    kept: Numbers = np.arange(len(columns), dtype=position_type(columns))
    kept = kept if leave_out is None else np.delete(kept, leave_out)
    first = starts(columns.numbers[kept])
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
    random = (raw_bits(VARIANTS, seed, epoch, len(chosen), after=rows_before) >> np.uint64(32)).view(np.int64)
    return kept[chosen + (random * variants >> 32)], times


def position_type(columns: Columns) -> Any:
    """The type of positions of so many samples."""
    return np.int32 if len(columns) < 2**31 else np.int64


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
    exact = [exact_weight(weight) for weight in weights]
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


def exact_weight(weight: float) -> Fraction:
    """The weight as it was meant: 0.1 is a tenth and 0.3333333333333333 a third, for any number of rows and epochs."""
    exact = Fraction(float(weight)).limit_denominator(10**6) if isfinite(weight) else Fraction(0)
    if exact <= 0:
        raise UsageError(
            "a source's weight is not a positive number",
            expected="how often an epoch draws each of its rows, such as 1, 2 or 0.5",
            found=weight,
        )
    return exact


def held_out(keys: NDArray[np.uint8], columns: Columns, count: int) -> tuple[list[int], NDArray[np.int64]]:
    """Rows to keep out of training: those whose first variant has one of the `count` smallest keys.

    A key is a hash, so this is a fair draw; and it is a function of content alone, so the same rows are kept out when
    they are reordered, and rows of equal content (equal first keys) never stand on both sides.

    Args:
        keys: [N, 32] the keys of the first N samples, compared as bytes. They are read in parts.
        columns: these samples, perhaps more.
        count: number of contents.

    Returns:
        Positions of the first variants by (key, position), and of all samples of these rows, rising.
    """
    smallest, found = np.zeros(0, np.uint64), [np.zeros(0, np.int64)]
    for start in range(0, len(keys), CHUNK) if count > 0 else ():
        first = row_starts(columns, start, min(start + CHUNK, len(keys)))
        heads = _words(keys[first, :8]).ravel()
        if len(smallest) == count:
            low = heads <= smallest[-1]
            first, heads = first[low], heads[low]
        # At least `count` contents lie at or below the count-th smallest head; only they are compared in full.
        smallest = np.unique(np.concatenate([smallest, heads]))[:count]
        found.append(first[heads <= smallest[-1]])
    candidates = np.concatenate(found)
    words = _words(keys[candidates])
    by_key = np.lexsort(words.T[::-1])
    words = words[by_key]
    contents = np.cumsum(np.append(True, (words[1:] != words[:-1]).any(axis=1))[: len(words)])
    chosen = candidates[by_key[contents <= count]]
    every = [chosen]
    while len(every[-1]):
        after = every[-1][every[-1] + 1 < len(keys)] + 1
        every.append(after[~_begins_row(columns, after)])
    return chosen.tolist(), np.sort(np.concatenate(every))


def row_starts(columns: Columns, start: int, stop: int) -> NDArray[np.int64]:
    """Positions in a range at which a row begins."""
    positions = np.arange(start, stop)
    return positions if columns.single else positions[_begins_row(columns, positions)]


def count_rows(columns: Columns) -> int:
    """How many rows the samples belong to."""
    edges = [*range(0, len(columns), CHUNK), len(columns)]
    return sum(len(row_starts(columns, start, stop)) for start, stop in pairwise(edges))


def variants_differ(columns: Columns) -> bool:
    """Whether variants of a row have different shapes."""
    names = shape_numbers(columns)
    for start in range(0, 0 if columns.single else len(columns), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(columns)))
        later = positions[~_begins_row(columns, positions)]
        if (names[columns.shapes[later]] != names[columns.shapes[later - 1]]).any():
            return True
    return False


def _begins_row(columns: Columns, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a row begins at each of some positions."""
    if columns.single:
        return np.ones(len(positions), np.bool_)
    other = columns.rows[positions] != columns.rows[np.maximum(positions - 1, 0)]
    after = np.searchsorted(columns.ends, positions)  # a shard ends here, unless it is the last one's end
    begins: NDArray[np.bool_] = other | (positions == 0) | (columns.ends[after] == positions)
    return begins


def raw_bits(use: int, seed: int, number: int, count: int, part: int = 0, after: int = 0) -> NDArray[np.uint64]:
    """`count` random numbers of 64 bits, behind the first `after`.

    Philox is counter-based: the numbers of one epoch need no other epoch's.

    NumPy promises to keep a bit generator's raw numbers, but not its shuffles.
    """
    key = np.array([seed, number], np.uint64)
    blocks, within = divmod(after, 4)  # a count of Philox gives four numbers
    raw: NDArray[np.uint64] = np.random.Philox(key=key, counter=[blocks, 0, part, use]).random_raw(within + count)
    return raw[within:]


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
    nth = np.arange(len(raw)) - np.repeat(np.cumsum(times) - times, times)
    return spread_apart(raw, nth, np.repeat(times, times))


def spread_apart(raw: NDArray[np.uint64], nth: NDArray[Any], often: NDArray[Any]) -> NDArray[np.uint64]:
    """Random numbers in the n-th of so many parts of their range, for the n-th of so many draws, counted from 0."""
    if often.max(initial=1) == 1:
        return raw
    parts: NDArray[np.uint64] = often.astype(np.uint64)
    return raw // parts + nth.astype(np.uint64) * (np.uint64(2**64 - 1) // parts)


def starts(numbers: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Where each stretch of one number begins, such as a row's variants."""
    return np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)])


def _words(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Keys [N, 8·k] as [N, k] integers that compare as their bytes do."""
    return np.ascontiguousarray(keys).view(">u8").astype(np.uint64)


def narrow(numbers: NDArray[Any]) -> NDArray[Any]:
    """In as few bytes as they need: up to two, NumPy sorts by radix."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))

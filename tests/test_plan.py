"""The plan of an epoch: what is drawn comes once, one shape a batch, the same batches for any number of processes."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from math import floor
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import qie.data.plan
import qie.data.plan_settings
from qie.data.plan import PLAN_VERSION, Plan, PlannedBatch, SequencePrefix, count_rows, draw, held_out, plan_epoch
from qie.data.plan_settings import PlanSettings
from qie.errors import UsageError
from qie.shards.sample_table import Columns, ends_of
from qie.types import Shape

SQUARE, WIDE, TWO_CONTROLS = Shape((4, 4), ((4, 4),)), Shape((4, 6), ((4, 6),)), Shape((4, 4), ((2, 4), (4, 2)))
SHAPES = (WIDE, TWO_CONTROLS, SQUARE)
WEIGHTS = (0.25, 1 / 3, 0.5, 1.0, 1.7, 2.0, 3.0)
deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=80)
seeds, epochs, sizes = st.integers(0, 2**31 - 1), st.integers(0, 10_000), st.integers(1, 8)
orders, tails = st.sampled_from(["shuffle", "blocks", "sequence"]), st.sampled_from(["pad", "drop"])


def of(
    shapes: Sequence[Shape],
    *,
    rows: Iterable[int] | None = None,
    lengths: Iterable[int] | None = None,
    sources: Iterable[int] | None = None,
    blocks: Iterable[int] | None = None,
) -> Columns:
    """Samples of `shapes`: by default each a row of its own, equally long, of one source, two rows a shard."""
    row = np.array(range(len(shapes)) if rows is None else list(rows), np.int64)
    shards = (
        (np.cumsum(np.diff(row, prepend=row[:1]) != 0) // 2) if blocks is None else np.array(list(blocks), np.int64)
    )
    return Columns(
        shapes=np.array([SHAPES.index(shape) for shape in shapes], np.int32),
        shape_names=SHAPES,
        rows=row,
        lengths=np.array([9] * len(shapes) if lengths is None else list(lengths), np.int32),
        sources=np.array([0] * len(shapes) if sources is None else list(sources), np.int32),
        ends=ends_of(shards),
    )


@st.composite
def samples(draw: st.DrawFn, variants: int = 1, sources: int = 1) -> Columns:
    """Up to 40 rows of several variants and sources, with gaps in the numbering of rows and shards."""
    rows = draw(st.lists(st.tuples(st.integers(1, variants), st.integers(0, sources - 1)), min_size=1, max_size=40))
    each = [(7 * number, source) for number, (count, source) in enumerate(rows) for _ in range(count)]
    many = {"min_size": len(each), "max_size": len(each)}
    return of(
        draw(st.lists(st.sampled_from(SHAPES), **many)),
        rows=[row for row, _ in each],
        sources=[source for _, source in each],
        lengths=draw(st.lists(st.integers(1, 12), **many)),
        blocks=np.repeat(
            np.cumsum(draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=len(rows), max_size=len(rows)))),
            [count for count, _ in rows],
        ),
    )


def some(columns: Columns, data: st.DataObject) -> np.ndarray:
    """Positions, rising."""
    chosen = st.lists(st.booleans(), min_size=len(columns), max_size=len(columns))
    return np.flatnonzero(np.array(data.draw(chosen), np.bool_))


def shape_of(columns: Columns, position: int) -> Shape:
    return columns.shape_names[columns.shapes[position]]


def real(plan: Iterable[PlannedBatch]) -> list[int]:
    """Positions that count in the loss, in order."""
    return [p for batch in plan for p, weight in zip(batch.positions, batch.weights, strict=True) if weight > 0]


def batches(plan: Plan) -> list[tuple[int, ...]]:
    return [batch.positions for batch in plan]


@deterministic
@given(samples(variants=3, sources=2), seeds, sizes, orders, tails, st.tuples(*[st.sampled_from(WEIGHTS)] * 2))
def test_epochs_are_counted_without_being_planned(columns, seed, size, order, tail, weights) -> None:
    """Variants of other shapes and fractions of rows, by which one epoch has more batches than another, too."""
    columns = replace(columns, source_names=("a", "b"))
    chosen = dict(zip(columns.source_names, weights, strict=True))
    made = PlanSettings(size, seed, tail, order, weights=chosen)
    kept_out = held_out(np.arange(len(columns) * 32, dtype=np.uint8).reshape(-1, 32), columns, 1)[1]
    try:
        expected = sum(len(made.plan(columns, epoch, kept_out)) for epoch in range(3))
    except UsageError as error:
        with pytest.raises(UsageError, match="0 batches") as caught:
            made.count(columns, 3, kept_out)
        assert caught.value.found == error.found
    else:
        assert made.count(columns, 3, kept_out) == expected


@pytest.mark.parametrize(("shapes", "planned"), [([SQUARE, SQUARE, WIDE, WIDE], 1), ([SQUARE, WIDE, WIDE, WIDE], 9)])
def test_epochs_are_counted_by_the_first_if_all_draw_as_many_of_each_shape(monkeypatch, shapes, planned) -> None:
    """Whichever variant of a row is shown, it has the shape of the others."""
    columns, drawn = of(shapes, rows=[0, 0, 1, 1]), []
    monkeypatch.setattr(qie.data.plan_settings, "draw", lambda *args, **kw: drawn.append(0) or draw(*args, **kw))
    made, none = PlanSettings(1, tail="drop"), np.zeros(0, np.int64)
    assert made.count(columns, 9, none) == sum(len(made.plan(columns, epoch, none)) for epoch in range(9)) == 18
    assert len(drawn) == planned


# One epoch, plainly: as plan_epoch, with lists and loops


def raw(use: int, seed: int, number: int, count: int, part: int = 0) -> list[int]:
    key = np.array([seed, number], np.uint64)
    return np.random.Philox(key=key, counter=[0, 0, part, use]).random_raw(count).tolist()


def by(keys: Sequence[Any]) -> list[int]:
    return sorted(range(len(keys)), key=lambda number: keys[number])


def plainly_drawn(columns, seed, epoch, source_weights, leave_out, shuffled) -> list[tuple[int, int, int]]:
    """(position, number of the row's draw, number of the row's draws) in the order of rows."""
    kept = [position for position in range(len(columns)) if position not in leave_out]
    rows = [list(variants) for _, variants in groupby(kept, key=lambda position: columns.rows[position])]
    of_source = defaultdict(list)
    for number, variants in enumerate(rows):
        of_source[columns.sources[variants[0]]].append(number)
    times: Counter[int] = Counter()
    for part, (source, mine) in enumerate(of_source.items()):
        weight = Fraction(source_weights[source]).limit_denominator(10**6) if source_weights else Fraction(1)
        n = len(mine)
        for place in range(floor(n * weight * epoch), floor(n * weight * (epoch + 1))):
            order = by(raw(3, seed, place // n, n, part)) if shuffled else range(n)
            times[mine[order[place % n]]] += 1
    draws = [(number, nth) for number in range(len(rows)) for nth in range(times[number])]
    chance = raw(2, seed, epoch, len(draws))
    return [
        (rows[number][(chance[d] >> 32) * len(rows[number]) >> 32], nth, times[number])
        for d, (number, nth) in enumerate(draws)
    ]


def plainly_windowed(columns, drawn, seed, epoch, order, block_size) -> list[list[int]]:
    """Positions of each window, as they are read."""
    chance = raw(0, seed, epoch, len(drawn))
    keys = [chance[d] // c + nth * ((2**64 - 1) // c) for d, (_, nth, c) in enumerate(drawn)]
    read = [drawn[d][0] for d in by(keys)]
    if order == "shuffle":
        return [read]
    shards = [shard for shard, _ in groupby(columns.blocks.tolist())]
    shuffled = [shards[number] for number in by(raw(4, seed, epoch, len(shards)))]
    windows = [shuffled[start : start + block_size] for start in range(0, len(shards), block_size)]
    return [[position for position in read if columns.blocks[position] in window] for window in windows]


def plainly_filled(columns, windows, size, similar, most):
    """(shape, window, positions) of full batches; and what is left of each shape."""
    waiting, full = defaultdict(list), []
    for number, window in enumerate(windows):
        for position in window:
            waiting[shape_of(columns, position)].append(position)
        for shape in waiting:
            end = len(waiting[shape]) // size * size
            run, waiting[shape] = waiting[shape][:end], waiting[shape][end:]
            stretch = size * min(max(end // size // most, 1), max(similar, 1))
            for start in range(0, end, stretch):
                part = run[start : start + stretch]
                by_length = sorted(part, key=lambda position: columns.lengths[position] if similar > 1 else 0)
                full += [(shape, number, by_length[n : n + size]) for n in range(0, len(part), size)]
    return full, {shape: positions for shape, positions in waiting.items() if positions}


def plainly(
    columns,
    *,
    seed,
    epoch,
    global_batch_size,
    tail="pad",
    order="shuffle",
    block_size=16,
    source_weights=None,
    leave_out=None,
    similar_lengths=64,
) -> list[PlannedBatch]:
    size = global_batch_size
    leave_out = [] if leave_out is None else leave_out.tolist()
    drawn = plainly_drawn(columns, seed, epoch, source_weights, leave_out, order != "sequence")
    if order == "sequence":
        waiting, found = defaultdict(list), []
        for position, *_ in drawn:
            shape = shape_of(columns, position)
            waiting[shape].append(position)
            if len(waiting[shape]) == size:
                found.append(waiting.pop(shape))
        found += [waiting[shape] for shape in sorted(waiting)] if tail == "pad" else []
    else:
        windows = plainly_windowed(columns, drawn, seed, epoch, order, block_size)
        most = max((c for _, _, c in drawn), default=1)
        full, rest = plainly_filled(columns, windows, size, similar_lengths, most)
        full.sort(key=lambda batch: batch[:2])
        last = max((number for number, window in enumerate(windows) if window), default=0)
        full += [(shape, last, rest[shape]) for shape in sorted(rest)] if tail == "pad" else []
        chance = raw(1, seed, epoch, len(full))
        found = [full[b][2] for b in by([(full[b][1], chance[b]) for b in range(len(full))])]
    return [
        PlannedBatch(tuple((batch * size)[:size]), (size / len(batch),) * len(batch) + (0.0,) * (size - len(batch)))
        for batch in found
    ]


@settings(deterministic, max_examples=200)
@given(samples(variants=3, sources=3), st.data())
def test_a_plan_is_what_lists_and_loops_would_give(columns: Columns, data: st.DataObject) -> None:
    arguments = {
        "seed": data.draw(seeds),
        "epoch": data.draw(st.integers(0, 9)),
        "global_batch_size": data.draw(sizes),
        "tail": data.draw(tails),
        "order": data.draw(orders),
        "block_size": data.draw(st.integers(1, 5)),
        "similar_lengths": data.draw(st.integers(0, 5)),
        "leave_out": some(columns, data),
        "source_weights": data.draw(st.none() | st.tuples(*[st.sampled_from(WEIGHTS)] * 3)),
    }
    expected = plainly(columns, **arguments)
    state = np.random.get_state()[1].tolist()
    if expected:
        assert list(plan_epoch(columns, **arguments)) == expected
        assert np.random.get_state()[1].tolist() == state, "of its arguments alone"
    else:
        with pytest.raises(UsageError, match="0 batches"):
            plan_epoch(columns, **arguments)


# Batches


@deterministic
@given(samples(variants=3), st.data(), seeds, epochs, st.sampled_from([1, 2, 3, 8]), st.integers(1, 3), orders, tails)
def test_every_plan_keeps_its_promises(
    columns: Columns, data: st.DataObject, seed: int, epoch: int, world_size: int, per_process: int, order, tail
) -> None:
    """One shape a batch, filled with its own samples; one variant of each row; nothing lost but by `drop`."""
    size = world_size * per_process
    out = some(columns, data)
    arguments = {"seed": seed, "epoch": epoch, "global_batch_size": size, "order": order, "leave_out": out}
    rows = set(np.delete(columns.rows, out).tolist())
    assume(rows)
    padded = plan_epoch(columns, **arguments)
    assert sorted(columns.rows[real(padded)].tolist()) == sorted(rows), "each row once, by one of its variants"
    shown = Counter(shape_of(columns, position) for position in real(padded))
    assume(tail == "pad" or max(shown.values()) >= size)
    plan = plan_epoch(columns, tail=tail, **arguments)
    if tail == "drop":
        seen = Counter(shape_of(columns, position) for position in real(plan))
        assert shown - seen == {shape: count % size for shape, count in shown.items() if count % size}
        assert {weight for batch in plan for weight in batch.weights} == {1.0}
    loss = [float(position**2 % 17) for position in range(len(columns))]
    for batch in plan:
        assert len(batch.positions) == len(batch.weights) == size
        assert all(type(position) is int for position in batch.positions), "numpy's integers are no JSON"
        assert len({shape_of(columns, position) for position in batch.positions}) == 1
        assert not np.isin(batch.positions, out).any()
        assert set(batch.positions) == set(real([batch])), "they are read anyway, and none pads further"
        assert len(set(batch.weights) - {0.0}) == 1
        slices = [batch.slice(rank, world_size) for rank in range(world_size)]
        assert {len(part.positions) for part in slices} == {per_process}
        assert tuple(position for part in slices for position in part.positions) == batch.positions
        assert tuple(weight for part in slices for weight in part.weights) == batch.weights
        means = [np.mean([w * loss[p] for p, w in zip(part.positions, part.weights, strict=True)]) for part in slices]
        assert np.mean(means) == pytest.approx(np.mean([loss[position] for position in real([batch])]))


def test_a_batch_that_processes_cannot_share_is_not_cut_short() -> None:
    (batch,) = plan_epoch(of([SQUARE] * 4), seed=0, epoch=0, global_batch_size=4)
    with pytest.raises(AssertionError, match="4 samples for 3 processes"):
        batch.slice(0, 3)


# A function of its arguments


@deterministic
@given(samples(variants=3, sources=3), st.permutations(range(3)), st.permutations(range(5)), seeds, sizes, orders)
def test_how_shapes_sources_rows_and_shards_are_numbered_changes_nothing(
    columns: Columns, shapes: list[int], sources: list[int], seed: int, size: int, order: str
) -> None:
    weights = (0.5, 2.0, 1.5)
    names, moved = [SQUARE] * 3, [1.0] * 5
    for number in range(3):
        names[shapes[number]], moved[sources[number]] = SHAPES[number], weights[number]
    renumbered = Columns(
        np.array(shapes, np.int32)[columns.shapes],
        tuple(names),
        1000 - columns.rows,
        columns.lengths,
        np.array(sources, np.int32)[columns.sources],
        np.repeat(columns.ends, 2),
    )
    settings = {"seed": seed, "epoch": 1, "global_batch_size": size, "order": order}
    assume(any(plainly_drawn(columns, seed, 1, weights, [], order != "sequence")))
    plan = list(plan_epoch(columns, source_weights=weights, **settings))
    assert list(plan_epoch(renumbered, source_weights=moved, **settings)) == plan


@pytest.mark.parametrize("order", ["shuffle", "blocks"])
def test_seed_and_epoch_decide_the_order_and_neither_rows_nor_shapes_nor_shards_do(order: str) -> None:
    columns = of([SQUARE, WIDE] * 64, blocks=range(128))
    arguments = {"seed": 1, "epoch": 2, "global_batch_size": 8, "order": order}
    plan = plan_epoch(columns, **arguments)
    changes = [{"seed": 0}, {"epoch": 0}, {"seed": 2, "epoch": 1}, {"seed": 2**31}, {"epoch": 2**31}]
    others = [real(plan_epoch(columns, **(arguments | change))) for change in changes]
    orders = {tuple(real(plan)), *map(tuple, others)}
    assert len(orders) == 6 and {tuple(sorted(one)) for one in orders} == {tuple(range(128))}
    shapes = [shape_of(columns, batch.positions[0]) for batch in plan]
    assert shapes not in ([SQUARE] * 8 + [WIDE] * 8, [WIDE] * 8 + [SQUARE] * 8)
    assert all(batch.positions != tuple(sorted(batch.positions)) for batch in plan)
    assert order == "blocks" or all(max(batch.positions) - min(batch.positions) > 32 for batch in plan)
    equal = replace(of([SQUARE] * 4), shapes=np.array([0, 1, 0, 1], np.int32), shape_names=(SQUARE, SQUARE))
    assert len(plan_epoch(equal, seed=0, epoch=0, global_batch_size=4, tail="drop")) == 1, "whatever their numbers"


@pytest.mark.parametrize("order", ["shuffle", "blocks"])
def test_every_sample_is_as_likely_to_come_first(order: str) -> None:
    columns = of([SQUARE] * 5)
    arguments = {"seed": 0, "global_batch_size": 1, "order": order, "block_size": 1}
    first = Counter(plan_epoch(columns, epoch=epoch, **arguments)[0].positions[0] for epoch in range(1000))
    likely = [200] * 5 if order == "shuffle" else [167] * 4 + [333]
    assert all(abs(first[position] - count) < 50 for position, count in enumerate(likely))


GOLDEN = {
    "shuffle": [
        [(8, 4, 1, 7), (5, 9, 10, 0), (6, 3, 2, 11)],
        [(2, 11), (3, 5), (0, 6), (1, 1), (0, 2)],
    ],
    "blocks": [
        [(6, 11, 10, 5), (7, 8, 4, 1), (9, 3, 2, 0)],
        [(0, 11), (1, 1), (0, 2), (3, 2), (5, 6)],
    ],
    "sequence": [
        [(0, 2, 3, 5), (1, 4, 7, 8), (6, 9, 10, 11)],
        [(0, 2), (2, 3), (1, 4), (3, 5), (10, 11)],
    ],
}
"""Of each order: a plain epoch, and one with variants, lengths and weights."""


def test_the_order_of_a_small_epoch_is_what_it_has_always_been() -> None:
    """A run that is resumed by a newer qie has to meet the batches that it would have met."""
    shapes = [SQUARE, WIDE, SQUARE, SQUARE, WIDE, SQUARE, SQUARE, WIDE, WIDE, SQUARE, SQUARE, SQUARE]
    rows, sources = [0, 1, 2, 3, 4, 4, 5, 6, 6, 6, 7, 8], [0] * 6 + [1] * 6
    columns = of(shapes, rows=rows, sources=sources, lengths=[5, 3, 8, 1, 9, 2, 7, 7, 4, 6, 1, 9])
    raise_it = f"the order of an epoch has changed: this breaks resuming, so raise PLAN_VERSION (now {PLAN_VERSION})"
    assert PLAN_VERSION == 2, "give this test the order of the new variant"
    for order, expected in GOLDEN.items():
        settings = {"seed": 7, "order": order, "block_size": 2}
        plain = plan_epoch(of(shapes), epoch=0, global_batch_size=4, **settings)
        mixed = plan_epoch(columns, epoch=5, global_batch_size=2, source_weights=(1.5, 0.7), **settings)
        assert [batches(plain), batches(mixed)] == expected, f"{order}: {raise_it}"


# Lengths


def padding(plan: Plan, columns: Columns) -> int:
    """Tokens that stand for nothing."""
    lengths = columns.lengths[plan.positions]
    return int((lengths.max(axis=1, keepdims=True) - lengths).sum())


LONG_AND_SHORT = of([SQUARE] * 403, lengths=[1 + position * 7919 % 1009 for position in range(403)])


def test_batches_of_similar_lengths_pad_little_and_come_in_any_order() -> None:
    settings = {"seed": 0, "epoch": 0, "global_batch_size": 4, "tail": "drop"}
    apart = padding(plan_epoch(LONG_AND_SHORT, similar_lengths=1, **settings), LONG_AND_SHORT)
    assert padding(plan_epoch(LONG_AND_SHORT, similar_lengths=8, **settings), LONG_AND_SHORT) < apart / 5
    plan = plan_epoch(LONG_AND_SHORT, similar_lengths=64, **settings)
    assert padding(plan, LONG_AND_SHORT) < apart / 25
    ups = np.diff(LONG_AND_SHORT.lengths[plan.positions].max(axis=1)) > 0
    assert 40 < ups.sum() < 60, "they come in no order of length: of 100 steps about half go up"


@pytest.mark.parametrize("order", ["shuffle", "blocks"])
def test_every_length_is_as_likely_to_be_in_the_incomplete_batch(order: str) -> None:
    columns = of([SQUARE] * 11, lengths=range(1, 12))
    arguments = {"seed": 0, "global_batch_size": 4, "tail": "drop", "order": order}
    seen = Counter(p for epoch in range(1000) for p in real(plan_epoch(columns, epoch=epoch, **arguments)))
    dropped = [1000 - seen[position] for position in range(11)]
    assert all(abs(count - 3000 / 11) < 60 for count in dropped), dropped


# Weights of sources


def drawn_rows(columns: Columns, epoch: int, **settings: Any) -> Counter[int]:
    plan = plan_epoch(columns, epoch=epoch, global_batch_size=1, **settings)
    return Counter(int(columns.rows[position]) for position in real(plan))


@pytest.mark.parametrize("order", ["shuffle", "blocks", "sequence"])
@pytest.mark.parametrize("weight", [1, 2, 0.5, 0.25, 1 / 3, 0.7, 1.5, 2.75])
def test_a_source_is_drawn_by_its_weight_exactly_and_evenly(weight: float, order: str) -> None:
    columns = of([SQUARE] * 17, sources=[0] * 4 + [1] * 13)
    exact, total = Fraction(weight).limit_denominator(100), Counter()
    for epoch in range(12):
        total += drawn_rows(columns, epoch, seed=5, source_weights=(1, weight), order=order)
        assert [total[row] for row in range(4)] == [epoch + 1] * 4
        mine = [total[row] for row in range(4, 17)]
        assert sum(mine) == floor(13 * exact * (epoch + 1))
        assert max(mine) - min(mine) <= 1, "no row comes again before all others came"


def test_which_rows_a_fractional_weight_draws_is_left_to_chance_in_each_source_and_exact_however_late() -> None:
    columns = of([SQUARE] * 40, sources=[0, 1] * 20)
    drawn = {seed: frozenset(drawn_rows(columns, 0, seed=seed, source_weights=[0.5, 0.5])) for seed in range(400)}
    assert len(set(drawn.values())) > 390
    times = Counter(row for rows in drawn.values() for row in rows)
    assert all(150 < times[row] < 250 for row in range(40))
    assert len({frozenset(drawn_rows(columns, epoch, seed=0, source_weights=[0.5, 1])) for epoch in range(20)}) == 20
    assert {row // 2 for row in drawn[0] if row % 2} != {row // 2 for row in drawn[0] if not row % 2}, "independently"
    for weight in (1 / 3, 0.1, 0.7):
        late = drawn_rows(of([SQUARE] * 30), 3 * 10**15, seed=0, source_weights=[weight])
        assert sum(late.values()) == round(30 * weight)


@pytest.mark.parametrize("weight", [1, 2, 4, 12])
def test_a_row_that_is_drawn_often_is_not_often_in_a_batch(weight: int) -> None:
    """Its draws are equally long: sorted by length, they would stand together."""
    columns = of([SQUARE] * 112, lengths=range(112), sources=[0] * 16 + [1] * 96)
    met = sum(
        len(batch.positions) - len(set(batch.positions))
        for epoch in range(20)
        for batch in plan_epoch(columns, seed=0, epoch=epoch, global_batch_size=4, source_weights=(weight, 1))
    )
    pairs, draws = 16 * weight * (weight - 1) / 2, 16 * weight + 96
    assert met / 20 <= 1.5 * pairs * 3 / (draws - 1), "about as seldom as in a shuffle that knows nothing of lengths"


@pytest.mark.parametrize("weight", [0, -1, 0.0, -0.5, float("nan"), float("inf"), 1e-9])
def test_a_weight_that_is_no_positive_number_is_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="weight is not a positive number") as caught:
        plan_epoch(of([SQUARE] * 4), seed=0, epoch=0, global_batch_size=1, source_weights=[weight])
    assert str(caught.value.found) == str(weight)


# Variants


def test_variants_are_drawn_evenly_and_each_row_for_itself() -> None:
    columns = of([SQUARE] * 9, rows=[0, 0, 0, 0, 1, 2, 2, 2, 2])
    shown = [frozenset(real(plan_epoch(columns, seed=1, epoch=e, global_batch_size=1))) for e in range(1600)]
    times = Counter(position for epoch in shown for position in epoch)
    assert all(340 < times[position] < 460 for position in (0, 1, 2, 3, 5, 6, 7, 8)) and times[4] == 1600
    assert all(70 < count < 130 for count in Counter(shown).values()) and len(set(shown)) == 16


# Blocks


def open_shards(columns: Columns, plan: Plan) -> int:
    """Between the first and the last batch that needs a shard, it is open: the most at a time."""
    used = [set(columns.blocks[list(batch.positions)].tolist()) for batch in plan]
    shards = set().union(*used)
    spans = [[n for n, mine in enumerate(used) if shard in mine] for shard in shards]
    return max(sum(span[0] <= number <= span[-1] for span in spans) for number in range(len(used)))


@pytest.mark.parametrize("shapes", [(SQUARE,), (SQUARE, WIDE, SQUARE, TWO_CONTROLS, WIDE)])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_block_by_block_few_shards_are_open_at_a_time(block_size: int, shapes: tuple[Shape, ...]) -> None:
    columns = of((shapes * 800)[:800], blocks=[n // 20 for n in range(800)], lengths=[n * 7 % 31 for n in range(800)])
    settings = {"seed": 1, "global_batch_size": 4, "tail": "drop", "block_size": block_size}
    for epoch in range(5):
        plan = plan_epoch(columns, epoch=epoch, order="blocks", **settings)
        assert open_shards(columns, plan) <= 2 * block_size, "a window, and what the one before it left over"
    assert open_shards(columns, plan_epoch(columns, epoch=0, **settings)) > 35


def test_of_earlier_windows_less_than_a_batch_of_each_shape_is_left() -> None:
    """However rare a shape: whoever reads window by window holds back this many samples."""
    columns = of([(SQUARE if n % 9 else WIDE) for n in range(400)], blocks=[n // 10 for n in range(400)])
    plan = plan_epoch(columns, seed=2, epoch=0, global_batch_size=4, order="blocks", block_size=2, tail="drop")
    window = {
        shard: number
        for number, window in enumerate(plainly_windowed(columns, [(p, 0, 1) for p in range(400)], 2, 0, "blocks", 2))
        for shard in columns.blocks[window].tolist()
    }
    complete = [max(window[int(columns.blocks[p])] for p in batch.positions) for batch in plan]
    assert complete == sorted(complete) and set(complete) == set(range(20)), "one window after another"
    late = Counter(
        (shape_of(columns, p), now)
        for batch, now in zip(plan, complete, strict=True)
        for p in batch.positions
        if window[int(columns.blocks[p])] < now
    )
    assert 0 < max(late.values()) <= 3


# In sequence


@deterministic
@given(samples(variants=3), st.data(), sizes, seeds, epochs)
def test_the_plan_of_the_first_shards_is_how_the_plan_of_all_begins(
    columns: Columns, data: st.DataObject, size: int, seed: int, epoch: int
) -> None:
    ends = [n for n in range(1, len(columns) + 1) if n == len(columns) or columns.rows[n] != columns.rows[n - 1]]
    known = sorted(data.draw(st.sets(st.sampled_from(ends)))) + ends[-1:]
    rows = data.draw(st.lists(st.sampled_from(columns.rows[1:].tolist() or [0])))
    out = np.flatnonzero(np.isin(columns.rows, rows))
    assume(len(out) < len(columns))
    settings = {"seed": seed, "epoch": epoch, "global_batch_size": size}
    everything = plan_epoch(columns, order="sequence", leave_out=out, **settings)
    prefix = SequencePrefix(**settings)
    for stop in known:
        first = Columns(
            columns.shapes[:stop],
            columns.shape_names,
            columns.rows[:stop],
            columns.lengths[:stop],
            columns.sources[:stop],
            ends_of(columns.blocks[:stop]),
        )
        found = prefix.extend(first, out[out < stop])
        complete = everything[: len(found)]
        assert found.positions.dtype == complete.positions.dtype and found.filled.dtype == complete.filled.dtype
        assert np.array_equal(found.positions, complete.positions) and np.array_equal(found.filled, complete.filled)
        if (out < stop).sum() == stop:
            continue
        mine = list(plan_epoch(first, order="sequence", leave_out=out[out < stop], **settings))
        assert mine[: len(found)] == list(found) and len(mine) - len(found) <= len(SHAPES)
        assert all(0.0 in batch.weights for batch in mine[len(found) :])


def test_a_batch_comes_when_its_last_sample_does_and_incomplete_ones_in_the_order_of_shapes() -> None:
    columns = of([WIDE, SQUARE, SQUARE, WIDE, TWO_CONTROLS, WIDE, SQUARE])
    plan = plan_epoch(columns, seed=0, epoch=3, global_batch_size=2, order="sequence")
    assert batches(plan) == [(1, 2), (0, 3), (4, 4), (6, 6), (5, 5)]
    assert sorted([WIDE, SQUARE, TWO_CONTROLS]) == [TWO_CONTROLS, SQUARE, WIDE]
    assert batches(SequencePrefix(2).extend(columns)) == [(1, 2), (0, 3)]
    assert batches(SequencePrefix(2).extend(columns, np.array([1]))) == [(0, 3), (2, 6)]
    assert len(SequencePrefix(4).extend(of([]))) == len(SequencePrefix(4).extend(columns)) == 0


# The plan as a value


def test_a_plan_is_a_sequence_of_batches() -> None:
    plan = plan_epoch(of([SQUARE] * 5), seed=0, epoch=0, global_batch_size=2)
    assert len(plan) == len(list(plan)) == 3
    assert plan[-1] == plan[2] == list(plan)[2] and plan[0] in plan
    assert isinstance(plan[1:], Plan) and list(plan[1:]) == list(plan)[1:] and not len(plan[3:])
    with pytest.raises(IndexError):
        plan[3]


def test_a_plan_of_a_million_samples_is_small() -> None:
    count = 10**6
    number = np.arange(count, dtype=np.int64)
    columns = Columns(
        (number % 3).astype(np.int32),
        SHAPES,
        number,
        (number * 7919 % 1409).astype(np.int32),
        np.zeros(count, np.int32),
        ends_of(number // 64),
    )
    tracemalloc.start()
    try:
        plan = plan_epoch(columns, seed=0, epoch=0, global_batch_size=16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6
    assert plan.positions.dtype == plan.filled.dtype == np.int32
    assert np.array_equal(np.bincount(plan.positions[plan.filled == 16].ravel(), minlength=count) > 1, number < 0)


# No batch at all


def test_0_batches_name_the_largest_shapes_and_their_numbers() -> None:
    columns = of([SQUARE] * 3 + [WIDE] * 2 + [TWO_CONTROLS])
    shapes = [Shape((2, 2 + width), ((2, 2),)) for width in range(12)]
    each = np.repeat(np.arange(12, dtype=np.int32), np.arange(1, 13))
    many = replace(of([SQUARE] * len(each)), shapes=each, shape_names=tuple(shapes))
    few = "3 of 32×32 px from 32×32, 2 of 48×32 px from 48×32, 1 of 32×32 px from 32×16 + 16×32"
    largest = ", ".join(f"{number} of {shapes[number - 1].in_pixels(8)}" for number in range(12, 4, -1))
    for known, found in ((columns, few), (many, f"{largest}, and 4 more shapes")):
        with pytest.raises(UsageError, match="0 batches") as caught:
            plan_epoch(known, seed=0, epoch=0, global_batch_size=13, tail="drop")
        assert (caught.value.expected, caught.value.found) == ("13 samples of one shape", found)
        assert "data.batch_size" in str(caught.value.hint)


@pytest.mark.parametrize("order", ["shuffle", "blocks", "sequence"])
@pytest.mark.parametrize("weights", [None, [1.5]])
def test_0_batches_of_no_samples_say_so(weights: list[float] | None, order: str) -> None:
    for shapes in ([], [SQUARE, WIDE]):
        settings = {"order": order, "source_weights": weights, "leave_out": np.arange(len(shapes))}
        with pytest.raises(UsageError, match="0 batches") as caught:
            plan_epoch(of(shapes), seed=0, epoch=0, global_batch_size=1, **settings)
        assert caught.value.found == "no samples"
        assert ("why no row can be encoded" in str(caught.value.hint)) == (not shapes)


# Rows for validation

KEYS = [
    bytes(head) + bytes(16) + bytes(rest)
    for head in ((0,) * 8, (127,) * 8, (200,) * 8)
    for rest in ((0,) * 8, (1,) * 8, (255, 0, 0, 0, 0, 0, 0, 0))
]
contents = st.lists(st.sampled_from([*KEYS, *(bytes([n * 67 % 256]) * 32 for n in range(12))]), min_size=1, max_size=40)
counts = st.integers(0, 14)


def hold_out(keys: Sequence[bytes], count: int, rows: Sequence[int] | None = None) -> tuple[list[int], set[int]]:
    """Positions for validation, and of all that is left out."""
    array = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), 32)
    numbers = np.arange(len(keys)) if rows is None else np.array(rows)
    columns = of([SQUARE] * len(keys), rows=numbers, blocks=np.zeros(len(keys), np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qie.data.plan, "CHUNK", 3)  # keys are read in parts, which rows may straddle
        validation, out = held_out(array, columns, count)
    return validation, set(out.tolist())


@settings(deterministic, max_examples=200)
@given(contents, counts, st.data())
def test_rows_of_the_smallest_first_keys_are_held_out_with_all_variants(keys, count: int, data) -> None:
    rows = np.cumsum(data.draw(st.lists(st.sampled_from([0, 1, 1]), min_size=len(keys), max_size=len(keys)))).tolist()
    first = [n for n in range(len(keys)) if n == 0 or rows[n] != rows[n - 1]]
    smallest = sorted({keys[n] for n in first})[:count]
    chosen = sorted((keys[n], n) for n in first if keys[n] in smallest)
    validation, out = hold_out(keys, count, rows)
    assert validation == [n for _, n in chosen]
    assert all(type(position) is int for position in validation)
    assert out == {n for n in range(len(keys)) if rows[n] in {rows[m] for m in validation}}


def test_rows_of_two_shards_that_have_one_number_are_two_rows() -> None:
    keys = np.frombuffer(bytes(32 * [3] + 32 * [4] + 32 * [1] + 32 * [2]), np.uint8).reshape(4, 32)
    columns = of([SQUARE] * 4, rows=[7, 7, 7, 7], blocks=[0, 0, 1, 1])
    validation, out = held_out(keys, columns, 1)
    assert (validation, out.tolist()) == ([2], [2, 3])
    assert count_rows(columns) == 2
    settings = PlanSettings(1)
    assert settings.count(columns, 3, out) == sum(len(settings.plan(columns, epoch, out)) for epoch in range(3)) == 3


@deterministic
@given(contents, contents, counts, st.data())
def test_which_contents_are_held_out_follows_from_content_alone(
    keys: list[bytes], new: list[bytes], count: int, data: st.DataObject
) -> None:
    assert hold_out([], count) == ([], set())
    validation, out = hold_out(keys, count)
    held, trained = {keys[position] for position in out}, {key for n, key in enumerate(keys) if n not in out}
    assert len(held) == min(count, len(set(keys))) and not held & trained
    for shuffled in (keys[::-1], data.draw(st.permutations(keys))):
        assert [shuffled[p] for p in hold_out(shuffled, count)[0]] == [keys[p] for p in validation]
    assert not trained & {(keys + new)[position] for position in hold_out(keys + new, count)[1]}, "new rows move no old"
    assert hold_out(keys, count + 1)[0][: len(validation)] == validation

"""The plan of very many samples: as `test_plan` claims of those made at once, of windows that hold a few samples."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import qie.data.plan
import qie.data.plan_settings
import qie.data.selection
import qie.data.stream
import qie.data.windows
from qie.data.plan import plan_epoch
from qie.data.plan_settings import PlanSettings
from qie.data.selection import raw_at
from qie.data.stream import FixedPlans
from qie.data.windows import WINDOWS_VERSION, WindowedPlan
from qie.errors import UsageError
from qie.shards.sample_table import Columns
from tests.test_plan import (
    SHAPES,
    SQUARE,
    WEIGHTS,
    WIDE,
    batches,
    deterministic,
    epochs,
    of,
    real,
    samples,
    seeds,
    shape_of,
    sizes,
    some,
    tails,
)

windows = st.integers(1, 30)
by_chance = st.sampled_from(["shuffle", "blocks"])
weighted = st.tuples(*[st.sampled_from(WEIGHTS)] * 2)


def alike(plan, other) -> bool:
    return batches(plan) == batches(other) and [*map(str, plan)] == [*map(str, other)]


@deterministic
@given(samples(variants=3, sources=2), st.data(), seeds, epochs, sizes, tails, windows, weighted)
def test_a_sequence_in_windows_is_the_sequence_made_at_once(columns, data, seed, epoch, size, tail, window, weights):
    """Weights, variants and left out samples, too."""
    columns = replace(columns, source_names=("a", "b"))
    made = {"seed": seed, "epoch": epoch, "global_batch_size": size, "tail": tail, "order": "sequence"}
    made |= {"source_weights": weights, "leave_out": some(columns, data)}
    try:
        expected = plan_epoch(columns, **made)
    except UsageError as error:
        with pytest.raises(UsageError, match="0 batches") as caught:
            WindowedPlan(columns, window=window, **made)
        assert caught.value.found == error.found
    else:
        found = WindowedPlan(columns, window=window, **made)
        assert found[:].positions.dtype == expected.positions.dtype
        assert alike(found, expected) and alike(found[::-2], expected[::-2])


@deterministic
@given(samples(variants=3), st.data(), seeds, epochs, sizes, by_chance, tails, windows)
def test_every_row_comes_once_in_batches_of_its_shape(columns, data, seed, epoch, size, order, tail, window) -> None:
    out = some(columns, data)
    made = {"seed": seed, "epoch": epoch, "global_batch_size": size, "order": order, "block_size": 2, "leave_out": out}
    rows = set(np.delete(columns.rows, out).tolist())
    assume(rows)
    padded = WindowedPlan(columns, window=window, **made)
    assert sorted(columns.rows[real(padded)].tolist()) == sorted(rows), "each row once, by one of its variants"
    shown = Counter(shape_of(columns, position) for position in real(padded))
    assert Counter(len(set(batch.positions)) < size for batch in padded)[True] == sum(
        count % size > 0 for count in shown.values()
    ), "of each shape at most one batch is not full"
    assume(tail == "pad" or max(shown.values()) >= size)
    plan = WindowedPlan(columns, window=window, tail=tail, **made)
    seen = Counter(shape_of(columns, position) for position in real(plan))
    expected = {shape: count % size for shape, count in shown.items() if count % size} if tail == "drop" else {}
    assert shown - seen == expected
    for batch in plan:
        assert len({shape_of(columns, position) for position in batch.positions}) == 1
        assert set(batch.positions) == set(real([batch])) and not np.isin(batch.positions, out).any()


@deterministic
@given(
    samples(variants=2, sources=2), seeds, epochs, sizes, st.sampled_from(["shuffle", "blocks", "sequence"]), windows,
    weighted, st.data(),
)  # fmt: skip
def test_any_batch_may_be_asked_for_first(columns, seed, epoch, size, order, window, weights, data) -> None:
    """As a run does that goes on in the middle of an epoch; whatever was asked for before."""
    columns = replace(columns, source_names=("a", "b"))
    made = {"seed": seed, "epoch": epoch, "global_batch_size": size, "order": order, "block_size": 2}
    made |= {"source_weights": weights, "window": window}
    try:
        walked = list(WindowedPlan(columns, **made))
    except UsageError:
        return
    plan = WindowedPlan(columns, **made)
    for number in data.draw(st.lists(st.integers(0, len(walked) - 1), max_size=6)):
        assert plan[number] == WindowedPlan(columns, **made)[number] == walked[number]
    assert list(plan) == walked and len(plan) == len(walked) and plan[-1] == walked[-1] and plan[0] == walked[0]
    with pytest.raises(IndexError):
        plan[len(walked)]


@deterministic
@given(samples(variants=2, sources=2), seeds, by_chance, windows, weighted)
def test_over_epochs_a_row_comes_as_often_as_its_weight_says(columns, seed, order, window, weights) -> None:
    """Every row by itself: of weight 0.5 every other epoch."""
    columns = replace(columns, source_names=("a", "b"))
    exact = [Fraction(weight).limit_denominator(1000) for weight in weights]
    cycle = exact[0].denominator * exact[1].denominator
    made = {"seed": seed, "global_batch_size": 1, "order": order, "source_weights": weights, "window": window}
    found: Counter[int] = Counter()
    for epoch in range(cycle):
        try:
            drawn = Counter(columns.rows[real(WindowedPlan(columns, epoch=epoch, **made))].tolist())
        except UsageError:
            continue
        found += drawn
        weight = {row: exact[source] for row, source in zip(columns.rows.tolist(), columns.sources, strict=True)}
        assert all(abs(drawn[row] - weight[row]) < 1 for row in weight)
    assert found == {row: cycle * often for row, often in weight.items()}


def many(count: int, *, sources: int = 1, single: bool = True, shard: int = 8) -> Columns:
    """Samples of three shapes, in shards."""
    number = np.arange(count)
    columns = of(
        [SHAPES[n] for n in (number * 7919 % 31 % 3).tolist()],
        lengths=(number * 7919 % 1409).tolist(),
        sources=(number % sources).tolist(),
        blocks=(number // shard).tolist(),
    )
    return replace(columns, source_names=tuple("abc"[:sources]), single=single)


def shards_of(plan, shard: int = 8) -> list[int]:
    return [position // shard for position in real(plan)]


def test_half_of_the_rows_of_weight_one_half_come_in_an_epoch_and_which_is_left_to_chance() -> None:
    columns = many(2000)
    drawn = [
        set(real(WindowedPlan(columns, seed=seed, epoch=0, global_batch_size=4, source_weights=[0.5], window=300)))
        for seed in (1, 2)
    ]
    assert all(900 < len(rows) < 1100 for rows in drawn)
    assert 400 < len(drawn[0] & drawn[1]) < 600


def test_the_draws_of_a_row_lie_far_apart_in_the_epoch() -> None:
    """A shard whose rows are drawn three times stands three times in the order of shards, once in each third of it. If
    some of its rows come once, chance decides where."""
    columns = many(2000, sources=2)
    plan = WindowedPlan(columns, seed=1, epoch=0, global_batch_size=4, source_weights=[3, 1], window=200)
    places: dict[int, list[float]] = {}
    drawn = real(plan)
    for place, position in enumerate(drawn):
        places.setdefault(position, []).append(place / len(drawn))
    thrice = np.array([found for position, found in places.items() if position % 2 == 0])
    assert thrice.shape == (1000, 3) and abs(thrice.mean(axis=0) - [1 / 6, 1 / 2, 5 / 6]).max() < 0.03
    once = np.array([found for position, found in places.items() if position % 2])
    assert once.shape == (1000, 1) and abs(np.histogram(once, 3, (0, 1))[0] - 1000 / 3).max() < 70
    assert all(len(set(drawn)) == len(drawn) for drawn in (real([batch]) for batch in plan)), (
        "of a row at most one draw"
    )


def test_windows_hold_shards_by_chance_in_another_order_each_epoch() -> None:
    columns = many(4096)
    made = {"seed": 1, "global_batch_size": 4, "window": 512, "similar_lengths": 1}
    first, second = (WindowedPlan(columns, epoch=epoch, **made) for epoch in (0, 1))
    orders = [shards_of(plan) for plan in (first, second)]
    assert len({*orders[0][:512]} & {*orders[1][:512]}) < 40, "the first window of one is not that of another"
    for order in orders:
        assert len(order) == 4096
        parts = [set(order[start : start + 512]) for start in range(0, 4096, 512)]
        assert all(60 < len(part) < 140 for part in parts), "64 shards, and those of samples that fill no batch"
        assert abs(np.mean([np.mean(list(part)) for part in parts[:4]]) - 255.5) < 60, "from all over the epoch"
    # Within a window samples and batches are shuffled: neighbours in a batch seldom are of one shard.
    pairs = sum(len(batch.positions) - len({p // 8 for p in batch.positions}) for batch in first)
    assert pairs < 0.08 * 4096


def test_a_block_is_read_before_the_next_one_begins() -> None:
    """Whatever windows there are: a row that is drawn twice is drawn twice from its block."""
    columns = many(1024)
    plan = WindowedPlan(
        columns, seed=1, epoch=0, global_batch_size=4, order="blocks", block_size=4, source_weights=[2], window=200
    )
    order = shards_of(plan)
    assert len(order) == 2048
    last = {shard: place for place, shard in enumerate(order)}
    first = {shard: place for place, shard in reversed(list(enumerate(order)))}
    # A block holds 64 draws, and up to 3 of each shape go on to the next one, where they are shuffled with its draws.
    assert max(last[shard] - first[shard] for shard in last) < 2 * 64 + 3 * 3 + 4


@pytest.mark.parametrize("order", ["shuffle", "blocks", "sequence"])
@pytest.mark.parametrize("weights", [{}, {"a": 0.7, "b": 2.0}], ids=["once", "weighted"])
def test_settings_plan_in_windows_above_a_number_of_samples_and_count_without_batches(
    monkeypatch: pytest.MonkeyPatch, order, weights
) -> None:
    monkeypatch.setattr(qie.data.plan_settings, "AT_ONCE", 399)
    monkeypatch.setattr(qie.data.windows, "WINDOW", 100)
    settings, out = PlanSettings(4, order=order, weights=weights), np.array([0, 3, 77])
    at_once, columns = many(399, sources=2), many(400, sources=2)
    assert not isinstance(settings.plan(at_once, 0, out), WindowedPlan)
    plans = [settings.plan(columns, epoch, out) for epoch in range(3)]
    assert all(isinstance(plan, WindowedPlan) for plan in plans)
    assert settings.count(columns, 3, out) == sum(map(len, plans))
    for variants in (columns, replace(columns, single=False)):
        assert settings.count(variants, 3, out) == sum(map(len, plans))
    assert settings.count(columns, 0, out) == 0
    assert settings.identity(399)["plan_version"] == 2, "as it was before there were windows"
    assert settings.identity(400)["plan_version"] == (2 if order == "sequence" else WINDOWS_VERSION)


def test_what_equals_a_sample_that_is_held_out_is_left_out_in_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever keys are read in parts."""
    for module, name in ((qie.data.plan, "CHUNK"), (qie.data.plan_settings, "AT_ONCE")):
        monkeypatch.setattr(module, name, 7)
    columns = replace(many(40, single=False, shard=10), rows=np.arange(40) // 2)
    keys = np.arange(40 * 32, dtype=np.uint32).astype(">u4").view(np.uint8).reshape(40, -1)[:, :32] + np.uint8(9)
    smallest = min(range(0, 40, 2), key=lambda position: bytes(keys[position]))
    keys[33] = keys[smallest + 1]
    plans = FixedPlans(SimpleNamespace(columns=columns, digests=keys), PlanSettings(1, validation_rows=1))
    assert plans.validation == [smallest] and plans.held_out.tolist() == sorted({smallest, smallest + 1, 33})
    assert sorted(columns.rows[real(plans.of(0))]) == [row for row in range(20) if row != smallest // 2]


def test_rows_are_not_read_where_none_has_variants() -> None:
    columns = many(400)
    unread = replace(columns, rows=None)
    for order in ("shuffle", "blocks", "sequence"):
        made = {"seed": 1, "epoch": 2, "global_batch_size": 4, "order": order, "window": 100, "source_weights": [0.5]}
        assert alike(WindowedPlan(unread, **made), WindowedPlan(replace(columns, single=False), **made))


def test_the_memory_of_a_plan_is_that_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qie.data.selection, "CHUNK", 2**12)
    number = np.arange(2**19)
    columns = Columns(
        shapes=(number * 7919 % 31 % 3).astype(np.int32),
        shape_names=SHAPES,
        rows=number,
        lengths=(number * 7919 % 1409).astype(np.int32),
        sources=np.zeros(len(number), np.int32),
        ends=number[: len(number) // 64] * 64 + 64,
        single=True,
    )
    tracemalloc.start()
    try:
        plan = WindowedPlan(columns, seed=0, epoch=3, global_batch_size=8, window=2**12)
        for place in range(0, len(plan), 2**10):
            plan[place]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5e6, "300 KB for a window and for the order of 8,192 shards; at once, it is 15 MB"


GOLDEN: dict[str, list[list[tuple[int, ...]]]] = {
    "shuffle": [
        [(0, 11, 0, 11), (10, 2, 4, 8), (6, 6, 6, 6), (7, 9, 1, 3), (5, 5, 5, 5)],
        [(7, 1), (12, 16), (15, 11), (21, 23), (17, 19), (0, 15), (7, 9), (11, 11), (2, 4)],
    ],
    "blocks": [
        [(10, 10, 10, 10), (5, 7, 9, 3), (1, 1, 1, 1), (0, 11, 0, 11), (2, 4, 6, 8)],
        [(17, 19), (2, 16), (12, 4), (0, 15), (7, 1), (11, 11), (7, 9), (23, 15), (21, 11)],
    ],
}


def test_the_order_of_a_small_epoch_in_windows_is_what_it_has_always_been() -> None:
    """A run that is resumed by a newer qie has to meet the batches that it would have met."""
    columns = replace(many(24, sources=2, single=False, shard=4), rows=np.arange(24) // 2)
    assert WINDOWS_VERSION == 3, "give this test the order of the new version"
    for order, expected in GOLDEN.items():
        plain = WindowedPlan(many(12, shard=2), seed=7, epoch=0, global_batch_size=4, order=order, window=5)
        mixed = WindowedPlan(
            columns,
            seed=7,
            epoch=5,
            global_batch_size=2,
            order=order,
            window=9,
            block_size=2,
            source_weights=(1.5, 0.7),
        )
        assert [batches(plain), batches(mixed)] == expected, f"{order}: raise WINDOWS_VERSION"


def test_a_shape_that_few_samples_have_fills_a_batch_from_all_over_the_epoch() -> None:
    rare = {n for n in range(800) if n % 100 == 50}
    columns = of([WIDE if n in rare else SQUARE for n in range(800)], blocks=[n // 8 for n in range(800)])
    made = {"seed": 1, "epoch": 0, "global_batch_size": 8, "window": 40}
    plan = WindowedPlan(columns, **made)
    found = [number for number, batch in enumerate(plan) if set(batch.positions) & rare]
    assert len(found) == 1 and set(plan[found[0]].positions) == rare
    assert WindowedPlan(columns, **made)[found[0]] == plan[found[0]]


def test_numbers_by_place_are_those_of_splitmix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As published for the seed 1234567."""
    monkeypatch.setattr(qie.data.selection, "raw_bits", lambda *_: np.array([1234567], np.uint64))
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert raw_at(0, 0, 0, np.arange(4)).tolist() == published

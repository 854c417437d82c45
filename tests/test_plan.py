"""The plan of an epoch: every sample once, one shape a batch, the same batches for any number of processes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qie.data.plan import PLAN_VERSION, PlannedBatch, held_out, plan_epoch
from qie.errors import UsageError
from qie.types import Shape

SQUARE, WIDE, TWO_CONTROLS = Shape((4, 4), ((4, 4),)), Shape((4, 6), ((4, 6),)), Shape((4, 4), ((2, 4), (4, 2)))
shapes = st.lists(st.sampled_from([SQUARE, WIDE, TWO_CONTROLS]), min_size=1, max_size=40)
sizes = st.integers(1, 8)
seeds = st.integers(0, 2**31 - 1)
epochs = st.integers(0, 10_000)
deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=120)


def real(plan: list[PlannedBatch]) -> list[int]:
    """Positions that count in the loss, in order."""
    return [
        position
        for batch in plan
        for position, weight in zip(batch.positions, batch.weights, strict=True)
        if weight > 0
    ]


@deterministic
@given(shapes, seeds, epochs, sizes)
def test_with_pad_every_sample_counts_exactly_once(shapes: list[Shape], seed: int, epoch: int, size: int) -> None:
    plan = plan_epoch(shapes, seed=seed, epoch=epoch, global_batch_size=size, tail="pad")
    assert sorted(real(plan)) == list(range(len(shapes)))


@deterministic
@given(shapes, seeds, epochs, sizes)
def test_with_drop_no_sample_comes_twice_and_only_an_incomplete_batch_of_a_shape_is_left_out(
    shapes: list[Shape], seed: int, epoch: int, size: int
) -> None:
    assume(max(Counter(shapes).values()) >= size)
    plan = plan_epoch(shapes, seed=seed, epoch=epoch, global_batch_size=size, tail="drop")
    seen = [position for batch in plan for position in batch.positions]
    assert len(seen) == len(set(seen))
    left_out = Counter(shapes[position] for position in set(range(len(shapes))) - set(seen))
    assert left_out == {shape: count % size for shape, count in Counter(shapes).items() if count % size}
    assert {weight for batch in plan for weight in batch.weights} == {1.0}


@deterministic
@given(shapes, seeds, epochs, sizes, st.sampled_from(["pad", "drop"]))
def test_every_batch_is_full_and_of_one_shape(shapes: list[Shape], seed: int, epoch: int, size: int, tail: str) -> None:
    assume(tail == "pad" or max(Counter(shapes).values()) >= size)
    for batch in plan_epoch(shapes, seed=seed, epoch=epoch, global_batch_size=size, tail=tail):
        assert len(batch.positions) == len(batch.weights) == size
        assert len({shapes[position] for position in batch.positions}) == 1
        assert all(type(position) is int for position in batch.positions), "numpy's integers are no JSON"


@deterministic
@given(shapes, seeds, epochs, sizes)
def test_weights_are_1_on_average_and_equal_for_all_that_count(
    shapes: list[Shape], seed: int, epoch: int, size: int
) -> None:
    for batch in plan_epoch(shapes, seed=seed, epoch=epoch, global_batch_size=size):
        assert sum(batch.weights) / size == pytest.approx(1.0)
        assert len(set(batch.weights) - {0.0}) == 1


@deterministic
@given(shapes, seeds, epochs, st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 3))
def test_the_slices_of_any_number_of_processes_join_to_the_same_batches(
    shapes: list[Shape], seed: int, epoch: int, world_size: int, per_process: int
) -> None:
    for batch in plan_epoch(shapes, seed=seed, epoch=epoch, global_batch_size=world_size * per_process):
        slices = [batch.slice(rank, world_size) for rank in range(world_size)]
        assert {len(part.positions) for part in slices} == {per_process}
        assert tuple(position for part in slices for position in part.positions) == batch.positions
        assert tuple(weight for part in slices for weight in part.weights) == batch.weights


@deterministic
@given(shapes, seeds, epochs, st.sampled_from([1, 2, 3]), st.integers(1, 3))
def test_the_mean_over_processes_of_weighted_losses_is_the_mean_loss_of_the_samples_that_count(
    shapes: list[Shape], seed: int, epoch: int, world_size: int, per_process: int
) -> None:
    loss = [float(position**2 % 17) for position in range(len(shapes))]
    for batch in plan_epoch(shapes, seed=seed, epoch=epoch, global_batch_size=world_size * per_process):
        parts = [batch.slice(rank, world_size) for rank in range(world_size)]
        means = [np.mean([w * loss[p] for p, w in zip(part.positions, part.weights, strict=True)]) for part in parts]
        assert np.mean(means) == pytest.approx(np.mean([loss[position] for position in real([batch])]))


@deterministic
@given(shapes, seeds, epochs, sizes)
def test_a_plan_is_a_function_of_its_arguments_alone(shapes: list[Shape], seed: int, epoch: int, size: int) -> None:
    arguments = {"seed": seed, "epoch": epoch, "global_batch_size": size}
    before = list(shapes)
    plan = plan_epoch(shapes, **arguments)
    np.random.default_rng().random()
    plan_epoch(shapes, **{**arguments, "epoch": epoch + 1})
    assert plan_epoch(tuple(shapes), **arguments) == plan
    assert shapes == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"seed": 2**31}, {"epoch": 2**31}])
def test_another_seed_or_epoch_gives_another_order(change: dict[str, int]) -> None:
    arguments = {"seed": 0, "epoch": 0, "global_batch_size": 2}
    plan = plan_epoch([SQUARE, WIDE] * 20, **arguments)
    other = plan_epoch([SQUARE, WIDE] * 20, **{**arguments, **change})
    assert real(other) != real(plan)
    assert sorted(real(other)) == sorted(real(plan))


def test_seed_and_epoch_are_not_interchangeable() -> None:
    assert plan_epoch([SQUARE] * 20, seed=1, epoch=2, global_batch_size=1) != plan_epoch(
        [SQUARE] * 20, seed=2, epoch=1, global_batch_size=1
    )


def test_an_epoch_neither_keeps_the_order_of_the_rows_nor_sorts_by_shape() -> None:
    shapes = [SQUARE] * 50 + [WIDE] * 50
    plan = plan_epoch(shapes, seed=0, epoch=0, global_batch_size=5)
    order = [shapes[batch.positions[0]] for batch in plan]
    assert any(one != other for one, other in zip(order[:10], order[10:], strict=True))
    assert all(batch.positions != tuple(sorted(batch.positions)) for batch in plan[:3])


def test_every_sample_is_as_likely_to_come_first() -> None:
    first = Counter(
        plan_epoch([SQUARE] * 5, seed=0, epoch=epoch, global_batch_size=1)[0].positions[0] for epoch in range(1000)
    )
    assert all(150 < first[position] < 250 for position in range(5))


def test_the_order_of_a_small_epoch_is_what_it_has_always_been() -> None:
    """A run that is resumed by a newer qie has to meet the batches that it would have met."""
    shapes = [SQUARE, WIDE, SQUARE, SQUARE, WIDE, SQUARE, SQUARE, WIDE, WIDE, SQUARE, SQUARE, SQUARE]
    raise_it = f"the order of an epoch has changed: this breaks resuming, so raise PLAN_VERSION (now {PLAN_VERSION})"
    assert PLAN_VERSION == 1, "give this test the order of the new version"

    def order(**arguments: object) -> list[tuple[int, ...]]:
        return [batch.positions for batch in plan_epoch(shapes, seed=7, **arguments)]

    assert order(epoch=0, global_batch_size=4) == [(11, 2, 5, 3), (10, 9, 0, 6), (8, 4, 1, 7)], raise_it
    assert order(epoch=1, global_batch_size=4) == [(2, 11, 6, 0), (5, 3, 10, 9), (4, 1, 7, 8)], raise_it
    assert order(epoch=0, global_batch_size=3, tail="drop", leave_out=frozenset({0})) == [
        (11, 3, 6),
        (5, 10, 2),
        (8, 4, 1),
    ], raise_it
    assert order(epoch=0, global_batch_size=3) == [(7, 8, 4), (11, 2, 5), (3, 10, 9), (8, 4, 1), (0, 6, 11)], raise_it
    weights = [batch.weights for batch in plan_epoch(shapes, seed=7, epoch=0, global_batch_size=3)]
    assert weights == [(3.0, 0.0, 0.0), (1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1.5, 1.5, 0.0)], raise_it


# What is left out


@deterministic
@given(shapes, st.data(), seeds, sizes, st.sampled_from(["pad", "drop"]))
def test_what_is_left_out_appears_in_no_batch_not_even_to_fill_one(
    shapes: list[Shape], data: st.DataObject, seed: int, size: int, tail: str
) -> None:
    leave_out = data.draw(st.frozensets(st.integers(0, len(shapes) - 1)))
    remaining = [position for position in range(len(shapes)) if position not in leave_out]
    most = max(Counter(shapes[position] for position in remaining).values(), default=0)
    assume(most >= (1 if tail == "pad" else size))
    plan = plan_epoch(shapes, seed=seed, epoch=0, global_batch_size=size, tail=tail, leave_out=leave_out)
    assert not leave_out & {position for batch in plan for position in batch.positions}
    if tail == "pad":
        assert sorted(real(plan)) == remaining


keys = st.lists(st.integers(0, 30).map(lambda number: f"{number * 7919 % 1009:064x}"), min_size=8, max_size=40)
counts = st.integers(0, 12)


@deterministic
@given(keys, counts)
def test_as_many_contents_are_held_out_as_asked_for(keys: list[str], count: int) -> None:
    assert len({keys[position] for position in held_out(keys, count)}) == min(count, len(set(keys)))


@deterministic
@given(keys, counts)
def test_equal_samples_stand_on_one_side(keys: list[str], count: int) -> None:
    out = held_out(keys, count)
    kept = {keys[position] for position in range(len(keys)) if position not in out}
    assert not kept & {keys[position] for position in out}


@deterministic
@given(keys, counts, st.data())
def test_reordering_the_rows_holds_out_the_same_contents(keys: list[str], count: int, data: st.DataObject) -> None:
    for shuffled in (keys[::-1], data.draw(st.permutations(keys))):
        assert {keys[p] for p in held_out(keys, count)} == {shuffled[p] for p in held_out(shuffled, count)}


def test_the_smallest_keys_are_held_out_with_all_that_equal_them() -> None:
    assert held_out(["c", "a", "d", "b", "a"], 0) == frozenset()
    assert held_out(["c", "a", "d", "b", "a"], 1) == {1, 4}
    assert held_out(["c", "a", "d", "b", "a"], 3) == {0, 1, 3, 4}
    assert held_out(["c", "a", "d", "b", "a"], 99) == {0, 1, 2, 3, 4}


@deterministic
@given(keys, counts)
def test_holding_out_one_more_keeps_what_was_held_out(keys: list[str], count: int) -> None:
    assert held_out(keys, count) <= held_out(keys, count + 1)


@deterministic
@given(keys, keys, counts)
def test_new_rows_move_no_old_one_from_training_to_validation(old: list[str], new: list[str], count: int) -> None:
    before, after = held_out(old, count), held_out(old + new, count)
    trained_on = {old[position] for position in range(len(old)) if position not in before}
    assert not trained_on & {(old + new)[position] for position in after}


# No batch at all


def test_0_batches_name_the_shapes_and_their_numbers() -> None:
    shapes = [SQUARE] * 3 + [WIDE] * 2 + [TWO_CONTROLS]
    with pytest.raises(UsageError, match="0 batches") as caught:
        plan_epoch(shapes, seed=0, epoch=0, global_batch_size=4, tail="drop")
    assert caught.value.expected == "4 samples of one shape"
    for text in ("3 of 32×32 px from 32×32", "2 of 48×32 px from 48×32", "1 of 32×32 px from 32×16 + 16×32"):
        assert text in str(caught.value.found)
    assert "data.batch_size" in str(caught.value.hint)


@pytest.mark.parametrize(("shapes", "leave_out"), [([], frozenset()), ([SQUARE, WIDE], frozenset({0, 1}))])
def test_0_batches_of_no_samples_say_so(shapes: list[Shape], leave_out: frozenset[int]) -> None:
    with pytest.raises(UsageError, match="0 batches") as caught:
        plan_epoch(shapes, seed=0, epoch=0, global_batch_size=1, leave_out=leave_out)
    assert caught.value.found == "no samples"

"""Which rows a run takes, and which shards it writes around those that are there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qie.errors import UsageError
from qie.precompute.ranges import Range, resolve_part, resolve_range, shard_ranges

deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=250)


@st.composite
def disjoint(draw: st.DrawFn, end: int = 60) -> list[Range]:
    """Ranges that do not overlap, in any order, such as one folder's shards."""
    cuts = sorted(draw(st.sets(st.integers(0, end), max_size=14)))
    parts = list(pairwise(cuts))
    kept = [part for part in parts if draw(st.booleans())]
    return draw(st.permutations(kept))


asked = st.tuples(st.integers(0, 59), st.integers(1, 60)).filter(lambda range_: range_[0] < range_[1])
grids = st.integers(1, 20)


def rows(ranges: list[Range]) -> list[int]:
    return [row for first, last in ranges for row in range(first, last)]


@deterministic
@given(asked, grids, disjoint())
def test_what_was_asked_and_is_not_published_is_covered_exactly_once(
    asked: Range, grid: int, published: list[Range]
) -> None:
    new = [part for part in shard_ranges(*asked, grid, published) if part not in published]
    assert rows(new) == sorted(set(range(*asked)) - set(rows(published)))


@deterministic
@given(asked, grids, disjoint())
def test_published_shards_that_begin_in_the_range_are_taken_whole_and_others_left_out(
    asked: Range, grid: int, published: list[Range]
) -> None:
    """One that begins before the range is another run's; every split of a dataset so visits each shard once."""
    ranges = shard_ranges(*asked, grid, published)
    assert [part for part in ranges if part in published] == sorted(
        part for part in published if asked[0] <= part[0] < asked[1]
    )


@deterministic
@given(asked, grids, disjoint())
def test_ranges_are_in_order_hold_rows_and_do_not_overlap(asked: Range, grid: int, published: list[Range]) -> None:
    ranges = shard_ranges(*asked, grid, published)
    assert all(first < last for first, last in ranges)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))


@deterministic
@given(asked, grids, disjoint())
def test_new_shards_are_cut_on_the_grid_and_nowhere_else_but_at_the_ends_and_at_published_ones(
    asked: Range, grid: int, published: list[Range]
) -> None:
    edges = {*asked, *(edge for part in published for edge in part)}
    for first, last in shard_ranges(*asked, grid, published):
        if (first, last) not in published:
            assert first // grid == (last - 1) // grid, "a new shard lies within one cell of the grid"
            assert first % grid == 0 or first in edges
            assert last % grid == 0 or last in edges


@deterministic
@given(asked, grids, disjoint(), st.data())
def test_any_split_on_the_grid_gives_the_same_shards(
    asked: Range, grid: int, published: list[Range], data: st.DataObject
) -> None:
    inner = range((asked[0] // grid + 1) * grid, asked[1], grid)
    assume(len(inner) > 0)
    cuts = sorted({*asked, *data.draw(st.sets(st.sampled_from(inner), min_size=1))})
    parts = data.draw(st.permutations(list(pairwise(cuts))))
    apart = [shard for part in parts for shard in shard_ranges(*part, grid, published)]
    assert sorted(apart) == shard_ranges(*asked, grid, published)
    there = list(published)
    for part in parts:  # one after the other, each run seeing what the earlier ones have published
        there = sorted({*there, *shard_ranges(*part, grid, there)})
    assert set(there) == {*published, *shard_ranges(*asked, grid, published)}


@deterministic
@given(asked, grids, disjoint())
def test_a_second_run_finds_everything_published(asked: Range, grid: int, published: list[Range]) -> None:
    first_run = shard_ranges(*asked, grid, published)
    assert shard_ranges(*asked, grid, {*published, *first_run}) == first_run


@deterministic
@given(st.integers(1, 100_000), st.integers(1, 200), st.integers(1, 100))
def test_parts_hold_every_row_once_in_whole_shards_and_as_many_each(count: int, grid: int, parts: int) -> None:
    ranges = [resolve_part(f"{part}/{parts}", count, grid) for part in range(1, parts + 1)]
    assert ranges[0][0] == 0 and ranges[-1][1] == count
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert all(start % grid == 0 or start == count for start, _ in ranges)
    shards = [len(shard_ranges(*part, grid, [])) for part in ranges]
    assert max(shards) - min(shards) <= 1


def test_a_whole_dataset_is_cut_at_multiples_of_the_shard_size() -> None:
    assert shard_ranges(0, 150, 64, []) == [(0, 64), (64, 128), (128, 150)]


def test_a_range_that_begins_within_a_cell_goes_on_with_the_grid() -> None:
    assert shard_ranges(36, 150, 64, []) == [(36, 64), (64, 128), (128, 150)]


def test_new_shards_go_around_published_ones() -> None:
    published = [(60, 70), (0, 30), (140, 200)]
    assert shard_ranges(20, 150, 64, published) == [(30, 60), (60, 70), (70, 128), (128, 140), (140, 200)]


def test_published_shards_elsewhere_do_not_matter() -> None:
    assert shard_ranges(64, 128, 64, [(0, 64), (128, 192)]) == [(64, 128)]


@pytest.mark.parametrize(
    ("start", "stop", "rows", "resolved"),
    [
        (0, None, 10, (0, 10)),
        (3, None, 10, (3, 10)),
        (0, 10, 10, (0, 10)),
        (9, 10, 10, (9, 10)),
        (2, 5, 10, (2, 5)),
        (2, 999, 10, (2, 10)),
    ],
)
def test_a_range_ends_where_the_source_does(start: int, stop: int | None, rows: int, resolved: Range) -> None:
    assert resolve_range(start, stop, rows) == resolved


@pytest.mark.parametrize(
    ("start", "stop", "rows"),
    [
        (10, None, 10),
        (11, None, 10),
        (5, 5, 10),
        (5, 3, 10),
        (-1, None, 10),
        (-3, -1, 10),
        (0, 0, 10),
        (0, -1, 10),
        (0, None, 0),
    ],
)
def test_a_range_without_rows_is_refused_with_what_was_asked_and_what_there_is(
    start: int, stop: int | None, rows: int
) -> None:
    with pytest.raises(UsageError, match="holds no rows") as caught:
        resolve_range(start, stop, rows)
    assert f"{rows} rows" in str(caught.value.expected)
    assert f"--start-idx {start}" in str(caught.value.found)
    assert f"--end-idx {'(all)' if stop is None else stop}" in str(caught.value.found)

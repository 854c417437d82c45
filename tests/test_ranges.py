"""Which rows a run takes, and which shards it writes around those that are there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qie.errors import UsageError
from qie.precompute.ranges import resolve_part, resolve_range
from qie.shards.grid import Range, shard_ranges

deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=120)


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
def test_shards_hold_the_range_once_on_the_grid_around_published_ones(
    asked: Range, grid: int, published: list[Range]
) -> None:
    ranges = shard_ranges(*asked, grid, published)
    assert all(first < last for first, last in ranges)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges)), "in order, without overlap"
    # A published shard is taken whole by the run in which it begins; every split of a dataset so visits each once.
    assert [part for part in ranges if part in published] == sorted(
        part for part in published if asked[0] <= part[0] < asked[1]
    )
    new = [part for part in ranges if part not in published]
    assert rows(new) == sorted(set(range(*asked)) - set(rows(published)))
    edges = {*asked, *(edge for part in published for edge in part)}
    for first, last in new:
        assert first // grid == (last - 1) // grid, "a new shard lies within one cell of the grid"
        assert first % grid == 0 or first in edges
        assert last % grid == 0 or last in edges
    assert shard_ranges(*asked, grid, {*published, *ranges}) == ranges, "a second run finds everything published"


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
@given(st.integers(1, 100_000), st.integers(1, 200), st.integers(1, 100))
def test_parts_hold_every_row_once_in_whole_shards_and_as_many_each(count: int, grid: int, parts: int) -> None:
    ranges = [resolve_part(f"{part}/{parts}", count, grid) for part in range(1, parts + 1)]
    assert ranges[0][0] == 0 and ranges[-1][1] == count
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert all(start % grid == 0 or start == count for start, _ in ranges)
    shards = [len(shard_ranges(*part, grid, [])) for part in ranges]
    assert max(shards) - min(shards) <= 1


def test_new_shards_go_around_published_ones() -> None:
    published = [(60, 70), (0, 30), (140, 200)]
    assert shard_ranges(20, 150, 64, published) == [(30, 60), (60, 70), (70, 128), (128, 140), (140, 200)]


@deterministic
@given(st.integers(-3, 12), st.none() | st.integers(-3, 12), st.integers(0, 10))
def test_a_range_ends_where_the_source_does_and_without_rows_is_refused_with_what_was_asked_and_what_there_is(
    start: int, stop: int | None, rows: int
) -> None:
    end = rows if stop is None else min(stop, rows)
    if 0 <= start < end:
        assert resolve_range(start, stop, rows) == (start, end)
    else:
        with pytest.raises(UsageError, match="holds no rows") as caught:
            resolve_range(start, stop, rows)
        assert f"{rows} rows" in str(caught.value.expected)
        assert f"--start-idx {start}" in str(caught.value.found)
        assert f"--end-idx {'(all)' if stop is None else stop}" in str(caught.value.found)

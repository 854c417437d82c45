"""A run without a result says what the run would do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from qie.data.variants import Variants
from qie.errors import RecipeMismatchError
from qie.precompute import Settings, precompute
from qie.precompute.estimate import PrecomputeEstimate, estimate_precompute
from qie.shards.discovery import published
from qie.shards.reader import Shard
from qie.stores import open_folder
from tests.stubs import RECIPE, StubEncoder, StubSource

SOURCE = StubSource.of(40).changed(7, target=b"broken").changed(20, target=b"missing")


def look(
    source: StubSource, folder: Path, rows: tuple[int, int] | None = None, encoder=None, **settings
) -> PrecomputeEstimate:
    encoder = encoder or StubEncoder()
    return estimate_precompute(
        source, encoder, open_folder(folder), rows=rows or (0, len(source)), settings=Settings(**settings)
    )


def captioned(source: StubSource) -> StubSource:
    return StubSource(tuple(replace(row, more_prompts=(f"{row.prompt} b", f"{row.prompt} c")) for row in source.rows))


def written(source: StubSource, folder: Path, **settings) -> tuple[Counter, int]:
    """Shapes of the samples that a run writes, and the bytes of their records."""
    precompute(source, StubEncoder(), folder, rows=(0, len(source)), shard_size=8, settings=Settings(**settings))
    shards = [Shard(index) for index in published(folder)]
    shapes = Counter(entry.shape for shard in shards for entry in shard.index.samples)
    return shapes, sum(member.size for shard in shards for member in shard.index.files.values())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shapes_skipped_rows_and_bytes_are_those_of_the_run(tmp_path: Path, count: int) -> None:
    source, variants = captioned(SOURCE), Variants(count)
    found = look(source, tmp_path / "out", variants=variants)
    assert not (tmp_path / "out").exists()
    shapes, size = written(source, tmp_path / "out", variants=variants)
    assert found.rows == 40
    assert found.shapes == found.fresh == shapes
    assert len(found.skipped) == count + 1
    assert {(gone.row, gone.reason) for gone in found.skipped} == {
        (7, "the target is damaged: broken"),
        (20, "no control image"),
    }
    assert found.bytes == pytest.approx(size, rel=0.15)
    assert found.encoding_s is not None and found.encoding_s > 0


def test_only_what_is_not_there_yet_is_fresh_and_else_nothing_is_encoded(tmp_path: Path) -> None:
    shapes, _ = written(SOURCE, tmp_path / "out")
    encoder = StubEncoder()
    assert look(SOURCE, tmp_path / "out", encoder=encoder).fresh.total() == 0
    assert encoder.encoded == [], "weights need not be loaded to say that there is nothing to do"
    changed = SOURCE.changed(3, prompt="another").changed(9, controls=(b"other",))
    found = look(changed, tmp_path / "out")
    assert (found.shapes.total(), found.fresh.total()) == (shapes.total(), 2)
    elsewhere = look(changed, tmp_path / "new", reuse=(str(tmp_path / "out"),))
    assert elsewhere.fresh == found.fresh
    assert look(changed, tmp_path / "new").fresh.total() == 38


def test_rows_of_equal_content_are_fresh_once(tmp_path: Path) -> None:
    source = StubSource.of(4)
    twins = StubSource(tuple(replace(source.rows[index % 4], index=index) for index in range(12)))
    found = look(twins, tmp_path)
    assert (found.shapes.total(), found.fresh.total()) == (12, 4)


def test_only_the_asked_rows_are_looked_at(tmp_path: Path) -> None:
    seen: list[int] = []
    found = estimate_precompute(
        SOURCE, StubEncoder(), open_folder(tmp_path), rows=(18, 23), settings=Settings(), progress=seen.append
    )
    assert (found.rows, found.shapes.total(), [gone.row for gone in found.skipped]) == (5, 4, [20])
    assert seen == [1, 2, 3, 4, 5]


def test_a_handful_of_samples_is_encoded_and_one_of_each_shape_among_them(tmp_path: Path) -> None:
    encoder = StubEncoder()
    found = look(SOURCE, tmp_path, encoder=encoder)
    assert len(encoder.encoded) == len(set(encoder.encoded)) == 6
    assert {encoder.inspect(SOURCE.rows[index])[1] for index in encoder.encoded} == set(found.shapes)


def test_rows_of_which_none_can_be_encoded_have_no_size(tmp_path: Path) -> None:
    source = StubSource.of(2).changed(0, target=b"broken").changed(1, target=b"missing")
    found = look(source, tmp_path)
    assert (found.bytes, found.encoding_s, len(found.skipped), found.shapes.total()) == (None, None, 2, 0)


def test_an_output_that_the_run_would_refuse_is_refused(tmp_path: Path) -> None:
    written(SOURCE, tmp_path / "out")
    with pytest.raises(RecipeMismatchError):
        look(SOURCE, tmp_path / "out", encoder=StubEncoder(replace(RECIPE, areas_px=(8192,))))

"""Law 6: every row is in a shard, or in the list of skipped rows with its reason. The counts add up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qie.data.opening import open_stream
from qie.data.sources import open_source
from qie.data.sources.source import Source
from qie.data.stream import Samples
from qie.errors import RowError
from qie.families import FAMILIES
from qie.precompute import Settings, precompute
from qie.shards.discovery import published
from qie.shards.shard_set import ShardSet
from qie.stats import summarise
from qie.types import Shape


@pytest.fixture
def broken(photos: Path, tmp_path: Path) -> Path:
    """Six rows: one without control, one without prompt, one with a damaged target, one with a text as control.

    In a folder that has controls each row needs one, also for a family that makes images of text alone.
    """
    folder = tmp_path / "rows"
    shutil.copytree(photos, folder)
    targets = sorted((folder / "training_images").glob("*.png"))
    for path in targets[6:]:
        path.unlink()
    (folder / "control_images" / targets[0].name).unlink()
    targets[1].with_suffix(".txt").unlink()
    targets[2].write_bytes(targets[2].read_bytes()[:2000])
    (folder / "control_images" / targets[3].name).write_text("not an image")
    return folder


def open_as(encoder, place: Path) -> Source:
    """As qie-precompute opens it for the encoder's family."""
    return open_source(place, text_to_image=FAMILIES[encoder.recipe.family].min_controls == 0)


def test_rows_are_samples_or_skipped_with_their_reason(broken: Path, family_encoder, tmp_path: Path) -> None:
    source = open_as(family_encoder, broken)
    report = precompute(source, family_encoder, tmp_path / "shards", rows=(0, 6), shard_size=4)

    summary = summarise(published(tmp_path / "shards"), verify=True)
    assert (summary.rows, summary.samples, sum(summary.skipped.values())) == (6, 2, 4)
    assert report.encoded == 2 and len(report.skipped) == 4
    reasons = {row: reason for _, row, _, reason in summary.skipped_rows}
    assert sorted(reasons) == [0, 1, 2, 3]
    assert reasons[0] == "no control image"
    assert reasons[1] == "no prompt"
    assert reasons[2].startswith("the target is damaged")
    assert reasons[3] == "control 1 is not an image"
    assert summary.faults == []


def test_a_live_stream_skips_the_same_rows_for_the_same_reasons(broken: Path, family_encoder, tmp_path: Path) -> None:
    source = open_as(family_encoder, broken)
    precompute(source, family_encoder, tmp_path / "shards", rows=(0, 6))
    live = open_stream(source, encoder=family_encoder).samples
    cached = ShardSet.open([tmp_path / "shards"])
    assert [(gone.row, gone.reason) for gone in live.skipped] == [(gone.row, gone.reason) for gone in cached.skipped]
    assert list(live.keys) == list(cached.keys)
    assert live.digests.tolist() == cached.digests.tolist()
    assert shapes(live) == shapes(cached)
    assert live.columns.lengths.tolist() == cached.columns.lengths.tolist()


def shapes(samples: Samples) -> list[Shape]:
    columns = samples.columns
    return [columns.shape_names[number] for number in columns.shapes]


def test_a_skipped_row_is_not_tried_again_until_it_changes(broken: Path, family_encoder, tmp_path: Path) -> None:
    source = open_as(family_encoder, broken)
    precompute(source, family_encoder, tmp_path / "shards", rows=(0, 6))
    again = precompute(source, family_encoder, tmp_path / "shards", rows=(0, 6))
    assert (again.encoded, again.reused, len(again.skipped), again.shards_written) == (0, 2, 4, 0)

    target = sorted((broken / "training_images").glob("*.png"))[1]
    target.with_suffix(".txt").write_text("now it has one")
    mended = precompute(open_as(family_encoder, broken), family_encoder, tmp_path / "shards", rows=(0, 6))
    assert (mended.encoded, mended.reused, len(mended.skipped)) == (1, 2, 3)


def test_on_error_stop_names_the_row_and_leaves_no_half_shard(broken: Path, family_encoder, tmp_path: Path) -> None:
    with pytest.raises(RowError) as caught:
        precompute(
            open_as(family_encoder, broken),
            family_encoder,
            tmp_path / "shards",
            rows=(0, 6),
            settings=Settings(on_error="stop"),
        )
    assert "row 0" in str(caught.value) and "no control image" in str(caught.value)
    assert list((tmp_path / "shards").iterdir()) == []

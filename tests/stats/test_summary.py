"""What qie-stats says of shards: it adds up, needs no tar, and a bad shard spoils nothing but itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from qie.cli import stats
from qie.errors import QieError
from qie.html_report.sections import header
from qie.shards.discovery import find_indexes
from qie.shards.grid import merged_ranges
from qie.shards.pictures import SmallPictures, encode_pictures
from qie.stats import Summary, summarise
from qie.stores import LocalFolder, StoreError
from tests.builders import RECIPE_21, make_recipe, make_sample, make_sample_21, write_shard


def summary_of(*places: Path, verify: bool = False) -> Summary:
    return summarise(find_indexes(places), verify=verify)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Rows 0 to 4 and 8 to 10: two shapes, one row skipped, row 9 of the content of row 1."""
    folder = tmp_path / "shards"
    samples = [make_sample(n, tokens=9 + n, clipped=2 * (n == 2)) for n in range(4)]
    write_shard(folder, [*samples, None])
    write_shard(folder, [make_sample(8, target=(6, 8), controls=((6, 8), (2, 2))), samples[1]], start=8)
    return folder


def test_rejected_targets_are_counted_and_small_pictures_take_their_bytes(tmp_path: Path) -> None:
    picture = encode_pictures(SmallPictures(Image.new("RGB", (8, 8))))
    write_shard(tmp_path, [replace(make_sample(0, paired=True), pictures=picture), make_sample(1)])
    summary = summary_of(tmp_path, verify=True)
    assert (summary.with_rejected, summary.to_dict()["with_rejected"], summary.faults) == (1, 1, [])
    assert summary.tensor_bytes_total["rejected_latent"] == summary.tensor_bytes["pixel_latent"]
    assert summary.tensor_bytes_total["pictures"] == len(picture)
    told = CliRunner().invoke(stats.main, [str(tmp_path)]).output
    assert "\nrejected  1 of the samples has a rejected target\n" in told
    assert "with a rejected target" in header(summary, [], verified=False, looked_at=0)


@pytest.mark.parametrize("verify", [False, True])
def test_a_summary_counts_rows_samples_shapes_bytes_repetitions_and_what_was_skipped(
    shards: Path, verify: bool
) -> None:
    done: list[int] = []
    summary = summarise(find_indexes([shards]), verify=verify, progress=done.append)

    assert done == [1, 2]
    assert (summary.shards, summary.rows, summary.samples, summary.faults) == (2, 7, 6, [])
    assert (summary.records, summary.duplicates) == (6, 1), "of equal content in two shards"
    assert summary.skipped == {"the target is no image": 1}
    assert summary.skipped_rows == [(str(shards / "00000000-00000005.tar"), 4, "row 4", "the target is no image")]
    assert summary.bytes == sum(path.stat().st_size for path in shards.glob("*.tar"))
    assert summary.bytes_per_sample == summary.bytes / 6
    assert (summary.clipped, summary.clipped_samples) == (2, 1)
    assert summary.shapes == {"48×32 px from 48×32": 5, "64×48 px from 64×48 + 16×16": 1}
    assert summary.buckets == {"48×32": 5, "64×48": 1}
    assert summary.tensor_bytes_total["pixel_latent"] == 32 * (5 * 4 * 6 + 6 * 8)
    assert summary.tensor_bytes["pixel_latent"] == summary.tensor_bytes_total["pixel_latent"] / 6
    assert list(summary.tensor_bytes.values()) == sorted(summary.tensor_bytes.values(), reverse=True)


def test_rows_that_no_shard_of_a_folder_covers_are_named_whatever_another_covers(shards: Path, tmp_path: Path) -> None:
    assert summary_of(shards).ranges == [(0, 5), (8, 10)]
    write_shard(tmp_path / "other", [make_sample(n) for n in range(20, 30)])
    summary = summary_of(shards, tmp_path / "other")

    assert (summary.ranges, summary.missing) == ([(0, 10)], [(str(shards), 5, 8)])


def test_ranges_that_touch_or_overlap_are_one() -> None:
    assert merged_ranges([(8, 9), (0, 3), (3, 5), (4, 6), (5, 6)]) == [(0, 6), (8, 9)]


@pytest.mark.parametrize(
    ("rows", "missing", "fault"), [(10, [], ""), (12, [(10, 12)], ""), (9, [], "the source has only 9")]
)
def test_with_a_source_the_last_rows_are_compared_too(
    shards: Path, tmp_path: Path, rows: int, missing: list[tuple[int, int]], fault: str
) -> None:
    lines = [json.dumps({"target_image": "a.png", "control_image": "b.png", "prompt": "p"})] * rows
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    result = CliRunner().invoke(stats.main, [str(shards), "--json", "--source", str(tmp_path / "rows.jsonl")])
    values = json.loads(result.stdout)
    assert [tuple(one[1:]) for one in values["missing"]] == [(5, 8), *missing]
    assert fault in "".join(values["faults"]) and bool(values["faults"]) == bool(fault)
    assert result.exit_code == 1


def test_percentiles_are_lengths_of_prompts_and_shards_without_samples_have_none(tmp_path: Path) -> None:
    write_shard(tmp_path / "some", [make_sample(n, tokens=10 + n) for n in range(21)])
    write_shard(tmp_path / "none", [None, None])

    lengths = {"min": 10, "p5": 11, "p25": 15, "median": 20, "p75": 25, "p95": 29, "p99": 30, "max": 30}
    assert summary_of(tmp_path / "some").tokens == lengths
    none = summary_of(tmp_path / "none")
    assert (none.rows, none.samples, none.tokens, none.bytes_per_sample) == (2, 0, {}, 0.0)


def test_a_summary_needs_no_tar_but_its_size_for_which_each_is_asked_where_folders_cannot_be_listed(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, indexes = summary_of(shards), find_indexes([shards])
    for tar in shards.glob("*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))
    assert summary_of(shards) == before

    def refuse(folder: LocalFolder) -> dict[str, int]:
        raise StoreError("a web server lists nothing", where=folder.url)

    monkeypatch.setattr(LocalFolder, "listing", refuse)
    assert summarise(indexes) == before


def test_recipes_that_are_mixed_are_a_fault_that_names_what_differs(shards: Path) -> None:
    write_shard(shards, [make_sample(30)], start=30, recipe=make_recipe(multiple_px=16))

    summary = summary_of(shards)

    assert sorted(summary.recipes.values()) == [1, 2]
    assert len(summary.faults) == 1 and "multiple_px: 32 here, 16 there" in summary.faults[0]


def test_of_families_that_are_mixed_each_has_its_own_pixels_to_a_latent_pixel(tmp_path: Path) -> None:
    write_shard(tmp_path / "21", [make_sample_21(0, controls=()), make_sample_21(1)], recipe=RECIPE_21)
    write_shard(tmp_path / "plus", [make_sample(2)], start=2)
    for places in ((tmp_path / "21", tmp_path / "plus"), (tmp_path / "plus", tmp_path / "21")):
        summary = summary_of(*places)
        assert summary.shapes == {"96×64 px from text": 1, "96×64 px from 96×64": 1, "48×32 px from 48×32": 1}
        assert summary.buckets == {"96×64": 2, "48×32": 1}


def test_the_table_and_the_json_render_one_summary(shards: Path) -> None:
    result = CliRunner().invoke(stats.main, [str(shards), "--json"])
    values = json.loads(result.stdout)
    table = CliRunner().invoke(stats.main, [str(shards)]).stdout

    assert values == json.loads(json.dumps(summary_of(shards).to_dict()))
    assert result.exit_code == 1, "rows are missing"
    assert "missing   [5, 8) in" in table and "1 samples repeat others" in table
    assert "1  the target is no image" in table and "skipped row 4 (row 4)" in table
    for shape, count in values["shapes"].items():
        assert f"{count:9d}  {shape}" in table


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--explain", "photos"], "--config"),
        (["--explain", "photos", "--config", "c.yaml", "--plan"], "--plan"),
        (["--plan", "--verify"], "--verify"),
        (["--config", "c.yaml"], "--explain"),
        (["--batch-size", "2"], "--plan"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(shards: Path, arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(stats.main, [str(shards), *arguments])

    assert result.exit_code == 2 and named in result.stderr


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"")
    with pytest.raises(QieError, match="no shards found"):
        find_indexes([tmp_path])

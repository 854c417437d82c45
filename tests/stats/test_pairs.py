"""Warnings about pairs: what was planted is found, what an edit may do is not, and captions that repeat are counted."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image, ImageOps

from qie.cli import stats
from qie.encode.alignment import compare_pair
from qie.precompute import engine
from qie.precompute.counts import Report
from qie.shards.discovery import find_indexes
from qie.shards.index import Entry, read_index
from qie.shards.record import encode
from qie.shards.writer import ShardWriter
from qie.stats import Pairs, summarise
from qie.types import Pair, Row
from tests import photo_pairs
from tests.builders import RECIPE, make_sample

SIDE_PX = 288


@pytest.fixture(scope="module")
def cat() -> Image.Image:
    return photo_pairs.photo("cat").crop((0, 0, 300, 300)).resize((512, 512))


def moved(image: Image.Image, x: int, y: int) -> Image.Image:
    """What an image shows in a window of 448 px, its content moved by (x, y)."""
    return image.crop((32 - x, 32 - y, 480 - x, 480 - y))


def with_pair(number: int, pair: Pair | None = None, *, target: str = "", caption: str = "") -> Entry:
    row = Row(number, f"photo {number}", (target or f"target {number}").encode(), (b"c",), caption or f"{number}")
    return replace(Entry.of(make_sample(number), row), pair=pair)


def test_of_20_faults_planted_among_200_edits_of_photographs_18_are_found_and_at_most_4_are_none() -> None:
    pairs = photo_pairs.make_pairs(200, 20, seed=0, long_side_px=SIDE_PX)
    found = photo_pairs.tallied([photo_pairs.entry_of(pair, n, SIDE_PX**2) for n, pair in enumerate(pairs)])

    warned = {row: one.kind for one in found.worst for row in one.rows}
    planted = {n: photo_pairs.KINDS_OF[pair.fault] for n, pair in enumerate(pairs) if pair.fault}
    assert len(planted) == 20 and found.compared == 200
    assert sum(found.warnings.values()) == len(warned), "each of the few is named"
    assert sum(warned.get(row) in kinds for row, kinds in planted.items()) >= 18, warned
    assert len(warned.keys() - planted.keys()) <= 4, warned


def test_a_shift_is_measured_to_two_pixels_of_448_and_a_crop_to_half_a_per_cent(cat: Image.Image) -> None:
    control = moved(cat, 0, 0)
    shifted = compare_pair(ImageOps.invert(moved(cat, 13, -9)), [control], [1.0])
    assert shifted and shifted.shift_px and shifted.scale and shifted.agreement
    assert np.abs(np.subtract(shifted.shift_px, (13, -9))).max() <= 2 and abs(shifted.scale - 1) < 0.005
    assert shifted.agreement > 0.8

    cropped = compare_pair(control.resize((448, 448), box=(12, 12, 436, 436)), [control], [1.0])
    assert cropped and cropped.scale and abs(cropped.scale - 448 / 424) < 0.005
    slightly = compare_pair(control.resize((448, 448), box=(5, 5, 443, 443)), [control], [1.0])
    assert slightly and slightly.scale and abs(slightly.scale - 448 / 438) < 0.005, (
        "though most of it moves by a few pixels"
    )


def test_of_several_controls_the_one_that_was_edited_counts_and_another_subject_is_no_fault(cat: Image.Image) -> None:
    other, control = photo_pairs.photo("cup of coffee").resize((448, 448)), moved(cat, 0, 0)
    drifted, target = moved(cat, 12, 0), ImageOps.posterize(control, 2)
    assert compare_pair(target, [other, control], [1.5, 1.0]) == Pair(control=2)
    assert compare_pair(target, [drifted, control], [1.0, 1.0]) == Pair(control=2)
    found = compare_pair(target, [other, drifted], [1.0, 1.0])
    assert found and found.control == 2 and found.shift_px and abs(found.shift_px[0] + 12) <= 2
    assert compare_pair(target, [other, other], [1.0, 1.0]) == Pair(control=None)
    assert compare_pair(target, [], []) is None


def test_proportions_tell_where_rounding_to_32_px_does_not_explain_them(cat: Image.Image) -> None:
    assert compare_pair(cat.resize((448, 480)), [cat], [0.98]) != compare_pair(cat, [cat], [0.9]) == Pair(1, None, 0.9)


def test_an_encoder_compares_a_row_at_the_pixels_that_its_vae_gets(encoder, cat: Image.Image) -> None:
    def png(image: Image.Image) -> bytes:
        content = io.BytesIO()
        image.save(content, "PNG")
        return content.getvalue()

    control, larger = png(moved(cat, 0, 0)), moved(cat, 14, 0).resize((896, 896))
    sample = encoder.encode(Row(0, "cat", png(ImageOps.invert(larger)), (control,), "a negative"))
    assert sample.pair and sample.pair.shift_px and sample.pair.control == 1
    side = 8 * sample.shape.target[0]
    assert abs(sample.pair.shift_px[0] - side * 14 / 448) <= 2 and sample.pair.shift_px[1] == 0


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Ten rows: 2 shifted, 3 and 4 scaled, 5 its control by its files, 6 of other proportions, 7 of nobody's look."""
    pairs = {n: Pair(control=1) for n in range(10)} | {
        2: Pair(1, shift_px=(24, 0), scale=1.002, agreement=0.92),
        3: Pair(1, shift_px=(0, 0), scale=1.05, agreement=0.8),
        4: Pair(1, shift_px=(3, -1), scale=0.9, agreement=0.75),
        6: Pair(1, proportions=0.75),
    }
    entries = [with_pair(n, pairs[n], target="c" if n == 5 else "") for n in range(10)]
    entries[7] = replace(entries[7], pair=None)
    folder = tmp_path / "shards"
    with ShardWriter(folder, 0, 10, RECIPE) as shard:
        for number, entry in enumerate(entries):
            shard.add(entry, encode(make_sample(number), RECIPE.digest))
        shard.publish()
    return folder


def test_pairs_are_kept_in_the_index_and_say_only_what_there_is_to_say(shards: Path) -> None:
    (index,) = shards.glob("*.json")
    entries = read_index(index).samples
    assert entries[4].pair == Pair(1, shift_px=(3, -1), scale=0.9, agreement=0.75) and entries[7].pair is None
    said = [entry.get("pair") for entry in json.loads(index.read_text())["samples"]]
    assert said[4] == {"control": 1, "shift_px": [3, -1], "scale": 0.9, "agreement": 0.75}
    assert said[0] == {"control": 1} and "pair" not in json.loads(index.read_text())["samples"][7]


def test_stats_warns_of_pairs_with_numbers_and_commands_and_exits_with_0(shards: Path) -> None:
    result = CliRunner().invoke(stats.main, [str(shards)])
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    key = read_index(next(shards.glob("*.json"))).samples[2].key
    told = "the target is shifted by 24, 0 px against control 1; 92% of the places that can be compared agree"
    assert lines[lines.index(f"row 2 (photo 2): {told}") + 1] == f"qie-stats {shards} --exclude {key[:16]}"
    assert "pairs     9 compared, 10 captions" in lines
    assert "row 5 (photo 5): the target is the same as control 1" in lines
    assert "row 6 (photo 6): the target's proportions are 0.750 of those of control 1" in lines
    assert any(line.startswith("note: 1 pairs are not compared") for line in lines)

    found = json.loads(CliRunner().invoke(stats.main, [str(shards), "--json"]).stdout)["pairs"]
    assert found["warnings"] == {"shifted": 1, "scaled": 2, "proportions": 1, "identical": 1}
    assert [one["rows"] for one in found["worst"]] == [[2], [4], [3], [6], [5]], "the worst of each kind first"


def test_an_excluded_pair_is_not_warned_of(shards: Path) -> None:
    CliRunner().invoke(stats.main, [str(shards), "--exclude", "2", "--exclude", "5"])
    assert summarise(find_indexes([shards])).pairs.warnings == {"scaled": 2, "proportions": 1}


def captions(*groups: Sequence[tuple[str, str]]) -> Pairs:
    """Of rows (target, caption)."""
    rows = [row for group in groups for row in group]
    return photo_pairs.tallied([with_pair(n, target=target, caption=text) for n, (target, text) in enumerate(rows)])


def test_a_caption_on_several_edits_is_told_where_most_stand_alone_and_not_where_all_have_one() -> None:
    alone = [(f"a{n}", f"a{n}") for n in range(12)]
    copied = [(f"b{n}", "make it blue") for n in range(5)]
    found = captions(alone, copied, [("c1", "twice"), ("c2", "twice")])
    assert found.warnings == {"repeated_caption": 5} and found.captions == 14
    assert [(one.rows, one.words) for one in found.worst] == [
        ([12, 13, 14, 15], "one caption for 5 different targets (of 5 rows)")
    ]
    assert captions(copied).warnings == {}, "one instruction for a whole set is a choice"
    assert captions(alone, [("b", "x")] * 5).warnings == {}, "one edit that is there five times"


def test_a_target_under_several_captions_is_told_where_most_have_one() -> None:
    found = captions([(f"a{n}", f"a{n}") for n in range(5)], [("b", "blue"), ("b", "azure")])
    assert found.warnings == {"several_captions": 2}
    assert [(one.what, one.words) for one in found.worst] == [("rows 5, 6", "one target under 2 captions")]
    assert captions([("b", "blue"), ("b", "azure")]).warnings == {}


def test_the_page_shows_the_worst_pairs_with_words_and_commands_and_all_rows_by_kind(
    shards: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    CliRunner().invoke(stats.main, [str(shards), "--html", str(page), "--gallery", "all"], catch_exceptions=False)
    text = page.read_text("utf-8")
    section = text[text.index('id="pairs"') : text.index('id="samples"')]
    titles = ["Target enlarged or reduced against its control", "row 4", "row 3", "Target of other proportions"]
    assert [section.index(title) for title in titles] == sorted(section.index(title) for title in titles)
    assert "the target is reduced by 10.0% against control 1, its middle shifted by 3, -1 px" in section
    assert f"--exclude {read_index(next(shards.glob('*.json'))).samples[4].key[:16]}" in section
    assert "target shifted against its control" in text[text.index('id="all-rows"') :]


def test_precompute_tells_how_many_pairs_to_look_at() -> None:
    report = Report()
    for pair in (Pair(1), Pair(1, shift_px=(9, 0), scale=1.0), Pair(1, shift_px=(0, 0), scale=1.05), None):
        engine._count_row(report, engine.Encoded(with_pair(0, pair), b"", None))
    assert report.notes == {
        "target shifted against its control: qie-stats names the rows": 1,
        "target enlarged or reduced against its control: qie-stats names the rows": 1,
    }


@pytest.mark.parametrize("size", [(32, 32), (7232, 64), (32, 1024), (320, 224)])
def test_pictures_of_any_shape_with_nothing_to_see_are_no_reason_to_warn(size: tuple[int, int]) -> None:
    with np.errstate(all="raise"):
        assert compare_pair(Image.new("RGB", size, "red"), [Image.new("RGB", size, "teal")], [1.0]) == Pair(control=1)
        noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
        assert compare_pair(Image.fromarray(noise), [Image.new("RGB", size, "teal")], [1.0]) == Pair(control=1)

"""The engine, with quick rows and a quick encoder: which rows it encodes, copies, skips, and what a failure leaves."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from qie.data.variants import Variants
from qie.errors import RecipeMismatchError, RowError, ShardError, UsageError
from qie.precompute import Report, Settings, engine, precompute
from qie.precompute.engine import DEPTH, READERS
from qie.shards.discovery import published, rows_of
from qie.shards.reader import Shard
from qie.shards.shard_set import ShardSet
from qie.shards.verify import shard_faults
from qie.shards.writer import ShardWriter
from qie.stores import LocalFolder, StoreError
from qie.types import Row, Sample
from tests.conftest import own_threads
from tests.stubs import RECIPE, StubEncoder, StubSource

TIMEOUT_S = 100


@pytest.fixture(autouse=True)
def _looks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOOK_AGAIN_S", 0.01)


def run(
    source, output: Path, *, encoder=None, rows=None, shard_size: int = 4, progress=lambda report: None, **settings
):
    """The report of a run over all rows, and the rows that it encoded, in order."""
    encoder = encoder or StubEncoder()
    report = precompute(
        source,
        encoder,
        output,
        rows=rows or (0, len(source)),
        shard_size=shard_size,
        settings=Settings(**settings),
        progress=progress,
    )
    return report, sorted(encoder.encoded)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


def ordered(source: StubSource, order: list[int]) -> StubSource:
    """The rows of a source in another order, numbered again."""
    return StubSource(tuple(replace(source.rows[old], index=new) for new, old in enumerate(order)))


def lengthened(source: StubSource, index: int) -> StubSource:
    """With another prompt in a row, such that its record has another size and all records after it move."""

    def size(row: Row) -> int:
        return len(StubEncoder().encode(row).prompt_embed) // 32 + 100 * StubEncoder().encode(row).pixel_latent.numel()

    for number in range(1000):
        changed = source.changed(index, prompt=f"longer {number}")
        if size(changed.rows[index]) != size(source.rows[index]):
            return changed
    raise AssertionError


def assert_as_fresh(folder: Path, source, **settings) -> None:
    """The files are those of a run that found nothing in its output."""
    fresh = folder.parent / f"fresh {folder.name}"
    run(source, fresh, **settings)
    assert files(folder) == files(fresh)


def assert_sound(folder: Path) -> None:
    """Nothing is half there: no partial file, no tar without an index, every byte as its index says."""
    names = {path.name for path in folder.iterdir()}
    assert not [name for name in names if "partial" in name]
    assert {name.removesuffix(".tar") for name in names if name.endswith(".tar")} == {
        name.removesuffix(".json") for name in names if name.endswith(".json")
    }
    for index in published(folder):
        assert list(shard_faults(Shard(index))) == []


class Unreadable(StubSource):
    """A source of which no row may be read."""

    def read(self, index: int) -> Row:
        raise AssertionError(f"row {index} was read")


class Once:
    """Calls a function when a row is read for the first time."""

    def __init__(self, source: StubSource, row: int, then: Callable[[], object]) -> None:
        self.source, self.row, self.then = source, row, then
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def read(self, index: int) -> Row:
        if index == self.row:
            with self.lock:
                then, self.then = self.then, lambda: None
            then()
        return self.source.read(index)


# Rows that cannot be encoded


def test_skipped_rows_are_listed_with_their_reason_and_with_their_key_if_they_could_be_read(tmp_path: Path) -> None:
    source = StubSource.of(6).changed(1, target=b"missing").changed(4, target=b"broken")
    report, encoded = run(source, tmp_path / "out")
    assert encoded == [0, 2, 3, 5]
    assert [(gone.row, gone.name, gone.key, gone.reason) for gone in report.skipped] == [
        (1, "row1", None, "no control image"),
        (4, "row4", RECIPE.key(source.rows[4]), "the target is damaged: broken"),
    ]
    assert [gone for shard in shards(tmp_path / "out") for gone in shard.index.skipped] == report.skipped


@pytest.mark.parametrize(("target", "reason"), [(b"missing", "no control image"), (b"broken", "the target is damaged")])
def test_on_error_stop_names_the_row_and_publishes_the_complete_shards_before_it_alone(
    tmp_path: Path, target: bytes, reason: str
) -> None:
    with pytest.raises(RowError) as caught:
        run(StubSource.of(40).changed(21, target=target), tmp_path / "out", on_error="stop")
    assert all(
        word in str(caught.value) for word in ("row 21 (row21)", reason, "to skip such rows, use --on-error skip")
    )
    assert_sound(tmp_path / "out")
    done = [rows_of(index) for index in published(tmp_path / "out")]
    assert done == [(start, start + 4) for start in range(0, 20, 4)][: len(done)]
    assert target == b"missing" or len(done) == 5


def test_a_skipped_row_is_tried_again_only_when_asked_and_encoded_if_it_can_be(tmp_path: Path) -> None:
    class Poor(StubEncoder):
        def encode(self, row: Row) -> Sample:
            if row.index == 2:
                raise RowError("NaN")
            return super().encode(row)

    source = StubSource.of(12).changed(5, target=b"missing").changed(6, target=b"broken")
    run(source, tmp_path / "out", encoder=Poor())
    before = stamps(tmp_path / "out")
    report, encoded = run(source, tmp_path / "out")
    assert (encoded, len(report.skipped), stamps(tmp_path / "out")) == ([], 3, before)
    report, encoded = run(source, tmp_path / "out", retry_skipped=True, trust_published=True)
    assert (encoded, report.reused, [gone.row for gone in report.skipped]) == ([2], 9, [5, 6])
    assert (report.shards_written, report.shards_kept) == (2, 1)
    assert_as_fresh(tmp_path / "out", source)


# Rows that are published


def test_a_second_run_encodes_nothing_and_touches_nothing_and_a_trusting_one_reads_no_row(tmp_path: Path) -> None:
    source = StubSource.of(10).changed(3, target=b"missing")
    first, _ = run(source, tmp_path / "out")
    before = stamps(tmp_path / "out")
    for rows, settings in ((source, {}), (Unreadable(source.rows), {"trust_published": True})):
        again, encoded = run(rows, tmp_path / "out", **settings)
        assert encoded == [] and stamps(tmp_path / "out") == before
        assert (again.rows, again.reused, again.shards_kept, again.shards_written) == (10, 9, 3, 0)
        assert again.skipped == first.skipped


def shards(folder: Path) -> list[Shard]:
    return [Shard(index) for index in published(folder)]


CHANGES: dict[str, tuple[Callable[[StubSource], StubSource], list[int]]] = {
    "a row is another": (lambda source: lengthened(source, 5), [5]),
    "reversed": (lambda source: ordered(source, [*reversed(range(24))]), []),
    "rotated": (lambda source: ordered(source, [*range(5, 24), *range(5)]), []),
    "swapped shards": (lambda source: ordered(source, [*range(20, 24), *range(4, 20), *range(4)]), []),
    "dealt": (lambda source: ordered(source, [row for start in range(4) for row in range(start, 24, 4)]), []),
    "rows come in front": (lambda source: ordered(StubSource.of(28), [*range(24, 28), *range(24)]), [0, 1, 2, 3, 11]),
    "rows come again": (lambda source: ordered(source, [*range(24), 3, 7, 0, 2]), []),
}


@pytest.mark.parametrize(("change", "new"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("elsewhere", "shard_size"), [(False, 4), (True, 4), (True, 7)])
def test_only_new_content_is_encoded_and_the_files_are_those_of_a_fresh_run(
    tmp_path: Path, change, new: list[int], elsewhere: bool, shard_size: int
) -> None:
    source = StubSource.of(24).changed(7, target=b"broken")
    run(source, tmp_path / "old")
    changed, output = change(source), tmp_path / ("new" if elsewhere else "old")
    reuse = {"reuse": (str(tmp_path / "old"),)} if elsewhere else {}
    report, encoded = run(changed, output, shard_size=shard_size, **reuse)
    assert encoded == new
    skipped = sum(row.target == b"broken" for row in changed.rows)
    assert (report.encoded, report.reused, len(report.skipped)) == (
        len(new),
        len(changed) - len(new) - skipped,
        skipped,
    )
    assert_as_fresh(output, changed, shard_size=shard_size)


def test_a_shard_that_is_replaced_while_its_records_are_being_copied_elsewhere_still_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of a later shard has found a record in an older one, and stops there until that one was replaced."""
    source = StubSource.of(8)
    run(source, tmp_path / "out")
    moved = ordered(source, [4, 5, 6, 7, 0, 1, 2, 3])
    replaced = threading.Event()
    copied, publish = Shard.verified_record, ShardWriter.publish

    def waits(self: Shard, entry) -> bytes:
        if self.index.start == 0:
            assert replaced.wait(TIMEOUT_S)
        return copied(self, entry)

    def tells(self: ShardWriter):
        index = publish(self)
        if self.start == 0:
            replaced.set()
        return index

    monkeypatch.setattr(Shard, "verified_record", waits)
    monkeypatch.setattr(ShardWriter, "publish", tells)
    report, _ = run(moved, tmp_path / "out")
    assert report.encoded + report.reused == 8
    assert_as_fresh(tmp_path / "out", moved)


def test_a_dataset_that_grew_at_its_end_keeps_its_short_last_shard_and_goes_on_after_it(tmp_path: Path) -> None:
    run(StubSource.of(10), tmp_path / "out")
    before = stamps(tmp_path / "out")
    report, encoded = run(StubSource.of(23), tmp_path / "out", shard_size=6)
    assert encoded == list(range(10, 23))
    assert (report.rows, report.reused, report.encoded) == (23, 10, 13)
    assert before.items() <= stamps(tmp_path / "out").items()
    assert ShardSet.open([tmp_path / "out"]).keys == [RECIPE.key(row) for row in StubSource.of(23).rows]
    grid = [0, 4, 8, 10, 12, 18, 23]
    assert [rows_of(index) for index in published(tmp_path / "out")] == list(pairwise(grid))


# Rows of equal content


def test_rows_of_equal_content_in_a_shard_are_encoded_once_and_stored_once_or_skipped_for_one_reason(
    tmp_path: Path,
) -> None:
    source = StubSource.of(4).changed(1, target=b"broken")
    twins = ordered(source, [0, 1, 1, 2, 1, 0, 0])
    twins = StubSource(tuple(replace(row, name=f"twin{row.index}") for row in twins.rows))
    report, encoded = run(twins, tmp_path / "out", shard_size=7)
    assert encoded == [0, 3]
    assert (report.rows, report.encoded, report.reused) == (7, 2, 2)
    assert [(gone.row, gone.reason, gone.key) for gone in report.skipped] == [
        (row, "the target is damaged: broken", RECIPE.key(source.rows[1])) for row in (1, 2, 4)
    ]
    (shard,) = shards(tmp_path / "out")
    assert len(shard.index.files) == 2
    assert [(entry.row, entry.name) for entry in shard.index.samples] == [(row, f"twin{row}") for row in (0, 3, 5, 6)]
    assert run(twins, tmp_path / "out", shard_size=7)[0].shards_kept == 1


def test_rows_of_equal_content_far_behind_are_found_in_the_shards_of_this_run(tmp_path: Path) -> None:
    report, encoded = run(ordered(StubSource.of(100), [*range(100), 0, 1, 2]), tmp_path / "out")
    assert (encoded, report.encoded, report.reused) == ([*range(100)], 100, 3)


def test_the_files_are_the_same_whichever_of_equal_rows_was_there_first(tmp_path: Path) -> None:
    twins = ordered(StubSource.of(8), [0, 1, 2, 3, 3, 2, 1, 0])
    for folder, ranges in {"whole": [(0, 8)], "front": [(0, 4), (4, 8)], "back": [(4, 8), (0, 4)]}.items():
        for rows in ranges:
            run(twins, tmp_path / folder, rows=rows)
    assert files(tmp_path / "whole") == files(tmp_path / "front") == files(tmp_path / "back")


# Older shards

OTHER = replace(RECIPE, areas_px=(8192,))


def test_shards_of_another_recipe_give_no_records(tmp_path: Path) -> None:
    run(StubSource.of(8), tmp_path / "old", encoder=StubEncoder(OTHER))
    report, encoded = run(StubSource.of(8), tmp_path / "new", reuse=(str(tmp_path / "old"),))
    assert (encoded, report.reused) == (list(range(8)), 0)


@pytest.mark.parametrize("ours", [0, 4], ids=["all", "the second"])
def test_shards_of_another_recipe_in_the_output_are_refused_and_left_alone(tmp_path: Path, ours: int) -> None:
    """Whether it is the first shard or is met on the way."""
    if ours:
        run(StubSource.of(8), tmp_path / "out", rows=(0, ours))
    run(StubSource.of(8), tmp_path / "other", rows=(ours, 8), encoder=StubEncoder(OTHER))
    shutil.copytree(tmp_path / "other", tmp_path / "out", dirs_exist_ok=True)
    before = files(tmp_path / "out")
    with pytest.raises(RecipeMismatchError, match="areas_px") as caught:
        run(StubSource.of(8), tmp_path / "out")
    assert f"{ours:08d}-{ours + 4:08d}" in str(caught.value)
    assert files(tmp_path / "out") == before


def test_a_damaged_record_is_not_copied_and_is_named(tmp_path: Path) -> None:
    run(StubSource.of(8), tmp_path / "old")
    tar = tmp_path / "old" / "00000004-00000008.tar"
    content = bytearray(tar.read_bytes())
    content[700] ^= 1  # within the first record
    tar.write_bytes(content)
    with pytest.raises(ShardError, match="a record is damaged") as caught:
        run(StubSource.of(8), tmp_path / "new", reuse=(str(tmp_path / "old"),))
    assert str(tar) in str(caught.value)
    assert_sound(tmp_path / "new")


def test_a_place_to_reuse_without_shards_and_a_source_that_lost_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no shards found"):
        run(StubSource.of(8), tmp_path / "out", reuse=(str(tmp_path / "typo"),))
    run(StubSource.of(8), tmp_path / "out")
    with pytest.raises(UsageError, match="no longer has"):
        run(StubSource.of(7), tmp_path / "out")


def test_what_killed_runs_left_of_these_rows_is_removed_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name in ("00000000-00000004.tar.partial", "00000004-00000008.json.partial", "00000004-00000008.tar"):
        (output / name).write_bytes(b"half")
    for name in ("00000008-00000012.tar.partial", "notes.txt"):
        (output / name).write_bytes(b"another's")
    run(StubSource.of(12), output, rows=(0, 8))
    kept = {name for name, content in files(output).items() if content == b"another's"}
    assert kept == {"00000008-00000012.tar.partial", "notes.txt"}
    run(StubSource.of(12), output)
    (output / "notes.txt").unlink()
    assert_as_fresh(output, StubSource.of(12))


# Two runs at once


def test_two_runs_on_one_range_share_it(tmp_path: Path) -> None:
    """The first is in the middle of a shard when the second comes, which ends when that shard is there, too."""
    source, output = StubSource.of(24), tmp_path / "out"
    second: list[tuple[Report, list[int]]] = []
    waits = threading.Event()

    def follow(report: Report) -> None:
        if report.shards_busy:
            waits.set()

    thread = threading.Thread(target=lambda: second.append(run(source, output, progress=follow)))

    def begin() -> None:
        thread.start()
        assert waits.wait(TIMEOUT_S)

    # Row 8 is read while shards up to its own have writers, and later ones not all.
    first, encoded = run(Once(source, 8, begin), output)
    thread.join(TIMEOUT_S)
    ((other, other_encoded),) = second
    assert (first.rows, first.shards_busy, other.rows, other.shards_busy) == (24, 0, 24, 0)
    assert sorted(encoded + other_encoded) == list(range(24)), "rows were encoded twice, or never"
    assert first.encoded + first.reused == other.encoded + other.reused == 24
    assert_as_fresh(output, source)


def test_a_folder_where_two_shards_hold_the_same_rows_is_a_fault_at_the_end_of_a_run_and_before_the_next(
    tmp_path: Path,
) -> None:
    """As two runs may leave it in a store without locks."""
    source, output = StubSource.of(8), tmp_path / "out"
    run(source, tmp_path / "by 8", shard_size=8)

    def another_run_publishes(report: Report) -> None:
        shutil.copytree(tmp_path / "by 8", output, dirs_exist_ok=True) if report.rows == 8 else None

    for progress in (another_run_publishes, lambda report: None):
        with pytest.raises(ShardError, match="two shards hold the same rows") as caught:
            run(source, output, progress=progress)
        assert "00000000-00000008" in str(caught.value)


def test_what_another_run_published_in_other_shards_meanwhile_is_gone_around(tmp_path: Path) -> None:
    source, output = StubSource.of(40), tmp_path / "out"
    # Until row 0 is read, which waits for the other run, this one reads ahead and locks the shards of what it reads.
    assert READERS + DEPTH + 4 < 31, "the other run would wait for one of them"
    later = Once(source, 0, lambda: run(source, output, rows=(31, 38), shard_size=3))
    report, encoded = run(later, output, shard_size=4)
    assert [rows_of(index) for index in published(output)][7:] == list(pairwise([28, 31, 33, 36, 38, 40]))
    assert encoded == [*range(31), 38, 39] and (report.rows, report.reused) == (40, 7)
    assert ShardSet.open([output]).keys == [RECIPE.key(row) for row in source.rows]


def test_a_shard_that_another_run_gives_up_is_written(tmp_path: Path) -> None:
    """As by a run that was killed while this one had begun already: nothing is missing when this one ends."""
    source, output = StubSource.of(24), tmp_path / "out"
    other = ShardWriter(output, 8, 12, RECIPE).__enter__()
    seen: list[tuple[int, int]] = []

    def follow(report: Report) -> None:
        seen.append((report.rows, report.shards_busy))
        if report.shards_busy:
            other.close()

    report, encoded = run(source, output, progress=follow)
    assert (20, 1) in seen, "it did not do all else first"
    assert encoded == list(range(24)) and (report.rows, report.shards_busy, report.shards_written) == (24, 0, 6)
    assert_as_fresh(output, source)


def test_a_run_that_waits_for_another_one_can_be_interrupted(tmp_path: Path) -> None:
    def interrupt(report: Report) -> None:
        if report.shards_busy:
            raise KeyboardInterrupt

    with ShardWriter(tmp_path / "out", 8, 12, RECIPE):
        with pytest.raises(KeyboardInterrupt):
            run(StubSource.of(24), tmp_path / "out", progress=interrupt)
        assert own_threads() == []
        assert len(published(tmp_path / "out")) == 5


def test_a_shard_that_another_run_replaced_while_its_rows_were_compared_is_looked_at_again(tmp_path: Path) -> None:
    source, output = StubSource.of(8), tmp_path / "out"
    run(source, output, shard_size=8)
    changed = lengthened(source, 1)
    other: list[list[int]] = []
    meanwhile = Once(changed, 1, lambda: other.append(run(changed, output, shard_size=8)[1]))
    report, encoded = run(meanwhile, output, shard_size=8)
    assert other == [[1]]
    assert encoded == [] and (report.rows, report.reused) == (8, 8)
    assert_as_fresh(output, changed, shard_size=8)


# Counts


@pytest.mark.parametrize("variants", [1, 3])
def test_the_reports_numbers_add_up_all_the_way(tmp_path: Path, variants: int) -> None:
    source = StubSource.of(30).changed(3, target=b"broken").changed(9, target=b"missing")
    source = StubSource(tuple(replace(row, more_prompts=(f"{row.prompt} b", f"{row.prompt} c")) for row in source.rows))
    run(source, tmp_path / "out", rows=(8, 16), variants=Variants(variants))
    seen: list[tuple[int, ...]] = []

    def follow(report: Report) -> None:
        seen.append((report.rows, report.encoded, report.reused, len(report.skipped), report.shards_written))

    report, encoded = run(source, tmp_path / "out", variants=Variants(variants), progress=follow)
    assert (report.rows, report.shards_busy) == (30, 0)
    # A row that cannot even be read has no variants.
    assert report.encoded + report.reused + len(report.skipped) == variants * 29 + 1
    assert (report.encoded, len(encoded)) == (21 * variants, 21 * variants)
    assert len(report.skipped) == variants + 1
    assert (report.shards_written, report.shards_kept) == (6, 2)
    written = [path for path in (tmp_path / "out").glob("*.tar") if not path.name.startswith(("00000008", "00000012"))]
    assert report.bytes_written == sum(path.stat().st_size for path in written)
    assert seen == sorted(seen), "a count went backwards"
    assert seen[-1] == (30, report.encoded, report.reused, len(report.skipped), 6)
    # What is kept passes through all stages, and counts in none.
    items = {name: load.items for name, load in report.loads.items()}
    assert (items["read"], items["encode"], items["publish"]) == (22, 21 * variants + variants, 22)
    assert (items["merge"], items["record"], items["write"]) == (22, items["encode"], 22)
    values = report.to_dict()
    assert values["rows"] == 30 and values["bottleneck"] in values["stages"]
    assert all(0 <= stage["busy"] <= 1 for stage in values["stages"].values())


def test_clipped_values_are_counted_of_what_was_encoded(tmp_path: Path) -> None:
    class Clipping(StubEncoder):
        def encode(self, row: Row) -> Sample:
            return replace(super().encode(row), clipped=2)

    assert run(StubSource.of(5), tmp_path / "out", encoder=Clipping())[0].clipped == 10
    assert run(StubSource.of(5), tmp_path / "out", encoder=Clipping())[0].clipped == 0


def test_reports_of_processes_side_by_side_are_added(tmp_path: Path) -> None:
    source = StubSource.of(8).changed(2, target=b"broken").changed(6, target=b"broken")
    parts = [run(source, tmp_path / "out", rows=rows)[0] for rows in ((4, 8), (0, 4))]
    both = sum(parts, Report())
    assert (both.rows, both.encoded, [gone.row for gone in both.skipped], both.shards_written) == (8, 6, [2, 6], 2)
    assert both.seconds == max(part.seconds for part in parts)
    assert both.loads["read"].workers == sum(part.loads["read"].workers for part in parts)
    assert parts[0].rows == 4, "adding changed what was added"


# Runs that fail


@pytest.mark.parametrize("row", [0, 13, 29])
@pytest.mark.parametrize("again", [False, True], ids=["encoding", "comparing"])
def test_an_error_of_the_store_stops_the_run_with_it_and_what_is_published_stays(
    tmp_path: Path, row: int, again: bool
) -> None:
    source, output = StubSource.of(30), tmp_path / "out"
    if again:
        run(source, output)

    def fail() -> None:
        raise StoreError("the network is down")

    with pytest.raises(StoreError, match="the network is down"):
        run(Once(source, row, fail), output)
    assert_sound(output)
    assert len(published(output)) == (8 if again else row // 4)
    done = {number for shard in shards(output) for number in range(shard.index.start, shard.index.stop)}
    assert set(run(source, output)[1]) == set(range(30)) - done
    assert_as_fresh(output, source)


@pytest.mark.parametrize("error", [KeyboardInterrupt, StoreError("no"), ZeroDivisionError], ids=str)
@pytest.mark.parametrize("where", ["encoder", "progress", "publish"])
def test_a_run_that_fails_leaves_nothing_half_visible_and_no_thread(
    tmp_path: Path, error, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(StubEncoder):
        def encode(self, row: Row) -> Sample:
            if where == "encoder" and row.index == 9:
                raise error
            return super().encode(row)

    def progress(report: Report) -> None:
        if where == "progress" and report.rows == 9:
            raise error

    if where == "publish":
        original = LocalFolder.write

        def failing(self, name: str, content: bytes) -> None:
            if name.startswith("00000008"):
                raise error
            original(self, name, content)

        monkeypatch.setattr(LocalFolder, "write", failing)
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind):
        run(StubSource.of(40), tmp_path / "out", encoder=Failing(), progress=progress)
    assert own_threads() == []
    assert not list((tmp_path / "out").glob("*.partial"))
    assert not any(fault for shard in shards(tmp_path / "out") for fault in shard_faults(shard))
    monkeypatch.undo()
    run(StubSource.of(40), tmp_path / "out")
    assert_as_fresh(tmp_path / "out", StubSource.of(40))

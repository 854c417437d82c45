"""What `qie watch` makes of a folder of shards: from what workers tell, the indexes, and the exclude list."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from qie.errors import UsageError
from qie.precompute import heartbeat, precompute
from qie.precompute.heartbeat import Pulse
from qie.precompute.progress import PrecomputeRun, StageLoad, WorkerProgress
from qie.shards.excluded import read_excluded
from qie.shards.index import Skipped
from qie.shards.pictures import SmallPictures, encode_pictures
from qie.stores import Folder, LocalFolder, open_folder
from qie.watch.index_follower import COMPARE_EVERY, IndexFollower
from qie.watch.places import open_pages
from qie.watch.precompute_page import change_sample, precompute_page, render_precompute
from qie.watch.precompute_reader import PrecomputeReader, is_precompute
from qie.watch.skipped_pictures import SkippedPictures
from tests.builders import make_sample, write_shard
from tests.s3 import s3, s3_server  # noqa: F401 - fixtures
from tests.stats.pages import SCRIPT, write_colours
from tests.stubs import StubEncoder, StubSource

SOURCE = StubSource.of(60).changed(7, target=b"broken").changed(20, target=b"missing").changed(21, target=b"missing")
NOW = 2e9


@pytest.fixture(autouse=True)
def _told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "FIRST_BEAT_S", 0.0)


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def fill(output: Folder | Path | str, rows: tuple[int, int] = (0, 60), *, tell: bool = True) -> None:
    precompute(SOURCE, StubEncoder(), output, rows=rows, shard_size=8, tell=tell)


def tell(output: Path, *workers: WorkerProgress) -> None:
    (output / "progress").mkdir(parents=True, exist_ok=True)
    for one in workers:
        (output / "progress" / f"{one.worker}.json").write_text(json.dumps(asdict(one)))


def worker(run: PrecomputeRun, **fields: Any) -> WorkerProgress:
    return replace(Pulse(run, 2.0).progress(), **{"updated": NOW, "advanced": NOW, "started": NOW - 60} | fields)


@pytest.mark.parametrize("store", ["disk", "s3"])
def test_a_folder_that_was_filled_is_told_in_one_dict_from_its_files_alone(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    output = open_folder(tmp_path / "out" if store == "disk" else f"{request.getfixturevalue('s3').url}/out")
    fill(output)
    found = PrecomputeReader(output).read()
    assert json.loads(json.dumps(found)) == found, "it is JSON"
    assert found["rows"] == {"done": 60, "published": 60, "total": 60, "source": 60}
    assert (found["state"], found["shards"], found["indexes_left"], found["faults"]) == ("finished", 8, 0, [])
    assert found["skipped"]["count"] == 3
    named = {one["reason"]: [gone["row"] for gone in one["rows"]] for one in found["skipped"]["reasons"]}
    assert [*named.values()] == [[20, 21], [7]] and "broken" in [*named][1]
    assert [one["row"] for one in found["newest"]] == [*range(59, 49, -1)]
    assert (found["newest"][0]["prompt"], found["newest"][0]["name"]) == ("p59", "row59")
    assert (found["bytes"]["to_come"], found["bytes"]["free"] is None) == (0, store == "s3")
    (one,) = found["workers"]
    assert (one["state"], one["done"], one["rows"], found["left_s"]) == ("finished", 60, [0, 60], None)
    assert found["alerts"] == []


def test_workers_are_alive_by_their_clock_and_once_their_file_has_changed_by_ours(tmp_path: Path) -> None:
    clock, run = Clock(), PrecomputeRun.new((0, 100), 100)
    fresh, old = worker(run), worker(run, updated=NOW - 11)
    behind, ahead = worker(run, updated=NOW - 500), worker(run, updated=NOW + 500)
    tell(tmp_path, fresh, old, behind, ahead)
    reader = PrecomputeReader(tmp_path, clock=clock, steady=clock)

    def states() -> list[str]:
        found = {one["worker"]: one["state"] for one in reader.read()["workers"]}
        return [found[one.worker] for one in (fresh, old, behind, ahead)]

    assert states() == ["running", "silent", "silent", "running"]
    clock.now += 2
    tell(tmp_path, replace(behind, updated=behind.updated + 2))
    assert states() == ["running", "silent", "running", "running"], "a clock that is behind is no death"
    clock.now += 9
    assert states() == ["silent", "silent", "running", "silent"], "a clock that is ahead is no life"
    assert reader.read()["state"] == "running"
    clock.now += 2
    assert reader.read()["state"] == "silent"


def test_what_workers_tell_adds_up_to_rows_pace_and_time_left(tmp_path: Path) -> None:
    fill(tmp_path, (0, 16), tell=False)
    one, other = PrecomputeRun.new((0, 40), 500), PrecomputeRun.new((40, 100), 500)
    slow = {"vae": StageLoad(0.9, 2.0), "text": StageLoad(0.3, 6.0)}
    tell(
        tmp_path,
        worker(one, rows=20, rows_open=4, rate_minute=1.0, rate=0.5, stages=slow),
        worker(one, rows=0, rate_minute=3.0, rate=3.0, stages={"vae": StageLoad(0.5, 4.0)}),
        worker(other, rows=10, rows_open=10, rate_minute=2.0, rate=2.0, skipped={"x": 2}),
        worker(other, rows=5, rows_open=5, state="failed", message="out of memory"),
        worker(PrecomputeRun.new((90, 120), 500), rows=1, rows_open=1, updated=NOW - 60),
    )
    found = PrecomputeReader(tmp_path, clock=Clock(), steady=Clock()).read()
    assert found["rows"] == {"done": 16 + 14, "published": 16, "total": 120, "source": 500}
    assert found["rate"] == {"minute": 6.0, "overall": 5.5}
    assert found["left_s"] == max((40 - 16 - 4) / 4, (60 - 10) / 2)
    stages = {one["name"]: (one["busy"], one["rate"]) for one in found["stages"]}
    assert stages == {"vae": (pytest.approx(0.7), 6.0), "text": (0.3, 6.0)}
    assert (found["bottleneck"]["name"], found["bottleneck"]["words"]) == ("vae", "the VAE")
    assert sorted(one["state"] for one in found["workers"]) == ["failed", "running", "running", "running", "silent"]
    assert found["bytes"]["to_come"] == round(found["bytes"]["per_row"] * 104) > 0


def test_a_worker_that_lives_and_does_no_row_for_minutes_is_told(tmp_path: Path) -> None:
    run = PrecomputeRun.new((0, 9), 9)
    tell(tmp_path, worker(run, rows=4, advanced=NOW - 301), worker(run, rows=0, advanced=NOW - 301))
    found = PrecomputeReader(tmp_path, clock=Clock(), steady=Clock()).read()["workers"]
    assert sorted(one["state"] for one in found) == ["running", "stuck"], "one may still load its weights"


def test_alerts_say_what_is_wrong_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = StubSource(tuple(replace(row, target=b"broken") for row in SOURCE.rows[:24]))
    precompute(broken, StubEncoder(), tmp_path, rows=(0, 24), shard_size=8)
    fill(tmp_path, (24, 32), tell=False)
    run = PrecomputeRun.new((0, 10**6), 10**6)
    tell(
        tmp_path,
        worker(run, rows=4, advanced=NOW - 301, pid=1),
        worker(run, updated=NOW - 60, pid=2),
        worker(run, state="failed", message="out of memory", pid=3),
    )
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    found = PrecomputeReader(tmp_path, clock=Clock(), steady=Clock()).read()["alerts"]
    texts = {one["kind"]: one["text"] for one in found}
    assert [*texts] == ["silent", "failed", "stuck", "skipped", "disk"]
    assert texts["silent"].startswith("A worker is silent: ") and texts["silent"].endswith(" process 2.")
    assert texts["failed"].endswith(" process 3: out of memory")
    assert texts["skipped"] == "75% of the rows were skipped, mostly: the target is damaged: broken."
    assert texts["disk"].startswith("The disk has 1.0 MB free, and ")
    assert all(one["run"] == tmp_path.name and one["place"] == str(tmp_path) for one in found)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The files of local folders that were read since it was last called."""
    names: list[str] = []
    read = LocalFolder.read

    def noted(self: LocalFolder, name: str, *arguments: Any, **named: Any) -> bytes:
        names.append(name)
        return read(self, name, *arguments, **named)

    monkeypatch.setattr(LocalFolder, "read", noted)

    def since() -> list[str]:
        found = sorted(names)
        names.clear()
        return found

    return since


def test_an_index_is_read_once_and_again_when_its_shard_was_replaced(tmp_path: Path, counting) -> None:
    fill(tmp_path, (0, 32), tell=False)
    follower = IndexFollower(LocalFolder(tmp_path))
    counting()
    follower.look()
    assert counting() == [f"{n:08d}-{n + 8:08d}.json" for n in (0, 8, 16, 24)]
    follower.look()
    assert (counting(), follower.rows, follower.reasons.total()) == ([], [(0, 32)], 3)

    fill(tmp_path, (32, 40), tell=False)
    counting()
    follower.look()
    assert counting() == ["00000032-00000040.json"]
    assert (follower.rows, follower.arrived) == ([(0, 40)], ["00000032-00000040"])

    bytes_before = follower.tar_bytes
    mended = SOURCE.changed(7, target=b"whole")
    precompute(mended, StubEncoder(), tmp_path, rows=(0, 8), shard_size=8)
    (tmp_path / "00000024-00000032.json").unlink()
    (tmp_path / "00000016-00000024.json").write_text("{")
    counting()
    for _ in range(COMPARE_EVERY):
        follower.look()
    assert set(counting()) >= {"00000000-00000008.json", "00000016-00000024.json"}
    assert (follower.rows, follower.shards) == ([(0, 24), (32, 40)], 4)
    assert (follower.reasons.total(), [*follower.faults]) == (0, ["00000016-00000024"])
    assert 0 < follower.tar_bytes < bytes_before


def test_what_is_no_index_is_a_fault_in_the_facts_and_what_is_no_progress_is_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    for name in ("00000060-00000068", "00000068-00000076", "00000076-00000084"):
        (tmp_path / f"{name}.tar").touch()
    (tmp_path / "00000060-00000068.json").write_bytes(b"[" * 100_000)
    (tmp_path / "00000068-00000076.json").write_bytes(b"\xff\xfe")
    (tmp_path / "00000076-00000084.json").mkdir()
    far = {"start": 0, "stop": 10**9, "filesize": 1, "skipped": []}
    (tmp_path / "00000084-00000092.json").write_text(json.dumps(far))
    (tmp_path / "progress" / "x.json").write_text("[" * 100_000)
    tell(
        tmp_path, worker(PrecomputeRun.new((0, 9), 9), rate=float("nan")), worker(PrecomputeRun.new((0, 9), 9), host=7)
    )
    tell(tmp_path, worker(PrecomputeRun.new((0, 9), 9), newest=["../../x", "progress/x", "99999999-99999999"]))
    (tmp_path / "excluded.txt").write_text("no key")
    found = PrecomputeReader(tmp_path).read()
    assert len(found["faults"]) == 4 and "the list of excluded samples" in found["faults"][0]
    assert (len(found["workers"]), found["rows"]["published"]) == (2, 60 + 16 + 8)
    json.dumps(found, allow_nan=False)


def test_the_newest_samples_show_rejected_targets_behind_their_targets(tmp_path: Path) -> None:
    shown = [Image.new("RGB", (8 * number, 8)) for number in (1, 2, 3)]
    pictures = encode_pictures(SmallPictures(shown[1], (shown[0],), rejected=shown[2]))
    write_shard(tmp_path, [replace(make_sample(0, paired=True), pictures=pictures)])
    page = precompute_page([str(tmp_path)])
    facts = page.facts()
    (sample,) = facts["folders"][0]["newest"]
    sizes = [Image.open(io.BytesIO(page.picture(f"0/{name}").content)).width for name in sample["pictures"]]
    assert sizes == [8, 16, 24]
    assert 'alt="rejected target of row 0"' in "".join(page.render(facts).values())


def test_a_click_excludes_a_sample_that_is_shown_and_another_one_includes_it_again(tmp_path: Path) -> None:
    fill(tmp_path)
    reader = PrecomputeReader(tmp_path)
    key = reader.read()["newest"][2]["key"]
    assert change_sample([reader], "exclude", {"folder": 0, "key": key}) == "row 57 is left out"
    assert [*read_excluded(LocalFolder(tmp_path))] == [key]
    found = reader.read()
    assert (found["newest"][2]["excluded"], found["excluded"], found["newest"][1]["excluded"]) == (True, 1, False)
    assert change_sample([reader], "include", {"folder": 0, "key": key}) == "row 57 is trained on again"
    assert not (tmp_path / "excluded.txt").exists()
    for action, values in [
        ("delete", {"folder": 0, "key": key}),
        ("exclude", {"folder": 1, "key": key}),
        ("exclude", {"folder": True, "key": key}),
        ("exclude", {"folder": -1, "key": key}),
        ("exclude", {"key": key}),
        ("exclude", {"folder": 0, "key": 7}),
        ("exclude", {"folder": 0, "key": "../../x"}),
        ("exclude", {"folder": 0, "key": "0" * 64}),
    ]:
        with pytest.raises(UsageError):
            change_sample([reader], action, values)


def test_pictures_are_given_for_samples_that_are_shown_and_captions_stay_text(tmp_path: Path) -> None:
    write_colours(tmp_path, [SCRIPT, "a\u202eb"])
    page = precompute_page([str(tmp_path)])
    facts = page.facts()
    newest = render_precompute(facts)["newest-0"]
    assert "<script" not in newest and "&lt;script&gt;" in newest and "\u202e" not in newest
    for sample in facts["folders"][0]["newest"]:
        (picture,) = sample["pictures"]
        found = page.picture(f"0/{picture}")
        assert found is not None and found.content[:2] == b"\xff\xd8" and found.kind == "image/jpeg"
    for name in (
        "0/x.jpg",
        f"0/{'0' * 64}-0.jpg",
        f"0/{sample['key']}-1.jpg",
        "1/x",
        "0",
        "",
        "../0/x",
        f"0/../{picture}",
        "0/excluded.txt",
    ):
        assert page.picture(name) is None


def test_a_skipped_row_has_its_pictures_as_far_as_its_source_gives_them(tmp_path: Path) -> None:
    def picture(*size: int) -> bytes:
        content = io.BytesIO()
        Image.new("RGB", size, (200, 40, 40)).save(content, "PNG")
        return content.getvalue()

    rows = StubSource.of(4).changed(0, target=b"broken", controls=(picture(300, 100),))
    rows = rows.changed(1, target=picture(64, 64)).changed(2, target=b"broken").changed(3, name="another's")
    pictures = SkippedPictures(rows)
    for number in (0, 1, 2, 3, 10**9):
        pictures.want([Skipped(number, f"row{number}", "for the test")])
        pictures.wait()
    assert {number: len(pictures.names(number)) for number in (0, 1, 2, 3, 10**9)} == {0: 1, 1: 1, 2: 0, 3: 0, 10**9: 0}
    small = pictures.picture("row-0-0.jpg")
    assert small is not None and Image.open(io.BytesIO(small.content)).size == (192, 64)
    assert [pictures.picture(name) for name in ("row-0-1.jpg", "row-2-0.jpg", "row--1-0.jpg", "x")] == [None] * 4

    precompute(rows, StubEncoder(), tmp_path, rows=(0, 4), shard_size=4)
    reader = PrecomputeReader(tmp_path, pictures)
    found = {row["row"]: row["pictures"] for one in reader.read()["skipped"]["reasons"] for row in one["rows"]}
    pictures.wait()
    assert found == {0: ["row-0-0.jpg"], 2: []}
    assert reader.picture("row-0-0.jpg") == pictures.picture("row-0-0.jpg")


def test_a_place_is_a_run_or_shards_or_both_or_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    write_shard(tmp_path / "shards", [make_sample(0)])
    (tmp_path / "begun" / "progress").mkdir(parents=True)
    pages = open_pages([str(tmp_path / name) for name in ("shards", "run", "begun")])
    assert [page.name for page in pages] == ["training", "precompute"]
    assert [one["place"] for one in pages[1].facts()["folders"]] == [str(tmp_path / "shards"), str(tmp_path / "begun")]
    assert not is_precompute(tmp_path)
    for place, words in ((tmp_path, "neither a run nor shards"), (tmp_path / "no", "no such folder")):
        with pytest.raises(UsageError, match=words):
            open_pages([str(place)])

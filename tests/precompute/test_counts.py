"""What a run says of itself while it goes on: rates, bytes, what is left."""

from __future__ import annotations

import sys

import pytest

from qie.cli.precompute import _notes
from qie.cli.progress import Progress
from qie.precompute import Report
from qie.precompute.counts import Pace
from qie.shards.index import Skipped
from qie.stages import Load


def test_what_is_left_goes_by_the_rows_that_are_done() -> None:
    pace = Pace(100)
    assert pace.remaining_s is None and not pace.at(Report())
    assert pace.remaining_s is None, "nothing is known yet"
    assert not pace.at(Report(rows=20, encoded=20, seconds=10.0))
    assert pace.remaining_s == 40.0
    pace.at(Report(rows=100, encoded=99, seconds=50.0))
    assert pace.to_dict() == {"rows_total": 100, "remaining_s": 0.0}


def test_rows_that_are_there_already_do_not_make_the_others_look_fast() -> None:
    """A run that is started again compares a million rows in minutes, and encodes ten in as many."""
    pace = Pace(1000)
    assert not pace.at(Report(rows=800, reused=800, seconds=8.0))
    assert pace.remaining_s == 2.0
    assert pace.at(Report(rows=810, reused=800, encoded=10, seconds=18.0)), "it begins to encode"
    assert (pace.compared, pace.remaining_s) == (800, 190.0)
    assert not pace.at(Report(rows=820, reused=800, encoded=20, seconds=28.0))
    assert pace.remaining_s == 180.0


def test_the_bar_shows_skipped_rows_the_busiest_stage_bytes_and_other_stages() -> None:
    loads = {"read": Load(40, 0.01, 8), "text": Load(3, 5.0), "vae": Load(40, 9.0)}
    gone = [Skipped(3, "row3", "broken")]
    report = Report(rows=41, encoded=40, bytes_written=1_500_000, skipped=gone, loads=loads, seconds=10.0)
    assert _notes(report) == ["1 skipped", "vae busy 90 %", "1.5 MB", "text busy 50 %"]
    assert _notes(Report(shards_busy=2)) == ["2 shards being written by another run"]


@pytest.mark.parametrize("place", ["a terminal", "a log", "quiet"])
def test_progress_is_a_bar_on_a_terminal_lines_in_a_log_and_nothing_when_quiet(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: place == "a terminal")
    with Progress("encoding", 2, "rows", quiet=place == "quiet", every_s=0.0) as progress:
        for done in (1, 2):
            progress.at(done)
    out, err = capsys.readouterr()
    assert out == "" and ("\r" in err) == (place == "a terminal")
    told = [line.partition(",")[0] for line in err.splitlines() if place == "a log"]
    assert told == (["encoding: 1/2 rows", "encoding: 2/2 rows"] if place == "a log" else [])
    assert bool(err) == (place != "quiet")


def test_reports_of_several_processes_add_up_with_skipped_rows_in_their_order() -> None:
    parts = [
        Report(rows=3, encoded=2, skipped=[Skipped(9, "row9", "broken")], loads={"vae": Load(2, 4.0)}, seconds=5.0),
        Report(rows=4, reused=3, skipped=[Skipped(2, "row2", "broken")], seconds=1.0),
        Report(rows=1, encoded=1, loads={"vae": Load(1, 3.0)}, seconds=2.0),
    ]
    whole = Report.of_all(parts)
    assert (whole.rows, whole.encoded, whole.reused, whole.seconds) == (8, 3, 3, 5.0)
    assert [gone.row for gone in whole.skipped] == [2, 9]
    assert whole.loads == {"vae": Load(3, 7.0, workers=2)}
    assert [gone.row for gone in parts[0].skipped] == [9], "a part stays as it is"
    assert parts[0] + parts[1] + parts[2] == whole

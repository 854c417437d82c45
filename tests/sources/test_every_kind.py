"""What every kind of source promises: the same rows wherever they are read; what cannot be opened is refused with what
is there; a row that cannot be encoded is skipped with a reason that says which of its parts it was, and the rows beside
it are encoded."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from qie.data.sources import open_source, source_name
from qie.errors import RowError, SourceError
from qie.precompute import precompute
from qie.shards.discovery import published
from qie.shards.reader import Shard
from qie.types import Row
from tests.builders import RECIPE
from tests.sources.tables import Table, names, refused, write_tar
from tests.stubs import StubEncoder

TABLES = ["csv", "jsonl", "parquet", "dataset"]
EVERY = [*TABLES, "tar", "folder"]

_MEMBERS = {"path_target": "target.png", "path_control": "control.png", "prompt": "txt"}
_FILES = {
    "path_target": "training_images/{}.png",
    "path_control": "control_images/{}.png",
    "prompt": "training_images/{}.txt",
}

Rows = list[dict[str, object]]


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def rows() -> Rows:
    return [{"path_target": f"t{n}.png", "path_control": f"c{n}.png", "prompt": f"do {n}"} for n in range(3)]


def write(kind: str, table: Table, rows: Rows) -> Path:
    """Rows as a source; their images lie beside it, or in it where a source holds images."""
    place = table.root / ("rows" if kind == "folder" else f"rows.{kind}")
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    if kind == "csv":
        table.csv(zip(*columns.values(), strict=True), list(columns))  # type: ignore[arg-type]
    elif kind == "jsonl":
        place.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), place)
    elif kind == "dataset":
        datasets.Dataset.from_dict(columns).save_to_disk(place)
    elif kind == "tar":
        parts = [(row.get("name", index), column, row) for index, row in enumerate(rows) for column in _MEMBERS]
        members = [(f"{name}.{_MEMBERS[column]}", str(row[column])) for name, column, row in parts if column in row]
        write_tar(place, [(name, content.encode()) for name, content in members])
    else:
        for folder in ("training_images", "control_images"):
            (place / folder).mkdir(parents=True)
        for index, row in enumerate(rows):
            for column, file in _FILES.items():
                if column in row:
                    (place / file.format(index)).write_text(str(row[column]))
    for name in (f"{letter}{n}.png" for letter in "tc" for n in range(3)):
        (place if kind == "dataset" else table.root).joinpath(name).write_text(name)
    return place


def skipped(place: Path, output: Path) -> dict[int, str]:
    """Reasons by row, as the shards keep them, of a run in which all other rows are encoded."""
    source, encoder = open_source(place), StubEncoder()
    report = precompute(source, encoder, output, rows=(0, len(source)))
    assert report.encoded + len(report.skipped) == len(source)
    kept = [gone for index in published(output) for gone in Shard(index).index.skipped]
    assert kept == report.skipped
    return {gone.row: gone.reason for gone in kept}


LABELS = {
    "csv": ["rows.csv:2", "rows.csv:3", "rows.csv:4"],
    "jsonl": ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"],
    "parquet": ["rows.parquet[0]", "rows.parquet[1]", "rows.parquet[2]"],
    "dataset": ["rows.dataset[0]", "rows.dataset[1]", "rows.dataset[2]"],
    "tar": ["rows.tar/0", "rows.tar/1", "rows.tar/2"],
    "folder": ["0", "1", "2"],
}


@pytest.mark.parametrize("kind", EVERY)
def test_a_row_is_the_bytes_of_its_files_and_its_key_the_same_in_every_source(
    table: Table, rows: Rows, kind: str
) -> None:
    place = write(kind, table, rows)
    source, mixture = open_source(place), open_source([place])
    assert len(source) == 3 and source_name(source, 0) == "" and names(source) == LABELS[kind]
    for index in range(3):
        row = source.read(index)
        assert (row.index, row.name, row.target) == (index, LABELS[kind][index], f"t{index}.png".encode())
        assert (row.controls, row.prompt) == ((f"c{index}.png".encode(),), f"do {index}")
        assert (row.mask, row.more_prompts, row.source) == (None, (), "")
        key = RECIPE.key(Row(9, "another", row.target, row.controls, f"do {index}"))
        assert RECIPE.key(row) == RECIPE.key(mixture.read(index)) == key
    assert source.read(-1).index == 2
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            source.read(beyond)


@pytest.mark.parametrize("kind", EVERY)
def test_rows_without_controls_are_read_where_they_may_be_and_refused_elsewhere(
    table: Table, rows: Rows, kind: str
) -> None:
    without = [{name: value for name, value in row.items() if name != "path_control"} for row in rows]
    place = write(kind, table, without)
    if kind == "folder":
        (place / "control_images").rmdir()
    with pytest.raises(SourceError, match=r"no column holds the control image|the expected layout"):
        open_source(place)
    for source in (open_source(place, text_to_image=True), open_source([place], text_to_image=True)):
        for read in (source, pickle.loads(pickle.dumps(source))):
            found = [read.read(index) for index in range(3)]
            assert [(row.controls, row.prompt) for row in found] == [((), f"do {number}") for number in range(3)]


@pytest.mark.parametrize("kind", EVERY)
def test_rows_with_and_without_controls_stand_beside_each_other_but_in_a_folder(
    table: Table, rows: Rows, kind: str
) -> None:
    """In a folder, a file may be missing by accident."""
    del rows[1]["path_control"]
    place = write(kind, table, rows)
    source = open_source(place, text_to_image=True)
    assert [len(source.read(index).controls) for index in (0, 2)] == [1, 1]
    for strict in (open_source(place), *([source] if kind == "folder" else [])):
        with pytest.raises(RowError, match="no control image"):
            strict.read(1)
    if kind != "folder":
        assert source.read(1).controls == () and source.read(1).prompt == "do 1"


@pytest.mark.parametrize("kind", EVERY)
def test_many_threads_and_other_processes_read_the_same_rows(table: Table, rows: Rows, kind: str) -> None:
    many = [row | {"prompt": f"{row['prompt']} {number}"} for number in range(50) for row in rows]
    source = open_source(write(kind, table, many))
    alone = [source.read(index) for index in range(150)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.read, [*range(0, 150, 13), *range(150)]))[12:] == alone
    sent = pickle.dumps(source)
    assert kind == "folder" or len(sent) < 150 * 100 + 2000
    copy = pickle.loads(sent)
    assert copy == source and [copy.read(index) for index in range(150)] == alone


@pytest.mark.parametrize("kind", TABLES)
def test_a_row_is_called_by_its_own_column_where_it_is_given(table: Table, rows: Rows, kind: str) -> None:
    for row, name in zip(rows, ("a", None, ""), strict=True):
        row["ID"] = name
    source = open_source(write(kind, table, rows))
    assert names(source) == ["a", *LABELS[kind][1:]] == [source.read(index).name for index in range(3)]


@pytest.mark.parametrize("change", ["longer", "shorter", "gone"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "tar"])
def test_a_file_that_changed_since_it_was_opened_stops_the_run_and_skips_no_row(
    table: Table, rows: Rows, kind: str, change: str
) -> None:
    place = write(kind, table, rows)
    source, content = open_source(place), place.read_bytes()
    if change == "gone":
        place.unlink()
    else:
        place.write_bytes(content[:-1] if change == "shorter" else content + b"\n")
    with pytest.raises(SourceError, match="changed" if change != "gone" or kind != "parquet" else "does not exist"):
        source.read(0)


def test_a_dataset_of_other_length_is_not_taken_for_the_one_that_was_sent(table: Table, rows: Rows) -> None:
    sent = pickle.dumps(open_source(write("dataset", table, rows)))
    shutil.rmtree(table.root / "rows.dataset")
    write("dataset", table, rows[:2])
    with pytest.raises(SourceError, match="changed"):
        pickle.loads(sent)


@pytest.mark.parametrize("kind", [*TABLES[:3], "tar"])
def test_a_file_that_is_not_there_is_refused(table: Table, kind: str) -> None:
    place = table.root / f"gone.{kind}"
    assert str(refused(SourceError, place).where) == str(place)


@pytest.mark.parametrize("column", ["path_target", "path_control", "prompt"])
@pytest.mark.parametrize("kind", [*TABLES, "tar"])
def test_a_missing_column_is_refused_with_those_there_are(table: Table, rows: Rows, kind: str, column: str) -> None:
    for row in rows:
        del row[column]
    error = refused(SourceError, write(kind, table, rows))
    assert error.what.startswith("no column holds the ") and column in str(error.expected)
    assert len(str(error.found).split(", ")) == 2, "it does not say which columns there are"


@pytest.mark.parametrize(("column", "reason"), [("path_control", "no control image"), ("prompt", "no prompt")])
@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_what_one_row_of_files_lacks_is_its_reason(
    table: Table, rows: Rows, tmp_path: Path, kind: str, column: str, reason: str
) -> None:
    del rows[1][column]
    assert skipped(write(kind, table, rows), tmp_path / "out") == {1: reason}


@pytest.mark.parametrize("kind", TABLES)
def test_an_empty_cell_is_its_rows_reason(table: Table, rows: Rows, tmp_path: Path, kind: str) -> None:
    rows[1]["path_target"] = None
    assert skipped(write(kind, table, rows), tmp_path / "out") == {1: "no target image"}


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("prompt", 3, "prompt: a number instead of text"),
        ("path_target", 3, "path_target: a number instead of a path, a URL or an image"),
        ("path_control", True, "path_control: true or false instead of a path, a URL or an image"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_a_value_of_the_wrong_type_is_named_by_its_column(
    table: Table, rows: Rows, tmp_path: Path, kind: str, column: str, value: object, reason: str
) -> None:
    for row in rows:
        row[column] = value
    place = write(kind, table, rows)
    assert skipped(place, tmp_path / "out") == dict.fromkeys(range(3), reason)
    number = "line 2" if kind == "jsonl" else "row 1"
    assert refused(RowError, place, 1).where == f"{place}, {number}, column {column}"


@pytest.mark.parametrize("kind", [*TABLES, "tar"])
def test_two_rows_of_one_name_are_refused(table: Table, rows: Rows, kind: str) -> None:
    for row, name in zip(rows, ("same", "other", "same"), strict=True):
        row["name"] = name
    error = refused(SourceError, write(kind, table, rows))
    places = {"csv": "on lines 2 and 4", "jsonl": "on lines 1 and 3", "tar": "with other rows between its files"}
    assert error.what == "two rows have the same name" and "same" in str(error.found)
    assert places.get(kind, "in rows 0 and 2") in str(error.found)


@pytest.mark.parametrize("kind", TABLES)
def test_a_path_that_leads_nowhere_is_its_rows_reason(table: Table, rows: Rows, tmp_path: Path, kind: str) -> None:
    rows[1]["path_control"] = "gone.png"
    reason = "path_control: a file cannot be read: No such file or directory"
    assert skipped(write(kind, table, rows), tmp_path / "out") == {1: reason}


def test_a_link_that_leads_nowhere_is_its_rows_reason(table: Table, rows: Rows, tmp_path: Path) -> None:
    place = write("folder", table, rows)
    (place / "control_images" / "1.png").unlink()
    (place / "control_images" / "1.png").symlink_to("gone.png")
    assert skipped(place, tmp_path / "out") == {1: "a file cannot be read: No such file or directory"}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("path", ["../../secret.png", "{}/secret.png", "/etc/passwd"])
def test_a_path_outside_the_root_is_its_rows_reason(
    table: Table, rows: Rows, tmp_path: Path, kind: str, path: str
) -> None:
    (tmp_path / "secret.png").write_text("secret")
    rows[1]["path_target"] = path.format(tmp_path)
    reason = "path_target: a path outside the source's root"
    assert skipped(write(kind, table, rows), tmp_path / "out") == {1: reason}


def test_a_member_of_a_tar_names_no_file_outside_of_it(table: Table, rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_text("secret")
    rows[1]["name"] = "../secret"
    place = write("tar", table, rows)
    assert open_source(place).read(1).target == b"t1.png" and skipped(place, tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("csv", "t1.png"), ("folder", "rows/training_images/1.png"), ("folder", "rows/training_images/1.txt")],
)
def test_a_file_of_40_gigabytes_is_its_rows_reason_and_is_not_read(
    table: Table, rows: Rows, tmp_path: Path, kind: str, name: str
) -> None:
    place = write(kind, table, rows)
    with (table.root / name).open("wb") as file:
        file.truncate(40 * 2**30)  # sparse: it takes no room
    found = skipped(place, tmp_path / "out")
    assert list(found) == [1] and "too large" in found[1]


@pytest.mark.parametrize("kind", EVERY)
def test_prompts_of_no_and_of_100_000_characters_reach_the_encoder_which_refuses_them(
    table: Table, rows: Rows, kind: str
) -> None:
    rows[0]["prompt"], rows[1]["prompt"] = "", "wörd " * 20_000 + "."
    source = open_source(write(kind, table, rows))
    assert [source.read(index).prompt for index in range(3)] == [row["prompt"] for row in rows]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "tar", "folder"])
def test_names_of_any_bytes_can_be_written_down(table: Table, rows: Rows, tmp_path: Path, kind: str) -> None:
    """A file name in Latin-1 is no Unicode; and what a name holds is shown on terminals."""
    place = write(kind, table, rows)
    odd = place.rename(place.with_name("caf\udce9\n\x1b[31m" + place.suffix))
    for path in odd.glob("*/1.*"):
        path.rename(path.with_name("caf\udce9\n\x1b[31m" + path.suffix))
    assert skipped(odd, tmp_path / "out") == {}
    (index,) = published(tmp_path / "out")
    names = [entry.name for entry in Shard(index).index.samples]
    assert all(name.isprintable() for name in names)
    assert any("caf\\udce9\\n\\x1b[31m" in name for name in names)


def test_a_name_in_a_column_can_be_written_down(table: Table, rows: Rows, tmp_path: Path) -> None:
    """JSON can say halves of characters."""
    rows[1]["name"] = "\ud800\n"
    place = write("jsonl", table, rows)
    assert skipped(place, tmp_path / "out") == {}
    assert open_source(place).name(1) == open_source(place).read(1).name == "\\ud800\\n"

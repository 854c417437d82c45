"""Parquet: original bytes, row groups, several files, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qie.data.sources import open_source, parquet
from qie.errors import RowError, SourceError
from tests.sources.tables import Table, names, refused, values


def image(name: str) -> dict[str, object]:
    """An image as the datasets library stores it."""
    return {"bytes": name.encode(), "path": "elsewhere.png"}


def inline(number: int, **more: object) -> dict[str, object]:
    row = {"target_image": image(f"t{number}"), "control_images": [image(f"c{number}")], "prompt": f"do {number}"}
    return row | more


def write(path: Path, rows: list[dict[str, object]], **settings: object) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **settings)
    return path


def test_images_may_be_bytes_or_paths_beside_the_file(table: Table) -> None:
    rows = [values(0, path_control=b"inline"), values(1, path_control=b"inline")]
    row = open_source(write(table.root / "x.parquet", rows)).read(1)
    assert (row.target, row.controls) == (b"images/t1.png", (b"inline",))


@pytest.mark.parametrize("place", ["", "*.parquet", "{b,a}.parquet", "[ab].parquet"])
def test_several_files_follow_each_other(tmp_path: Path, place: str) -> None:
    write(tmp_path / "a.parquet", [inline(0), inline(1)], row_group_size=1)
    write(tmp_path / "b.parquet", [inline(2)])
    order = ["do 2", "do 0", "do 1"] if "{" in place else ["do 0", "do 1", "do 2"]
    source = open_source(tmp_path / place)
    assert [source.read(index).prompt for index in range(len(source))] == order
    assert names(source)[-1] == ("a.parquet[1]" if "{" in place else "b.parquet[0]")


def test_a_file_without_rows_among_others_is_fine(tmp_path: Path) -> None:
    empty = pa.Table.from_pylist([inline(0)]).slice(0, 0)
    for name in ("a", "c", "e"):
        pq.write_table(empty, tmp_path / f"{name}.parquet")
    write(tmp_path / "b.parquet", [inline(0)])
    write(tmp_path / "d.parquet", [inline(1)])
    source = open_source(tmp_path)
    assert [source.read(index).target for index in range(len(source))] == [b"t0", b"t1"]
    assert "no rows" in refused(SourceError, tmp_path / "a.parquet").what


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Files of which a group was read."""
    files: list[object] = []
    original = parquet._opened
    monkeypatch.setattr(parquet, "_opened", lambda file: files.append(file) or original(file))
    return files


def test_rows_of_a_group_are_read_once_and_few_groups_are_kept(tmp_path: Path, opened: list[object]) -> None:
    source = open_source(write(tmp_path / "x.parquet", [inline(n) for n in range(40)], row_group_size=10))
    opened.clear()
    assert [source.read(index).prompt for index in range(40)] == [f"do {index}" for index in range(40)]
    assert len(source.groups._tables) <= parquet.CACHED_GROUPS  # type: ignore[attr-defined]
    source.name(3)
    assert len(opened) == 4


def test_of_the_groups_in_memory_the_one_that_was_not_asked_for_longest_goes(
    tmp_path: Path, opened: list[object]
) -> None:
    source = open_source(write(tmp_path / "x.parquet", [inline(number) for number in range(3)], row_group_size=1))
    opened.clear()
    for index in (0, 1, 0, 2, 0):
        source.read(index)
    assert len(opened) == 3


def test_only_the_columns_that_are_understood_are_read(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "x.parquet", [inline(0, embedding=[1.0] * 100)]))
    source.read(0)
    (group,) = source.groups._tables.values()  # type: ignore[attr-defined]
    assert "embedding" not in group.column_names


@pytest.mark.parametrize(
    ("second", "words"),
    [([inline(0, id=3), inline(1, id=1)], "'1' in rows 0 and 3"), ([inline(0, mask=image("m"))], "b.parquet")],
    ids=["a name again", "other columns"],
)
def test_files_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, second: list[dict[str, object]], words: str
) -> None:
    write(tmp_path / "a.parquet", [inline(0, id=1), inline(1, id=2)])
    write(tmp_path / "b.parquet", second)
    assert words in str(refused(SourceError, tmp_path))


def test_what_is_null_is_missing_from_its_row_alone(tmp_path: Path) -> None:
    nothing = {"bytes": None, "path": None}
    rows = [inline(0, mask=nothing), inline(1, prompt=None, mask=image("m")), inline(2, control_images=[]), inline(3)]
    rows.append(inline(4, target_image=nothing))
    source = open_source(write(tmp_path / "x.parquet", rows))
    assert source.read(0).mask is None and source.read(3).target == b"t3"
    for index, reason in ((1, "no prompt"), (2, "no control image"), (4, "an image is empty")):
        with pytest.raises(RowError, match=reason):
            source.read(index)


@pytest.mark.parametrize("content", [b"", b"not parquet", b"PAR1" * 10, None], ids=["empty", "text", "marks", "cut"])
def test_what_is_no_whole_parquet_is_refused(tmp_path: Path, content: bytes | None) -> None:
    place = write(tmp_path / "x.parquet", [inline(number) for number in range(100)])
    place.write_bytes(place.read_bytes()[:-10] if content is None else content)
    error = refused(SourceError, place)
    assert str(error.where) == str(place) and error.what == "the file is not Parquet"


def test_a_damaged_group_is_refused_by_its_rows(tmp_path: Path) -> None:
    place = write(tmp_path / "x.parquet", [inline(n) for n in range(20)], row_group_size=10, use_dictionary=False)
    content = bytearray(place.read_bytes())
    content[4:200] = bytes(196)
    place.write_bytes(content)
    source = open_source(place)
    with pytest.raises(RowError, match="damaged"):
        source.read(0)
    assert source.read(10).target == b"t10"


@pytest.mark.parametrize("place", ["gone.parquet", "gone-*.parquet", "{x,gone}.parquet"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, place: str) -> None:
    write(tmp_path / "x.parquet", [inline(0)])
    assert "gone" in str(refused(SourceError, tmp_path / place).where)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path / "x.parquet", [inline(0)])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert 'pip install "qie[datasets]"' in str(refused(SourceError, place).hint)

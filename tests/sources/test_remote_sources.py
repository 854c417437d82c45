"""Sources in stores: the same rows, asked for by ranges, and faults that are not the row's."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qie.data.sources import Source, open_source
from qie.errors import RowError, SourceError
from qie.stores import StoreError, disk, open_folder
from tests.s3 import S3
from tests.sources.tables import Bucket, Table, names, paths, refused, values, write_tar


@pytest.fixture
def tables(table: Table, photos: Path) -> dict[str, str]:
    """One place per kind, within the bucket's folder."""
    table.csv([paths(0), paths(1)])
    table.jsonl([values(0), values(1)])
    pq.write_table(pa.Table.from_pylist([values(0), values(1)]), table.root / "rows.parquet")
    rows = [(f"{n}.{e}", f"{e} {n}".encode()) for n in range(2) for e in ("target.png", "control.png", "txt")]
    write_tar(table.root / "rows.tar", rows)
    shutil.copytree(photos, table.root / "photos")
    names = ("rows.csv", "rows.jsonl", "rows.parquet", "*.parquet", "rows.tar", "{rows,rows}.tar", "photos")
    return {name: f"rows/{name}" for name in names}


KINDS = ["rows.csv", "rows.jsonl", "rows.parquet", "*.parquet", "rows.tar", "{rows,rows}.tar", "photos"]


def read_all(source: Source) -> list[object]:
    return [source.read(index) for index in range(len(source))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_in_a_store_gives_the_rows_of_the_local_one_and_opening_asks_for_no_image(
    bucket: Bucket, tables: dict[str, str], tmp_path: Path, kind: str
) -> None:
    local, remote = open_source(tmp_path / tables[kind]), open_source(f"{bucket.url}/{tables[kind]}")
    assert not [asked for asked in bucket.asked if ".png" in asked] and len(bucket.asked) <= 8
    assert read_all(remote) == read_all(local) and names(remote) == names(local)


def test_a_row_of_a_table_costs_its_own_bytes(bucket: Bucket, table: Table) -> None:
    table.csv([paths(n % 3) for n in range(1000)])
    source = open_source(f"{bucket.url}/rows/rows.csv")
    bucket.asked.clear()
    source.read(500)
    start, stop = map(int, bucket.asked[0].split()[1].split("-"))
    assert stop - start < 50 and bucket.asked[1:] == ["images/t2.png 0-None", "images/c2.png 0-None"]


def test_a_folder_of_parquet_or_tars_is_listed(bucket: Bucket, tables: dict[str, str], tmp_path: Path) -> None:
    for ending in ("parquet", "tar"):
        folder = tmp_path / ending
        folder.mkdir()
        shutil.copy(tmp_path / "rows" / f"rows.{ending}", folder / f"x.{ending}")
        (folder / f"._x.{ending}").write_bytes(b"what macOS leaves")
        assert len(open_source(f"{bucket.url}/{ending}/*.{ending}")) == 2
    assert len(open_source(f"{bucket.url}/tar")) == 2
    assert len(open_source(f"{bucket.url}/parquet/")) == 2


@pytest.mark.parametrize(
    ("kind", "image"),
    [("rows.csv", "images/t0.png"), ("rows.jsonl", "images/t0.png"), ("rows.parquet", "images/t0.png"), ("photos", "")],
)
def test_a_missing_image_is_its_rows_fault_and_a_fault_of_the_store_is_not(
    bucket: Bucket, tables: dict[str, str], tmp_path: Path, kind: str, image: str
) -> None:
    source = open_source(f"{bucket.url}/{tables[kind]}")
    file = tmp_path / "rows" / (image or f"photos/control_images/{source.name(0)}.png")
    bucket.faults[image or file.name] = StoreError("the network is gone")
    with pytest.raises(StoreError, match="network"):
        source.read(0)
    bucket.faults.clear()
    file.unlink()
    with pytest.raises(RowError, match="no such file"):
        source.read(0)
    assert source.read(1)


@pytest.mark.parametrize("kind", ["rows.csv", "rows.jsonl", "rows.parquet", "rows.tar"])
def test_a_fault_of_the_store_in_the_table_itself_or_a_table_that_is_gone_stops_the_run(
    bucket: Bucket, tables: dict[str, str], tmp_path: Path, kind: str
) -> None:
    source = open_source(f"{bucket.url}/{tables[kind]}")
    bucket.faults[kind] = StoreError("the network is gone")
    with pytest.raises(StoreError, match="network"):
        source.read(0)
    bucket.faults.clear()
    (tmp_path / tables[kind]).unlink()
    with pytest.raises(SourceError):
        source.read(0)


@pytest.mark.parametrize("name", ["gone.csv", "gone.jsonl", "gone.parquet", "gone.tar", "gone*.tar", "gone"])
def test_what_is_not_there_is_refused_at_once(bucket: Bucket, table: Table, name: str) -> None:
    refused(SourceError, f"{bucket.url}/rows/{name}")


@pytest.mark.parametrize("path", ["../x.png", "/etc/passwd", "a/../../x.png", "..", ".", "a\\b", "a\0b"])
def test_a_path_out_of_the_root_is_refused(bucket: Bucket, table: Table, path: str) -> None:
    table.jsonl([values(0, path_control=path)])
    assert (
        refused(RowError, f"{bucket.url}/rows/rows.jsonl", 0).what == "path_control: a path outside the source's root"
    )


def test_a_path_may_go_down_and_up_again(bucket: Bucket, table: Table) -> None:
    table.jsonl([values(0, path_control="./images/../images/c0.png")])
    assert open_source(f"{bucket.url}/rows/rows.jsonl").read(0).controls == (b"images/c0.png",)


def test_a_local_table_may_name_urls(bucket: Bucket, table: Table) -> None:
    row = values(0, path_target="s3://bucket/rows/images/t2.png", path_control="s3://bucket/rows/images/gone.png")
    source = open_source(table.jsonl([row, row | {"path_control": "images/c0.png"}]))
    assert source.read(1).target == b"images/t2.png"
    with pytest.raises(RowError, match="no such file"):
        source.read(0)
    bucket.faults["t2.png"] = StoreError("forbidden")
    with pytest.raises(StoreError, match="forbidden"):
        source.read(1)


def test_a_machine_that_is_at_fault_stops_the_run(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    source, opened = open_source(table.csv([paths(0)])), disk._open_regular

    def refuse(path: str) -> tuple[int, int]:
        if str(path).endswith(".png"):
            raise OSError(24, "Too many open files", str(path))
        return opened(path)

    monkeypatch.setattr(disk, "_open_regular", refuse)
    with pytest.raises(StoreError, match="Too many open files"):
        source.read(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_in_s3_can_be_sent_and_gives_the_rows_of_the_local_one(
    s3: S3, tables: dict[str, str], tmp_path: Path, kind: str
) -> None:
    folder = open_folder(s3.url)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            folder.upload(str(path.relative_to(tmp_path)), path)
    source = open_source(f"{s3.url}/{tables[kind]}")
    copy = pickle.loads(pickle.dumps(source))
    assert read_all(copy) == read_all(source) == read_all(open_source(tmp_path / tables[kind]))


def test_an_image_that_is_not_in_s3_is_its_rows_fault(s3: S3, table: Table) -> None:
    place = table.jsonl([values(0, path_control=f"{s3.url}/gone.png"), values(1, path_control="s3:///x.png")])
    for index in (0, 1):
        refused(RowError, place, index)

"""Several sources as one, and which source a place is."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from qie.data.sources import SourceSpec, open_source, source_name
from qie.data.sources.csv import CsvSource
from qie.data.sources.folder import FolderSource
from qie.data.sources.jsonl import JsonlSource
from qie.data.sources.mixture import Mixture
from qie.errors import RowError, SourceError
from tests.sources.tables import Table, names, paths, refused, values, write_tar


@pytest.fixture
def places(table: Table) -> list[Path]:
    return [table.csv([paths(0), paths(1)], name="one.csv"), table.jsonl([values(2)], name="two.jsonl")]


def test_sources_follow_each_other_in_the_order_they_are_given(places: list[Path]) -> None:
    for several in (places, places[::-1]):
        mixture = open_source(several)
        alone = [source.read(index) for source in map(open_source, several) for index in range(len(source))]
        rows = [mixture.read(index) for index in range(len(mixture))]
        assert [row.index for row in rows] == [0, 1, 2]
        assert [(row.name, row.prompt, row.target) for row in rows] == [(r.name, r.prompt, r.target) for r in alone]


def test_a_row_says_where_it_is_from(places: list[Path]) -> None:
    mixture = open_source([{"source": places[0]}, SourceSpec(str(places[1]), name="second")])
    assert [mixture.read(index).source for index in range(3)] == ["one", "one", "second"]
    assert [mixture.part(index) for index in range(3)] == ["one", "one", "second"]
    assert names(mixture) == ["one.csv:2", "one.csv:3", "two.jsonl:1"]
    assert open_source(places[0]).read(0).source == "" and source_name(open_source(places[0]), 0) == ""


def test_weights_are_carried(places: list[Path]) -> None:
    mixture = open_source([{"source": str(places[0]), "weight": 2.5}, str(places[1])])
    assert isinstance(mixture, Mixture)
    assert [(part.name, part.weight) for part in mixture.parts] == [("one", 2.5), ("two", 1.0)]


@pytest.mark.parametrize("kind", ["spec", "mapping", "list"])
def test_one_source_may_be_a_mixture(places: list[Path], kind: str) -> None:
    spec = SourceSpec(str(places[0]))
    mixture = open_source({"spec": spec, "mapping": {"source": str(places[0])}, "list": [spec]}[kind])  # type: ignore[arg-type]
    assert isinstance(mixture, Mixture) and mixture.read(1).source == "one"


def test_a_row_that_cannot_be_read_keeps_its_index(table: Table, places: list[Path]) -> None:
    (table.root / "images" / "c1.png").unlink()
    mixture = open_source(places)
    with pytest.raises(RowError, match="No such file"):
        mixture.read(1)
    assert mixture.read(2).source == "two"


def test_a_mixture_is_a_value_that_can_be_sent(places: list[Path]) -> None:
    mixture = open_source(places)
    copy = pickle.loads(pickle.dumps(mixture))
    assert copy == mixture == open_source(places) and copy.read(2) == mixture.read(2)


def test_two_sources_of_one_name_are_refused_unless_they_are_given_others(places: list[Path], tmp_path: Path) -> None:
    other = Table(tmp_path / "other").csv([paths(0)], name="one.csv")
    error = refused(SourceError, [*places, other])
    assert error.where == str(other) and str(error.found) == f"one, also the name of {places[0]}"
    assert len(open_source([*places, {"source": other, "name": "three"}])) == 4


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("data/photos/", "photos"),
        ("data/edits.csv", "edits"),
        ("edits.v2.JSONL", "edits.v2"),
        ("hf://datasets/owner/name@v1?split=test", "name"),
        ("s3://bucket/raw/{000..009}.tar", "raw"),
        ("shards/*/x-[0-9].parquet", "shards"),
        ("../..", "source"),
    ],
)
def test_a_source_is_called_by_what_its_place_ends_in(places: list[Path], place: str, name: str) -> None:
    assert Mixture.of([(SourceSpec(place), open_source(places[0]))]).parts[0].name == name


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"name": "x"},
        {"source": "x", "wieght": 2},
        {"source": ""},
        {"source": 3},
        {"source": None},
        {"source": "x", "name": ""},
        {"source": "x", "name": 3},
        {"source": "x", "weight": 0},
        {"source": "x", "weight": -1},
        {"source": "x", "weight": float("nan")},
        {"source": "x", "weight": float("inf")},
        {"source": "x", "weight": "2"},
        {"source": "x", "weight": True},
        3,
        None,
        ["x"],
    ],
)
def test_a_spec_that_is_none_is_refused(spec: object) -> None:
    with pytest.raises(SourceError, match=r"an entry of the mixture|the name of a source|the weight of a source"):
        SourceSpec.of(spec)  # type: ignore[arg-type]
    refused(SourceError, [spec])


def test_a_mixture_of_nothing_is_refused() -> None:
    assert refused(SourceError, []).what == "the mixture has no sources"


# Which source a place is


def test_a_folder_of_images_is_one_whatever_lies_beside_them(photos: Path, tmp_path: Path) -> None:
    for folder in ("training_images", "control_images"):
        (tmp_path / folder).symlink_to(photos / folder)
    write_tar(tmp_path / "backup.tar", [])
    (tmp_path / "metadata.csv").touch()
    assert isinstance(open_source(tmp_path), FolderSource) and len(open_source(tmp_path)) == 12


def test_a_folder_of_a_table_says_to_name_the_table(table: Table) -> None:
    (table.root / "images").rename(table.root / "pictures")
    place = table.csv([paths(0)])
    assert "name the .csv" in str(refused(SourceError, place.parent).hint)


@pytest.mark.parametrize("name", ["x.xlsx", "x.tar.gz", "x.json", "x", "x.csv.gz"])
def test_a_file_of_another_kind_is_refused_with_the_kinds_there_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    error = refused(SourceError, tmp_path / name)
    assert error.found == "a file" and ".parquet" in str(error.expected)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet", "x.tar"])
def test_a_folder_may_be_called_like_a_file(photos: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(photos)
    assert isinstance(open_source(tmp_path / name), FolderSource)


@pytest.mark.parametrize("place", ["pipe:touch ran", "PIPE:cat x.tar", "file:///x.csv", "ftp://host/x.csv", "s4://x"])
def test_other_urls_are_refused_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "URLs are not read" in refused(SourceError, place).what
    assert not list(tmp_path.iterdir())


def test_a_home_folder_is_expanded(table: Table, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(table.root))
    table.csv([paths(0)])
    table.jsonl([values(0)])
    assert isinstance(open_source("~/rows.csv"), CsvSource)
    assert isinstance(open_source("~/rows.jsonl"), JsonlSource)
    monkeypatch.setenv("HOME", str(photos.parent))
    assert isinstance(open_source(f"~/{photos.name}"), FolderSource)


def test_a_source_may_be_named_relative_to_where_one_is(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.csv([paths(0)])
    monkeypatch.chdir(table.root)
    assert open_source("rows.csv").read(0).target == b"images/t0.png"

"""Datasets of the Hugging Face library: from its own folders and from the hub, as the original bytes."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from PIL import Image

from qie.data.sources import open_source, source_name
from qie.data.sources.huggingface import DatasetSource
from qie.errors import RowError, SourceError
from tests.sources.tables import names, refused


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def png(number: int) -> bytes:
    """A file that decoding and encoding again would change."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (number, 0, 0)).save(file, "PNG", compress_level=0)
    return file.getvalue() + b"what no decoder gives back"


FEATURES = {
    "target_image": datasets.Image(),
    "control_images": datasets.List(datasets.Image()),
    "prompt": datasets.Value("string"),
    "control_mask": datasets.Image(),
}


def made(rows: int = 3, **columns: tuple[object, list[object]]) -> datasets.Dataset:
    values = {
        "target_image": [png(number) for number in range(rows)],
        "control_images": [[png(50 + number)] * (number + 1) for number in range(rows)],
        "prompt": [f"do {number}" for number in range(rows)],
        "control_mask": [png(99) if number else None for number in range(rows)],
    }
    features = FEATURES | {name: feature for name, (feature, _) in columns.items()}
    return datasets.Dataset.from_dict(
        values | {name: cells for name, (_, cells) in columns.items()}, features=datasets.Features(features)
    )


def saved(folder: Path, dataset: datasets.Dataset | None = None) -> Path:
    (made() if dataset is None else dataset).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0]], ids=["whole", "chosen and reordered"])
@pytest.mark.parametrize("kind", ["dataset", "parquet"])
def test_a_row_is_the_original_bytes_also_in_parquet_of_the_library(
    tmp_path: Path, kind: str, order: list[int]
) -> None:
    dataset, place = made().select(order), tmp_path / f"edits{'.parquet' if kind == 'parquet' else ''}"
    dataset.to_parquet(place) if kind == "parquet" else saved(place, dataset)
    source = open_source(place)
    for index, number in enumerate(order):
        row = source.read(index)
        assert (row.target, row.controls, row.prompt) == (
            png(number),
            (png(50 + number),) * (number + 1),
            f"do {number}",
        )
        assert row.mask == (png(99) if number else None)
        assert (row.index, row.name) == (index, f"{place.name}[{index}]")
    assert names(source) == [f"{place.name}[{index}]" for index in range(len(order))]
    assert source_name(source, 0) == ""


def test_one_split_is_taken_and_of_several_one_has_to_be_named(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": made()}).save_to_disk(tmp_path / "one")
    assert names(open_source(tmp_path / "one"))[0] == "one[0]"
    datasets.DatasetDict({"train": made(), "test": made(1)}).save_to_disk(tmp_path / "two")
    error = refused(SourceError, tmp_path / "two")
    assert str(tmp_path / "two" / "test") in str(error.expected)
    assert len(open_source(tmp_path / "two" / "test")) == 1


def test_paths_in_a_dataset_stay_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    texts = ["inside.png", str(tmp_path / "secret.png"), "gone.png"]
    dataset = made().remove_columns("target_image").add_column("target_image", texts)
    place = saved(tmp_path / "x", dataset)
    (place / "inside.png").write_bytes(b"inside")
    source = open_source(place)
    assert source.read(0).target == b"inside"
    for index, reason in ((1, "outside"), (2, "No such file")):
        with pytest.raises(RowError, match=reason):
            source.read(index)


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_dataset_is_refused(tmp_path: Path, file: str) -> None:
    place = saved(tmp_path / "x")
    (place / file).write_bytes(b"{")
    assert refused(SourceError, place).where == place


def test_without_datasets_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved(tmp_path / "x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (place, "hf://datasets/owner/name"):
        assert 'pip install "qie[datasets]"' in str(refused(SourceError, source).hint)


def test_a_version_that_runs_the_code_of_datasets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved(tmp_path / "x")
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    assert refused(SourceError, place).expected == "datasets ≥ 4"


# The hub


class Hub:
    """Stands for the hub: what was asked for, and one dataset."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.dataset, self.asked = dataset, []

    def builder(self, path: str, *, name: str | None, revision: str | None) -> SimpleNamespace:
        def as_dataset(split: str) -> datasets.Dataset:
            self.asked.append((path, name, revision, split))
            if split not in ("train", "test", "train+test", "train[:1]"):
                raise ValueError(f"Unknown split {split!r}. Should be one of ['train', 'test'].")
            return self.dataset

        return SimpleNamespace(download_and_prepare=lambda: None, as_dataset=as_dataset, hash="c0ffee")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(made())
    monkeypatch.setattr(datasets, "load_dataset_builder", hub.builder)
    return hub


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        ("hf://datasets/owner/name", ("owner/name", None, None, "train")),
        ("hf://datasets/owner/name/", ("owner/name", None, None, "train")),
        ("hf://datasets/owner/name@v1", ("owner/name", None, "v1", "train")),
        ("hf://datasets/owner/name?split=test&config=small", ("owner/name", "small", None, "test")),
        ("hf://datasets/owner/name@v1?split=train+test", ("owner/name", None, "v1", "train+test")),
        ("hf://datasets/owner/name?split=train%5B:1%5D", ("owner/name", None, None, "train[:1]")),
    ],
)
def test_a_name_on_the_hub_says_revision_configuration_and_split(hub: Hub, place: str, asked: object) -> None:
    source = open_source(place)
    assert isinstance(source, DatasetSource) and hub.asked == [asked]
    assert source.read(1).target == png(1) and source.name(1) == "name[1]"


def test_a_dataset_of_the_hub_is_sent_at_its_revision(hub: Hub) -> None:
    source = open_source("hf://datasets/owner/name?split=train+test&config=small")
    copy = pickle.loads(pickle.dumps(source))
    assert hub.asked[1] == ("owner/name", "small", "c0ffee", "train+test")
    assert copy.read(0) == source.read(0) and copy == source


def test_a_dataset_or_split_without_rows_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.dataset = made().select([])
    assert refused(SourceError, "hf://datasets/owner/name").what == "the dataset holds no rows"
    refused(SourceError, saved(tmp_path / "x", hub.dataset))


def test_paths_of_a_dataset_of_the_hub_are_in_its_caches(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset of image files holds where they were downloaded to; in the hub's cache they are links."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "snapshot").mkdir(parents=True)
    (tmp_path / "hub" / "blob").write_bytes(b"image")
    (tmp_path / "hub" / "snapshot" / "x.png").symlink_to("../blob")
    (tmp_path / "x.png").write_bytes(b"secret")
    texts = [str(tmp_path / "hub" / "snapshot" / "x.png"), str(tmp_path / "x.png"), "x.png"]
    hub.dataset = made().remove_columns("target_image").add_column("target_image", texts)
    source = open_source("hf://datasets/owner/name")
    assert source.read(0).target == b"image"
    with pytest.raises(RowError, match="outside"):
        source.read(1)


def test_an_unknown_split_or_option_is_refused(hub: Hub) -> None:
    assert "Unknown split" in str(refused(SourceError, "hf://datasets/owner/name?split=dev").found)
    assert refused(SourceError, "hf://datasets/owner/name?token=x").found == "token"


def test_without_a_network_the_dataset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    error = refused(SourceError, "hf://datasets/no-such-owner/no-such-name")
    assert "cannot be opened" in error.what and error.found


def test_a_local_folder_is_not_taken_for_a_dataset_of_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "local folder" in refused(SourceError, "hf://datasets/owner/name").what
    assert hub.asked == []

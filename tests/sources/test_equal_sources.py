"""The same photographs give the same keys, whatever they are written down in."""

from __future__ import annotations

import base64
from pathlib import Path

import datasets
import pytest

from qie.data.sources import Source, open_source
from qie.types import Row
from tests.builders import RECIPE
from tests.sources.tables import Table, write_tar

KINDS = ["csv", "jsonl", "inline", "parquet", "datasets", "tar", "mixture"]


@pytest.fixture(scope="module")
def rows(photos: Path) -> list[Row]:
    """Rows of a folder, every second one with a mask, a second control and another caption."""
    source = open_source(photos)
    return [source.read(index) for index in range(len(source))]


@pytest.fixture(scope="module")
def sources(rows: list[Row], photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    root = tmp_path_factory.mktemp("equal")
    table = Table(root / "table")
    for folder in ("training_images", "control_images"):
        (table.root / folder).mkdir()
        for path in (photos / folder).glob("*.png"):
            (table.root / folder / path.name).write_bytes(path.read_bytes())
    files = [(f"training_images/{row.name}.png", f"control_images/{row.name}.png", row.prompt) for row in rows]
    places: dict[str, object] = {"csv": table.csv(files)}
    places["jsonl"] = table.jsonl([{"target": t, "control": [c], "prompt": p} for t, c, p in files])
    inline = [{"target": _data(r.target), "control": {"bytes": _base64(r.controls[0])}, "text": r.prompt} for r in rows]
    places["inline"] = table.jsonl(inline, "inline.jsonl")
    dataset = datasets.Dataset.from_dict(
        {
            "target": [r.target for r in rows],
            "control": [list(r.controls) for r in rows],
            "text": [r.prompt for r in rows],
        },
        features=datasets.Features(
            {"target": datasets.Image(), "control": datasets.List(datasets.Image()), "text": datasets.Value("string")}
        ),
    )
    dataset.save_to_disk(root / "saved")
    dataset.to_parquet(root / "x.parquet")
    places |= {"datasets": root / "saved", "parquet": root / "x.parquet"}
    members = [(f"{r.name}.{e}", c) for r in rows for e, c in _members(r)]
    places["tar"] = write_tar(root / "x.tar", members)
    places["mixture"] = [photos]
    return {kind: open_source(place) for kind, place in places.items()}  # type: ignore[arg-type]


def _members(row: Row) -> list[tuple[str, bytes]]:
    return [("target.png", row.target), ("control.png", row.controls[0]), ("txt", f"{row.prompt}\n".encode())]


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _data(content: bytes) -> str:
    return f"data:image/png;base64,{_base64(content)}"


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_have_equal_keys_in_every_source(sources: dict[str, Source], rows: list[Row], kind: str) -> None:
    source = sources[kind]
    assert len(source) == len(rows)
    for index, row in enumerate(rows):
        found = source.read(index)
        assert found.index == index and RECIPE.key(found) == RECIPE.key(row)
        assert (found.target, found.controls, found.prompt) == (row.target, row.controls, row.prompt)

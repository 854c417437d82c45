"""Data as people have it: presets, named columns, the Hub's folders and absolute paths give equal rows and keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qie.config import schema
from qie.data.sources import guess, open_source
from qie.precompute import precompute
from tests.builders import RECIPE
from tests.stubs import StubEncoder

ROWS = range(3)


def target(number: int) -> bytes:
    return f"t{number}".encode()


def control(number: int) -> bytes:
    return f"c{number}".encode()


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pair_folders(targets: Path, controls: Path) -> None:
    for number in ROWS:
        put(targets / f"{number}.jpg", target(number))
        put(targets / f"{number}.txt", f"do {number}")
        put(controls / f"{number}.png", control(number))


def musubi_jsonl(root: Path) -> Path:
    lines = []
    for number in ROWS:
        image, given = put(root / f"img/{number}.png", target(number)), put(root / f"ctl/{number}.png", control(number))
        name = "control_path" if number else "control_path_0"  # a row may have either
        lines.append(json.dumps({"image_path": str(image), name: str(given), "caption": f"do {number}"}))
    return put(root / "metadata.jsonl", "\n".join(lines))


def musubi_folders(root: Path) -> Path:
    pair_folders(root / "image_dir", root / "control_dir")
    for number in ROWS:
        (root / f"control_dir/{number}.png").rename(root / f"control_dir/{number}_0.png")
    return root


def ai_toolkit(root: Path) -> Path:
    pair_folders(root / "cats", root / "cats_before")
    return root / "cats"


def kohya(root: Path) -> Path:
    for number in ROWS:
        put(root / f"img/2_cat/{number}.png", target(number))
        put(root / f"img/2_cat/{number}.caption", f"do {number}")
    return root / "img"


def hub(root: Path, names: dict[str, str], *, split: str = "train", **more: list[object]) -> Path:
    """A dataset's folder as it is downloaded, its images as bytes; `names` are columns of target, control, prompt."""
    made = {"target": target, "control": control, "prompt": "do {}".format}
    columns = {name: [made[role](number) for number in ROWS] for role, name in names.items()}
    for role in ("target", "control"):
        columns[names[role]] = [{"bytes": content, "path": f"{content!r}.jpg"} for content in columns[names[role]]]
    place = root / "data" / f"{split}-00000-of-00001.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns | more), place)
    return root


def instruct_pix2pix(root: Path) -> Path:
    names = {"target": "edited_image", "control": "original_image", "prompt": "edit_prompt"}
    return hub(root, names, original_prompt=["a cat"] * 3, edited_prompt=["a dog"] * 3)


def magicbrush(root: Path) -> Path:
    masks = [{"bytes": b"m", "path": "m.png"}] * 3
    names = {"target": "target_img", "control": "source_img", "prompt": "instruction"}
    return hub(root, names, mask_img=masks, img_id=["7"] * 3, turn_index=[1, 2, 3])


def omniedit(root: Path) -> Path:
    names = {"target": "edited_img", "control": "src_img", "prompt": "edited_prompt_list"}
    hub(root, names)
    place = root / "data" / "train-00000-of-00001.parquet"
    table = pq.read_table(place).drop_columns("edited_prompt_list")
    prompts = pa.array([[f"do {number}", f"{number}, shortly"] for number in ROWS])
    pq.write_table(table.append_column("edited_prompt_list", prompts), place)
    return root


def plain_hub(root: Path) -> Path:
    return hub(root, {"target": "target_image", "control": "control_image", "prompt": "prompt"})


def absolute(root: Path) -> Path:
    rows = [(put(root / f"a/{n}.png", target(n)), put(root / f"b/{n}.png", control(n)), f"do {n}") for n in ROWS]
    lines = ["path_target,path_control,prompt", *(",".join(map(str, row)) for row in rows)]
    return put(root / "tables" / "rows.csv", "\n".join(lines))


Made = Callable[[Path], Path]
LAYOUTS: dict[str, tuple[Made, dict[str, object]]] = {
    "musubi's JSONL": (musubi_jsonl, {"preset": "musubi"}),
    "musubi's folders": (musubi_folders, {"preset": "musubi"}),
    "ai-toolkit": (ai_toolkit, {"preset": "ai_toolkit", "columns": {"controls": ["../cats_before"]}}),
    "kohya": (kohya, {"preset": "kohya", "text_to_image": True}),
    "InstructPix2Pix": (instruct_pix2pix, {"preset": "instruct_pix2pix"}),
    "MagicBrush": (magicbrush, {"preset": "magicbrush"}),
    "OmniEdit": (omniedit, {"preset": "omniedit"}),
    "the Hub's parquet": (plain_hub, {}),
    "absolute paths": (absolute, {"root": "{root}"}),
}


def content(source: Any, index: int) -> tuple[bytes, tuple[bytes, ...], str]:
    row = source.read(index)
    return row.target, row.controls, row.prompt


def expected(layout: str) -> list[tuple[bytes, tuple[bytes, ...], str]]:
    return [(target(n), () if layout == "kohya" else (control(n),), f"do {n}") for n in ROWS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_rows_with_the_same_keys(tmp_path: Path, layout: str) -> None:
    make, options = LAYOUTS[layout]
    place = make(tmp_path)
    given = {name: str(tmp_path) if value == "{root}" else value for name, value in options.items()}
    source = open_source(place, **given)  # type: ignore[arg-type]
    assert [content(source, index) for index in range(len(source))] == expected(layout)
    if layout not in ("kohya", "MagicBrush"):  # one has no controls, the other a mask
        pairs = tmp_path / "pairs"
        pair_folders(pairs / "training_images", pairs / "control_images")
        assert [RECIPE.key(source.read(n)) for n in ROWS] == [RECIPE.key(open_source(pairs).read(n)) for n in ROWS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_guessed_of_a_layout_opens_it_and_precomputes_every_row(tmp_path: Path, layout: str) -> None:
    place = LAYOUTS[layout][0](tmp_path / "in")
    found = guess(place, text_to_image=layout == "kohya")
    assert (found.rows, found.controls) == (3, 0 if layout == "kohya" else 1)
    settings = schema.DataConfig.model_validate(found.settings()).model_dump(exclude_defaults=True)
    if isinstance(settings["source"], str):
        source = open_source(settings.pop("source"), **settings)
    else:
        source = open_source(settings["source"], text_to_image=layout == "kohya")
    assert [content(source, index) for index in range(len(source))] == expected(layout)
    report = precompute(source, StubEncoder(), tmp_path / "out", rows=(0, 3))
    assert (report.encoded, report.skipped) == (3, [])

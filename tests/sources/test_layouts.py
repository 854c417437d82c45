"""Data as people have it: presets, named columns, the Hub's folders and absolute paths give equal rows and keys."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from qie.cli import init
from qie.config import Config, load_config, schema
from qie.data.sources import PRESETS, guess, open_source, source_notes
from qie.errors import RowError, SourceError
from qie.from_config import open_rows, source_specs
from qie.precompute import precompute
from tests.builders import RECIPE
from tests.sources.tables import Bucket, Table, write_tar
from tests.stubs import StubEncoder

ROWS = range(3)


def image(number: int, what: bytes) -> bytes:
    """A picture, followed by what no decoder gives back."""
    file = io.BytesIO()
    Image.new("RGB", (320, 256), (number, 0, 0)).save(file, "PNG")
    return file.getvalue() + what


TARGETS, CONTROLS = ([image(number, what) for number in ROWS] for what in (b"target", b"control"))


def target(number: int) -> bytes:
    return TARGETS[number]


def control(number: int) -> bytes:
    return CONTROLS[number]


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
        columns[names[role]] = [{"bytes": content, "path": "image.jpg"} for content in columns[names[role]]]
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
    sent = pickle.loads(pickle.dumps(source))
    assert sent == source and [sent.read(index) for index in ROWS] == [source.read(index) for index in ROWS]
    if layout not in ("kohya", "MagicBrush"):  # one has no controls, the other a mask
        pairs = tmp_path / "pairs"
        pair_folders(pairs / "training_images", pairs / "control_images")
        assert [RECIPE.key(source.read(n)) for n in ROWS] == [RECIPE.key(open_source(pairs).read(n)) for n in ROWS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_every_layout_what_qie_init_writes_precomputes_every_row_without_an_edit(
    tmp_path: Path, layout: str
) -> None:
    place, file = LAYOUTS[layout][0](tmp_path / "in"), tmp_path / "config.yaml"
    model, family = ("Image-2.1", "qwen_image_21") if layout == "kohya" else ("Image-Edit-2511", "edit_plus")
    words = ["--model", f"Qwen/Qwen-{model}", "--vram", "24", "--source", str(place), "--output", str(file)]
    init.main(words, standalone_mode=False)
    source = open_rows(load_config(file, [f"model.family={family}"]))  # auto would ask the Hub
    assert [content(source, index) for index in range(len(source))] == expected(layout)
    report = precompute(source, StubEncoder(), tmp_path / "out", rows=(0, 3))
    assert (report.encoded, report.skipped) == (3, [])


def test_presets_of_the_configuration_are_those_of_sources() -> None:
    assert set(get_args(schema.PresetName)) == set(PRESETS)


# Columns


def test_columns_may_have_any_names_and_there_may_be_several_controls(table: Table) -> None:
    columns = ("before", "style", "after", "what to do", "where")
    rows = [
        ("images/c0.png", "images/d0.png", "images/t0.png", "p", "images/m0.png"),
        ("images/c1.png", "", "images/t1.png", "q", ""),
    ]
    named = {"target": "After", "controls": ["before", "style"], "prompt": "what to do", "mask": "where"}
    source = open_source(table.csv(rows, columns), columns=named)
    first, second = source.read(0), source.read(1)
    assert (first.target, first.controls, first.prompt, first.mask) == (
        b"images/t0.png",
        (b"images/c0.png", b"images/d0.png"),
        "p",
        b"images/m0.png",
    )
    assert (second.controls, second.mask) == ((b"images/c1.png",), None)


def test_a_gap_between_controls_is_a_reason(table: Table) -> None:
    rows = [{"a": "images/t0.png", "b": "", "c": "images/c0.png", "prompt": "p"}]
    source = open_source(
        table.jsonl([*rows, {"a": "images/t0.png", "b": "images/c0.png", "c": "", "prompt": "p"}]),
        columns={"target": "a", "controls": ["b", "c"]},
    )
    with pytest.raises(RowError, match="no control image"):
        source.read(0)
    assert source.read(1).controls == (b"images/c0.png",)


def test_each_source_of_a_mixture_may_have_its_own_columns_and_the_others_have_the_common_ones(table: Table) -> None:
    first = table.csv([("images/t0.png", "images/c0.png", "p")], ("x", "y", "prompt"), name="one.csv")
    second = table.csv([("images/c1.png", "images/t1.png", "q")], ("x", "y", "prompt"), name="two.csv")
    common, own = {"target": "x", "controls": ["y"]}, {"target": "y", "controls": ["x"]}
    source = open_source([{"source": first}, {"source": second, "columns": own}], columns=common)
    assert [source.read(number).target for number in range(2)] == [b"images/t0.png", b"images/t1.png"]


def test_members_of_a_tar_are_named_as_columns_are(tmp_path: Path) -> None:
    members = [("0.input.jpg", b"c"), ("0.output.jpg", b"t"), ("0.json", b'{"edit": "p"}')]
    place = write_tar(tmp_path / "x.tar", members)
    source = open_source(place, columns={"target": "output", "controls": ["input"], "prompt": "edit"})
    assert content(source, 0) == (b"t", (b"c",), "p")


def test_what_is_missing_is_told_in_one_error_with_the_columns_and_the_preset_that_fits(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        open_source(magicbrush(tmp_path))
    error = caught.value
    assert error.what == "no column holds the target image or the control image"
    assert "source_img" in str(error.found) and "path_target" in str(error.expected)
    assert error.hint == "this looks like MagicBrush: set data.preset: magicbrush"


def test_rows_with_controls_are_not_taken_for_text_to_image(tmp_path: Path) -> None:
    place = instruct_pix2pix(tmp_path)
    with pytest.raises(SourceError, match="no column holds the control image") as caught:
        open_source(place, text_to_image=True)
    assert "data.preset: instruct_pix2pix" in str(caught.value.hint)
    assert open_source(place, text_to_image=True, columns={"controls": []}).read(0).controls == ()


@pytest.mark.parametrize("columns", [{"mask": "gone"}, {"controls": ["path_control", "gone"]}, {"name": "gone"}])
def test_a_named_column_that_is_not_there_is_refused(table: Table, columns: dict[str, object]) -> None:
    place = table.csv([("images/t0.png", "images/c0.png", "p")])
    with pytest.raises(SourceError, match="there is no column gone") as caught:
        open_source(place, columns=columns)
    assert caught.value.found == "path_target, path_control, prompt"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "magic"}, "the preset is unknown"),
        ({"columns": {"image": "x"}}, "a role of columns is unknown"),
        ({"columns": {"target": 3}}, "not text"),
        ({"preset": "kohya"}, "folder"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(table: Table, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        open_source(table.csv([("images/t0.png", "images/c0.png", "p")]), **options)


def test_a_named_column_may_come_after_the_lines_that_are_looked_at(table: Table) -> None:
    row = {"target": "images/t0.png", "control": "images/c0.png", "prompt": "p"}
    place = table.jsonl([row] * 100 + [row | {"where": "images/m0.png"}])
    source = open_source(place, columns={"mask": "where"})
    assert (source.read(0).mask, source.read(100).mask) == (None, b"images/m0.png")


# Paths


def test_absolute_paths_are_read_within_the_root_alone(tmp_path: Path) -> None:
    place = absolute(tmp_path / "in")
    for root in (None, str(tmp_path / "in" / "a")):
        with pytest.raises(RowError, match="outside the source's root") as caught:
            open_source(place, root=root).read(0)
        assert "data.root" in str(caught.value.hint)


def test_of_paths_all_over_the_disk_no_root_is_guessed(tmp_path: Path) -> None:
    place = put(tmp_path / "rows.csv", f"path_target,path_control,prompt\n/etc/passwd,{tmp_path}/x.png,p\n")
    assert guess(place).settings() == {"source": str(place)}


def test_relative_paths_of_a_table_below_its_images_are_found_above_it(tmp_path: Path) -> None:
    put(tmp_path / "img/t.png", b"t")
    put(tmp_path / "img/c.png", b"c")
    place = put(tmp_path / "meta/rows.csv", "path_target,path_control,prompt\nimg/t.png,img/c.png,p\n")
    found = guess(place)
    assert found.settings() == {"source": str(place), "root": str(tmp_path)}
    assert found.notes == (f"paths begin at {tmp_path}",)


def test_a_folder_that_holds_nothing_is_refused_whatever_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the expected layout") as caught:
        guess(tmp_path)
    assert caught.value.found == "an empty folder"


def test_relative_paths_begin_at_the_root_which_may_be_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    put(tmp_path / "far/t.png", b"t")
    put(tmp_path / "far/c.png", b"c")
    place = put(tmp_path / "tables/rows.csv", "path_target,path_control,prompt\nt.png,c.png,p\n")
    for root in (str(tmp_path / "far"), "s3://bucket/far"):
        assert content(open_source(place, root=root), 0) == (b"t", (b"c",), "p")


# Folders


def test_musubi_s_numbered_controls_are_in_order_and_without_a_gap(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(tmp_path / f"in/{name}.png", name)
        put(tmp_path / f"in/{name}.txt", name)
    for name in ("a_0000", "a_0001", "b_0", "b_2"):
        put(tmp_path / f"ctl/{name}.png", name)
    source = open_source(tmp_path / "in", preset="musubi", columns={"controls": ["../ctl"]})
    assert source.read(0).controls == (b"a_0000", b"a_0001")
    with pytest.raises(RowError, match="without gaps"):
        source.read(1)


def test_ai_toolkit_s_folders_of_controls_are_controls_in_the_order_they_are_named(tmp_path: Path) -> None:
    pair_folders(tmp_path / "after", tmp_path / "before")
    for number in ROWS:
        put(tmp_path / f"style/{number}.png", f"s{number}")
    (tmp_path / "style/2.png").unlink()
    columns = {"target": "after", "controls": ["style", "before"]}
    source = open_source(tmp_path, preset="ai_toolkit", columns=columns)
    assert source.read(0).controls == (b"s0", control(0))
    with pytest.raises(RowError, match="no control image"):
        source.read(2)
    found = open_source(tmp_path, columns=columns)  # qie's own rules, other names
    assert found.read(0).controls == (b"s0", control(0))


def test_a_folder_of_another_layout_is_refused_with_what_it_looks_like(tmp_path: Path) -> None:
    pair_folders(tmp_path / "after", tmp_path / "before")
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    assert "data.preset: ai_toolkit, data.columns: {target: after, controls: [before]}" in str(caught.value.hint)


def test_kohya_s_folders_are_sources_whose_weight_is_their_number(tmp_path: Path) -> None:
    for folder, names in (("3_red cat", "ab"), ("1_dog", "c")):
        for name in names:
            put(tmp_path / f"img/{folder}/{name}.png", name)
            put(tmp_path / f"conditioning/{folder}/{name}.png", f"{name} before")
    put(tmp_path / "img/3_red cat/a.txt", "a red cat, sitting")
    source = open_source(tmp_path / "img", preset="kohya", columns={"controls": ["../conditioning"]})
    found = [source.read(number) for number in ROWS]
    assert [(row.source, row.prompt) for row in found] == [
        ("1_dog", "dog"),
        ("3_red cat", "a red cat, sitting"),
        ("3_red cat", "red cat"),
    ]
    assert [row.controls for row in found] == [(b"c before",), (b"a before",), (b"b before",)]
    assert {part.name: part.weight for part in source.parts} == {"1_dog": 1, "3_red cat": 3}  # type: ignore[attr-defined]
    config = Config.model_validate(
        {
            "model": {"pretrained_model_name_or_path": "some/model"},
            "data": {"source": str(tmp_path / "img"), "preset": "kohya"},
        }
    )
    assert {spec.title: spec.weight for spec in source_specs(config)} == {"1_dog": 1, "3_red cat": 3}
    assert guess(tmp_path / "img", text_to_image=True).settings()["source"][1]["weight"] == 3  # type: ignore[index]


# The Hub's folders


def test_of_several_splits_train_is_read_and_the_others_are_told(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        hub(tmp_path, {"target": "target_image", "control": "control_image", "prompt": "prompt"}, split=split)
    source = open_source(tmp_path)
    assert len(source) == 3 and source_notes(source) == [f"{tmp_path}: the split train is read, and not dev"]
    assert source_notes(open_source([tmp_path]))[0].startswith(f"{tmp_path.name}: ")
    assert open_source(f"{tmp_path}/data/dev-*.parquet").name(0) == "dev-00000-of-00001.parquet[0]"
    (tmp_path / "data" / "train-00000-of-00001.parquet").rename(tmp_path / "data" / "test-00000-of-00001.parquet")
    with pytest.raises(SourceError, match="several splits") as caught:
        open_source(tmp_path)
    assert caught.value.found == "dev, test" and "dev-*.parquet" in str(caught.value.hint)


def test_parquet_is_read_by_ranges_not_whole(tmp_path: Path, bucket: Bucket) -> None:
    rows = [
        {
            "target_image": {"bytes": bytes([n]) * 100_000, "path": ""},
            "control_image": b"c",
            "prompt": "p",
            "more": bytes(90_000),
        }
        for n in range(20)
    ]
    (tmp_path / "set" / "data").mkdir(parents=True)
    place = tmp_path / "set" / "data" / "train-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), place, row_group_size=2, use_dictionary=False, compression="none")
    source = open_source("s3://bucket/set")
    assert source.read(7).target == bytes([7]) * 100_000
    spans = [asked.rpartition(" ")[2].split("-") for asked in bucket.asked]
    read = sum(int(stop) - int(start) for start, stop in spans)
    assert read < place.stat().st_size / 4, f"{read} of {place.stat().st_size} bytes"

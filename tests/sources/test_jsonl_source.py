"""JSONL: inline controls and images, broken lines, and that lines are parsed when they are asked for."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path

import pytest

import qie.data.sources.jsonl as jsonl_source
from qie.data.sources import open_source
from qie.errors import RowError, SourceError
from tests.sources.tables import Table, names, refused, values

CONTENT = b"\x89PNG not really"
BASE64 = base64.b64encode(CONTENT).decode()


def _ascii(row: object) -> str:
    return json.dumps(row)


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "JSONL"])
def test_a_row_is_the_bytes_of_its_files(table: Table, ending: str) -> None:
    row = open_source(table.jsonl([values(0), values(1)], f"rows.{ending}")).read(1)
    assert (row.index, row.target, row.controls) == (1, b"images/t1.png", (b"images/c1.png",))
    assert (row.prompt, row.mask, row.more_prompts, row.name) == ("do 1", None, (), f"rows.{ending}:2")


@pytest.mark.parametrize("name", ["control_images", "controls", "path_control"])
def test_controls_may_be_a_list(table: Table, name: str) -> None:
    row = {"target": "images/t0.png", name: ["images/c0.png", {"path": "images/d0.png"}], "prompt": "p"}
    assert open_source(table.jsonl([row])).read(0).controls == (b"images/c0.png", b"images/d0.png")


@pytest.mark.parametrize(
    "image",
    [
        {"bytes": BASE64},
        {"bytes": BASE64, "path": "elsewhere.png"},
        f"data:image/png;base64,{BASE64}",
        f"DATA:;BASE64,{BASE64}",
    ],
)
def test_an_image_may_be_inline(table: Table, image: object) -> None:
    row = open_source(table.jsonl([values(0, path_control=[image], mask=image)])).read(0)
    assert row.controls == (CONTENT,) and row.mask == CONTENT


@pytest.mark.parametrize(
    "image", [{"bytes": "é"}, {"bytes": "abc"}, {"bytes": "YW!Jj"}, "data:image/png,abc", "data:image/png;base64,%"]
)
def test_an_inline_image_that_is_no_base64_is_refused(table: Table, image: object) -> None:
    error = refused(RowError, table.jsonl([values(0, path_control=image)]), 0)
    assert error.what == "path_control: an image cannot be read"
    assert "line 1, column path_control" in str(error.where)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ({"prompts": ["a", "b", "b"]}, ["a", "b", "b"]),
        ({"captions": "a"}, ["a"]),
        ({"prompt": "a", "prompts": ["b"]}, ["a", "b"]),
        ({"prompt": "a", "prompts": ["a", "b"]}, ["a", "b"]),
        ({"prompt": "", "prompts": ["a"]}, ["a"]),
        ({"prompt": "a", "prompt_1": "a", "prompt_2": None}, ["a", "a"]),
        ({"prompt": "", "prompts": []}, [""]),
        ({"prompt_1": "a", "prompt_2": "b"}, ["a", "b"]),
    ],
)
def test_captions_may_be_several(table: Table, given: dict[str, object], prompts: list[str]) -> None:
    row = {"target": "images/t0.png", "control": "images/c0.png"} | given
    found = open_source(table.jsonl([row])).read(0)
    assert [found.prompt, *found.more_prompts] == prompts


@pytest.mark.parametrize(
    ("given", "column", "found"),
    [
        ({"prompt": 3}, "prompt", "a number"),
        ({"prompt": ["a"]}, "prompt", "a list"),
        ({"prompts": ["a", 1.5]}, "prompts", "a number"),
        ({"path_control": {"x": 1}}, "path_control", "an object"),
        ({"path_control": ["images/c0.png", True]}, "path_control", "true or false"),
        ({"path_control": {"bytes": 3}}, "path_control", "a number"),
        ({"path_target": 7}, "path_target", "a number"),
        ({"mask": []}, "mask", "a list"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_line_and_column(
    table: Table, given: dict[str, object], column: str, found: str
) -> None:
    place = table.jsonl([values(0), values(1) | given])
    error = refused(RowError, place, 1)
    assert error.what.startswith(f"{column}: {found} instead of "), "the list of skipped rows keeps this alone"
    assert error.where == f"{place}, line 2, column {column}"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"path_target": None}, "no target image"),
        ({"path_target": ["images/t0.png", "images/t1.png"]}, "several target images"),
        ({"path_control": []}, "no control image"),
        ({"path_control": ""}, "no control image"),
        ({"path_control": ["images/c0.png", None]}, "path_control: an image is empty"),
        ({"path_control": ["images/c0.png", ""]}, "path_control: an image is empty"),
        ({"path_control": {"bytes": None, "path": None}}, "path_control: an image is empty"),
        ({"path_control": {"bytes": ""}}, "path_control: an image is empty"),
        ({"path_control_2": "images/c0.png"}, "its controls are not numbered 1, 2, 3 … without gaps"),
        ({"prompt": None}, "no prompt"),
        ({"prompts": [None]}, "a caption is empty"),
        ({"prompt": "\ud800"}, "text is not Unicode"),
    ],
)
def test_what_is_missing_from_a_row_is_its_reason(table: Table, given: dict[str, object], reason: str) -> None:
    place = table.write("rows.jsonl", "".join(f"{_ascii(row)}\n" for row in (values(0), values(1) | given)))
    assert refused(RowError, place, 1).what == reason
    assert open_source(place).read(0)


def test_a_null_mask_was_not_given(table: Table) -> None:
    rows = [values(0, mask=mask) for mask in (None, "", {"bytes": None, "path": None})]
    source = open_source(table.jsonl(rows))
    assert [source.read(index).mask for index in range(3)] == [None] * 3


def test_lines_may_have_other_keys_than_the_first(table: Table) -> None:
    other = {"Image": "images/t1.png", "input_image": "images/c1.png", "captions": ["p"]}
    source = open_source(table.jsonl([values(0), other, {"prompt": "p"}]))
    assert source.read(1).target == b"images/t1.png"
    with pytest.raises(RowError, match="no target image"):
        source.read(2)


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"not json", b"[1]", b'"x"', b"3", b'{"a": "\xe9"}', b" " * 20, b"[" * 100_000, b"9" * 5000),
        _ascii(values(0)).replace('"prompt"', '"prompt": "twice", "prompt"').encode(),
        b'{"prompt": 1, "Prompt": 2}',
    ],
)
def test_a_broken_line_is_refused_by_itself(table: Table, line: bytes) -> None:
    good = [_ascii(values(number)).encode() for number in range(2)]
    place = table.write("rows.jsonl", b"\n".join([good[0], line, good[1]]))
    error = refused(RowError, place, 1)
    assert error.where == f"{place}, line 2"
    source = open_source(place)
    assert len(source) == 3 and [source.read(index).prompt for index in (0, 2)] == ["do 0", "do 1"]


def test_a_file_of_something_else_is_refused(table: Table) -> None:
    error = refused(SourceError, table.write("rows.jsonl", "[\n1\n]\n"))
    assert error.what == "no line is a row" and "line 1" in str(error.where)


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(table: Table, content: bytes) -> None:
    assert refused(SourceError, table.write("rows.jsonl", content)).what == "the JSONL holds no rows"


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_fine(table: Table) -> None:
    lines = [_ascii(values(0)), "", "   ", _ascii(values(1))]
    source = open_source(table.write("rows.jsonl", b"\xef\xbb\xbf" + "\r\n".join(lines).encode()))
    assert [source.read(index).prompt for index in range(len(source))] == ["do 0", "do 1"]
    assert names(source) == ["rows.jsonl:1", "rows.jsonl:4"]


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_where_lines_start_does_not_depend_on_how_the_file_is_read(
    table: Table, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("qie.data.sources.lines.CHUNK_BYTES", chunk)
    source = open_source(table.jsonl([values(number % 3, prompt="x" * number) for number in range(50)]))
    assert [len(source.read(index).prompt) for index in range(len(source))] == list(range(50))
    assert {source.rows.content(index)[:1] for index in range(50)} == {b"{"}  # type: ignore[attr-defined]


def test_a_long_prompt_comes_through_as_it_is(table: Table) -> None:
    prompt = "é\u2028" * 50_000 + "."
    assert open_source(table.jsonl([values(0, prompt=prompt)])).read(0).prompt == prompt


def test_a_row_that_is_too_long_is_refused(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.data.sources.lines.MAX_LINE_BYTES", 200)
    assert refused(RowError, table.jsonl([values(0), values(1, prompt="x" * 200)]), 1).what == "a row is too long"


@pytest.mark.parametrize(("first", "second"), [("a", "a"), (7, 7), (7, "7")])
def test_two_rows_of_one_name_are_refused_by_their_lines(table: Table, first: object, second: object) -> None:
    rows = [values(0, id=first), values(1), values(2, id="c"), values(2), values(2, id=second)]
    assert refused(SourceError, table.jsonl(rows)).found == f"'{first}' on lines 1 and 5"


def test_a_row_is_called_by_its_own_key(table: Table) -> None:
    place = table.jsonl([values(0, name="a"), values(1), values(2, name=None), values(2, name=5)])
    place.write_bytes(place.read_bytes() + b"{\n")
    source = open_source(place)
    assert names(source) == ["a", "rows.jsonl:2", "rows.jsonl:3", "5", "rows.jsonl:5"]
    assert [source.read(index).name for index in range(4)] == names(source)[:4]


# Paths


def test_a_path_is_relative_to_the_manifest_and_may_be_absolute_within_its_folder(table: Table) -> None:
    inside = [
        str(table.root / "images" / "c0.png"),
        "images/../images/c0.png",
        "../rows/images/c0.png",
        "./images/c0.png",
    ]
    source = open_source(table.jsonl([values(0, path_control=path) for path in inside]))
    assert {source.read(index).controls for index in range(4)} == {(b"images/c0.png",)}


def test_a_path_out_of_the_root_is_refused_by_itself(table: Table, tmp_path: Path) -> None:
    outside = tmp_path / "secret.png"
    outside.write_bytes(b"secret")
    (tmp_path / "rows2").mkdir()
    (tmp_path / "rows2" / "x.png").write_bytes(b"secret")
    (table.root / "link.png").symlink_to(outside)
    (table.root / "folder").symlink_to(tmp_path)
    for path in (
        "../secret.png",
        str(outside),
        "link.png",
        "folder/secret.png",
        "../rows2/x.png",
        "images/../../secret.png",
    ):
        for role in ("path_target", "path_control", "mask"):
            error = refused(RowError, table.jsonl([values(0, **{role: path})]), 0)
            assert (error.what, error.where) == (f"{role}: a path outside the source's root", path)


def test_the_folder_of_a_manifest_may_be_a_link(table: Table, tmp_path: Path) -> None:
    table.jsonl([values(0)])
    (tmp_path / "alias").symlink_to(table.root)
    assert open_source(tmp_path / "alias" / "rows.jsonl").read(0).target == b"images/t0.png"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("gone.png", "No such file"),
        ("images", "Is a directory"),
        ("images/t0.png/x", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "a path holds a NUL"),
        ("pipe:touch ran", "pipe: URLs are not read"),
        ("file:///etc/passwd", "file: URLs are not read"),
        ("ftp://host/x.png", "ftp: URLs are not read"),
        ("https://host/x.png?token=1", "a URL holds a query"),
        ("s3://bucket/../x.png", ""),
        ("s3:///x.png", ""),
        ("\ud800.png", "an image cannot be read"),
    ],
)
def test_a_path_that_leads_to_no_file_is_refused(table: Table, path: str, reason: str) -> None:
    place = table.write("rows.jsonl", _ascii(values(0, path_control=path)))
    assert reason in refused(RowError, place, 0).what
    assert not (table.root / "ran").exists()


@pytest.mark.parametrize("device", ["/dev/zero", "fifo"])
def test_a_device_is_not_read(table: Table, device: str) -> None:
    if device == "fifo":
        os.mkfifo(table.root / "x.png")
    else:
        (table.root / "x.png").symlink_to(device)
    reason = refused(RowError, table.jsonl([values(0, path_control="x.png")]), 0).what
    assert "no regular file" in reason or "outside" in reason


# Laziness, threads, processes


def test_no_line_beyond_the_first_is_parsed_before_it_is_asked_for(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = table.jsonl([values(number % 3) for number in range(50_000)])
    parsed = []
    loads = jsonl_source.json.loads
    monkeypatch.setattr(jsonl_source.json, "loads", lambda *line, **kw: parsed.append(line) or loads(*line, **kw))
    source = open_source(place)
    assert len(source) == 50_000 and source.name(49_999) == "rows.jsonl:50000"
    assert len(parsed) <= 100
    assert len(pickle.dumps(source)) < 16 * 50_000 + 3000

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
BARE = {"target": "images/t0.png", "control": "images/c0.png"}


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
        ({"prompt": "é\u2028" * 50_000 + "."}, ["é\u2028" * 50_000 + "."]),
    ],
    ids=lambda given: ascii(given)[:40],
)
def test_captions_may_be_several_and_come_through_as_they_are(
    table: Table, given: dict[str, object], prompts: list[str]
) -> None:
    found = open_source(table.jsonl([BARE | given])).read(0)
    assert [found.prompt, *found.more_prompts] == prompts


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


# Rows that are refused: what the list of skipped rows keeps of them, and the column

EMPTY_IMAGES = [["images/c0.png", None], ["images/c0.png", ""], {"bytes": None, "path": None}, {"bytes": ""}]
NO_BASE64 = [{"bytes": "é"}, {"bytes": "abc"}, {"bytes": "YW!Jj"}, "data:image/png,abc", "data:image/png;base64,%"]
SKIPPED: list[tuple[dict[str, object], str, str]] = [
    ({"prompt": 3}, "prompt: a number instead of ", "prompt"),
    ({"prompt": ["a"]}, "prompt: a list instead of ", "prompt"),
    ({"prompts": ["a", 1.5]}, "prompts: a number instead of ", "prompts"),
    ({"path_control": {"x": 1}}, "path_control: an object instead of ", "path_control"),
    ({"path_control": ["images/c0.png", True]}, "path_control: true or false instead of ", "path_control"),
    ({"path_control": {"bytes": 3}}, "path_control: a number instead of ", "path_control"),
    ({"path_target": 7}, "path_target: a number instead of ", "path_target"),
    ({"mask": []}, "mask: a list instead of ", "mask"),
    *(({"path_control": image}, "path_control: an image cannot be read", "path_control") for image in NO_BASE64),
    *(({"path_control": image}, "path_control: an image is empty", "") for image in EMPTY_IMAGES),
    ({"path_target": None}, "no target image", ""),
    ({"path_target": ["images/t0.png", "images/t1.png"]}, "several target images", ""),
    ({"path_control": []}, "no control image", ""),
    ({"path_control": ""}, "no control image", ""),
    ({"path_control_2": "images/c0.png"}, "its controls are not numbered 1, 2, 3 … without gaps", ""),
    ({"prompt": None}, "no prompt", ""),
    ({"prompts": [None]}, "a caption is empty", ""),
    ({"prompt": "\ud800"}, "text is not Unicode", ""),
    ({"prompt": "x" * 200}, "a row is too long", ""),
]


@pytest.mark.parametrize(("given", "reason", "column"), SKIPPED, ids=lambda value: ascii(value)[:40])
def test_a_value_that_is_missing_or_of_the_wrong_type_is_its_rows_reason(
    table: Table, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], reason: str, column: str
) -> None:
    monkeypatch.setattr("qie.data.sources.lines.MAX_LINE_BYTES", 200)
    place = table.write("rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in (values(0), values(1) | given)))
    error = refused(RowError, place, 1)
    assert error.what.startswith(reason) and (error.what == reason or column)
    assert not column or error.where == f"{place}, line 2, column {column}"
    assert open_source(place).read(0)


BROKEN = {
    **{str(line): line for line in (b"{", b"not json", b"[1]", b'"x"', b"3", b'{"a": "\xe9"}', b" " * 20)},
    "nested without end": b"[" * 100_000,
    "a number without end": b"9" * 5000,
    "a key twice": json.dumps(values(0)).replace('"prompt"', '"prompt": "twice", "prompt"').encode(),
    "keys that differ in case alone": b'{"prompt": 1, "Prompt": 2}',
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_refused_by_itself(table: Table, line: bytes) -> None:
    good = [json.dumps(values(number)).encode() for number in range(2)]
    place = table.write("rows.jsonl", b"\n".join([good[0], line, good[1]]))
    assert refused(RowError, place, 1).where == f"{place}, line 2"
    source = open_source(place)
    assert len(source) == 3 and [source.read(index).prompt for index in (0, 2)] == ["do 0", "do 1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[\n1\n]\n", "no line holds a row\n  where:    {}, line 1"),
        *((content, "the JSONL holds no rows") for content in (b"", b"\n \n\r\n", b"\xef\xbb\xbf")),
    ],
)
def test_a_file_of_no_rows_is_refused(table: Table, content: bytes, words: str) -> None:
    place = table.write("rows.jsonl", content)
    assert words.format(place) in str(refused(SourceError, place))


# Lines and names


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "JSONL"])
def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_fine(table: Table, ending: str) -> None:
    lines = [json.dumps(values(0)), "", "   ", json.dumps(values(1))]
    source = open_source(table.write(f"rows.{ending}", b"\xef\xbb\xbf" + "\r\n".join(lines).encode()))
    assert [source.read(index).prompt for index in range(len(source))] == ["do 0", "do 1"]
    assert names(source) == [f"rows.{ending}:1", f"rows.{ending}:4"]


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_where_lines_start_does_not_depend_on_how_the_file_is_read(
    table: Table, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("qie.data.sources.lines.CHUNK_BYTES", chunk)
    source = open_source(table.jsonl([values(number % 3, prompt="x" * number) for number in range(50)]))
    assert [len(source.read(index).prompt) for index in range(len(source))] == list(range(50))
    assert {source.rows.content(index)[:1] for index in range(50)} == {b"{"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("first", "second"), [("a", "a"), (7, 7), (7, "7")])
def test_two_rows_of_one_name_are_refused_by_their_lines(table: Table, first: object, second: object) -> None:
    rows = [values(0, id=first), values(1), values(2, id="c"), values(2), values(2, id=second)]
    assert refused(SourceError, table.jsonl(rows)).found == f"'{first}' on lines 1 and 5"


def test_a_name_may_be_a_number_and_a_line_that_is_broken_has_its_number(table: Table) -> None:
    place = table.jsonl([values(0, name=5), values(1, name=None)])
    place.write_bytes(place.read_bytes() + b"{\n")
    source = open_source(place)
    assert names(source) == ["5", "rows.jsonl:2", "rows.jsonl:3"]
    assert [source.read(index).name for index in range(2)] == names(source)[:2]


# Paths


def test_a_path_is_relative_to_the_manifest_and_may_be_absolute_within_its_folder_which_may_be_a_link(
    table: Table, tmp_path: Path
) -> None:
    inside = [table.root / "images/c0.png", "images/../images/c0.png", "../rows/images/c0.png", "./images/c0.png"]
    place = table.jsonl([values(0, path_control=str(path)) for path in inside])
    (tmp_path / "alias").symlink_to(table.root)
    for source in map(open_source, (place, tmp_path / "alias" / "rows.jsonl")):
        assert {source.read(index).controls for index in range(4)} == {(b"images/c0.png",)}


@pytest.mark.parametrize("role", ["path_target", "path_control", "mask"])
@pytest.mark.parametrize(
    "path",
    ["../secret.png", "{}/secret.png", "link.png", "folder/secret.png", "../rows2/x.png", "images/../../secret.png"],
)
def test_a_path_out_of_the_root_is_refused_by_itself(table: Table, tmp_path: Path, path: str, role: str) -> None:
    (tmp_path / "rows2").mkdir()
    for outside in ("secret.png", "rows2/x.png"):
        (tmp_path / outside).write_bytes(b"secret")
    (table.root / "link.png").symlink_to(tmp_path / "secret.png")
    (table.root / "folder").symlink_to(tmp_path)
    path = path.format(tmp_path)
    error = refused(RowError, table.jsonl([values(0, **{role: path})]), 0)
    assert (error.what, error.where) == (f"{role}: a path outside the source's root", path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("images", "Is a directory"),
        ("images/t0.png/x", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "a path contains NUL"),
        ("pipe:touch ran", "pipe: URLs are not read"),
        ("file:///etc/passwd", "file: URLs are not read"),
        ("ftp://host/x.png", "ftp: URLs are not read"),
        ("https://host/x.png?token=1", "a URL has a query"),
        ("s3://bucket/../x.png", ""),
        ("s3:///x.png", ""),
        ("\ud800.png", "an image cannot be read"),
        ("fifo", "not a regular file"),
        ("zero", "outside"),
    ],
)
def test_a_path_that_leads_to_no_file_is_refused(table: Table, path: str, reason: str) -> None:
    os.mkfifo(table.root / "fifo")
    (table.root / "zero").symlink_to("/dev/zero")
    place = table.write("rows.jsonl", json.dumps(values(0, path_control=path)))
    assert reason in refused(RowError, place, 0).what
    assert not (table.root / "ran").exists()


def test_no_line_beyond_the_first_is_parsed_before_it_is_asked_for_and_a_row_takes_sixteen_bytes(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = table.jsonl([values(number % 3) for number in range(10_000)])
    parsed = []
    loads = jsonl_source.json.loads
    monkeypatch.setattr(jsonl_source.json, "loads", lambda *line, **kw: parsed.append(line) or loads(*line, **kw))
    source = open_source(place)
    assert len(source) == 10_000 and source.name(9_999) == "rows.jsonl:10000"
    assert len(parsed) <= 100
    assert len(pickle.dumps(source)) < 16 * 10_000 + 3000

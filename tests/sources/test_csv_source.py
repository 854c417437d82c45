"""CSV: what is understood, what is refused, and that rows are parsed when they are asked for."""

from __future__ import annotations

import csv
import pickle

import pytest

import qie.data.sources.csv as csv_source
from qie.data.sources import open_source
from qie.errors import RowError, SourceError
from tests.sources.tables import COLUMNS, Table, names, paths, refused

T, C, D, E, M = (f"images/{name}.png" for name in ("t0", "c0", "d0", "d1", "m0"))
ROW = dict(zip(COLUMNS, paths(0), strict=True))
HEADER, LINE, NEXT = (",".join(cells) for cells in (COLUMNS, paths(0), paths(1)))

UNDERSTOOD = {
    "common names": ({"Target_Image": T, "Control_Image": C, "CAPTION": "p"}, [C], ["p"], None),
    "pix2pix's names": ({"edited_image": T, "input_image": C, "edit_prompt": "p"}, [C], ["p"], None),
    "other names": ({"output_image": T, "source_image": C, "instruction": "p"}, [C], ["p"], None),
    "names with blanks": ({" image ": T, "control": C, "text": "p"}, [C], ["p"], None),
    "of several names the first in the list": (
        {"image": "no", "input_image": "no", "text": "no", "target": T, "control": C, "prompt": "p"},
        [C],
        ["p"],
        None,
    ),
    "further controls, captions and the mask": (
        {"path_control_2": E, "path_mask": M, "prompt_1": "q", "path_control_1": D, "prompt_2": "r"} | ROW,
        [C, D, E],
        ["do 0", "q", "r"],
        M,
    ),
    "captions without a prompt": (
        {"target": T, "control": C, "caption_1": "a", "caption_2": "b", "caption_3": ""},
        [C],
        ["a", "b"],
        None,
    ),
    "empty cells": (ROW | {"path_mask": "", "path_control_1": "", "prompt_1": ""}, [C], ["do 0"], None),
    "an empty cell under a number that is not the next": (ROW | {"path_control_2": ""}, [C], ["do 0"], None),
    "outer space of a prompt": (ROW | {"prompt": " a \n"}, [C], ["a"], None),
    "columns that do not count and differ in case alone": (ROW | {"x": "", "X": ""}, [C], ["do 0"], None),
}


@pytest.mark.parametrize(("row", "controls", "prompts", "mask"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_columns_say_what_they_hold(
    table: Table, row: dict[str, str], controls: list[str], prompts: list[str], mask: str | None
) -> None:
    found = open_source(table.csv([list(row.values())], list(row))).read(0)
    assert (found.target, [*found.controls]) == (T.encode(), [control.encode() for control in controls])
    assert ([found.prompt, *found.more_prompts], found.mask) == (prompts, mask and mask.encode())


@pytest.mark.parametrize("role", ["path_control", "prompt"])
@pytest.mark.parametrize("cells", [{"1": "", "2": D}, {"1": "", "0": D}, {"2": D}, {"1": D, "01": D}], ids=str)
def test_a_gap_in_numbered_columns_and_a_number_given_twice_are_refused(
    table: Table, role: str, cells: dict[str, str]
) -> None:
    row = ROW | {f"{role}_{number}": cell for number, cell in cells.items()}
    error = refused(RowError, table.csv([list(row.values())], list(row)), 0)
    given = sorted(f"{role}_{number}" for number, cell in cells.items() if cell)
    assert "without gaps" in error.what and error.found == ", ".join(given)


REFUSED = {
    "another divider": ("path_target;path_control;prompt\na;b;c\n", "commas instead of ';'"),
    "a column that counts stands twice": ("prompt,prompt,path_target,path_control\n1,2,3,4\n", "found:    prompt"),
    "a column stands twice": ("a,a,prompt,path_target,path_control\n1,2,3,4,5\n", "same name"),
    "columns that differ in case alone": (f"{HEADER},Prompt\n", "'prompt' and 'Prompt'"),
    "nothing": ("", "the CSV has no header"),
    "blank lines": ("\n\n", "the CSV has no header"),
    "a byte order mark": ("\ufeff", "the CSV has no header"),
    "a header alone": (f"{HEADER}\n", "the CSV holds no rows"),
    "UTF-16": ("path_target,prompt\n".encode("utf-16"), "iconv -f utf-16"),
    "a line without an end": ("\n".join([HEADER, LINE, f"{NEXT}{'x' * 100}"]), "line 3"),
    "carriage returns alone": ("\r".join([HEADER, LINE]), "new-line"),
    **{
        f"a quote that swallows rows {closing}": ("\n".join([HEADER, 'a,b,"c', *[LINE] * 3, closing]), "line 2")
        for closing in ("", 'a,b,"c"', 'a,b,x"y"c"')
    },
}


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_understood_is_refused_with_what_is_wrong(
    table: Table, monkeypatch: pytest.MonkeyPatch, content: str | bytes, words: str
) -> None:
    monkeypatch.setattr("qie.data.sources.lines.MAX_LINE_BYTES", 100)
    assert words in str(refused(SourceError, table.write("rows.csv", content)))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_file_that_is_not_utf8_is_refused_by_line_and_byte_with_the_way_out(
    table: Table, mark: bytes, line: int
) -> None:
    lines = [b"path_target,path_control,prompt", b"a,b,c", b"a,b,c"]
    lines[line - 1] += b"\xe9"
    content = mark + b"\n".join(lines)
    error = refused(SourceError, table.write("rows.csv", content))
    assert str(error.where).endswith(f"rows.csv, line {line}, byte {content.index(0xE9)}")
    assert error.found == "byte 0xe9" and "iconv -f latin1 -t utf-8" in str(error.hint)


SPOILT = {
    "too few cells": ("a,b", "expected: 3 cells\n  found:    2 cells"),
    "too many cells": ("a,b,c,d", "found:    4 cells"),
    "a blank cell": ("   ", "found:    1 cells"),
    "text behind a quote": ('"a"x,b,c', "the row is not valid CSV"),
    "a bare carriage return": (",".join(paths(0, "make it\rblue")), "the row is not valid CSV"),
    "a field beyond the limit": (",".join(paths(0, "x" * 200_001)), "field limit"),
}


@pytest.mark.parametrize(("line", "words"), SPOILT.values(), ids=SPOILT)
def test_a_broken_line_spoils_its_row_alone(
    table: Table, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.setattr("qie.data.sources.lines.MAX_FIELD_CHARS", 200_000)
    former = csv.field_size_limit()
    place = table.write("rows.csv", "\n".join([HEADER, LINE, line, ",".join(paths(1, "y" * 200_000))]))
    error = refused(RowError, place, 1)
    assert error.where == f"{place}, line 3" and words in str(error)
    source = open_source(place)
    assert [len(source.read(index).prompt) for index in (0, 2)] == [4, 200_000] and source.name(1) == "rows.csv:3"
    assert csv.field_size_limit() == former, "the limit of the process changed"


@pytest.mark.parametrize(
    "prompt", ["a\nb", "a\r\nb", "a\rb", 'say "hi"', "a,b", "a\u2028b\x0bc\x85d\x1ce", "é" * 100_000, "", "日本"]
)
def test_a_prompt_comes_through_as_it_is_and_its_lines_count(table: Table, prompt: str) -> None:
    source = open_source(table.csv([paths(0), paths(1, prompt), paths(2)]))
    assert [source.read(index).prompt for index in range(3)] == ["do 0", prompt, "do 2"]
    assert names(source) == ["rows.csv:2", "rows.csv:3", f"rows.csv:{4 + prompt.count(chr(10))}"]


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_fine(table: Table) -> None:
    source = open_source(table.write("rows.csv", f"\ufeff{HEADER}\r\n{LINE[:-4]}café\r\n\r\n{NEXT}"))
    assert [source.read(index).prompt for index in range(2)] == ["café", "do 1"]
    assert names(source) == ["rows.csv:2", "rows.csv:4"]


def test_no_cell_becomes_a_row_before_it_is_asked_for_and_a_row_takes_sixteen_bytes(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = table.csv([paths(number % 3, "long " * 50) for number in range(5000)])
    parsed: list[object] = []
    monkeypatch.setattr(csv_source, "Cells", lambda *cells: parsed.append(cells))
    source = open_source(place)
    assert len(source) == 5000 and source.name(4999) == "rows.csv:5001" and parsed == []
    assert len(pickle.dumps(source)) < 16 * 5000 + 3000

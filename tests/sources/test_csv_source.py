"""CSV: what is understood, what is refused, and that rows are parsed when they are asked for."""

from __future__ import annotations

import csv
import pickle

import pytest

import qie.data.sources.csv as csv_source
from qie.data.sources import open_source
from qie.errors import RowError, SourceError
from tests.sources.tables import Table, names, paths, refused


def test_a_row_is_called_by_its_file_and_line_or_by_its_own_column(table: Table) -> None:
    rows = [paths(0, "two\nlines"), paths(1)]
    assert names(open_source(table.csv(rows))) == ["rows.csv:2", "rows.csv:4"]
    source = open_source(table.csv([(*paths(0), "a"), (*paths(1), "")], ("path_target", "control", "prompt", "ID")))
    assert names(source) == ["a", "rows.csv:3"]
    assert source.read(0).name == "a"


@pytest.mark.parametrize(
    "columns",
    [
        ("path_target", "path_control", "prompt"),
        ("Target_Image", "Control_Image", "CAPTION"),
        ("edited_image", "input_image", "edit_prompt"),
        ("output_image", "source_image", "instruction"),
        (" image ", "control", "text"),
    ],
)
def test_columns_go_by_several_names(table: Table, columns: tuple[str, ...]) -> None:
    assert open_source(table.csv([paths(0)], columns)).read(0).controls == (b"images/c0.png",)


def test_of_several_names_of_a_role_the_first_one_in_the_list_counts(table: Table) -> None:
    columns = ("image", "input_image", "text", "target", "control", "prompt")
    row = open_source(table.csv([("no", "no", "no", *paths(0))], columns)).read(0)
    assert (row.target, row.controls, row.prompt) == (b"images/t0.png", (b"images/c0.png",), "do 0")


def test_further_controls_captions_and_the_mask_have_columns_of_their_own(table: Table) -> None:
    columns = (*["path_control_2", "path_mask", "prompt_1", "path_control_1", "prompt_2"], *csv_columns())
    cells = ("images/d1.png", "images/m0.png", "or 1", "images/d0.png", "or 2", *paths(0))
    row = open_source(table.csv([cells], columns)).read(0)
    assert row.controls == (b"images/c0.png", b"images/d0.png", b"images/d1.png")
    assert (row.prompt, row.more_prompts, row.mask) == ("do 0", ("or 1", "or 2"), b"images/m0.png")


def csv_columns() -> tuple[str, ...]:
    return ("path_target", "path_control", "prompt")


def test_numbered_captions_do_without_a_prompt_column(table: Table) -> None:
    columns = ("target", "control", "caption_1", "caption_2", "caption_3")
    row = open_source(table.csv([(*paths(0)[:2], "a", "b", "")], columns)).read(0)
    assert (row.prompt, row.more_prompts) == ("a", ("b",))


def test_an_empty_cell_of_an_optional_column_was_not_given(table: Table) -> None:
    columns = (*csv_columns(), "path_mask", "path_control_1", "prompt_1")
    row = open_source(table.csv([(*paths(0), "", "", "")], columns)).read(0)
    assert (row.mask, len(row.controls), row.more_prompts) == (None, 1, ())


@pytest.mark.parametrize(
    ("columns", "given"),
    [(("path_control_1", "path_control_2"), "path_control_2"), (("prompt_1", "prompt_2"), "prompt_2")],
)
def test_a_gap_in_numbered_columns_is_refused(table: Table, columns: tuple[str, ...], given: str) -> None:
    error = refused(RowError, table.csv([(*paths(0), "", "images/d0.png")], (*csv_columns(), *columns)), 0)
    assert "without gaps" in error.what and error.found == given


@pytest.mark.parametrize("column", ["path_control_0", "path_control_2"])
def test_a_number_that_is_not_the_next_is_refused_when_it_is_given(table: Table, column: str) -> None:
    columns = (*csv_columns(), "path_control_1", column)
    assert "without gaps" in refused(RowError, table.csv([(*paths(0), "", "images/d0.png")], columns), 0).what
    assert open_source(table.csv([(*paths(0), "", "")], columns)).read(0).target


def test_two_columns_of_one_number_are_refused_when_both_are_given(table: Table) -> None:
    columns = (*csv_columns(), "path_control_1", "path_control_01")
    place = table.csv([(*paths(0), "images/d0.png", "images/d0.png")], columns)
    assert "without gaps" in refused(RowError, place, 0).what


def test_another_divider_is_named(table: Table) -> None:
    error = refused(SourceError, table.write("rows.csv", "path_target;path_control;prompt\na;b;c\n"))
    assert "commas instead of ';'" in str(error.hint)


@pytest.mark.parametrize("columns", ["prompt,prompt,path_target,path_control", "a,a,prompt,path_target,path_control"])
def test_a_column_that_stands_twice_is_refused(table: Table, columns: str) -> None:
    error = refused(SourceError, table.write("rows.csv", columns + "\n1,2,3,4,5\n"))
    assert "same name" in error.what and error.found == columns.partition(",")[0]


def test_columns_that_differ_in_case_alone_are_refused_where_they_would_count(table: Table) -> None:
    error = refused(SourceError, table.csv([], (*csv_columns(), "Prompt")))
    assert error.found == "'prompt' and 'Prompt'"
    assert open_source(table.csv([(*paths(0), "", "")], (*csv_columns(), "x", "X"))).read(0)


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_an_empty_file_is_refused(table: Table, content: str) -> None:
    assert refused(SourceError, table.write("rows.csv", content)).what == "the CSV has no header"


def test_a_header_alone_is_refused(table: Table) -> None:
    assert refused(SourceError, table.csv([])).what == "the CSV holds no rows"


# Text


def test_a_byte_order_mark_and_windows_line_ends_are_fine(table: Table) -> None:
    text = (
        "\ufeffpath_target,path_control,prompt\r\nimages/t0.png,images/c0.png,café\r\n\r\nimages/t1.png,images/c1.png,b"
    )
    source = open_source(table.write("rows.csv", text))
    assert [source.read(index).prompt for index in range(2)] == ["café", "b"]
    assert names(source) == ["rows.csv:2", "rows.csv:4"]


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


def test_utf16_is_called_what_it_is(table: Table) -> None:
    error = refused(SourceError, table.write("rows.csv", "path_target,prompt\n".encode("utf-16")))
    assert "iconv -f utf-16" in str(error.hint)


@pytest.mark.parametrize(
    "prompt", ["a\nb", "a\r\nb", "a\rb", 'say "hi"', "a,b", "a\u2028b\x0bc\x85d\x1ce", "é" * 100_000, "", "日本"]
)
def test_a_prompt_comes_through_as_it_is(table: Table, prompt: str) -> None:
    source = open_source(table.csv([paths(0), paths(1, prompt), paths(2)]))
    assert [source.read(index).prompt for index in range(3)] == ["do 0", prompt, "do 2"]


def test_outer_space_of_a_prompt_is_dropped_as_in_a_text_file(table: Table) -> None:
    assert open_source(table.csv([paths(0, " a \n")])).read(0).prompt == "a"


def test_a_field_beyond_the_limit_is_refused_by_its_row_and_the_limit_of_the_process_stays(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qie.data.sources.lines.MAX_FIELD_CHARS", 200_000)
    former = csv.field_size_limit()
    source = open_source(table.csv([paths(0, "x" * 200_001), paths(1, "y" * 200_000)]))
    with pytest.raises(RowError, match="no CSV") as caught:
        source.read(0)
    assert "field limit" in str(caught.value.found)
    assert len(source.read(1).prompt) == 200_000
    assert csv.field_size_limit() == former


def test_a_line_without_an_end_is_refused(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.data.sources.lines.MAX_LINE_BYTES", 100)
    assert "line 3" in str(refused(SourceError, table.csv([paths(0), paths(1, "x" * 100)])).where)


@pytest.mark.parametrize(("cells", "found"), [("a,b", 2), ("a,b,c,d", 4), ("   ", 1)])
def test_a_ragged_row_is_refused_by_its_line_and_the_rows_beside_it_are_read(
    table: Table, cells: str, found: int
) -> None:
    lines = [",".join(csv_columns()), ",".join(paths(0)), cells, ",".join(paths(1))]
    place = table.write("rows.csv", "\n".join(lines))
    error = refused(RowError, place, 1)
    assert (error.where, error.expected, error.found) == (f"{place}, line 3", "3 cells", f"{found} cells")
    source = open_source(place)
    assert [source.read(index).prompt for index in (0, 2)] == ["do 0", "do 1"]
    assert source.name(1) == "rows.csv:3"


def test_text_behind_a_quote_spoils_its_row_alone(table: Table) -> None:
    lines = [",".join(csv_columns()), '"a"x,b,c', ",".join(paths(1))]
    place = table.write("rows.csv", "\n".join(lines))
    assert refused(RowError, place, 0).what == "the row is no CSV"
    assert open_source(place).read(1).prompt == "do 1"


def test_a_bare_carriage_return_spoils_its_row_alone_and_cuts_nothing_off(table: Table) -> None:
    lines = [",".join(csv_columns()), ",".join(paths(0, "make it\rblue")), ",".join(paths(1))]
    place = table.write("rows.csv", "\n".join(lines))
    assert refused(RowError, place, 0).what == "the row is no CSV"
    assert open_source(place).read(1).prompt == "do 1"


@pytest.mark.parametrize("closing", ["", '"', 'x"y"'])
def test_a_quote_that_swallows_rows_is_refused(table: Table, closing: str) -> None:
    lines = [",".join(csv_columns()), 'a,b,"c', *[",".join(paths(0))] * 3]
    place = table.write("rows.csv", "\n".join([*lines, closing and f'a,b,{closing}c"']))
    assert "line 2" in str(refused(SourceError, place).where)


def test_a_file_of_carriage_returns_alone_is_refused(table: Table) -> None:
    text = "\r".join([",".join(csv_columns()), ",".join(paths(0))])
    assert "new-line" in str(refused(SourceError, table.write("rows.csv", text)).found)


# Laziness, threads, processes


def test_no_cell_becomes_a_row_before_it_is_asked_for(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    place = table.csv([paths(number % 3) for number in range(5000)])
    parsed: list[object] = []
    monkeypatch.setattr(csv_source, "Cells", lambda *cells: parsed.append(cells))
    source = open_source(place)
    assert len(source) == 5000 and source.name(4999) == "rows.csv:5001" and parsed == []


def test_opening_keeps_sixteen_bytes_a_row(table: Table) -> None:
    source = open_source(table.csv([paths(number % 3, "long " * 50) for number in range(5000)]))
    assert len(pickle.dumps(source)) < 16 * 5000 + 3000

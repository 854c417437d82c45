"""The index: the same after a round trip, and refused for every reason that it can be wrong."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qie.errors import ShardError
from qie.shards.index import (
    Entry,
    Member,
    ShardIndex,
    Skipped,
    member_name,
    parse_stem,
    read_index,
    row_inputs,
    shard_stem,
)
from qie.stores import File, LocalFolder
from qie.types import Augment, Row, Shape
from tests.builders import RECIPE, make_entry, make_recipe, make_sample, make_skipped, mutated_json, without_own_hash

Values = dict[str, Any]


def make_index(start: int = 8, stop: int = 12) -> ShardIndex:
    """Rows 8, 9 and 11 with two records, as 11 equals 8; row 10 skipped."""
    plain, rich = make_sample(0), make_sample(1, controls=((2, 3), (4, 6)), masked=True, clipped=2)
    files = {
        member_name(plain.key): Member(512, 4000, "1" * 64),  # as older indexes have it
        member_name(rich.key): Member(5120, 4100, "2" * 64, "4" * 32),
    }
    entries = (make_entry(plain, 8), make_entry(rich, 9, "naïve 日本"), make_entry(plain, 11))
    skipped = (make_skipped(10),)
    return ShardIndex(start, stop, 20480, "3" * 64, RECIPE, files, entries, skipped)


def write(folder: Path, content: str | bytes, stem: str = "00000008-00000012") -> Path:
    path = folder / f"{stem}.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path: Path) -> ShardError:
    with pytest.raises(ShardError) as error:
        read_index(path)
    assert str(path) in str(error.value.where)
    return error.value


def changed(folder: Path, change: Callable[[Values], object]) -> ShardError:
    """What an index is refused with after a change to its values."""
    values = json.loads(without_own_hash(make_index().to_json()))
    change(values)
    return refused(write(folder, json.dumps(values)))


# What is written is what is read


@pytest.mark.parametrize("kind", [str, Path, File.at, "file://{}".format], ids=["str", "Path", "File", "URL"])
def test_an_index_survives_its_file_read_from_a_path_a_file_or_a_url(
    tmp_path: Path, kind: Callable[[Path], File | str | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, make_index().to_json() + "\n")

    assert read_index(kind(path)) == make_index()
    monkeypatch.chdir(tmp_path)
    assert read_index(path.name) == read_index(File(LocalFolder(Path()), path.name)) == make_index()
    assert read_index(path).samples[1].shape == Shape((4, 6), ((2, 3), (4, 6))), "height, then width"
    assert [one.row for one in read_index(path).accounts] == [8, 9, 10, 11], "entries and skipped rows in order"
    none = ShardIndex(8, 8, 10240, "3" * 64, RECIPE, {}, (), ())
    assert read_index(write(tmp_path, none.to_json(), "00000008-00000008")) == none


def test_an_entry_says_what_its_row_and_its_sample_say() -> None:
    sample = make_sample(1, controls=((2, 3), (4, 6)), masked=True, clipped=2)
    row = Row(8, "naïve 日本", b"target", (b"control",), "prompt", source="mine", variant=3)

    entry = Entry.of(replace(sample, notes=("only the first frame is used",)), row)

    assert (entry.row, entry.name, entry.source, entry.variant) == (8, "naïve 日本", "mine", 3)
    assert (entry.key, entry.shape, entry.tokens, entry.empty_tokens) == (sample.key, sample.shape, 9, 7)
    assert (entry.clipped, entry.notes) == (2, ("only the first frame is used",))


def test_an_entry_names_each_input_of_its_row_by_the_hash_in_its_key() -> None:
    row = Row(0, "", b"target", (b"first", b"second"), "e\u0301", mask=b"mask", augment=Augment(flip=True))

    short = {
        name: hashlib.sha256(content).hexdigest()[:16]
        for name, content in (
            ("target", b"target"),
            ("control 1", b"first"),
            ("control 2", b"second"),
            ("mask", b"mask"),
            ("prompt", "é".encode()),
        )
    }
    assert row_inputs(row) == short | {"augment": str(row.augment)}
    assert Entry.of(make_sample(), replace(row, mask=None, augment=None)).inputs.keys() == short.keys() - {"mask"}


def test_an_index_from_before_sources_variants_and_inputs_is_read(tmp_path: Path) -> None:
    values = json.loads(without_own_hash(make_index().to_json()))
    for one in values["samples"] + values["skipped"]:
        del one["source"], one["variant"]
        one.pop("inputs", None)
    index = make_index()

    entries = tuple(replace(entry, inputs={}) for entry in index.samples)
    assert read_index(write(tmp_path, json.dumps(values))) == replace(index, samples=entries)


def test_an_index_has_one_spelling_and_the_fields_of_the_format() -> None:
    text = make_index().to_json()
    values = json.loads(text)

    assert text == json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert "naïve 日本" in text
    named = {"format_version", "start", "stop", "filesize", "sha256", "recipe", "files", "samples", "skipped"}
    assert set(values) == named | {"this_sha256"} and values["format_version"] == 1
    assert values["recipe"] == json.loads(json.dumps(RECIPE.to_dict())) | {"digest": RECIPE.digest}
    assert values["samples"][1]["shape"] == {"target": [4, 6], "controls": [[2, 3], [4, 6]]}
    assert set(values["samples"][0]) == {
        *("row", "name", "source", "variant", "key", "shape", "tokens", "empty_tokens"),
        *("tensor_bytes", "clipped", "notes", "inputs"),
    }
    reason = "the target is no image"
    assert values["skipped"] == [
        {"row": 10, "name": "row 10", "reason": reason, "key": None, "source": "", "variant": 0}
    ]


def test_a_shard_is_named_after_its_rows_and_no_other_name_is_a_range() -> None:
    names = {"00000000-00000064": (0, 64), "99999999-100000063": (99_999_999, 100_000_063), "00000000-00000000": (0, 0)}
    for stem, rows in names.items():
        assert (shard_stem(*rows), parse_stem(stem)) == (stem, rows)
    stem = "00000000-00000064"
    for other in ("", "0-64", stem[1:], stem.replace("-", "_"), f"{stem}.tar", f"x{stem}", "-1-1"):
        assert parse_stem(other) is None


# Each defect by name


def test_an_index_that_is_not_there_or_no_utf8_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "00000000-00000064.json", write(tmp_path, b'{"a":"\xff"}')):
        assert refused(path).what == "the index cannot be read"


NO_INDEX = [
    *("", " \n", "{", make_index().to_json()[:-1], "tar", "\x00" * 64, "[" * 200_000),
    *("null", "[]", "1", '"index"', "{}", '{"format_version":1}'),
]


@pytest.mark.parametrize("content", NO_INDEX, ids=[str(n) for n in range(len(NO_INDEX))])
def test_text_that_is_no_index_is_refused(tmp_path: Path, content: str) -> None:
    error = refused(write(tmp_path, content))

    assert error.what == "the index is damaged or was not written by qie"
    assert ("JSONDecodeError" in str(error.found)) == (NO_INDEX.index(content) < 6)


FILE = member_name(make_sample(0).key)
DAMAGED = "the index is damaged or was not written by qie"
ODD_ROWS = "the rows of the index do not add up"
ODD_FILES = "the samples and the members of the index differ"
Change = Callable[[Values], object]


def put(*path: Any, **fields: object) -> Change:
    """Fields of the object at a path that are set."""

    def change(values: Values) -> None:
        for step in path:
            values = values[step]
        values.update(fields)

    return change


def gone(*path: Any) -> Change:
    """What stands at a path, removed."""

    def change(values: Values) -> None:
        for step in path[:-1]:
            values = values[step]
        values.pop(path[-1])

    return change


def fields_of(kind: Any, *optional: str) -> list[str]:
    return sorted(set(kind.__dataclass_fields__) - set(optional))


RECIPE_FIELDS = "ValueError: fields of the recipe are missing or unknown: "
REFUSED: list[tuple[Change, str, object]] = [
    *((gone(name), DAMAGED, name) for name in sorted(json.loads(without_own_hash(make_index().to_json())))),
    *(
        (gone("samples", 0, name), DAMAGED, f"samples.0.{name}: Field required")
        for name in fields_of(Entry, "source", "variant", "inputs", "pair")
    ),
    *(
        (gone("skipped", 0, name), DAMAGED, f"skipped.0.{name}: Field required")
        for name in fields_of(Skipped, "key", "source", "variant")
    ),
    *(
        (gone("files", FILE, name), DAMAGED, f"files.{FILE}.{name}: Field required")
        for name in fields_of(Member, "xxh3_128")
    ),
    *((gone("recipe", name), DAMAGED, RECIPE_FIELDS + name) for name in sorted(RECIPE.to_dict())),
    (put("recipe", colour=1), DAMAGED, f"{RECIPE_FIELDS}colour"),
    (put(format_version=2), DAMAGED, "ValueError: format version 2, expected 1"),
    (put("recipe", digest="0" * 16), DAMAGED, f"ValueError: the recipe's digest is {RECIPE.digest}, not {'0' * 16}"),
    (
        put("recipe", areas_px=[1]),
        DAMAGED,
        f"ValueError: the recipe's digest is {make_recipe(areas_px=(1,)).digest}, not {RECIPE.digest}",
    ),
    (gone("skipped", 0), ODD_ROWS, ""),
    (lambda values: values["skipped"].append({**values["skipped"][0], "row": 9}), ODD_ROWS, ""),
    (lambda values: values["samples"].append(values["samples"][0]), ODD_ROWS, ""),
    (put("samples", 0, row=12), ODD_ROWS, ""),
    *((put("samples", 0, row=row), DAMAGED, "samples.0.row: ") for row in (None, "8", [8], {})),
    *((put("files", FILE, offset=offset), "a member lies outside the shard", None) for offset in (16481, 2**61)),
    *(
        (put("files", FILE, **{field: value}), DAMAGED, f"files.{FILE}.{field}: ")
        for field in ("offset", "size")
        for value in (None, "512", [], 512.5, -1, 2**64)
    ),
    *(
        (put(**{name: value}), DAMAGED, "")
        for name in ("start", "stop", "filesize")
        for value in (None, [], float("inf"), float("nan"))
    ),
    (gone("files", FILE), ODD_FILES, [FILE]),
    (put("files", extra={"offset": 512, "size": 1, "sha256": "4" * 64}), ODD_FILES, ["extra"]),
    *(
        (put(part, 0, variant=value), DAMAGED, f"{part}.0.variant: ")
        for part in ("samples", "skipped")
        for value in (None, "0", 0.0, True, -1, 2**64, [])
    ),
    *(
        (put(part, 0, source=value), DAMAGED, f"{part}.0.source: ")
        for part in ("samples", "skipped")
        for value in (None, 0, ["mine"])
    ),
]


@pytest.mark.parametrize(("change", "what", "found"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_an_index_that_is_wrong_is_refused_by_what_is_wrong(
    tmp_path: Path, change: Change, what: str, found: object
) -> None:
    error = changed(tmp_path, change)

    assert error.what == what
    if what == ODD_ROWS:
        assert error.expected == "each of [8, 12), its variants from 0"
    elif found is None:
        assert FILE in str(error.where)
    else:
        assert error.found == found or str(found) in str(error.found)


def test_another_range_than_the_name_is_refused_and_a_name_that_says_none_says_nothing(tmp_path: Path) -> None:
    for stem in ("00000008-00000013", "00000007-00000012"):
        error = refused(write(tmp_path, make_index().to_json(), stem))
        assert (error.what, error.found) == ("the index has another range than its name", [8, 12])
    assert read_index(write(tmp_path, make_index().to_json(), "photos 1")) == make_index()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"row 9"', '"row 6"'),
        lambda text: text.replace('"this_sha256":"', '"this_sha256":"0'),
        lambda text: text.replace("{", "{ ", 1),
        lambda text: text[:-2].rpartition('"')[0] + f'"{"0" * 64}"}}',
        lambda text: text.replace("this_sha256", 'this_sha256":"0","this_sha256'),
    ],
)
def test_an_index_that_is_not_what_its_own_hash_says_is_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    text = make_index().to_json().replace("naïve 日本", "row 9")
    sealed = without_own_hash(text)
    sealed = f'{sealed[:-1]},"this_sha256":"{hashlib.sha256(sealed.encode()).hexdigest()}"}}'
    assert read_index(write(tmp_path, sealed)).samples[1].name == "row 9"

    assert refused(write(tmp_path, change(sealed))).found == "its SHA-256 does not match its content"


def test_a_range_of_more_rows_than_memory_holds_is_refused(tmp_path: Path) -> None:
    index = replace(make_index(), start=0, stop=10**18)

    assert refused(write(tmp_path, index.to_json(), shard_stem(0, 10**18))).what == ODD_ROWS


# And any other damage


@pytest.mark.parametrize("mutated", ["text", "value"])
def test_a_mutated_index_is_an_index_or_a_shard_error(tmp_path: Path, mutated: str) -> None:
    dice = random.Random(0)
    text = without_own_hash(make_index().to_json())
    mutate = _mutated_text if mutated == "text" else mutated_json

    outcomes = {_outcome(write(tmp_path, mutate(text, dice))) for _ in range(150)}

    assert outcomes <= {ShardIndex, ShardError} and ShardError in outcomes


def _outcome(path: Path) -> type:
    try:
        return type(read_index(path))
    except ShardError:
        return ShardError


def _mutated_text(text: str, dice: random.Random) -> str:
    """The text with some characters replaced, cut, doubled or moved."""
    begin, other = sorted(dice.sample(range(len(text)), 2))
    end = min(other, begin + dice.choice([1, 1, 1, 2, 20, 400]))
    piece = text[begin:end]
    swap = "".join(dice.choice('0123456789"[]{},:-.etrue\\\x00\ud7ffé ') for _ in piece)
    return text[:begin] + dice.choice([swap, swap, "", piece * 2, piece[::-1]]) + text[end:]

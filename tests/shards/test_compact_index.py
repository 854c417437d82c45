"""The compacted index: a set of shards is the same with it and without it, whatever became of the shards since."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from qie.data.plan import plan_epoch
from qie.errors import RecipeMismatchError, ShardError, UsageError
from qie.shards.compact_index import COMPACT_NAME, OF_SHARDS, CompactShard, read_compact, write_compact
from qie.shards.discovery import indexes_in, published
from qie.shards.hashes import xxh3_128
from qie.shards.index import Skipped
from qie.shards.reader import Shard
from qie.shards.sample_table import COLUMNS, Table
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stores import File, Folder, LocalFolder, open_folder
from qie.stores.copies import copies_folder
from qie.stores.objects import ObjectFolder
from qie.types import Sample
from tests.builders import RECIPE, assert_same, make_recipe, make_sample, plant_shard, write_shard, write_variants
from tests.s3 import S3, without_clouds
from tests.stores.servers import Ranged, serving

LETTERS = {
    "a": make_sample(1),
    "b": make_sample(2, target=(2, 4), controls=((2, 3), (4, 6)), masked=True, paired=True),
    "c": make_sample(3, tokens=12, empty_tokens=5, shared_prefix=5),
    "d": make_sample(4, shared_prefix=0),
    "e": make_sample(5),  # as large as a
}
LAYOUTS = {
    "one shard": [["a", "b"]],
    "several shards": [["a", "b"], ["c"], ["d", "a", "b"]],
    "skipped rows": [["a", "-"], ["-", "c", "-"]],
    "no samples in the first shard": [["-"], ["a", "b"], ["c"]],
    "no samples in a shard between": [["a"], ["-", "-"], ["-"], ["c"]],
    "no samples in the last shards": [["a"], ["c"], ["-"], ["-"]],
    "variants": [["ab-", "c"], ["-d", "abc", "--"]],
    "equal rows": [["a", "a"], ["aa", "a"]],
}


def write(folder: Folder | Path, layout: list[list[str]], source: str = "") -> None:
    """Shards of rows, each spelled as its variants; "-" is one that is skipped."""
    start = 0
    for rows in layout:
        write_variants(folder, [[LETTERS.get(one) for one in row] for row in rows], start=start, source=source)
        start += len(rows)


def compact(place: Folder | Path) -> File:
    """It is taken for no shard."""
    folder = open_folder(place) if isinstance(place, Path) else place
    before = published(folder)
    file = compact_folder(folder).file
    assert published(folder) == before
    return file


def said(shards: ShardSet) -> dict[str, object]:
    """All that a set of shards says of its samples, whatever its numbering."""
    table, columns = shards.table, shards.columns
    numbered = {"shapes", "sources"}
    assert np.array_equal(table.ends, np.sort(table.ends))
    return {
        **{name: getattr(table, name).tolist() for name in COLUMNS if name not in numbered},
        **{f"type of {name}": getattr(table, name).dtype for name in COLUMNS},
        "shapes": [table.shape_names[number] for number in table.shapes],
        "sources": [table.source_names[number] for number in table.sources],
        "blocks": np.unique(columns.blocks, return_inverse=True)[1].tolist(),
        "numbers of rows": columns.numbers.tolist(),
        "recipe": shards.recipe,
        "keys": shards.keys,
        "entries": shards.entries,
        "skipped": shards.skipped,
    }


def assert_equal(one: ShardSet, other: ShardSet) -> None:
    assert said(one) == said(other)
    for position in range(len(one)):
        assert_same(one.load(position), other.load(position))
    for order in ("shuffle", "blocks", "sequence"):
        plans = [
            plan_epoch(shards.columns, seed=1, epoch=2, global_batch_size=2, order=order, block_size=1)
            for shards in (one, other)
        ]
        assert list(plans[0]) == list(plans[1])


def assert_compacting_changes_nothing(places: list[str | Path], folders: list[Path]) -> None:
    before = ShardSet.open(places)
    for folder in folders:
        compact(folder)
    assert_equal(ShardSet.open(places), before)


def without_compact(folder: Path) -> ShardSet:
    (folder / COMPACT_NAME).unlink()
    return ShardSet.open([folder])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of one sample each: rows 0, 1, 2 are a, b, c."""
    write(tmp_path / "shards", [["a"], ["b"], ["c"]])
    return tmp_path / "shards"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read from local folders from now on."""
    names: list[str] = []
    read = LocalFolder.read

    def noted(self: LocalFolder, name: str, start: int = 0, stop: int | None = None, **bounds: Any) -> bytes:
        names.append(name)
        return read(self, name, start, stop, **bounds)

    monkeypatch.setattr(LocalFolder, "read", noted)
    return names


# As it is


def test_what_was_written_is_read_back_and_skipped_rows_are_whole_in_it(tmp_path: Path) -> None:
    assert read_compact(LocalFolder(tmp_path)) is read_compact(LocalFolder(tmp_path / "nowhere")) is None
    write(tmp_path, LAYOUTS["variants"], source="naïve 日本")
    gone = Skipped(1, 'naïve \\ "日本"', "the target is no image", "f" * 64, "source", 2)
    shards = [Shard(file) for file in indexes_in(tmp_path)]
    facts = [CompactShard.of(shard.file.stem, shard.index, f"{shard.file.size()} 7") for shard in shards]
    facts[0] = replace(facts[0], skipped=(gone, gone))
    tables = [Table.of(shard.index, shard.file) for shard in shards]

    file, *counts = write_compact(
        LocalFolder(tmp_path), RECIPE, [([one], two) for one, two in zip(facts, tables, strict=True)]
    )
    assert file.path == tmp_path / COMPACT_NAME and counts == [2, 7]
    made = read_compact(LocalFolder(tmp_path))
    assert made is not None and (made.recipe, made.recipe.digest) == (RECIPE, RECIPE.digest)
    assert [made.shard(number) for number in range(len(made))] == facts
    assert list(made.skipped()) == [gone for one in facts for gone in one.skipped]
    assert not made.table.differences(Table.joined(tables))
    columns = load(file.read())
    assert columns["widths"].shape == (1,) and columns["tokens"].shape == (7,), "one value of all stands once"


def test_a_folder_without_shards_cannot_be_compacted(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no shards found"):
        compact_folder(LocalFolder(tmp_path))


@pytest.mark.parametrize("compacted_before", [False, True], ids=["to be compacted", "beside a compacted index"])
def test_shards_of_another_recipe_or_of_the_same_rows_are_refused(folder: Path, compacted_before: bool) -> None:
    if compacted_before:
        compact(folder)
    act: Callable[[], object] = (lambda: ShardSet.open([folder])) if compacted_before else (lambda: compact(folder))
    other = make_recipe(vae="0" * 64)
    write_shard(folder, [make_sample(9, recipe=other)], start=3, recipe=other)
    with pytest.raises(RecipeMismatchError, match="vae"):
        act()
    deleted(folder, 3)
    plant_shard(folder, [LETTERS["d"], None], start=1)
    with pytest.raises(ShardError, match="two shards hold the same rows"):
        act()
    assert (folder / COMPACT_NAME).exists() == compacted_before


def test_a_shard_that_is_published_meanwhile_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is listed first, the next shard may come after it."""
    names = LocalFolder.names

    def late(self: LocalFolder) -> list[str]:
        found = names(self)
        write_shard(folder, [LETTERS["d"]], start=3)
        return found

    monkeypatch.setattr(LocalFolder, "names", late)
    compact_folder(LocalFolder(folder))
    monkeypatch.undo()

    with_it = ShardSet.open([folder])
    assert with_it.keys == [LETTERS[letter].key for letter in "abcd"]
    assert_equal(with_it, without_compact(folder))


# With it and without it


ABC = [["a"], ["b"], ["c"]]
MIXED = {"one": LAYOUTS["no samples in the last shards"], "two": LAYOUTS["variants"]}
SETS: dict[str, tuple[dict[str, list[list[str]]], list[str], list[str]]] = {
    **{name: ({"one": layout}, ["one"], ["one"]) for name, layout in LAYOUTS.items()},
    **{f"{name} of two folders": (MIXED, ["two", "one"], name.split()) for name in ("one", "two", "one two")},
    **{
        f"chosen: {choice}": ({"one": ABC}, [f"one/{choice}.tar"], ["one"])
        for choice in (
            "{00000000-00000001,00000002-00000003}",
            "00000002-00000003",
            "*[12]-0000000[23]",
            "{00000002-00000003,00000001-00000002,00000000-00000001}",
            "{00000001-00000002,00000002-00000003,00000000-00000001}",
        )
    },
    **{
        f"chosen: {choice}, the last without samples": ({"one": [["a"], ["b"], ["-", "-"]]}, [f"one/{choice}"], ["one"])
        for choice in ("{00000001-00000002,00000002-00000004}.tar", "{00000002-00000004,00000000-00000001}.tar")
    },
    "folders take turns": (
        {"one": ABC, "two": ABC},
        [f"{{one,two}}/{stem}.tar" for stem in ("00000000-00000001", "00000001-00000002")],
        ["one", "two"],
    ),
}
"""Folders of shards, the places that are opened, and the folders that have a compacted index."""


@pytest.mark.parametrize(("folders", "places", "have"), SETS.values(), ids=SETS)
def test_with_it_a_set_of_shards_is_the_same(
    tmp_path: Path, folders: dict[str, list[list[str]]], places: list[str], have: list[str]
) -> None:
    for name, layout in folders.items():
        write(tmp_path / name, layout, source=name)
    opened = [f"{tmp_path}/{place}" for place in places]

    assert_compacting_changes_nothing(opened, [tmp_path / name for name in have])

    if places == ["two", "one"]:
        columns = ShardSet.open(opened).columns
        sources = [columns.source_names[number] for number in columns.sources]
        assert sources == sorted(sources, reverse=True) and set(sources) == {"one", "two"}


def test_sources_in_one_folder_stay_apart_and_shards_without_any_sample_are_refused(tmp_path: Path) -> None:
    write_variants(tmp_path, [[LETTERS["a"]], [LETTERS["b"]]], source="x")
    write_variants(tmp_path, [[LETTERS["c"]], [LETTERS["d"]]], start=2, source="y")
    write_shard(tmp_path, [None], start=4)

    assert_compacting_changes_nothing([tmp_path], [tmp_path])
    columns = ShardSet.open([tmp_path]).columns
    assert [columns.source_names[number] for number in columns.sources] == ["x", "x", "y", "y"]
    with pytest.raises(ShardError, match="the shards hold no samples"):
        ShardSet.open([tmp_path / "00000004-00000005.tar"])


def test_shards_of_any_name_are_in_it(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["skipped rows"])
    for path in tmp_path.glob("00000000-*"):
        path.rename(path.with_name(f"photos{path.suffix}"))

    assert_compacting_changes_nothing([tmp_path], [tmp_path])
    compact(tmp_path)
    write_shard(tmp_path, [LETTERS["d"], LETTERS["d"]])
    with pytest.raises(ShardError, match="two shards hold the same rows"):
        ShardSet.open([tmp_path])


# Shards that are not what they were


def rewritten(folder: Path, samples: list[Sample | None], start: int) -> None:
    """Write a shard again, later than ever before."""
    write_shard(folder, samples, start=start)
    later(folder / f"{start:08d}-{start + len(samples):08d}.json")


def later(path: Path) -> None:
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000_000))


def deleted(folder: Path, start: int) -> None:
    for path in folder.glob(f"{start:08d}-*"):
        path.unlink()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "the first was written again": (lambda folder: rewritten(folder, [LETTERS["d"]], 0), "dbc"),
    "one between was written again": (lambda folder: rewritten(folder, [LETTERS["d"]], 1), "adc"),
    "the last was written again": (lambda folder: rewritten(folder, [LETTERS["d"]], 2), "abd"),
    "one of equal size came": (lambda folder: rewritten(folder, [LETTERS["e"]], 0), "ebc"),
    "one has no samples any more": (lambda folder: rewritten(folder, [None], 1), "ac"),
    "all were written again": (lambda folder: [rewritten(folder, [LETTERS["d"]], n) for n in range(3)], "ddd"),
    "one beside another without samples": (
        lambda folder: [rewritten(folder, [None], 2), compact(folder), rewritten(folder, [LETTERS["d"]], 0)],
        "db",
    ),
    "all are of another day, as after a copy that kept no times": (
        lambda folder: [later(path) for path in folder.glob("*.json")],
        "abc",
    ),
    "one was added": (lambda folder: write_shard(folder, [LETTERS["d"]], start=3), "abcd"),
    "one was deleted": (lambda folder: deleted(folder, 1), "ac"),
    "all but the last were deleted": (lambda folder: [deleted(folder, n) for n in (0, 1)], "c"),
    "two became one": (
        lambda folder: [deleted(folder, 0), deleted(folder, 1), write_shard(folder, [LETTERS["d"], LETTERS["a"]])],
        "dac",
    ),
    "an index was touched": (lambda folder: later(folder / "00000001-00000002.json"), "abc"),
    "a tar was touched": (lambda folder: later(folder / "00000001-00000002.tar"), "abc"),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_shard_that_changed_is_read_from_its_own_index(
    folder: Path, change: Callable[[Path], object], expected: str
) -> None:
    compact(folder)
    change(folder)

    with_it = ShardSet.open([folder])

    assert with_it.keys == [LETTERS[letter].key for letter in expected]
    assert_equal(with_it, without_compact(folder))


def test_no_index_of_a_shard_is_read_but_of_what_changed(folder: Path, reads: list[str]) -> None:
    compact(folder)
    reads.clear()
    ShardSet.open([folder])
    assert reads == []

    rewritten(folder, [LETTERS["d"]], 1)
    reads.clear()
    ShardSet.open([folder])
    assert reads == ["00000001-00000002.json"]


def test_a_tar_replaced_by_one_of_equal_size_without_its_index_gives_no_sample(folder: Path, tmp_path: Path) -> None:
    compact(folder)
    write_shard(tmp_path / "other", [make_sample(5)])
    (tmp_path / "other" / "00000000-00000001.tar").replace(folder / "00000000-00000001.tar")

    shards = ShardSet.open([folder])

    with pytest.raises(ShardError, match="a record is damaged"):
        shards.fetch(0)


@pytest.mark.parametrize("change", [lambda tar: tar.unlink(), lambda tar: tar.write_bytes(tar.read_bytes()[:-512])])
def test_a_tar_that_is_gone_or_cut_is_refused_as_without_it(folder: Path, change: Callable[[Path], object]) -> None:
    compact(folder)
    tar = folder / "00000001-00000002.tar"
    change(tar)

    with pytest.raises(ShardError, match=r"the shard is (missing|cut short)") as error:
        ShardSet.open([folder])
    assert str(error.value.where) == str(tar)


# Damage


def test_a_damaged_one_is_named_when_shards_are_opened_and_may_be_deleted(folder: Path) -> None:
    path = compact(folder).path
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ShardError, match="the compacted index is damaged") as error:
        ShardSet.open([folder])
    assert str(error.value.where) == str(path) and "delete it" in str(error.value.hint)
    assert len(without_compact(folder)) == 3


def handmade(folder: Path, change: Callable[[Any, dict[str, np.ndarray]], object]) -> None:
    """A compacted index that says something else, under hashes of its own that are right."""
    content = compact(folder).read()
    columns = load(content)
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    about = json.loads(metadata["qie"][64:])
    about = change(about, columns) or about
    if isinstance(about, dict):
        about["xxh3_128"] = {name: xxh3_128(values.tobytes()).hex() for name, values in columns.items()}
    text = json.dumps(about)
    told = {"qie": hashlib.sha256(text.encode()).hexdigest() + text}
    (folder / COMPACT_NAME).write_bytes(save(columns, told))


def column(name: str, change: Callable[[np.ndarray], object]) -> Callable[[Any, dict[str, np.ndarray]], object]:
    """A column that became another, or whose values did."""

    def changed(about: Any, columns: dict[str, np.ndarray]) -> None:
        made = change(columns[name])
        columns[name] = made if isinstance(made, np.ndarray) else columns[name]

    return changed


def value(name: str, number: int) -> Callable[[Any, dict[str, np.ndarray]], object]:
    """Another value for the second sample, or for the second shard."""

    def spelled(values: np.ndarray) -> np.ndarray:
        values = np.repeat(values, 3) if values.shape == (1,) else values.copy()
        values.reshape(3, -1)[1] = number
        return values

    return column(name, spelled)


def told(change: Callable[[Any], object]) -> Callable[[Any, dict[str, np.ndarray]], object]:
    """What it says beside the columns, changed."""
    return lambda about, columns: change(about) and None


def text(name: str, content: bytes) -> Callable[[Any, dict[str, np.ndarray]], object]:
    """Another text for the second shard."""

    def changed(about: Any, columns: dict[str, np.ndarray]) -> None:
        ends = [0, *columns[f"{name}_ends"].tolist()]
        texts = [columns[name][start:stop].tobytes() for start, stop in pairwise(ends)]
        texts[1] = content
        columns[name] = np.frombuffer(b"".join(texts), np.uint8)
        columns[f"{name}_ends"] = np.cumsum([len(one) for one in texts])

    return changed


MALFORMED: dict[str, tuple[Callable[[Any, dict[str, np.ndarray]], object], str]] = {
    **{
        f"{name} of another type": (column(name, lambda values: values.astype(np.float32)), name)
        for name in (*COLUMNS, *OF_SHARDS)
    },
    **{f"{name} too short": (column(name, lambda values: values[:0].copy()), name) for name in (*COLUMNS, "filesizes")},
    **{
        f"{name} of more dimensions": (column(name, lambda values: values[None].copy()), "expected")
        for name in (*COLUMNS, *OF_SHARDS)
    },
    "no columns": (lambda about, columns: columns.clear(), "missing or unknown"),
    "a column is missing": (
        lambda about, columns: columns.update(more=columns.pop("widths")),
        "missing or unknown: more, widths",
    ),
    "a column too many": (lambda about, columns: columns.update(more=columns["rows"]), "missing or unknown: more"),
    "keys too narrow": (column("keys", lambda values: values[:, :31].copy()), "keys"),
    "a scalar": (column("rows", lambda values: np.array(3)), "expected"),
    "shards that end backwards": (value("ends", 0), "ends does not rise to 3"),
    "shards that end too early": (column("ends", lambda values: values - 1), "ends does not rise to 3"),
    "names that end behind the last": (column("stems_ends", lambda values: values + 1), "stems_ends does not rise"),
    "a shape that is not there": (value("shapes", 3), "shapes holds"),
    "a negative shape": (value("shapes", -1), "shapes holds"),
    "a source that is not there": (value("sources", 1), "sources holds"),
    "a negative variant": (value("variants", -1), "variants holds"),
    "no tokens": (value("tokens", 0), "tokens holds"),
    "negative tokens of the null prompt": (value("empty_tokens", -1), "empty_tokens holds"),
    "a number": (lambda about, columns: 1, "int"),
    "a text": (lambda about, columns: "version", "indices"),
    "another version": (told(lambda about: about.update(version=1)), "version 1, expected 2"),
    "no version": (told(lambda about: about.pop("version")), "version"),
    "a recipe that is none": (told(lambda about: about.update(recipe=[1])), "keys"),
    "an unknown field of the recipe": (told(lambda about: about["recipe"].update(colour=1)), "colour"),
    "no field of the recipe": (told(lambda about: about["recipe"].pop("vae")), "vae"),
    "a recipe of another type": (told(lambda about: about["recipe"].update(areas_px="x")), "areas_px"),
    "a shard without a name": (text("stems", b""), "no shard of the rows [1, 2]: ''"),
    "a shard elsewhere": (text("stems", b"../00000001-00000002"), "no shard of the rows"),
    "a shard of no text": (text("stems", b"\xff"), "stems of shard 1"),
    "a shard of other rows than its name": (text("stems", b"00000001-00000003"), "no shard of the rows [1, 2]"),
    "a shard of rows backwards": (value("shard_rows", 1), "cannot hold the rows [1, 1]"),
    "a shard of negative rows": (value("shard_rows", -1), "cannot hold"),
    "a shard of another's rows": (
        column("shard_rows", lambda values: np.array([[0, 1], [1, 2], [1, 2]])),
        "00000002-00000003",
    ),
    "a shard of another's name": (text("stems", b"00000000-00000001"), "no shard of the rows [1, 2]"),
    "a tar of negative size": (value("filesizes", -1), "filesizes"),
    "a skipped row that is none": (text("skipped", b"[1]"), "skipped"),
    "a skipped row below zero": (text("skipped", b'[{"row":-1,"name":"","reason":""}]'), "skipped"),
    "shapes that are none": (told(lambda about: about.update(shape_names=[[1]] * 3)), "shape_names"),
    "no target": (told(lambda about: about["shape_names"][0].update(target=[0, 2])), "no shape"),
    "a negative target": (told(lambda about: about["shape_names"][0].update(target=[-4, -6])), "no shape"),
    "no controls": (told(lambda about: about["shape_names"][0].update(controls=[])), "no shape"),
    "sources that are none": (told(lambda about: about.update(source_names=[None])), "source_names"),
}


@pytest.mark.parametrize(("change", "found"), MALFORMED.values(), ids=MALFORMED)
def test_one_that_is_malformed_under_right_hashes_is_one_clear_error_before_a_batch_is_planned(
    folder: Path, change: Callable[[Any, dict[str, np.ndarray]], object], found: str
) -> None:
    handmade(folder, change)

    with pytest.raises(ShardError, match="the compacted index is damaged") as error:
        shards = ShardSet.open(index=folder / COMPACT_NAME)
        assert shards.columns and shards.fetch(1) and shards.skipped
    assert str(error.value.where) == str(folder / COMPACT_NAME)
    assert found in str(error.value.found) and "\n" not in str(error.value.found)


LIES: dict[str, tuple[Callable[[Any, dict[str, np.ndarray]], object], str]] = {
    "another's key": (value("keys", 7), "the record is another sample's"),
    "another's fast hash": (value("xxh3_128", 7), "a record is damaged"),
    "another's SHA-256 and no fast hash": (
        lambda about, columns: value("hashes", 7)(about, columns) or value("xxh3_128", 0)(about, columns),
        "a record is damaged",
    ),
    "another shape": (column("shapes", lambda values: values[[0, 0, 2]].copy()), "the record has other sizes"),
    "a negative offset": (value("offsets", -512), "lies outside its shard"),
    "an offset without room behind it": (value("offsets", 10_000), "lies outside its shard"),
    "an offset at the end of what there is": (value("offsets", (1 << 63) - 1), "lies outside its shard"),
    "a size of nothing": (value("sizes", 0), "lies outside its shard"),
    "a negative size": (value("sizes", -1), "lies outside its shard"),
    "a size beyond the tar": (value("sizes", 1 << 62), "lies outside its shard"),
    "a tar smaller than its records": (value("filesizes", 1), "lies outside its shard"),
    "more tokens": (value("tokens", (1 << 31) - 1), "the record has other sizes"),
    "fewer tokens than the prefix": (value("empty_tokens", 1), "the record has other sizes"),
    "a negative prefix": (value("prefixes", -1), "the record has other sizes"),
    "tokens without width": (value("widths", 0), "the record has other sizes"),
    "a mask": (value("masked", 0), "the record has other sizes"),
}


@pytest.mark.parametrize(("change", "found"), LIES.values(), ids=LIES)
def test_what_it_says_wrongly_of_a_record_is_one_clear_error_when_that_is_read(
    folder: Path, change: Callable[[Any, dict[str, np.ndarray]], object], found: str
) -> None:
    expected = ShardSet.open([folder])
    handmade(folder, change)
    shards = ShardSet.open([folder], index=folder / COMPACT_NAME)

    with pytest.raises(ShardError, match=found):
        shards.fetch(1)
    for position in (0, 2):
        assert_same(shards.fetch(position), expected.fetch(position))


@pytest.mark.parametrize("name", sorted({*COLUMNS, *OF_SHARDS, "stems", "stamps"} - {"rows", "hashes", "tar_hashes"}))
def test_a_flipped_bit_of_a_column_is_found_before_what_it_says_is_used(folder: Path, name: str) -> None:
    """Rows are read only where there are variants, SHA-256 of records where they have no other hash, and hashes of tars
    where these are copied, which are hashed then."""
    content = bytearray(compact(folder).read())
    length = int.from_bytes(content[:8], "little")
    start, stop = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    content[8 + length + (start + stop) // 2] ^= 1
    (folder / COMPACT_NAME).write_bytes(content)
    with pytest.raises(ShardError):
        shards = ShardSet.open([folder])
        assert shards.columns and [shards.fetch(position) for position in range(3)]


HEADERS = {
    "no header": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "no metadata": b"{}",
    "metadata of another": b'{"__metadata__":{"x":"y"}}',
    "metadata that is a number": b'{"__metadata__":3}',
    "no hash": b'{"__metadata__":{"qie":""}}',
    "bad UTF-8": b'{"__metadata__":{"qie":"\xff"}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_one_whose_header_lies_is_one_clear_error(folder: Path, header: bytes) -> None:
    for length in (len(header), 1, (1 << 63) - 1):
        (folder / COMPACT_NAME).write_bytes(length.to_bytes(8, "little") + header)

        with pytest.raises(ShardError, match="the compacted index is damaged"):
            ShardSet.open([folder])


def test_one_of_an_earlier_qie_is_named_as_such_and_not_as_damage_of_its_bytes(folder: Path) -> None:
    text = json.dumps({"version": 1, "shards": []})
    (folder / COMPACT_NAME).write_bytes(save({"rows": np.zeros(3, np.int64)}, {"qie": "0" * 64 + text}))

    with pytest.raises(ShardError) as error:
        ShardSet.open([folder])
    assert error.value.found == "version 1, expected 2"
    assert "rebuild it with qie-stats --compact" in str(error.value.hint)


# By its name


def test_one_that_is_named_is_taken_at_its_word_and_nothing_is_listed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ShardSet.open([folder])
    compact(folder)
    for path in folder.glob("*.json"):
        path.unlink()
    elsewhere = (folder / COMPACT_NAME).rename(tmp_path / "all.safetensors")
    for name in ("names", "listing", "stamps"):
        monkeypatch.setattr(LocalFolder, name, lambda self: pytest.fail("a folder is listed"))

    shards = ShardSet.open(folder, index=elsewhere)

    assert shards.keys == expected.keys and shards.digest == expected.digest
    for position in range(3):
        assert_same(shards.fetch(position), expected.fetch(position))


def test_one_that_is_named_goes_with_one_folder_and_has_to_be_there(folder: Path) -> None:
    compact(folder)
    for places in ([folder, folder], [f"{folder}/*.tar"], [folder / "00000000-00000001.tar"]):
        with pytest.raises(UsageError, match="goes with one folder"):
            ShardSet.open(places, index=folder / COMPACT_NAME)
    with pytest.raises(UsageError, match="no such compacted index"):
        ShardSet.open(index=folder / "other.safetensors")


def test_its_columns_are_mapped_and_no_tar_is_made_that_is_not_read(folder: Path) -> None:
    shards = ShardSet.open(index=compact(folder).path)
    for name in COLUMNS:
        values = getattr(shards.table, name)
        assert not values.flags.writeable and not values.flags.owndata, name
    shards.fetch(1)
    assert set(shards._tars.parts[0]._made) == {0, 1}, "the first is looked at to see where they lie"


# Other places


@pytest.fixture
def remote(s3: S3, folder: Path) -> Folder:
    """A copy of `folder` in a bucket."""
    copies = open_folder(f"{s3.url}/copies/shards")
    for path in folder.iterdir():
        copies.upload(path.name, path)
    return copies


def noted(patch: pytest.MonkeyPatch, name: str, asked: list[str]) -> None:
    act = getattr(ObjectFolder, name)

    def wrapped(self: ObjectFolder, file: str, *more: Any, **bounds: Any) -> Any:
        asked.append(f"{name} {file}")
        return act(self, file, *more, **bounds)

    patch.setattr(ObjectFolder, name, wrapped)


def test_in_a_bucket_it_is_the_same_and_nothing_else_is_read(
    remote: Folder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(remote)
    asked: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    with monkeypatch.context() as patch:
        for name in ("read", "size", "stamp", "download"):
            noted(patch, name, asked)
        shards = ShardSet.open([remote.url])
        assert asked == [f"stamp {COMPACT_NAME}", f"download {COMPACT_NAME}"]
        asked.clear()
        ShardSet.open([remote.url])
        assert asked == [f"stamp {COMPACT_NAME}"], "the copy on this machine is the one"
        write_shard(remote, [LETTERS["d"]], start=3)
        compact(remote)
        asked.clear()
        ShardSet.open([remote.url])
        assert asked == [f"stamp {COMPACT_NAME}", f"download {COMPACT_NAME}"]
        assert len(list(copies_folder().iterdir())) == 1, "the older copy is gone"
    assert shards.keys == [LETTERS[letter].key for letter in "abc"]
    assert_equal(shards, ShardSet.open([folder]))


def test_in_a_bucket_what_changed_is_read_from_its_own_index(remote: Folder) -> None:
    compact(remote)
    write_shard(remote, [make_sample(5)], start=0)  # of equal size
    write_shard(remote, [LETTERS["d"]], start=3)
    for ending in ("tar", "json"):
        remote.delete(f"00000001-00000002.{ending}")

    with_it = ShardSet.open([remote.url])

    assert with_it.keys == [make_sample(5).key, LETTERS["c"].key, LETTERS["d"].key]
    remote.delete(COMPACT_NAME)
    assert_equal(with_it, ShardSet.open([remote.url]))


def test_over_http_shards_open_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that were named are read from their own indexes, since a web server lists nothing to compare with."""
    without_clouds(monkeypatch)
    compact(folder)
    (folder / COMPACT_NAME).write_bytes(b"no such thing")

    with serving(functools.partial(Ranged, directory=folder)) as url:
        there = ShardSet.open([f"{url}/{{00000000-00000001,00000001-00000002,00000002-00000003}}.tar"])
        (folder / COMPACT_NAME).unlink()
        assert_equal(there, ShardSet.open([folder]))

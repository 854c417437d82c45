"""The compacted index: a set of shards is the same with it and without it, whatever became of the shards since."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from qie.data.plan import plan_epoch
from qie.errors import RecipeMismatchError, ShardError
from qie.shards.compact_index import COMPACT_NAME, Compact, _digest, read_compact, write_compact
from qie.shards.discovery import published
from qie.shards.index import Skipped
from qie.shards.sample_table import COLUMNS
from qie.shards.shard_set import ShardSet, compacted
from qie.stores import File, Folder, LocalFolder, open_folder
from qie.stores.objects import ObjectFolder
from qie.types import Sample
from tests.builders import assert_same, make_recipe, make_sample, plant_shard, write_shard, write_variants
from tests.s3 import S3, without_clouds
from tests.stores.servers import Ranged, serving

LETTERS = {
    "a": make_sample(1),
    "b": make_sample(2, target=(2, 4), controls=((2, 3), (4, 6)), masked=True),
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
    file = write_compact(folder, compacted(folder))
    assert published(folder) == before
    return file


def said(shards: ShardSet) -> dict[str, object]:
    """All that a set of shards says of its samples, whatever its numbering."""
    table, columns = shards.table, shards.columns
    numbered = {"shards", "shapes", "sources"}
    assert np.array_equal(columns.blocks, np.sort(columns.blocks))
    return {
        **{name: getattr(table, name).tolist() for name in COLUMNS if name not in numbered},
        **{f"type of {name}": getattr(table, name).dtype for name in COLUMNS},
        "shapes": [table.shape_names[number] for number in table.shapes],
        "sources": [table.source_names[number] for number in table.sources],
        "blocks": np.unique(columns.blocks, return_inverse=True)[1].tolist(),
        "numbers of rows": columns.rows.tolist(),
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
    made = compacted(LocalFolder(tmp_path))
    gone = Skipped(1, 'naïve \\ "日本"', "the target is no image", "f" * 64, "source", 2)
    other = replace(made, shards=(replace(made.shards[0], skipped=(gone, gone)), *made.shards[1:]))

    for one in (made, other):
        assert write_compact(LocalFolder(tmp_path), one).path == tmp_path / COMPACT_NAME
        assert_same_compact(read_compact(LocalFolder(tmp_path)), one)


def assert_same_compact(one: Compact | None, other: Compact) -> None:
    assert one is not None
    assert (one.recipe, one.recipe.digest, one.shards) == (other.recipe, other.recipe.digest, other.shards)
    for field in fields(other.table):
        mine, theirs = getattr(one.table, field.name), getattr(other.table, field.name)
        if isinstance(theirs, np.ndarray):
            assert (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist())
        else:
            assert mine == theirs


def test_a_folder_without_shards_cannot_be_compacted(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no shards found"):
        compacted(LocalFolder(tmp_path))


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
    stamps = LocalFolder.stamps

    def late(self: LocalFolder) -> dict[str, str]:
        found = stamps(self)
        write_shard(folder, [LETTERS["d"]], start=3)
        return found

    monkeypatch.setattr(LocalFolder, "stamps", late)
    made = compacted(LocalFolder(folder))
    monkeypatch.undo()
    write_compact(LocalFolder(folder), made)

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


def test_one_from_before_it_told_the_rows_of_shards_is_read(folder: Path, reads: list[str]) -> None:
    expected = ShardSet.open([folder])
    handmade(folder, told(lambda about: [shard.pop("rows") for shard in about["shards"]]))
    reads.clear()

    shards = ShardSet.open([folder])

    assert reads == [COMPACT_NAME]
    assert_equal(shards, expected)


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
    assert reads == [COMPACT_NAME]

    rewritten(folder, [LETTERS["d"]], 1)
    reads.clear()
    ShardSet.open([folder])
    assert reads == [COMPACT_NAME, "00000001-00000002.json"]


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
    """A compacted index that says something else, under a hash of its own that is right."""
    content = compact(folder).read()
    columns = load(content)
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    about = json.loads(metadata["qie"][64:])
    text = json.dumps(change(about, columns) or about)
    (folder / COMPACT_NAME).write_bytes(save(columns, {"qie": _digest(text, columns) + text}))


def column(name: str, change: Callable[[np.ndarray], object]) -> Callable[[Any, dict[str, np.ndarray]], object]:
    """A column that became another, or whose values did."""

    def changed(about: Any, columns: dict[str, np.ndarray]) -> None:
        made = change(columns[name])
        columns[name] = made if isinstance(made, np.ndarray) else columns[name]

    return changed


def value(name: str, number: int) -> Callable[[Any, dict[str, np.ndarray]], object]:
    return column(name, lambda values: values.__setitem__(1, number))


def told(change: Callable[[Any], object]) -> Callable[[Any, dict[str, np.ndarray]], object]:
    """What it says beside the columns, changed."""
    return lambda about, columns: change(about) and None


def shard(**changes: object) -> Callable[[Any, dict[str, np.ndarray]], object]:
    return told(lambda about: about["shards"][1].update(changes))


MALFORMED: dict[str, tuple[Callable[[Any, dict[str, np.ndarray]], object], str]] = {
    **{f"{name} of another type": (column(name, lambda values: values.astype(np.float32)), name) for name in COLUMNS},
    **{f"{name} too short": (column(name, lambda values: values[:-1].copy()), "expected") for name in COLUMNS},
    **{
        f"{name} of more dimensions": (column(name, lambda values: values[None].copy()), "expected") for name in COLUMNS
    },
    "no columns": (lambda about, columns: columns.clear(), "missing or unknown"),
    "a column is missing": (
        lambda about, columns: columns.update(more=columns.pop("widths")),
        "missing or unknown: more, widths",
    ),
    "a column too many": (lambda about, columns: columns.update(more=columns["rows"]), "missing or unknown: more"),
    "keys too narrow": (column("keys", lambda values: values[:, :31].copy()), "keys"),
    "a scalar": (column("rows", lambda values: np.array(3)), "expected"),
    "a shard that is not there": (value("shards", 3), "shards holds"),
    "a negative shard": (value("shards", -1), "shards holds"),
    "shards out of order": (column("shards", lambda values: values[::-1].copy()), "rows"),
    "a shape that is not there": (value("shapes", 3), "shapes holds"),
    "a negative shape": (value("shapes", -1), "shapes holds"),
    "a source that is not there": (value("sources", 1), "sources holds"),
    "a row outside its shard": (value("rows", 2), "rows"),
    "a negative row": (value("rows", -1), "rows"),
    "a negative variant": (value("variants", -1), "variants"),
    "a negative offset": (value("offsets", -512), "offsets"),
    "an offset without room behind it": (value("offsets", 10_000), "offsets"),
    "an offset behind the tar": (value("offsets", 1 << 40), "offsets"),
    "an offset at the end of what there is": (value("offsets", (1 << 63) - 1), "offsets"),
    "a negative size": (value("sizes", -1), "sizes"),
    "a size of nothing": (value("sizes", 0), "sizes"),
    "a size beyond the tar": (value("sizes", 1 << 62), "sizes"),
    "no tokens": (value("tokens", 0), "tokens"),
    "negative tokens": (value("tokens", -9), "tokens"),
    "more tokens than bytes": (value("tokens", (1 << 31) - 1), "sizes"),
    "fewer tokens than the prefix": (value("empty_tokens", 1), "prefixes"),
    "a negative prefix": (value("prefixes", -1), "prefixes"),
    "tokens without width": (value("widths", 0), "widths"),
    "a negative width": (value("widths", -8), "widths"),
    "wider than bytes": (value("widths", (1 << 31) - 1), "sizes"),
    "a number": (lambda about, columns: 1, "int"),
    "a text": (lambda about, columns: "version", "indices"),
    "another version": (told(lambda about: about.update(version=0)), "version 0, expected 1"),
    "no version": (told(lambda about: about.pop("version")), "version"),
    "a recipe that is none": (told(lambda about: about.update(recipe=[1])), "keys"),
    "an unknown field of the recipe": (told(lambda about: about["recipe"].update(colour=1)), "colour"),
    "no field of the recipe": (told(lambda about: about["recipe"].pop("vae")), "vae"),
    "a recipe of another type": (told(lambda about: about["recipe"].update(areas_px="x")), "areas_px"),
    "shards that are none": (told(lambda about: about.update(shards={"0": 1})), "setdefault"),
    "no shards": (told(lambda about: about.update(shards=[])), "shards holds"),
    "a shard without a name": (told(lambda about: about["shards"][0].pop("stem")), "stem"),
    "a shard of no hash": (shard(sha256="0"), "no shard"),
    "a shard of no text": (shard(stem=1), "expected string"),
    "a shard elsewhere": (shard(stem="../00000001-00000002"), "no shard"),
    "a shard of other rows than its name": (shard(rows=[1, 3]), "cannot hold"),
    "a shard of rows backwards": (shard(stem="other", rows=[2, 1]), "cannot hold"),
    "a shard of negative rows": (shard(stem="other", rows=[-1, 2]), "greater than or equal to 0"),
    "a shard of another's rows": (shard(stem="other", rows=[1, 3]), "hold the same rows"),
    "a shard of another's name": (
        told(lambda about: [one.update(stem="x") for one in about["shards"]]),
        "the same name",
    ),
    "a tar of negative size": (shard(filesize=-1), "filesize"),
    "a tar smaller than its records": (shard(filesize=1), "sizes"),
    "a skipped row that is none": (shard(skipped=[1]), "skipped"),
    "a skipped row below zero": (shard(skipped=[{"row": -1, "name": "", "reason": ""}]), "skipped"),
    "shapes that are none": (told(lambda about: about.update(shape_names=[[1]] * 3)), "shape_names"),
    "no target": (told(lambda about: about["shape_names"][0].update(target=[0, 2])), "no shape"),
    "a negative target": (told(lambda about: about["shape_names"][0].update(target=[-4, -6])), "no shape"),
    "no controls": (told(lambda about: about["shape_names"][0].update(controls=[])), "no shape"),
    "a huge target": (told(lambda about: about["shape_names"][0].update(target=[1 << 40, 1 << 40])), "sizes"),
    "sources that are none": (told(lambda about: about.update(source_names=[None])), "source_names"),
}


@pytest.mark.parametrize(("change", "found"), MALFORMED.values(), ids=MALFORMED)
def test_one_that_is_malformed_under_a_right_hash_is_one_clear_error(
    folder: Path, change: Callable[[Any, dict[str, np.ndarray]], object], found: str
) -> None:
    handmade(folder, change)

    with pytest.raises(ShardError, match="the compacted index is damaged") as error:
        ShardSet.open([folder])
    assert str(error.value.where) == str(folder / COMPACT_NAME)
    assert found in str(error.value.found) and "\n" not in str(error.value.found)


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


# Other places


@pytest.fixture
def remote(s3: S3, folder: Path) -> Folder:
    """A copy of `folder` in a bucket."""
    copies = open_folder(f"{s3.url}/copies/shards")
    for path in folder.iterdir():
        copies.upload(path.name, path)
    return copies


def test_in_a_bucket_it_is_the_same_and_nothing_else_is_read(
    remote: Folder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(remote)
    asked: list[str] = []
    read, size = ObjectFolder.read, ObjectFolder.size
    with monkeypatch.context() as patch:
        patch.setattr(
            ObjectFolder,
            "read",
            lambda self, name, *span, **bounds: asked.append(name) or read(self, name, *span, **bounds),
        )
        patch.setattr(ObjectFolder, "size", lambda self, name: asked.append(name) or size(self, name))
        shards = ShardSet.open([remote.url])

    assert asked == [COMPACT_NAME]
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

"""Finding shards: directories, globs and braces, here and in other stores; nothing else, and never a program."""

from __future__ import annotations

from pathlib import Path

import pytest
from braceexpand import braceexpand

from qie.errors import ShardError, UsageError
from qie.shards.discovery import find_indexes, gaps, lonely, published, rows_of
from qie.shards.index import shard_stem
from qie.stores import Folder, LocalFolder, StoreError, open_folder
from qie.stores.patterns import expand_braces
from tests.s3 import S3

STARTS = (0, 64, 128, 99_999_936, 100_000_000, 1_000_000_000)
"""By row, which is not by name: a hundred million rows take more than eight digits."""
NAMES = [f"{shard_stem(start, start + 64)}.json" for start in STARTS]
RENAMED = ["a.1.json", "photos 1.json"]
"""Shards that somebody renamed: a pair of any name. They come last."""
OTHERS = [
    *("config.json", "notes.txt", "0-64.json", "00000192-00000256.json.partial", "00000192-00000256.tar", "raw.tar"),
    *("deeper/00000000-00000064.json", "deeper/00000000-00000064.tar"),
]


def fill(folder: Folder, indexes: list[str], others: list[str]) -> None:
    """Empty files: to be found they need no content."""
    pairs = [name.replace(".json", ".tar") for name in indexes]
    for name in (*indexes, *pairs, *others):
        if isinstance(folder, LocalFolder):
            (folder.root / name).parent.mkdir(parents=True, exist_ok=True)
        folder.write(name, b"")


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of six shards, two renamed ones, and other files and folders."""
    on_disk = request.param == "disk"
    place = str(tmp_path / "all") if on_disk else f"{request.getfixturevalue('s3').url}/a/all"
    fill(open_folder(place), [*NAMES, *RENAMED], OTHERS)
    return place


def shards(folder: Path, *starts: int) -> list[str]:
    names = [f"{shard_stem(start, start + 64)}.json" for start in starts]
    fill(LocalFolder(folder), names, [])
    return [str(folder / name) for name in names]


def found(*places: str | Path) -> list[str]:
    return [str(file) for file in find_indexes(places)]


def refused(place: str | Path) -> UsageError:
    with pytest.raises(UsageError) as error:
        find_indexes([place])
    assert error.value.where == place
    return error.value


FOUND = {
    **{ending: [*NAMES, *RENAMED] for ending in ("", "/", "/*.tar", "/*.json")},
    **{f"/{NAMES[1][:-5]}{ending}": NAMES[1:2] for ending in (".tar", ".json")},
    "/0000006?-*.tar": NAMES[1:2],
    "/*[48]-00000*.tar": NAMES[1:3],
    "/photos 1.tar": RENAMED[1:],
    "/{00000000..00000128}-*.tar": NAMES[:3],
    "/{00000128-00000192,00000000-00000064}.tar": [NAMES[2], NAMES[0]],
}


def test_a_folder_a_file_a_glob_and_braces_stand_for_their_shards_each_once(place: str) -> None:
    for ending, expected in FOUND.items():
        assert found(f"{place}{ending}") == [f"{place}/{name}" for name in expected], ending
    assert [file.name for file in published(place)] == NAMES
    first = f"{place}/{NAMES[1]}"
    other = place.replace("s3:", "S3:") if "://" in place else f"file://{place}"
    assert found(first, place, f"{place}/*.tar", other) == [first, *(one for one in found(place) if one != first)]
    assert found() == []


def test_a_home_directory_and_a_file_url_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photo.png").touch()
    assert refused("~").found == "photo.png"
    expected = shards(tmp_path / "a b", 0, 64)

    assert found("~/a b") == found("~/a b/*.tar") == expected
    for ending in ("", "/", "/*.tar", "/{00000000-00000064,00000064-00000128}.tar"):
        assert found(f"file://{tmp_path}/a%20b{ending}") == expected


def test_globs_and_braces_may_span_directories_in_their_order(tmp_path: Path, s3: S3) -> None:
    expected = shards(tmp_path / "one", 0) + shards(tmp_path / "two", 0)
    for name in ("one", "two"):
        fill(open_folder(f"{s3.url}/{name}"), NAMES[:1], [])

    assert found(f"{tmp_path}/*/*.tar") == found(f"{tmp_path}/{{one,two}}") == expected
    assert found(tmp_path / "two", tmp_path / "one") == found(f"{tmp_path}/{{two,one}}/*.tar") == expected[::-1]
    assert found(f"{s3.url}/{{two,one}}") == [f"{s3.url}/{name}/{NAMES[0]}" for name in ("two", "one")]
    fill(open_folder(s3.url), NAMES[:1], [])
    assert found(s3.url) == found(f"{s3.url}/") == found(f"{s3.url}/*.tar") == [f"{s3.url}/{NAMES[0]}"], "a bucket"
    mixed = [f"{s3.url}/one/{NAMES[0]}", expected[0], f"{s3.url}/two/{NAMES[0]}"]
    assert found(mixed[0], tmp_path / "one", mixed[2]) == mixed


@pytest.mark.parametrize(
    ("pattern", "lacking"),
    [
        ("{00000000-00000064,00000128-00000192}.tar", "00000128-00000192.tar"),
        ("{00000000..00000001}-00000064.tar", "00000001-00000064.tar"),
        ("{.,gone}", "gone"),
        ("{*,00000128-00000192}.tar", "00000128-00000192.tar"),
    ],
)
def test_a_name_that_braces_spell_out_has_to_be_there(tmp_path: Path, pattern: str, lacking: str) -> None:
    shards(tmp_path, 0, 64)

    with pytest.raises(UsageError) as error:
        find_indexes([f"{tmp_path}/{pattern}"])
    assert str(error.value.where) == f"{tmp_path}/{lacking}"


@pytest.mark.parametrize(
    "pattern", ["{0000.tar", "0000}.tar", "{0..999999999}.tar", "{a,b}{0..999999}.tar", "{" * 9999]
)
def test_braces_that_do_not_match_or_spell_out_too_much_are_refused(tmp_path: Path, pattern: str) -> None:
    assert "the braces of a pattern" in refused(f"{tmp_path}/{pattern}").what


PATTERNS = """a {a} {} {a,b} {,x} x{1..3}y {3..1} {01..10..3} {-02..2} {1..2..0} {a..e..2} {e..a} {a..5} {1..}
{{a,b},c}{d,e} {a{1..3},b} {{1..2}} p/{000..002}-*.tar {{a}}{0..1} a,b"""


def test_braces_are_those_of_webdataset() -> None:
    for pattern in PATTERNS.split():
        assert expand_braces(pattern) == list(braceexpand(pattern)), pattern


# Gaps, what is published, and its rows


@pytest.mark.parametrize(
    ("starts", "expected"),
    [((0, 64), []), ((64, 128), [(0, 64)]), ((0, 128, 320), [(64, 128), (192, 320)])],
)
def test_rows_between_shards_that_no_shard_is_of_are_gaps(
    tmp_path: Path, starts: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    shards(tmp_path, *starts)

    last = f"{shard_stem(starts[-1], starts[-1] + 64)}.tar"
    for place in (tmp_path, tmp_path / last):
        assert [gap[1:] for gap in gaps(find_indexes([place]))] == expected, "the folder counts"
    fill(LocalFolder(tmp_path), [f"{shard_stem(0, 512)}.json"], [])
    assert list(gaps(find_indexes([tmp_path]))) == [], "one that holds the rows of others, too"


def test_what_is_published_is_asked_of_a_folder_a_path_or_a_url_and_its_name_gives_its_rows(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64, 99_999_999)

    for place in (tmp_path, str(tmp_path), f"file://{tmp_path}", LocalFolder(tmp_path)):
        assert [str(file.path) for file in published(place)] == expected
    assert [rows_of(file) for file in published(tmp_path)] == [(0, 64), (64, 128), (99_999_999, 100_000_063)]
    assert published(tmp_path / "gone") == []


@pytest.mark.parametrize("ending", ["", "/*.tar", "/00000000-00000064.tar"], ids=["directory", "glob", "tar"])
def test_a_tar_without_an_index_does_not_exist_and_is_named(tmp_path: Path, ending: str) -> None:
    (tmp_path / "00000000-00000064.tar").touch()

    with pytest.raises(ShardError, match=r"(?s)tars have no index.*found: +00000000-00000064\.tar"):
        find_indexes([f"{tmp_path}{ending}"])
    assert published(tmp_path) == []


def test_a_tar_whose_index_came_since_its_folder_was_listed_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "00000000-00000064.tar").touch()
    folder = LocalFolder(tmp_path)
    before = folder.listing()
    assert [tar.name for tar in lonely(folder)] == [*before]
    shards(tmp_path, 0)
    monkeypatch.setattr(LocalFolder, "listing", lambda self: before)

    assert lonely(folder) == []


# Nothing found

NOTHING: list[tuple[list[str], str, str]] = [
    (["photo.png", "photo.txt"], "", "photo.png, photo.txt"),
    ([f"{number}.png" for number in range(9)], "", "0.png, 1.png, 2.png, 3.png, 4.png, 5.png, … (9 files)"),
    ([], "", "an empty folder"),
    ([], "/*.tar", "nothing that matches"),
    ([], "/gone/*.tar", "no folder {}/gone"),
    (["shards.zip"], "/shards.zip", "nothing that matches"),
    (["other.tar"], "/other.tar", "nothing that matches"),
    (["lonely.json"], "/lonely.json", "nothing that matches"),
    (["00000000-00000064.tar.partial", "00000000-00000064.json.partial"], "/*.partial", "nothing that matches"),
]


@pytest.mark.parametrize(("files", "ending", "said"), NOTHING, ids=[said for *_, said in NOTHING])
def test_where_no_shards_are_it_is_said_what_is_there(tmp_path: Path, files: list[str], ending: str, said: str) -> None:
    for name in files:
        (tmp_path / name).touch()

    error = refused(f"{tmp_path}{ending}")

    assert (error.what, error.found) == ("no shards found", said.format(tmp_path))
    assert "00000000-00000064.tar" in str(error.expected)
    shards(tmp_path / "full", 0)
    with pytest.raises(UsageError) as of_several:
        find_indexes([tmp_path / "full", tmp_path / "gone"])
    assert of_several.value.where == tmp_path / "gone"


def test_in_a_bucket_it_is_said_that_nothing_matches_or_that_there_is_no_such_bucket(s3: S3) -> None:
    fill(open_folder(f"{s3.url}/a/all"), NAMES[:1], [])

    for ending in ("/gone", "/a/all/deeper/*.tar", "/a/*.tar"):
        error = refused(f"{s3.url}{ending}")
        assert (error.what, error.found) == ("no shards found", "nothing that matches")
    with pytest.raises(StoreError, match="no such bucket"):
        find_indexes([f"{s3.url}-of-nobody/shards"])


# URLs


@pytest.mark.parametrize(
    ("place", "what"),
    [
        *(
            (f"{scheme}:touch ran", "pipe: URLs are not read because they run a shell command")
            for scheme in ("pipe", "PIPE")
        ),
        *(
            (f"{scheme}://host/x.tar", f"{scheme.lower()}: URLs are not read by qie")
            for scheme in ("ftp", "FTP", "git+ssh")
        ),
        *((f"{scheme}:/bucket/shards", "a URL lacks a slash") for scheme in ("s3", "gs", "https", "hf", "file")),
        *(
            (f"s3://bucket/{part}/all/*.tar", "a glob in a URL may stand in a shard's name only")
            for part in ("a*", "?", "*")
        ),
        ("s3://bucket/[ab]/all/00000000-00000064.tar", "a glob in a URL may stand in a shard's name only"),
    ],
)
def test_a_url_that_is_not_read_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, what: str
) -> None:
    shards(tmp_path / "pipe:true", 0)
    monkeypatch.chdir(tmp_path)

    assert refused(place).what == what
    assert refused("pipe:true").what.startswith("pipe: URLs"), "even where a folder has its name"
    with pytest.raises(UsageError, match="pipe: URLs are not read"):
        find_indexes([f"{{{tmp_path},pipe:true}}/*.tar"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a:b", "s3:x", "7z:x"])
def test_a_path_with_a_colon_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shards(tmp_path / name, 0)
    monkeypatch.chdir(tmp_path)

    for ending in ("", "/*.tar", "/00000000-00000064.tar"):
        for start in ("", "./"):
            assert [file.path for file in find_indexes([f"{start}{name}{ending}"])] == [Path(name, NAMES[0])]

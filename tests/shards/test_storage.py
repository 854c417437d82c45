"""Finding shards: directories, globs and braces, here and in other stores; nothing else, and never a program."""

from __future__ import annotations

from pathlib import Path

import pytest
from braceexpand import braceexpand

from qie.errors import ShardError, UsageError
from qie.shards.index import shard_stem
from qie.shards.storage import find_indexes, gaps, published, rows_of
from qie.stores import Folder, LocalFolder, StoreError, open_folder
from qie.stores.patterns import expand_braces
from tests.s3 import S3


def shards(folder: Path, *starts: int, size: int = 64) -> list[Path]:
    """Empty tars with empty indexes; to be found they need no content."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{shard_stem(start, start + size)}.json" for start in starts]
    for path in paths:
        path.touch()
        path.with_suffix(".tar").touch()
    return paths


def found(*places: str | Path) -> list[Path | None]:
    """Where the indexes are that are found."""
    return [file.path for file in find_indexes(places)]


def published_in(folder: Path) -> list[Path | None]:
    return [file.path for file in published(folder)]


def refused(place: str | Path) -> UsageError:
    with pytest.raises(UsageError) as error:
        find_indexes([place])
    assert error.value.where == place
    return error.value


def test_a_directory_stands_for_all_its_shards(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64, 128)

    assert found(tmp_path) == expected
    assert found(str(tmp_path)) == expected
    assert found(f"{tmp_path}/") == expected
    assert published_in(tmp_path) == expected


def test_only_shards_of_a_directory_count(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0)
    for name in ("config.json", "notes.txt", "0-64.json", "00000064-00000128.json.partial", "00000064-00000128.tar"):
        (tmp_path / name).touch()
    shards(tmp_path / "deeper", 64)

    assert found(tmp_path) == expected


def test_a_tar_stands_for_its_shard(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64)

    assert found(tmp_path / "00000064-00000128.tar") == expected[1:]


def test_an_index_stands_for_its_shard(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64)

    assert found(tmp_path / "00000064-00000128.json") == expected[1:]


def test_a_tar_of_any_name_with_its_index_beside_it_is_a_shard(tmp_path: Path) -> None:
    """Behind those that are named after their rows, by name; JSON and tars that are no pair are none."""
    expected = shards(tmp_path, 64)
    for name in ("b.json", "b.tar", "a.1.json", "a.1.tar", "lonely.json", "other.tar"):
        (tmp_path / name).touch()
    named = [tmp_path / "a.1.json", tmp_path / "b.json"]

    assert found(tmp_path) == found(f"{tmp_path}/*.tar") == found(f"{tmp_path}/*.json") == expected + named
    assert found(tmp_path / "b.tar") == found(tmp_path / "b.json") == named[1:]
    assert published_in(tmp_path) == expected
    for name in ("other.tar", "lonely.json"):
        refused(tmp_path / name)


def test_a_glob_stands_for_what_it_matches(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64, 128)

    assert found(f"{tmp_path}/*.tar") == expected
    assert found(f"{tmp_path}/*.json") == expected
    assert found(f"{tmp_path}/0000006?-*.tar") == expected[1:2]
    assert found(f"{tmp_path}/*[48]-*.tar") == expected[1:]


def test_a_glob_may_span_directories(tmp_path: Path) -> None:
    expected = shards(tmp_path / "one", 0) + shards(tmp_path / "two", 0)

    assert found(f"{tmp_path}/*/*.tar") == expected


def test_braces_stand_for_each_of_their_values(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 1, 2, size=1)

    assert found(f"{tmp_path}/{{00000000..00000001}}-*.tar") == expected[:2]
    assert found(f"{tmp_path}/{{00000000-00000001,00000002-00000003}}.tar") == [expected[0], expected[2]]


def test_braces_may_name_directories(tmp_path: Path) -> None:
    expected = shards(tmp_path / "one", 0) + shards(tmp_path / "two", 64)

    assert found(f"{tmp_path}/{{one,two}}") == expected


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


def test_of_globs_in_braces_some_may_match_nothing(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64)

    assert found(f"{tmp_path}/{{00000000..00000009}}-*.tar") == expected[:1]


@pytest.mark.parametrize(
    "pattern", ["{0000.tar", "0000}.tar", "{0..999999999}.tar", "{a,b}{0..999999}.tar", "{" * 9999]
)
def test_braces_that_do_not_match_or_spell_out_too_much_are_refused(tmp_path: Path, pattern: str) -> None:
    assert "the braces of a pattern" in refused(f"{tmp_path}/{pattern}").what


PATTERNS = """a {a} {} {a,b} {,x} x{1..3}y {3..1} {01..10..3} {-02..2} {1..2..0} {a..e..2} {e..a} {a..5} {1..}
{{a,b},c}{d,e} {a{1..3},b} {{1..2}} p/{000..002}-*.tar {{a}}{0..1} a,b"""


@pytest.mark.parametrize("pattern", PATTERNS.split())
def test_braces_are_those_of_webdataset(pattern: str) -> None:
    assert expand_braces(pattern) == list(braceexpand(pattern))


# Gaps


@pytest.mark.parametrize(
    ("starts", "expected"),
    [((0, 64), []), ((64, 128), [(0, 64)]), ((0, 128, 320), [(64, 128), (192, 320)])],
)
def test_rows_between_shards_that_no_shard_is_of_are_gaps(
    tmp_path: Path, starts: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    shards(tmp_path, *starts)

    assert [gap[1:] for gap in gaps(find_indexes([tmp_path]))] == expected
    last = f"{shard_stem(starts[-1], starts[-1] + 64)}.tar"
    assert [gap[1:] for gap in gaps(find_indexes([tmp_path / last]))] == expected, "the folder counts"


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = shards(tmp_path / "shards", 0)

    assert found("~/shards") == expected
    assert found("~/shards/*.tar") == expected


def test_a_shard_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64)

    assert found(tmp_path, f"{tmp_path}/*.tar", expected[0]) == expected


def test_places_keep_their_order(tmp_path: Path) -> None:
    later, earlier = shards(tmp_path / "later", 64), shards(tmp_path / "earlier", 0)

    assert found(tmp_path / "later", tmp_path / "earlier") == later + earlier


@pytest.mark.parametrize("place", ["", "/*.tar", "/*.json"], ids=["directory", "tars", "indexes"])
def test_shards_come_by_row_not_by_name(tmp_path: Path, place: str) -> None:
    """A hundred million rows take more than eight digits."""
    expected = shards(tmp_path, 64, 99_999_936, 100_000_000, 1_000_000_000)

    assert found(f"{tmp_path}{place}") == expected


@pytest.mark.parametrize("place", ["", "/*.tar", "/00000000-00000064.tar"], ids=["directory", "glob", "tar"])
def test_a_tar_without_an_index_does_not_exist_and_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "00000000-00000064.tar").touch()

    with pytest.raises(ShardError, match=r"(?s)tars have no index.*found: +00000000-00000064\.tar"):
        find_indexes([f"{tmp_path}{place}"])
    assert published(tmp_path) == []


def test_a_partial_file_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "00000000-00000064.tar.partial").touch()
    (tmp_path / "00000000-00000064.json.partial").touch()

    assert refused(f"{tmp_path}/*.partial").what == "no shards found"
    assert published(tmp_path) == []


# Nothing found


def test_of_a_directory_without_shards_its_files_are_named(tmp_path: Path) -> None:
    for name in ("photo.png", "photo.txt"):
        (tmp_path / name).touch()

    error = refused(tmp_path)

    assert error.found == "photo.png, photo.txt"
    assert "00000000-00000064.tar" in str(error.expected)


def test_of_a_directory_of_many_files_some_are_named_and_all_counted(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.png").touch()

    assert refused(tmp_path).found == "0.png, 1.png, 2.png, 3.png, 4.png, 5.png, … (9 files)"


def test_an_empty_directory_is_called_so(tmp_path: Path) -> None:
    assert refused(tmp_path).found == "an empty folder"


def test_of_a_pattern_without_matches_it_is_said_that_nothing_matches(tmp_path: Path) -> None:
    assert refused(f"{tmp_path}/*.tar").found == "nothing that matches"


def test_of_a_missing_directory_it_is_said_which_is_missing(tmp_path: Path) -> None:
    assert refused(f"{tmp_path}/gone/*.tar").found == f"no folder {tmp_path}/gone"


def test_of_a_place_in_the_home_directory_its_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photo.png").touch()

    assert refused("~").found == "photo.png"


def test_a_place_of_another_kind_holds_no_shards(tmp_path: Path) -> None:
    (tmp_path / "shards.zip").touch()

    assert refused(tmp_path / "shards.zip").what == "no shards found"


def test_one_empty_place_among_others_is_refused(tmp_path: Path) -> None:
    shards(tmp_path / "full", 0)

    with pytest.raises(UsageError) as error:
        find_indexes([tmp_path / "full", tmp_path / "gone"])
    assert error.value.where == tmp_path / "gone"


def test_a_missing_directory_has_nothing_published(tmp_path: Path) -> None:
    assert published(tmp_path / "gone") == []


def test_no_places_are_no_shards() -> None:
    assert find_indexes([]) == []


# URLs


def test_a_pipe_url_is_refused_and_not_run(tmp_path: Path) -> None:
    place = f"pipe:touch {tmp_path}/ran; cat x.tar"

    assert refused(place).what == "pipe: URLs are not read because they run a shell command"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("scheme", ["PIPE", "Pipe"])
def test_a_pipe_is_refused_in_whatever_letters(scheme: str) -> None:
    assert refused(f"{scheme}:true").what == "pipe: URLs are not read because they run a shell command"


@pytest.mark.parametrize("scheme", ["ftp", "FTP", "sftp", "memory", "s3a", "data", "git+ssh"])
def test_a_url_that_is_not_read_is_refused_by_its_scheme(scheme: str) -> None:
    assert refused(f"{scheme}://host/shards/00000000-00000064.tar").what == (
        f"{scheme.lower()}: URLs are not read by qie"
    )


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https", "hf", "file"])
def test_a_url_that_lost_a_slash_is_refused_instead_of_being_a_path(scheme: str) -> None:
    place = f"{scheme}:/bucket/shards"

    assert refused(place).what == "a URL lacks a slash"


def test_a_url_that_was_made_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="a URL lacks a slash"):
        find_indexes([Path("s3://bucket/shards")])


def test_a_url_in_braces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pipe: URLs are not read"):
        find_indexes([f"{{{tmp_path},pipe:true}}/*.tar"])


def test_a_url_is_refused_even_where_a_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path / "pipe:true", 0)
    monkeypatch.chdir(tmp_path)

    assert refused("pipe:true").what.startswith("pipe: URLs")


@pytest.mark.parametrize("name", ["a:b", "s3:x", "7z:x"])
@pytest.mark.parametrize("ending", ["", "/*.tar", "/00000000-00000064.tar"], ids=["directory", "glob", "tar"])
def test_a_path_with_a_colon_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ending: str) -> None:
    shards(tmp_path / name, 0)
    monkeypatch.chdir(tmp_path)

    assert found(f"{name}{ending}") == [Path(name, "00000000-00000064.json")]
    assert found(f"./{name}{ending}") == [Path(name, "00000000-00000064.json")]


@pytest.mark.parametrize("ending", ["", "/", "/*.tar", "/{00000000-00000064,00000064-00000128}.tar"])
def test_a_file_url_is_a_local_path(tmp_path: Path, ending: str) -> None:
    expected = shards(tmp_path / "a b", 0, 64)

    assert found(f"file://{tmp_path}/a%20b{ending}") == expected


def test_a_file_url_and_its_path_are_one_place(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0)

    assert found(tmp_path, f"file://{tmp_path}") == expected


# Other stores

NAMES = [shard_stem(start, start + 64) + ".json" for start in (0, 64, 128)]


@pytest.fixture
def remote(s3: S3) -> str:
    """The URL of a folder of three shards, among other files and folders."""
    others = ["config.json", "notes.txt", "00000192-00000256.tar", "deeper/00000000-00000064.json"]
    return filled(open_folder(f"{s3.url}/a/shards"), [*NAMES, *others])


def filled(folder: Folder, names: list[str]) -> str:
    for name in names:
        folder.write(name, b"")
    return folder.url


def urls(*places: str | Path) -> list[str]:
    return [str(file) for file in find_indexes(places)]


@pytest.mark.parametrize(
    ("ending", "rows"),
    [
        ("", [0, 1, 2]),
        ("/", [0, 1, 2]),
        ("/*.tar", [0, 1, 2]),
        ("/*.json", [0, 1, 2]),
        ("/0000006?-*.tar", [1]),
        ("/*[48]-00000128.tar", [1]),
        ("/00000064-00000128.tar", [1]),
        ("/00000064-00000128.json", [1]),
        ("/{00000128..00000129}-*.tar", [2]),
        ("/{00000128-00000192,00000000-00000064}.tar", [2, 0]),
    ],
)
def test_shards_in_a_bucket_are_found(remote: str, ending: str, rows: list[int]) -> None:
    assert urls(f"{remote}{ending}") == [f"{remote}/{NAMES[row]}" for row in rows]


def test_a_shard_in_a_bucket_may_have_any_name(s3: S3) -> None:
    url = filled(open_folder(f"{s3.url}/renamed"), ["photos 1.json", "photos 1.tar", "config.json", "raw.tar"])

    assert urls(url) == urls(f"{url}/*.tar") == urls(f"{url}/photos 1.tar") == [f"{url}/photos 1.json"]


def test_braces_may_name_folders_of_a_bucket(s3: S3) -> None:
    one, two = (filled(open_folder(f"{s3.url}/{name}"), NAMES[:1]) for name in ("one", "two"))

    assert urls(f"{s3.url}/{{two,one}}") == [f"{two}/{NAMES[0]}", f"{one}/{NAMES[0]}"]
    assert urls(f"{s3.url}/{{one,two}}/*.tar") == [f"{one}/{NAMES[0]}", f"{two}/{NAMES[0]}"]


def test_a_whole_bucket_may_be_a_folder_of_shards(s3: S3) -> None:
    filled(open_folder(s3.url), NAMES)

    assert urls(s3.url) == urls(f"{s3.url}/") == urls(f"{s3.url}/*.tar") == [f"{s3.url}/{name}" for name in NAMES]


def test_shards_of_a_bucket_come_by_row_not_by_name(s3: S3) -> None:
    names = [shard_stem(start, start + 64) + ".json" for start in (64, 99_999_936, 100_000_000, 1_000_000_000)]
    url = filled(open_folder(f"{s3.url}/shards"), names)

    assert urls(url) == urls(f"{url}/*.tar") == [f"{url}/{name}" for name in names]


def test_a_shard_in_a_bucket_that_is_named_twice_counts_once(remote: str) -> None:
    places = [f"{remote}/{NAMES[1]}", remote, f"{remote}/", f"{remote}/*.tar", remote.replace("s3:", "S3:")]

    assert urls(*places) == [f"{remote}/{NAMES[row]}" for row in (1, 0, 2)]


def test_buckets_and_disks_keep_their_order(remote: str, tmp_path: Path) -> None:
    (local,) = shards(tmp_path, 0)

    assert urls(f"{remote}/{NAMES[2]}", tmp_path, f"{remote}/{NAMES[0]}") == [
        f"{remote}/{NAMES[2]}",
        str(local),
        f"{remote}/{NAMES[0]}",
    ]


@pytest.mark.parametrize("middle", ["a*", "?", "[ab]", "*"])
@pytest.mark.parametrize("last", ["*.tar", "00000000-00000064.tar", "00000000-00000064.json"])
def test_a_glob_in_the_middle_of_a_url_is_refused(s3: S3, middle: str, last: str) -> None:
    place = f"{s3.url}/{middle}/shards/{last}"

    assert refused(place).what == "a glob in a URL may stand in a shard's name only"


@pytest.mark.parametrize("ending", ["/gone", "/a/shards/deeper/*.tar", "/a/*.tar"])
def test_of_a_bucket_without_such_shards_it_is_said_that_nothing_matches(s3: S3, remote: str, ending: str) -> None:
    open_folder(f"{s3.url}/a/shards/deeper").delete(NAMES[0])

    error = refused(f"{s3.url}{ending}")

    assert (error.what, error.found) == ("no shards found", "nothing that matches")


def test_a_bucket_that_is_not_there_is_an_error_of_the_store(s3: S3) -> None:
    with pytest.raises(StoreError, match="there is no such bucket"):
        find_indexes([f"{s3.url}-of-nobody/shards"])


# What is published, and its rows


def test_what_is_published_is_asked_of_a_folder_a_path_or_a_url(tmp_path: Path, remote: str) -> None:
    expected = shards(tmp_path, 0, 64)

    for place in (tmp_path, str(tmp_path), f"file://{tmp_path}", LocalFolder(tmp_path)):
        assert [file.path for file in published(place)] == expected
    for place in (remote, open_folder(remote)):
        assert [file.name for file in published(place)] == NAMES
        assert [file.path for file in published(place)] == [None] * 3


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (7, 7), (99_999_999, 100_000_063)])
def test_a_published_name_gives_its_rows(tmp_path: Path, start: int, stop: int) -> None:
    (tmp_path / f"{shard_stem(start, stop)}.json").touch()

    assert [rows_of(file) for file in published(tmp_path)] == [(start, stop)]

"""Finding shards: directories, globs and braces; nothing else, and never a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from qie.errors import UsageError
from qie.shards.index import shard_stem
from qie.shards.storage import find_indexes, published, refuse_url


def shards(folder: Path, *starts: int, size: int = 64) -> list[Path]:
    """Empty tars with empty indexes; to be found they need no content."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{shard_stem(start, start + size)}.json" for start in starts]
    for path in paths:
        path.touch()
        path.with_suffix(".tar").touch()
    return paths


def refused(place: str | Path) -> UsageError:
    with pytest.raises(UsageError) as error:
        find_indexes([place])
    assert error.value.where == place
    return error.value


def test_a_directory_stands_for_all_its_shards(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64, 128)

    assert find_indexes([tmp_path]) == expected
    assert find_indexes([str(tmp_path)]) == expected
    assert find_indexes([f"{tmp_path}/"]) == expected
    assert published(tmp_path) == expected


def test_only_shards_of_a_directory_count(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0)
    for name in ("config.json", "notes.txt", "0-64.json", "00000064-00000128.json.partial", "00000064-00000128.tar"):
        (tmp_path / name).touch()
    shards(tmp_path / "deeper", 64)

    assert find_indexes([tmp_path]) == expected


def test_a_tar_stands_for_its_shard(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64)

    assert find_indexes([tmp_path / "00000064-00000128.tar"]) == expected[1:]


def test_an_index_stands_for_its_shard(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64)

    assert find_indexes([tmp_path / "00000064-00000128.json"]) == expected[1:]


def test_a_glob_stands_for_what_it_matches(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64, 128)

    assert find_indexes([f"{tmp_path}/*.tar"]) == expected
    assert find_indexes([f"{tmp_path}/*.json"]) == expected
    assert find_indexes([f"{tmp_path}/0000006?-*.tar"]) == expected[1:2]
    assert find_indexes([f"{tmp_path}/*[48]-*.tar"]) == expected[1:]


def test_a_glob_may_span_directories(tmp_path: Path) -> None:
    expected = shards(tmp_path / "one", 0) + shards(tmp_path / "two", 0)

    assert find_indexes([f"{tmp_path}/*/*.tar"]) == expected


def test_braces_stand_for_each_of_their_values(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 1, 2, size=1)

    assert find_indexes([f"{tmp_path}/{{00000000..00000001}}-*.tar"]) == expected[:2]
    assert find_indexes([f"{tmp_path}/{{00000000-00000001,00000002-00000003}}.tar"]) == [expected[0], expected[2]]


def test_braces_may_name_directories(tmp_path: Path) -> None:
    expected = shards(tmp_path / "one", 0) + shards(tmp_path / "two", 64)

    assert find_indexes([f"{tmp_path}/{{one,two}}"]) == expected


def test_a_brace_without_its_partner_is_a_usage_error(tmp_path: Path) -> None:
    shards(tmp_path, 0)

    refused(f"{tmp_path}/{{0000.tar")


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = shards(tmp_path / "shards", 0)

    assert find_indexes(["~/shards"]) == expected
    assert find_indexes(["~/shards/*.tar"]) == expected


def test_a_shard_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    expected = shards(tmp_path, 0, 64)

    assert find_indexes([tmp_path, f"{tmp_path}/*.tar", expected[0]]) == expected


def test_places_keep_their_order(tmp_path: Path) -> None:
    later, earlier = shards(tmp_path / "later", 64), shards(tmp_path / "earlier", 0)

    assert find_indexes([tmp_path / "later", tmp_path / "earlier"]) == later + earlier


@pytest.mark.parametrize("place", ["", "/*.tar", "/*.json"], ids=["directory", "tars", "indexes"])
def test_shards_come_by_row_not_by_name(tmp_path: Path, place: str) -> None:
    """A hundred million rows take more than eight digits."""
    expected = shards(tmp_path, 64, 99_999_936, 100_000_000, 1_000_000_000)

    assert find_indexes([f"{tmp_path}{place}"]) == expected


@pytest.mark.parametrize("place", ["", "/*.tar", "/00000000-00000064.tar"], ids=["directory", "glob", "tar"])
def test_a_tar_without_an_index_does_not_exist(tmp_path: Path, place: str) -> None:
    (tmp_path / "00000000-00000064.tar").touch()

    assert refused(f"{tmp_path}{place}").what == "no shards found"
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


@pytest.mark.parametrize("scheme", ["s3", "gs", "https", "file", "hf", "PIPE", "Pipe"])
def test_a_url_is_refused_by_its_scheme(scheme: str) -> None:
    assert refused(f"{scheme}://bucket/shards/00000000-00000064.tar").what.startswith(f"{scheme}: URLs are not read")


def test_a_url_in_braces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pipe: URLs are not read"):
        find_indexes([f"{{{tmp_path},pipe:true}}/*.tar"])


def test_a_url_is_refused_even_where_a_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path / "pipe:true", 0)
    monkeypatch.chdir(tmp_path)

    assert refused("pipe:true").what.startswith("pipe: URLs")


@pytest.mark.parametrize("place", ["shards", "/data/a:b/shards", "./s3:x", "", "7z:x"])
def test_a_path_is_no_url(place: str) -> None:
    refuse_url(place)

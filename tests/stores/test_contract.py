"""What every folder promises, whatever store it is in."""

from __future__ import annotations

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qie.errors import UsageError
from qie.stores import Folder, LocalFolder, MissingError, StoreError, TooLargeError

CLIMBING = ["", ".", "..", "../a", "a/../b", "a/..", "/a", "a//b", "a/", "./a", "a\\b", "a\0b", "\\a"]
ODD = ["a b.tar", "a%20b.tar", "ü[1]{2}*?.tar", "a+b&c=d;e,f.tar", "~x", "#1.json", ".hidden", "00000000-00000064.tar"]


def test_what_was_written_last_is_read_and_an_empty_file_is_a_file(folder: Folder, tmp_path: Path) -> None:
    folder.write("a", b"a long content")
    assert (folder.read("a"), folder.size("a"), type(folder.read("a"))) == (b"a long content", 14, bytes)
    folder.write("a", b"short")
    assert (folder.read("a"), folder.size("a"), folder.listing()) == (b"short", 5, {"a": 5})

    folder.write("a", b"")
    (tmp_path / "empty").touch()
    folder.upload("b", tmp_path / "empty")
    assert folder.read("a") == folder.read("b", 0, 0) == b""
    assert folder.listing() == {"a": 0, "b": 0}


def test_ranges_are_exact(folder: Folder) -> None:
    content = random.Random(0).randbytes(1000)
    folder.write("a", content)

    for start, stop in [(0, 1), (0, 1000), (999, 1000), (17, 500), (0, None), (17, None), (999, None)]:
        assert folder.read("a", start, stop) == content[start:stop]
    for start, stop in [(0, 0), (500, 500), (1000, 1000), (1000, None)]:
        assert folder.read("a", start, stop) == b""


def test_a_range_beyond_the_end_or_that_is_none_is_an_error_and_never_fewer_bytes(folder: Folder) -> None:
    folder.write("a", b"0123456789")
    for bounds in [(0, 11), (9, 11), (10, 11), (11, 11), (11, None), (100, 200), (100, None)]:
        with pytest.raises(StoreError) as error:
            folder.read("a", *bounds)
        assert not isinstance(error.value, MissingError)
    for bounds in [(-1, 5), (5, 4), (-3, None)]:
        with pytest.raises(UsageError):
            folder.read("a", *bounds)


def test_a_file_larger_than_is_wanted_whole_is_refused(folder: Folder) -> None:
    folder.write("a", b"0123456789")
    assert folder.read("a", most=10) == b"0123456789" and folder.read("a", 2, 8, most=1) == b"234567"
    with pytest.raises(TooLargeError):
        folder.read("a", most=9)


def test_everything_in_a_folder_is_named_in_order(folder: Folder) -> None:
    for name in ["b", "a/c", ".hidden"]:
        folder.write(name, b"x")
    assert folder.names() == [".hidden", "a", "b"] and folder.child("none").names() == []


def test_a_missing_file_is_said_to_be_missing(folder: Folder) -> None:
    folder.write("other", b"x")
    for bounds in [(0, None), (0, 10), (5, None), (0, 0)]:
        with pytest.raises(MissingError) as error:
            folder.read("nothing", *bounds)
        assert "nothing" in str(error.value)
    assert folder.size("nothing") is folder.child("no").size("nothing") is None


def test_a_folder_is_no_file(folder: Folder) -> None:
    folder.write("sub/a", b"x")

    assert folder.size("sub") is None
    with pytest.raises(MissingError):
        folder.read("sub")


def test_listing_knows_files_and_folders_of_this_folder_only(folder: Folder) -> None:
    for name in ["b", "a", "c/d", "c/e/f", "g/h", "ab"]:
        folder.write(name, name.encode())

    assert folder.listing() == {"a": 1, "ab": 2, "b": 1}
    assert list(folder.listing()) == ["a", "ab", "b"]
    assert folder.folders() == ["c", "g"]
    assert folder.child("c").listing() == {"d": 3}
    assert folder.child("c").folders() == ["e"]
    assert folder.child("c").child("e").read("f") == folder.child("c/e").read("f") == b"c/e/f"


def test_a_folder_that_is_not_there_is_empty(folder: Folder) -> None:
    assert (folder.listing(), folder.folders()) == ({}, [])
    assert (folder.child("a").listing(), folder.child("a").folders()) == ({}, [])


def test_create_writes_only_what_is_not_there(folder: Folder) -> None:
    assert folder.create("a", b"first") is True
    assert folder.create("a", b"second") is False
    assert folder.create("a", b"first") is False
    assert folder.read("a") == b"first"
    assert folder.listing() == {"a": 5}


def test_deleted_is_gone_and_deleting_nothing_is_no_error(folder: Folder) -> None:
    folder.write("a", b"x")
    folder.write("b", b"y")
    folder.delete("a")
    folder.delete("a")
    folder.child("none").delete("a")

    assert (folder.size("a"), folder.listing()) == (None, {"b": 1})
    assert folder.create("a", b"again")


def test_a_large_file_is_uploaded_whole(folder: Folder, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(20 * 2**20 + 7)
    (tmp_path / "large").write_bytes(content)
    folder.upload("sub/large.tar", tmp_path / "large")

    assert folder.size("sub/large.tar") == len(content)
    assert folder.read("sub/large.tar") == content
    assert folder.read("sub/large.tar", 8 * 2**20 - 5, 8 * 2**20 + 5) == content[8 * 2**20 - 5 : 8 * 2**20 + 5]


def test_what_cannot_be_uploaded_leaves_nothing(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(StoreError) as error:
        folder.upload("a", tmp_path / "nothing")
    assert str(tmp_path / "nothing") in str(error.value)
    assert folder.listing() == {}


@pytest.mark.parametrize("name", CLIMBING)
def test_no_name_climbs_out(folder: Folder, name: str, tmp_path: Path) -> None:
    if isinstance(folder, LocalFolder) and "\\" in name:
        pytest.skip("a character like others on this disk")
    (tmp_path / "source").write_bytes(b"x")
    for act in [
        lambda: folder.path(name),
        lambda: folder.child(name),
        lambda: folder.size(name),
        lambda: folder.read(name),
        lambda: folder.write(name, b""),
        lambda: folder.upload(name, tmp_path / "source"),
        lambda: folder.create(name, b""),
        lambda: folder.delete(name),
    ]:
        with pytest.raises(UsageError):
            act()


@pytest.mark.parametrize("name", ODD)
def test_odd_names_mean_themselves(folder: Folder, name: str) -> None:
    folder.write(name, b"x")
    folder.child(f"in {name}").write(name, b"yy")

    assert folder.listing() == {name: 1}
    assert folder.folders() == [f"in {name}"]
    assert folder.child(f"in {name}").listing() == {name: 2}
    assert folder.read(f"in {name}/{name}") == b"yy"
    folder.delete(name)
    assert folder.listing() == {}


def test_a_folder_travels_to_another_process(folder: Folder) -> None:
    folder.write("a", b"x")  # used before: what it has opened stays behind
    there = pickle.loads(pickle.dumps(folder.child("sub")))
    there.write("b", b"yy")

    assert (there.url, str(there)) == (folder.child("sub").url, str(folder.child("sub")))
    assert folder.child("sub").read("b") == b"yy"


def test_many_threads_share_a_folder(folder: Folder) -> None:
    contents = {f"{number:03}": random.Random(number).randbytes(1000 + number) for number in range(40)}

    def write_and_read(name: str) -> bytes:
        folder.write(name, contents[name])
        return folder.read(name, 10)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(write_and_read, contents)) == [content[10:] for content in contents.values()]
    assert folder.listing() == {name: len(content) for name, content in contents.items()}


def test_its_text_is_its_url(folder: Folder) -> None:
    assert str(folder) == folder.url
    assert folder.child("a/b").url == f"{folder.url}/a/b"

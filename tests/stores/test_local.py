"""Local folders: whole files or none."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from qie.stores import MissingError, StoreError, TooLargeError, open_folder
from qie.stores.disk import LocalFolder

CONTENT = b"x" * 50_000


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A real limit of the system's: a longer file fails while it is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def writers(folder: LocalFolder, source: Path):
    return {
        "write": lambda: folder.write("a", CONTENT),
        "upload": lambda: folder.upload("a", source),
        "create": lambda: folder.create("a", CONTENT),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("how", ["write", "upload", "create"])
def test_a_write_that_fails_leaves_nothing_and_says_why(tmp_path: Path, source: Path, how: str) -> None:
    folder = open_folder(tmp_path / "folder")
    with files_up_to(10_000), pytest.raises(StoreError) as error:
        writers(folder, source)[how]()

    assert error.value.found == "File too large (EFBIG)"
    assert error.value.where == tmp_path / "folder" / "a"
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("how", ["write", "upload", "create"])
def test_a_full_disk_is_said_to_be_full(tmp_path: Path, source: Path, how: str, monkeypatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("qie.stores.disk.os.fsync", full)
    with pytest.raises(StoreError) as error:
        writers(open_folder(tmp_path / "folder"), source)[how]()

    assert error.value.found == "No space left on device (ENOSPC)"
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_write_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.write("a", b"old")
    with files_up_to(10_000), pytest.raises(StoreError):
        folder.write("a", CONTENT)

    assert folder.read("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("how", ["write", "upload", "create"])
def test_a_file_gets_its_name_after_it_is_synced_and_its_folder_is_synced_last(
    tmp_path: Path, source: Path, how: str, monkeypatch
) -> None:
    folder, events = open_folder(tmp_path / "new" / "folder"), []
    fsync = os.fsync

    def watched(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append((path.relative_to(tmp_path).as_posix(), (tmp_path / "new/folder/a").exists()))
        fsync(handle)

    monkeypatch.setattr("qie.stores.disk.os.fsync", watched)
    writers(folder, source)[how]()

    assert events == [(".", False), ("new", False), ("new/folder/a.partial", False), ("new/folder", True)]
    assert folder.read("a") == CONTENT


def test_what_a_killed_run_left_is_hidden_and_taken_over(tmp_path: Path) -> None:
    (tmp_path / "a.partial").write_bytes(b"of a run that was killed, and longer than what comes")
    (tmp_path / "b.partial").write_bytes(b"another")
    folder = open_folder(tmp_path)

    assert folder.listing() == {}
    folder.write("a", b"whole")
    assert folder.create("b", b"too")
    assert folder.listing() == {"a": 5, "b": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_of_many_who_create_one_succeeds(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for name in "abcdefgh":
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda who, name=name: folder.create(name, bytes([who]) * 1000), range(8)))
        assert won.count(True) == 1
        assert folder.read(name) == bytes([won.index(True)]) * 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == list("abcdefgh")


def test_of_many_who_write_at_once_one_is_last_and_whole(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda who: folder.write("a", bytes([who]) * 100_000), range(40)))

    content = folder.read("a")
    assert content == content[:1] * 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_comes_in_pieces_is_read_whole(tmp_path: Path, monkeypatch) -> None:
    pread = os.pread  # of more than 2 GiB it gives the first 2
    monkeypatch.setattr("qie.stores.disk.os.pread", lambda file, size, start: pread(file, min(size, 7), start))
    folder = open_folder(tmp_path)
    folder.write("a", bytes(range(100)))

    assert folder.read("a") == bytes(range(100))
    assert folder.read("a", 3, 80) == bytes(range(3, 80))


def test_a_disk_without_links_can_create_too(tmp_path: Path, monkeypatch) -> None:
    def unsupported(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", unsupported)
    folder = open_folder(tmp_path)

    assert folder.create("a", b"first")
    assert not folder.create("a", b"second")
    assert folder.read("a") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_in_the_place_of_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = open_folder(tmp_path / "file")
    acts = [folder.listing, folder.folders, lambda: folder.size("a"), lambda: folder.read("a")]
    acts += [lambda: folder.write("a", b""), lambda: folder.create("a", b""), lambda: folder.delete("a")]
    for act in acts:
        with pytest.raises(StoreError) as error:
            act()
        assert str(tmp_path / "file") in str(error.value.where)
        assert "ENOTDIR" in str(error.value.found) or "EEXIST" in str(error.value.found)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_a_forbidden_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0)
    with pytest.raises(StoreError) as error:
        open_folder(tmp_path / "mine").listing()
    assert (error.value.where, error.value.found) == (tmp_path / "mine", "Permission denied (EACCES)")


def test_pipes_devices_and_links_that_lead_nowhere_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    (tmp_path / "through a file").symlink_to(tmp_path / "real" / "x")
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = open_folder(tmp_path)

    assert folder.listing() == {"link": 1, "real": 1} and folder.stamps().keys() == {"link", "real"}
    assert folder.folders() == []
    for name in ("pipe", "itself"):
        assert folder.size(name) is None
        with pytest.raises(MissingError):
            folder.read(name)


def test_a_file_that_is_too_large_to_be_read_whole_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(40 * 2**30)  # sparse: it takes no room
    folder = open_folder(tmp_path)
    with pytest.raises(TooLargeError, match="too large"):
        folder.read("huge")
    assert folder.read("huge", 39 * 2**30, 39 * 2**30 + 4) == bytes(4)

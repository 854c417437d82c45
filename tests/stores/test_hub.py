"""Folders of the Hugging Face Hub, by way of its own file system and a hub in this process."""

from __future__ import annotations

import pytest

from qie.stores import MissingError, StoreError, open_folder
from tests.stores.fake_hub import FakeHub


def test_a_url_may_name_models_and_revisions() -> None:
    assert open_folder("hf://models/owner/name/a").root == "owner/name/a"
    assert open_folder("hf://owner/name/a/").root == "owner/name/a"
    assert open_folder("hf://datasets/owner/name@v1.0/a/b").root == "datasets/owner/name@v1.0/a/b"
    assert open_folder("hf://datasets/owner/name").child("a").root == "datasets/owner/name/a"


def test_the_folders_of_a_whole_repository_are_seen(hub: FakeHub) -> None:
    hub.files = {"a": b"1", "b/c": b"22", "b/d/e": b"333"}
    folder = open_folder(hub.folder_url)

    assert (folder.listing(), folder.folders()) == ({"a": 1}, ["b"])
    assert (folder.child("b").listing(), folder.child("b").folders()) == ({"c": 2}, ["d"])


def test_what_others_write_meanwhile_is_seen(hub: FakeHub) -> None:
    hub.files = {"a": b"old"}
    folder = open_folder(hub.folder_url)
    assert folder.read("a", 1, 3) == b"ld"
    hub.files = {"a": b"new and longer", "b": b"new"}

    assert folder.read("a", 4, 7) == b"and"
    assert folder.read("b", 1, 3) == b"ew"
    assert folder.read("b") == b"new"
    assert folder.listing() == {"a": 14, "b": 3}
    assert (folder.size("a"), folder.size("b")) == (14, 3)


def test_many_ranges_of_a_file_ask_for_its_size_once(hub: FakeHub) -> None:
    hub.files = {"a": bytes(1000)}
    folder = open_folder(hub.folder_url)
    for start in range(0, 1000, 100):
        folder.read("a", start, start + 100)

    assert sum("/tree/" in request for request in hub.requests) == 1
    assert sum("/resolve/" in request for request in hub.requests) == 10


def test_a_server_that_ignores_ranges_is_an_error_and_never_wrong_bytes(hub: FakeHub) -> None:
    hub.files, hub.ranges = {"a": b"0123456789"}, False
    with pytest.raises(StoreError, match="more bytes"):
        open_folder(hub.folder_url).read("a", 2, 5)


def test_a_missing_repository_is_no_empty_folder(hub: FakeHub) -> None:
    folder = open_folder("hf://datasets/owner/another/folder")
    for act in [
        folder.listing,
        lambda: folder.read("a"),
        lambda: folder.read("a", 1, 2),
        lambda: folder.write("a", b""),
    ]:
        with pytest.raises(StoreError) as error:
            act()
        assert not isinstance(error.value, MissingError)
        assert "no such repository" in error.value.what and "HF_TOKEN" in (error.value.hint or "")
        assert "\n" not in str(error.value.found) and len(str(error.value.found)) <= 300


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_hub_is_asked_again(hub: FakeHub, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.stores.retry.FIRST_PAUSE_S", 0.01)
    faults = [status]
    hub.fault = lambda path: faults.pop() if faults and path.endswith("/commit/main") else None
    folder = open_folder(hub.folder_url)
    folder.write("a", b"x")

    assert folder.read("a") == b"x" and faults == []
    assert sum("/commit/" in request for request in hub.requests) == 2


def test_a_hub_that_keeps_failing_is_one_error(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QIE_STORE_RETRY_S", "0.3")
    hub.fault = lambda path: 500
    with pytest.raises(StoreError) as error:
        open_folder(hub.folder_url).listing()
    assert "500" in str(error.value.found) and "\n" not in str(error.value.found)


def test_no_access_is_said_at_once(hub: FakeHub) -> None:
    hub.fault = lambda path: 403 if "/commit/" in path else None
    with pytest.raises(StoreError, match="no access"):
        open_folder(hub.folder_url).write("a", b"x")
    assert sum("/commit/" in request for request in hub.requests) == 1


def test_offline_is_said_at_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError) as error:
        open_folder(hub.folder_url).listing()
    assert "offline" in str(error.value.found).lower()

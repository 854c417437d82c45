"""Whatever happens on the way: the same bytes, or one error."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qie.stores import Folder, StoreError, open_folder
from tests.faulty_proxy import FaultyProxy, always, every, these
from tests.s3 import S3

CONTENT = random.Random(0).randbytes(300_000)

# What fails, and in answers to which methods; the answer to a HEAD has no body that could break off.
ACTS = {
    "read": lambda folder, path: folder.read("old") == CONTENT,
    "range": lambda folder, path: folder.read("old", 11, 200_000) == CONTENT[11:200_000],
    "tail": lambda folder, path: folder.read("old", 11) == CONTENT[11:],
    "size": lambda folder, path: folder.size("old") == len(CONTENT),
    "listing": lambda folder, path: folder.listing() == {"old": len(CONTENT)},
    "folders": lambda folder, path: folder.folders() == [],
    "write": lambda folder, path: folder.write("new", CONTENT) is None and folder.read("new") == CONTENT,
    "create": lambda folder, path: folder.create("new", CONTENT) and folder.read("new") == CONTENT,
    "create again": lambda folder, path: not folder.create("old", b"other") and folder.read("old") == CONTENT,
    "upload": lambda folder, path: folder.upload("new", path) is None and folder.read("new") == path.read_bytes(),
    "delete": lambda folder, path: folder.delete("old") is None and folder.size("old") is None,
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ["retry", "connection"]:
        monkeypatch.setattr(f"qie.stores.{module}.FIRST_PAUSE_S", 0.01)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(random.Random(1).randbytes(12 * 2**20))
    return path


def filled(s3: S3) -> Folder:
    folder = open_folder(f"{s3.url}/data")
    folder.write("old", CONTENT)
    return folder


@pytest.mark.parametrize("fault", ["500", "503", "reset", "lost", "lost_500", "reset_body", "cut", "slow"])
@pytest.mark.parametrize("act", ACTS)
def test_after_a_fault_all_is_as_if_there_had_been_none(s3: S3, large: Path, act: str, fault: str) -> None:
    filled(s3)
    with FaultyProxy(s3.endpoint, these([fault])) as proxy:
        s3.go_through(proxy.url)
        assert ACTS[act](open_folder(f"{s3.url}/data"), large)
        if fault not in ("reset_body", "cut") or act in ("read", "range", "tail", "listing", "folders"):
            assert proxy.count(fault) == 1
        assert len(proxy.requests) > proxy.count() - proxy.count("slow")


@pytest.mark.parametrize("seed", range(2))
def test_on_a_bad_network_many_threads_get_the_same_bytes(s3: S3, large: Path, seed: int) -> None:
    faults = ["500", "503", "reset", "reset_body", "cut", "slow", "lost", "lost_500"]
    contents = {f"{number:02}": random.Random(number).randbytes(20_000 + number) for number in range(16)}

    def use(folder: Folder, name: str) -> bool:
        folder.write(name, contents[name])
        created = folder.create(f"claims/{name}", name.encode())
        folder.write(f"gone/{name}", b"x")
        folder.delete(f"gone/{name}")
        return created and folder.read(name, 5, 15_000) == contents[name][5:15_000] and folder.size(name) is not None

    with FaultyProxy(s3.endpoint, every(4, faults, seed=seed), delay_s=0.01) as proxy:
        s3.go_through(proxy.url)
        folder = open_folder(f"{s3.url}/data")
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda name: use(folder, name), contents))
        folder.upload("large", large)
        assert folder.read("large") == large.read_bytes()
        assert list(folder.listing()) == [*contents, "large"]
        assert folder.child("claims").listing() == dict.fromkeys(contents, 2)
        assert folder.child("gone").listing() == {}
        assert proxy.count() > 20


@pytest.mark.parametrize("fault", ["lost", "lost_500"])
def test_a_created_file_whose_answer_was_lost_is_ones_own(s3: S3, fault: str) -> None:
    with FaultyProxy(s3.endpoint, these([fault], ["PUT"])) as proxy:
        s3.go_through(proxy.url)
        folder = open_folder(s3.url)
        assert folder.create("a", b"mine")
        assert proxy.count(fault) == 1


def test_a_file_that_another_created_meanwhile_is_not_ones_own(s3: S3) -> None:
    direct = open_folder(s3.url)
    assert direct.listing() == {}  # opened now: not by way of the proxy

    def schedule(number: int, method: str, path: str) -> str | None:
        if number == 1:
            direct.write("a", b"theirs")
            return "reset"
        return None

    with FaultyProxy(s3.endpoint, schedule) as proxy:
        s3.go_through(proxy.url)
        assert open_folder(s3.url).create("a", b"mine") is False
        assert proxy.count("reset") == 1
    assert direct.read("a") == b"theirs"


def test_an_upload_whose_completion_was_lost_is_completed(s3: S3, large: Path) -> None:
    with FaultyProxy(s3.endpoint, these([None, "lost"], ["POST"])) as proxy:
        s3.go_through(proxy.url)
        folder = open_folder(s3.url)
        folder.upload("large", large)
        assert folder.read("large") == large.read_bytes()
        assert proxy.count("lost", "POST") == 1


@pytest.mark.parametrize("fault", ["500", "503", "reset", "cut", "silent"])
def test_a_store_that_keeps_failing_is_one_error_within_the_bound(s3: S3, fault: str, monkeypatch) -> None:
    filled(s3)
    monkeypatch.setenv("QIE_STORE_RETRY_S", "0.3")
    monkeypatch.setenv("QIE_STORE_TIMEOUT_S", "0.3")
    with FaultyProxy(s3.endpoint, always(fault)) as proxy, socket.create_server(("127.0.0.1", 0)) as silent:
        s3.go_through(f"http://127.0.0.1:{silent.getsockname()[1]}" if fault == "silent" else proxy.url)
        folder = open_folder(f"{s3.url}/data")
        acts = [folder.listing]
        if fault != "cut":  # each answer brings half of the rest: a file does arrive in the end
            acts += [lambda: folder.read("old"), lambda: folder.write("a", b"x"), lambda: folder.create("b", b"x")]
            acts += [lambda: folder.size("old"), lambda: folder.delete("old")]
        for act in acts:
            with pytest.raises(StoreError) as error:
                act()
            assert "\n" not in str(error.value.found) and len(str(error.value.found)) <= 300
            assert str(error.value.where).startswith(s3.url)
            assert error.value.hint


def test_who_waits_for_a_store_hears_ctrl_c(s3: S3, monkeypatch) -> None:
    monkeypatch.setenv("QIE_STORE_RETRY_S", "0.1")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, heard = signal.signal(signal.SIGUSR1, interrupt), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def signal_whoever_comes() -> None:
            with silent.accept()[0] as connection:
                connection.recv(1)
                os.kill(os.getpid(), signal.SIGUSR1)
                heard.wait()

        s3.go_through(f"http://127.0.0.1:{silent.getsockname()[1]}")
        waiter = threading.Thread(target=signal_whoever_comes, daemon=True)
        waiter.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                open_folder(s3.url).listing()
        finally:
            heard.set()
            waiter.join()
            signal.signal(signal.SIGUSR1, before)
    for left in [thread for thread in threading.enumerate() if thread.name == "qie-store"]:
        left.join()  # Ctrl-C left it behind, and its connection is closed now


def test_a_refused_connection_is_explained_in_the_systems_words(s3: S3, monkeypatch) -> None:
    monkeypatch.setenv("QIE_STORE_RETRY_S", "0.3")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    s3.go_through(f"http://127.0.0.1:{port}")
    with pytest.raises(StoreError) as error:
        open_folder(s3.url).listing()
    assert "Connection refused" in str(error.value.found)

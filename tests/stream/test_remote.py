"""Shards in a bucket and on a web server: the batches of the local ones, bit for bit, on a bad day, too."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from qie.data.opening import open_stream
from qie.errors import QieError
from qie.shards.cache import ShardCache
from qie.shards.compact_index import COMPACT_NAME
from qie.shards.discovery import find_indexes
from qie.shards.excluded import EXCLUDED_NAME
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stats import summarise
from qie.stores import open_folder
from qie.types import Sample
from tests.faulty_proxy import FaultyProxy, every
from tests.s3 import S3
from tests.stream.checks import Facts, all_facts, write

ROWS = 29
SETTINGS = {"batch_size": 4, "seed": 3}
STEMS = [f"{start:08d}-{min(start + 5, ROWS):08d}" for start in range(0, ROWS, 5)]
BRACES = f"{{{','.join(STEMS)}}}.tar"
READING_FAULTS = ["500", "503", "reset", "reset_body", "cut", "slow"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("remote") / "shards", ROWS)


@pytest.fixture(scope="module")
def expected(shards: Path) -> list[Facts]:
    """Two epochs and a bit, from the local disk."""
    return all_facts(open_stream(shards, **SETTINGS).forever(), 20)


@pytest.fixture(params=["without", "with", "too small"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> ShardCache | None:
    budgets = {"without": None, "with": 2**30, "too small": 60_000}
    budget = budgets[request.param]
    return None if budget is None else ShardCache(tmp_path / "cache", budget)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("retry", "connection"):
        monkeypatch.setattr(f"qie.stores.{module}.FIRST_PAUSE_S", 0.01)


def test_the_samples_of_a_batch_are_asked_of_a_store_at_once_and_come_in_their_order(
    shards: Path, expected: list[Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the four is given before all have been asked for; read from a disk, they come one by one."""
    fetch, together = ShardSet.fetch, threading.Barrier(4)

    def meeting(self: ShardSet, position: int) -> Sample:
        together.wait(timeout=60)
        return fetch(self, position)

    assert not open_stream(shards, **SETTINGS).samples.distant
    monkeypatch.setattr(ShardSet, "distant", True)
    monkeypatch.setattr(ShardSet, "fetch", meeting)
    with open_stream(shards, prefetch=0, threads=1, **SETTINGS) as stream:
        assert all_facts(stream, 1) == expected[:1]


# S3


@pytest.fixture
def bucket(s3: S3, shards: Path) -> str:
    folder = open_folder(f"{s3.url}/shards")
    for path in shards.iterdir():
        folder.upload(path.name, path)
    return folder.url


def test_a_bucket_gives_the_batches_of_a_disk(bucket: str, expected: list[Facts], cache: ShardCache | None) -> None:
    assert all_facts(open_stream(bucket, cache=cache, **SETTINGS).forever(), len(expected)) == expected


@pytest.mark.parametrize("seed", range(2))
def test_with_a_fault_at_every_fourth_request_the_batches_are_the_same(
    s3: S3, bucket: str, expected: list[Facts], cache: ShardCache | None, seed: int
) -> None:
    with FaultyProxy(s3.endpoint, every(4, READING_FAULTS, seed=seed), delay_s=0.01) as proxy:
        s3.go_through(proxy.url)
        assert all_facts(open_stream(bucket, cache=cache, **SETTINGS).forever(), len(expected)) == expected
    assert len(proxy.counts()) > 2, "too few faults to tell anything"


def test_a_second_epoch_from_a_cache_asks_for_nothing(s3: S3, bucket: str, tmp_path: Path) -> None:
    with FaultyProxy(s3.endpoint, lambda number, method, path: None) as proxy:
        s3.go_through(proxy.url)
        stream = open_stream(bucket, cache=ShardCache(tmp_path / "cache", 2**30), prefetch=0, **SETTINGS)
        all_facts(stream)
        before = len(proxy.requests)
        all_facts(stream)
    assert len(proxy.requests) == before > 0


def test_what_is_damaged_in_the_bucket_is_named_as_what_it_is_there(bucket: str, cache: ShardCache | None) -> None:
    folder, name = open_folder(bucket), f"{STEMS[2]}.tar"
    content = bytearray(folder.read(name))
    content[2000] ^= 1
    folder.write(name, bytes(content))

    with pytest.raises(QieError) as refused:
        all_facts(open_stream(bucket, cache=cache, **SETTINGS))
    assert f"{bucket}/{name}" in str(refused.value)


# HTTP


@dataclass
class Nginx:
    """A real web server in front of a folder."""

    url: str
    log: Path
    process: subprocess.Popen

    def asked(self) -> list[str]:
        """A line for each request so far. One is logged after its answer, but before the next request is looked at."""
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{self.url}/fence")
        return [line for line in self.log.read_text().splitlines() if "/fence" not in line]

    def ranges(self) -> list[tuple[str, str]]:
        """(name, range) of each GET of a tar so far."""
        lines = [line.split("|") for line in self.asked()]
        return [(Path(path).name, asked) for method, path, asked in lines if method == "GET" and path.endswith(".tar")]


@pytest.fixture
def nginx(shards: Path, tmp_path: Path) -> Iterator[Nginx]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("no nginx: apt-get install nginx")
    home = tmp_path / "nginx"
    home.mkdir()
    port = free_port()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    # Without a master: its workers would be somebody else, who may not look into a temporary folder, and outlive it.
    (home / "nginx.conf").write_text(
        f"""
        daemon off; master_process off; pid {home}/pid; error_log {home}/errors;
        events {{ worker_connections 64; }}
        http {{
            {" ".join(f"{kind}_temp_path {home}/{kind};" for kind in kinds)}
            log_format asked "$request_method|$uri|$http_range";
            access_log {home}/asked asked;
            server {{
                listen 127.0.0.1:{port};
                location / {{ root {shards.parent}; }}
                location /whole/ {{ alias {shards}/; max_ranges 0; }}
            }}
        }}
        """
    )
    process = subprocess.Popen([program, "-p", home, "-c", home / "nginx.conf", "-e", home / "errors"])
    try:
        wait_for(port, process, home / "errors")
        yield Nginx(f"http://127.0.0.1:{port}/{shards.name}", home / "asked", process)
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen, errors: Path, limit_s: float = 200) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        assert process.poll() is None, errors.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.005)
    raise TimeoutError(errors.read_text())


def test_a_web_server_gives_the_batches_of_a_disk(
    nginx: Nginx, expected: list[Facts], cache: ShardCache | None
) -> None:
    stream = open_stream(f"{nginx.url}/{BRACES}", cache=cache, **SETTINGS)

    assert all_facts(stream.forever(), len(expected)) == expected

    assert {name for name, _ in nginx.ranges()} == {f"{stem}.tar" for stem in STEMS}
    if cache is None:
        assert all(re.fullmatch(r"bytes=\d+-\d+", asked) for _, asked in nginx.ranges()), "no tar is fetched whole"


def test_a_web_server_that_sends_no_ranges_gives_them_through_a_cache(
    nginx: Nginx, expected: list[Facts], tmp_path: Path
) -> None:
    place = f"{nginx.url.rpartition('/')[0]}/whole/{BRACES}"
    with pytest.raises(QieError, match="the web server sends only whole files") as refused:
        all_facts(open_stream(place, **SETTINGS))
    assert "cache.local_dir" in str(refused.value)

    stream = open_stream(place, cache=ShardCache(tmp_path / "cache", 2**30), **SETTINGS)

    assert all_facts(stream.forever(), len(expected)) == expected
    assert sorted(name for name, asked in nginx.ranges() if asked == "-") == [f"{stem}.tar" for stem in STEMS]


def test_a_folder_of_a_web_server_opens_by_its_compacted_index_alone(
    nginx: Nginx, shards: Path, expected: list[Facts]
) -> None:
    folder = Path(shutil.copytree(shards, shards.parent / "listed"))
    compact_folder(open_folder(folder))
    url = f"{nginx.url.rpartition('/')[0]}/listed"

    stream = open_stream(url, **SETTINGS)

    index = [f"{way}|/listed/{COMPACT_NAME}|-" for way in ("HEAD", "GET")]
    assert nginx.asked() == [*index, f"GET|/listed/{EXCLUDED_NAME}|-"]
    assert all_facts(stream.forever(), len(expected)) == expected
    assert all_facts(open_stream(f"{url}/*.tar", **SETTINGS).forever(), len(expected)) == expected
    found = summarise(find_indexes([url]), verify=True)
    assert (found.faults, found.shards) == ([], len(STEMS))

    (folder / f"{STEMS[1]}.tar").unlink()  # it is trusted to say what there is, not what a shard holds
    assert [f"{STEMS[1]}.tar" in fault for fault in summarise(find_indexes([url])).faults] == [True]
    with pytest.raises(QieError, match="no such file"):
        all_facts(open_stream(url, **SETTINGS))


def test_a_folder_of_a_web_server_without_a_compacted_index_is_refused_since_nothing_lists_it(nginx: Nginx) -> None:
    with pytest.raises(QieError) as refused:
        open_stream(nginx.url)
    assert refused.value.where == nginx.url and "qie-stats --compact" in str(refused.value.hint)


def test_a_name_that_a_web_server_does_not_have_is_named(nginx: Nginx) -> None:
    with pytest.raises(QieError) as refused:
        open_stream(f"{nginx.url}/00000100-00000105.tar")
    assert f"{nginx.url}/00000100-00000105.tar" in str(refused.value)


def test_a_web_server_that_went_away_is_an_error_and_no_end_of_the_data(
    nginx: Nginx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QIE_STORE_RETRY_S", "0.2")
    monkeypatch.setenv("QIE_STORE_TIMEOUT_S", "1")
    stream = open_stream(f"{nginx.url}/{BRACES}", prefetch=0, **SETTINGS)
    batches = stream.forever()
    next(batches)
    nginx.process.kill()
    nginx.process.wait()

    with pytest.raises(QieError) as refused:
        all_facts(batches, 20)
    assert nginx.url in str(refused.value)
    assert stream.position < len(stream)

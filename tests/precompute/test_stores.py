"""Shards written to a store, on a good day and on a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from qie.errors import QieError
from qie.precompute import Settings, precompute
from qie.shards.shard_set import ShardSet
from qie.stores import StoreError, open_folder
from tests.faulty_proxy import FaultyProxy, always, every
from tests.s3 import S3, without_clouds
from tests.stubs import StubEncoder, StubSource

SOURCE = StubSource.of(60).changed(7, target=b"broken").changed(20, target=b"missing")
FAULTS = ["500", "503", "reset", "lost", "lost_500", "reset_body", "cut", "slow"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    precompute(SOURCE, StubEncoder(), folder, rows=(0, 60), shard_size=8)
    return folder


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ["retry", "connection"]:
        monkeypatch.setattr(f"qie.stores.{module}.FIRST_PAUSE_S", 0.01)


def contents(place: str | Path) -> dict[str, bytes]:
    folder = open_folder(place)
    return {name: folder.read(name) for name in folder.listing()}


@pytest.mark.parametrize("seed", range(2))
def test_with_a_fault_at_every_fourth_request_the_same_bytes_arrive(s3: S3, whole: Path, seed: int) -> None:
    with FaultyProxy(s3.endpoint, every(4, FAULTS, seed=seed), delay_s=0.01) as proxy:
        s3.go_through(proxy.url)
        report = precompute(SOURCE, StubEncoder(), f"{s3.url}/shards", rows=(0, 60), shard_size=8)
        assert len({fault for fault, _, _ in proxy.faults}) > 4, "too few faults to tell anything"
        samples = ShardSet.open([f"{s3.url}/shards/*.tar"])
        assert [samples.load(position).key for position in range(len(samples))] == samples.keys
    s3.go_through(s3.endpoint)
    assert (report.encoded, len(report.skipped)) == (58, 2)
    assert contents(f"{s3.url}/shards") == contents(whole)


def test_a_store_that_fails_for_good_ends_the_run_with_its_error_and_the_next_run_goes_on(
    s3: S3, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QIE_STORE_RETRY_S", "0.2")
    output = f"{s3.url}/shards"
    left = iter([None] * 8)
    broken = always("500", methods=["PUT", "POST"])

    def schedule(number: int, method: str, path: str) -> str | None:
        fault = broken(number, method, path)
        return next(left, fault) if fault else None

    with FaultyProxy(s3.endpoint, schedule) as proxy:
        s3.go_through(proxy.url)
        with pytest.raises(StoreError) as refused:
            precompute(SOURCE, StubEncoder(), output, rows=(0, 60), shard_size=8)
    assert output in str(refused.value)
    s3.go_through(s3.endpoint)
    published = {int(row) for name in contents(output) if name.endswith("json") for row in range(*bounds(name))}
    assert 0 < len(published) < 60
    assert all(contents(whole)[name] == content for name, content in contents(output).items())

    encoder = StubEncoder()
    precompute(SOURCE, encoder, output, rows=(0, 60), shard_size=8)
    assert set(encoder.encoded) == set(range(60)) - published - {7, 20}
    assert contents(output) == contents(whole)


def bounds(name: str) -> tuple[int, int]:
    start, stop = name.partition(".")[0].split("-")
    return int(start), int(stop)


@pytest.mark.parametrize("store", ["s3", "hub"])
def test_a_store_gets_the_files_that_a_disk_gets_and_they_are_not_encoded_again_here_or_elsewhere(
    store: str, whole: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(store)
    url = place.url if isinstance(place, S3) else place.folder_url
    report = precompute(SOURCE, StubEncoder(), f"{url}/shards", rows=(0, 60), shard_size=8)
    assert (report.encoded, len(report.skipped), report.shards_written) == (58, 2, 8)
    for output in (f"{url}/shards", f"{url}/copy", tmp_path / "local"):
        encoder = StubEncoder()
        settings = Settings(reuse=(f"{url}/shards",))
        precompute(SOURCE, encoder, output, rows=(0, 60), shard_size=8, settings=settings)
        assert encoder.encoded == []
        assert contents(output) == contents(whole)
    samples = ShardSet.open([f"{url}/shards"])
    assert samples.load(3).key == samples.keys[3]


def test_without_credentials_there_is_one_clear_error(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3.url
    without_clouds(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    with pytest.raises(QieError) as refused:
        precompute(SOURCE, StubEncoder(), f"{url}/shards", rows=(0, 60), shard_size=8)
    message = str(refused.value)
    assert "AWS_ACCESS_KEY_ID" in message and url in message and len(message.splitlines()) <= 6

"""An S3 service in this process, for every test folder that wants one: import the fixtures in its conftest.py."""

from __future__ import annotations

import itertools
import logging
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_numbers = itertools.count()


@dataclass
class S3:
    """An empty bucket, and the environment that leads there."""

    endpoint: str
    bucket: str
    monkeypatch: pytest.MonkeyPatch

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def go_through(self, endpoint: str) -> None:
        """Let what is opened from now on ask another endpoint, such as a FaultyProxy's url."""
        self.monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a moto server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A bucket of its own for each test. Child processes find it, too."""
    without_clouds(monkeypatch)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    bucket = f"bucket-{next(_numbers)}"
    request(s3_server, f"/{bucket}", "PUT")
    yield S3(s3_server, bucket, monkeypatch)
    request(s3_server, "/moto-api/reset", "POST")


def without_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this machine knows of clouds: variables, profiles, and metadata services."""
    for name in list(os.environ):
        if name.upper().startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere/credentials")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # Beyond the limit of a test: whoever waits or tries again where it should not is seen, on a slow machine, too.
    monkeypatch.setenv("QIE_STORE_TIMEOUT_S", "3600")
    monkeypatch.setenv("QIE_STORE_RETRY_S", "3600")


def request(endpoint: str, path: str, method: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(endpoint + path, method=method), timeout=200):
        pass

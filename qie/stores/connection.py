"""A bucket, container or web host, opened when it is first needed and shared by all folders in it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qie.stores.contract import StoreError
from qie.stores.credentials import demand_credentials, s3_endpoint, s3_settings
from qie.stores.object_errors import NOWHERE, cause
from qie.stores.retry import FIRST_PAUSE_S, Limits, limits

# The time for retries ends them, not their number.
_RETRIES = 1000

_HOSTS = {"gs": "storage.googleapis.com"}
# Of the service, and of who gives credentials to machines and containers there.
_AWS_HOSTS = ("amazonaws.com", "amazonaws.com.cn", "api.aws", "169.254.169.254", "169.254.170.2", "169.254.170.23")
_CREDENTIAL_URLS = ("AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL_STS")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")

# The process in which obstore started its threads. A fork does not take them along: there, every call waits for ever.
_started: list[int] = []


class Connection:
    """obstore's stores of one bucket. Travels to other processes as its name; each opens its own."""

    def __init__(self, scheme: str, bucket: str) -> None:
        self.scheme, self.bucket = scheme, bucket
        self._lock = threading.Lock()
        self._stores: dict[bool, Any] = {}

    def __reduce__(self) -> tuple[type[Connection], tuple[str, str]]:
        return Connection, (self.scheme, self.bucket)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def store(self, retries: bool = True) -> Any:
        """The store; with `retries`, it tries again by itself where that is safe.

        Raises:
            StoreError: no credentials, an unknown host, or this process was forked from one that has used obstore.
        """
        _refuse_fork(self.url)
        with self._lock:
            if retries not in self._stores:
                self._stores[retries] = self._open(retries)
            return self._stores[retries]

    def _open(self, retries: bool) -> Any:
        import obstore.store

        options = _options(limits(), retries)
        builders: dict[str, Callable[..., Any]] = {
            "s3": obstore.store.S3Store,
            "gs": obstore.store.GCSStore,
            "az": obstore.store.AzureStore,
        }
        try:
            if self.scheme == "s3":
                options |= s3_settings()
                options["client_options"] |= _confined()
                _trust(options, "AWS_CA_BUNDLE")
            elif self.scheme in builders:
                demand_credentials(self.scheme)
            self._demand_host()
            if self.scheme in builders:
                return builders[self.scheme](self.bucket, **options)
            return obstore.store.HTTPStore(self.url, **options)
        except StoreError as error:
            error.where = error.where or self.url
            raise
        except Exception as error:  # obstore has no common base for what its constructors raise
            if type(error).__module__.startswith("qie."):
                raise
            raise StoreError("a store cannot be opened", where=self.url, found=cause(error)) from error

    def _demand_host(self) -> None:
        """Raise StoreError when the name server does not know the host: obstore would ask it for minutes."""
        if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
            return  # then it is the proxy who knows names
        host = _HOSTS.get(self.scheme)
        if self.scheme in ("http", "https"):
            host = urlsplit(self.url).hostname
        if self.scheme == "s3" and (endpoint := s3_endpoint()):
            host = urlsplit(endpoint).hostname
        if not host:
            return
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                return
            raise StoreError(
                "the host of a store is unknown",
                where=self.url,
                found=f"{host}: {error.strerror}",
                hint="correct the URL or AWS_ENDPOINT_URL, or check this machine's network",
            ) from error


def _refuse_fork(url: str) -> None:
    if not _started:
        _started.append(os.getpid())
    if _started[0] != os.getpid():
        raise StoreError(
            "a store was used before this process was forked",
            where=url,
            hint="start worker processes with the method 'spawn' or 'forkserver'",
        )


def _options(allowed: Limits, retries: bool) -> dict[str, Any]:
    return {
        "client_options": {
            "allow_http": True,  # the scheme of the URL or the endpoint says which of the two it is
            "connect_timeout": timedelta(seconds=allowed.connect_s),
            # Without a byte. What keeps coming may take longer: a shard of a gigabyte does.
            "read_timeout": timedelta(seconds=allowed.request_s),
            "timeout": timedelta(seconds=10 * allowed.request_s),
        },
        "retry_config": {
            "max_retries": _RETRIES if retries else 0,
            "retry_timeout": timedelta(seconds=allowed.retry_s),
            "backoff": {
                "init_backoff": timedelta(seconds=min(FIRST_PAUSE_S, allowed.longest_pause_s)),
                "max_backoff": timedelta(seconds=allowed.longest_pause_s),
                "base": 2,
            },
        },
    }


def _confined() -> dict[str, str]:
    """Options by which requests of a bucket reach its service alone, and those who give credentials.

    obstore follows a redirect to any host. It takes the signature away, but sends the session token along. So what is
    asked of another host goes to a proxy that does not exist. Where a proxy is set, requests go to that one as before.
    """
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return {}
    urls = [s3_endpoint(), *(os.environ.get(name) for name in _CREDENTIAL_URLS)]
    hosts = [*_AWS_HOSTS, *(host for url in urls if url and (host := urlsplit(url).hostname))]
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(hosts)}


def _trust(options: dict[str, Any], variable: str) -> None:
    """Trust the certificates of a file as well, such as those of a private service."""
    if path := os.environ.get(variable):
        options["client_options"]["root_certificate"] = Path(path).read_bytes()

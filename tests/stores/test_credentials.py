"""Credentials: where they are found, and one error soon where they are not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from qie.stores import StoreError, open_folder
from tests.s3 import S3, without_clouds
from tests.stores.servers import Quiet, answering, failure, serving


@pytest.mark.parametrize("status, word", [(401, "denies"), (403, "denies"), (301, "region")])
def test_a_refusal_comes_at_once_and_says_what_to_set(s3: S3, status: int, word: str) -> None:
    with answering(status) as url:
        s3.go_through(url)
        folder = open_folder(f"{s3.url}/data")
        for act in [folder.listing, lambda: folder.read("a"), lambda: folder.write("a", b""), lambda: folder.size("a")]:
            error = failure(act)
            assert word in error.what and "AWS_" in (error.hint or "")


def test_without_credentials_there_is_one_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    without_clouds(monkeypatch)
    error = failure(lambda: open_folder("s3://bucket/data").listing())

    assert "credentials" in error.what and error.where == "s3://bucket"
    assert "AWS_ACCESS_KEY_ID" in (error.hint or "") and "AWS_PROFILE" in (error.hint or "")


def test_a_metadata_service_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    without_clouds(monkeypatch)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setattr("qie.stores.credentials.PROBE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{address}")
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        monkeypatch.setenv("HOME", "/nowhere")
        for url in ["s3://bucket/data", "gs://bucket/data"]:
            assert "credentials" in failure(lambda url=url: open_folder(url).read("a")).what


def test_the_role_of_a_machine_is_used(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    key = '{"AccessKeyId": "role", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}'
    answers = {"/latest/meta-data/": "iam/", "/latest/api/token": "token"}
    roles = "/latest/meta-data/iam/security-credentials/"
    answers |= {roles: "role", f"{roles}role": key}

    class Metadata(Quiet):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = answers[self.path].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"]:
        monkeypatch.delenv(name)
    with serving(Metadata) as url:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        open_folder(s3.url).write("a", b"x")
    assert f"{roles}role" in asked


def test_profiles_are_read(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"]:
        monkeypatch.delenv(name)
    config, keys = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[profile mine]\nregion = eu-west-1\nendpoint_url = {s3.endpoint}\n")
    keys.write_text("[mine]\naws_access_key_id = k\naws_secret_access_key = s%c\n[default]\naws_access_key_id = d\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_PROFILE", "mine")

    open_folder(s3.url).write("a", b"x")
    assert open_folder(s3.url).listing() == {"a": 1}
    monkeypatch.setenv("AWS_PROFILE", "yours")
    assert "AWS_PROFILE=yours" in str(failure(lambda: open_folder(s3.url).listing()))


def test_a_public_bucket_is_read_without_credentials_or_signature(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = []

    class Public(Quiet):
        def do_GET(self) -> None:
            signatures.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.send_header("Last-Modified", self.date_time_string())
            self.send_header("ETag", '"x"')
            self.end_headers()
            self.wfile.write(b"x")

    with serving(Public) as url:
        s3.go_through(url)
        assert open_folder(s3.url).read("a") == b"x"
        for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        assert open_folder(s3.url).read("a") == b"x"
    assert signatures[0] and signatures[1:] == [None]


def test_behind_a_proxy_it_is_the_proxy_who_is_asked_whatever_the_host(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Proxy(Quiet):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    with serving(Proxy) as url:
        s3.go_through("http://host.invalid")
        monkeypatch.setenv("HTTP_PROXY", url)
        assert open_folder(f"{s3.url}/data").size("a") is None
    assert asked and all(path.startswith("http://host.invalid/") for path in asked)


def test_a_session_token_follows_no_redirect_to_another_host(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    asked: list[str] = []

    class Other(Quiet):
        def do_GET(self) -> None:
            asked.append(self.headers["x-amz-security-token"])
            self.send_error(404)

        do_HEAD = do_PUT = do_GET

    with serving(Other) as other:

        class Sending(Quiet):
            def do_GET(self) -> None:
                self.send_response(307)
                self.send_header("Location", other.replace("127.0.0.1", "localhost") + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_PUT = do_GET

        with serving(Sending) as url:
            s3.go_through(url)
            monkeypatch.setenv("QIE_STORE_RETRY_S", "0.1")
            folder = open_folder(f"{s3.url}/data")
            for act in [folder.listing, lambda: folder.read("a"), lambda: folder.size("a")]:
                with pytest.raises(StoreError, match="another host"):
                    act()
    assert asked == []

"""Object stores: what lies in a bucket, and errors of one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qie.errors import QieError, UsageError
from qie.stores import MissingError, StoreError, open_folder
from qie.stores.object_errors import cause, passes
from tests.conftest import ROOT
from tests.s3 import S3
from tests.stores.servers import failure


def test_a_listing_has_more_than_a_thousand_files(s3: S3) -> None:
    from moto.s3.models import s3_backends

    for number in range(1005):  # past the server: requests would take seconds
        s3_backends["123456789012"]["aws"].put_object(s3.bucket, f"many/{number:04}", b"x")
    assert open_folder(f"{s3.url}/many").listing() == {f"{number:04}": 1 for number in range(1005)}


def test_a_marker_of_a_folder_is_no_file_in_it(s3: S3) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3.endpoint)
    for key in ["data/", "data/sub/", "data/a"]:
        client.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    folder = open_folder(f"{s3.url}/data")

    assert folder.listing() == {"a": 0}
    assert folder.folders() == ["sub"]
    assert folder.child("sub").listing() == {}


def test_a_whole_bucket_is_a_folder(s3: S3) -> None:
    folder = open_folder(s3.url)
    folder.write("a", b"x")
    assert (folder.listing(), open_folder(s3.url + "/").read("a")) == ({"a": 1}, b"x")


def test_a_missing_bucket_is_said_to_be_missing(s3: S3, tmp_path: Path) -> None:
    folder = open_folder("s3://there-is-none/data")
    (tmp_path / "source").write_bytes(b"x")
    acts = [folder.listing, lambda: folder.read("a"), lambda: folder.write("a", b""), lambda: folder.create("a", b"")]
    acts += [lambda: folder.upload("a", tmp_path / "source"), lambda: folder.read("a", 3, 9)]
    for act in acts:
        error = failure(act)
        assert "no such bucket" in error.what and "NoSuchBucket" in str(error.found)
        assert not isinstance(error, MissingError)


def test_an_unknown_host_is_said_to_be_unknown_at_once(s3: S3) -> None:
    s3.go_through("http://host.invalid:9000")
    assert "host.invalid" in str(failure(lambda: open_folder(s3.url).listing()).found)
    assert "host.invalid" in str(failure(lambda: open_folder("https://host.invalid/a").read("b")).found)


def test_limits_that_are_no_numbers_are_refused(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ["soon", "-1", "0", "nan"]:
        monkeypatch.setenv("QIE_STORE_RETRY_S", value)
        with pytest.raises(UsageError, match="not a number of seconds"):
            open_folder(s3.url).listing()


def test_opening_touches_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for url in ["s3://bucket/a", "gs://bucket/a", "az://container/a", "https://host/a", "hf://datasets/owner/name/a"]:
        open_folder(url).child("b")


FORK = """
import os, sys
from qie.stores import StoreError, open_folder
folder = open_folder(sys.argv[1])
folder.write("a", b"x")
child = os.fork()
if child == 0:
    try:
        open_folder(sys.argv[1]).read("a")
    except StoreError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_is_told_instead_of_waiting_for_ever(s3: S3) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, s3.url], cwd=ROOT, timeout=250, check=False)
    assert done.returncode == 7


def test_store_errors_are_explained_errors() -> None:
    assert issubclass(MissingError, StoreError) and issubclass(StoreError, QieError)


def test_causes_are_one_line_without_keys_in_them() -> None:
    text = "Error performing GET https://me:secret@host/a?sig=secret&se=1 in 3ms - status code: 403 Forbidden: "
    text += "<Error>\n<Code>Bad</Code>\n<Message>No\nway</Message><StringToSign>secret</StringToSign></Error>"
    text += '\n\nDebug source:\nGeneric { uri: "https://host/a?sig=secret", message: "Connection refused" }'
    assert cause(OSError(text)) == (
        "Error performing GET https://host/a in 3ms - status code: 403 Forbidden: Bad: No way (Connection refused)"
    )
    assert len(cause(OSError("x" * 1000))) == 300


def test_what_has_to_be_begun_anew_is_begun_anew() -> None:
    from obstore.exceptions import AlreadyExistsError

    # Of an upload in parts that was completed, but whose answer was lost.
    assert passes(FileNotFoundError("404 Not Found: <Error><Code>NoSuchUpload</Code></Error>"))
    assert not passes(FileNotFoundError("404 Not Found: <Error><Code>NoSuchKey</Code></Error>"))
    # Of two who create at once.
    assert passes(AlreadyExistsError("409 Conflict: <Error><Code>ConditionalRequestConflict</Code></Error>"))
    assert not passes(AlreadyExistsError("412 Precondition Failed"))

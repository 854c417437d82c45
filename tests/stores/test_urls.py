"""What users type, and the folder that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from qie.errors import QieError, UsageError
from qie.stores import open_folder, scheme_of


def test_local_folders_know_their_paths(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert open_folder(tmp_path).path("a/b") == tmp_path / "a/b"
    assert open_folder("~/c").path("a") == tmp_path / "c/a"
    assert open_folder(f"file://{tmp_path}/with%20space").path("a") == tmp_path / "with space/a"
    assert open_folder("relative").path("a") == Path("relative/a")
    assert open_folder(tmp_path).url == str(tmp_path)


def test_remote_folders_have_no_paths() -> None:
    for url in ["s3://bucket/a", "gs://bucket", "az://container/a", "https://host/a", "hf://datasets/owner/name"]:
        assert open_folder(url).path("a") is None
        assert open_folder(url + "/").url == url
        assert open_folder(url).child("b").url == f"{url}/b"


@pytest.mark.parametrize(
    "place, scheme",
    [
        ("s3://bucket/a", "s3"),
        ("S3://bucket/a", "s3"),
        ("pipe:cat /etc/passwd", "pipe"),
        ("PIPE:cat", "pipe"),
        ("https://host", "https"),
        ("hf://datasets/a/b", "hf"),
        ("x-y+z.1://a", "x-y+z.1"),
        ("/data/shards", None),
        ("data", None),
        ("c:/windows", None),
        ("c:x", None),
        ("pipes:cat", None),
        ("a b://c", None),
        ("~/x", None),
    ],
)
def test_a_scheme_is_what_stands_before_two_slashes_or_pipe(place: str, scheme: str | None) -> None:
    assert scheme_of(place) == scheme


@pytest.mark.parametrize("place", ["pipe:cat /etc/passwd", "PIPE:x", "ftp://host/a", "gopher://x", "memory://x"])
def test_other_schemes_are_refused_and_the_known_ones_named(place: str) -> None:
    with pytest.raises(UsageError) as error:
        open_folder(place)
    assert error.value.where == place
    assert "s3://" in str(error.value) and "hf://" in str(error.value) and "a local path" in str(error.value)


@pytest.mark.parametrize("place", ["s3:/bucket/a", Path("s3://bucket/a"), Path("https://host/a"), "hf:/datasets/a/b"])
def test_a_url_that_lost_a_slash_is_no_local_path(place: str | Path) -> None:
    with pytest.raises(UsageError, match="lacks a slash"):
        open_folder(place)


@pytest.mark.parametrize(
    "place",
    [
        *["s3://", "s3:///a", "s3://bucket/../other", "https://", "file://other/a"],
        *["hf://datasets/owner", "hf://owner", "hf://", "hf:///a/b"],
        *["https://user:secret@host/a", "s3://key:secret@bucket/a", "https://host/a?token=secret"],
    ],
)
def test_a_url_that_names_no_folder_is_refused_and_no_secret_repeated(place: str) -> None:
    with pytest.raises(UsageError) as error:
        open_folder(place)
    assert "secret" not in str(error.value)


def test_the_home_of_nobody_is_no_folder() -> None:
    with pytest.raises(QieError):
        open_folder("~nobody-of-that-name/x")

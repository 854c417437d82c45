"""Web servers: exact ranges or an error, and nothing but reading."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from qie.stores import MissingError, open_folder
from tests.s3 import without_clouds
from tests.stores.servers import Quiet, Ranged, failure, serving

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_clouds(monkeypatch)
    (tmp_path / "web" / "sub").mkdir(parents=True)
    (tmp_path / "web" / "sub" / "a b%20.bin").write_bytes(CONTENT)
    return tmp_path / "web"


def test_ranges_over_http_are_exact(web: Path) -> None:
    with serving(functools.partial(Ranged, directory=web)) as url:
        folder = open_folder(f"{url}/sub")
        for start, stop in [(0, None), (0, 1), (5, 1000), (5, None), (len(CONTENT) - 1, None), (7, 7)]:
            assert folder.read("a b%20.bin", start, stop) == CONTENT[start:stop]
        assert folder.size("a b%20.bin") == len(CONTENT)
        assert folder.size("nothing") is None
        failure(lambda: folder.read("a b%20.bin", 0, len(CONTENT) + 1))
        failure(lambda: folder.read("a b%20.bin", len(CONTENT) + 1, len(CONTENT) + 2))
        with pytest.raises(MissingError):
            folder.read("nothing", 3, 5)


def test_a_web_server_without_ranges_gives_whole_files_and_never_wrong_bytes(web: Path) -> None:
    with serving(functools.partial(Quiet, directory=web)) as url:
        folder = open_folder(url).child("sub")
        assert folder.read("a b%20.bin") == CONTENT
        for start, stop in [(5, 1000), (5, None), (0, len(CONTENT))]:
            assert "whole files" in failure(lambda start=start, stop=stop: folder.read("a b%20.bin", start, stop)).what


def test_a_web_url_may_have_escapes(web: Path) -> None:
    (web / "with space").mkdir()
    (web / "with space" / "a").write_bytes(b"x")
    with serving(functools.partial(Ranged, directory=web)) as url:
        assert open_folder(f"{url}/with%20space/").read("a") == b"x"


def test_over_http_nothing_is_listed_or_written(web: Path, tmp_path: Path) -> None:
    folder = open_folder("http://127.0.0.1:1/data")
    for act in [folder.listing, folder.folders]:
        assert "cannot be listed" in failure(act).what
    (tmp_path / "source").touch()
    for act in [
        lambda: folder.write("a", b""),
        lambda: folder.create("a", b""),
        lambda: folder.delete("a"),
        lambda: folder.upload("a", tmp_path / "source"),
    ]:
        assert "cannot be written" in failure(act).what

"""What the tests of sources share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qie.data.sources import kinds, resolve
from qie.stores import Folder, LocalFolder, patterns, urls
from tests.s3 import s3, s3_server  # noqa: F401
from tests.sources.tables import Bucket, Table


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "rows")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """s3://bucket is a folder of this machine."""
    root = Bucket("s3://bucket", LocalFolder(tmp_path))

    opened = urls.open_folder

    def open_folder(url: str) -> Folder:
        if not str(url).startswith("s3:"):
            return opened(url)
        assert url.startswith("s3://bucket"), url
        folder = root
        for name in url.removeprefix("s3://bucket").strip("/").split("/"):
            folder = folder.child(name) if name else folder
        return folder

    for module in (kinds, resolve, patterns, urls):
        monkeypatch.setattr(module, "open_folder", open_folder)
    resolve._store.cache_clear()
    yield root
    resolve._store.cache_clear()

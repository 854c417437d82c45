"""One folder of each store, empty."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from qie.stores import Folder, open_folder
from qie.stores.hub import HubFolder
from tests.s3 import s3, s3_server, without_clouds  # noqa: F401 - fixtures
from tests.stores.fake_hub import FakeHub

_numbers = itertools.count()


@pytest.fixture(params=["local", "s3", "hub", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return open_folder(tmp_path / "folder")
    if request.param == "s3":
        return open_folder(f"{request.getfixturevalue('s3').url}/pre/fix")
    if request.param == "hub":
        return open_folder(f"{request.getfixturevalue('hub').folder_url}/folder")
    from fsspec.implementations.memory import MemoryFileSystem

    return HubFolder.open(f"hf://datasets/owner/name-{next(_numbers)}/folder", MemoryFileSystem())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The Hub that huggingface_hub now finds, with one empty repository."""
    import huggingface_hub.utils.tqdm  # noqa: F401 - which would keep the value of a constant that is set for a test

    without_clouds(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    with FakeHub() as fake:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield fake

"""What tests of whole runs share, each file its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import Bench


@pytest.fixture(scope="module")
def bench(tiny_edit: Path, photos: Path, encoder, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Shards, a configuration, and a folder for runs."""
    return Bench.make(tmp_path_factory.mktemp("bench"), tiny_edit, photos, encoder)


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Path:
    """A run of four steps, with a checkpoint of each."""
    bench.train(bench.folder / "plain", train__checkpoint_every=1)
    return bench.folder / "plain"

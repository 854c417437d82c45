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
def bench_21(tiny_21: Path, photos: Path, encoder_21, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """As `bench`, for Qwen-Image-2.1, with rows of no, one and two controls, and two draws of each."""
    return Bench.make(tmp_path_factory.mktemp("bench"), tiny_21, photos, encoder_21)


@pytest.fixture(scope="module", params=["bench", "bench_21"], ids=["edit", "qwen_image_21"])
def any_bench(request: pytest.FixtureRequest) -> Bench:
    """Of either kind of transformer in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Path:
    """A run of four steps, with a checkpoint of each."""
    bench.train(bench.folder / "plain", train__checkpoint_every=1)
    return bench.folder / "plain"

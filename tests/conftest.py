"""What tests share: tiny models, a folder of photographs, an encoder. Made once per session."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

from qie.families import FAMILIES

# Bits depend on the number of threads; child processes inherit this.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell has its background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
AREA_PX = 128 * 128


def _tiny_model(folder: Path, family: str) -> Path:
    """In this process: a process of its own would spend its time on imports."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with mock.patch("qie.quiet_libraries.quiet_imports"):
            from tools import make_tiny_model
        assert make_tiny_model.main([str(folder), "--family", family]) == 0
    # The tool turns them off, and would have the libraries quiet; whether qie does is for tests to see.
    of_diffusers.enable_progress_bar()
    of_transformers.enable_progress_bar()
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What qie remembers between runs (hashes, copies of indexes) is this session's own."""
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(scope="session")
def tiny_edit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of family edit: single weight files, hub-style preprocessor_config.json."""
    return _tiny_model(tmp_path_factory.mktemp("models") / "edit", "edit")


@pytest.fixture(scope="session")
def tiny_edit_plus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of family edit_plus: sharded weights, processor_config.json."""
    return _tiny_model(tmp_path_factory.mktemp("models") / "edit_plus", "edit_plus")


@pytest.fixture(scope="session")
def tiny_21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of family qwen_image_21, which older releases of diffusers do not have."""
    release = version("diffusers").split(".")[:2]
    if tuple(map(int, release)) < (0, 42):
        pytest.skip("Qwen-Image-2.1 needs diffusers 0.42")
    return _tiny_model(tmp_path_factory.mktemp("models") / "qwen_image_21", "qwen_image_21")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family of models in turn: a test that asks for it, or for what is made of it, runs for all."""
    return str(request.param)


@pytest.fixture(scope="module")
def tiny_model(family: str, request: pytest.FixtureRequest) -> Path:
    """The tiny model of `family`."""
    return request.getfixturevalue({"edit": "tiny_edit", "edit_plus": "tiny_edit_plus"}.get(family, "tiny_21"))


@pytest.fixture(scope="module")
def family_encoder(family: str, request: pytest.FixtureRequest):
    """The real encoder on the tiny model of `family`."""
    return request.getfixturevalue({"edit": "encoder", "edit_plus": "encoder_plus"}.get(family, "encoder_21"))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder source of 12 rows. Tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("photos") / "edits"
    tool = [sys.executable, ROOT / "tools" / "make_photo_edits.py"]
    subprocess.run([*tool, folder, "--rows", "12"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def encoder(tiny_edit: Path):
    """The real encoder on the tiny edit model, at a small image area."""
    return _encoder(tiny_edit)


@pytest.fixture(scope="session")
def encoder_plus(tiny_edit_plus: Path):
    """The real encoder on the tiny edit_plus model, at small image areas."""
    return _encoder(tiny_edit_plus, text_area_px=AREA_PX // 2)


@pytest.fixture(scope="session")
def encoder_21(tiny_21: Path):
    """The real encoder on the tiny model of Qwen-Image-2.1, at a small image area."""
    return _encoder(tiny_21)


def _encoder(folder: Path, text_area_px: int | None = None):
    import torch

    from qie.encode import Encoder, EncoderOptions
    from qie.pretrained import open_pretrained

    cpu = torch.device("cpu")
    options = EncoderOptions(areas_px=(AREA_PX,), text_area_px=text_area_px)
    return Encoder.open(open_pretrained(str(folder)), vae_device=cpu, text_device=cpu, options=options)


def forget_accelerate() -> None:
    """Accelerate keeps its state for the whole process; each test, and each run of a fixture, starts without."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _one_run_per_process():
    yield
    forget_accelerate()


def own_threads() -> list[threading.Thread]:
    """Those that qie started, and that run."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("qie-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert own_threads() == []


def pytest_collection_finish() -> None:
    """What the test modules have imported stays. A collection that walks through it takes 0.3 s, and each run that
    frees a model asks for one."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))

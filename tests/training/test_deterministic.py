"""With train.deterministic, torch takes only kernels that give the same bits each time, and what cannot is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from qie.config import Config
from qie.errors import ConfigError, QieError, UsageError
from qie.training.processes import deterministic, require_determinism
from qie.training.run import Run
from tests.training.runs import ADAPTER, Bench, checkpoint, losses

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def flags() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def config(backend: str | None = None) -> Config:
    return Config.model_validate({"model": {"pretrained_model_name_or_path": "x", "attention_backend": backend}})


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)


def test_a_run_takes_such_kernels_and_gives_back_what_was_set(
    bench: Bench, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step, before = [], Run.training_step, flags()
    monkeypatch.setattr(
        Run, "training_step", lambda run: seen.append((flags(), os.environ.get(WORKSPACE))) or step(run)
    )
    output = bench.folder / "deterministic"
    bench.train(output, train__deterministic=True)
    assert seen == [((True, False), ":4096:8")] * 4 and flags() == before
    assert losses(output) == losses(plain), "on a CPU the same"


def test_an_operation_without_such_a_kernel_is_told() -> None:
    before = flags()
    with pytest.raises(QieError, match=r"(?s)train\.deterministic.*put_.*false"), deterministic():
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    with pytest.raises(RuntimeError, match="something else"), deterministic():
        raise RuntimeError("something else")
    assert flags() == before


@pytest.mark.parametrize("backend", ["_native_cudnn", "flash", "xformers", "flex"])
def test_an_attention_backend_that_promises_nothing_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)model\.attention_backend.*_native_flash.*{backend}"):
        require_determinism(config(backend))


def test_another_workspace_of_cublas_is_refused_and_one_that_serves_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    require_determinism(config())
    assert os.environ[WORKSPACE] == ":16:8"
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(UsageError, match=r"(?s)CUBLAS_WORKSPACE_CONFIG.*:4096:8.*:0:0"):
        require_determinism(config("native"))


@pytest.mark.gpu
def test_on_a_gpu_a_resumed_run_is_the_run_that_was_never_stopped(bench: Bench) -> None:
    settings = {"train__deterministic": True, "train__mixed_precision": "bf16", "train__checkpoint_every": 2}
    settings |= {"lr_scheduler__scheduler_type": "constant"}
    whole, parts = bench.folder / "whole", bench.folder / "parts"
    bench.train(whole, **settings)
    bench.train(parts, train__max_steps=2, **settings)
    bench.train(parts, "--resume", "latest", **settings)
    adapters = [(checkpoint(output, 4) / ADAPTER).read_bytes() for output in (whole, parts)]
    assert adapters[0] == adapters[1] and losses(whole) == losses(parts)

"""Law 5: an epoch's order is a pure function; stopped anywhere and gone on, the same batches and weights follow."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from qie.config import Config
from qie.data.opening import open_stream
from qie.data.stream import Stream
from qie.errors import UsageError
from qie.precompute import precompute
from qie.pretrained import open_pretrained
from qie.training.loop import Listener, train
from qie.training.model.adapter_file import adapter_in
from tests.stubs import RECIPES, StubEncoder, StubSource

COMPONENTS = ("transformer", "scheduler")


@pytest.fixture
def shards(tmp_path: Path, family: str) -> Path:
    precompute(StubSource.of(23), StubEncoder(RECIPES[family]), tmp_path / "shards", rows=(0, 23), shard_size=5)
    return tmp_path / "shards"


def keys(stream: Stream, count: int) -> list[tuple[str, ...]]:
    iterator = stream.forever()
    return [next(iterator).keys for _ in range(count)]


def test_restored_at_every_position_of_two_epochs_the_same_batches_follow(shards: Path) -> None:
    settings = {"batch_size": 2, "seed": 4, "validation_rows": 3, "tail": "pad"}
    whole = open_stream(shards, **settings)
    total = 2 * len(whole) + 3
    expected = keys(open_stream(shards, **settings), total)
    running = whole.forever()
    for position in range(2 * len(whole)):
        restored = open_stream(shards, **settings)
        restored.load_state_dict(whole.state_dict())
        assert keys(restored, 3) == expected[position : position + 3], f"after {position} batches"
        next(running)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_processes_goes_on_with_the_same_global_batches(shards: Path, world_size: int) -> None:
    one = open_stream(shards, batch_size=4, seed=1)
    state = one.state_dict()
    expected = keys(one, 6)
    parts = [
        open_stream(shards, batch_size=4 // world_size, seed=1, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for part in parts:
        part.load_state_dict(state)
    read = [keys(part, 6) for part in parts]
    assert [tuple(key for part in step for key in part) for step in zip(*read, strict=True)] == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed"),
        ({"batch_size": 1}, "global_batch_size"),
        ({"tail": "drop"}, "tail"),
        ({"validation_rows": 1}, "validation_rows"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(shards: Path, change: dict, named: str) -> None:
    settings = {"batch_size": 2, "seed": 1}
    state = open_stream(shards, **settings).state_dict()
    with pytest.raises(UsageError, match=named):
        open_stream(shards, **(settings | change)).load_state_dict(state)


def test_a_state_of_other_data_is_refused_by_name(shards: Path, tmp_path: Path, family: str) -> None:
    precompute(StubSource.of(22), StubEncoder(RECIPES[family]), tmp_path / "fewer", rows=(0, 22))
    with pytest.raises(UsageError, match="samples"):
        open_stream(tmp_path / "fewer").load_state_dict(open_stream(shards).state_dict())


@pytest.fixture(scope="module")
def photo_shards(photos: Path, family_encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qie.data.sources import open_source

    folder = tmp_path_factory.mktemp("resume") / "shards"
    precompute(open_source(photos), family_encoder, folder, rows=(0, 8))
    return folder


def run(
    model: Path,
    shards: Path,
    output: Path,
    *,
    adapter: dict[str, object],
    steps: int,
    stop_after: int | None = None,
    resume: bool = False,
):
    """Losses by step of a run that is asked to stop (as by Ctrl-C) after a step."""
    import os
    import signal

    pretrained = open_pretrained(str(model), components=COMPONENTS)
    config = Config.model_validate(
        {
            "model": {
                "pretrained_model_name_or_path": str(model),
                "lora": adapter,
            },
            "data": {"caption_dropout_rate": 0.3, "batch_size": 2},
            "train": {
                "max_steps": steps,
                "gradient_accumulation_steps": 2,
                "draws_per_sample": 2 if pretrained.family.interleaved else 1,
                "mixed_precision": "no",
                "output_dir": str(output),
                "seed": 5,
            },
            "optimizer": {"init_args": {"lr": 0.01}, "lr_pattern": {"to_k": 0.003}},
            "lr_scheduler": {"warmup_steps": 2},
            "validation": {"rows": 2},
        }
    )
    losses = {}

    def on_step(metrics) -> None:
        losses[metrics.step] = (metrics.loss, metrics.grad_norm, metrics.lr)
        if metrics.step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    stream = open_stream(shards, batch_size=2, seed=5, validation_rows=2)
    outcome = train(
        config,
        pretrained,
        stream,
        Accelerator(cpu=True),
        resume="latest" if resume else None,
        callbacks=[Listener(step=on_step)],
    )
    return losses, outcome


ADAPTERS = {
    "lora": {"r": 4, "lora_dropout": 0.2},
    "lokr": {"kind": "lokr", "r": 2, "rank_pattern": {"to_q": 1}},
    "loha": {"kind": "loha", "r": 2},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(
    tiny_model: Path, photo_shards: Path, tmp_path: Path, kind: str
) -> None:
    asked = partial(run, tiny_model, photo_shards, adapter=ADAPTERS[kind])
    whole, end = asked(tmp_path / "whole", steps=9)
    first, stopped = asked(tmp_path / "parts", steps=9, stop_after=4)
    assert stopped.interrupted and stopped.step == 4
    second, resumed = asked(tmp_path / "parts", steps=9, resume=True)

    assert first | second == whole, "losses, gradient norms and learning rates, bit for bit"
    assert sorted(second) == [5, 6, 7, 8, 9]
    adapter = adapter_in(end.checkpoint)
    assert adapter
    for file in (adapter.name, "optimizer.safetensors"):
        mine, theirs = load_file(end.checkpoint / file), load_file(resumed.checkpoint / file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)

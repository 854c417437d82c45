"""What is asked of a run while it trains: files in RUN/control/, and RUN/state.json, which tells what it does."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from qie.errors import QieError, UsageError
from qie.from_config import LaterSamples
from qie.training.control import Asked, Control, ask, ask_prompts, take_back
from qie.training.processes import Agreement
from qie.training.reporting.state_file import EVERY_S, SHARE, StateFile, read_state
from qie.training.run import Run
from qie.training.run_lock import locked
from tests.training.runs import ADAPTER, Bench, checkpoint, lines, losses, names

Acts = dict[int, Callable[[], object]]


def wishes(run: Path) -> list[str]:
    """The requests that are there, obeyed or not yet."""
    return sorted(file.name for file in (run / "control").glob("*"))


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Acts], None]:
    """Acts while a step is taken: that after so many steps."""
    taken = Run.training_step

    def set_acts(acts: Acts) -> None:
        def training_step(run: Run) -> Any:
            acts.get(run.step, lambda: None)()
            return taken(run)

        monkeypatch.setattr(Run, "training_step", training_step)

    return set_acts


@pytest.fixture
def while_held(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Acts while a run holds, one after the other, instead of waiting. Gives the list of those done."""

    def set_acts(*acts: Callable[[], object]) -> list[int]:
        done: list[int] = []

        def wait(_: Agreement) -> None:
            done.append(len(done))
            acts[done[-1]]()

        monkeypatch.setattr(Agreement, "wait", wait)
        return done

    return set_acts


def state(run: Path) -> tuple[str, int]:
    found = read_state(run)
    assert found and found["pid"] == os.getpid() and found["host"] == socket.gethostname() and found["steps"] == 4
    return found["state"], found["step"]


def same_end(run: Path, plain: Path) -> None:
    """The run ends where the one ended of which nothing was asked, bit for bit, and leaves no request."""
    assert lines(run) == lines(plain)
    for name in (ADAPTER, "optimizer.safetensors"):
        assert (checkpoint(run, 4) / name).read_bytes() == (checkpoint(plain, 4) / name).read_bytes()
    assert state(run) == ("finished", 4) and not (run / "control").exists()


def test_a_run_that_is_paused_saved_stopped_and_resumed_ends_with_the_weights_of_one_that_was_not(
    bench: Bench, plain: Path, tmp_path: Path, at_step, while_held
) -> None:
    """Each request is obeyed before the next step. A checkpoint that is asked for while the run holds ends no pause,
    and has the validation of its step behind it."""
    told: list[object] = []

    def tell() -> None:
        told.append((state(tmp_path), len(losses(tmp_path)), names(tmp_path), wishes(tmp_path)))

    held = while_held(
        lambda: (tell(), ask(tmp_path, "checkpoint")),
        lambda: (tell(), take_back(tmp_path, "pause")),
    )
    at_step({1: lambda: ask(tmp_path, "pause"), 2: lambda: ask(tmp_path, "stop")})
    result = bench.train(tmp_path)
    saved = ["checkpoint-000002"]
    assert held == [0, 1]
    assert told == [(("paused", 2), 2, [], ["pause"]), (("paused", 2), 2, saved, ["pause"])]
    assert "paused after step 2" in result.stderr and "stopped after 3 steps" in result.stdout
    assert state(tmp_path) == ("stopped", 3) and names(tmp_path) == [*saved, "checkpoint-000003"]
    assert not wishes(tmp_path)
    at_step({})
    bench.train(tmp_path, "--resume", checkpoint(tmp_path, 2))
    same_end(tmp_path, plain)


def test_a_run_that_is_stopped_while_it_holds_saves_a_checkpoint_also_before_its_first_step(
    bench: Bench, plain: Path, tmp_path: Path, while_held
) -> None:
    """The requests were left by another run: what it was asked to do once is forgotten, and a pause is not."""
    for name in ("pause", "stop", "checkpoint"):
        (tmp_path / "control").mkdir(exist_ok=True)
        (tmp_path / "control" / name).touch()
    held = while_held(lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = bench.train(tmp_path)
    assert result.stderr.count("asked of an earlier run; removed") == 2
    assert "will hold before its first step" in result.stderr
    assert held == [0] and "stopped after 0 steps" in result.stdout and names(tmp_path) == ["checkpoint-000000"]
    assert wishes(tmp_path) == ["pause"]
    take_back(tmp_path, "pause")
    bench.train(tmp_path, "--resume", "latest")
    same_end(tmp_path, plain)


def test_other_prompts_make_other_pictures_and_change_no_step(
    bench: Bench, plain: Path, photos: Path, tmp_path: Path, at_step
) -> None:
    """Malformed ones are refused with a line; without the file, the configuration's pictures, here none, come back."""
    file = tmp_path / "control" / "prompts.json"
    image = str(min((photos / "control_images").glob("*.png")))
    seen: list[object] = []
    at_step(
        {
            0: lambda: file.write_text('[{"prompt": "of no image", "sed": 7}]'),
            1: lambda: (
                seen.append((read_state(tmp_path) or {})["prompts"]),
                ask_prompts(tmp_path, [{"images": [image], "prompt": "make it night", "seed": 7}]),
            ),
            3: lambda: (seen.append((read_state(tmp_path) or {}).get("prompts")), ask_prompts(tmp_path, None)),
        }
    )
    told = bench.train(tmp_path, validation__sample_steps=2, cache__accept_recipe=True).stderr
    assert told.count("other prompts are refused") == 1 and "0.sed" in told
    assert "0.sed" in str(seen[0]) and seen[1] is None
    assert [path.name for path in (tmp_path / "samples").glob("*.png")] == ["step-000002-0.png"]
    assert "pictures are those of prompts.json" in told and "pictures are those of the configuration" in told
    same_end(tmp_path, plain)


def test_a_device_without_room_for_other_pictures_goes_on_training(
    bench: Bench, plain: Path, tmp_path: Path, at_step, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> list[Image.Image]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LaterSamples, "embed", lambda _, samples: samples)
    monkeypatch.setattr(LaterSamples, "open", lambda _, samples: full)
    at_step({0: lambda: ask_prompts(tmp_path, [{"prompt": "make it night"}])})
    told = bench.train(tmp_path).stderr
    assert told.count("other prompts are refused") == 1 and "lacks memory" in told
    (tmp_path / "control" / "prompts.json").unlink()
    (tmp_path / "control").rmdir()
    same_end(tmp_path, plain)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[{", "not JSON"),
        ('{"prompt": "a"}', "list"),
        ('[{"images": []}]', "0.prompt"),
        ("[" * 100_000, "not JSON"),
        ('[{"prompt": "a", "seed": -1}]', "0.seed"),
    ],
)
def test_what_is_no_list_of_samples_is_refused_with_its_place(tmp_path: Path, content: str, words: str) -> None:
    with Control(tmp_path) as control:
        (tmp_path / "control" / "prompts.json").write_text(content)
        assert control.look().prompts and not control.look().prompts
        with pytest.raises(UsageError) as caught:
            control.prompts()
    assert words in str(caught.value) and "prompts.json" in str(caught.value)


def test_a_request_that_cannot_be_removed_is_obeyed_once(tmp_path: Path) -> None:
    with Control(tmp_path) as control:
        (tmp_path / "control" / "checkpoint").mkdir()
        assert control.look() == Asked(checkpoint=True)
        control.done(control.look())
        assert control.look() == Asked()


def test_nothing_is_asked_where_no_run_trains(tmp_path: Path) -> None:
    for wish in (lambda: ask(tmp_path, "stop"), lambda: ask_prompts(tmp_path, [])):
        with pytest.raises(UsageError, match="no run trains"):
            wish()
    with locked(tmp_path):
        ask(tmp_path, "stop")
        with pytest.raises(UsageError, match="cannot be read"):
            ask_prompts(tmp_path, [{"prompt": 1}])
        assert wishes(tmp_path) == ["stop"]
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / ".lock").write_text(f"process {child} on {socket.gethostname()}")  # killed with -9
    with pytest.raises(UsageError, match="no run trains"):
        ask(tmp_path, "pause")
    (tmp_path / ".lock").write_text(f"process {child} on another machine")
    ask(tmp_path, "pause")


def test_the_state_is_written_at_changes_and_else_as_often_as_it_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, cost = [0.0], [0.0]
    write = json.dumps

    def slow(*arguments: Any, **named: Any) -> str:
        now[0] += cost[0]
        return write(*arguments, **named)

    monkeypatch.setattr("qie.training.reporting.state_file.json.dumps", slow)

    def step_at(seconds: float, step: int, doing: Any = "training") -> int:
        now[0] = seconds
        file.at(doing, step)
        return int((read_state(tmp_path) or {})["step"])

    file = StateFile(tmp_path, 9, enabled=True, clock=lambda: now[0])
    assert [step_at(0, 0), step_at(EVERY_S - 1, 1), step_at(EVERY_S, 2)] == [0, 0, 2]
    cost[0] = 1.0  # second
    assert step_at(EVERY_S + 1, 3, "paused") == 3
    assert [step_at(SHARE, 4, "paused"), step_at(SHARE + 9, 5, "paused")] == [3, 5]


def test_a_run_that_fails_says_so_in_its_state(bench: Bench, tmp_path: Path, at_step) -> None:
    def fail(error: BaseException) -> Callable[[], object]:
        def act() -> None:
            raise error

        return act

    at_step({2: fail(QieError("the disk\nis full", where="here"))})
    bench.train(tmp_path, code=1)
    found = read_state(tmp_path)
    assert found and (found["state"], found["step"], found["error"]) == ("failed", 2, "the disk")
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 0, "there from the first step on"
    at_step({2: fail(KeyboardInterrupt())})
    bench.train(tmp_path, code=130)
    found = read_state(tmp_path)
    assert found and (found["state"], found["step"]) == ("failed", 2) and found["error"].startswith("interrupted")

"""Optimizers and schedules by name, and an optimizer's state that fits whoever holds the parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from qie.config import OptimizerConfig, SchedulerConfig
from qie.errors import ConfigError
from qie.training.optimizer import (
    check_optimizer,
    load_named_state,
    make_optimizer,
    make_schedule,
    named_state,
    require_rates,
)

CLASSES = {
    "torch.optim.AdamW": {"lr": 0.1},
    "torch.optim.SGD": {"lr": 0.1, "momentum": 0.9},
    "torch.optim.Adafactor": {"lr": 0.1},
    "prodigyopt.Prodigy": {"lr": 1.0},
    "bitsandbytes.optim.AdamW8bit": {"lr": 0.1, "min_8bit_size": 64},
}


def parameters(order: tuple[str, ...] = ("a", "b", "c")) -> dict[str, torch.nn.Parameter]:
    made = {
        name: torch.nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(ord(name))))
        for name in ("a", "b", "c")
    }
    return {name: made[name] for name in order}


def test_a_pattern_gives_layers_a_rate_of_their_own_and_has_to_be_of_one() -> None:
    names = ("blocks.0.to_q.lora_A.default.weight", "blocks.0.to_k.lora_A.default.weight", "blocks.0.norm.weight")
    weights = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in names}
    section = OptimizerConfig(class_path="torch.optim.SGD", lr_pattern={"to_k": 0.5, r"blocks\.\d\.norm": 0.0})
    optimizer = make_optimizer(section, weights)
    schedule = make_schedule(SchedulerConfig(scheduler_type="linear", warmup_steps=0), optimizer, 10)
    for weight in weights.values():
        weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert [round(1 - float(weight[0, 0].detach()), 4) for weight in weights.values()] == [1e-4, 0.5, 0.0]
    schedule.step()
    assert sorted(schedule.get_last_lr()) == pytest.approx([0.0, 0.9e-4, 0.45])
    require_rates(section, names)
    with pytest.raises(ConfigError, match=r"(?s)of no layer.*lr_pattern.*to_kk"):
        require_rates(OptimizerConfig(lr_pattern={"to_kk": 0.1}), names)


def step(optimizer: torch.optim.Optimizer, weights: dict[str, torch.nn.Parameter], number: int) -> None:
    for name, weight in weights.items():
        generator = torch.Generator().manual_seed(1000 * number + ord(name))
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()


def made(path: str, weights: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    pytest.importorskip(path.partition(".")[0])
    return make_optimizer(OptimizerConfig(class_path=path, init_args=CLASSES[path]), weights)


@pytest.mark.parametrize("path", CLASSES)
def test_an_optimizer_that_goes_on_from_its_saved_state_is_the_one_that_never_stopped(path: str) -> None:
    """Even when its parameters come in another order, as those of other processes may."""
    weights = parameters()
    optimizer = made(path, weights)
    for number in range(3):
        step(optimizer, weights, number)
    tensors, numbers = named_state(optimizer, weights)
    tensors, numbers = load(save(tensors)), json.loads(json.dumps(numbers))
    other = parameters(("c", "a", "b"))
    for name, weight in other.items():
        weight.data.copy_(weights[name].data)
    again = made(path, other)
    load_named_state(again, other, tensors, numbers)
    for number in range(3, 6):
        step(optimizer, weights, number)
        step(again, other, number)
    # Prodigy alone adds something up over its parameters, in float64, far below a bit of a weight.
    assert all(torch.equal(weights[name], other[name]) for name in weights)


def test_a_state_of_a_parameter_that_is_not_there_is_no_state_of_this_run() -> None:
    weights = parameters()
    optimizer = made("torch.optim.AdamW", weights)
    step(optimizer, weights, 0)
    tensors, numbers = named_state(optimizer, weights)
    fewer = {"a": weights["a"]}
    with pytest.raises(KeyError):
        load_named_state(made("torch.optim.AdamW", fewer), fewer, tensors, numbers)


@pytest.mark.parametrize(
    ("path", "arguments", "what"),
    [
        ("torch.optim.Adamm", {}, "no such class"),
        ("nowhere.Adam", {}, "not in an installed package"),
        ("AdamW", {}, "not in an installed package"),
        ("this.Zen", {}, "not in an installed package"),
        ("__main__.Adam", {}, "not in an installed package"),
        ("..optim.Adam", {}, "not in an installed package"),
        ("torch..Adam", {}, "not in an installed package"),
        ("torch.optim.", {}, "not in an installed package"),
        ("torch.optim.Optimizer", {}, "arguments are refused"),
        ("torch.nn.Linear", {}, "not a subclass of"),
        ("torch.optim.LBFGS", {}, "evaluates the loss"),
        ("torch.optim.AdamW", {"learning_rate": 1}, "arguments are refused"),
        ("torch.optim.AdamW", {"betas": [2.0, 2.0]}, "arguments are refused"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(path: str, arguments: dict, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_optimizer(OptimizerConfig(class_path=path, init_args=arguments), parameters())


def test_an_optimizer_that_trains_other_weights_than_it_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "eval", lambda self: None, raising=False)  # as schedule-free ones have
    with pytest.raises(ConfigError, match="separate weights for training"):
        make_optimizer(OptimizerConfig(class_path="torch.optim.SGD"), parameters())


@pytest.mark.parametrize(
    ("path", "arguments", "schedule", "what"),
    [
        ("torch.optim.SparseAdam", {}, {}, "first step fails"),
        ("torch.optim.AdamW", {}, {"class_path": "StepLR", "init_args": {"step_size": 0}}, "schedule fails"),
        ("torch.optim.AdamW", {}, {"class_path": "OneCycleLR", "init_args": {"max_lr": 1, "total_steps": 7}}, "fails"),
        ("torch.optim.AdamW", {}, {"class_path": "ExponentialLR", "init_args": {"gamma": 3e38}}, "schedule fails"),
        ("torch.optim.AdamW", {"lr": 0}, {"scheduler_type": "polynomial"}, "refuses its values"),
        # Rates of layers' own.
        ("prodigyopt.Prodigy", {"lr": 1.0}, {}, "first step fails.*different lr values"),
        ("torch.optim.AdamW", {}, {"class_path": "OneCycleLR", "init_args": {"max_lr": 1, "total_steps": 11}}, "one"),
    ],
)
def test_what_would_fail_within_the_run_is_refused_before_it(
    path: str, arguments: dict, schedule: dict, what: str
) -> None:
    if name := schedule.get("class_path"):
        schedule = schedule | {"class_path": f"torch.optim.lr_scheduler.{name}"}
    pytest.importorskip(path.partition(".")[0])
    rates = {"to_q": 0.5}
    made = OptimizerConfig(class_path=path, init_args={"lr": 1e-3} | arguments, lr_pattern=rates)
    with pytest.raises(ConfigError, match=f"(?s){what}"):
        check_optimizer(made, SchedulerConfig(**schedule), torch.device("cpu"), 10)
    step = SchedulerConfig(class_path="torch.optim.lr_scheduler.StepLR", init_args={"step_size": 2})
    for accepted in (SchedulerConfig(), step):
        check_optimizer(OptimizerConfig(lr_pattern=rates), accepted, torch.device("cpu"), 10)


@pytest.mark.parametrize("name", ["beside_me", "prodigyopt"])
def test_a_module_in_the_working_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nor does it stand in for the package of that name."""
    (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match="not in an installed package") as caught:
        make_optimizer(OptimizerConfig(class_path=f"{name}.Adam"), parameters())
    assert (caught.value.where, caught.value.found) == ("optimizer.class_path", f"{name}.Adam")
    with pytest.raises(ConfigError, match="not in an installed package"):
        rates(SchedulerConfig(class_path=f"{name}.Adam"))


def rates(section: SchedulerConfig, steps: int = 12) -> list[float]:
    weights = parameters()
    optimizer = made("torch.optim.AdamW", weights)
    schedule = make_schedule(section, optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    "name", ["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"]
)
def test_every_schedule_of_diffusers_works_and_warms_up(name: str) -> None:
    found = rates(SchedulerConfig(scheduler_type=name, warmup_steps=4, num_cycles=2, power=2.0))
    assert found[4] == pytest.approx(0.1)
    assert name == "constant" or found[:4] == pytest.approx([0, 0.025, 0.05, 0.075])
    assert name.startswith("constant") or found[-1] < 0.05


def test_cycles_and_power_change_the_schedules_that_have_them() -> None:
    once, twice = (rates(SchedulerConfig(scheduler_type="cosine_with_restarts", num_cycles=n)) for n in (1, 2))
    straight, bent = (rates(SchedulerConfig(scheduler_type="polynomial", warmup_steps=0, power=p)) for p in (1.0, 3.0))
    assert straight[6] > bent[6]
    assert once == twice  # still warming up
    once, twice = (
        rates(SchedulerConfig(scheduler_type="cosine_with_restarts", warmup_steps=0, num_cycles=n)) for n in (1, 2)
    )
    assert once[5] > twice[5] and once[6] < twice[6]


def test_a_schedule_of_torch_is_found_by_its_path() -> None:
    section = SchedulerConfig(class_path="torch.optim.lr_scheduler.StepLR", init_args={"step_size": 5, "gamma": 0.5})
    assert rates(section) == pytest.approx([0.1] * 5 + [0.05] * 5 + [0.025] * 2)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("lr_scheduler.ReduceLROnPlateau", "depends on the loss"),
        ("lr_scheduler.Nope", "no such class"),
        ("AdamW", "not a subclass of"),
        ("lr_scheduler.StepLR", "arguments are refused"),
    ],
)
def test_a_schedule_that_cannot_be_used_is_refused(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        rates(SchedulerConfig(class_path=f"torch.optim.{name}"))

"""Optimizers and learning-rate schedules by their names, and an optimizer's state by the names of parameters."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from diffusers.optimization import get_scheduler
from peft.utils.other import get_pattern_key
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from qie.config import OptimizerConfig, SchedulerConfig
from qie.config.schema import MAX_LR
from qie.errors import ConfigError
from qie.training.model.adapter_file import layer_of, require_layers
from qie.training.model.sharding import all_whole, like, not_finite


def make_optimizer(section: OptimizerConfig, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `optimizer.class_path` over `parameters`, which have their names in the model.

    Raises:
        ConfigError: there is no such class, it is not an optimizer, or it refuses `optimizer.init_args`.
    """
    return _optimizer(section, _by_rate(section.lr_pattern, parameters))


def _optimizer(
    section: OptimizerConfig, by_rate: Mapping[float | None, list[torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """Over parameters by their rates, of which None is that of `optimizer.init_args`."""
    key = "optimizer.class_path"
    found = _named(section.class_path, torch.optim.Optimizer, key, "torch.optim.AdamW")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError("the optimizer evaluates the loss itself", where=key, found=section.class_path)
    if hasattr(found, "eval"):
        raise ConfigError(
            "the optimizer keeps separate weights for training and for inference, and a checkpoint holds only one",
            where=key,
            found=section.class_path,
            hint="such as prodigyopt.Prodigy or torch.optim.AdamW; train.ema_decay averages weights, too",
        )
    groups = [{"params": own} | ({} if rate is None else {"lr": rate}) for rate, own in by_rate.items() if own]
    optimizer: torch.optim.Optimizer = _made(found, (groups,), section.init_args, "optimizer.init_args")
    return optimizer


def _by_rate(
    rates: Mapping[str, float], parameters: Mapping[str, torch.nn.Parameter]
) -> dict[float | None, list[torch.nn.Parameter]]:
    """The parameters of `optimizer.init_args`, then those of each rate of `optimizer.lr_pattern`."""
    found: dict[float | None, list[torch.nn.Parameter]] = {rate: [] for rate in (None, *sorted(rates.values()))}
    for name, parameter in parameters.items():
        found[rates.get(get_pattern_key(list(rates), layer_of(name)))].append(parameter)
    return found


def require_rates(section: OptimizerConfig, parameters: Iterable[str]) -> None:
    """Raise ConfigError for a pattern of `optimizer.lr_pattern` that is of none of the parameters."""
    layers = sorted({layer_of(name) for name in parameters})
    require_layers(section.lr_pattern, layers, "optimizer.lr_pattern", "that is trained")


MAX_TRIED = 100_000
"""Steps of a schedule, a second's work."""


def check_optimizer(
    optimizer: OptimizerConfig, schedule: SchedulerConfig, device: torch.device, steps: int = 1_000
) -> None:
    """Try both on a small weight of each rate, for the steps of a run, before 41 GB of weights are read.

    Raises:
        ConfigError: one cannot be made, or a step of it fails, or a learning rate is out of bounds, or the schedule
            has one for all layers in spite of optimizer.lr_pattern.
    """
    weights = {
        rate: torch.nn.Parameter(torch.zeros(2, 2, device=device)) for rate in (None, *optimizer.lr_pattern.values())
    }
    made = _optimizer(optimizer, {rate: [weight] for rate, weight in weights.items()})
    several = len({group["lr"] for group in made.param_groups}) > 1
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    # At the rates themselves: those of a warmup begin at 0.
    with _refused("optimizer" if several else "optimizer.init_args", "the optimizer's first step fails"):
        made.step()
    rates = make_schedule(schedule, made, steps)
    made.step()  # which torch wants before that of the schedule
    heeded = not several or schedule.class_path is None
    with _refused("lr_scheduler", "the schedule fails within the run"):
        # Those of diffusers are the same function throughout.
        for _ in range(1 if schedule.class_path is None else min(steps, MAX_TRIED)):
            now = rates.get_last_lr()
            for rate in now:
                if not 0 <= rate <= MAX_LR:
                    raise ValueError(f"a learning rate of {rate:g} at step {rates.last_epoch}, not of 0 to {MAX_LR:g}")
            heeded = heeded or len(set(now)) > 1
            rates.step()
    if not heeded:
        raise ConfigError(
            "the schedule has one learning rate for all layers, and optimizer.lr_pattern has several",
            where="lr_scheduler.class_path",
            expected="a schedule that multiplies the optimizer's rates",
            found=schedule.class_path,
            hint="leave optimizer.lr_pattern out, or take another schedule",
        )


def make_schedule(section: SchedulerConfig, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """The schedule of `lr_scheduler` for a run of `steps`.

    Raises:
        ConfigError: there is no such class, it refuses its arguments, or it depends on the loss.
    """
    if section.class_path is None:
        with _refused("lr_scheduler", "the schedule refuses its values"):
            return get_scheduler(  # type: ignore[no-any-return]
                section.scheduler_type,
                optimizer,
                num_warmup_steps=section.warmup_steps,
                num_training_steps=steps,
                num_cycles=section.num_cycles,
                power=section.power,
            )
    key = "lr_scheduler.class_path"
    found = _named(section.class_path, LRScheduler, key, "torch.optim.lr_scheduler.OneCycleLR")
    if issubclass(found, ReduceLROnPlateau):
        raise ConfigError("the schedule depends on the loss", where=key, found=section.class_path)
    schedule: LRScheduler = _made(found, (optimizer,), section.init_args, "lr_scheduler.init_args")
    try:
        json.dumps(schedule.state_dict())
    except TypeError as error:
        raise ConfigError(
            "the schedule's state cannot be saved", where=key, found=f"{section.class_path}: {error}"
        ) from error
    return schedule


def _named(path: str, kind: type, key: str, example: str) -> Any:
    """The class at an import path. An import runs code, so the class has to be in an installed package."""
    module, _, name = path.rpartition(".")
    if not (module and all(part.isidentifier() for part in path.split(".")) and _is_installed(module.split(".")[0])):
        raise ConfigError(
            "the class is not in an installed package, and qie imports nothing else",
            where=key,
            found=path,
            expected=f"such as {example}",
            hint="install its package",
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        why = f"{path} ({type(error).__name__}: {error})"
        raise ConfigError("no such class", where=key, found=why, expected=f"such as {example}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"the class is not a subclass of {kind.__name__}", where=key, found=path)
    return found


def _is_installed(package: str) -> bool:
    """Whether Python would import `package` from where a distribution has installed it: neither a module of the
    standard library nor one that lies in the working directory."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made by hand
        return False
    places = [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or [])) if place] if spec else []

    def within(names: Iterable[str]) -> bool:
        return any(place.is_relative_to(root) for name in names for root in _roots(name) for place in places)

    with suppress(metadata.PackageNotFoundError):
        # Most are called as their package is. To look through the files of all takes a second.
        if within([package]):
            return True
    return within(metadata.packages_distributions().get(package, []))


def _roots(name: str) -> list[Path]:
    """The folder that a distribution is in; of an editable one, its project's, too."""
    distribution = metadata.distribution(name)
    about = json.loads(distribution.read_text("direct_url.json") or "{}")
    project = [Path(unquote(urlsplit(about["url"]).path))] if about.get("dir_info", {}).get("editable") else []
    return [Path(str(distribution.locate_file(""))), *project]


def _made(found: Any, first: tuple[Any, ...], arguments: Mapping[str, Any], key: str) -> Any:
    with _refused(key, "the arguments are refused"):
        return found(*first, **arguments)


@contextmanager
def _refused(key: str, what: str) -> Iterator[None]:
    """Raise ConfigError for whatever a class of any package, with any arguments, raises within."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(what, where=key, found=f"{type(error).__name__}: {error}") from error


def named_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], *, wanted: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state by the names of its parameters: whole tensors, and the rest, which JSON can hold.

    Every process has to ask for it; those that do not want it get no tensors. It means the same whichever processes
    hold the parameters, and in whatever order.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    values: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        values |= {f"group {number}/{field}": value for field, value in group.items() if field != "params"}
        for parameter in group["params"]:
            owner = names[id(parameter)]
            values |= {f"{owner}/{field}": value for field, value in optimizer.state.get(parameter, {}).items()}
    found = {path: value for path, value in values.items() if isinstance(value, torch.Tensor)}
    numbers = {path: value for path, value in values.items() if path not in found}
    return _unshared(all_whole(found, wanted=wanted)), numbers


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file holds no tensors that share memory, as the tables of 8-bit optimizers do."""
    first = {tensor.data_ptr(): path for path, tensor in reversed(tensors.items())}
    return {path: tensor if first[tensor.data_ptr()] == path else tensor.clone() for path, tensor in tensors.items()}


def load_named_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
) -> None:
    """Restore an optimizer's state from the tensors and numbers of `named_state`.

    Raises:
        KeyError, IndexError: a state is of no parameter, or no group, of this run.
        ValueError: a number is not finite; names it.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {names[id(parameter)]: number for number, parameter in enumerate(order)}
    state = optimizer.state_dict()
    values: dict[int, dict[str, Any]] = {}
    for path, value in [*tensors.items(), *numbers.items()]:
        owner, _, field = path.rpartition("/")
        if owner.startswith("group "):
            state["param_groups"][int(owner.removeprefix("group "))][field] = value
        else:
            place = places[owner]
            if isinstance(value, torch.Tensor) and not_finite({path: value}):
                raise ValueError(f"{path} is not finite")
            spread = like(value, order[place]) if isinstance(value, torch.Tensor) else value
            values.setdefault(place, {})[field] = spread
    optimizer.load_state_dict({"state": values, "param_groups": state["param_groups"]})
    if not all(math.isfinite(group["lr"]) for group in optimizer.param_groups):
        raise ValueError("a learning rate is not finite")

"""Optimizers by their import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence

import torch

from qie.config import OptimizerConfig
from qie.errors import ConfigError


def make_optimizer(section: OptimizerConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `optimizer.class_path` over `parameters`.

    Raises:
        ConfigError: there is no such class, it is no optimizer, or it refuses `optimizer.init_args`.
    """
    module, _, name = section.class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "no such optimizer",
            where="optimizer.class_path",
            found=section.class_path,
            expected="such as torch.optim.AdamW",
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError("not an optimizer", where="optimizer.class_path", found=section.class_path)
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            "the optimizer evaluates the loss itself", where="optimizer.class_path", found=section.class_path
        )
    try:
        return found(parameters, **section.init_args)
    except (TypeError, ValueError) as error:
        raise ConfigError("the optimizer refuses its arguments", where="optimizer.init_args", found=error) from error

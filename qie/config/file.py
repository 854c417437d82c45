"""Reading a configuration file, and applying overrides."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError as PydanticError

from qie.config.environment import Key, Typed, expand
from qie.config.faults import explained, key_of
from qie.config.loader import MAX_CHARS, parse
from qie.config.sections import Config
from qie.errors import ConfigError

T = TypeVar("T")


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, values being YAML themselves, and look up `${NAME}`.

    Raises:
        ConfigError: the file is missing or no YAML mapping, an environment variable is not set, or a key (the nearest
            is named) or value is refused.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
        tree = parse(text)
    except OSError as error:
        raise ConfigError("the configuration file cannot be read", where=path, found=error.strerror) from error
    except ValueError as error:
        raise ConfigError("the configuration file is no YAML", where=path, found=error) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the configuration file holds no sections",
            where=path,
            expected="model:, data:, …",
            found=type(tree).__name__,
        )
    typed = Typed(path, text, [_set(tree, override) for override in overrides])
    texts: dict[Key, str] = {}
    tree = expand(tree, texts, typed)
    try:
        return _validated(tree, texts)
    except PydanticError as error:
        raise explained(error, tree, typed) from error


def required(value: T | None, key: str, why: str) -> T:
    """`value`, or a ConfigError that names the missing `key`."""
    if value is None:
        raise ConfigError(f"{key} is not set", expected=why, hint=f"set {key} in the file, or with --set {key}=…")
    return value


def _validated(tree: Any, texts: dict[Key, str]) -> Config:
    """The configuration. Values from the environment stay texts where nothing else is taken: `run_name: ${JOB}`."""
    try:
        return Config.model_validate(tree)
    except PydanticError as error:
        wanted = {key_of(fault, tree) for fault in error.errors() if fault["type"] == "string_type"} & texts.keys()
        if not wanted:
            raise
    for *steps, last in wanted:
        place = tree
        for step in steps:
            place = place[step]
        place[last] = texts[(*steps, last)]
    return Config.model_validate(tree)


def _set(tree: dict[str, Any], override: str) -> Key:
    """Apply a --set to `tree`; returns the way to its value."""
    name, equals, text = override.partition("=")
    steps = name.strip().split(".")
    if not equals or not all(steps):
        raise ConfigError("a --set cannot be understood", found=override, expected="section.key=value")
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError("the value of a --set is no YAML", where=name, found=error) from error
    key: Key = ()
    place: Any = tree
    for depth, step in enumerate(steps):
        at: Any = step
        if isinstance(place, list) and step.isdecimal() and int(step) < len(place):
            at = int(step)
        elif not isinstance(place, dict):
            found = f"{'.'.join(steps[:depth])}: {place!r}"
            raise ConfigError("a --set reaches into something that is no section", where=name, found=found)
        key = (*key, at)
        if depth == len(steps) - 1:
            place[at] = value
        elif isinstance(place, dict) and place.get(at) is None:
            place[at] = {}
        place = place[at]
    return key

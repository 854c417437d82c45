"""Reading a configuration file, applying overrides, and explaining what is wrong with it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel
from pydantic import ValidationError as PydanticError

from qie.config.sections import Config
from qie.errors import ConfigError

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML without two traps of PyYAML: the usual `1e-4` is a number, and a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for position, key in enumerate(keys) if key in keys[:position]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides, values being YAML themselves.

    Raises:
        ConfigError: the file is missing or no YAML mapping, or a key (the nearest is named) or value is refused.
    """
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError("the configuration file cannot be read", where=path, found=error.strerror) from error
    except (yaml.YAMLError, ValueError) as error:  # PyYAML raises ValueError for what only looks like a date
        raise ConfigError("the configuration file is no YAML", where=path, found=_one_line(error)) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the configuration file holds no sections",
            where=path,
            expected="model:, data:, …",
            found=type(tree).__name__,
        )
    for override in overrides:
        _set(tree, override)
    try:
        return Config.model_validate(tree)
    except PydanticError as error:
        raise _explained(error, path) from error


def required(value: T | None, key: str, why: str) -> T:
    """`value`, or a ConfigError that names the missing `key`."""
    if value is None:
        raise ConfigError(f"{key} is not set", expected=why, hint=f"set {key} in the file, or with --set {key}=…")
    return value


def _set(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, last = name.strip().split(".")
    if not equals or not all([*sections, last]):
        raise ConfigError("a --set cannot be understood", found=override, expected="section.key=value")
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("the value of a --set is no YAML", where=name, found=_one_line(error)) from error
    for section in sections:
        child = tree.get(section)
        if child is None:
            child = tree[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                "a --set reaches into something that is no section", where=name, found=f"{section}: {child!r}"
            )
        tree = child
    tree[last] = value


def _explained(error: PydanticError, path: Path) -> ConfigError:
    """The first fault, in qie's words; the rest are counted."""
    faults = error.errors(include_url=False)
    first = faults[0]
    keys = {_key(fault["loc"]) for fault in faults}  # a value that may be of several types is a fault for each of them
    key = _key(first["loc"])
    more = f"; and {len(keys) - 1} more faults" if len(keys) > 1 else ""
    where = f"{path}, {'.'.join(key)}"
    if first["type"] == "extra_forbidden":
        known = _keys_beside(key)
        near = difflib.get_close_matches(key[-1], known, n=1, cutoff=0.5)
        return ConfigError(
            f"unknown key {key[-1]!r}{more}",
            where=where,
            expected=f"one of {', '.join(known)}",
            hint=f"did you mean {near[0]!r}?" if near else None,
        )
    if first["type"] == "missing":
        return ConfigError(f"a required key is missing{more}", where=where)
    expected = " or ".join(dict.fromkeys(fault["msg"] for fault in faults if _key(fault["loc"]) == key))
    return ConfigError(f"a value is refused{more}", where=where, expected=expected, found=repr(first["input"]))


def _key(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The key in the file; behind it pydantic names the types it has tried, and positions in lists."""
    steps = tuple(str(step) for step in location)
    model: type[BaseModel] | None = Config
    for depth, step in enumerate(steps, start=1):
        section = _section(model, step)
        if section is None:
            return steps[:depth]
        model = section
    return steps


def _keys_beside(key: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for step in key[:-1]:
        model = _section(model, step) or model
    return list(model.model_fields)


def _section(model: type[BaseModel] | None, step: str) -> type[BaseModel] | None:
    """The section that a step leads to; None when it leads to a value, or to nothing."""
    field = model.model_fields.get(step) if model else None
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

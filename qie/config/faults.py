"""What pydantic finds wrong with a configuration, in words for those who wrote the file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic import ValidationError as PydanticError

from qie.config.environment import Key, dotted
from qie.config.sections import Config
from qie.errors import ConfigError


def explained(error: PydanticError, tree: Any, path: Path) -> ConfigError:
    """The first fault; the rest are counted. `tree` is what was refused."""
    faults = [(key_of(fault, tree), fault) for fault in error.errors(include_url=False)]
    # A value that may be of several types has faults for each. Those furthest inside are of the type that was meant.
    faults = [(key, fault) for key, fault in faults if not any(_is_inside(other, key) for other, _ in faults)]
    faults.sort(key=lambda keyed: keyed[1]["type"] == "missing")  # where one is misspelt, its right name is missing
    key, first = faults[0]
    others = len({key for key, _ in faults}) - 1
    more = f"; and {others} more fault{'s' if others > 1 else ''}" if others else ""
    where = f"{path}, {dotted(key)}"
    if first["type"] == "extra_forbidden":
        known = list(_section(key[:-1]).model_fields)
        near = difflib.get_close_matches(str(key[-1]), known, n=1, cutoff=0.5)
        return ConfigError(
            f"unknown key {key[-1]!r}{more}",
            where=where,
            expected=f"one of {', '.join(known)}",
            hint=f"did you mean {near[0]!r}?" if near else None,
        )
    if first["type"] == "missing":
        return ConfigError(f"a required key is missing{more}", where=where)
    expected = " or ".join(dict.fromkeys(_expected(key, fault) for other, fault in faults if other == key))
    return ConfigError(f"a value is refused{more}", where=where, expected=expected, found=repr(first["input"]))


def key_of(fault: Any, tree: Any) -> Key:
    """The key in the file. Among the steps to it pydantic also names the types that it has tried."""
    key: Key = ()
    for step in fault["loc"]:
        if (isinstance(tree, dict) and step in tree) or (isinstance(tree, list) and isinstance(step, int)):
            key, tree = (*key, step), tree[step]
    return (*key, fault["loc"][-1]) if fault["type"] == "missing" else key


def _is_inside(key: Key, outer: Key) -> bool:
    return len(key) > len(outer) and key[: len(outer)] == outer


def _expected(key: Key, fault: Any) -> str:
    if fault["type"] == "model_type":
        return f"a section with keys of {', '.join(_section(key).model_fields)}"
    return str(fault["msg"]).removeprefix("Value error, ")


def _section(key: Key) -> type[BaseModel]:
    """The class of the section at a key. Positions do not matter: all elements of a list are of one class."""
    model: type[BaseModel] = Config
    for step in key:
        field = model.model_fields.get(str(step))
        model = (section_in(field.annotation) if field else None) or model
    return model


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The class of section that a field of this type holds, by itself or in a list; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)

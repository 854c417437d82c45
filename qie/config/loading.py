"""Loading a Config from a file, and explaining pydantic's errors to the author of the file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel
from pydantic import ValidationError as PydanticError

from qie.config.earlier_programs import MOVED, moved
from qie.config.schema import Config
from qie.config.yaml_text import MAX_CHARS, Key, Typed, dotted, expand, parse_yaml
from qie.errors import ConfigError

T = TypeVar("T")


def load_config(settings: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, values being YAML themselves, and look up `${NAME}`.

    Args:
        settings: the file's path, or what would stand in it as a dictionary, whose values may be paths.
        overrides: as of `--set`.

    Raises:
        ConfigError: the file is missing or not a YAML mapping, an environment variable is not set, or a key (names the
            nearest) or value is refused.
    """
    if isinstance(settings, Mapping):
        path, text, tree = None, "", _plain(settings)
    else:
        path = Path(settings)
        text, tree = _read(path)
    typed = Typed(path, text, [_set(tree, override) for override in overrides])
    texts: dict[Key, str] = {}
    tree = expand(tree, texts, typed)
    try:
        return _validated(tree, texts)
    except PydanticError as error:
        raise config_error(error, tree, typed) from error


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file, and its sections."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
        tree = parse_yaml(text)
    except OSError as error:
        raise ConfigError("the configuration file cannot be read", where=path, found=error.strerror) from error
    except ValueError as error:
        raise ConfigError("the configuration file is not valid YAML", where=path, found=error) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the configuration file has no sections",
            where=path,
            expected="model:, data:, …",
            found=type(tree).__name__,
        )
    return text, tree


def _plain(value: Any) -> Any:
    """A copy of nested values as YAML has them: dictionaries, lists and texts, also for tuples and paths."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def required(value: T | None, key: str, why: str) -> T:
    """`value`, or a ConfigError that names the missing `key`."""
    if value is None:
        raise ConfigError(f"{key} is not set", expected=why, hint=f"set {key} in the file, or with --set {key}=…")
    return value


def _validated(tree: Any, texts: dict[Key, str]) -> Config:
    """The configuration. Values of the environment stay texts where a field takes no other: `run_name: ${JOB}`."""
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
        raise ConfigError("a --set cannot be parsed", found=override, expected="section.key=value")
    try:
        # To YAML a colour such as #ffffff is a comment; nobody sets a key to one.
        value = text if text.startswith("#") else parse_yaml(text)
    except ValueError as error:
        raise ConfigError("the value of a --set is not valid YAML", where=name, found=error) from error
    key: Key = ()
    place: Any = tree
    for depth, step in enumerate(steps):
        at: Any = step
        if isinstance(place, list) and step.isdecimal() and int(step) < len(place):
            at = int(step)
        elif not isinstance(place, dict):
            found = f"{'.'.join(steps[:depth])}: {place!r}"
            raise ConfigError("a --set names a key inside a value that is not a section", where=name, found=found)
        key = (*key, at)
        if depth == len(steps) - 1:
            place[at] = value
        elif isinstance(place, dict) and place.get(at) is None:
            place[at] = {}
        place = place[at]
    return key


MOST_HINTS = 8
MOST_FOUND = 60  # characters


def config_error(error: PydanticError, tree: Any, typed: Typed) -> ConfigError:
    """An error for the first fault of `tree`, with a count of the others and the replacements of old keys."""
    faults = [(key_of(fault, tree), fault) for fault in error.errors(include_url=False)]
    # A value that may be of several types has faults for each. Those furthest inside are of the type that was meant.
    faults = [(key, fault) for key, fault in faults if not any(_is_inside(other, key) for other, _ in faults)]
    faults.sort(key=lambda keyed: keyed[1]["type"] == "missing")  # where one is misspelt, its right name is missing
    key, first = faults[0]
    others = len({key for key, _ in faults}) - 1
    more = f"; and {others} more fault{'s' if others > 1 else ''}" if others else ""
    if first["type"] == "extra_forbidden":
        return _unknown([key for key, fault in faults if fault["type"] == "extra_forbidden"], tree, typed, more)
    if first["type"] == "missing":
        return ConfigError(f"a required key is missing{more}", where=typed.where(key))
    expected = " or ".join(dict.fromkeys(_expected(key, fault) for other, fault in faults if other == key))
    found = first["input"]
    typed_value = f"{dotted(key)}: {str(found).lower()}"
    hint = f"{typed_value} → {MOVED[typed_value]}" if typed_value in MOVED else None
    # Where keys of a section disagree, `expected` names them, and a long section hides them.
    whole = first["type"] == "value_error" and isinstance(found, dict) and len(repr(found)) > MOST_FOUND
    told = None if whole else repr(found)
    return ConfigError(f"a value is refused{more}", where=typed.where(key), expected=expected, found=told, hint=hint)


def _unknown(keys: list[Key], tree: Any, typed: Typed, more: str) -> ConfigError:
    """The first of some unknown keys, with what to write instead of it and of further old ones."""
    old: dict[Key, str] = {}
    for key in keys:
        known_within = {leaf: answer for leaf in _leaves(key, tree) if (answer := moved(_name(leaf)))}
        answer = moved(_name(key))
        old |= known_within or ({key: answer} if answer else {})
    first = next((leaf for leaf in old if leaf[: len(keys[0])] == keys[0]), keys[0])
    name = ".".join(map(str, first[len(keys[0]) - 1 :]))
    known = list(_section(keys[0][:-1]).model_fields)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    answers = "; ".join(islice(old.values(), MOST_HINTS))
    return ConfigError(
        f"unknown key {name!r}{more}",
        where=typed.where(first),
        expected=None if first in old else f"one of {', '.join(known)}",
        hint=f"did you mean {near[0]!r}?" if near and first not in old else answers or None,
    )


def _leaves(key: Key, tree: Any) -> Iterator[Key]:
    """The keys within a section, or within a list of sections; else the key itself."""
    value = tree
    for step in key:
        value = value[step]
    steps: Iterable[Any] = ()
    if isinstance(value, dict):
        steps = value
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        steps = range(len(value))
    inner = [leaf for step in steps for leaf in _leaves((*key, step), tree)]
    yield from inner or [key]


def _name(key: Key) -> str:
    """A key without positions in lists."""
    return ".".join(step for step in key if isinstance(step, str))


def key_of(fault: Any, tree: Any) -> Key:
    """The key in the file. pydantic also names the types that it has tried among the steps to the key."""
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

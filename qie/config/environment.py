"""References to the environment in values of a configuration: ${NAME}, ${NAME:-default}; $${ is a plain ${."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qie.config.loader import line_of, parse_scalar
from qie.errors import ConfigError

Key = tuple[int | str, ...]
"""The way to a value in the file: keys of sections and positions in lists."""

_REFERENCE = re.compile(r"(?P<escape>\$\$\{)|\$\{(?:(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\})?", re.ASCII)


@dataclass(frozen=True)
class Typed:
    """What the user typed: a file, and the values that --set put in place of the file's, first to last."""

    path: Path
    text: str
    overrides: list[Key]

    def where(self, key: Key) -> str:
        """Where the value at `key` comes from: `--set data.area_px`, or `my.yaml:12, data.area_px`."""
        found, line = line_of(self.text, key)
        above = any(override == key[: len(override)] for override in self.overrides)
        within = any(key == override[: len(key)] for override in self.overrides)
        if above or (within and found < len(key)):
            return f"--set {dotted(key)}"
        return f"{self.path}:{line}, {dotted(key)}"


def expand(value: Any, texts: dict[Key, str], typed: Typed, key: Key = ()) -> Any:
    """A copy of `value`, which was typed at `key`, in which references are replaced, but not in keys.

    A value that is nothing but one reference becomes what YAML reads in its text: a number, true, null. `texts` gets
    that text, for keys that want a text after all.

    Raises:
        ConfigError: a variable is not set, or what follows `${` is no name.
    """
    if isinstance(value, dict):
        return {name: expand(child, texts, typed, (*key, name)) for name, child in value.items()}
    if isinstance(value, list):
        return [expand(child, texts, typed, (*key, position)) for position, child in enumerate(value)]
    if not isinstance(value, str):
        return value
    text = _REFERENCE.sub(lambda reference: _text(reference, lambda: typed.where(key)), value)
    if not _REFERENCE.fullmatch(value):
        return text
    texts[key] = text
    return parse_scalar(text)


def _text(reference: re.Match[str], where: Callable[[], str]) -> str:
    name, default = reference["name"], reference["default"]
    if reference["escape"]:
        return "${"
    if name is None:
        raise ConfigError(
            "a reference to the environment cannot be read",
            where=where(),
            expected="${NAME} or ${NAME:-default}, without further braces",
            found=reference.string,
            hint="write $${ for a plain ${",
        )
    if found := os.environ.get(name):
        return found
    if default is not None:  # as in a shell, for what is empty, too
        return default
    if found is None:
        raise ConfigError(
            f"the environment variable {name} is not set",
            where=where(),
            found=reference.string,
            hint=f"set it, or give a default: ${{{name}:-…}}",
        )
    return found


def dotted(key: Key) -> str:
    """A key as --set takes it: `data.source.0.weight`."""
    return ".".join(str(step) for step in key)

"""The text that the user typed: YAML without its traps, and references to the environment in its values.

A value may hold ${NAME} or ${NAME:-default}; $${ is a plain ${.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qie.errors import ConfigError, one_line

MAX_CHARS = 2**20
MAX_BITS = 4096
MAX_VALUES = 100_000
"""Ten aliases of ten aliases and so on are a page of text that stands for more values than any memory holds."""


class _Loader(yaml.SafeLoader):
    """`1e-4` is a number, `2026-01-31` a text, and a key that is given twice an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Looked at before merge keys (`<<`) are resolved: what they bring in is no second key.
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key, times in Counter(keys).items() if times > 1), None)
        if twice is not None:
            raise yaml.composer.ComposerError(None, None, f"the key {twice[1]!r} is given twice", node.start_mark)
        return node


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """An integer that can be shown again: Python reads longer ones in base 16 than it writes in base 10."""
    number = int(loader.construct_yaml_int(node))
    if number.bit_length() > MAX_BITS:
        raise ValueError(f"a number of {number.bit_length()} bits; at most {MAX_BITS} are read")
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _int)

# No value is a date: what looks like one is the name of a run or of a folder.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """The values of a YAML document.

    Raises:
        ValueError: it is not valid YAML; one line says why.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"it is {len(text)} characters long; at most {MAX_CHARS} are read")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if (values := _values(node, {})) > MAX_VALUES:
            raise ValueError(f"its aliases expand to {values} values; at most {MAX_VALUES} are read")
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:  # PyYAML raises ValueError for what only looks like a number
        raise ValueError(one_line(error)) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """The number of values that a node stands for once each alias is replaced. Counting replaces none."""
    if known.get(node) == 0:
        raise ValueError("a section contains itself")
    if node not in known:
        known[node] = 0
        children = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        nested = () if isinstance(node, yaml.ScalarNode) else children
        known[node] = 1 + sum(_values(child, known) for child in nested)
    return known[node]


def line_of(text: str, key: Sequence[object]) -> tuple[int, int]:
    """The steps of the way to a value that a YAML document has, and the line of the last of them, from 1."""
    node: Any = yaml.compose(text, _Loader)
    line, depth = 1, 0
    for depth, step in enumerate(key):
        if isinstance(node, yaml.SequenceNode):
            inner = [(item, item) for position, item in enumerate(node.value) if position == step]
        else:
            inner = [pair for pair in _pairs(node) if pair[0].value == str(step)]
        if not inner:
            return depth, line
        at, node = inner[-1]
        line = at.start_mark.line + 1
    return depth + 1, line


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a mapping, after those that its merge keys (`<<`) bring in."""
    if isinstance(node, yaml.SequenceNode):
        return [pair for item in node.value for pair in _pairs(item)]
    own = node.value if isinstance(node, yaml.MappingNode) else []
    return [pair for key, value in own if key.value == "<<" for pair in _pairs(value)] + own


def parse_scalar(text: str) -> Any:
    """A text as one value: a number, true, null, or itself. It never becomes a list or section."""
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except (yaml.YAMLError, ValueError):
        return text


Key = tuple[int | str, ...]
"""The way to a value in the file: keys of sections and positions in lists."""

_REFERENCE = re.compile(r"(?P<escape>\$\$\{)|\$\{(?:(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\})?", re.ASCII)


@dataclass(frozen=True)
class Typed:
    """The sources of a configuration: a file, and the values that --set put in place of the file's, first to last.

    `path` is None for values that were given in Python.
    """

    path: Path | None
    text: str
    overrides: list[Key]

    def where(self, key: Key) -> str:
        """The origin of the value at `key`: `--set data.area_px`, or `my.yaml:12, data.area_px`."""
        found, line = (len(key), 0) if self.path is None else line_of(self.text, key)
        above = any(override == key[: len(override)] for override in self.overrides)
        within = any(key == override[: len(key)] for override in self.overrides)
        if above or (within and found < len(key)):
            return f"--set {dotted(key)}"
        return dotted(key) if self.path is None else f"{self.path}:{line}, {dotted(key)}"


def expand(value: Any, texts: dict[Key, str], typed: Typed, key: Key = ()) -> Any:
    """A copy of `value`, which was typed at `key`, in which references are replaced, but not in keys.

    A value that consists of one reference alone is read as YAML: a number, true, null. `texts` gets
    that text, for keys that want a text after all.

    Raises:
        ConfigError: a variable is not set, or no name follows `${`.
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
            "a reference to an environment variable is malformed",
            where=where(),
            expected="${NAME} or ${NAME:-default}, without nested braces",
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

"""What differs between configurations, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_KEYS = 2000


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Dotted key -> its value in each configuration, as JSON; None where it has none. Without keys that are equal.

    A configuration that is empty is not known: it differs from none.
    """
    known = [dict(_flat(config)) if config else None for config in configs]
    if sum(one is not None for one in known) == 0:
        return {}
    names = list(dict.fromkeys(name for one in known if one for name in one))[:MOST_KEYS]
    found = {name: [None if one is None else one.get(name) for one in known] for name in names}
    if len(configs) == 1:
        return found
    return {name: values for name, values in found.items() if len(set(_known(values, known))) > 1}


def _known(values: Sequence[str | None], configs: Sequence[object]) -> Iterator[str | None]:
    return (value for value, config in zip(values, configs, strict=True) if config is not None)


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

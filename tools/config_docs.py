"""Write the tables of docs/configuration.md, and the JSON schema for editors in qie/config, from the classes of the
configuration: python tools/config_docs.py

Text above the marker in that page is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from qie.config import SCHEMA_FILE, Config
from qie.config.schema import MANY

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARKER = "<!-- From here on tools/config_docs.py writes. -->\n"

Json = dict[str, Any]
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
WORDS = {"boolean": "true or false", "string": "text", "object": "keys and values"}
SLIPS = ("maximum", "exclusiveMaximum")
LAST = {"array": 1, "null": 2}  # of several types, these are named last


def page(text: str) -> str:
    """The page `text` with the tables of today."""
    above, marker, _ = text.partition(MARKER)
    return above + marker + "\n" + "\n".join(sections())


def schema() -> str:
    """The JSON schema, which an editor reads to complete and check a configuration."""
    # What YAML reads as false where it is not quoted, `no` and `off`, is a word to the editors' YAML 1.2.
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Config.model_json_schema()
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def sections() -> list[str]:
    """A heading, a sentence and a table for each section, in the order of the file."""
    whole = Config.model_json_schema()
    definitions = whole.pop("$defs")
    return [
        part
        for name, field in whole["properties"].items()
        for part in section(name, definitions[target(field)], definitions)
    ]


def section(name: str, model: Json, definitions: Json) -> list[str]:
    """The table of one section, and after it those of the sections within it."""
    lines = [f"## {name}\n", f"{model['description']}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    inner = []
    for key, field in model["properties"].items():
        kind, meaning = words(field), field.get("description")
        default = f"`{value(field['default'])}`" if "default" in field else "required"
        if found := target(field):
            path = f"{name}.{key}.N" if "list" in kind else f"{name}.{key}"
            inner += section(path, definitions[found], definitions)
            kind = kind.replace("section", f"[{path}](#{path.replace('.', '').lower()})")
            meaning = meaning or definitions[found]["description"]
            default = "its defaults" if isinstance(field.get("default"), dict) else default
        lines.append(f"| `{key}` | {kind} | {default} | {meaning} |")
    return ["\n".join(lines) + "\n", *inner]


def target(field: Json) -> str | None:
    """The name of the section that a field holds, by itself or in a list."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    inner = [*field.get("anyOf", []), *([field["items"]] if "items" in field else [])]
    return next(filter(None, map(target, inner)), None)


def words(field: Json) -> str:
    """The type of a field as one would say it: `integer > 0`, `text or list of text`."""
    if "anyOf" in field:
        kinds = sorted(field["anyOf"], key=lambda kind: LAST.get(kind.get("type", ""), 0))
        return " or ".join(map(words, kinds))
    if "$ref" in field:
        return "section"
    if "const" in field:
        return f"`{value(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{value(choice)}`" for choice in field["enum"])
    if field["type"] == "array":
        low, high = field.get("minItems"), field.get("maxItems")
        count = f"{low} × " if low and low == high else f"{low} or more × " if low else ""
        return f"list of {count}{words(field['items'])}"
    # Every number has two ends; those that only a slip meets are said once, above the tables.
    bounds = [
        f"{sign} {value(field[bound]).removesuffix('.0')}"
        for bound, sign in BOUNDS.items()
        if bound in field and not (bound in SLIPS and field[bound] >= MANY)
    ]
    kind = str(field.get("format") or WORDS.get(field["type"], field["type"]))
    return f"{kind} {', '.join(bounds)}".strip()


def value(default: Any) -> str:
    """A value as YAML."""
    text: str = yaml.safe_dump(default, default_flow_style=True, width=1000)
    return text.strip().removesuffix("...").strip()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA_FILE.write_text(schema(), encoding="utf-8")

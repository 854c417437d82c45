"""docs/configuration.md says what the configuration's classes say."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml
from pydantic import BaseModel

from qie.config import Config
from qie.config.loading import section_in
from tests.conftest import ROOT
from tools.config_docs import MARKER, PAGE, page, words

TEXT = PAGE.read_text(encoding="utf-8")


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        if inner := section_in(field.annotation):
            in_list = "list[" in str(field.annotation)
            yield from sections(inner, f"{path}.{name}{'.N' if in_list else ''}".removeprefix("."))


SECTIONS = dict(sections(Config, ""))
del SECTIONS[""]


def test_the_page_is_what_the_tool_writes() -> None:
    assert MARKER in TEXT
    assert page(TEXT) == TEXT, "run python tools/config_docs.py"


def test_each_section_and_key_is_described() -> None:
    for path, model in SECTIONS.items():
        assert f"\n## {path}\n" in TEXT and model.__doc__, path
        fields = model.model_fields.items()
        assert [name for name, field in fields if not (field.description or section_in(field.annotation))] == [], path


def test_the_examples_are_accepted_and_the_first_is_the_file_that_it_is_said_to_be() -> None:
    examples = [yaml.safe_load(example) for example in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    assert examples[0] == yaml.safe_load((ROOT / "configs" / "edit_lora.yaml").read_text(encoding="utf-8"))
    assert len(examples) == 2


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"type": "integer", "exclusiveMinimum": 0}, "integer > 0"),
        ({"type": "number", "minimum": 0.0, "maximum": 1.0}, "number ≥ 0, ≤ 1"),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}, {"type": "string"}]},
         "text or list of text or null"),
        ({"enum": ["no", "bf16"]}, "`'no'`, `bf16`"),
        ({"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer"}}, "list of 2 × integer"),
        ({"type": "array", "minItems": 1, "items": {"type": "string", "format": "path"}}, "list of 1 or more × path"),
    ],
)  # fmt: skip
def test_types_are_said_in_words(field: dict[str, object], said: str) -> None:
    assert words(field) == said

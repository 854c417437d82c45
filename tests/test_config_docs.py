"""docs/configuration.md says what the configuration's classes say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml
from pydantic import BaseModel

from qie.config import SCHEMA_FILE, Config
from qie.config.loading import section_in
from tests.conftest import ROOT
from tools.config_docs import MARKER, PAGE, page, schema

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


def test_the_schema_for_editors_is_what_the_tool_writes_and_takes_the_configurations_of_the_repository() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema(), "run python tools/config_docs.py"
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json.loads(schema()))
    for file in (ROOT / "configs").glob("*.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(file.read_text(encoding="utf-8")))), file
    for wrong in ({}, {"modle": {}}, {"model": {"pretrained_model_name_or_path": "x", "quantize": "fp4"}}):
        assert list(validator.iter_errors(wrong)), wrong


def test_each_section_and_key_is_described() -> None:
    for path, model in SECTIONS.items():
        assert f"\n## {path}\n" in TEXT and model.__doc__, path
        fields = model.model_fields.items()
        assert [name for name, field in fields if not (field.description or section_in(field.annotation))] == [], path


def test_the_examples_are_accepted_and_the_first_is_the_file_that_it_is_said_to_be() -> None:
    examples = [yaml.safe_load(example) for example in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    assert examples[0] == yaml.safe_load((ROOT / "configs" / "edit_lora.yaml").read_text(encoding="utf-8"))
    assert len(examples) == 2

"""What pyproject.toml requires is what qie imports: no less, and no more."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = packages_distributions()


def required(texts: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in texts}


CORE = required(PROJECT["dependencies"])
EXTRAS = {name: required(texts) for name, texts in PROJECT["optional-dependencies"].items()}


def imports(tree: ast.AST, at_once: bool) -> Iterator[str]:
    """Top-level names of the modules that are imported; `at_once`: only those that importing the module imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module
            yield node.module.partition(".")[0]
        elif not (at_once and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types(node))):
            yield from imports(node, at_once)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(*, at_once: bool) -> set[str]:
    """The distributions that the modules of qie import."""
    trees = [ast.parse(file.read_text()) for file in (ROOT / "qie").rglob("*.py")]
    names = {name for tree in trees for name in imports(tree, at_once)} - sys.stdlib_module_names - {"qie"}
    return {canonicalize_name(DISTRIBUTIONS[name][0]) for name in names}


def test_everything_that_is_required_is_imported() -> None:
    assert CORE - imported(at_once=False) == set()


def test_what_a_module_imports_at_once_is_required() -> None:
    assert imported(at_once=True) - CORE == set()


def test_what_is_imported_when_it_is_needed_is_required_or_in_an_extra_for_users() -> None:
    for_users = CORE.union(*(names for extra, names in EXTRAS.items() if extra not in ("dev", "docs")))
    assert imported(at_once=False) - for_users == set()


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev", "docs", "demo", "tensorboard"}))
def test_who_lacks_a_library_is_told_the_extra_that_brings_it(extra: str) -> None:
    source = "\n".join(file.read_text() for file in (ROOT / "qie").rglob("*.py"))
    assert f"qie[{extra}]" in source


def test_what_all_versions_are_pinned_to_is_what_is_allowed() -> None:
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    wanted = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in map(Requirement, chain.from_iterable(wanted)):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name} has no pin"
        assert requirement.specifier.contains(versions[name]), f"{name} {versions[name]}"

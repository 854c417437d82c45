"""Arrows point down only: a module imports from its own layer's package or from lower layers."""

from __future__ import annotations

import ast
from functools import cache

from tests.conftest import ROOT

# From the lowest to the highest. Modules on one line do not know each other.
LAYERS = [
    ["errors", "quantities", "threads"],
    ["png"],
    ["types"],
    ["buffer_pool", "families", "paths", "quiet_libraries"],
    ["file_hashes", "image_formats", "recipe", "stages"],
    ["stores"],
    ["config"],
    ["pretrained", "devices"],
    ["shards"],
    ["data", "encode"],
    ["precompute", "training"],
    ["inference", "stats"],
    ["from_config", "html_report"],
    ["stream_chooser", "doctor", "first_config", "watch"],
    ["legacy"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = {"torch", "diffusers", "transformers", "accelerate", "peft", "PIL", "numpy"}


def package(module: str) -> str:
    return module.split(".")[1]


@cache
def tree_of(path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path) -> list[tuple[str, bool]]:
    """Imported module names, and whether each is imported when the file is.

    Not those of a `_repr_html_`, which a notebook alone calls: it may ask `html_report`, which is above what it shows.
    """
    tree = tree_of(path)
    shown = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "_repr_html_"
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module == "qie.html_report.notebook"
    }
    late = {
        id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    typing = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for n in ast.walk(node)
    }
    found = []
    for node in (node for node in ast.walk(tree) if id(node) not in shown):
        at_import = id(node) not in late | typing
        if isinstance(node, ast.ImportFrom):
            found.append((node.module or "", at_import))
        if isinstance(node, ast.Import):
            found += [(name.name, at_import) for name in node.names]
    return found


def modules():
    for path in sorted((ROOT / "qie").rglob("*.py")):
        if path.parent != ROOT / "qie" or path.stem != "__init__":
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts), path


def public_names(node: ast.stmt) -> list[str]:
    """What a line of a module gives others: a function, a class, or another name for a type."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [] if node.name.startswith("_") else [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name[0].isupper() and not name.isupper()]


def test_every_module_has_a_layer() -> None:
    assert {package(name) for name, _ in modules()} == set(RANK)


def test_no_module_imports_from_its_own_rank_or_above() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        for imported, _ in imports(path)
        if imported.startswith("qie.")
        and package(imported) != package(name)
        and RANK[package(imported)] >= RANK[package(name)]
        and (package(name), package(imported)) != ("recipe", "types")
    ]
    assert wrong == []


def test_only_cli_knows_click_and_no_command_imports_anything_heavy_before_it_runs() -> None:
    for name, path in modules():
        for imported, at_import in imports(path):
            top = imported.partition(".")[0]
            assert top != "click" or package(name) == "cli", name
            if package(name) == "cli":
                ours = imported.startswith("qie.") and package(imported) not in ("cli", "quantities")
                assert not (at_import and (top in HEAVY or ours)), name


def test_training_and_data_never_import_encoders() -> None:
    for name, path in modules():
        if package(name) in ("data", "training", "shards", "stats", "precompute", "html_report"):
            assert not any(imported.startswith("qie.encode") for imported, _ in imports(path)), name


def test_functions_stay_small() -> None:
    for name, path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = node.body[0].end_lineno - node.body[0].lineno + 1 if ast.get_docstring(node) else 0
                length = node.end_lineno - node.lineno + 1 - docstring
                assert length <= 45, f"{name}.{node.name} has {length} lines"


def test_no_two_rooms_share_a_name() -> None:
    """`main` is a command; qie.legacy keeps the names of earlier programs."""
    files: dict[str, list[str]] = {}
    things: dict[str, list[str]] = {}
    for name, path in modules():
        if path.stem == "__init__":
            continue
        if package(name) != "cli":
            files.setdefault(path.stem, []).append(name)
        for node in tree_of(path).body:
            for thing in public_names(node):
                if thing != "main" and package(name) != "legacy":
                    things.setdefault(thing, []).append(name)
    assert {stem for stem, places in files.items() if len(places) > 1} == set()
    assert {thing for thing, places in things.items() if len(places) > 1} == set()

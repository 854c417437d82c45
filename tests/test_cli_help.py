"""--help, `import qie` and the first batch answer at once: nothing is imported that they do not need."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.conftest import ROOT
from tests.stream.checks import write

HEAVY = {"torch", "numpy", "pydantic", "yaml", "PIL", "diffusers", "transformers", "accelerate", "safetensors"}


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


COMMANDS = ["precompute", "train", "stats", "predict"]
HELP = """
import importlib, json, sys
main = importlib.import_module(f"qie.cli.{sys.argv[1]}").main
codes = [main([option], standalone_mode=False) for option in ("--help", "-h")]
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(any(codes))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_without_torch(command: str) -> None:
    done = python(HELP, command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == done.stdout.count("Options:") == 2
    assert not HEAVY & set(json.loads(done.stderr))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_explained(command: str) -> None:
    main = importlib.import_module(f"qie.cli.{command}").main
    assert main.help
    assert [option.name for option in main.params if isinstance(option, click.Option) and not option.help] == []


NAMES = """
import json, sys, qie
assert dir(qie) == sorted(qie.__all__), dir(qie)
modules = sorted(sys.modules)
found = {name: (getattr(qie, name), getattr(qie, name)) for name in dir(qie)}
print(json.dumps([modules, {name: (one.__module__, one is other) for name, (one, other) in found.items()}]))
qie.precompile
"""


def test_importing_qie_imports_nothing_heavy_and_each_public_name_is_one_object_whenever_it_is_asked_for() -> None:
    done = python(NAMES)
    assert "module 'qie' has no attribute 'precompile'" in done.stderr, done.stderr
    modules, names = json.loads(done.stdout)
    assert not HEAVY & set(modules)
    assert {"Batch", "Config", "Encoder", "Stream", "load_config", "open_stream"} <= names.keys()
    assert not [name for name in names if name.startswith("_")]
    assert all(module.startswith("qie.") and same for module, same in names.values()), names


def test_tools_see_the_public_names_that_are_there_where_they_are() -> None:
    import qie

    tree = ast.parse((ROOT / "qie" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    lines = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for line in lines for alias in line.names), "tools re-export `X as X` alone"
    assert {alias.name: line.module for line in lines for alias in line.names} == qie._EXPORTS


def test_pyright_sees_the_types_of_public_calls() -> None:
    """As mypy does, in `make lint`."""
    if not (pyright := shutil.which("pyright")):
        pytest.skip("pyright is not installed")
    command = [pyright, "--pythonpath", sys.executable, "tests/typed_calls.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


FIRST_BATCH = """
import json, sys, qie
next(iter(qie.open_stream(sys.argv[1])))
print(json.dumps(sorted(sys.modules)))
"""


def test_the_first_batch_of_shards_comes_without_the_configuration_sources_encoders_and_what_these_import(
    tmp_path: Path,
) -> None:
    done = python(FIRST_BATCH, str(write(tmp_path, rows=2)))
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout))
    ours = {
        "config",
        "from_config",
        "stream_chooser",
        "data.sources",
        "data.live",
        "data.follow",
        "encode",
        "precompute",
    }
    assert not ({f"qie.{name}" for name in ours} | HEAVY - {"torch", "numpy", "pydantic", "safetensors"}) & modules


def test_public_names_of_version_0_1_give_what_took_their_place_and_warn() -> None:
    import qie
    from qie.pretrained import PretrainedModel

    with pytest.warns(DeprecationWarning, match=r"qie\.Checkpoint is now qie\.PretrainedModel"):
        assert qie.Checkpoint is PretrainedModel

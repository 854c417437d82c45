"""`qie`: the four commands, and others, under one name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import qie
from qie.cli import one_command
from qie.cli.one_command import SUBCOMMANDS

HEAVY = {"torch", "numpy", "pydantic", "yaml", "PIL", "diffusers", "transformers", "accelerate", "safetensors"}


def answer(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(one_command.main, list(map(str, arguments)), prog_name="qie")
    assert done.exit_code == code, done.output
    return done.output


def test_each_subcommand_is_the_object_of_its_own_command_and_is_explained_by_the_name_that_was_typed() -> None:
    for name, (module, line) in SUBCOMMANDS.items():
        command = one_command.main.get_command(None, name)  # type: ignore[arg-type]
        assert command is importlib.import_module(module).main and line.endswith(".")
        told = answer(name, "--help")
        assert told.startswith(f"Usage: qie {name} [OPTIONS]") and "qie-" not in told
    alone = CliRunner().invoke(importlib.import_module("qie.cli.train").main, ["--help"], prog_name="qie-train").output
    assert "qie-train reads the shards" in " ".join(alone.split())


def test_the_list_names_every_subcommand_and_the_version_is_the_package_s() -> None:
    told = answer("--help")
    assert all(f"  {name} " in told and line in " ".join(told.split()) for name, (_, line) in SUBCOMMANDS.items())
    assert answer("--version") == f"qie {qie.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["trian"], "No such command: trian. Did you mean qie train?"),
        (["qie-train", "--batch_size", "2"], "data.batch_size"),
        (["train", "--batch_size", "2"], "data.batch_size"),
        (["zzz"], "No such command: zzz. There are init, precompute, "),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--nothing"], "--nothing"),
    ],
)
def test_what_is_mistyped_is_answered_as_by_the_command_itself(typed: list[str], told: str) -> None:
    assert told in answer(*typed, code=2)


LOADED = """
import json, runpy, sys
sys.argv = ["qie", "--help"]
try:
    runpy.run_module("qie", run_name="__main__")
except SystemExit as ended:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
    sys.exit(ended.code)
"""


def test_help_of_the_module_imports_no_subcommand_and_nothing_heavy() -> None:
    root = Path(qie.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Usage: qie [OPTIONS]"), done.stderr
    modules = set(json.loads(done.stderr))
    assert not (HEAVY | {module for module, _ in SUBCOMMANDS.values()}) & modules

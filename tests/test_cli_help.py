"""--help and `import qie` answer at once: nothing heavy is imported for them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import click
import pytest

from tests.conftest import ROOT

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


def test_public_names_of_version_0_1_give_what_took_their_place_and_warn() -> None:
    import qie
    from qie.pretrained import PretrainedModel

    with pytest.warns(DeprecationWarning, match=r"qie\.Checkpoint is now qie\.PretrainedModel"):
        assert qie.Checkpoint is PretrainedModel

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


HELP = """
import importlib, json, sys
code = importlib.import_module(f"qie.cli.{sys.argv[1]}").main([sys.argv[2]], standalone_mode=False)
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", ["precompute", "train", "stats", "predict"])
def test_help_answers_without_torch(command: str, option: str) -> None:
    done = python(HELP, command, option)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")
    assert "Options:" in done.stdout
    assert not HEAVY & set(json.loads(done.stderr))


@pytest.mark.parametrize("command", ["precompute", "train", "stats", "predict"])
def test_every_command_and_option_is_explained(command: str) -> None:
    main = importlib.import_module(f"qie.cli.{command}").main
    assert main.help
    assert [option.name for option in main.params if isinstance(option, click.Option) and not option.help] == []


def test_importing_qie_imports_nothing_heavy() -> None:
    done = python("import qie, sys, json; dir(qie); print(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stdout))


NAMES = """
import json, qie
assert dir(qie) == sorted(qie.__all__), dir(qie)
found = {name: (getattr(qie, name), getattr(qie, name)) for name in dir(qie)}
print(json.dumps({name: (first.__module__, first is second) for name, (first, second) in found.items()}))
"""


@pytest.fixture(scope="module")
def public_names() -> dict[str, tuple[str, bool]]:
    """Each name of `dir(qie)`: where its object is defined, and whether it is the same when asked for again."""
    done = python(NAMES)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_dir_lists_the_public_names_in_order_and_each_of_them_resolves(
    public_names: dict[str, tuple[str, bool]],
) -> None:
    assert {"Batch", "Config", "Encoder", "Stream", "load_config", "open_stream"} <= set(public_names)
    assert not [name for name in public_names if name.startswith("_")]
    assert all(module.startswith("qie.") for module, _ in public_names.values())


def test_a_public_name_is_the_same_object_whenever_it_is_asked_for(public_names: dict[str, tuple[str, bool]]) -> None:
    assert [name for name, (_, same) in public_names.items() if not same] == []


def test_an_unknown_name_is_refused_by_its_name() -> None:
    done = python("import qie\nqie.precompile")
    assert "module 'qie' has no attribute 'precompile'" in done.stderr


def test_public_names_of_version_0_1_give_what_took_their_place_and_warn() -> None:
    import qie
    from qie.pretrained import PretrainedModel

    with pytest.warns(DeprecationWarning, match=r"qie\.Checkpoint is now qie\.PretrainedModel"):
        assert qie.Checkpoint is PretrainedModel

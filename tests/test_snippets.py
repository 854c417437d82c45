"""What README and docs show works: Python is run, YAML is accepted, and commands have the options that they are given.

Python runs in a folder like the reader's: `my.yaml`, `shards/`, `in.png` and a run, made on the tiny model.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from PIL import Image

from qie.cli import precompute, predict, stats, train
from qie.config import load_config
from qie.data.sources import open_source
from qie.precompute import precompute as precompute_rows
from tests.conftest import AREA_PX, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = {"precompute": precompute.main, "predict": predict.main, "stats": stats.main, "train": train.main}
PYTHON_NOT_RUN: dict[tuple[str, str], str] = {}
"""(page, first line) of each block of Python that is not run -> why."""
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^|\n\n)((?: {4}.*\n)+)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for _, found, text in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def shell_lines() -> list[tuple[str, str]]:
    """(page, command): lines of sh blocks, of indented ones, and commands with arguments within a sentence."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        prose = FENCE.sub("", text)
        lines = [line for block in [*blocks(page, "sh"), *INDENTED.findall(prose)] for line in block.splitlines()]
        lines += [" ".join(code.split()) for code in re.findall(r"`(qie-\w+ [^`]+)`", prose)]
        found += [(page.name, line.strip()) for line in lines]
    return found


def words_of(line: str) -> list[str]:
    """A command's words, without assignments before it and what only a shell knows."""
    words = shlex.split(re.sub(r"\$\(\(.*?\)\)(?=\s|$)", "64", line), comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return [word for word in words if word != "&"]


def qie_calls() -> list[tuple[str, str, list[str]]]:
    """(what pytest calls it, command, arguments) of each call of qie's commands, by name or as a module."""
    calls = []
    for page, line in shell_lines():
        if not re.search(r"\bqie-\w+ |qie\.cli\.\w+ ", line) or "──" in line:
            continue
        words = words_of(line)
        if words and words[0].removeprefix("qie-") in COMMANDS:
            calls.append((f"{page}: {line}", words[0].removeprefix("qie-"), words[1:]))
        elif "-m" in words:
            at = words.index("-m") + 1
            calls.append((f"{page}: {line}", words[at].removeprefix("qie.cli."), words[at + 1 :]))
    return calls


CALLS = qie_calls()
PYTHON = [(page, blocks(page, "python")) for page in PAGES if blocks(page, "python")]
YAML = [(page, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, tiny_edit: Path, photos: Path, encoder) -> Path:
    """A reader's folder, to be copied."""
    folder = tmp_path_factory.mktemp("desk")
    precompute_rows(open_source(photos), encoder, folder / "shards", rows=(0, 6))
    settings = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 2}},
        "data": {"source": str(photos), "area_px": AREA_PX},
        "cache": {"cache_dir": "shards"},
        "train": {"max_steps": 1, "mixed_precision": "no", "output_dir": "runs/new"},
        "validation": {"rows": 0},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(settings))
    Image.new("RGB", (64, 48), "teal").save(folder / "in.png")
    shutil.copytree(tiny_edit / "transformer", folder / "runs" / "edit_full" / "checkpoint-005000" / "transformer")
    words = [
        "--config",
        folder / "my.yaml",
        folder / "shards",
        "--quiet",
        "--set",
        f"train.output_dir={folder}/runs/edit",
    ]
    train.main([str(word) for word in words], standalone_mode=False)
    (folder / "runs" / "edit" / "checkpoint-000001").rename(folder / "runs" / "edit" / "checkpoint-002000")
    return folder


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")  # older releases know no other
@pytest.mark.parametrize(("page", "snippets"), PYTHON, ids=[page.name for page, _ in PYTHON])
def test_python_runs(
    page: Path, snippets: list[str], desk: Path, tiny_edit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(desk, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    names: dict[str, object] = {}
    for snippet in snippets:
        if (page.name, snippet.partition("\n")[0]) in PYTHON_NOT_RUN:
            continue
        # diffusers' processor needs torchvision, which a machine for tests may lack; no snippet uses the encoders.
        tiny = f"{str(tiny_edit)!r}, text_encoder=None, tokenizer=None, processor=None"
        code = snippet.replace('"Qwen/Qwen-Image-Edit"', tiny)
        exec(compile(code, f"{page.name}:\n{snippet}", "exec"), names)  # a page's snippets go on from one another


def test_what_is_not_run_is_there_and_has_a_reason() -> None:
    there = {(page.name, block.partition("\n")[0]) for page, found in PYTHON for block in found}
    assert set(PYTHON_NOT_RUN) <= there and all(PYTHON_NOT_RUN.values())
    assert {"README.md", "api.md", "stream.md", "training.md"} <= {page.name for page, _ in PYTHON}


def test_the_api_page_s_snippets_stand_alone_and_are_short() -> None:
    for snippet in blocks(ROOT / "docs" / "api.md", "python"):
        lines = [
            line for line in snippet.splitlines() if line and not re.match(r"import |from |print\(| +print\(", line)
        ]
        assert len(lines) <= 5 and snippet.startswith(("import qie\n", "from qie")), snippet


@pytest.mark.parametrize(("page", "text"), YAML, ids=[f"{page.name} {text.split()[0]}" for page, text in YAML])
def test_yaml_is_accepted(page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{(\w+)", text):
        monkeypatch.setenv(name, "1")
    tree = yaml.safe_load(text)
    tree["model"] = {"pretrained_model_name_or_path": "some/model"} | tree.get("model", {})
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tree))
    load_config(tmp_path / "my.yaml")


@pytest.mark.parametrize(("command", "arguments"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS])
def test_commands_have_the_options_that_they_are_given(command: str, arguments: list[str]) -> None:
    main = COMMANDS[command]
    known = {option for param in main.params if isinstance(param, click.Option) for option in param.opts}
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known | {"--help"}
    if "--config" in arguments:  # whole, and no fragment in a sentence
        main.make_context(command, list(arguments))


def test_each_command_is_shown() -> None:
    assert {command for _, command, _ in CALLS} == set(COMMANDS)
    assert {page for page, line in shell_lines() if line.startswith("qie-")} >= {"README.md", "training.md"}


def test_files_tools_targets_and_extras_that_are_named_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tools = 0
    for page, line in shell_lines():
        for file in re.findall(r"(?:tools|benchmarks|configs)/[\w/]+\.(?:py|yaml)", line):
            assert (ROOT / file).is_file(), f"{page}: {line}"
        for target in re.findall(r"^make (\w+)", line):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: {line}"
        for extras in re.findall(r"pip install '[\w.]+\[([\w,]+)\]'", line):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), f"{page}: {line}"
        if tool := re.match(r"python (tools/\w+\.py) ", line):
            source, tools = (ROOT / tool[1]).read_text(encoding="utf-8"), tools + 1
            options = [word for word in words_of(line) if word.startswith("--")]
            assert all(f'"{option}"' in source for option in options), f"{page}: {line}"
    assert tools

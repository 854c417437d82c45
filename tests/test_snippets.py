"""What README and docs show works. What is done for which:

- Python is run, in a folder like the reader's: `my.yaml`, `shards/`, `in.png` and a run, made on the tiny model.
- YAML is loaded as a configuration, also where a shell block writes it into a file; what is for Kubernetes is compared
  with the fields of KubeRay. JSON is read as a `--batch`, or as the prompts that a run is asked for.
- Each call of a qie command in a shell block goes through its click command, with what it checks before any work, and
  its `--set` through the configuration; of one within a sentence, the options are known.
- `torchrun` and `accelerate launch` are parsed by their own parsers; shell blocks as a whole by `bash -n`. Nothing that
  needs a GPU, a cluster or credentials is run, nor are `pip`, `ray`, `kubectl`, `srun`, `sbatch` and `hf`.
- The commands of some guides are run in that folder, in the order of their page.
- Files, tools and their options, make targets and extras are there.
- The shell blocks of migration.md are run here, those of quickstart.md in a fresh clone (see .ci/).
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from qie.cli import precompute, stats, train
from qie.cli.one_command import SUBCOMMANDS
from qie.config import load_config
from qie.data.sources import open_source
from qie.inference.requests import read_batch
from qie.precompute import precompute as precompute_rows
from qie.training.control import read_prompts
from tests.conftest import AREA_PX, ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = {name: importlib.import_module(module).main for name, (module, _) in SUBCOMMANDS.items()}
GENERATED = {"commands.md"}
"""Pages with usage lines of their own, such as `qie-train [OPTIONS] [SHARDS]...`, which test_docs.py checks."""
LANGUAGES = {"sh", "yaml", "python", "json", "text", ""}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^|\n\n)((?: {4}.*\n)+)")
HEREDOC = re.compile(r"<<'(\w+)'\n(.*?)^\1$\n", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for _, found, text in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def shell_lines(page: Path) -> list[str]:
    """Lines of sh blocks and of indented ones, continued ones joined, without what they write into files."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = [*blocks(page, "sh"), *([] if name_of(page) in GENERATED else INDENTED.findall(prose))]
    return [
        line.strip() for block in found for line in HEREDOC.sub("\n", block.replace("\\\n", " ")).splitlines() if line
    ]


def sentence_calls(page: Path) -> list[str]:
    """Commands with arguments within a sentence."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(code.split()) for code in re.findall(r"`(qie[- ][a-z]+ [^`]+)`", prose)]


def words_of(line: str) -> list[str]:
    """A command's words, without assignments before it, what is behind a pipe, and what only a shell knows."""
    line = re.sub(r"\$\(\(.*?\)\)(?=\s|$)", "64", line)
    words = shlex.split(line.partition(" | ")[0], comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return [word for word in words if word not in ("&", "$resume")]


def call_in(line: str) -> tuple[str, list[str]] | None:
    """(command, arguments) of a call of one of qie's commands, by name or as a module."""
    if not re.search(r"\bqie[- ][a-z]+ |qie\.cli\.\w+ ", line) or "──" in line:
        return None
    words = words_of(line)
    if words[:3] == ["ray", "job", "submit"]:
        words = words[words.index("--") + 1 :]
    if words[:1] == ["qie"] and words[1] in COMMANDS:
        return words[1], words[2:]
    if words and words[0].removeprefix("qie-") in COMMANDS:
        return words[0].removeprefix("qie-"), words[1:]
    if "-m" in words:
        at = words.index("-m") + 1
        return words[at].removeprefix("qie.cli."), words[at + 1 :]
    return None


LINES = [(name_of(page), line) for page in PAGES for line in shell_lines(page)]
CALLS = [(f"{page}: {line}", *call) for page, line in LINES if (call := call_in(line))]
MENTIONED = [
    (f"{name_of(page)}: {line}", *call) for page in PAGES for line in sentence_calls(page) if (call := call_in(line))
]
LAUNCHED = [(f"{page}: {line}", line) for page, line in LINES if re.search(r"\b(torchrun|accelerate launch) ", line)]
PYTHON = [(page, found) for page in PAGES if (found := blocks(page, "python"))]
MANIFESTS = [block for page in PAGES for block in blocks(page, "yaml") if "\nkind: " in block]
YAML = [(name_of(page), block) for page in PAGES for block in blocks(page, "yaml") if block not in MANIFESTS] + [
    (name_of(page), text) for page in PAGES for block in blocks(page, "sh") for _, text in HEREDOC.findall(block)
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, tiny_edit: Path, photos: Path, encoder) -> Path:
    """A reader's folder, to be copied."""
    folder = tmp_path_factory.mktemp("desk")
    precompute_rows(open_source(photos), encoder, folder / "shards", rows=(0, 6))
    settings = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 2}},
        "data": {"source": str(photos), "area_px": AREA_PX, "allow_tiny": True},
        "cache": {"cache_dir": "shards"},
        "train": {"max_steps": 1, "mixed_precision": "no", "output_dir": "runs/new"},
        "validation": {"rows": 0},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(settings))
    (folder / "photos").symlink_to(photos)
    Image.new("RGB", (64, 48), "teal").save(folder / "in.png")
    Image.new("RGB", (64, 48), "navy").save(folder / "out.png")
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


@pytest.mark.parametrize(("page", "snippets"), PYTHON, ids=[name_of(page) for page, _ in PYTHON])
def test_python_runs(
    page: Path, snippets: list[str], desk: Path, tiny_edit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(desk, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    names: dict[str, object] = {}
    for snippet in snippets:
        # diffusers' processor needs torchvision, which a machine for tests may lack; no snippet uses the encoders.
        tiny = f"{str(tiny_edit)!r}, text_encoder=None, tokenizer=None, processor=None"
        code = snippet.replace('"Qwen/Qwen-Image-Edit"', tiny)
        exec(compile(code, f"{name_of(page)}:\n{snippet}", "exec"), names)  # a page's snippets go on from one another


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    found = {language for page in PAGES for _, language, _ in FENCE.findall(page.read_text(encoding="utf-8"))}
    assert found <= LANGUAGES


@pytest.mark.parametrize(("page", "text"), YAML, ids=[f"{page} {text.split()[0]}" for page, text in YAML])
def test_yaml_is_accepted(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{(\w+)", text):
        monkeypatch.setenv(name, "1")
    (tmp_path / "my.yaml").write_text(text)
    load_config(tmp_path / "my.yaml", ["model.pretrained_model_name_or_path=some/model"])  # examples leave it out


RAY_JOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"},
    "spec.rayClusterSpec": {"enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs"},
    "spec.rayClusterSpec.autoscalerOptions": {"version", "idleTimeoutSeconds"},
    "spec.rayClusterSpec.headGroupSpec": {"rayStartParams", "template"},
    "spec.rayClusterSpec.workerGroupSpecs.0": {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    },
}
"""Fields of the custom resource definition rayjobs.ray.io, version v1, as KubeRay 1.7 has them."""


def test_a_manifest_has_the_fields_of_a_ray_job_and_starts_without_gpus() -> None:
    (text,) = MANIFESTS
    manifest = yaml.safe_load(text)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    for path, fields in RAY_JOB.items():
        part = manifest
        for name in filter(None, path.split(".")):
            part = part[int(name)] if name.isdigit() else part[name]
        assert set(part) == fields, path
    cluster = manifest["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], cluster["enableInTreeAutoscaling"]) == (0, 0, True)
    for pod in (cluster["headGroupSpec"], group):
        (container,) = pod["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"], "Ray counts what is limited"
    command, *arguments = shlex.split(manifest["spec"]["entrypoint"])
    params = checked(command.removeprefix("qie-"), arguments)
    assert (params["engine"], params["vae_device"], params["text_device"]) == ("ray", "cuda:0", "cuda:0")


def test_json_is_a_batch_or_a_run_s_other_prompts(tmp_path: Path) -> None:
    for page in PAGES:
        for block in blocks(page, "json"):
            if block.startswith("["):
                assert read_prompts(block.encode(), "prompts.json")
                continue
            (tmp_path / "todo.jsonl").write_text(block)
            found = read_batch(tmp_path / "todo.jsonl", negative_prompt=" ", seed=0, count=1)
            assert len(found) == len(block.splitlines()), name_of(page)


def checked(command: str, arguments: list[str]) -> dict[str, object]:
    """A command's options, after all that it checks without its files."""
    params = COMMANDS[command].make_context(command, list(arguments)).params
    if command == "stats":
        stats._check(params, bool(params["as_json"]))
    if command == "precompute":
        precompute._devices(params)
    if command == "predict":
        asked = params["batch"] or (params["prompt"] and params["output"])
        assert asked, arguments
    return params


@pytest.mark.parametrize(("command", "arguments"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS])
def test_commands_can_be_called_so(command: str, arguments: list[str]) -> None:
    params = checked(command, arguments)
    config = str(params.get("config_path") or "")
    file = ROOT / (config if config.startswith("configs/") else "configs/edit_lora.yaml")
    load_config(file, params.get("overrides", ()))


@pytest.mark.parametrize("guide", ["add-rows", "masks"])
def test_a_guide_s_commands_run_in_their_order(
    guide: str, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(desk, tmp_path / "desk", symlinks=True)
    monkeypatch.chdir(tmp_path / "desk")
    for page, command, arguments in CALLS:
        if page.startswith(f"guides/{guide}.md: "):
            done = CliRunner().invoke(COMMANDS[command], arguments)
            assert done.exit_code == 0, f"{page}\n{done.output}"


@pytest.mark.parametrize(("command", "arguments"), [c[1:] for c in MENTIONED], ids=[c[0] for c in MENTIONED])
def test_commands_within_a_sentence_have_the_options_that_they_are_given(command: str, arguments: list[str]) -> None:
    main = COMMANDS[command]
    known = {option for param in main.params if isinstance(param, click.Option) for option in param.opts}
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known | {"--help"}
    if "--config" in arguments:  # whole, and no fragment
        main.make_context(command, list(arguments))


@pytest.mark.parametrize("line", [line for _, line in LAUNCHED], ids=[name for name, _ in LAUNCHED])
def test_launchers_take_the_options_that_they_are_given(line: str) -> None:
    words = words_of(line)
    if "torchrun" in words:
        from torch.distributed.run import get_args_parser

        parser, words = get_args_parser(), words[words.index("torchrun") + 1 :]
    else:
        from accelerate.commands.launch import launch_command_parser

        parser, words = launch_command_parser(), words[words.index("launch") + 1 :]
    given = parser.parse_args(words)
    assert given.training_script == "qie.cli.train" and given.module


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=name_of)
def test_shell_blocks_are_shell(page: Path) -> None:
    done = subprocess.run(["bash", "-n"], input="\n".join(blocks(page, "sh")), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_move_over_as_the_migration_page_says(photos: Path, tmp_path: Path) -> None:
    for name, folder in (("image_dir", "training_images"), ("control_dir", "control_images")):
        shutil.copytree(photos / folder, tmp_path / name)
    shutil.copytree(photos / "control_images", tmp_path / "mask_dir")
    image, control = (next((tmp_path / name).glob("*.png")) for name in ("image_dir", "control_dir"))
    several = {"image_path": str(image), "control_path_0": str(control), "control_path_1": str(control), "caption": "x"}
    one = {"image_path": str(image), "control_path": str(control), "caption": "x"}
    (tmp_path / "old.jsonl").write_text(f"{json.dumps(several)}\n{json.dumps(one)}\n")
    found = [
        yaml.safe_load(block.replace("/path/to", str(tmp_path))) for block in blocks(DOCS / "migration.md", "yaml")
    ]
    folder, table, masked = (open_source(one["data"].pop("source"), **one["data"]) for one in found if "data" in one)
    assert len(folder) == len(masked) == len(open_source(photos)) and folder.read(0).prompt
    assert folder.read(0).controls == masked.read(0).controls == (masked.read(0).mask,)
    assert [len(table.read(number).controls) for number in range(2)] == [2, 1]


def test_files_tools_targets_and_extras_that_are_named_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tools = 0
    for page, line in LINES:
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

"""Bad input to the four commands: one short message that names the fault, exit code 2, and nothing written.

The weight files of the model here are empty: what is refused with it is refused before a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

import qie
from qie.cli import precompute, predict, stats, train
from qie.cli.common import explained
from qie.precompute import precompute as write_shards
from tests.stubs import StubEncoder, StubSource


def tree(folder: Path) -> dict[str, str]:
    """Everything under a folder, with a hash of every file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def skeletons(tiny_edit: Path, tiny_edit_plus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of both families whose weight files are empty."""
    folder = tmp_path_factory.mktemp("skeletons")
    for name, model in (("edit", tiny_edit), ("edit_plus", tiny_edit_plus)):
        shutil.copytree(model, folder / name)
        for weights in (folder / name).rglob("*.safetensors"):
            weights.write_bytes(b"")
    return {name: folder / name for name in ("edit", "edit_plus")}


@pytest.fixture(scope="module")
def desk(skeletons: dict[str, Path], photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `config.yaml`, `model`, `image.png`, and `shards` of family edit; nobody changes it."""
    folder = tmp_path_factory.mktemp("desk")
    shutil.copytree(skeletons["edit"], folder / "model")
    config = {
        "model": {"pretrained_model_name_or_path": "model"},
        "data": {"source": str(photos), "area_px": 16384, "allow_tiny": True},
        "cache": {"cache_dir": "shards", "vae_encoder_device": "cpu", "text_encoder_device": "cpu"},
        "train": {"max_steps": 2, "mixed_precision": "no", "output_dir": "run"},
        "predict": {"devices": {"vae": "cpu", "text_encoder": "cpu", "transformer": "cpu"}},
        "validation": {"rows": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "no.yaml").write_text("model: [1,\n  2: 3\n" * 40)
    (folder / "faults.yaml").write_text(yaml.safe_dump({f"key{number}": number for number in range(100)}))
    Image.new("RGB", (64, 48), "teal").save(folder / "image.png")
    write_shards(StubSource.of(4), StubEncoder(), folder / "shards", rows=(0, 4))
    (folder / "empty").mkdir()
    (folder / "file").write_text("a file")
    return folder


@pytest.fixture(autouse=True)
def _at_the_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


@pytest.fixture
def work(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the desk to work in and to change."""
    shutil.copytree(desk, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def refused(command, *arguments: object) -> str:
    """Run a command, see that it is refused as it has to be, and return the message."""
    before = tree(Path.cwd())
    result = CliRunner().invoke(command.main, [str(argument) for argument in arguments])
    if not isinstance(result.exception, SystemExit):
        raise AssertionError(f"no SystemExit: {result.output}") from result.exception
    assert result.exit_code == 2, result.output
    _, error, message = ("\n" + result.stderr).partition("\nerror: ")
    assert error and len(message.splitlines()) <= 12, result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert tree(Path.cwd()) == before, "something was written"
    return result.stderr


CONFIG = ("--config", "config.yaml")
EDIT = (*CONFIG, "--image", "image.png", "--prompt", "make it night", "--output", "out.png")
CONFIGURED = [(precompute, CONFIG), (train, CONFIG), (predict, EDIT)]


def put(key: str, value: object) -> tuple[str, str]:
    return "--set", f"{key}={value}"


NOT_WRITTEN = ("nowhere/out.png", "file/out.png")
NO_FORMAT = ("empty", "out", "out.xyz", ".png", "", "out.psd", "out.fli")

Case = tuple[Any, tuple[object, ...], list[str]]
NO_SOURCE = put("data.source", "null")


def everywhere(words: list[str], *more: object) -> list[Case]:
    """The same fault given to each command that takes a configuration."""
    return [(command, (*arguments, *more), words) for command, arguments in CONFIGURED]


def on_devices(device: str, *words: str) -> list[Case]:
    """A device given to each command, by option or by key; the message names the key, too."""
    given = [
        (precompute, (*CONFIG, "--vae-device", device), "cache.vae_encoder_device"),
        (precompute, (*CONFIG, "--text-device", device), "cache.text_encoder_device"),
        (precompute, (*CONFIG, *put("cache.vae_encoder_device", device)), "cache.vae_encoder_device"),
        (
            train,
            (*CONFIG, *put("cache.use_cache", "false"), *put("cache.text_encoder_device", device)),
            "cache.text_encoder_device",
        ),
        *[
            (predict, (*EDIT, *put(f"predict.devices.{name}", device)), f"predict.devices.{name}")
            for name in ("transformer", "vae", "text_encoder")
        ],
    ]
    return [
        (command, arguments, [word.format(key) for word in ("{}", device, *words)]) for command, arguments, key in given
    ]


def without_shards() -> list[Case]:
    """Each place without shards, given to each command that looks for some."""
    places = {
        "empty": "an empty folder",
        "nowhere": "nothing that matches",
        "nowhere/at/all": "no folder nowhere/at",
        "model": "model_index.json",
        "file": "nothing that matches",
        "shards/{00000100..00000120}*.tar": "nothing that matches",
        "shards/9*.tar": "nothing that matches",
        "empty/*.tar": "nothing that matches",
        "": "config.yaml",
    }
    options = [(), ("--verify",), ("--json",), ("--compact",)]
    commands = [*((stats, words) for words in options), (train, (*CONFIG, *NO_SOURCE))]
    return [
        (command, (place, *arguments), ["no shards found", found])
        for place, found in places.items()
        for command, arguments in commands
    ]


FAULTS: dict[str, list[Case]] = {
    "a compacted index that is named has to be one, and to be there": [
        (train, (*CONFIG, "--index", "shards/index.safetensors"), ["no such compacted index", "qie-stats --compact"]),
        (train, (*CONFIG, "--index", "image.png", "shards", "empty"), ["goes with one folder", "shards, empty"]),
        (train, (*CONFIG, "--index", "image.png", "--follow"), ["all there", "--follow"]),
    ],
    "a missing config file is named": everywhere(
        ["configuration file cannot be read", "missing.yaml"], "--config", "missing.yaml"
    ),
    "a config that is no yaml is named": everywhere(["no.yaml"], "--config", "no.yaml"),
    "a config with many faults is refused in few lines": everywhere(["and 100 more faults"], "--config", "faults.yaml"),
    "an unknown key names the nearest": everywhere(
        ["unknown key 'max_step'", "did you mean 'max_steps'?"], *put("train.max_step", 5)
    ),
    "a bad --set is shown": [
        case
        for text in ("train.max_steps", "=5", "train..seed=5", "")
        for case in everywhere(["--set cannot be parsed"], "--set", text)
    ],
    "a bad value is shown with its key": everywhere(["train.max_steps", "'many'"], *put("train.max_steps", "many")),
    "a family that does not fit the model is refused": everywhere(
        ["model.family does not fit", "QwenImageEditPipeline"], *put("model.family", "edit_plus")
    ),
    "a GPU that is not there is named with its key": on_devices("cuda:99", "no such GPU", "--set {}=auto"),
    "what is no device is named with its key": [
        case
        for device in ("gpu", "cuda:-1", "cuda:one", "cpu:1", f"cuda:{10**30}")
        for case in on_devices(device, "no such device")
    ],
    "a device that qie cannot use is refused": [
        (precompute, (*CONFIG, "--output", "new", "--vae-device", device), [device])
        for device in ("mps", "meta", "xpu")
    ],
    "a source that is no folder is named": [
        case
        for source, found in (("nowhere", "nothing"), ("file", "a file"))
        for case in (
            (precompute, (*CONFIG, "--source", source), ["the source is neither a folder", source, found]),
            (precompute, (*CONFIG, *put("data.source", source)), ["the source is neither a folder", source, found]),
            (
                train,
                (*CONFIG, *put("data.source", source), *put("cache.use_cache", "false")),
                ["the source is neither a folder"],
            ),
        )
    ],
    "a source of another layout lists what is there": [
        (precompute, (*CONFIG, "--source", "."), ["config.yaml"]),
        (precompute, (*CONFIG, "--source", "empty"), ["an empty folder"]),
    ],
    "no source at all names key and option": [
        (precompute, (*CONFIG, *put("data.source", "")), ["data.source is not set", "--source"]),
        (
            train,
            (*CONFIG, *put("data.source", ""), *put("cache.cache_dir", "")),
            ["data.source is not set", "SHARDS"],
        ),
    ],
    "a range without rows says how many there are": [
        (precompute, (*CONFIG, *rows, *dry), ["the range holds no rows", "12 rows", f"{rows[0]} {rows[1]}"])
        for rows in (
            ("--start-idx", 12),
            ("--start-idx", 999),
            ("--start-idx", 5, "--end-idx", 5),
            ("--start-idx", 5, "--end-idx", 3),
            ("--start-idx", -1),
            ("--end-idx", 0),
            ("--end-idx", -1),
        )
        for dry in ((), ("--dry-run",))
    ],
    "a part that is none says how parts are counted": [
        (precompute, (*CONFIG, "--part", part), ["no such part", "1/N to N/N", "--array=1-64"])
        for part in ("0/4", "5/4", "1", "1/", "/4", "-1/4", "1/0", "a/b", "1/4/4", "1.5/4", "²/4", "")
    ],
    "a part excludes a range": [
        (precompute, (*CONFIG, "--part", "1/2", *more), ["--part cannot be combined with --start-idx or --end-idx"])
        for more in (("--start-idx", 0), ("--end-idx", 12))
    ],
    "no output folder at all names key and option": [
        (precompute, (*CONFIG, *put("cache.cache_dir", "")), ["cache.cache_dir is not set", "--output"])
    ],
    "an output that is a file or below one is refused": [
        (precompute, (*CONFIG, "--output", "file"), ["the output is not a folder", "file"]),
        (precompute, (*CONFIG, *put("cache.cache_dir", "file")), ["the output is not a folder", "file"]),
        (precompute, (*CONFIG, "--output", "file/shards"), ["file/shards"]),
    ],
    "an output of another recipe is refused with what differs": [
        (precompute, CONFIG, ["another recipe", "areas_px: (16384,) here, (4096,) there"])
    ],
    "no shards found says what is there instead": without_shards(),
    "one place without shards is refused among others that have some": [
        (stats, ("shards", "empty"), ["where:    empty"]),
        (train, ("shards", "empty", *CONFIG, *NO_SOURCE), ["where:    empty"]),
    ],
    "a cache_dir without shards is named": [
        (train, (*CONFIG, *put("cache.cache_dir", "empty"), *NO_SOURCE), ["no shards found"])
    ],
    "a url of a store that qie does not know is refused": [
        (command, (place, *arguments), ["URL", place, "s3://"])
        for place in ("ftp://example.org/00000000-00000064.tar", "s4://bucket/shards", "s3:/bucket/x")
        for command, arguments in ((stats, ()), (train, CONFIG))
    ],
    "a pipe is refused": [
        (command, ("{shards,pipe:touch ran; cat shards/*.tar}", *arguments), ["shell", "touch ran"])
        for command, arguments in ((stats, ()), (train, CONFIG))
    ],
    "braces that do not match and the home of nobody are refused": [
        (stats, (place,), [place.removesuffix("/shards")])
        for place in ("shards/{000..", "shards/000}.tar", "pipe:touch ran {", "~nobody-of-this-name/shards")
    ],
    "an image that cannot be read is named with the reason": [
        (predict, (*EDIT, "--image", image), [reason, f"where:    {image}"])
        for image, reason in {
            "missing.png": "No such file",
            "empty": "Is a directory",
            "file": "not an image",
            "model/model_index.json": "not an image",
            "file/image.png": "Not a directory",
        }.items()
    ],
    "an output that cannot be written is refused before the work": [
        *[(predict, (*EDIT, "--output", output), ["the file cannot be written there"]) for output in NOT_WRITTEN],
        *[(predict, (*EDIT, "--output", output), ["not that of an image format"]) for output in NO_FORMAT],
    ],
    "a folder without an adapter is refused": [
        (
            predict,
            (*EDIT, "--lora", lora),
            ["neither an adapter file", f"where:    {lora}", "pytorch_lora_weights.safetensors"],
        )
        for lora in ("empty", "nowhere", "file", "model")
    ],
}
CASES = [(claim, case) for claim, cases in FAULTS.items() for case in cases]


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[claim for claim, _ in CASES])
def test_bad_input_is_refused_in_words(case: Case) -> None:
    command, arguments, words = case
    message = refused(command, *arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("command", "option", "answer"),
    [
        (precompute, "--start_idx", "Did you mean --start-idx?"),
        (train, "--network_dim", "--network_dim → model.lora.r, in the configuration or as --set KEY=VALUE"),
        (train, "--batch-size", "--batch_size → data.batch_size"),
        (train, "--resume_from_checkpoint", "qie-train --resume DIR"),
        (train, "--cache", "qie-precompute encodes"),
        (predict, "--lora_weight", "--lora PATH:SCALE"),
        (stats, "--qwerty", "No such option"),
    ],
)
def test_an_option_of_an_earlier_program_is_answered_with_what_to_write_instead(
    command, option: str, answer: str
) -> None:
    result = CliRunner().invoke(command.main, [*CONFIG, option, "5"])
    assert result.exit_code == 2 and answer in result.stderr and result.stdout == ""


# PretrainedModel


def without_model(model: Path) -> None:
    shutil.rmtree(model)


def index_of(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "model_index.json").write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (without_model, "no such model"),
    "a file": (lambda model: without_model(model) or model.write_text("weights"), "no such model"),
    "empty": (lambda model: without_model(model) or model.mkdir(), "holds no diffusers model"),
    "another pipeline": (index_of('{"_class_name": "StableDiffusionPipeline"}'), "StableDiffusionPipeline"),
    "no pipeline": (index_of("{}"), "does not support this family"),
    "index is no JSON": (index_of("{"), "model_index.json"),
    "index is a list": (index_of("[]"), "not a JSON object"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_folder_that_is_no_model_is_refused_by_each_command(work: Path, fault: str) -> None:
    change, called = BROKEN[fault]
    change(work / "model")
    for command, arguments in CONFIGURED:
        message = refused(command, *arguments, *put("model.pretrained_model_name_or_path", work / "model"))
        assert called in message and str(work / "model") in message


PARTS = ("vae", "text_encoder", "tokenizer", "processor", "transformer", "scheduler")
COMPONENTS = [
    *((precompute, CONFIG, name, "missing") for name in PARTS[:4]),
    *((train, CONFIG, name, "missing") for name in PARTS[4:]),
    *((predict, EDIT, name, fault) for name in PARTS for fault in ("missing", "without config", "no JSON")),
    # The configs of tokenizer and processor name no one class.
    *((predict, EDIT, name, "another class") for name in PARTS if name not in ("tokenizer", "processor")),
]


@pytest.mark.parametrize(("command", "arguments", "name", "fault"), COMPONENTS)
def test_a_component_that_cannot_be_used_is_named_with_the_reason(
    work: Path, command, arguments: tuple[str, ...], name: str, fault: str
) -> None:
    folder, words = work / "model" / name, [f"no usable {name}", f"model/{name}"]
    if fault == "missing":
        shutil.rmtree(folder)
    for path in folder.glob("*config.json"):
        if fault == "without config":
            path.unlink()
        elif fault == "no JSON":
            path.write_text("{")
            words = ["cannot be read"]
        elif path.name in ("config.json", "scheduler_config.json"):
            kind = (
                {"architectures": ["T5EncoderModel"]} if name == "text_encoder" else {"_class_name": "T5EncoderModel"}
            )
            path.write_text(json.dumps(json.loads(path.read_text()) | kind))
            words = [f"the {name} has an unexpected class", "found:    T5EncoderModel"]
    if fault == "without config":
        (folder / "weights.bin").touch()
        words = [f"no usable {name}", "weights.bin"]
    message = refused(command, *arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("command", "arguments", "name", "content"),
    [
        (train, (*CONFIG, "shards", "--accept-recipe"), "transformer", None),
        (train, (*CONFIG, "shards", "--accept-recipe"), "transformer", b"<html>404</html>"),
        (predict, EDIT, "transformer", b""),
        (predict, EDIT, "vae", None),
        (predict, EDIT, "vae", bytes(100)),
    ],
)
def test_missing_or_damaged_weights_are_refused_by_their_component(
    work: Path, tiny_edit: Path, command, arguments: tuple[str, ...], name: str, content: bytes | None
) -> None:
    shutil.rmtree(work / "model")
    shutil.copytree(tiny_edit, work / "model")
    for weights in (work / "model" / name).glob("*.safetensors"):
        weights.unlink() if content is None else weights.write_bytes(content)
    assert f"model/{name}" in refused(command, *arguments)


def test_shards_of_another_family_are_refused(skeletons: dict[str, Path]) -> None:
    message = refused(train, *CONFIG, *put("model.pretrained_model_name_or_path", skeletons["edit_plus"]))
    assert "another model family" in message
    assert "edit_plus by the configuration, edit in the shards" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["already holds a run", "--resume latest"]),
        (("--resume", "latest", *put("train.output_dir", "new")), ["new"]),
        (("--resume", "checkpoint-000009"), ["checkpoint-000009"]),
        (put("train.output_dir", "file"), ["file"]),
        (("--resume", "latest", *put("train.output_dir", "new"), *put("logging.report_to", "[tensorboard]")), ["new"]),
        (
            (
                "--accept-recipe",
                *put("optimizer.class_path", "torch.optim.Adem"),
                *put("logging.report_to", "[tensorboard]"),
            ),
            ["Adem"],
        ),
    ],
)
def test_what_is_only_found_out_beside_the_transformer_is_refused_and_leaves_no_file(
    work: Path, tiny_edit: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    """A run's folder, a checkpoint to resume, an optimizer; `refused` sees that trackers have written nothing."""
    if not arguments:
        (work / "run" / "checkpoint-000002").mkdir(parents=True)
    message = refused(train, *CONFIG, *put("model.pretrained_model_name_or_path", tiny_edit), *arguments)
    assert all(word in message for word in words), message


# Shards


def test_tars_whose_indexes_are_gone_are_a_fault_that_names_them(work: Path) -> None:
    (work / "shards" / "00000000-00000004.json").unlink()
    places = [
        f"{folder}{rest}" for folder in ("shards", work / "shards") for rest in ("", "/*.tar", "/00000000-*.json")
    ]
    calls = [*((place,) for place in places), ("shards/00000000-00000004.tar",)]
    for arguments in [*calls, *(("shards", option) for option in ("--verify", "--json", "--plan"))]:
        result = CliRunner().invoke(stats.main, arguments)
        assert result.exit_code == 1 and result.stdout == "", result.output
        assert "tars have no index" in result.stderr and "00000000-00000004.tar" in result.stderr


def test_tars_of_other_names_are_no_shards_that_lost_their_index(work: Path) -> None:
    (work / "empty" / "train-0001.tar").touch()
    assert "train-0001.tar" in refused(stats, "empty")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (stats, ("a\0b",)),
        (stats, ("file://a\0b",)),
        (train, ("a\0b", *CONFIG)),
        (train, (*CONFIG, "--resume", "a\0b")),
        *[(precompute, (*CONFIG, option, "a\0b")) for option in ("--source", "--output", "--log", "--config")],
        *[(predict, (*EDIT, option, "a\0b")) for option in ("--image", "--output", "--lora", "--transformer")],
    ],
)
def test_a_path_that_holds_nul_is_refused(command, arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(command.main, list(arguments))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.output
    assert r"a\x00b" in result.stderr


@pytest.mark.parametrize("option", ["--prompt", "--negative-prompt"])
def test_a_prompt_that_is_no_text_is_refused_by_its_option(option: str) -> None:
    """What Python makes of an argument that is not UTF-8."""
    assert "not valid Unicode" in (message := refused(predict, *EDIT, option, "night \udc80")) and option in message


@pytest.mark.parametrize("command", [stats, precompute])
def test_a_path_that_the_system_refuses_is_refused(command) -> None:
    path = "x" * 300
    assert path in refused(command, *((path,) if command is stats else (*CONFIG, "--source", path)))


# Inference


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--cfg", ["nan", "inf", "-1", "101", "1e308", "x", ""]),
        ("--steps", ["1", "0", "-1", "1001", str(10**30), "2.5", "nan"]),
        ("--seed", ["-1", str(2**63), "0.5"]),
        ("--num-images", ["0", "10001", str(10**30)]),
        ("--size", ["0x0", "16x99999999", "nanxnan", "-16x16", ""]),
        ("--lora", ["adapter:nan", "adapter:inf", "adapter:1e308", "adapter:-1001"]),
    ],
)
def test_an_odd_number_is_refused_by_its_option(work: Path, option: str, values: list[str]) -> None:
    (work / "adapter").mkdir()
    (work / "adapter" / "pytorch_lora_weights.safetensors").touch()
    for value in values:
        result = CliRunner().invoke(predict.main, [*EDIT, option, value])
        assert isinstance(result.exception, SystemExit) and result.exit_code == 2, (value, result.output)
        assert option in result.stderr, (value, result.output)


def test_an_image_that_is_cut_short_is_called_damaged(work: Path) -> None:
    content = (work / "image.png").read_bytes()
    (work / "image.png").write_bytes(content[: len(content) // 2])
    assert "damaged" in refused(predict, *EDIT)


@pytest.mark.parametrize("chained", [True, False])
def test_ctrl_c_that_a_library_made_an_error_of_is_an_interrupt(chained: bool) -> None:
    @click.command()
    @explained
    def command() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ModuleNotFoundError("could not import a part") from (interrupt if chained else None)

    result = CliRunner().invoke(command)
    assert result.exit_code == 130 and result.output.startswith("interrupted: ")


SWALLOWED = {
    "caught": "try:\n    interrupt()\nexcept BaseException:\n    pass",
    "made another": "try:\n    interrupt()\nexcept BaseException:\n    raise ImportError('missing') from None",
    "dropped by Python": "class Dying:\n    def __del__(self):\n        interrupt()\nDying()",
}


@pytest.mark.parametrize(("module", "how"), [*(("yaml", how) for how in SWALLOWED), ("accelerate", "made another")])
def test_ctrl_c_while_modules_are_imported_ends_the_command(work: Path, module: str, how: str) -> None:
    """Whatever the module that is just being imported makes of it. Yaml is imported early, accelerate behind torch."""
    (work / "path").mkdir()
    interrupt = "import os, signal\ndef interrupt():\n    os.kill(os.getpid(), signal.SIGINT)\n    list(range(1000))\n"
    (work / "path" / f"{module}.py").write_text(interrupt + SWALLOWED[how] + "\nraise SystemExit('it went on')\n")
    ended = subprocess.run(
        [sys.executable, "-m", "qie.cli.train", *CONFIG, "shards"],
        env=os.environ | {"PYTHONPATH": str(work / "path")},
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


@pytest.mark.filterwarnings("always")
def test_a_warning_of_qie_has_our_form_and_one_of_a_library_is_not_shown() -> None:
    @click.command()
    @explained
    def command() -> None:
        warnings.warn_explicit("another line\nof words", UserWarning, str(Path(qie.__file__).parent / "encode.py"), 1)
        warnings.warn_explicit("of a library", UserWarning, "/lib/library.py", 1)

    result = CliRunner().invoke(command)
    assert (result.stdout, result.stderr) == ("", "warning: another line of words\n")

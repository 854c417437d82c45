"""Bad input to the four commands: one short message that names the fault, exit code 2, and nothing written.

The weight files of the checkpoint here are empty: what is refused with it is refused before a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from qie.cli import precompute, predict, stats, train
from qie.cli.common import explained
from qie.precompute import precompute as write_shards
from tests.stubs import StubEncoder, StubSource

Refused = Callable[..., str]


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


@pytest.fixture
def work(tmp_path: Path, skeletons: dict[str, Path], photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `config.yaml`, `model`, `image.png`, and `shards` of family edit."""
    folder = tmp_path / "work"
    folder.mkdir()
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
    Image.new("RGB", (64, 48), "teal").save(folder / "image.png")
    write_shards(StubSource.of(4), StubEncoder(), folder / "shards", rows=(0, 4))
    (folder / "empty").mkdir()
    (folder / "file").write_text("a file")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(work: Path) -> Refused:
    """Run a command, see that it is refused as it has to be, and return the message."""

    def check(command, *arguments: object) -> str:
        before = tree(work)
        result = CliRunner().invoke(command.main, [str(argument) for argument in arguments])
        if not isinstance(result.exception, SystemExit):
            raise AssertionError(f"no SystemExit: {result.output}") from result.exception
        assert result.exit_code == 2, result.output
        _, error, message = ("\n" + result.stderr).partition("\nerror: ")
        assert error and len(message.splitlines()) <= 12, result.stderr
        assert "Traceback" not in result.output
        assert result.stdout == ""
        assert tree(work) == before, "something was written"
        return result.stderr

    return check


CONFIG = ("--config", "config.yaml")
EDIT = (*CONFIG, "--image", "image.png", "--prompt", "make it night", "--output", "out.png")
CONFIGURED = [(precompute, CONFIG), (train, CONFIG), (predict, EDIT)]
configured = pytest.mark.parametrize(("command", "arguments"), CONFIGURED, ids=["precompute", "train", "predict"])


def put(key: str, value: object) -> tuple[str, str]:
    return "--set", f"{key}={value}"


# Configuration


@configured
def test_a_missing_config_file_is_named(refused: Refused, command, arguments: tuple[str, ...]) -> None:
    message = refused(command, *arguments, "--config", "missing.yaml")
    assert "configuration file cannot be read" in message and "missing.yaml" in message


@configured
def test_a_config_that_is_no_yaml_is_named(refused: Refused, work: Path, command, arguments: tuple[str, ...]) -> None:
    (work / "bad.yaml").write_text("model: [1,\n  2: 3\n" * 40)
    assert "bad.yaml" in refused(command, *arguments, "--config", "bad.yaml")


@configured
def test_an_unknown_key_names_the_nearest(refused: Refused, command, arguments: tuple[str, ...]) -> None:
    message = refused(command, *arguments, *put("train.max_step", 5))
    assert "unknown key 'max_step'" in message and "did you mean 'max_steps'?" in message


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


@configured
@pytest.mark.parametrize("text", ["train.max_steps", "=5", "train..seed=5", ""])
def test_a_bad_set_is_shown(refused: Refused, command, arguments: tuple[str, ...], text: str) -> None:
    assert "--set cannot be understood" in refused(command, *arguments, "--set", text)


@configured
def test_a_bad_value_is_shown_with_its_key(refused: Refused, command, arguments: tuple[str, ...]) -> None:
    message = refused(command, *arguments, *put("train.max_steps", "many"))
    assert "train.max_steps" in message and "'many'" in message


@configured
def test_a_config_with_many_faults_is_refused_in_few_lines(
    refused: Refused, work: Path, command, arguments: tuple[str, ...]
) -> None:
    (work / "bad.yaml").write_text(yaml.safe_dump({f"key{number}": number for number in range(100)}))
    assert "and 100 more faults" in refused(command, *arguments, "--config", "bad.yaml")


# PretrainedModel


def broken(work: Path, fault: str) -> str:
    """A checkpoint with a fault; returns how the fault is called."""
    model = work / "model"
    if fault == "missing":
        shutil.rmtree(model)
        return "no such model"
    if fault == "a file":
        shutil.rmtree(model)
        model.write_text("weights")
        return "no such model"
    if fault == "empty":
        shutil.rmtree(model)
        model.mkdir()
        return "holds no diffusers checkpoint"
    index = model / "model_index.json"
    if fault == "another pipeline":
        index.write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
        return "StableDiffusionPipeline"
    if fault == "no pipeline":
        index.write_text("{}")
        return "no family that qie knows"
    if fault == "index is no JSON":
        index.write_text("{")
        return "model_index.json"
    assert fault == "index is a list"
    index.write_text("[]")
    return "no JSON object"


@configured
@pytest.mark.parametrize(
    "fault", ["missing", "a file", "empty", "another pipeline", "no pipeline", "index is no JSON", "index is a list"]
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    refused: Refused, work: Path, command, arguments: tuple[str, ...], fault: str
) -> None:
    called = broken(work, fault)
    message = refused(command, *arguments, *put("model.pretrained_model_name_or_path", work / "model"))
    assert called in message and str(work / "model") in message


COMPONENTS = [
    *[(precompute, CONFIG, name) for name in ("vae", "text_encoder", "tokenizer", "processor")],
    *[(train, CONFIG, name) for name in ("transformer", "scheduler")],
    *[(predict, EDIT, name) for name in ("vae", "text_encoder", "tokenizer", "processor", "transformer", "scheduler")],
]
with_component = pytest.mark.parametrize(("command", "arguments", "name"), COMPONENTS)


@with_component
def test_a_missing_component_is_named(
    refused: Refused, work: Path, command, arguments: tuple[str, ...], name: str
) -> None:
    shutil.rmtree(work / "model" / name)
    message = refused(command, *arguments)
    assert f"no usable {name}" in message and f"model/{name}" in message


@with_component
def test_a_component_without_its_config_lists_what_is_there(
    refused: Refused, work: Path, command, arguments: tuple[str, ...], name: str
) -> None:
    for path in (work / "model" / name).glob("*config.json"):
        path.unlink()
    (work / "model" / name / "weights.bin").touch()
    message = refused(command, *arguments)
    assert f"no usable {name}" in message and "weights.bin" in message


@pytest.mark.parametrize(
    ("command", "arguments", "name"),
    [each for each in COMPONENTS if each[2] not in ("tokenizer", "processor")],  # whose configs name no one class
)
def test_a_component_of_a_wrong_class_is_named_with_both_classes(
    refused: Refused, work: Path, command, arguments: tuple[str, ...], name: str
) -> None:
    config = work / "model" / name / ("scheduler_config.json" if name == "scheduler" else "config.json")
    values = json.loads(config.read_text())
    values |= {"architectures": ["T5EncoderModel"]} if name == "text_encoder" else {"_class_name": "T5EncoderModel"}
    config.write_text(json.dumps(values))
    message = refused(command, *arguments)
    assert f"the {name} is of another class" in message and "found:    T5EncoderModel" in message


@with_component
def test_a_component_whose_config_is_no_json_is_named(
    refused: Refused, work: Path, command, arguments: tuple[str, ...], name: str
) -> None:
    for path in (work / "model" / name).glob("*config.json"):
        path.write_text("{")
    assert "cannot be read" in refused(command, *arguments)


@pytest.mark.parametrize("content", [None, b"", b"<html>404</html>", bytes(100)])
@pytest.mark.parametrize(
    ("command", "arguments", "name"),
    [
        (train, (*CONFIG, "shards", "--accept-recipe"), "transformer"),
        (predict, EDIT, "transformer"),
        (predict, EDIT, "vae"),
    ],
)
def test_missing_or_damaged_weights_are_refused_by_their_component(
    refused: Refused,
    work: Path,
    tiny_edit: Path,
    command,
    arguments: tuple[str, ...],
    name: str,
    content: bytes | None,
) -> None:
    shutil.rmtree(work / "model")
    shutil.copytree(tiny_edit, work / "model")
    for weights in (work / "model" / name).glob("*.safetensors"):
        weights.unlink() if content is None else weights.write_bytes(content)
    assert f"model/{name}" in refused(command, *arguments)


@configured
def test_a_family_that_does_not_fit_the_checkpoint_is_refused(
    refused: Refused, command, arguments: tuple[str, ...]
) -> None:
    message = refused(command, *arguments, *put("model.family", "edit_plus"))
    assert "model.family does not fit" in message and "QwenImageEditPipeline" in message


def test_shards_of_another_family_are_refused(refused: Refused, skeletons: dict[str, Path]) -> None:
    message = refused(train, *CONFIG, *put("model.pretrained_model_name_or_path", skeletons["edit_plus"]))
    assert "another model family" in message
    assert "edit_plus by the configuration, edit in the shards" in message


# Devices

DEVICES = [
    (precompute, (*CONFIG, "--vae-device"), "cache.vae_encoder_device"),
    (precompute, (*CONFIG, "--text-device"), "cache.text_encoder_device"),
    (precompute, CONFIG, "cache.vae_encoder_device"),
    (train, (*CONFIG, *put("cache.use_cache", "false")), "cache.text_encoder_device"),
    (predict, EDIT, "predict.devices.transformer"),
]
with_device = pytest.mark.parametrize(("command", "arguments", "key"), DEVICES)


def on_device(arguments: tuple[str, ...], key: str, device: str) -> tuple[str, ...]:
    return (*arguments, device) if arguments[-1].endswith("-device") else (*arguments, *put(key, device))


@with_device
def test_a_gpu_that_is_not_there_is_named_with_its_key(
    refused: Refused, command, arguments: tuple[str, ...], key: str
) -> None:
    message = refused(command, *on_device(arguments, key, "cuda:99"))
    assert "no such GPU" in message and "cuda:99" in message and f"--set {key}=auto" in message


@with_device
@pytest.mark.parametrize("device", ["gpu", "cuda:-1", "cuda:one", "cpu:1", f"cuda:{10**30}"])
def test_what_is_no_device_is_named_with_its_key(
    refused: Refused, command, arguments: tuple[str, ...], key: str, device: str
) -> None:
    message = refused(command, *on_device(arguments, key, device))
    assert "no such device" in message and device in message and key in message


@pytest.mark.parametrize("key", ["predict.devices.vae", "predict.devices.text_encoder"])
def test_a_device_of_predict_is_named_with_the_key_that_set_it(refused: Refused, key: str) -> None:
    assert f"--set {key}=auto" in refused(predict, *EDIT, *put(key, "cuda:99"))


@pytest.mark.parametrize("device", ["mps", "meta", "xpu"])
def test_a_device_that_qie_cannot_use_is_refused(refused: Refused, device: str) -> None:
    assert device in refused(precompute, *CONFIG, "--output", "new", "--vae-device", device)


# Rows


@pytest.mark.parametrize(("source", "found"), [("nowhere", "nothing"), ("file", "a file")])
def test_a_source_that_is_no_folder_is_named(refused: Refused, source: str, found: str) -> None:
    for arguments in (("--source", source), put("data.source", source)):
        message = refused(precompute, *CONFIG, *arguments)
        assert "the source is no folder" in message and source in message and found in message
    message = refused(train, *CONFIG, *put("data.source", source), *put("cache.use_cache", "false"))
    assert "the source is no folder" in message


def test_a_source_of_another_layout_lists_what_is_there(refused: Refused) -> None:
    assert "config.yaml" in refused(precompute, *CONFIG, "--source", ".")
    assert "an empty folder" in refused(precompute, *CONFIG, "--source", "empty")


def test_no_source_at_all_names_key_and_option(refused: Refused) -> None:
    message = refused(precompute, *CONFIG, *put("data.source", ""))
    assert "data.source is not set" in message and "--source" in message
    message = refused(train, *CONFIG, *put("data.source", ""), *put("cache.cache_dir", ""))
    assert "data.source is not set" in message and "SHARDS" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("--start-idx", 12),
        ("--start-idx", 999),
        ("--start-idx", 5, "--end-idx", 5),
        ("--start-idx", 5, "--end-idx", 3),
        ("--start-idx", -1),
        ("--end-idx", 0),
        ("--end-idx", -1),
    ],
)
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_range_without_rows_says_how_many_there_are(
    refused: Refused, arguments: tuple[object, ...], dry_run: tuple[str, ...]
) -> None:
    message = refused(precompute, *CONFIG, *arguments, *dry_run)
    assert "the range holds no rows" in message and "12 rows" in message
    assert f"{arguments[0]} {arguments[1]}" in message


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "1/", "/4", "-1/4", "1/0", "a/b", "1/4/4", "1.5/4", "²/4", ""])
def test_a_part_that_is_none_says_how_parts_are_counted(refused: Refused, part: str) -> None:
    message = refused(precompute, *CONFIG, "--part", part)
    assert "there is no such part" in message and "1/N to N/N" in message and "--array=1-64" in message


@pytest.mark.parametrize("more", [("--start-idx", 0), ("--end-idx", 12)])
def test_a_part_excludes_a_range(refused: Refused, more: tuple[object, ...]) -> None:
    assert "--part excludes --start-idx and --end-idx" in refused(precompute, *CONFIG, "--part", "1/2", *more)


# Outputs


def test_no_output_folder_at_all_names_key_and_option(refused: Refused) -> None:
    message = refused(precompute, *CONFIG, *put("cache.cache_dir", ""))
    assert "cache.cache_dir is not set" in message and "--output" in message


@pytest.mark.parametrize("output", [("--output", "file"), put("cache.cache_dir", "file")])
def test_an_output_that_is_a_file_is_refused(refused: Refused, output: tuple[str, str]) -> None:
    message = refused(precompute, *CONFIG, *output)
    assert "the output is no folder" in message and "file" in message


def test_an_output_below_a_file_is_refused(refused: Refused) -> None:
    assert "file/shards" in refused(precompute, *CONFIG, "--output", "file/shards")


def test_an_output_of_another_recipe_is_refused_with_what_differs(refused: Refused) -> None:
    message = refused(precompute, *CONFIG)
    assert "another recipe" in message and "areas_px: (16384,) here, (4096,) there" in message


@pytest.fixture
def whole_model(tiny_edit: Path) -> tuple[str, str]:
    """For what is only found out once the transformer is loaded."""
    return put("model.pretrained_model_name_or_path", tiny_edit)


def test_an_output_folder_that_holds_a_run_is_refused(
    refused: Refused, work: Path, whole_model: tuple[str, str]
) -> None:
    (work / "run" / "checkpoint-000002").mkdir(parents=True)
    message = refused(train, *CONFIG, *whole_model)
    assert "holds a run already" in message and "--resume latest" in message


@pytest.mark.parametrize("resume", ["latest", "checkpoint-000002"])
def test_a_checkpoint_to_resume_that_is_not_there_is_named(
    refused: Refused, whole_model: tuple[str, str], resume: str
) -> None:
    message = refused(train, *CONFIG, *whole_model, "--resume", resume)
    assert ("run" if resume == "latest" else resume) in message


@pytest.mark.parametrize("arguments", [("--resume", "latest"), put("optimizer.class_path", "torch.optim.Adem")])
def test_what_is_refused_leaves_no_tensorboard_files(
    refused: Refused, whole_model: tuple[str, str], arguments: tuple[str, str]
) -> None:
    pytest.importorskip("tensorboard")
    refused(train, *CONFIG, *whole_model, *put("logging.report_to", "[tensorboard]"), *arguments)


def test_a_run_folder_that_is_a_file_is_refused(refused: Refused, whole_model: tuple[str, str]) -> None:
    assert "file" in refused(train, *CONFIG, *whole_model, *put("train.output_dir", "file"))


# Shards


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(stats, ()), (stats, ("--verify",)), (stats, ("--json",)), (train, (*CONFIG, *put("data.source", "null")))],
)
@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("empty", "an empty folder"),
        ("nowhere", "nothing that matches"),
        ("nowhere/at/all", "no folder nowhere/at"),
        ("model", "model_index.json"),
        ("file", "nothing that matches"),
        ("shards/{00000100..00000120}*.tar", "nothing that matches"),
        ("shards/9*.tar", "nothing that matches"),
        ("empty/*.tar", "nothing that matches"),
        ("", "config.yaml"),
    ],
)
def test_no_shards_found_says_what_is_there_instead(
    refused: Refused, command, arguments: tuple[str, ...], place: str, found: str
) -> None:
    message = refused(command, place, *arguments)
    assert "no shards found" in message and found in message


@pytest.mark.parametrize("arguments", [(), ("--verify",), ("--json",), ("--plan",)])
@pytest.mark.parametrize("place", ["{}", "{}/*.tar", "{}/00000000-00000004.tar", "{}/00000000-*.json"])
def test_tars_whose_indexes_are_gone_are_a_fault_that_names_them(
    work: Path, arguments: tuple[str, ...], place: str
) -> None:
    (work / "shards" / "00000000-00000004.json").unlink()
    for name in (place.format("shards"), place.format(work / "shards")):
        result = CliRunner().invoke(stats.main, [name, *arguments])
        assert result.exit_code == 1 and result.stdout == "", result.output
        assert "tars have no index" in result.stderr and "00000000-00000004.tar" in result.stderr


def test_tars_of_other_names_are_no_shards_that_lost_their_index(refused: Refused, work: Path) -> None:
    (work / "empty" / "train-0001.tar").touch()
    assert "train-0001.tar" in refused(stats, "empty")


def test_one_place_without_shards_is_refused_among_others_that_have_some(refused: Refused) -> None:
    assert "where:    empty" in refused(stats, "shards", "empty")
    assert "where:    empty" in refused(train, "shards", "empty", *CONFIG, *put("data.source", "null"))


def test_a_cache_dir_without_shards_is_named(refused: Refused) -> None:
    assert "no shards found" in refused(train, *CONFIG, *put("cache.cache_dir", "empty"), *put("data.source", "null"))


@pytest.mark.parametrize(("command", "arguments"), [(stats, ()), (train, CONFIG)])
@pytest.mark.parametrize(
    "place", ["pipe:touch ran", "PIPE: touch ran", "{shards,pipe:touch ran}", "pipe:touch ran; cat shards/*.tar"]
)
def test_a_pipe_is_refused_and_no_shell_runs(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, work: Path, command, arguments: tuple[str, ...], place: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    for module, name in ((subprocess, "Popen"), (subprocess, "run"), (subprocess, "check_output")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr("os.system", refuse)
    monkeypatch.setattr("os.popen", refuse)
    message = refused(command, place, *arguments)
    assert "shell" in message and "touch ran" in message
    assert not (work / "ran").exists()


@pytest.mark.parametrize(("command", "arguments"), [(stats, ()), (train, CONFIG)])
@pytest.mark.parametrize("place", ["ftp://example.org/00000000-00000064.tar", "s4://bucket/shards", "s3:/bucket/x"])
def test_a_url_of_a_store_that_qie_does_not_know_is_refused(
    refused: Refused, command, arguments: tuple[str, ...], place: str
) -> None:
    message = refused(command, place, *arguments)
    assert "URL" in message and place in message and "s3://" in message


@pytest.mark.parametrize("place", ["shards/{000..", "shards/000}.tar", "pipe:touch ran {"])
def test_braces_that_do_not_match_are_refused(refused: Refused, place: str) -> None:
    assert place in refused(stats, place)


def test_the_home_of_nobody_is_refused(refused: Refused) -> None:
    assert "~nobody-of-this-name" in refused(stats, "~nobody-of-this-name/shards")


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
def test_a_path_that_holds_nul_is_refused(work: Path, command, arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(command.main, list(arguments))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.output
    assert r"a\x00b" in result.stderr


@pytest.mark.parametrize("option", ["--prompt", "--negative-prompt"])
def test_a_prompt_that_is_no_text_is_refused_by_its_option(refused: Refused, option: str) -> None:
    """What Python makes of an argument that is not UTF-8."""
    assert "no Unicode" in (message := refused(predict, *EDIT, option, "night \udc80")) and option in message


@pytest.mark.parametrize("command", [stats, precompute])
def test_a_path_that_the_system_refuses_is_refused(refused: Refused, command) -> None:
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


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("missing.png", "No such file"),
        ("empty", "Is a directory"),
        ("file", "no image"),
        ("model/model_index.json", "no image"),
        ("file/image.png", "Not a directory"),
    ],
)
def test_an_image_that_cannot_be_read_is_named_with_the_reason(refused: Refused, image: str, reason: str) -> None:
    message = refused(predict, *EDIT, "--image", image)
    assert reason in message and f"where:    {image}" in message


def test_an_image_that_is_cut_short_is_called_damaged(refused: Refused, work: Path) -> None:
    content = (work / "image.png").read_bytes()
    (work / "image.png").write_bytes(content[: len(content) // 2])
    assert "damaged" in refused(predict, *EDIT)


@pytest.mark.parametrize("output", ["nowhere/out.png", "file/out.png", "empty", "out", "out.xyz", ".png", ""])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(refused: Refused, output: str) -> None:
    message = refused(predict, *EDIT, "--output", output)
    assert "nothing can be written there" in message or "names no image format" in message


@pytest.mark.parametrize("output", ["out.psd", "out.fli"])
def test_an_output_in_a_format_that_is_only_read_is_refused_before_the_work(refused: Refused, output: str) -> None:
    assert "names no image format" in refused(predict, *EDIT, "--output", output)


@pytest.mark.parametrize("lora", ["empty", "nowhere", "file", "model"])
def test_a_folder_without_an_adapter_is_refused(refused: Refused, lora: str) -> None:
    message = refused(predict, *EDIT, "--lora", lora)
    assert "no adapter in this folder" in message and f"where:    {lora}" in message
    assert "pytorch_lora_weights.safetensors" in message


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


@pytest.mark.parametrize("module", ["yaml", "accelerate"])
@pytest.mark.parametrize("how", SWALLOWED)
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

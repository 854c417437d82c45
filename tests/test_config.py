"""The configuration: what is accepted, and by which words everything else is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from qie.config import Config, LoraConfig, load_config, required
from qie.config.earlier_programs import MOVED, moved
from qie.errors import ConfigError, GoneError
from tests.builders import ROOT

MINIMAL = "model: {pretrained_model_name_or_path: m}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The smallest configuration that is accepted."""
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def load(file: Path, text: str = "", *overrides: str) -> Config:
    """The minimal configuration, followed by `text`."""
    file.write_text(MINIMAL + text, encoding="utf-8")
    return load_config(file, overrides)


def refusal(file: Path, text: str = "", *overrides: str) -> ConfigError:
    return refusal_alone(file, MINIMAL + text, *overrides)


def refusal_alone(file: Path, text: str | bytes, *overrides: str) -> ConfigError:
    """The same of a file without the minimal configuration."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert len(str(caught.value).splitlines()) <= 5, "what a library says in many lines becomes one"
    return caught.value


def value_of(config: Any, key: str) -> Any:
    for step in key.split("."):
        config = config[int(step)] if step.isdecimal() else getattr(config, step)
    return config


def test_what_is_not_set_has_its_default(file: Path) -> None:
    assert load(file) == Config.model_validate({"model": {"pretrained_model_name_or_path": "m"}})
    assert load(file).train.max_steps == 2000


# Keys


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("trian: {}", "trian", "train"),
        ("train: {max_step: 5}", "train.max_step", "max_steps"),
        ("predict: {devices: {tansformer: cpu}}", "predict.devices.tansformer", "transformer"),
        ("validation: {samples: [{images: [a.png], promt: x}]}", "validation.samples.0.promt", "prompt"),
        ("data: {source: [{source: a}, {source: b, wieght: 2}]}", "data.source.1.wieght", "weight"),
        ("data: {source: [{sourc: a}]}", "data.source.0.sourc", "source"),
    ],
)
def test_an_unknown_key_names_its_place_in_the_file_and_the_nearest_known_one(
    file: Path, text: str, key: str, nearest: str
) -> None:
    error = refusal(file, text)
    assert error.what.startswith(f"unknown key {key.rpartition('.')[2]!r}")
    assert (error.hint, error.where) == (f"did you mean {nearest!r}?", f"{file}:2, {key}")


def test_an_unknown_key_is_compared_with_the_keys_beside_it(file: Path) -> None:
    error = refusal_alone(file, "model: {pretrained_model_name_or_path: m, lora: {target_module: [to_q]}}")
    assert error.hint == "did you mean 'target_modules'?"
    assert error.expected == f"one of {', '.join(LoraConfig.model_fields)}"
    assert refusal(file, "", "train.max_step=5").hint == "did you mean 'max_steps'?"
    error = refusal(file, "train: {xyzzy: 5}")  # like no other
    assert error.hint is None and "max_steps" in str(error.expected) and "seed" in str(error.expected)
    assert "1" in str(refusal(file, "train: {1: 2}").where)


def old_keys() -> Iterator[tuple[str, str]]:
    """Old keys and options of the page's tables, and what stands beside them."""
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    ours, _, others = page.partition("**Configuration.**")[2].partition("**Code.**")
    others = others.partition("## From musubi-tuner")[2].partition("## From Quaterion")[0]
    for old, new in re.findall(r"(?m)^\| (?!there|.*\.py`|`deepspeed)(.*?) \| (.*) \|$", ours + others):
        section = re.search(r"of `\[(\w+)\]`", old)
        for name, value in re.findall(r"`(?:--)?([a-z][a-z0-9_.]+)((?:[ =:][^`]*)?)`", old):
            key = f"{section[1]}.{name}" if section else name
            yield key + value if key + value in MOVED else key, new


def test_every_key_that_the_page_for_those_who_move_over_names_is_answered_as_there() -> None:
    keys = list(old_keys())
    assert len(keys) > 100
    for key, row in keys:
        answer = str(moved(key)).partition(" → ")[2]
        assert answer.startswith("none") or any(name in answer for name in re.findall(r"`((?:\w+\.)+\w+)", row)), key


@pytest.mark.parametrize(
    ("typed", "named", "answer"),
    [
        ("data.init_args={dataset_path: x}", "init_args.dataset_path", "data.init_args.dataset_path → data.source"),
        ("data.init_args={}", "init_args", "data.init_args → the other keys of section data"),
        ("data.num_workers=4", "num_workers", "data.num_workers → none: batches are prepared in threads"),
        ("lora.rank=8", "lora.rank", "lora.rank → model.lora.r"),
        ("optimizer.lr=1e-4", "lr", "optimizer.lr → optimizer.init_args.lr"),
        ("resolution=1024", "resolution", "resolution → data.area_px, width times height: 1048576 for 1024"),
        ("train.cache_dir=x", "cache_dir", "train.cache_dir → cache.cache_dir"),
        # Values
        ("model.quantize=true", None, "model.quantize: true → model.quantize: fp8"),
        ("logging.report_to=wandb", None, "logging.report_to: wandb → logging.report_to: [wandb], a list"),
        ("lr_scheduler.num_cycles=0.5", None, "lr_scheduler.num_cycles: 0.5 → none: cosine is half a wave"),
    ],
)
def test_an_old_or_misplaced_key_or_value_is_answered_with_what_to_write_instead(
    file: Path, typed: str, named: str | None, answer: str
) -> None:
    """Not with the key that is spelt like it."""
    error = refusal(file, "", typed)
    assert (error.what, error.hint) == (f"unknown key {named!r}" if named else error.what, answer)
    if named:
        key, _, value = typed.partition("=")
        *sections, last = key.split(".")
        text = "".join(f"{name}: {{" for name in sections) + f"{last}: {value}" + "}" * len(sections)
        assert refusal(file, text).hint


@pytest.mark.parametrize(
    ("text", "overrides", "where"),
    [
        ("train:\n  max_steps: 0", [], "{file}:3, train.max_steps"),
        ("train:\n  max_steps: 5", ["train.max_steps=0"], "--set train.max_steps"),
        ("train:\n  max_steps: 0", ["train.seed=5"], "{file}:3, train.max_steps"),
        ("train:\n  max_steps: 5\n", ["train={max_steps: 0}"], "--set train.max_steps"),
        ("data:\n  source:\n  - source: a\n  - source: b\n    weight: 0", [], "{file}:6, data.source.1.weight"),
        ("data:\n  source:\n  - source: a", ["data.source.0.weight=0"], "--set data.source.0.weight"),
        ("train:\n  <<: {seed: 1,\n       max_steps: 0}", [], "{file}:4, train.max_steps"),
        ("validation: {samples: [{images: [a.png]}]}", [], "{file}:2, validation.samples.0.prompt"),
        ("", ["data.area_px=65536", "data.buckets_px=[[256, 256]]"], "--set data"),
        ("data: {area_px: 65536}", ["data.buckets_px=[[256, 256]]"], "{file}:2, data"),
    ],
)
def test_an_error_names_the_line_or_the_set_that_was_typed(
    file: Path, text: str, overrides: list[str], where: str
) -> None:
    assert refusal(file, text, *overrides).where == where.format(file=file)


def test_of_several_faults_the_first_is_explained_and_the_others_are_counted_and_answered(file: Path) -> None:
    error = refusal(file, "train: {max_steps: 0, seed: -1, xyzzy: 1}")
    assert error.what.endswith("; and 2 more faults") and error.where == f"{file}:2, train.max_steps"
    old = "data: {num_workers: 2, init_args: {dataset_path: a, image_size: [832, 576]}}\ntrain: {max_train_steps: 3}"
    error = refusal(file, old)
    assert error.what == "unknown key 'num_workers'; and 2 more faults" and str(error.hint).count(" → ") == 4
    error = refusal_alone(file, "model: {pretrained_model_name: m}")
    assert error.what == "unknown key 'pretrained_model_name'; and 1 more fault", "no missing key explains a slip"
    assert error.hint == "did you mean 'pretrained_model_name_or_path'?"


# Values


REFUSED = {
    "train.max_steps": ["many", "2.5", "[5]", "null", "0"],
    "train.output_dir": ["5"],
    "train.gradient_checkpointing": ["maybe"],
    "train.mixed_precision": ["fp16"],
    "train.gradient_accumulation_steps": ["0"],
    "train.max_grad_norm": ["0", "-1.0", ".nan"],
    "train.seed": ["-1", str(2**32)],  # torch takes 64 bits: the upper half is the seed, the lower half the step
    "train.checkpoint_every": ["0"],
    "data.tail": ["repeat"],
    "data.source": ["5"],
    "data.batch_size": ["0"],
    "data.caption_dropout_rate": ["-0.01", "1.01", ".nan"],
    "data.area_px": ["0", "-65536", "178956971"],
    "data.area_px.1": ["[65536, 0]", "[65536, 1000000000000000000]"],
    "data.text_area_px": ["178956971"],
    "data.prefetch": ["0", "1000000000"],
    "data.reader_threads": ["0", "1000000000"],
    "data.background": ["url(x)", "''", r'"\udc80"', "'#12345'", "rgb(1,2)"],
    "data.source.1": ["[{source: a}, b]"],
    "data.source.0.weight": ["[{source: a, weight: 0}]"],
    "data.buckets_px.0.1": ["[[64, -64]]"],
    "data.buckets_px.0": ["[[16, 16000000]]"],
    "data.buckets_px.1": ["[[64, 64], [16000, 16000]]"],
    "validation.samples.0.images.1": ["[{prompt: x, images: [a.png, 5]}]"],
    "validation.every": ["0"],
    "validation.rows": ["-1"],
    "model.family": ["edit_minus"],
    "model.lora": ["16"],
    "model.lora.r": ["0", "-1", "1000000000"],
    "model.lora.lora_dropout": ["-0.1", "1.1"],
    "model.lora.target_modules": ["{}"],
    "optimizer.init_args": ["[1]"],
    "logging.report_to": ["tensorboard"],
    "logging.report_to.0": ["[tensorbord]"],
    "loss.timestep_sampling": ["beta"],
    "loss.shift": ["often", "{}", "0", "-3.0", ".nan"],
    "loss.mask_background_weight": ["-0.5"],
    "lr_scheduler.scheduler_type": ["exponential"],
    "lr_scheduler.warmup_steps": ["-1"],
    "train": ["5"],
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_value_of_a_wrong_type_or_out_of_range_is_one_fault_at_its_key_or_position_and_shown(
    file: Path, key: str
) -> None:
    typed = re.match(r"\w+(\.[a-z_]+)*", key)[0] if ".source.0." not in key else "data.source"
    typed = "validation.samples" if key.startswith("validation.samples") else typed
    for value in REFUSED[key]:
        found = yaml.safe_load(value)
        for step in key.removeprefix(typed).split(".")[1:]:
            found = found[int(step) if step.isdecimal() else step]
        error = refusal(file, "", f"{typed}={value}")
        assert (error.what, error.where, error.found) == ("a value is refused", f"--set {key}", repr(found)), value
        assert error.expected


SCHEMA = Config.model_json_schema()
ODD = ["0", "-1", "1", *map(str, (2**31, 2**63, 10**18, 10**30)), "0.5", "-0.0", ".nan", ".inf", "-.inf", "1e308"]
ODD += ["''", "true", "[1]", "{a: 1}", r'"\0"', r'"\ud800"']


def leaves(schema: dict[str, Any], key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and type of each number and text of the configuration."""
    schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for one in schema.get("anyOf", []):
        yield from leaves(one, key)
    if schema.get("type") == "array":
        yield from leaves(schema["items"], f"{key}.0")
    for name, inner in schema.get("properties", {}).items():
        yield from leaves(inner, f"{key}.{name}" if key else name)
    if schema.get("type") in ("integer", "number", "string") and "enum" not in schema:
        yield key, schema


def around(key: str, text: str) -> Iterator[str]:
    """What to set so that an element of a list can be set, which has to be there: lists with what they require."""
    for place, value in {
        "data.source.0": "{source: a}",
        "model.adapters.0": "{path: a}",
        "validation.samples.0": "{images: [a.png], prompt: x}",
        "data.buckets_px.0": "[64, 64]",
    }.items():
        if key.startswith(place):
            yield f"{place.rpartition('.')[0]}=[{value}]"
            break
    else:
        if key.endswith(".0"):
            yield f"{key.removesuffix('.0')}=[x]"
    yield f"{key}={text}"


@pytest.mark.parametrize(("key", "kind"), [pytest.param(*leaf, id=leaf[0]) for leaf in leaves(SCHEMA)])
def test_every_number_has_two_ends_and_every_odd_value_is_taken_or_refused_by_its_key(
    file: Path, key: str, kind: dict[str, Any]
) -> None:
    """What is taken is a number between the ends, or a text that a file can hold."""
    number = kind["type"] != "string"
    assert not number or len([name for name in kind if name.lower().endswith(("minimum", "maximum"))]) == 2
    for text in ODD:
        try:
            found = value_of(load(file, "data: {allow_tiny: true}", *around(key, text)), key)
        except ConfigError as error:
            assert re.match(rf"--set {key.rpartition('.')[0]}", str(error.where)), error
            continue
        if isinstance(found, str):
            found.encode()
            assert "\0" not in found
        elif found is not None and not isinstance(found, (bool, list, dict, BaseModel)):
            assert math.isfinite(found) and abs(found) < 2**63, text


@pytest.mark.parametrize(
    "arguments",
    [
        *("lr: .nan", "lr: .inf", "lr: -1", "lr: 1e30", "lr: true", "lr: fast", "lr: [1]", "betas: [.nan, 0.9]"),
        *("eps: .inf", f"weight_decay: {10**400}", r'a: {b: ["\0"]}'),
    ],
)
def test_arguments_that_no_tensor_or_file_can_hold_are_refused(file: Path, arguments: str) -> None:
    assert refusal(file, "", f"optimizer.init_args={{{arguments}}}").where == "--set optimizer.init_args"


def test_where_a_section_is_due_its_keys_are_said(file: Path) -> None:
    assert str(refusal(file, "", "model.lora=16").expected).startswith("a section with keys of kind, r, lora_alpha, ")


@pytest.mark.parametrize(
    ("text", "overrides", "section", "words"),
    [
        ("train: {max_steps: 5, epochs: 1}", (), "train", "max_steps and epochs exclude each other"),
        ("", ("model.lora=null", "model.quantize=nf4"), "model", "quantize needs lora"),
        ("train: {fp8_compute: true}", (), "train", "fp8_compute needs model.quantize: fp8, which is null"),
        ("", ("model.quantize=int8", "train={fp8_compute: true}"), "--set train", "which is int8"),
        ("", ("model.lora=null", "model.adapters=[{path: x}]"), "model", "adapters needs lora"),
        ("", ("model.lora=null", "train={offload_blocks: 1}"), "--set train", "offload_blocks offloads frozen weights"),
        ("", ("model.quantize=nf4", "train={offload_blocks: 1}"), "--set train", "4-bit weights cannot be offloaded"),
        ("data: {area_px: 65536, buckets_px: [[256, 256]]}", (), "data", "area_px and buckets_px exclude each other"),
    ],
)
def test_values_that_exclude_each_other_are_refused_in_words(
    file: Path, text: str, overrides: tuple[str, ...], section: str, words: str
) -> None:
    error = refusal(file, text, *overrides)
    assert str(error.where).split(", ")[-1] == section and words in str(error.expected)
    assert text == "" or str(error.where).startswith(f"{file}:2, ")


def test_the_ends_of_a_range_belong_to_it(file: Path) -> None:
    for text in ("0", "1", "0.5"):
        assert load(file, "", f"data.caption_dropout_rate={text}").data.caption_dropout_rate == float(text)
    assert load(file, "", f"train.seed={2**32 - 1}").train.seed == 2**32 - 1


@pytest.mark.parametrize(
    ("key", "value", "side"),
    [
        ("data.area_px", "1024", ", such as 1048576 for a side of 1024"),
        ("data.area_px", "65535", ""),
        ("data.area_px", "[1048576, 512]", ", such as 262144 for a side of 512"),
        ("data.area_px", "32", ""),
        ("data.text_area_px", "384", ", such as 147456 for a side of 384"),
    ],
)
def test_an_area_that_may_be_a_side_is_refused_unless_it_is_said_to_be_meant(
    file: Path, key: str, value: str, side: str
) -> None:
    error = refusal(file, "", f"{key}={value}")
    assert error.expected == f"an area of at least 65536 pixels{side}; data.allow_tiny: true allows smaller ones"
    assert load(file, "data: {allow_tiny: true}", f"{key}={value}")
    assert load(file, "", f"{key}=65536")


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "2.0e-3", "5.e-5", ".5e-3", "+1e4", "-1e-4"])
def test_a_number_with_an_exponent_is_a_float(file: Path, text: str) -> None:
    """PyYAML alone reads `1e-4` as a string, which an optimizer would be given as it is."""
    given = f"optimizer: {{init_args: {{eps: {text}}}}}"
    for config in (load(file, given), load(file, "", f"optimizer.init_args.eps={text}")):
        found = config.optimizer.init_args["eps"]
        assert isinstance(found, float) and found == float(text)


@pytest.mark.parametrize(
    "text",
    [
        *('"1e-4"', "e5", "1e", "e-4", "to_e4"),  # looks like a number with an exponent
        *("1e4abc", "5e3-run", "2e1.final"),  # begins like one
        *("2024-01-31", "2024-13-45", "2024-01-31 12:00:00"),  # PyYAML alone makes a date of it, or fails to
    ],
)
def test_the_name_of_a_folder_is_a_text_whatever_it_looks_like(file: Path, text: str) -> None:
    for config in (load(file, f"train: {{output_dir: {text}}}"), load(file, "", f"train.output_dir={text}")):
        assert config.train.output_dir == text.strip('"')


@pytest.mark.parametrize("text", ["0x_", "0x" + "f" * 5000, "0b" + "1" * 20_000])
def test_a_value_that_yaml_cannot_build_is_refused_by_its_key(file: Path, text: str) -> None:
    """PyYAML raises a plain ValueError where text has the form of a number, but is none."""
    assert "YAML" in refusal(file, f"train: {{output_dir: {text}}}").what
    assert "YAML" in refusal(file, "", f"train.output_dir={text}").what


def test_a_missing_required_key_or_section_is_named(file: Path) -> None:
    alone = {"model: {family: edit}": "model.pretrained_model_name_or_path", "train: {max_steps: 5}": "model"}
    for text, key in alone.items():
        error = refusal_alone(file, text)
        assert (error.what, error.where) == ("a required key is missing", f"{file}:1, {key}")
    for key, value in {
        "data.source.0.source": "[{}]",
        "model.adapters.0.path": "[{scale: 2.0}]",
        "validation.samples.1.prompt": "[{images: [a.png], prompt: x}, {images: [a.png]}]",
    }.items():
        error = refusal(file, "", f"{'.'.join(key.split('.')[:2])}={value}")
        assert (error.what, error.where) == ("a required key is missing", f"--set {key}")


def test_what_only_one_command_needs_is_asked_for_by_its_key_and_a_remedy() -> None:
    assert (required("here", "data.source", "rows"), required(0, "data.source", "a number")) == ("here", 0)
    with pytest.raises(ConfigError, match=r"data\.source is not set") as caught:
        required(None, "data.source", "a folder of rows")
    assert caught.value.expected == "a folder of rows" and "--set data.source=" in str(caught.value.hint)


# Frozen values


def test_values_are_frozen(file: Path) -> None:
    config = load(file)
    for change in (
        lambda: setattr(config, "train", None),
        lambda: setattr(config.model.lora, "r", 1),
        lambda: setattr(config.predict.devices, "vae", "cpu"),
        lambda: delattr(config.train, "seed"),
    ):
        with pytest.raises((ConfigError, ValidationError), match=r"frozen|does not change"):
            change()
    with pytest.raises(ConfigError, match="does not change") as caught:  # as an earlier program's README does
        config.model.lora.pretrained_weight = "lora.safetensors"
    assert "pretrained_weight → model.lora.continue_from" in str(caught.value)
    assert config == load(file)


@pytest.mark.parametrize(
    ("place", "answer"),
    [
        ("data.class_path", "data.source"),
        ("data.init_args", "the other keys of section data"),
        ("data.num_workers", "none: batches are prepared in threads"),
        ("model.lora.pretrained_weight", "model.lora.continue_from"),
        ("resolution", "data.area_px"),
    ],
)
def test_an_attribute_by_an_old_key_says_what_to_read_instead(file: Path, place: str, answer: str) -> None:
    section, _, name = place.rpartition(".")
    found = value_of(load(file), section) if section else load(file)
    with pytest.raises(GoneError, match=re.escape(f"has no {place}")) as caught:
        getattr(found, name)
    assert str(caught.value.hint).startswith(f"{place} → {answer}")
    assert not hasattr(found, name) and not hasattr(found, "no_such_name")


def test_two_configurations_share_no_default(file: Path) -> None:
    one, other = load(file), load(file)
    one.optimizer.init_args["lr"] = 5.0
    one.model.lora.target_modules.append("x")
    one.logging.report_to.append("tensorboard")
    assert other == load(file)
    assert other.optimizer.init_args == {"lr": 1e-4} and other.logging.report_to == []


# --set


@pytest.mark.parametrize(
    ("text", "override", "value"),
    [
        ("", "model.lora.target_modules=[to_q, to_k]", ["to_q", "to_k"]),
        ("data: {source: x}", "data.source=", None),
        ("", "data.area_px=65536", 65536),
        ("", "data.source=a=b", "a=b"),
        ("", "data.background=#204060", "#204060"),
        ("data: {source: [{source: a}, {source: b}]}", "data.source.1.weight=2", 2),  # a position in a list
        ("data: {buckets_px: [[64, 64]]}", "data.buckets_px.0.1=96", 96),
        ("predict:", "predict.devices.vae=cpu", "cpu"),  # creates the sections that it needs
        ("train: {max_steps: 5, seed: 7}", "train.max_steps=8", 8),
    ],
)
def test_a_set_takes_a_key_and_yaml_over_the_file_and_sets_before_it(
    file: Path, text: str, override: str, value: object
) -> None:
    assert value_of(load(file, text, override), override.partition("=")[0]) == value
    config = load(file, "train: {max_steps: 5, seed: 7}", "train.max_steps=6", "train.max_steps=8", "model.lora={r: 4}")
    assert (config.train.max_steps, config.train.seed, config.model.lora.r) == (8, 7, 4)


def test_a_dictionary_is_read_as_the_file_of_it_and_stays_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS", "3")
    given = {
        "model": {"pretrained_model_name_or_path": Path("m")},
        "data": {"source": Path("photos"), "area_px": (512 * 512, 1024 * 1024)},
        "validation": {"rows": "${ROWS}"},
    }
    text = "data: {source: photos, area_px: [262144, 1048576]}\nvalidation: {rows: 3}\n"
    assert load_config(given, ["train.seed=5"]) == load(file, text, "train.seed=5")
    assert given["validation"] == {"rows": "${ROWS}"} and "train" not in given


@pytest.mark.parametrize(
    ("changes", "overrides", "where"),
    [
        ({"train": {"max_stepz": 5}}, [], "train.max_stepz"),
        ({"train": {"seed": "many"}}, [], "train.seed"),
        ({}, ["train.seed=many"], "--set train.seed"),
        ({"data": {"source": "${NO_SUCH}"}}, [], "data.source"),
        ({"model": None}, [], "model"),
    ],
)
def test_a_fault_of_a_dictionary_is_named_by_its_key(changes: dict, overrides: list[str], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": {"pretrained_model_name_or_path": "m"}} | changes, overrides)
    assert caught.value.where == where


@pytest.mark.parametrize("text", ["train.max_steps", "=5", ".max_steps=5", "train..seed=5", "train.=5", "", " =5"])
def test_a_set_that_is_no_assignment_is_refused_and_shown(file: Path, text: str) -> None:
    error = refusal(file, "", text)
    assert (error.found, error.expected) == (text, "section.key=value")


@pytest.mark.parametrize("value", ["[1", "{a: b", "'open", "a: b: c", "!!python/name:os.system x", "@x"])
def test_a_set_whose_value_is_no_yaml_is_refused_by_its_key(file: Path, value: str) -> None:
    assert refusal(file, "", f"train.max_steps={value}").where == "train.max_steps"


@pytest.mark.parametrize("key", ["train.seed.of", *(f"data.source.{step}" for step in ("1.weight", "-1.x", "a", "²"))])
def test_a_set_that_leads_nowhere_shows_what_is_there(file: Path, key: str) -> None:
    error = refusal(file, "train: {seed: 3}\ndata: {source: [{source: a}]}", f"{key}=2")
    assert error.what == "a --set names a key inside a value that is not a section"
    found = "train.seed: 3" if key.startswith("train") else "data.source: [{'source': 'a'}]"
    assert (error.where, error.found) == (key, found)


# The environment


def test_a_reference_is_replaced_by_the_environment_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QIE_RUN", "first")
    monkeypatch.setenv("QIE_NESTED", "${QIE_RUN}")
    text = 'train: {output_dir: "runs/${QIE_RUN}/x-${QIE_RUN}"}\ndata:\n  source:\n  - {source: "s3://b/${QIE_RUN}"}'
    config = load(file, text, "logging.run_name=${QIE_RUN}", "logging.project=${QIE_NESTED}")
    assert config.train.output_dir == "runs/first/x-first"
    assert config.data.source[0].source == "s3://b/first"
    assert config.logging.run_name == "first"
    assert config.logging.project == "${QIE_RUN}", "what a variable holds is not looked into again"
    assert refusal(file, '"${QIE_RUN}": {}').what == "unknown key '${QIE_RUN}'", "keys are not replaced"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.max_steps", "7", 7),
        ("train.max_grad_norm", "1e-1", 0.1),
        ("train.gradient_checkpointing", "false", False),
        ("train.max_grad_norm", "null", None),
        ("train.max_grad_norm", "", None),
        ("train.mixed_precision", "no", "no"),
        *(("train.output_dir", text, text) for text in ("17", "no", "[a, b]", "a: b", "0x_", "=")),
        ("data.source", "17", "17"),  # fields of several types, and lists
        ("logging.run_name", "17", "17"),
    ],
)
def test_a_value_that_is_one_reference_is_what_the_key_takes(
    file: Path, monkeypatch: pytest.MonkeyPatch, key: str, text: str, value: object
) -> None:
    monkeypatch.setenv("QIE_VALUE", text)
    section, name = key.split(".")
    for config in (
        load(file, f"{section}:\n  {name}: ${{QIE_VALUE}}"),
        load(file, f'{section}: {{{name}: "${{QIE_VALUE}}"}}'),
        load(file, "", f"{key}=${{QIE_VALUE}}"),
    ):
        found = value_of(config, key)
        assert (found, type(found)) == (value, type(value))


def test_a_reference_within_a_list_or_free_arguments_is_what_is_due_there(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QIE_VALUE", "17")
    config = load(file, "", "model.lora.target_modules=[x]", "model.lora.target_modules.0=${QIE_VALUE}")
    assert config.model.lora.target_modules == ["17"]
    assert load(file, "", "optimizer.init_args.lr=${QIE_VALUE}").optimizer.init_args == {"lr": 17}


def test_a_default_stands_for_a_variable_that_is_not_set_or_empty(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "train:\n  max_steps: ${QIE_STEPS:-5}\n  output_dir: runs/${QIE_RUN:-a b}"
    for steps, run, found in ((None, "", (5, "runs/a b")), ("6", "c", (6, "runs/c"))):
        if steps:
            monkeypatch.setenv("QIE_STEPS", steps)
        monkeypatch.setenv("QIE_RUN", run)
        train = load(file, text).train
        assert (train.max_steps, train.output_dir) == found
    assert load(file, "", "logging.run_name=x${QIE_ABSENT:-}").logging.run_name == "x", "a default may be empty"


def test_a_variable_that_is_not_set_is_an_error_that_names_key_and_variable(file: Path) -> None:
    overridden = refusal(file, "data: {source: [{source: a}]}", "data.source.0.source=s3://${QIE_ABSENT}/x")
    written = refusal(file, 'data: {source: [{source: "s3://${QIE_ABSENT}/x"}]}')
    for error, place in ((written, f"{file}:2,"), (overridden, "--set")):
        assert error.what == "the environment variable QIE_ABSENT is not set"
        assert (error.where, error.found) == (f"{place} data.source.0.source", "s3://${QIE_ABSENT}/x")
        assert "${QIE_ABSENT:-" in str(error.hint)
    # Of a value that a --set replaces none is needed.
    assert load(file, "train:\n  output_dir: ${QIE_ABSENT}", "train.output_dir=x").train.output_dir == "x"


def test_a_refused_value_from_the_environment_is_shown_as_it_was_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QIE_STEPS", "-1")
    error = refusal(file, "train:\n  max_steps: ${QIE_STEPS}")
    assert (error.found, error.expected) == ("-1", "Input should be greater than 0")


@pytest.mark.parametrize(
    ("text", "plain"),
    [("$${A}", "${A}"), ("x$${A:-b}", "x${A:-b}"), ("$A", "$A"), ("$$", "$$"), ("a$", "a$"), ("$${", "${")],
)
def test_two_dollars_are_a_plain_one_before_a_brace(file: Path, text: str, plain: str) -> None:
    assert load(file, f'train: {{output_dir: "{text}"}}').train.output_dir == plain


@pytest.mark.parametrize("text", ["${", "${}", "${1A}", "${A", "${A B}", "${A:?gone}", "${A:-${B}}", "${AÄ}"])
def test_what_is_no_reference_is_refused_with_the_way_to_write_it(file: Path, text: str) -> None:
    error = refusal(file, f'train: {{output_dir: "{text}"}}')
    assert error.what == "a reference to an environment variable is malformed"
    assert (error.where, error.found) == (f"{file}:2, train.output_dir", text) and "$${" in str(error.hint)


# The file


@pytest.mark.parametrize("text", ["train: {seed: 1, seed: 2}", "train: {seed: 1, 'seed': 1}", "train: {}\ntrain: {}"])
def test_a_key_that_is_given_twice_is_refused(file: Path, text: str) -> None:
    assert re.search(r"the key '(seed|train)' is given twice", str(refusal(file, text).found))


def test_a_section_may_repeat_another_with_changes(file: Path) -> None:
    """A merge key of YAML; keys of the section that is repeated are no second ones, however deep they are."""
    text = """
validation:
  samples:
  - &night {images: [a.png], prompt: night, seed: 1}
  - &day {<<: *night, prompt: day}
  - {<<: *day, seed: 2}
"""
    samples = load(file, text).validation.samples
    assert [(one.prompt, one.seed) for one in samples] == [("night", 1), ("day", 1), ("day", 2)]


LISTS = b"a: &0 [x]\n" + b"".join(b"b%d: &%d [%s]\n" % (n, n, b"*%d," % (n - 1) * 10) for n in range(1, 30))
MAPS = b"a: &0 {x: 1}\n" + b"".join(b"b%d: &%d {c: *%d, d: *%d}\n" % (n, n, n - 1, n - 1) for n in range(1, 60))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        *((content, "not valid YAML") for content in (b"model: [", b"model: {a: b", b"\tmodel: x", b"model: \xff\xfe")),
        *(
            (content, "not valid YAML")
            for content in (b"model: a\x00b", b"[" * 10_000, LISTS, MAPS, b"# " + b"x" * 2**20)
        ),
        (b"!!python/object/apply:os.system [true]", "not valid YAML"),
        (b"train: &a {seed: *a}", "contains itself"),
        *((content, "no sections") for content in (b"", b"# only a comment", b"- model", b"model", b"5")),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused_by_its_path(file: Path, content: bytes, what: str) -> None:
    error = refusal_alone(file, content)
    assert what in str(error) and error.where == file


@pytest.mark.parametrize("name", ["missing.yaml", ".", "file/config.yaml", "x" * 300])
def test_a_file_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_config(tmp_path / name)
    assert caught.value.where == tmp_path / name and caught.value.found


def test_a_file_may_have_a_byte_order_mark_and_its_path_be_a_string(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(file).model.pretrained_model_name_or_path == "m"
    assert load_config(str(file)) == load_config(file)


def test_keys_of_a_section_that_disagree_are_named_without_the_whole_section(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    lora = "{kind: loha, decompose_factor: 4, target_modules: [to_q, to_k, to_v]}"
    file.write_text(f"model:\n  pretrained_model_name_or_path: x\n  lora: {lora}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "decompose_factor is of kind: lokr" in str(caught.value.expected) and caught.value.found is None

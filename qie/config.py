"""The configuration file as frozen values. Unknown keys, wrong types and values out of range are refused by name.

One field here is one behaviour somewhere: a field that nothing reads does not belong.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import ValidationError as PydanticError

from qie.errors import ConfigError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML with the floats of its version 1.2: PyYAML alone reads the `1e-4` that everybody writes as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LoraConfig(Section):
    """A low-rank adapter through peft."""

    r: PositiveInt = 16
    lora_alpha: PositiveFloat = 32
    lora_dropout: Fraction = 0.0
    target_modules: list[str] | str = Field(
        ["to_q", "to_k", "to_v", "to_out.0"], description="Module name endings, or one regular expression."
    )


class ModelConfig(Section):
    """Which model is trained, and what of it."""

    pretrained_model_name_or_path: str = Field(description="Hub name or folder, in the diffusers layout.")
    family: Literal["auto", "edit", "edit_plus"] = Field("auto", description="auto reads model_index.json.")
    lora: LoraConfig = LoraConfig()


class DataConfig(Section):
    """Rows, and how they are dealt into batches."""

    source: str | None = Field(None, description="Folder of rows; used by qie-precompute and for live encoding.")
    batch_size: PositiveInt = Field(1, description="Per process.")
    tail: Literal["pad", "drop"] = Field("pad", description="The last, incomplete batch of each shape.")
    caption_dropout_rate: Fraction = Field(0.0, description="How often the null prompt replaces the prompt.")
    area_px: PositiveInt | None = Field(None, description="Image area for the VAE; null is the family's own.")
    text_area_px: PositiveInt | None = Field(
        None, description="Image area for Qwen2.5-VL; null is the family's own (edit: the VAE's image)."
    )


class CacheConfig(Section):
    """Shards, and the encoders that fill them."""

    cache_dir: str | None = Field(None, description="qie-precompute writes here, qie-train reads here.")
    use_cache: bool = Field(True, description="false: qie-train encodes data.source live.")
    vae_encoder_device: str = Field("auto", description="auto is the first GPU, or the CPU without one.")
    text_encoder_device: str = Field("auto", description="auto is the first GPU, or the CPU without one.")
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto is bfloat16 on a GPU and float32 on the CPU."
    )


class TrainConfig(Section):
    """The loop."""

    max_steps: PositiveInt = 2000
    gradient_accumulation_steps: PositiveInt = 1
    gradient_checkpointing: bool = True
    mixed_precision: Literal["no", "bf16"] = "bf16"
    max_grad_norm: PositiveFloat = 1.0
    seed: NonNegativeInt = 0
    output_dir: str = "runs/edit"
    checkpoint_every: PositiveInt = Field(500, description="Steps between checkpoints; the last step always has one.")


class OptimizerConfig(Section):
    """Any torch-style optimizer, by import path."""

    class_path: str = "torch.optim.AdamW"
    init_args: dict[str, Any] = {"lr": 1e-4}


class SchedulerConfig(Section):
    """A learning-rate schedule of diffusers, by its name there."""

    scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 100


class LossConfig(Section):
    """Flow matching: which noise levels, how weighted."""

    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    shift: Literal["none", "dynamic"] | PositiveFloat = Field(
        "dynamic", description="dynamic is the scheduler's own, by image size; a number is a static shift."
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    mask_background_weight: NonNegativeFloat = Field(
        1.0, description="Weight of what a row's mask leaves dark, against 1 for its bright parts."
    )


class ValidationConfig(Section):
    """Loss on rows that are kept out of training, with fixed noise."""

    every: PositiveInt = Field(200, description="Steps between validations; before the first and after the last, too.")
    rows: NonNegativeInt = Field(16, description="How many rows are kept out of training; 0 validates nothing.")


class Devices(Section):
    """Where the components of qie-predict live. auto is the first GPU, or the CPU without one."""

    vae: str = "auto"
    text_encoder: str = "auto"
    transformer: str = "auto"


class PredictConfig(Section):
    """Painting."""

    devices: Devices = Devices()


class LoggingConfig(Section):
    """What is written while training. metrics.jsonl in the output folder is always written."""

    report_to: list[Literal["tensorboard"]] = []


class Config(Section):
    """The whole file."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    validation: ValidationConfig = ValidationConfig()
    predict: PredictConfig = PredictConfig()
    logging: LoggingConfig = LoggingConfig()


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides, values being YAML themselves.

    Raises:
        ConfigError: the file is missing or no YAML mapping, or a key (the nearest is named) or value is refused.
    """
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError("the configuration file cannot be read", where=path, found=error.strerror) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("the configuration file is no YAML", where=path, found=_one_line(error)) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the configuration file holds no sections",
            where=path,
            expected="model:, data:, …",
            found=type(tree).__name__,
        )
    for override in overrides:
        _set(tree, override)
    try:
        return Config.model_validate(tree)
    except PydanticError as error:
        raise _explained(error, path) from error


def required(value: T | None, key: str, why: str) -> T:
    """`value`, or a ConfigError that names the missing `key`."""
    if value is None:
        raise ConfigError(f"{key} is not set", expected=why, hint=f"set {key} in the file, or with --set {key}=…")
    return value


def _set(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, last = name.strip().split(".")
    if not equals or not all([*sections, last]):
        raise ConfigError("a --set cannot be understood", found=override, expected="section.key=value")
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError("the value of a --set is no YAML", where=name, found=_one_line(error)) from error
    for section in sections:
        child = tree.get(section)
        if child is None:
            child = tree[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                "a --set reaches into something that is no section", where=name, found=f"{section}: {child!r}"
            )
        tree = child
    tree[last] = value


def _explained(error: PydanticError, path: Path) -> ConfigError:
    """The first fault, in qie's words; the rest are counted."""
    faults = error.errors(include_url=False)
    first = faults[0]
    steps = [str(step) for step in first["loc"]]
    more = f"; and {len(faults) - 1} more faults" if len(faults) > 1 else ""
    where = f"{path}, {'.'.join(steps)}"
    if first["type"] == "extra_forbidden":
        known = _keys_beside(steps)
        near = difflib.get_close_matches(steps[-1], known, n=1, cutoff=0.5)
        return ConfigError(
            f"unknown key {steps[-1]!r}{more}",
            where=where,
            expected=f"one of {', '.join(known)}",
            hint=f"did you mean {near[0]!r}?" if near else None,
        )
    if first["type"] == "missing":
        return ConfigError(f"a required key is missing{more}", where=where)
    return ConfigError(f"a value is refused{more}", where=where, expected=first["msg"], found=repr(first["input"]))


def _keys_beside(steps: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for step in steps[:-1]:
        annotation = model.model_fields[step].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return list(model.model_fields)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

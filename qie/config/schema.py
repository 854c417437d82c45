"""The configuration's schema: one class for each section, one field for each behaviour.

A value that is unknown or out of range is refused by name. A field that nothing reads does not belong here.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from qie.errors import ConfigError, GoneError
from qie.paths import local_path
from qie.stores import scheme_of

LocalPath = Annotated[
    str, AfterValidator(lambda place: str(local_path(place))), WithJsonSchema({"type": "string", "format": "path"})
]
Place = Annotated[
    str,
    AfterValidator(lambda place: place if scheme_of(place) else str(local_path(place))),
    WithJsonSchema({"type": "string", "format": "path or URL"}),
]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

# Every number has two ends: a slip of the keyboard is refused here, and not by what later runs out of memory, bits or
# patience.
MANY = 10**9
Count = Annotated[int, Field(gt=0, le=MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=MANY)]
Bytes = Annotated[int, Field(gt=0, lt=1 << 63)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Beyond it, products in float32 or bfloat16 are 0 or infinite."""
Batch = Annotated[int, Field(gt=0, le=1024)]


def word(text: str) -> BeforeValidator:
    """For a value that YAML reads as false when it is not quoted: `no` and `off`."""
    return BeforeValidator(lambda value: text if value is False else value)


def legible(value: Any) -> Any:
    """A text, or a list of some, as files can hold it and the system takes it. Raises ValueError for others."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):
            raise ValueError("a text of Unicode, without NUL")
    return value


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _legible(cls, value: Any) -> Any:
        return legible(value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        from qie.config.moved import moved, within  # which knows all sections

        hint = "write it into the file, or qie.load_config(file, ['section.key=value'])"
        known_as = moved(within(type(self), name))
        raise ConfigError(
            "a configuration does not change once it is loaded",
            where=name,
            hint=f"{known_as}; {hint}" if known_as else hint,
        )

    if not TYPE_CHECKING:  # or every attribute would be one to mypy

        def __getattr__(self, name: str) -> Any:
            """For what is no field: old keys are answered with what to write instead."""
            if name.startswith("_"):  # what pydantic and Python ask for, even while sections are being made
                return super().__getattr__(name)
            from qie.config.moved import moved, within

            place = within(type(self), name)
            if answer := moved(place):
                raise GoneError(f"the configuration has no {place}", hint=answer)
            return super().__getattr__(name)


MAX_AREA_PX = 178_956_970
"""Of an image that is read, and of what a model may see: what Pillow takes."""

Pixels = Annotated[int, Field(gt=0, le=MAX_AREA_PX)]
Side = Annotated[int, Field(gt=0, le=MAX_AREA_PX, multiple_of=16)]
Area = Pixels | list[Pixels] | None

USUAL_AREA_PX = 256 * 256
"""Whoever gives a smaller area has more often given a side."""


def _usual(area: Area, info: ValidationInfo) -> Area:
    """For an area in pixels: it is small only where section data says so."""
    for one in area if isinstance(area, list) else [area]:
        if one is not None and one < USUAL_AREA_PX and not info.data.get("allow_tiny"):
            usual = USUAL_AREA_PX <= one * one <= MAX_AREA_PX
            side = f", such as {one * one} for a side of {one}" if usual else ""
            raise ValueError(
                f"an area of at least {USUAL_AREA_PX} pixels{side}; data.allow_tiny: true takes smaller ones"
            )
    return area


def _size(sides: list[int]) -> list[int]:
    if math.prod(sides) > MAX_AREA_PX or max(sides) > 200 * min(sides):
        raise ValueError(f"at most {MAX_AREA_PX} pixels, and sides of at most 1:200")
    return sides


def _colour(text: str) -> str:
    from PIL import ImageColor

    try:
        ImageColor.getrgb(text)
    except ValueError as error:
        raise ValueError("a colour, such as #ffffff or white") from error
    return text


class SourceConfig(Section):
    """One of several sources."""

    source: Place = Field(description="Rows: whatever qie.open_source understands.")
    name: str | None = Field(None, description="In messages and indexes; default: the last part of the path.")
    weight: float = Field(
        1.0, ge=1e-6, le=1000, description="How often its rows are drawn in training, against the others'."
    )


class AugmentConfig(Section):
    """What further variants of a row are made of; see cache.variants. Target, controls and mask alike."""

    flip: bool = Field(False, description="Mirrored, left to right, by chance.")
    crop: float = Field(1.0, ge=0.01, le=1.0, description="Cropped to between this part of each side and all of it.")


class DataConfig(Section):
    """Rows, and how they are dealt into batches."""

    source: Place | list[SourceConfig] | None = Field(
        None,
        description="Rows, for qie-precompute and for live encoding: whatever qie.open_source understands, or several.",
    )
    batch_size: Batch = Field(1, description="Per process.")
    tail: Literal["pad", "drop"] = Field("pad", description="The last, incomplete batch of each shape.")
    caption_dropout_rate: Fraction = Field(0.0, description="How often the null prompt replaces the prompt.")
    control_dropout_rate: Fraction = Field(
        0.0, description="How often zeros replace the latents of all controls; what Qwen2.5-VL saw of them stays."
    )
    allow_tiny: bool = Field(
        False, description="Areas may be below 65536, 256 × 256: what a model can hardly learn from."
    )
    area_px: Annotated[Area, AfterValidator(_usual)] = Field(
        None,
        description="Image area for the VAE; of a list, the largest that does not enlarge. null: the family's own.",
    )
    buckets_px: list[Annotated[list[Side], Field(min_length=2, max_length=2), AfterValidator(_size)]] = Field(
        [], description="Fixed sizes [width, height] instead of areas: the nearest in shape, after cropping to it."
    )
    text_area_px: Annotated[Pixels | None, AfterValidator(_usual)] = Field(
        None, description="Image area for Qwen2.5-VL; null is the family's own (edit: the VAE's image)."
    )
    multiple_px: Literal[16, 32, 64] | None = Field(None, description="Sizes by area are multiples of it; null: 32.")
    background: Annotated[str, AfterValidator(_colour)] = Field(
        "#ffffff", description="Colour behind transparent images."
    )
    augment: AugmentConfig = AugmentConfig()
    order: Literal["shuffle", "blocks"] = Field(
        "shuffle",
        description="blocks: shuffled within block_size shards at a time, for stores that are slow at random.",
    )
    block_size: Count = Field(16, description="Shards in a block.")
    similar_lengths: CountOrZero = Field(
        64, description="So many batches of a shape are filled by prompt length, so that they pad little; 0: none."
    )
    prefetch: int = Field(2, gt=0, le=1024, description="Batches prepared ahead.")
    reader_threads: int = Field(
        2, gt=0, le=1024, description="How many are prepared at once; live encoding takes one more."
    )
    max_image_px: Pixels = Field(
        MAX_AREA_PX, description="Larger images are refused; Pillow takes none above the default."
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> DataConfig:
        if self.buckets_px and self.area_px is not None:
            raise ValueError("area_px and buckets_px exclude each other")
        if self.area_px == []:
            raise ValueError("area_px is an empty list")
        return self


class KeepConfig(Section):
    """What of the samples stays in memory after its first use, for datasets that fit."""

    latents: Literal["none", "cpu", "gpu"] = Field("none", description="Where latents, of targets and controls, stay.")
    embeds: Literal["none", "cpu", "gpu"] = Field("none", description="Where prompts' embeddings stay.")
    budget_bytes: Bytes = Field(8 * 10**9, description="Altogether; what comes when it is spent is not kept.")


class ShardCacheConfig(Section):
    """Shards, and the encoders that fill them."""

    cache_dir: Place | None = Field(None, description="qie-precompute writes here, qie-train reads here; path or URL.")
    use_cache: bool = Field(
        True,
        description="Train on the shards in cache_dir; what they lack of data.source is encoded live. false: all.",
    )
    trust_published: bool = Field(
        False, description="Train on shards as they are: do not read the rows of data.source to compare them."
    )
    accept_recipe: bool = Field(
        False, description="Train on shards of another recipe than this configuration's, as they are; run.json says so."
    )
    vae_encoder_device: str = Field("auto", description="auto is the process's own GPU, or the CPU without one.")
    text_encoder_device: str = Field("auto", description="auto is the process's own GPU, or the CPU without one.")
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto is bfloat16 on a GPU and float32 on the CPU."
    )
    encode_batch_size: Batch = Field(
        1, description="Rows encoded together. Above 1, the last bits of a sample depend on its neighbours."
    )
    variants: int = Field(
        1,
        gt=0,
        le=1000,
        description="Variants of a row at most: its captions and, with data.augment, augmented ones. One per epoch.",
    )
    share_prefix: bool = Field(
        False, description="Rows with the same controls share their pass through Qwen2.5-VL; about 1e-6 from exact."
    )
    compile: bool = Field(False, description="Run the VAE through torch.compile.")
    thumbnail_px: Annotated[int, Field(ge=16, le=512)] | None = Field(
        None,
        description="Longest side of a small picture of the target, stored with each sample for qie-stats --html; "
        "null: none. 96 takes up to 28 kB.",
    )
    verify: Annotated[Literal["off", "first", "always"], word("off")] = Field(
        "first", description="When a record is checked against its hash: never, when first read, or always."
    )
    local_dir: LocalPath | None = Field(
        None, description="Keep shards from URLs in this folder, for all processes here."
    )
    local_bytes: Bytes = Field(100 * 10**9, description="How much of them; what was used longest ago goes first.")
    keep: KeepConfig = KeepConfig()
    write_through: bool = Field(
        False, description="Encoding live, write the shards to cache_dir in the first epoch and train on them then on."
    )
    follow_timeout_s: float = Field(
        3600.0, gt=0.0, le=1e7, description="How long to wait for the next shard with --follow."
    )


MAX_STEPS, MAX_CFG = 1000, 100.0
"""Of painting: the noise levels that a scheduler knows, and a guidance beyond which there are only colours."""

MAX_LR = 1000.0
MAX_ARGUMENT = 3e38
"""What float32 holds."""

Quantization = Literal["fp8", "int8", "nf4"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "clearml", "aim", "dvclive"]


def _usable(value: Any, name: str = "") -> Any:
    """For arguments of a class that qie does not know: numbers that a tensor can hold, texts that a file can hold."""
    if isinstance(value, dict):
        return {key: _usable(inner, key) for key, inner in value.items()}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "lr" and not (number and 0 <= value <= MAX_LR):
        raise ValueError(f"lr as a number from 0 to {MAX_LR:g}")
    if isinstance(value, list):
        return [_usable(inner) for inner in value]
    if number and not abs(value) <= MAX_ARGUMENT:
        raise ValueError(f"{name or 'numbers'} within ±{MAX_ARGUMENT:g}")
    return legible(value)


Arguments = Annotated[dict[str, Any], AfterValidator(_usable)]


class LoraConfig(Section):
    """A low-rank adapter through peft."""

    r: int = Field(16, gt=0, le=4096, description="Rank.")
    lora_alpha: Factor = Field(32, description="The adapter's output is scaled by lora_alpha / r.")
    lora_dropout: Fraction = Field(0.0, description="How often an input of the adapter is zero.")
    target_modules: list[str] | str = Field(
        ["to_q", "to_k", "to_v", "to_out.0"], description="Module name endings, or one regular expression."
    )
    use_rslora: bool = Field(False, description="Scale by lora_alpha / √r instead.")
    use_dora: bool = Field(False, description="Train the length of each weight column apart from its direction.")
    init_lora_weights: Literal["gaussian", "kaiming", "orthogonal"] = Field(
        "gaussian", description="How it begins; whichever, it changes nothing before the first step."
    )
    continue_from: LocalPath | None = Field(
        None, description="Begin with the weights of this adapter: a checkpoint's folder, or a LoRA of diffusers."
    )


class AdapterConfig(Section):
    """A further adapter, which stays as it is and is part of the model while it is trained."""

    path: LocalPath = Field(description="A checkpoint's folder, or a LoRA of diffusers.")
    scale: float = Field(1.0, ge=-1000, le=1000, description="Its output is multiplied by it.")


class ModelConfig(Section):
    """Which model is trained, and what of it."""

    pretrained_model_name_or_path: str = Field(description="Hub name or folder, in the diffusers layout.")
    family: Literal["auto", "edit", "edit_plus"] = Field("auto", description="auto reads model_index.json.")
    lora: LoraConfig | None = Field(LoraConfig(), description="null: all weights of the transformer are trained.")
    adapters: list[AdapterConfig] = Field([], description="Further adapters that stay as they are.")
    quantize: Quantization | None = Field(
        None, description="How the transformer's linear layers are stored, under a LoRA; needs the extra quant."
    )
    attention_backend: str | None = Field(
        None, description="A backend of diffusers, such as native, _native_cudnn or flex; null: what diffusers chooses."
    )

    @model_validator(mode="after")
    def _check_base(self) -> ModelConfig:
        if self.lora is None and self.quantize:
            raise ValueError("a quantised transformer cannot be trained itself: quantize needs lora")
        if self.lora is None and self.adapters:
            raise ValueError("where all weights are trained there is no place for adapters: adapters needs lora")
        return self


class TrainConfig(Section):
    """The loop."""

    max_steps: Count = Field(2000, description="Optimizer steps altogether.")
    epochs: Annotated[int, Field(gt=0, le=100_000)] | None = Field(
        None, description="Instead of max_steps: so many passes over the data."
    )
    gradient_accumulation_steps: int = Field(
        1, gt=0, le=4096, description="Batches of each process per optimizer step."
    )
    gradient_checkpointing: bool | Annotated[int, Field(gt=0, le=1000)] = Field(
        True, description="Recompute blocks' activations instead of keeping them; n: those of every n-th block."
    )
    mixed_precision: Annotated[Literal["no", "bf16"], word("no")] = Field(
        "bf16", description="In which the model computes, and what is frozen is kept; no is float32."
    )
    trained_dtype: Literal["float32", "bfloat16"] = Field("float32", description="In which trained weights are kept.")
    max_grad_norm: Factor | None = Field(1.0, description="Longer gradients are scaled down to it; null: none.")
    max_nonfinite_steps: Count = Field(
        1, description="Stop after so many steps in a row whose loss or gradient is not finite; none changes a weight."
    )
    ema_decay: float | None = Field(
        None, gt=0.0, lt=1.0, description="Also keep an average of the trained weights, this much of it at each step."
    )
    compile: bool = Field(False, description="Run the transformer's blocks through torch.compile.")
    offload_blocks: int = Field(
        0,
        ge=0,
        le=1000,
        description="Offload the frozen weights of this many blocks to host memory; these blocks are checkpointed.",
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(
        0, description="Of the order of samples, noise, dropout and the first weights: equal seeds are equal runs."
    )
    output_dir: LocalPath = Field("runs/edit", description="Where checkpoints, metrics and samples go.")
    checkpoint_every: Count = Field(500, description="Steps between checkpoints; the last step always has one.")
    keep_last: Count | None = Field(None, description="Keep this many of the latest checkpoints; null: all.")
    keep_every: Count | None = Field(None, description="Keep those of every so many steps in any case.")

    @model_validator(mode="after")
    def _check_length(self) -> TrainConfig:
        if self.epochs is not None and "max_steps" in self.model_fields_set:
            raise ValueError("max_steps and epochs exclude each other")
        return self


class OptimizerConfig(Section):
    """Any torch-style optimizer, by import path."""

    class_path: str = Field(
        "torch.optim.AdamW", description="Such as bitsandbytes.optim.AdamW8bit or prodigyopt.Prodigy."
    )
    init_args: Arguments = Field({"lr": 1e-4}, description="Its arguments.")


class SchedulerConfig(Section):
    """A learning-rate schedule: of diffusers by its name there, or any of torch by its import path."""

    scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = Field("cosine", description="How the learning rate goes down after the warmup, until the last step.")
    warmup_steps: CountOrZero = Field(
        100,
        description="Steps in which it grows from 0; fewer than the run has. constant has none.",
    )
    num_cycles: Count = Field(1, description="Of cosine_with_restarts.")
    power: float = Field(1.0, gt=0.0, le=100, description="Of polynomial.")
    class_path: str | None = Field(
        None, description="Such as torch.optim.lr_scheduler.OneCycleLR; the fields above are then not used."
    )
    init_args: Arguments = Field({}, description="Arguments of class_path.")


class LossConfig(Section):
    """Flow matching: which noise levels, how weighted."""

    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = Field(
        "logit_normal", description="From what noise levels are drawn, before the shift."
    )
    logit_mean: float = Field(0.0, ge=-100, le=100, description="Of logit_normal: above 0, more noise.")
    logit_std: float = Field(1.0, gt=0.0, le=100, description="Of logit_normal.")
    mode_scale: float = Field(1.29, ge=-100, le=100, description="Of mode.")
    shift: Literal["none", "dynamic"] | Factor = Field(
        "dynamic", description="dynamic is the scheduler's own, by image size; a number is a static shift."
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        "none", description="How noise levels weigh; the names are those of SD3 in diffusers."
    )
    kind: Literal["mse", "huber"] = Field("mse", description="huber counts large errors less.")
    huber_delta: Factor = Field(1.0, description="Of huber: errors beyond it count linearly.")
    mask_foreground_weight: Factor = Field(
        1.0, description="Weight of a mask's bright parts; if it equals the background's, masks do nothing."
    )
    mask_background_weight: float = Field(
        1.0,
        ge=0.0,
        le=1e6,
        description="Weight of what a mask leaves dark. Only the ratio to the foreground's matters.",
    )


class SampleConfig(Section):
    """An image that is generated at each validation."""

    images: Annotated[list[LocalPath], Field(min_length=1)] = Field(
        description="Images to edit: one, or several for edit_plus."
    )
    prompt: str = Field(description="The instruction.")
    negative_prompt: str = Field(" ", description="What to steer away from.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Of the noise.")


class ValidationConfig(Section):
    """Loss on rows that are kept out of training, with fixed noise, and sample images."""

    every: Count = Field(200, description="Steps between validations; before the first and after the last, too.")
    rows: CountOrZero = Field(16, description="How many rows are kept out of training; 0 validates nothing.")
    samples: list[SampleConfig] = Field([], description="Images to generate at each validation.")
    sample_steps: int = Field(20, ge=2, le=MAX_STEPS, description="Denoising steps of them.")
    sample_cfg: float = Field(4.0, ge=1.0, le=MAX_CFG, description="Guidance scale of them; 1 does without.")


class Devices(Section):
    """Where the components of qie-predict live. auto is the process's own GPU, or the CPU without one."""

    vae: str = Field("auto", description="Such as cuda:0 or cpu.")
    text_encoder: str = Field("auto", description="Such as cuda:1.")
    transformer: str = Field("auto", description="Such as cuda:0.")


class PredictConfig(Section):
    """Inference."""

    devices: Devices = Devices()


class LoggingConfig(Section):
    """What is written while training. metrics.jsonl and run.json in the output folder are always written."""

    report_to: list[Tracker] = Field([], description="Trackers of accelerate; each needs its own package.")
    project: str = Field("qie", description="What the run is filed under.")
    run_name: str | None = Field(None, description="Name of the run, for trackers that have one.")
    peak_tflops: Factor | None = Field(
        None, description="What the GPU can do in train.mixed_precision, for MFU; null: known for common GPUs."
    )


class Config(Section):
    """The whole file."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    cache: ShardCacheConfig = ShardCacheConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    validation: ValidationConfig = ValidationConfig()
    predict: PredictConfig = PredictConfig()
    logging: LoggingConfig = LoggingConfig()

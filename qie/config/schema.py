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
BatchSize = Annotated[int, Field(gt=0, le=1024)]


def word(text: str) -> BeforeValidator:
    """For a value that YAML reads as false when it is not quoted: `no` and `off`."""
    return BeforeValidator(lambda value: text if value is False else value)


def _expression(text: str) -> str:
    """A regular expression. Raises ValueError for another text."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from error
    return text


Expression = Annotated[str, AfterValidator(_expression)]


def legible(value: Any) -> Any:
    """A text, or a list of some, as files can hold it and the system takes it. Raises ValueError for others."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):
            raise ValueError("Unicode text without NUL")
    return value


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _legible(cls, value: Any) -> Any:
        return legible(value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        from qie.config.earlier_programs import moved, within  # which knows all sections

        hint = "write it into the file, or qie.load_config(file, ['section.key=value'])"
        known_as = moved(within(type(self), name))
        raise ConfigError(
            "a configuration does not change once it is loaded",
            where=name,
            hint=f"{known_as}; {hint}" if known_as else hint,
        )

    if not TYPE_CHECKING:  # or every attribute would be one to mypy

        def __getattr__(self, name: str) -> Any:
            """For a name that is not a field: old keys get their replacement."""
            if name.startswith("_"):  # what pydantic and Python ask for, even while sections are being made
                return super().__getattr__(name)
            from qie.config.earlier_programs import moved, within

            place = within(type(self), name)
            if answer := moved(place):
                raise GoneError(f"the configuration has no {place}", hint=answer)
            return super().__getattr__(name)


MAX_AREA_PX = 178_956_970
"""The largest image that Pillow reads, and the largest area of an encoder's image."""

Pixels = Annotated[int, Field(gt=0, le=MAX_AREA_PX)]
BucketSide = Annotated[int, Field(gt=0, le=MAX_AREA_PX, multiple_of=16)]
Area = Pixels | list[Pixels] | None

USUAL_AREA_PX = 256 * 256
"""A smaller number is more often a side than an area."""


def _usual(area: Area, info: ValidationInfo) -> Area:
    """For an area in pixels: it is small only where section data says so."""
    for one in area if isinstance(area, list) else [area]:
        if one is not None and one < USUAL_AREA_PX and not info.data.get("allow_tiny"):
            usual = USUAL_AREA_PX <= one * one <= MAX_AREA_PX
            side = f", such as {one * one} for a side of {one}" if usual else ""
            raise ValueError(
                f"an area of at least {USUAL_AREA_PX} pixels{side}; data.allow_tiny: true allows smaller ones"
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


class ColumnsConfig(Section):
    """What parts of a row are called: columns of a table, or folders in a folder. null: qie finds it by its names."""

    target: str | None = Field(None, min_length=1, description="The edited image, which is learnt.")
    controls: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, description="The images to edit, in order; []: none, which is text-to-image."
    )
    prompt: str | None = Field(None, min_length=1, description="The instruction, or a list of captions.")
    mask: str | None = Field(None, min_length=1, description="The mask.")
    rejected: str | None = Field(
        None, min_length=1, description="An image for the same instruction that people like less than the target."
    )
    name: str | None = Field(None, min_length=1, description="A column of the rows' names, each once.")


PresetName = Literal["musubi", "ai_toolkit", "kohya", "instruct_pix2pix", "magicbrush", "omniedit"]


class SourceConfig(Section):
    """One of several sources. Its preset, columns and root take the place of those of section data."""

    source: Place = Field(description="Rows: anything that qie.open_source understands.")
    name: str | None = Field(None, description="Name in messages and indexes; default: the last part of the path.")
    weight: float = Field(
        1.0,
        ge=1e-6,
        le=1000,
        description="How often training draws these rows, relative to those of the other sources.",
    )
    preset: PresetName | None = Field(None, description="As data.preset, for this source.")
    columns: ColumnsConfig = ColumnsConfig()
    root: Place | None = Field(None, description="As data.root, for this source.")
    replace: dict[Annotated[str, Field(min_length=1)], str] = Field(
        {},
        description="Words of its prompts, and what stands in their place. With preserve, rows that have none of "
        "them are left out.",
    )
    preserve: bool = Field(
        False,
        description="Train the model to keep what it did with these rows: its own prediction without the adapter is "
        "learnt instead of their targets.",
    )


class AugmentConfig(Section):
    """Augmentation of further variants of a row (see cache.variants), equal for target, controls and mask."""

    flip: bool = Field(False, description="Mirror a random half of them, left to right.")
    crop: float = Field(1.0, ge=0.01, le=1.0, description="Crop each side at random, to at least this fraction.")


class DataConfig(Section):
    """Rows, and how they become batches."""

    source: Place | list[SourceConfig] | None = Field(
        None,
        description="Rows for qie-precompute and for live encoding: anything that qie.open_source understands, "
        "or several of them.",
    )
    preset: PresetName | None = Field(
        None, description="Names of columns or folders as another tool or dataset has them; null: qie's own."
    )
    columns: ColumnsConfig = ColumnsConfig()
    root: Place | None = Field(
        None,
        description="Folder or URL that paths in a table begin at, and that absolute ones lie in; null: the table's "
        "folder.",
    )
    batch_size: BatchSize = Field(1, description="Batch size per process.")
    tail: Literal["pad", "drop"] = Field("pad", description="Pad or drop the last, incomplete batch of each shape.")
    caption_dropout_rate: Fraction = Field(0.0, description="How often the null prompt replaces the prompt.")
    control_dropout_rate: Fraction = Field(
        0.0,
        description="How often a sample is trained without its controls: zeros replace their latents, and "
        "qwen_image_21 leaves them out. The prompt's embedding, which has seen them, stays.",
    )
    allow_tiny: bool = Field(
        False, description="Allow areas below 65536 (256 × 256), from which a model learns little."
    )
    area_px: Annotated[Area, AfterValidator(_usual)] = Field(
        None,
        description="Image area for the VAE; null: the family's own. From a list, each image takes the largest "
        "area that does not enlarge it.",
    )
    buckets_px: list[Annotated[list[BucketSide], Field(min_length=2, max_length=2), AfterValidator(_size)]] = Field(
        [],
        description="Fixed sizes [width, height] instead of areas. Each image is cropped to the one nearest in shape.",
    )
    text_area_px: Annotated[Pixels | None, AfterValidator(_usual)] = Field(
        None, description="Image area for Qwen2.5-VL; null: the family's own (edit: the VAE's image)."
    )
    multiple_px: Literal[16, 32, 64] | None = Field(
        None, description="Sizes computed from an area are multiples of this; null: 32."
    )
    background: Annotated[str, AfterValidator(_colour)] = Field(
        "#ffffff", description="Colour behind transparent images."
    )
    augment: AugmentConfig = AugmentConfig()
    order: Literal["shuffle", "blocks"] = Field(
        "shuffle",
        description="blocks shuffles within block_size shards at a time, for stores with slow random access.",
    )
    block_size: Count = Field(16, description="Shards in a block.")
    similar_lengths: CountOrZero = Field(
        64,
        description="Sort prompts by length within this many batches of a shape, so that they pad less; 0: do "
        "not sort.",
    )
    prefetch: int = Field(2, gt=0, le=1024, description="Batches to prepare ahead.")
    reader_threads: int = Field(
        2, gt=0, le=1024, description="Threads that prepare batches; live encoding uses one more."
    )
    max_image_px: Pixels = Field(
        MAX_AREA_PX, description="Refuse larger images. Pillow reads no image above the default."
    )

    @property
    def preserved(self) -> bool:
        """Whether the base's own predictions are learnt of a source."""
        return isinstance(self.source, list) and any(part.preserve for part in self.source)

    @field_validator("source")
    @classmethod
    def _check_learnt(cls, source: Any) -> Any:
        if isinstance(source, list) and source and all(part.preserve for part in source):
            raise ValueError("all sources are preserved: one without preserve has to be learnt")
        return source

    @model_validator(mode="after")
    def _check_sizes(self) -> DataConfig:
        if self.buckets_px and self.area_px is not None:
            raise ValueError("area_px and buckets_px exclude each other")
        if self.area_px == []:
            raise ValueError("area_px is an empty list")
        return self


class KeepConfig(Section):
    """Tensors that stay in memory after their first use, for datasets that fit."""

    latents: Literal["none", "cpu", "gpu"] = Field(
        "none", description="Where to keep the latents of targets and controls."
    )
    embeds: Literal["none", "cpu", "gpu"] = Field("none", description="Where to keep the embeddings of prompts.")
    budget_bytes: Bytes = Field(
        8 * 10**9,
        description="Host memory for all processes of a machine together, and as much on each GPU; samples beyond it "
        "are read again in each epoch.",
    )


class ShardCacheConfig(Section):
    """Shards, and the encoders that fill them."""

    cache_dir: Place | None = Field(
        None, description="Path or URL that qie-precompute writes to and qie-train reads from."
    )
    index: Place | None = Field(
        None,
        description="Path or URL of a compacted index that qie-train takes at its word, as by --index: it lists no "
        "folder. The shards lie beside it, or in the folder that SHARDS names.",
    )
    use_cache: bool = Field(
        True,
        description="Train on the shards in cache_dir, and encode live only the rows of data.source that they "
        "lack; false: encode all rows live.",
    )
    trust_published: bool = Field(
        False, description="Train on shards as they are, without comparing them with the rows of data.source."
    )
    accept_recipe: bool = Field(
        False, description="Train on shards whose recipe differs from this configuration's; run.json records it."
    )
    vae_encoder_device: str = Field("auto", description="auto: the process's own GPU, or the CPU if it has none.")
    text_encoder_device: str = Field("auto", description="auto: the process's own GPU, or the CPU if it has none.")
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto: bfloat16 on a GPU and float32 on the CPU."
    )
    encode_batch_size: BatchSize = Field(
        1, description="Rows encoded together. Above 1, the last bits of a sample depend on its neighbours."
    )
    variants: int = Field(
        1,
        gt=0,
        le=1000,
        description="Most variants to encode of a row: its captions and, with data.augment, augmented ones. An "
        "epoch uses one of them.",
    )
    share_prefix: bool = Field(
        False,
        description="Pass controls that several rows share through Qwen2.5-VL only once; results are about 1e-6 "
        "from exact.",
    )
    compile: bool = Field(False, description="Run the VAE through torch.compile.")
    thumbnail_px: Annotated[int, Field(ge=16, le=512)] | None = Field(
        160,
        description="Longest side of the small pictures of controls, target and mask that are stored beside each "
        "sample, for qie-stats --html and qie watch; null: none. 160 takes about 14 kB. No part of the recipe.",
    )
    verify: Annotated[Literal["off", "first", "always"], word("off")] = Field(
        "first", description="When to check a record against its hash: never, on its first read, or always."
    )
    local_dir: LocalPath | None = Field(
        None, description="Keep shards from URLs in this folder, for all processes of this machine."
    )
    local_bytes: Bytes = Field(
        100 * 10**9,
        description="Size of local_dir. Shards that are needed soon are fetched ahead and deleted last; of the others, "
        "the least recently used is deleted first.",
    )
    keep: KeepConfig = KeepConfig()
    write_through: bool = Field(
        False,
        description="While encoding live, write shards to cache_dir in the first epoch; then train on them.",
    )
    follow_timeout_s: float = Field(
        3600.0, gt=0.0, le=1e7, description="How long to wait for the next shard with --follow."
    )


MAX_STEPS, MAX_CFG = 1000, 100.0
"""Limits of inference: the noise levels that a scheduler knows, and a guidance beyond which images are only colours."""

MAX_LR = 1000.0
MAX_ARGUMENT = 3e38
"""The largest float32."""

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


Rank = Annotated[int, Field(gt=0, le=4096)]


class LoraConfig(Section):
    """A small adapter through peft."""

    kind: Literal["lora", "lokr", "loha"] = Field(
        "lora",
        description="How a weight is changed. lora: by the product of two thin matrices; lokr: by the Kronecker "
        "product of two small ones; loha: by two products of thin matrices, multiplied value by value.",
    )
    r: Rank = Field(16, description="Rank.")
    lora_alpha: Factor = Field(32, description="The adapter's output is scaled by lora_alpha / r.")
    lora_dropout: Fraction = Field(0.0, description="How often an input of the adapter is set to zero.")
    target_modules: list[str] | str = Field(
        ["to_q", "to_k", "to_v", "to_out.0"], description="Endings of module names, or one regular expression."
    )
    use_rslora: bool = Field(False, description="Scale by lora_alpha / √r instead.")
    use_dora: bool = Field(
        False, description="Train the magnitude of weight columns separately from their direction (DoRA)."
    )
    init_lora_weights: Literal["gaussian", "kaiming", "orthogonal"] = Field(
        "gaussian", description="Initialization. With each of them, the adapter changes nothing before the first step."
    )
    rank_pattern: dict[Expression, Rank] = Field(
        {}, description="Other ranks, by endings of module names, or expressions for them: {to_out.0: 32}."
    )
    alpha_pattern: dict[Expression, Factor] = Field({}, description="Other lora_alpha, in the same way.")
    decompose_factor: int | None = Field(
        None, ge=2, le=4096, description="lokr: side of the first matrix, as near as it divides; null: near the root."
    )
    decompose_both: bool = Field(False, description="lokr: the first matrix, too, is a product of rank r.")
    continue_from: LocalPath | None = Field(
        None,
        description="Start from the weights of this adapter: a checkpoint's folder, or a LoRA that diffusers reads.",
    )

    @model_validator(mode="after")
    def _check_kind(self) -> LoraConfig:
        own = {
            "lora": ("lora_dropout", "use_rslora", "use_dora", "init_lora_weights"),
            "lokr": ("decompose_factor", "decompose_both"),
        }
        for kind, names in own.items():
            for name in names:
                if kind != self.kind and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is of kind: {kind}, which is {self.kind} here")
        return self


class AdapterConfig(Section):
    """A further, frozen adapter: part of the model during training, and after it unless `train_only`."""

    path: LocalPath = Field(description="A checkpoint's folder, or a LoRA that diffusers reads.")
    scale: float = Field(1.0, ge=-1000, le=1000, description="Factor of its output.")
    train_only: bool = Field(
        False,
        description="Part of the model in training and in both losses, not in sample images nor in qie-predict.",
    )


class ModelConfig(Section):
    """The model, and which of its weights are trained."""

    pretrained_model_name_or_path: str = Field(description="Hub name or folder, in the diffusers layout.")
    family: Literal["auto", "edit", "edit_plus", "qwen_image_21"] = Field(
        "auto", description="auto: read it from model_index.json."
    )
    lora: LoraConfig | None = Field(
        LoraConfig(), description="The adapter to train; null: train all weights of the transformer."
    )
    vae: str | None = Field(
        None,
        description="Hub name or folder of another VAE of the same latent space, or of a model that has it; null: the "
        "model's own.",
    )
    adapters: list[AdapterConfig] = Field([], description="Further adapters, which stay frozen.")
    quantize: Quantization | None = Field(
        None, description="How to store the transformer's frozen linear layers; needs a LoRA and the extra quant."
    )
    attention_backend: str | None = Field(
        None, description="A backend of diffusers, such as native, _native_cudnn or flex; null: diffusers chooses."
    )

    @model_validator(mode="after")
    def _check_base(self) -> ModelConfig:
        if self.lora is None and self.quantize:
            raise ValueError("the weights of a quantised transformer cannot be trained: quantize needs lora")
        if self.lora is None and self.adapters:
            raise ValueError("adapters cannot be used when all weights are trained: adapters needs lora")
        if self.lora and self.lora.kind == "loha" and self.quantize == "nf4":
            raise ValueError(
                "loha needs the shapes of the weights, which nf4 does not keep: quantize may be fp8 or int8"
            )
        return self

    @property
    def permanent_adapters(self) -> list[AdapterConfig]:
        """The frozen adapters that are part of the model after training, too."""
        return [adapter for adapter in self.adapters if not adapter.train_only]


class TrainConfig(Section):
    """The training loop."""

    max_steps: Count = Field(2000, description="Total number of optimizer steps.")
    epochs: Annotated[int, Field(gt=0, le=100_000)] | None = Field(
        None, description="Passes over the data, instead of max_steps."
    )
    gradient_accumulation_steps: int = Field(
        1, gt=0, le=4096, description="Batches of each process per optimizer step."
    )
    draws_per_sample: int = Field(
        1,
        gt=0,
        le=64,
        description="Draws of noise and noise level for each sample of a batch. All share one pass over the sample's "
        "text and controls: qwen_image_21 only.",
    )
    gradient_checkpointing: bool | Literal["auto"] | Annotated[int, Field(gt=0, le=1000)] = Field(
        "auto",
        description="Recompute the activations of blocks instead of keeping them; n: only those of every n-th block; "
        "auto: as few as the GPU's free memory allows, and true without a GPU.",
    )
    mixed_precision: Annotated[Literal["no", "bf16"], word("no")] = Field(
        "bf16", description="Precision of computation and of frozen weights; no: float32."
    )
    fp8_compute: bool = Field(
        False,
        description="With model.quantize: fp8, also multiply in FP8. Rounds more; meant to be faster, together with "
        "compile, on a GPU of compute capability 8.9 or more.",
    )
    trained_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of the trained weights.")
    max_grad_norm: Factor | None = Field(1.0, description="Scale larger gradients down to this norm; null: never.")
    max_nonfinite_steps: Count = Field(
        1,
        description="Stop after this many steps in a row without a finite loss and gradient. Such steps change "
        "no weight.",
    )
    ema_decay: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Also keep a moving average of the trained weights, with this decay.",
    )
    compile: bool = Field(False, description="Run the transformer's blocks through torch.compile.")
    offload_blocks: int = Field(
        0,
        ge=0,
        le=1000,
        description="Offload the frozen weights of this many blocks to host memory; these blocks are checkpointed.",
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(
        0, description="Seed of sample order, noise, dropout and initial weights: equal seeds give equal runs."
    )
    deterministic: bool = Field(
        False, description="Let a GPU compute the same bits in equal runs; slower. A CPU always does."
    )
    output_dir: LocalPath = Field("runs/edit", description="Where to write checkpoints, metrics and samples.")
    checkpoint_every: Count = Field(500, description="Steps between checkpoints; the last step always has one.")
    keep_last: Count | None = Field(None, description="Keep this many of the latest checkpoints; null: all.")
    keep_every: Count | None = Field(None, description="Also keep checkpoints whose step is a multiple of this.")

    @model_validator(mode="after")
    def _check_length(self) -> TrainConfig:
        if self.epochs is not None and "max_steps" in self.model_fields_set:
            raise ValueError("max_steps and epochs exclude each other")
        return self

    @property
    def checkpointed_every(self) -> int:
        """n for every n-th block, 0 for none. With auto, memory decides how many of all are checkpointed after all."""
        return 1 if self.gradient_checkpointing == "auto" else int(self.gradient_checkpointing)


class OptimizerConfig(Section):
    """Any optimizer with torch's interface, by import path."""

    class_path: str = Field(
        "torch.optim.AdamW", description="Import path, such as bitsandbytes.optim.AdamW8bit or prodigyopt.Prodigy."
    )
    init_args: Arguments = Field({"lr": 1e-4}, description="Arguments of class_path.")
    lr_pattern: dict[Expression, Annotated[float, Field(ge=0.0, le=MAX_LR)]] = Field(
        {}, description="Other learning rates, by endings of layers' names, or expressions for them: {to_out.0: 5e-5}."
    )


class SchedulerConfig(Section):
    """A learning-rate schedule: one of diffusers by name, or one of torch by import path."""

    scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = Field("cosine", description="How the learning rate falls between the warmup and the last step.")
    warmup_steps: CountOrZero = Field(
        100,
        description="Steps in which the learning rate grows from 0; fewer than the run's steps. constant has no "
        "warmup.",
    )
    num_cycles: Count = Field(1, description="Cycles of cosine_with_restarts.")
    power: float = Field(1.0, gt=0.0, le=100, description="Power of polynomial.")
    class_path: str | None = Field(
        None, description="Import path, such as torch.optim.lr_scheduler.OneCycleLR, instead of the fields above."
    )
    init_args: Arguments = Field({}, description="Arguments of class_path.")


class LossConfig(Section):
    """Flow matching: the distribution of noise levels, and their weights."""

    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = Field(
        "logit_normal", description="Distribution of the noise levels, before the shift."
    )
    logit_mean: float = Field(0.0, ge=-100, le=100, description="Mean of logit_normal; above 0 means more noise.")
    logit_std: float = Field(1.0, gt=0.0, le=100, description="Standard deviation of logit_normal.")
    mode_scale: float = Field(1.29, ge=-100, le=100, description="Scale of mode.")
    shift: Literal["none", "dynamic"] | Factor = Field(
        "dynamic", description="dynamic: the scheduler's own, by image size; a number: a static shift."
    )
    stratified_sigmas: bool = Field(
        False, description="Spread the noise levels of a sample's draws (train.draws_per_sample) over the distribution."
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        "none", description="Weight of each noise level, by diffusers' names for SD3."
    )
    kind: Literal["mse", "huber", "flow_dpo"] = Field(
        "mse",
        description="huber gives large errors less weight; flow_dpo learns from pairs which of two targets is liked.",
    )
    huber_delta: Factor = Field(1.0, description="Errors beyond it count linearly in huber.")
    beta: Factor = Field(
        2000.0, description="flow_dpo: how much a preference weighs against leaving the base; more stays closer to it."
    )
    supervised_weight: float = Field(
        0.0, ge=0.0, le=1e6, description="flow_dpo: weight of the mse loss of the preferred target, added to its own."
    )
    mask_foreground_weight: Factor = Field(
        1.0, description="Weight of a mask's bright parts. If it equals the background's, masks do nothing."
    )
    mask_background_weight: float = Field(
        1.0,
        ge=0.0,
        le=1e6,
        description="Weight of a mask's dark parts. Only the ratio to the foreground's matters.",
    )

    @property
    def of_pairs(self) -> bool:
        """Whether it is the loss of pairs of targets."""
        return self.kind == "flow_dpo"


class SampleConfig(Section):
    """An image to generate at each validation."""

    images: list[LocalPath] = Field(
        [], description="Images to edit: one, several for edit_plus, or any number, or none, for qwen_image_21."
    )
    prompt: str = Field(description="The instruction.")
    negative_prompt: str = Field(" ", description="What guidance steers away from.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of the noise.")


class ValidationConfig(Section):
    """Loss on rows that are kept out of training, with fixed noise, and sample images."""

    every: Count = Field(
        200, description="Steps between validations. A run also validates before its first and after its last step."
    )
    rows: CountOrZero = Field(
        16, description="Rows to keep out of training for the validation loss; 0: no validation loss."
    )
    samples: list[SampleConfig] = Field([], description="Images to generate at each validation.")
    sample_steps: int | None = Field(
        None,
        ge=2,
        le=MAX_STEPS,
        description="Denoising steps of the samples; null: 20, and for qwen_image_21 the model's own, or 40.",
    )
    sample_cfg: float | None = Field(
        None,
        ge=1.0,
        le=MAX_CFG,
        description="Guidance scale of the samples; 1: no guidance; null: 4, and 1 for qwen_image_21.",
    )


class Devices(Section):
    """Devices of the components in qie-predict. auto: the process's own GPU, or the CPU if it has none."""

    vae: str = Field("auto", description="Such as cuda:0 or cpu.")
    text_encoder: str = Field("auto", description="Such as cuda:1.")
    transformer: str = Field("auto", description="Such as cuda:0.")


class PredictConfig(Section):
    """Inference."""

    devices: Devices = Devices()


class LoggingConfig(Section):
    """Trackers of a run. qie-train also always writes metrics.jsonl and run.json into the output folder."""

    report_to: list[Tracker] = Field([], description="Trackers that accelerate supports; each needs its own package.")
    project: str = Field("qie", description="Name of the project in trackers.")
    run_name: str | None = Field(None, description="Name of the run in trackers that support one.")
    peak_tflops: Factor | None = Field(
        None, description="The GPU's peak in train.mixed_precision, for MFU; null: known for common GPUs."
    )


def _require_base(model: ModelConfig, what: str) -> None:
    """Raise ValueError unless the model without its adapter is the one that training begins with."""
    if model.lora is None:
        raise ValueError(f"{what} compares the model with itself without the adapter: it needs model.lora")
    if model.lora.continue_from:
        raise ValueError(
            f"{what} compares the model with itself without model.lora: name the adapter to go on from in "
            "model.adapters instead of model.lora.continue_from"
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

    @field_validator("data")
    @classmethod
    def _check_preserved(cls, data: DataConfig, info: ValidationInfo) -> DataConfig:
        model = info.data.get("model")
        if data.preserved and model:
            _require_base(model, "preserve")
        return data

    @field_validator("loss")
    @classmethod
    def _check_preference(cls, loss: LossConfig, info: ValidationInfo) -> LossConfig:
        model, train, data = (info.data.get(name) for name in ("model", "train", "data"))  # none if they are refused
        if not loss.of_pairs or not model or not train:
            return loss
        _require_base(model, "flow_dpo")
        if data and data.preserved:
            raise ValueError("flow_dpo learns from pairs alone: no source may have preserve")
        if train.draws_per_sample > 1:
            raise ValueError("flow_dpo draws one noise for each pair: train.draws_per_sample has to be 1")
        if loss.weighting != "none":
            raise ValueError("flow_dpo weighs all noise levels alike: loss.weighting has to be none")
        if model.lora and model.lora.lora_dropout:
            raise ValueError(
                "flow_dpo compares the errors of two targets, of which dropout changes each by itself: "
                "model.lora.lora_dropout has to be 0"
            )
        return loss

    @field_validator("train")
    @classmethod
    def _check_base(cls, train: TrainConfig, info: ValidationInfo) -> TrainConfig:
        model = info.data.get("model")  # none if it is refused itself
        if train.fp8_compute and model and model.quantize != "fp8":
            raise ValueError(f"fp8_compute needs model.quantize: fp8, which is {model.quantize or 'null'}")
        if train.offload_blocks and model and model.lora is None:
            raise ValueError("offload_blocks offloads frozen weights: it needs model.lora")
        if train.offload_blocks and model and model.quantize == "nf4":
            raise ValueError("4-bit weights cannot be offloaded: offload_blocks goes with fp8 and int8")
        return train

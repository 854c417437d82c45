"""Sections that say what is trained and how: model, train, optimizer, lr_scheduler, loss, validation, and the rest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from qie.config.section import Count, CountOrZero, Factor, Fraction, LocalPath, Section, legible, word

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
        True, description="Compute blocks' activations again instead of keeping them; n: those of every n-th block."
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
        description="So many blocks wait in host memory until they are computed; they are checkpointed.",
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

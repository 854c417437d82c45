"""qie's names for keys and options of earlier programs.

The programs are qwen-image-finetune, musubi-tuner, diffusion-pipe, ai-toolkit, DiffSynth-Studio and SimpleTuner;
docs/migration.md has the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import get_args

from pydantic import BaseModel

from qie.config.schema import Config

_ARGUMENTS = "optimizer.init_args"
_BOTH = "none: qie-precompute writes latents and embeddings, always"
_BY_CONTENT = "none: qie finds changes by content"
_CONTROLS = "none: controls get the model's area in their own proportions"
_DIFFUSERS = "none: the model is one folder in the diffusers layout, model.pretrained_model_name_or_path"
_LEVELS = "loss.timestep_sampling, with loss.logit_std and loss.shift"
_SHAPES = "none: sizes keep the image's proportions; data.buckets_px fixes them"
_SIDES = "data.area_px, width times height: 1048576 for 1024"

MOVED = {
    # A name with a section before it is found under that section only, one with a value for that value only.
    # Data
    "data.class_path": "data.source",
    "data.init_args": "the other keys of section data",
    "dataset_path": "data.source",
    "image_directory": "data.source, with data.preset: musubi",
    "control_directory": "data.columns.controls, a list of folders",
    "folder_path": "data.source, with data.preset: ai_toolkit",
    "control_path": "data.columns.controls, a list of folders",
    "path": "data.source",
    "image_jsonl_file": "data.source",
    "mask_path": "data.columns.mask, a folder; or next to the targets, as x_mask.png",
    "cache_directory": "cache.cache_dir",
    "dataset_base_path": "data.root",
    "dataset_metadata_path": "data.source, a CSV or JSONL file",
    "data_file_keys": "data.columns",
    "extra_inputs": "data.columns",
    "dataset_repeat": "weight of an entry of data.source",
    "diff_output_preservation": "preserve of an entry of data.source",
    "diff_output_preservation_class": "replace of the preserved entry of data.source: {trigger: class}",
    "diff_output_preservation_multiplier": "weight of the preserved entry of data.source",
    "max_pixels": "data.area_px as a list: each image takes the largest area that does not enlarge it",
    "height": "data.buckets_px",
    "width": "data.buckets_px",
    "image_size": f"{_SIDES}, or data.buckets_px",
    "target_size": f"{_SIDES}, or data.buckets_px",
    "controls_size": _CONTROLS,
    "control_resolution": _CONTROLS,
    "no_resize_control": _CONTROLS,
    "resolution": _SIDES,
    "resolutions": _SIDES,
    "enable_bucket": "data.area_px for true, data.buckets_px with one size for false",
    "bucket_no_upscale": "data.area_px as a list",
    "enable_ar_bucket": _SHAPES,
    "min_ar": _SHAPES,
    "max_ar": _SHAPES,
    "num_ar_buckets": _SHAPES,
    "ar_buckets": "data.buckets_px, in pixels",
    "size_buckets": "data.buckets_px, in pixels",
    "random_crop": "data.augment.crop",
    "crop_scale": "data.augment.crop",
    "center_crop": "data.buckets_px",
    "crop_size": "data.buckets_px",
    "center_crop_ratio": "data.buckets_px",
    "cache_drop_rate": "data.caption_dropout_rate",
    "prompt_image_dropout_rate": "none; nearest are data.caption_dropout_rate and data.control_dropout_rate",
    "caption_extension": "none: captions end in .txt",
    "caption_ext": "none: captions end in .txt",
    "num_repeats": "weight of an entry of data.source",
    "num_workers": "none: batches are prepared in threads",
    "data.shuffle": "none: rows are always shuffled, by train.seed",
    "batch_size": "data.batch_size, or cache.encode_batch_size for encoding",
    "train_batch_size": "data.batch_size",
    "micro_batch_size_per_gpu": "data.batch_size",
    "cache_shuffle_num": "none: further captions of a row are variants, cache.variants",
    "shuffle_tags": "none: further captions of a row are variants, cache.variants",
    "caption_prefix": "none: write it into the captions",
    "trigger_word": "none: write it into the captions",
    "skip_empty_caption": "none: a row without a caption is skipped and listed",
    "multiple_target": "none: a row has one target",
    "frame_buckets": "none: rows are images",
    # Cache
    "skip_existing": _BY_CONTENT,
    "regenerate_cache": _BY_CONTENT,
    "keep_cache": "none: shards are never deleted",
    "cache_latents_to_disk": _BOTH,
    "cache_text_embeddings": _BOTH,
    "unload_text_encoder": "none: training loads no encoder",
    "fp8_vl": "none: encoders compute in cache.compute_dtype",
    "quantize_te": "none: encoders compute in cache.compute_dtype",
    "caching_batch_size": "cache.encode_batch_size",
    "cache.devices.vae": "cache.vae_encoder_device",
    "cache.devices.text_encoder": "cache.text_encoder_device",
    "predict.devices.dit": "predict.devices.transformer",
    # Model
    "dit": _DIFFUSERS,
    "text_encoder_path": _DIFFUSERS,
    "transformer_path": _DIFFUSERS,
    "vae_path": "model.vae, a folder in the diffusers layout",
    "model_version": "model.family, which auto reads from the model",
    "arch": "model.family, which auto reads from the model",
    "diffusers_path": "model.pretrained_model_name_or_path",
    "name_or_path": "model.pretrained_model_name_or_path",
    "use_comfy_weights": _DIFFUSERS,
    "model_id_with_origin_paths": "model.pretrained_model_name_or_path",
    "model_paths": "model.pretrained_model_name_or_path",
    "processor_path": "model.pretrained_model_name_or_path",
    "model_flavour": "model.pretrained_model_name_or_path",
    "model_family": "model.family, which auto reads from the model",
    "pretrained_vae_model_name_or_path": "model.vae",
    "lora_base_model": "model.lora.r, and the same number as model.lora.lora_alpha",
    "lora_rank": "model.lora.r",
    "lora_target_modules": "model.lora.target_modules",
    "lora_checkpoint": "model.lora.continue_from",
    "init_lora": "model.lora.continue_from",
    "trainable_models": "none: without an adapter, model.lora is null",
    "rank": "model.lora.r",
    "network_dim": "model.lora.r",
    "linear": "model.lora.r",
    "alpha": "model.lora.lora_alpha",
    "network_alpha": "model.lora.lora_alpha",
    "linear_alpha": "model.lora.lora_alpha",
    "network_dropout": "model.lora.lora_dropout",
    "network_args": "model.lora.target_modules",
    "include_patterns": "model.lora.target_modules",
    "exclude_patterns": "model.lora.target_modules",
    "pretrained_weight": "model.lora.continue_from",
    "network_weights": "model.lora.continue_from",
    "init_from_existing": "model.lora.continue_from",
    "adapter_name": "none: further adapters are model.adapters",
    "base_weights": "model.adapters, not merged into the model",
    "base_weights_multiplier": "scale of an entry of model.adapters",
    "fuse_adapters": "model.adapters, not merged into the model",
    "preset_lora_path": "model.adapters, an entry with train_only: true",
    "preset_lora_model": "model.adapters, an entry with train_only: true",
    "assistant_lora_inference_strength": "train_only of an entry of model.adapters, for 0",
    "disable_assistant_lora": "none: without an entry in model.adapters there is no assistant",
    "assistant_lora_strength": "model.adapters, the scale of an entry with train_only: true",
    "assistant_lora_path": "path of an entry of model.adapters, with train_only: true",
    "model.quantize: true": "model.quantize: fp8",
    "model.quantize: false": "model.quantize: null",
    "qtype": "model.quantize: fp8, int8 or nf4",
    "fp8_models": "model.quantize: fp8",
    "quant_options": "model.quantize: fp8, int8 or nf4",
    "base_model_precision": "model.quantize: fp8, int8 or nf4",
    "fp8_base": "model.quantize: fp8",
    "fp8_scaled": "model.quantize: fp8",
    "transformer_dtype": "model.quantize: fp8",
    "model.dtype": "train.mixed_precision",
    "adapter.dtype": "train.trained_dtype",
    "full_bf16": "train.trained_dtype: bfloat16",
    "sdpa": "model.attention_backend: native",
    "xformers": "model.attention_backend: xformers",
    "flash_attn": "model.attention_backend: flash",
    # The run
    "max_train_steps": "train.max_steps",
    "steps": "train.max_steps",
    "max_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "checkpointing_steps": "train.checkpoint_every",
    "save_every": "train.checkpoint_every",
    "save_steps": "train.checkpoint_every",
    "output_path": "train.output_dir",
    "remove_prefix_in_ckpt": "none: adapters have diffusers' names",
    "use_gradient_checkpointing": "train.gradient_checkpointing",
    "use_gradient_checkpointing_offload": "none; train.offload_blocks offloads weights",
    "initialize_model_on_cpu": "none; train.offload_blocks offloads weights",
    "find_unused_parameters": "none: always",
    "save_every_n_steps": "train.checkpoint_every",
    "checkpoint_every_n_minutes": "train.checkpoint_every, in steps",
    "checkpoints_total_limit": "train.keep_last",
    "save_last_n_steps": "train.keep_last, which counts checkpoints",
    "max_step_saves_to_keep": "train.keep_last",
    "save_state": "none: every checkpoint has the state",
    "save_dtype": "none: qie export --dtype",
    "output_name": "train.output_dir",
    "training_folder": "train.output_dir",
    "logging_dir": "train.output_dir",
    "tracker_project_name": "logging.project",
    "log_tracker_name": "logging.project",
    "wandb_tracker_name": "logging.project",
    "log_with": "logging.report_to",
    "enable_wandb": "logging.report_to: [wandb]",
    "logging.report_to: tensorboard": "logging.report_to: [tensorboard], a list",
    "logging.report_to: wandb": "logging.report_to: [wandb], a list",
    "logging.report_to: swanlab": "logging.report_to: [swanlab], a list",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "activation_checkpointing": "train.gradient_checkpointing",
    "blocks_to_swap": "train.offload_blocks",
    "low_memory": "train.offload_blocks",
    "low_vram": "train.offload_blocks",
    "train.dtype": "train.mixed_precision",
    "ema_config": "train.ema_decay",
    "fit_device": "cache.vae_encoder_device and cache.text_encoder_device",
    "pipeline_stages": "none: FSDP2 shares the model among GPUs",
    "partition_method": "none: FSDP2 shares the model among GPUs",
    "resume": "none: qie-train --resume DIR, or latest",
    "resume_from_checkpoint": "none: qie-train --resume DIR, or latest",
    "trainer": "none: model.family says which model it is",
    # Optimizer, schedule, objective
    "lr": f"{_ARGUMENTS}.lr",
    "learning_rate": f"{_ARGUMENTS}.lr",
    "betas": f"{_ARGUMENTS}.betas",
    "weight_decay": f"{_ARGUMENTS}.weight_decay",
    "optimizer_args": _ARGUMENTS,
    "optimizer.type": "optimizer.class_path, an import path",
    "optimizer_type": "optimizer.class_path, an import path",
    "train.optimizer": "optimizer.class_path, an import path",
    "lr_scheduler": "lr_scheduler.scheduler_type",
    "lr_warmup_steps": "lr_scheduler.warmup_steps",
    "lr_scheduler_num_cycles": "lr_scheduler.num_cycles",
    "lr_scheduler_power": "lr_scheduler.power",
    "lr_scheduler.num_cycles: 0.5": "none: cosine is half a wave",
    "timestep_type": _LEVELS,
    "timestep_sampling": _LEVELS,
    "timestep_sample_method": _LEVELS,
    "sigmoid_scale": "loss.logit_std",
    "discrete_flow_shift": "loss.shift",
    "flow_schedule_shift": "loss.shift, whose default is Qwen's own",
    "flux_shift": "none: loss.shift: dynamic is Qwen's own",
    "weighting_scheme": "loss.weighting, where it weighs, and loss.timestep_sampling, where it draws",
    "min_timestep": "none",
    "max_timestep": "none",
    "pseudo_huber_c": "loss.huber_delta, with loss.kind: huber",
    "mask_loss": "loss.mask_foreground_weight and loss.mask_background_weight",
    "forground_weight": "loss.mask_foreground_weight",
    "foreground_weight": "loss.mask_foreground_weight",
    "background_weight": "loss.mask_background_weight",
    "scale_weight_norms": "none",
    "fused_backward_pass": "none",
    # Validation
    "validation.enabled": "validation.rows",
    "validation_steps": "validation.every",
    "validation.steps": "validation.every",
    "eval_every_n_steps": "validation.every",
    "sample_every": "validation.every",
    "sample_every_n_steps": "validation.every",
    "eval_datasets": "validation.rows, kept out of the same rows",
    "sample_prompts": "validation.samples",
    "validation_prompt": "validation.samples",
    "validation_guidance": "validation.sample_cfg",
    "validation_num_inference_steps": "validation.sample_steps",
    "max_samples": "validation.rows",
    "sample.guidance_scale": "validation.sample_cfg",
    # Options of commands
    "task": "none: qie-precompute, then qie-train",
    "cache": "none: qie-precompute encodes",
    "cache_only": "none: qie-precompute encodes",
    "trust_cache": "none: qie-precompute --trust-published",
    "reset_optimizer": "none: a new run with model.lora.continue_from",
    "reset_dataloader": "none: a new run with model.lora.continue_from",
    "dump_dataset": "none: qie-stats --html",
    "control_image_path": "none: qie-predict --image",
    "lora_weight": "none: qie-predict --lora PATH:SCALE",
    "lora_multiplier": "none: qie-predict --lora PATH:SCALE",
    "infer_steps": "none: qie-predict --steps",
    "guidance_scale": "none: qie-predict --cfg",
    "from_file": "none: qie-predict --batch",
}


def moved(key: str) -> str | None:
    """The key to write instead of one (`lora.rank`) that qie does not have there; None if no program ever had it.

    For a key that qie has in another section, this is its place there.
    """
    steps = key.split(".")
    for start in range(len(steps)):
        if answer := MOVED.get(".".join(steps[start:])):
            return f"{key} → {answer}"
    places = [place for place, _ in _places(Config) if place.rpartition(".")[2] == steps[-1]]
    return f"{key} → {' or '.join(places)}" if places else None


def within(section: type[BaseModel], name: str) -> str:
    """`name` as a key of a section: `data.class_path`."""
    path = next((place for place, kind in _places(Config) if kind is section), None)
    return f"{path}.{name}" if path else name


def _places(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel] | None]]:
    """The keys of a section, and of those within, as --set takes them, and which section is there, if one is; not those
    of lists' elements."""
    for name, field in section.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        yield path + name, inner
        if inner:
            yield from _places(inner, f"{path}{name}.")

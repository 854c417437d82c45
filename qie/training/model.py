"""The transformer: loaded, given an adapter, and called on a batch. Also saves and loads adapters."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file

from qie.config import LoraConfig as LoraSection
from qie.errors import ConfigError, QieError
from qie.pretrained import Checkpoint, loading
from qie.types import Batch

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
_PREFIX = "transformer."


def load_transformer(checkpoint: Checkpoint, dtype: torch.dtype) -> QwenImageTransformer2DModel:
    """The checkpoint's transformer, frozen."""
    folder = checkpoint.component("transformer")
    with loading(folder):
        return QwenImageTransformer2DModel.from_pretrained(
            folder, torch_dtype=dtype, use_safetensors=True
        ).requires_grad_(False)


def load_scheduler(checkpoint: Checkpoint) -> FlowMatchEulerDiscreteScheduler:
    """The checkpoint's noise schedule."""
    folder = checkpoint.component("scheduler")
    with loading(folder):
        return FlowMatchEulerDiscreteScheduler.from_pretrained(folder)


def load_shift(checkpoint: Checkpoint) -> dict[str, Any]:
    """The scheduler's values for `objective.dynamic_shift`, by its parameter names."""
    config = load_scheduler(checkpoint).config
    return {
        "base_shift": config.base_shift,
        "max_shift": config.max_shift,
        "base_tokens": config.base_image_seq_len,
        "max_tokens": config.max_image_seq_len,
    }


def add_lora(transformer: QwenImageTransformer2DModel, section: LoraSection, seed: int) -> None:
    """Add a trainable adapter in float32, initialised from `seed`.

    Raises:
        ConfigError: a target names no module; the nearest names are given.
    """
    names = {name.rpartition(".")[2] for name, _ in transformer.named_modules()} | {"to_out.0"}
    if isinstance(section.target_modules, list):
        for target in section.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name, _ in transformer.named_modules()):
                near = difflib.get_close_matches(target, sorted(names - {""}), n=3, cutoff=0.6)
                raise ConfigError(
                    "a LoRA target names no module of the transformer",
                    where="model.lora.target_modules",
                    expected=f"such as {', '.join(near or ['to_q', 'to_k', 'to_v', 'to_out.0'])}",
                    found=target,
                )
    torch.manual_seed(seed)
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=section.target_modules,
        init_lora_weights="gaussian",
    )
    try:
        transformer.add_adapter(config)
    except ValueError as error:
        raise ConfigError(
            "the LoRA targets fit no module of the transformer",
            where="model.lora.target_modules",
            found=section.target_modules,
            hint="an expression has to match a module's whole name, such as .*attn.to_q",
        ) from error
    cast_training_params(transformer, dtype=torch.float32)


def save_adapter(transformer: QwenImageTransformer2DModel, folder: Path) -> None:
    """Write the adapter in the format of diffusers: `pipe.load_lora_weights(folder)` loads it, alpha included."""
    metadata = transformer.peft_config["default"].to_dict()
    # Sets have no order of their own: sorted, equal adapters are equal files.
    metadata = {name: sorted(value) if isinstance(value, set) else value for name, value in metadata.items()}
    QwenImageEditPipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=metadata,
    )


def load_adapter(transformer: QwenImageTransformer2DModel, folder: Path) -> None:
    """Put a saved adapter's weights into the adapter that `transformer` has.

    Raises:
        QieError: the file's tensors are not those of this adapter.
    """
    saved = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / ADAPTER_FILE).items()}
    mine = get_peft_model_state_dict(transformer)
    if saved.keys() != mine.keys() or any(saved[name].shape != mine[name].shape for name in mine):
        raise QieError(
            "the saved adapter has other tensors than this run's",
            where=folder / ADAPTER_FILE,
            expected=f"{len(mine)} tensors of model.lora r={transformer.peft_config['default'].r}",
            found=f"{len(saved)} tensors, {len(saved.keys() & mine.keys())} of the same names",
            hint="resume with the model.lora that the run was started with",
        )
    set_peft_model_state_dict(transformer, saved)


def velocity(
    transformer: torch.nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    batch: Batch,
    prompt_embed: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None,
) -> torch.Tensor:
    """The model's prediction of ε − x₀ for a noisy target, [B, C, 1, H, W].

    The controls' tokens follow the target's, and what is predicted for them is dropped, as in diffusers' pipelines.
    σ itself is the timestep: the factor 1000 is inside the model.
    """
    packed = [pack(noisy), *(pack(control) for control in batch.control_latent)]
    grid = [(1, latent.shape[-2] // 2, latent.shape[-1] // 2) for latent in (noisy, *batch.control_latent)]
    predicted = transformer(
        hidden_states=torch.cat(packed, dim=1),
        timestep=sigmas,
        encoder_hidden_states=prompt_embed,
        encoder_hidden_states_mask=prompt_embeds_mask,
        img_shapes=[grid] * len(batch),
        return_dict=False,
    )[0]
    return unpack(predicted[:, : packed[0].shape[1]], noisy.shape[-2], noisy.shape[-1])


def pack(latent: torch.Tensor) -> torch.Tensor:
    """[B, C, 1, H, W] to tokens of 2×2 latent pixels, [B, H/2·W/2, 4·C]: `_pack_latents` of diffusers' pipelines."""
    batch, channels, _, height, width = latent.shape
    patches = latent.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack` for a latent of [C, 1, height, width]."""
    batch, _, channels = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels // 4, 1, height, width)

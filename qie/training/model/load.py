"""The transformer, loaded as it was released."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName

from qie.errors import ConfigError
from qie.pretrained import PretrainedModel, loading
from qie.training.model.quantize import Quantization, is_quantized, quantize_blocks


def load_transformer(
    pretrained: PretrainedModel,
    dtype: torch.dtype,
    *,
    quantize: Quantization | None = None,
    attention_backend: str | None = None,
    device: torch.device | None = None,
) -> QwenImageTransformer2DModel:
    """The model's transformer, frozen, on the CPU.

    Args:
        pretrained: with a transformer.
        dtype: of the weights; of a quantised layer, that in which it computes.
        quantize: how the blocks' linear layers are stored, see `quantize_blocks`.
        attention_backend: a backend of diffusers that can be trained with; None leaves the choice to diffusers, which
            has one for the whole process. Some, such as flash, take no mask: with them a batch is one sample.
        device: where the blocks' linear layers are quantised, and stay.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: a package is missing, or there is no such backend.
    """
    if attention_backend is not None:
        _check_attention_backend(attention_backend)
    folder = pretrained.component("transformer")
    with loading(folder):
        transformer = QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True)
    transformer.requires_grad_(False)
    if quantize is not None:
        quantize_blocks(transformer, quantize, device)
    if attention_backend is not None:
        try:
            transformer.set_attention_backend(attention_backend)
        except (RuntimeError, ValueError, ImportError) as error:
            where, found = "model.attention_backend", f"{attention_backend}: {error}"
            raise ConfigError("the attention backend cannot be used here", where=where, found=found) from error
    return transformer


def load_scheduler(pretrained: PretrainedModel) -> FlowMatchEulerDiscreteScheduler:
    """The model's noise schedule."""
    folder = pretrained.component("scheduler")
    with loading(folder):
        return FlowMatchEulerDiscreteScheduler.from_pretrained(folder)


def load_shift(pretrained: PretrainedModel) -> dict[str, Any]:
    """The scheduler's values for `objective.dynamic_shift`, by its parameter names."""
    config = load_scheduler(pretrained).config
    return {
        "base_shift": config.base_shift,
        "max_shift": config.max_shift,
        "base_tokens": config.base_image_seq_len,
        "max_tokens": config.max_image_seq_len,
    }


def train_everything(transformer: QwenImageTransformer2DModel, dtype: torch.dtype) -> None:
    """Make all weights trainable, kept in `dtype`.

    Raises:
        ConfigError: they are quantised, and steps are smaller than what is between two values; or there are adapters,
            which would no longer fit the weights that they were made for.
    """
    if getattr(transformer, "peft_config", None):
        raise ConfigError(
            "all weights are trained, and adapters are on them",
            where="model.adapters",
            expected="none, or an adapter that is trained beside them: model.lora",
            found=f"{len(transformer.peft_config)} adapters; model.lora is null",
            hint="merge them into the model first",
        )
    if is_quantized(transformer):
        raise ConfigError(
            "a quantised transformer cannot be trained itself",
            where="model.quantize",
            expected="null, or an adapter on it: model.lora",
            found="model.lora is null",
        )
    for parameter in transformer.parameters():
        # A copy in any case: what is read from a file lies there as its header lets it, and on a CPU the last bits of a
        # product depend on that. A run that goes on has read them from another file.
        parameter.data = parameter.data.to(dtype, copy=True)
    transformer.requires_grad_(True)


def _check_attention_backend(name: str) -> None:
    names = [backend.value for backend in AttentionBackendName if "sage" not in backend.value]
    # Those of the hub are programs that are downloaded to be run.
    names = [other for other in names if not other.endswith("_hub")]
    if name not in names:
        known = name in [backend.value for backend in AttentionBackendName]
        raise ConfigError(
            "this attention backend downloads its program, or cannot be trained with"
            if known
            else "no such attention backend",
            where="model.attention_backend",
            expected=", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names),
            found=name,
        )

"""The transformer and its files: loaded frozen, built without weights, found in a checkpoint, saved."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from huggingface_hub import save_torch_state_dict

from qie.config import Quantization
from qie.errors import ConfigError, UsageError
from qie.pretrained import PretrainedModel, loading, read_json
from qie.training.model.adapter_file import adapter_in
from qie.training.model.blocks import offloaded_blocks
from qie.training.model.fp8 import require_fp8_products
from qie.training.model.quantize import is_quantized, quantize_blocks
from qie.training.model.sharding import TensorFiles

TRANSFORMER_FOLDER = "transformer"
_FILES = "diffusion_pytorch_model{suffix}.safetensors"


def load_transformer(
    pretrained: PretrainedModel,
    dtype: torch.dtype,
    *,
    quantize: Quantization | None = None,
    attention_backend: str | None = None,
    device: torch.device | None = None,
    offload_blocks: int = 0,
    fp8_compute: bool = False,
) -> QwenImageTransformer2DModel:
    """The model's transformer, frozen, on the CPU.

    Args:
        pretrained: with a transformer.
        dtype: of the weights; a quantised layer computes in it.
        quantize: how the blocks' linear layers are stored, see `quantize_blocks`.
        attention_backend: a backend of diffusers that can be trained with; None leaves the choice to diffusers, which
            has one for the whole process.
        device: the blocks' linear layers are quantised there, and stay there.
        offload_blocks: but for those of so many blocks, which will be offloaded.
        fp8_compute: layers that are quantised to fp8 also compute in it.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: a package is missing, no such backend exists, or the device has no products in FP8.
    """
    if fp8_compute:
        require_fp8_products(device or torch.device("cpu"))
    if attention_backend is not None:
        _check_attention_backend(attention_backend, device)
    folder = pretrained.component("transformer")
    with loading(folder):
        kind = getattr(diffusers, pretrained.family.transformer)
        transformer = kind.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True)
    transformer.requires_grad_(False)
    if quantize is not None:
        offloaded = offloaded_blocks(len(transformer.transformer_blocks), offload_blocks)
        quantize_blocks(transformer, quantize, device, in_host_memory=offloaded, fp8_compute=fp8_compute)
    if attention_backend is not None:
        try:
            transformer.set_attention_backend(attention_backend)
        except (RuntimeError, ValueError, ImportError) as error:
            where, found = "model.attention_backend", f"{attention_backend}: {error}"
            raise ConfigError("the attention backend cannot be used here", where=where, found=found) from error
    return transformer


def _check_attention_backend(name: str, device: torch.device | None) -> None:
    if name == "flex" and device is not None and device.type == "cpu":
        raise ConfigError(
            "FlexAttention has no backward pass on a CPU",
            where="model.attention_backend",
            expected="native",
            found=name,
        )
    names = [backend.value for backend in AttentionBackendName if "sage" not in backend.value]
    # Those of the hub are programs that are downloaded to be run.
    names = [other for other in names if not other.endswith("_hub")]
    if name not in names:
        known = name in [backend.value for backend in AttentionBackendName]
        raise ConfigError(
            "this attention backend downloads its kernels, or does not support training"
            if known
            else "no such attention backend",
            where="model.attention_backend",
            expected=", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names),
            found=name,
        )


def empty_transformer(pretrained: PretrainedModel) -> QwenImageTransformer2DModel:
    """The model's transformer without its weights, on the meta device, frozen. Adapters can be added to it."""
    folder = pretrained.component("transformer")
    config = read_json(folder / "config.json")
    with loading(folder), torch.device("meta"):
        return getattr(diffusers, pretrained.family.transformer).from_config(config).requires_grad_(False)


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


def train_all_weights(transformer: QwenImageTransformer2DModel, dtype: torch.dtype) -> None:
    """Make all weights trainable, kept in `dtype`.

    Raises:
        ConfigError: the weights are quantised, and an optimizer's steps are smaller than the gap between two values; or
            adapters lie on them, which would no longer fit the weights that they were made for.
    """
    if getattr(transformer, "peft_config", None):
        raise ConfigError(
            "adapters cannot be used when all weights are trained",
            where="model.adapters",
            expected="none, or model.lora to train another one",
            found=f"{len(transformer.peft_config)} adapters; model.lora is null",
            hint="merge them into the model first",
        )
    if is_quantized(transformer):
        raise ConfigError(
            "the weights of a quantised transformer cannot be trained",
            where="model.quantize",
            expected="null, or model.lora to train an adapter on it",
            found="model.lora is null",
        )
    for parameter in transformer.parameters():
        # Always a copy: a tensor read from a file lies where the file's header puts it, and on a CPU the last bits of a
        # product depend on that. A resumed run reads it from another file.
        parameter.data = parameter.data.to(dtype, copy=True)
    transformer.requires_grad_(True)


def open_transformer(folder: Path, base: PretrainedModel) -> PretrainedModel:
    """The transformer in a checkpoint of a run that trained all weights, as a model that has no other component.

    Raises:
        UsageError: `folder` has none, or it does not fit the `base` model.
    """
    folder = folder.parent if folder.name == TRANSFORMER_FOLDER else folder
    if not (folder / TRANSFORMER_FOLDER / "config.json").is_file():
        found, hint = None, "give a checkpoint of a run that trained all weights"
        if adapter_in(folder) is not None:
            found, hint = "an adapter", "give it as --lora"
        elif (folder / "config.json").is_file():
            found, hint = "config.json", f"put its files into {folder / TRANSFORMER_FOLDER}"
        expected = f"{TRANSFORMER_FOLDER}/config.json"
        raise UsageError("no transformer in this folder", where=folder, expected=expected, found=found, hint=hint)
    trained = PretrainedModel(folder, base.family)
    theirs, ours = (read_json(part.component("transformer") / "config.json") for part in (trained, base))
    for name in ("in_channels", "out_channels", "joint_attention_dim", "context_in_dim"):
        if theirs.get(name) != ours.get(name):
            raise UsageError(
                "the transformer belongs to another model",
                where=folder,
                expected=f"{name} {ours.get(name)}",
                found=theirs.get(name),
            )
    return trained


def save_transformer(transformer: QwenImageTransformer2DModel, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write `state`, whole tensors by the names of parameters, and the transformer's configuration.

    The layout is that of diffusers: its class loads it by `from_pretrained(folder)`.
    """
    folder.mkdir(parents=True)
    transformer.save_config(folder)
    # FSDP puts a class of its own before the one that diffusers knows.
    own = next(kind for kind in type(transformer).__mro__ if kind.__module__.startswith("diffusers."))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # a place on this machine
    config |= {"_class_name": own.__name__}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_torch_state_dict(dict(state), folder, filename_pattern=_FILES, max_shard_size="10GB")


def read_transformer(folder: Path) -> TensorFiles:
    """The tensors that `save_transformer` wrote."""
    return TensorFiles(sorted(folder.glob(_FILES.format(suffix="*"))))

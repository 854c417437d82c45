"""All weights of a transformer as files, in the layout of diffusers: `from_pretrained` loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

_FILES = "diffusion_pytorch_model{suffix}.safetensors"


def save_transformer(transformer: QwenImageTransformer2DModel, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write `state`, whole tensors by the names of parameters, and the transformer's configuration."""
    folder.mkdir(parents=True)
    transformer.save_config(folder)
    save_torch_state_dict(dict(state), folder, filename_pattern=_FILES, max_shard_size="10GB")


def read_transformer(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that `save_transformer` wrote."""
    files = sorted(folder.glob(_FILES.format(suffix="*")))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}

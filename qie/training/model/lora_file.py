"""A LoRA in a file: of qie, of diffusers, or of another program whose format diffusers reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageEditPipeline
from safetensors import SafetensorError, safe_open

from qie.errors import ConfigError

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
"""What diffusers puts before the name of a tensor of the transformer."""


@dataclass(frozen=True)
class LoraFile:
    """What a file holds.

    Attributes:
        file: where it lies.
        tensors: by their names in the transformer, such as `transformer_blocks.0.attn.to_q.lora_A.weight`.
        metadata: peft's configuration, if the file has it.
    """

    file: Path
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, Any] | None

    @property
    def settings(self) -> dict[str, Any] | None:
        """See `settings_of`; None when the file has none."""
        return None if self.metadata is None else settings_of(self.metadata)

    @property
    def scale(self) -> float | None:
        """By what the product of its matrices is multiplied; None when that differs from layer to layer.

        Without metadata it is 1: diffusers takes the rank for alpha, and folds other formats' alphas into the weights.
        """
        if self.metadata is None:
            return 1.0
        return None if self.metadata.get("alpha_pattern") else scale_of(self.metadata)


_PATTERNS = ("rank_pattern", "alpha_pattern")
_SCALE = ("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias")
_LAYERS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration of peft what the adapter computes, and where; the rest is how it was trained.

    Each release of peft has more fields than the one before, and refuses a file with one that it does not know; so what
    is off is left out, too. Empty patterns stay: diffusers 0.35 to 0.39 look them up without asking. Sets have no order
    of their own: sorted, equal adapters are equal files.
    """
    known = {name: config[name] for name in _SCALE + _LAYERS if config.get(name)}
    known |= {name: config.get(name) or {} for name in _PATTERNS}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in known.items()}


def scale_of(config: Mapping[str, Any]) -> float:
    """lora_alpha / r, or lora_alpha / √r of rank-stabilised LoRA (arXiv:2312.03732), of a configuration of peft."""
    return float(config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"]))


def read_lora(path: Path, key: str) -> LoraFile:
    """The LoRA in a .safetensors file, or in a folder such as a checkpoint.

    Raises:
        ConfigError: there is none, or it cannot be read; names `key`, the place in the configuration.
    """
    file = path / ADAPTER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            "no such adapter", where=key, expected=f"a .safetensors file, or a folder with {ADAPTER_FILE}", found=path
        )
    with explained("the adapter cannot be read", file, key):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        if any(name.endswith("dora_scale") for name in names):
            raise ValueError("a DoRA in a format that diffusers reads only in part")
        tensors, metadata = QwenImageEditPipeline.lora_state_dict(
            str(file.parent), weight_name=file.name, use_safetensors=True, return_lora_metadata=True
        )
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    if metadata is not None:
        metadata = {name.removeprefix(PREFIX): value for name, value in metadata.items()}
        with explained("the adapter's metadata cannot be read", file, key):
            scale_of(metadata)
    return LoraFile(file, tensors, metadata)


@contextmanager
def explained(what: str, file: Path, key: str) -> Iterator[None]:
    """Turn whatever a library raises about an adapter's file into a ConfigError."""
    try:
        yield
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, RuntimeError, SafetensorError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(what, where=file, found=found, hint=f"correct {key}") from error

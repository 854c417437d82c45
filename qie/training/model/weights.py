"""All weights of a transformer as files, in the layout of diffusers: `from_pretrained` loads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open

from qie.errors import QieError

_FILES = "diffusion_pytorch_model{suffix}.safetensors"


def save_transformer(transformer: QwenImageTransformer2DModel, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write `state`, whole tensors by the names of parameters, and the transformer's configuration."""
    folder.mkdir(parents=True)
    transformer.save_config(folder)
    # FSDP puts a class of its own before the one that diffusers knows.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # a place on this machine
    config |= {"_class_name": QwenImageTransformer2DModel.__name__}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_torch_state_dict(dict(state), folder, filename_pattern=_FILES, max_shard_size="10GB")


_ASKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors in safetensors files, each read when it is asked for: a process that shares a model with others needs
    a part of each, and all of them are more than it has room for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._opened: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._opened |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened)

    def __len__(self) -> int:
        return len(self._opened)


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity; types of 8 bits are not asked."""
    for name, tensor in tensors.items():
        if tensor.dtype in _ASKED and not bool(tensor.isfinite().all()):
            return name
    return None


def require_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise QieError when what is to be saved is not finite; names it."""
    if bad := not_finite(tensors):
        raise QieError(
            "the weights or the optimizer's state are not finite any more, and are not saved",
            where=bad,
            hint="go on with --resume latest, or start anew with a lower optimizer.init_args.lr",
        )


def read_transformer(folder: Path) -> TensorFiles:
    """The tensors that `save_transformer` wrote."""
    return TensorFiles(sorted(folder.glob(_FILES.format(suffix="*"))))

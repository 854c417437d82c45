"""A VAE in the place of a model's own: whether what it encodes is the same. Training asks, which loads no encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from qie.pretrained import loading, read_json


def same_encoder(one: Path, other: Path) -> bool:
    """Whether the VAEs in two folders encode alike: their settings, but for the decoder's, and the encoder's weights
    are equal, in whatever precision they are stored."""
    settings = [
        {name: value for name, value in read_json(folder / "config.json").items() if name[0] != "_"}
        for folder in (one, other)
    ]
    if any(settings[0].get(name) != settings[1].get(name) for name in set().union(*settings) if "decoder" not in name):
        return False
    mine, theirs = _encoder_weights(one), _encoder_weights(other)
    return mine.keys() == theirs.keys() and all(
        torch.equal(file.get_tensor(name).float(), theirs[name].get_tensor(name).float()) for name, file in mine.items()
    )


def _encoder_weights(folder: Path) -> dict[str, Any]:
    """The files that hold them, by their names."""
    with loading(folder):
        files: list[Any] = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    named = [(name, file) for file in files for name in list(file.keys())]
    return {name: file for name, file in named if name.startswith(("encoder.", "quant_conv."))}

"""Whether what a run left fits a base model: adapters, and transformers of which all weights were trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel

from qie.config import AdapterConfig
from qie.errors import UsageError
from qie.paths import local_path
from qie.pretrained import PretrainedModel, loading, read_json
from qie.training.model.lora_file import ADAPTER_FILE, LoraFile, read_lora


def check_adapters(pretrained: PretrainedModel, adapters: Sequence[AdapterConfig], key: str) -> None:
    """Raise UsageError when an adapter is none of the model's transformer, of which no weight is read.

    `key` is where adapters are named, for messages.
    """
    folder = pretrained.component("transformer")
    with loading(folder), torch.device("meta"):
        transformer = QwenImageTransformer2DModel.from_config(QwenImageTransformer2DModel.load_config(folder))
    linears = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, torch.nn.Linear)}
    for adapter in adapters:
        lora = read_lora(local_path(adapter.path), key)
        if faults := list(_misfits(lora, linears)):
            raise UsageError(
                "the adapter does not fit this model",
                where=lora.file,
                expected="a LoRA of this model",
                found=f"{len(faults)} of its {len(lora.tensors)} tensors do not fit; {faults[0]}",
                hint=f"correct {key}",
            )


def _misfits(lora: LoraFile, linears: dict[str, torch.nn.Linear]) -> Iterator[str]:
    if not lora.tensors:
        yield "it has none"
    for name, tensor in sorted(lora.tensors.items()):
        module, _, part = name.partition(".lora_")
        if module not in linears:
            yield f"the model has no layer {module}"
            continue
        side, features = (1, linears[module].in_features) if part.startswith("A") else (0, linears[module].out_features)
        if tensor.ndim > 2 or tensor.ndim <= side or tensor.shape[side] != features:
            yield f"{name} is {list(tensor.shape)}, and the layer has {features} features there"


def open_transformer(folder: Path, base: PretrainedModel) -> PretrainedModel:
    """What a run that trained all weights left: a checkpoint in which a transformer is, and nothing else.

    Raises:
        UsageError: `folder` has none, or it does not fit the `base` model.
    """
    folder = folder.parent if folder.name == "transformer" else folder
    if not (folder / "transformer" / "config.json").is_file():
        is_adapter = (folder / ADAPTER_FILE).is_file()
        raise UsageError(
            "no transformer in this folder",
            where=folder,
            expected="transformer/config.json",
            found="an adapter" if is_adapter else None,
            hint="give it as --lora" if is_adapter else "give a checkpoint of a run that trained all weights",
        )
    trained = PretrainedModel(folder, base.family)
    theirs, ours = (read_json(part.component("transformer") / "config.json") for part in (trained, base))
    for name in ("in_channels", "out_channels", "joint_attention_dim"):
        if theirs.get(name) != ours.get(name):
            raise UsageError(
                "the transformer is another model's",
                where=folder,
                expected=f"{name} {ours.get(name)}",
                found=theirs.get(name),
            )
    return trained

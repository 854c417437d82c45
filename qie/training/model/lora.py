"""Adapters on the transformer: one that is trained, others that stay as they are; saved in the format of diffusers."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import load_file, save_file

from qie.config import AdapterConfig
from qie.config import LoraConfig as LoraSection
from qie.errors import ConfigError, QieError
from qie.paths import local_path
from qie.training.model.lora_file import ADAPTER_FILE, PREFIX, explained, read_lora, scale_of, settings_of
from qie.training.model.sharding import fill, keep_from_ddp, whole

_TRAINED = "default"


def add_lora(
    transformer: QwenImageTransformer2DModel,
    section: LoraSection,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add a trainable adapter, kept in `dtype`, that begins from `seed` or from the weights of another.

    What it begins with is a function of section and seed, and leaves torch's own random numbers as they were.

    Raises:
        ConfigError: a target names no module, and the nearest names are given; or the adapter to continue from is
            missing, or is not such an adapter.
    """
    _require_targets(transformer, section.target_modules)
    if section.init_lora_weights == "orthogonal" and section.r % 2:
        raise ConfigError("an orthogonal start needs an even rank", where="model.lora.r", found=section.r)
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=section.target_modules,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        init_lora_weights="gaussian" if section.init_lora_weights == "gaussian" else True,
    )
    with _seeded(seed):
        try:
            transformer.add_adapter(config, _TRAINED)
        except (ValueError, re.error) as error:
            raise ConfigError(
                "the LoRA targets do not fit the transformer",
                where="model.lora.target_modules",
                found=f"{section.target_modules}: {' '.join(str(error).split())[:200]}",
                hint="an expression has to match the whole names of linear layers, and of nothing else: .*attn.to_q",
            ) from error
        _activate(transformer)
        cast_training_params(transformer, dtype=dtype)
        for layer in transformer.modules():
            if _TRAINED in getattr(layer, "lora_A", {}):
                _start(layer, section)
    if section.continue_from is not None:
        _continue_from(transformer, section, local_path(section.continue_from))


def add_frozen_adapters(transformer: QwenImageTransformer2DModel, adapters: Sequence[AdapterConfig]) -> None:
    """Add adapters that take part in what the transformer computes, each at its scale, but are not trained or saved.

    Before or after `add_lora`. Weights that are all trained take no adapters: see `train_everything`.

    Raises:
        ConfigError: one cannot be read, or has tensors for modules that the transformer lacks.
    """
    modules = {name for name, _ in transformer.named_modules()}
    names = [f"frozen_{number}" for number in range(len(adapters))]
    for number, (name, adapter) in enumerate(zip(names, adapters, strict=True)):
        key = f"model.adapters.{number}.path"
        lora = read_lora(local_path(adapter.path), key)
        if foreign := sorted(tensor for tensor in lora.tensors if tensor.partition(".lora_")[0] not in modules):
            raise ConfigError(
                "the adapter has tensors for modules that the transformer lacks",
                where=lora.file,
                expected="a LoRA of this model",
                found=f"{len(foreign)} of {len(lora.tensors)} tensors, such as {foreign[0]}",
                hint=f"correct {key}",
            )
        # What stays as it is drops nothing.
        metadata = None if lora.metadata is None else lora.metadata | {"lora_dropout": 0.0}
        with _seeded(0), explained("the adapter cannot be added to the transformer", lora.file, key):
            transformer.load_lora_adapter(lora.tensors, prefix=None, adapter_name=name, metadata=metadata)
    if names:
        transformer.set_adapters(names, [adapter.scale for adapter in adapters])
        _activate(transformer)


def adapter_state(transformer: QwenImageTransformer2DModel) -> dict[str, torch.Tensor]:
    """The trained adapter's tensors, whole and on the CPU. Every process has to ask, since each may hold a part."""
    return {name: whole(tensor) for name, tensor in _tensors(transformer).items()}


def save_adapter(
    transformer: QwenImageTransformer2DModel, folder: Path, state: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the adapter in the format of diffusers: `pipe.load_lora_weights(folder)` loads it, scale and kind included.

    Args:
        transformer: has the adapter.
        folder: gets the file.
        state: other values of `adapter_state`, such as averages, or gathered before; None: the adapter's own.
    """
    settings = settings_of(transformer.peft_config[_TRAINED].to_dict())
    metadata = {PREFIX + name: value for name, value in settings.items()}
    tensors = adapter_state(transformer) if state is None else state
    # Not `save_lora_weights`: that adds a second entry, and safetensors writes entries in an order that varies.
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / ADAPTER_FILE,
        {LORA_ADAPTER_METADATA_KEY: json.dumps(metadata, indent=2, sort_keys=True)},
    )


def load_adapter(transformer: QwenImageTransformer2DModel, folder: Path) -> None:
    """Put a saved adapter's weights into the adapter that `transformer` has.

    Raises:
        QieError: the file's tensors are not those of this adapter.
    """
    fill_adapter(_tensors(transformer), folder)


def fill_adapter(mine: Mapping[str, torch.Tensor], folder: Path) -> None:
    """The same, into tensors by their names in a file, such as averages."""
    file = folder / ADAPTER_FILE
    saved = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}
    if difference := _difference(saved, mine):
        raise QieError(
            "the saved adapter has other tensors than this run's",
            where=file,
            expected=f"{len(mine)} tensors of model.lora",
            found=difference,
            hint="resume with the model.lora that the run was started with",
        )
    fill(mine, saved)


def _continue_from(transformer: QwenImageTransformer2DModel, section: LoraSection, path: Path) -> None:
    lora = read_lora(path, "model.lora.continue_from")
    mine = _tensors(transformer)
    ours, theirs = scale_of(transformer.peft_config[_TRAINED].to_dict()), lora.scale
    difference = _difference(lora.tensors, mine)
    if not difference and (theirs is None or abs(ours - theirs) > 1e-6 * abs(ours)):
        difference = f"it is scaled by {'several numbers' if theirs is None else format(theirs, 'g')}"
    if difference:
        rank = section.r**0.5 if section.use_rslora else section.r
        alpha = "" if theirs is None else f"; with this rank, lora_alpha is to be {theirs * rank:g}"
        raise ConfigError(
            "the adapter to continue from is not one of model.lora",
            where=f"model.lora.continue_from, {lora.file}",
            expected=f"{len(mine)} tensors of rank {section.r}, scaled by {ours:g}",
            found=difference,
            hint="set r, target_modules, use_dora and use_rslora of model.lora as they were for that adapter" + alpha,
        )
    with explained("the adapter cannot be continued from", lora.file, "model.lora.continue_from"):
        fill(mine, lora.tensors)


def _difference(saved: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> str | None:
    """How the tensors of two adapters differ, apart from their values; None when they do not."""
    common = sorted(saved.keys() & mine.keys())
    other = [name for name in common if saved[name].shape != mine[name].shape]
    lacking, foreign = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
    if not (other or lacking or foreign):
        return None
    ranks = sorted({tensor.shape[0] for name, tensor in saved.items() if ".lora_A." in name and tensor.ndim})
    found = [f"{len(saved)} tensors, {len(common)} of the same names"]
    found += [f"rank {', '.join(map(str, ranks))}"] if ranks else []
    found += [f"{other[0]} is {list(saved[other[0]].shape)}, not {list(mine[other[0]].shape)}"] if other else []
    found += [f"{lacking[0]} is missing"] if lacking else []
    found += [f"{foreign[0]} is too many"] if foreign else []
    return "; ".join(found)


def as_saved(transformer: QwenImageTransformer2DModel, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values by the names of the trained adapter's parameters, by their names in a file instead: the same memory."""
    return dict(get_peft_model_state_dict(transformer, dict(values), _TRAINED))


def _tensors(transformer: QwenImageTransformer2DModel) -> dict[str, torch.Tensor]:
    """The trained adapter's parameters by their names in a file: the same memory."""
    parameters = {name: tensor.detach() for name, tensor in transformer.named_parameters() if ".lora_" in name}
    return as_saved(transformer, parameters)


def _start(layer: Any, section: LoraSection) -> None:
    """What peft computes in the base layer's dtype, here in the adapter's: a fresh adapter changes nothing, exactly."""
    down, up = layer.lora_A[_TRAINED].weight, layer.lora_B[_TRAINED].weight
    if section.init_lora_weights == "orthogonal":
        # As peft's `orthogonal_init`: A and B lie in the two halves of one orthogonal basis, and so BA is zero.
        basis, _ = torch.linalg.qr(torch.randn(section.r, section.r))
        down.data.copy_((torch.randn(down.shape[1], section.r // 2) @ basis[0::2]).T / 10)
        up.data.copy_(torch.randn(section.r // 2, up.shape[0]).T @ basis[1::2] / 10)
    if section.use_dora:
        weight = dequantize_module_weight(layer.get_base_layer()).to(down.dtype)
        product = layer.scaling[_TRAINED] * (up.data @ down.data)
        layer.lora_magnitude_vector[_TRAINED].weight.data = torch.linalg.norm(weight + product, dim=1).detach()


def _activate(transformer: QwenImageTransformer2DModel) -> None:
    """Let all adapters take part, and train one."""
    names = list(transformer.peft_config)
    transformer.set_adapter(names)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(".lora_" in name and f".{_TRAINED}." in name)
    keep_from_ddp(transformer, [name for name, weight in transformer.named_parameters() if not weight.requires_grad])


def _require_targets(transformer: QwenImageTransformer2DModel, targets: list[str] | str) -> None:
    modules = [name.replace(".base_layer", "") for name, _ in transformer.named_modules()]
    names = {name.rpartition(".")[2] for name in modules} | {"to_out.0"}
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            near = difflib.get_close_matches(target, sorted(names - {""}), n=3, cutoff=0.6)
            raise ConfigError(
                "a LoRA target names no module of the transformer",
                where="model.lora.target_modules",
                expected=f"such as {', '.join(near or ['to_q', 'to_k', 'to_v', 'to_out.0'])}",
                found=target,
            )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within, torch's random numbers on the CPU begin from `seed`, and peft does not warn of what is meant."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
        torch.default_generator.manual_seed(seed)
        yield

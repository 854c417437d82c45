"""Adapters on the transformer: one that is trained and saved, others that stay frozen, one merged into the weights."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.training_utils import cast_training_params
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from qie.config import AdapterConfig
from qie.config import LoraConfig as LoraSection
from qie.errors import ConfigError, QieError, UsageError, one_line
from qie.paths import local_path
from qie.pretrained import PretrainedModel, loading, read_json
from qie.training.model.adapter_file import (
    ADAPTER_FILE,
    PART,
    PEFT_CONFIG,
    PEFT_FILE,
    PEFT_PREFIX,
    PREFIX,
    AdapterFile,
    adapter_in,
    explained_adapter,
    find_adapter,
    kind_of,
    read_adapter,
    require_kind,
    require_layers,
    scale_of,
    settings_of,
)
from qie.training.model.kronecker import use_own_products
from qie.training.model.linear import SameLinear
from qie.training.model.load import load_transformer
from qie.training.model.sharding import all_whole, fill, keep_from_ddp

_TRAINED = "default"
_TRAIN_ONLY = "train_only_"
"""The names of adapters that take part in training alone begin with it."""


def add_lora(
    transformer: QwenImageTransformer2DModel,
    section: LoraSection,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add a trainable adapter, kept in `dtype`, that begins from `seed` or from the weights of another.

    Its first weights are a function of section and seed. torch's own random numbers stay as they were.

    Raises:
        ConfigError: a target names no module, and the nearest names are given; or the adapter to continue from is
            missing, or is not such an adapter.
    """
    _require_targets(transformer, section.target_modules)
    config = _configured(section)
    with _seeded(seed):
        try:
            _add(transformer, config, _TRAINED, "model.lora.kind")
        except (TypeError, ValueError, re.error) as error:
            raise ConfigError(
                "the LoRA targets do not fit the transformer",
                where="model.lora.target_modules",
                found=f"{section.target_modules}: {one_line(error, 200)}",
                hint="an expression must match the full names of linear layers, and nothing else: .*attn.to_q",
            ) from error
        _require_patterns(transformer, section)
        _activate(transformer)
        cast_training_params(transformer, dtype=dtype)
        for layer in transformer.modules():
            if _TRAINED in getattr(layer, "lora_A", {}):
                _initialise(layer, section)
    if section.continue_from is not None:
        _continue_from(transformer, section, local_path(section.continue_from))


def _configured(section: LoraSection) -> PeftConfig:
    common: dict[str, Any] = {
        "r": section.r,
        "target_modules": section.target_modules,
        "rank_pattern": dict(section.rank_pattern),
        "alpha_pattern": dict(section.alpha_pattern),
    }
    if section.kind == "loha":
        return LoHaConfig(**common, alpha=section.lora_alpha)
    if section.kind == "lokr":
        return LoKrConfig(
            **common,
            alpha=section.lora_alpha,
            decompose_both=section.decompose_both,
            decompose_factor=section.decompose_factor or -1,
            init_weights="lycoris",  # the second matrix, not the small first one, is zero
        )
    ranks = {section.r, *section.rank_pattern.values()}
    if section.init_lora_weights == "orthogonal" and any(rank % 2 for rank in ranks):
        raise ConfigError("orthogonal initialization needs an even rank", where="model.lora.r", found=sorted(ranks))
    return LoraConfig(
        **common,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        init_lora_weights="gaussian" if section.init_lora_weights == "gaussian" else True,
    )


def _peft_config(adapter: AdapterFile) -> PeftConfig:
    """Of a LoKr or LoHa. Raises TypeError when its file has a field that this peft does not know."""
    fields = {name: value for name, value in (adapter.settings or {}).items() if name != "peft_type"}
    return {"LOKR": LoKrConfig, "LOHA": LoHaConfig}[adapter.kind](**fields)


def _add(transformer: QwenImageTransformer2DModel, config: PeftConfig, name: str, key: str) -> None:
    """Add an adapter without its values."""
    _require_one_kind(transformer, kind_of(config.to_dict()), key)
    transformer.add_adapter(config, name)
    use_own_products(transformer)


def _require_one_kind(transformer: QwenImageTransformer2DModel, kind: str, key: str) -> None:
    for other in getattr(transformer, "peft_config", {}).values():
        require_kind(kind, kind_of(other.to_dict()), key)


def _require_patterns(transformer: QwenImageTransformer2DModel, section: LoraSection) -> None:
    """Raise ConfigError for a pattern that is of no adapted layer."""
    names = [name for name, layer in transformer.named_modules() if isinstance(layer, BaseTunerLayer)]
    for field in ("rank_pattern", "alpha_pattern"):
        require_layers(getattr(section, field), names, f"model.lora.{field}", "that has an adapter")


def add_frozen_adapters(transformer: QwenImageTransformer2DModel, adapters: Sequence[AdapterConfig]) -> None:
    """Add adapters that are part of the transformer, each at its scale, but are neither trained nor saved.

    Before or after `add_lora`. Weights that are all trained take no adapters: see `train_all_weights`.

    Raises:
        ConfigError: an adapter cannot be read, or does not fit the transformer.
    """
    names = [f"{_TRAIN_ONLY if adapter.train_only else 'frozen_'}{number}" for number, adapter in enumerate(adapters)]
    for number, (name, adapter) in enumerate(zip(names, adapters, strict=True)):
        key = f"model.adapters.{number}.path"
        _attach(transformer, read_adapter(local_path(adapter.path), key), name, key)
    if names:
        transformer.set_adapters(names, [adapter.scale for adapter in adapters])
        _activate(transformer)


def without_train_only(transformer: QwenImageTransformer2DModel) -> AbstractContextManager[None]:
    """Within, the transformer is as its users get it: adapters with `train_only` take no part."""
    return _without(transformer, lambda name: name.startswith(_TRAIN_ONLY))


def without_trained(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Within, a model, perhaps wrapped for several processes, is what it was before training: all but the adapter."""
    return _without(model, lambda name: name == _TRAINED)


@contextmanager
def _without(model: torch.nn.Module, left_out: Callable[[str], bool]) -> Iterator[None]:
    """Within, adapters of some names take no part."""
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer.active_adapters for layer in layers]
    try:
        for layer, names in zip(layers, before, strict=True):
            # Not peft's `set_adapter`, which decides anew what is trained.
            layer._active_adapter = [name for name in names if not left_out(name)]
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            layer._active_adapter = names


def round_adapters(transformer: QwenImageTransformer2DModel) -> None:
    """Compute the products of all adapters in the dtype of their input, as autocast would: their weights are rounded
    for a product, and stay as they are. To be called after the last adapter was added.

    A DoRA computes in the dtype of its weights: it divides by lengths of rows to which it adds small changes.
    """
    for layer in transformer.modules():
        if isinstance(layer, LoraLayer) and not layer.lora_variant:
            layer.cast_input_dtype_enabled = False
            for parts in (layer.lora_A, layer.lora_B):
                for name, linear in list(parts.items()):
                    parts[name] = _RoundedLinear.of(linear)
        elif isinstance(layer, LycorisLayer):
            layer.cast_input_dtype_enabled = False  # which its products heed


class _RoundedLinear(SameLinear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return torch.nn.functional.linear(input, self.weight.to(input.dtype), bias)


def adapter_tensors(
    transformer: QwenImageTransformer2DModel,
    values: Mapping[str, torch.Tensor] | None = None,
    *,
    adapter: str = _TRAINED,
) -> dict[str, torch.Tensor]:
    """The adapter's parameters, by their names in a file: the same memory, perhaps sharded.

    Args:
        transformer: has the adapter.
        values: other tensors by the names of the parameters, such as averages.
        adapter: by default the one that is trained.
    """
    if values is None:
        values = {name: tensor.detach() for name, tensor in transformer.named_parameters() if PART.search(name)}
    return dict(get_peft_model_state_dict(transformer, dict(values), adapter))


def save_adapter(
    transformer: QwenImageTransformer2DModel, folder: Path, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the adapter in diffusers' format: `pipe.load_lora_weights(folder)` loads it, scale and kind included.
    A LoKr or LoHa in peft's: `PeftModel.from_pretrained(pipe.transformer, folder)` loads it.

    Args:
        transformer: has the adapter.
        folder: gets the file.
        tensors: by their names in a file, whole; None: those of the adapter, for which every process has to ask.
    """
    config = transformer.peft_config[_TRAINED].to_dict()
    settings = settings_of(config)
    metadata = {PREFIX + name: value for name, value in settings.items()}
    found = all_whole(adapter_tensors(transformer), wanted=True) if tensors is None else tensors
    if kind_of(config) != "LORA":
        folder.mkdir(parents=True, exist_ok=True)
        save_file({PEFT_PREFIX + name: tensor.contiguous() for name, tensor in found.items()}, folder / PEFT_FILE)
        (folder / PEFT_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return
    # Not `save_lora_weights`: that adds a second entry, and safetensors writes entries in an order that varies.
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {PREFIX + name: tensor.contiguous() for name, tensor in found.items()},
        folder / ADAPTER_FILE,
        {LORA_ADAPTER_METADATA_KEY: json.dumps(metadata, indent=2, sort_keys=True)},
    )


def load_adapter(mine: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fill tensors, by their names in a file, from a checkpoint's adapter: those of `adapter_tensors`, or averages.

    Raises:
        QieError: the file's tensors are not those of this adapter.
    """
    file = adapter_in(folder) or folder / ADAPTER_FILE
    prefix = PREFIX if file.name == ADAPTER_FILE else PEFT_PREFIX
    saved = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    if difference := _difference(saved, mine):
        raise QieError(
            "the saved adapter and this run's have different tensors",
            where=file,
            expected=f"{len(mine)} tensors of model.lora",
            found=difference,
            hint="resume with the model.lora that the run was started with",
        )
    fill(mine, saved)


def _continue_from(transformer: QwenImageTransformer2DModel, section: LoraSection, path: Path) -> None:
    lora = read_adapter(path, "model.lora.continue_from")
    mine = adapter_tensors(transformer)
    ours, theirs = scale_of(transformer.peft_config[_TRAINED].to_dict()), lora.scale
    difference = _difference(lora.tensors, mine) or _other_scale(transformer, lora)
    if difference:
        rank = section.r**0.5 if section.use_rslora else section.r
        alpha = "" if theirs is None else f"; with this rank, lora_alpha has to be {theirs * rank:g}"
        raise ConfigError(
            "the adapter to continue from does not fit model.lora",
            where=f"model.lora.continue_from, {lora.file}",
            expected=f"{len(mine)} tensors of rank {section.r}, scaled by {ours:g}",
            found=difference,
            hint="set kind, r, target_modules, use_dora, use_rslora and the patterns of model.lora as they were for "
            f"that adapter{alpha}",
        )
    with explained_adapter("the adapter cannot be continued from", lora.file, "model.lora.continue_from"):
        fill(mine, lora.tensors)


def _other_scale(transformer: QwenImageTransformer2DModel, lora: AdapterFile) -> str | None:
    """Of the first layer that an adapter of the same tensors scales otherwise; None if there is none."""
    for name, layer in transformer.named_modules():
        ours = layer.scaling.get(_TRAINED) if isinstance(layer, BaseTunerLayer) else None
        if ours is not None and abs(ours - (theirs := lora.scale_at(name))) > 1e-6 * abs(ours):
            return f"it is scaled by {theirs:g}, and not by {ours:g}, at {name}"
    return None


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


def _initialise(layer: Any, section: LoraSection) -> None:
    """Compute first weights in the adapter's dtype, where peft uses the base layer's: a new adapter changes nothing,
    exactly."""
    down, up = layer.lora_A[_TRAINED].weight, layer.lora_B[_TRAINED].weight
    if section.init_lora_weights == "orthogonal":
        # As peft's `orthogonal_init`: A and B lie in the two halves of one orthogonal basis, and so BA is zero.
        rank = len(down)
        basis, _ = torch.linalg.qr(torch.randn(rank, rank))
        down.data.copy_((torch.randn(down.shape[1], rank // 2) @ basis[0::2]).T / 10)
        up.data.copy_(torch.randn(rank // 2, up.shape[0]).T @ basis[1::2] / 10)
    if section.use_dora:
        weight = dequantize_module_weight(layer.get_base_layer()).to(down.dtype)
        product = layer.scaling[_TRAINED] * (up.data @ down.data)
        layer.lora_magnitude_vector[_TRAINED].weight.data = torch.linalg.norm(weight + product, dim=1).detach()


def _activate(transformer: QwenImageTransformer2DModel) -> None:
    """Switch all adapters on, and train one."""
    names = list(transformer.peft_config)
    transformer.set_adapter(names)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(bool(PART.search(name)) and f".{_TRAINED}." in f"{name}.")
    keep_from_ddp(transformer, [name for name, weight in transformer.named_parameters() if not weight.requires_grad])


def _require_targets(transformer: QwenImageTransformer2DModel, targets: list[str] | str) -> None:
    modules = {name.replace(".base_layer", ""): module for name, module in transformer.named_modules()}
    # Of a layer in a list, `to_out.0`, the list's name as well.
    linears = [name for name, module in modules.items() if isinstance(module, (torch.nn.Linear, BaseTunerLayer))]
    ends = list(dict.fromkeys(re.search(r"[^.]*(\.\d+)?$", name)[0] for name in linears))  # type: ignore[index]
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            near = difflib.get_close_matches(target, ends, n=3, cutoff=0.6)
            others = [end for end in ends if end not in near]
            raise ConfigError(
                "a LoRA target names no module of the transformer",
                where="model.lora.target_modules",
                expected=f"such as {', '.join([*near, *others])}",
                found=target,
            )


def _attach(transformer: QwenImageTransformer2DModel, lora: AdapterFile, name: str, key: str) -> None:
    """Load all of an adapter onto the weights: diffusers only warns of tensors that have no place.

    Dropout is not among its settings: an adapter that is not trained drops nothing.
    """
    modules = {name for name, _ in transformer.named_modules()}
    with _seeded(0), explained_adapter("the adapter does not fit this model", lora.file, key):
        if foreign := sorted(tensor for tensor in lora.tensors if PART.split(tensor)[0] not in modules):
            raise ValueError(f"{len(foreign)} of {len(lora.tensors)} tensors have no layer, such as {foreign[0]}")
        if lora.kind == "LORA":
            _require_one_kind(transformer, lora.kind, key)
            transformer.load_lora_adapter(lora.tensors, prefix=None, adapter_name=name, metadata=lora.settings)
        else:
            _add(transformer, _peft_config(lora), name, key)
            set_peft_model_state_dict(transformer, lora.tensors, adapter_name=name)
        if other := sorted(adapter_tensors(transformer, adapter=name).keys() ^ lora.tensors.keys()):
            raise ValueError(f"{len(other)} tensors that only one of both has, such as {other[0]}")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within, torch's random numbers on the CPU begin from `seed`, and peft is silent about what is intended."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        torch.default_generator.manual_seed(seed)
        yield


def merge_adapter(
    pretrained: PretrainedModel, place: Path, output: Path, dtype: torch.dtype | None = None, scale: float = 1.0
) -> None:
    """Write the transformer of `pretrained` with the adapter of `place` (see `find_adapter`) merged into its weights.

    `output` becomes a folder that `QwenImageTransformer2DModel.from_pretrained` loads. It is written aside and renamed.
    The whole transformer is in host memory at once: 41 GB for 20 B parameters in bfloat16. The disk takes as much.

    Args:
        dtype: of the weights; None for that in which they are stored.
        scale: strength of the adapter, as in diffusers' `fuse_lora`.

    Raises:
        UsageError: `output` exists, no adapter is found, or it does not fit the model.
        QieError: the merged weights are not finite, or cannot be written.
    """
    if output.exists():
        raise UsageError("the output exists already", where=output, hint="remove it, or choose another")
    key = "the path of the adapter"
    lora = read_adapter(find_adapter(place), key)
    transformer = load_transformer(pretrained, _dtype_to_merge_in(pretrained.component("transformer"), dtype))
    _attach(transformer, lora, "merged", key)
    _fuse(transformer, lora, scale)
    transformer.unload_lora()
    with _written_aside(output) as partial:
        transformer.save_pretrained(partial, safe_serialization=True)


def _fuse(transformer: QwenImageTransformer2DModel, lora: AdapterFile, scale: float) -> None:
    """As `fuse_lora` of diffusers, but each layer in float32 and rounded once: DoRA divides lengths of rows."""
    for name, layer in transformer.named_modules():
        if isinstance(layer, BaseTunerLayer):
            stored = layer.get_base_layer().weight.dtype
            layer.float()
            layer.scale_layer(scale)
            try:
                layer.merge(safe_merge=True)
            except ValueError as error:
                raise QieError("a merged weight is not finite", where=f"{lora.file}, {name}", found=error) from error
            layer.to(stored)


def _dtype_to_merge_in(folder: Path, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, or that of the transformer in a folder. Raises UsageError if its weights are quantised."""
    how = read_json(folder / "config.json").get("quantization_config")
    found = dtype or _stored_dtype(folder)
    if how or found.itemsize == 1:
        raise UsageError(
            "an adapter cannot be merged into quantised weights, of which small changes are lost",
            where=folder,
            expected="a model as it was released, in bfloat16, float16 or float32",
            found=how.get("quant_method", how) if isinstance(how, dict) else how or found,
            hint="give that as --model, and quantise the merged one" if how else "--dtype bfloat16",
        )
    return found


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of a component's first weight."""
    with loading(folder), safe_open(min(folder.glob("*.safetensors")), framework="pt") as file:
        return file.get_tensor(min(file.keys())).dtype  # type: ignore[no-any-return]


@contextmanager
def _written_aside(output: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `output` when all has gone well and goes away otherwise."""
    partial = output.with_name(f"{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        raise QieError("the merged transformer cannot be written", where=output, found=error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)

"""An adapter in a file: found, read, checked against a model, written for other programs.

**ComfyUI** takes the factors of a linear layer from `<layer>.lora_down.weight` [r, in], `<layer>.lora_up.weight`
[out, r] and `<layer>.alpha`, and adds alpha / r · up · down to its weight (comfyanonymous/ComfyUI
comfy/weight_adapter/lora.py, `LoRAAdapter`). `<layer>` is the name of its own model's weight, which begins with
`diffusion_model.` for any model (comfy/lora.py, `model_lora_keys_unet`); after that prefix, the layers of
comfy/ldm/qwen_image/model.py have the names that diffusers gives them. ComfyUI reads no metadata: of the file in a
checkpoint it would take the factors, but not the scale.

Of **Qwen-Image-2.1** ComfyUI has one layer `img_mlp.gate_up`, the rows of `gate_layer` before those of `proj`; all
others have diffusers' names (comfy/ldm/qwen_image21/model.py, read in a port of it, not in ComfyUI itself).
ai-toolkit and musubi-tuner train that layer. An export for ComfyUI joins its factors, exactly, and reading an adapter
separates them. diffusers does not know the layer: of an adapter of the MLP, no file serves both.

**diffusers** strips the same prefix and multiplies the scale into `lora_down` (loaders/lora_conversion_utils.py,
`_convert_non_diffusers_qwen_lora_to_diffusers`): one file serves both. Of musubi-tuner's names, in which dots are
underscores, it knows those of Qwen-Image alone.

**DoRA** has no such file. ComfyUI divides by the length of the base model's rows, not of the changed ones as DoRA does
(comfy/weight_adapter/base.py, `weight_decompose`), and diffusers drops `dora_scale`: neither would compute what was
trained. A DoRA is exported for diffusers, or merged.

**LoKr and LoHa** lie in peft's own two files, since diffusers has no loader for them but peft. ComfyUI reads their
factors by peft's names, `<layer>.lokr_w1` or `.hada_w1_a`, and takes alpha / r only where a factor is itself a product
(comfy/weight_adapter/lokr.py, loha.py): an export multiplies the scale into the first factor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from diffusers import QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from qie.config import AdapterConfig, Quantization
from qie.errors import ConfigError, QieError, UsageError, one_line
from qie.paths import local_path
from qie.stores import LocalFolder
from qie.training.checkpoint_folders import find_checkpoint

Format = Literal["diffusers", "comfyui"]

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
"""diffusers puts it before the name of a tensor of the transformer."""

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What peft's own loader reads: of qie a LoKr or LoHa, of others a LoRA, too."""
PEFT_PREFIX = "base_model.model."
"""peft puts it before the name of a tensor of the transformer."""

PART = re.compile(r"\.(?=(lora|lokr|hada)_)")
"""Ends the name of a layer, and begins that of a tensor of its adapter."""


def layer_of(name: str) -> str:
    """The layer that a parameter is of, or is an adapter's of: `transformer_blocks.0.attn.to_q`."""
    layer = PART.split(name)[0]
    return layer if layer != name else name.rpartition(".")[0]


def require_layers(patterns: Iterable[str], layers: Sequence[str], key: str, which: str) -> None:
    """Raise ConfigError for a pattern, as peft takes them, that is of none of the layers.

    Args:
        patterns: ends of layers' names, or expressions for them.
        layers: names.
        key: where the patterns stand in the configuration.
        which: of a layer, the words that say which they are.
    """
    for pattern in patterns:
        if not any(get_pattern_key([pattern], layer) == pattern for layer in layers):
            raise ConfigError(
                f"a pattern is of no layer {which}",
                where=key,
                expected=f"the end of a name such as {layers[0]}, or an expression for it",
                found=pattern,
            )


KINDS = {"LORA": "LoRA", "LOKR": "LoKr", "LOHA": "LoHa"}
"""What people call a type of peft's."""


def require_kind(kind: str, expected: str, key: str) -> None:
    """Raise ConfigError unless an adapter named at `key` is of the kind of the others: see `KINDS`."""
    if kind != expected:
        raise ConfigError(
            "adapters of several kinds cannot be on one transformer",
            where=key,
            expected=f"each a {KINDS[expected]}",
            found=f"a {KINDS[kind]}",
            hint="merge one into a copy of the model: qie export --merge writes its transformer/",
        )


_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class AdapterFile:
    """The content of a file.

    Attributes:
        file: where it lies.
        tensors: by their names in the transformer, such as `transformer_blocks.0.attn.to_q.lora_A.weight`.
        metadata: peft's configuration, if the file has it.
    """

    file: Path
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """A key of `KINDS`."""
        return "LORA" if self.metadata is None else kind_of(self.metadata)

    @property
    def settings(self) -> dict[str, Any] | None:
        """See `settings_of`; None when the file has none."""
        return None if self.metadata is None else settings_of(self.metadata)

    @property
    def scale(self) -> float | None:
        """The factor of the product of its matrices; None when it differs from layer to layer.

        Without metadata it is 1: diffusers takes the rank for alpha, and folds other formats' alphas into the weights.
        """
        if self.metadata is None:
            return 1.0
        return None if self.metadata.get("alpha_pattern") else scale_of(self.metadata)

    def alpha_of(self, layer: str, rank: int) -> float:
        """The number that, divided by the rank, is the layer's scale."""
        if self.metadata is None:  # the scale is 1, or was multiplied into the factors
            return float(rank)
        alphas = self.metadata.get("alpha_pattern") or {}
        alpha = float(alphas.get(get_pattern_key(alphas, layer), _alpha_of(self.metadata)))
        return alpha * math.sqrt(rank) if self.metadata.get("use_rslora") else alpha

    def scale_at(self, layer: str) -> float:
        """The factor of the product of a layer's matrices."""
        down = self.tensors.get(layer + _DOWN)
        rank = len(down) if down is not None else _rank_of(self.metadata or {}, layer)
        return self.alpha_of(layer, rank) / rank


_PATTERNS = ("rank_pattern", "alpha_pattern")
_SCALE = ("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias")
_NOT_LORA = ("alpha", "decompose_factor", "decompose_both")
_LAYERS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration of peft that say what the adapter computes, and where; not how it was trained.

    Each release of peft has more fields than the one before, and refuses a file with one that it does not know; so
    fields that are off are left out, too. Empty patterns stay: diffusers 0.35 to 0.39 look them up without asking. Sets
    have no order of their own: sorted, equal adapters are equal files.
    """
    known = {name: config[name] for name in _SCALE + _NOT_LORA + _LAYERS if config.get(name)}
    if (kind := kind_of(config)) != "LORA":
        known["peft_type"] = kind
    known |= {name: config.get(name) or {} for name in _PATTERNS}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in known.items()}


def kind_of(config: Mapping[str, Any]) -> str:
    """The type of a configuration of peft: a key of `KINDS`. Without one it is of a LoRA."""
    return str(getattr(kind := config.get("peft_type") or "LORA", "value", kind))


def scale_of(config: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / √r of rank-stabilised LoRA (arXiv:2312.03732), of a configuration of peft."""
    return float(_alpha_of(config) / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"]))


def _alpha_of(config: Mapping[str, Any]) -> float:
    return float(config["lora_alpha" if kind_of(config) == "LORA" else "alpha"])


def adapter_in(folder: Path) -> Path | None:
    """The adapter's file in a folder such as a checkpoint; None if there is none."""
    return next((folder / name for name in (ADAPTER_FILE, PEFT_FILE) if (folder / name).is_file()), None)


def read_adapter(path: Path, key: str) -> AdapterFile:
    """The adapter in a .safetensors file, or in a folder such as a checkpoint.

    It is one of qie, of diffusers, of peft, or of another program whose format diffusers reads.

    Raises:
        ConfigError: the adapter is missing, or cannot be read; names `key`, the place in the configuration.
    """
    file = adapter_in(path) if path.is_dir() else path
    if file is None or not file.is_file():
        raise ConfigError(
            "no such adapter",
            where=key,
            expected=f"a .safetensors file, or a folder with {ADAPTER_FILE} or {PEFT_FILE}",
            found=path,
        )
    with explained_adapter("the adapter cannot be read", file, key):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        if any(name.endswith("dora_scale") for name in names):
            raise ValueError("a DoRA in a format that diffusers reads only in part")
        parts = [(name, part[1]) for name in names if (part := PART.search(name))]
        if any(name.startswith(PEFT_PREFIX) or part != "lora" for name, part in parts):
            return _read_peft(file)
        dotted = _dotted(names)
        given = {dotted[name]: tensor for name, tensor in load_file(file).items()} if dotted else str(file.parent)
        tensors, metadata = QwenImageEditPipeline.lora_state_dict(
            given, weight_name=file.name, use_safetensors=True, return_lora_metadata=True
        )
        tensors = _separated({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
    if metadata is not None:
        metadata = {name.removeprefix(PREFIX): value for name, value in metadata.items()}
        with explained_adapter("the adapter's metadata cannot be read", file, key):
            scale_of(metadata)
    return AdapterFile(file, tensors, metadata)


_CHANGING_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts of peft's that take a part of the base's weights into the adapter; peft can save them as plain ones."""


def _read_peft(file: Path) -> AdapterFile:
    """An adapter as peft writes it, and `save_adapter` a LoKr or LoHa. Raises ValueError for one of another program."""
    tensors = load_file(file)
    if other := sorted(name for name in tensors if not name.startswith(PEFT_PREFIX)):
        raise ValueError(f"{other[0]} is no name of peft's: a LoKr or LoHa is read from a checkpoint, not as exported")
    config = file.with_name(PEFT_CONFIG)
    if not config.is_file():
        raise ValueError(f"{PEFT_CONFIG}, which says how its factors are scaled, is not beside it")
    metadata = json.loads(config.read_text(encoding="utf-8"))
    if not isinstance(metadata, dict) or kind_of(metadata) not in KINDS:
        raise ValueError(f"{PEFT_CONFIG} is not of a LoRA, LoKr or LoHa")
    scale_of(metadata)
    if str(first := metadata.get("init_lora_weights")).startswith(_CHANGING_BASE):
        raise ValueError(f"init_lora_weights is {first}: it belongs to changed weights of the base, not to the base")
    return AdapterFile(file, {name.removeprefix(PEFT_PREFIX): value for name, value in tensors.items()}, metadata)


_FLAT = "lora_unet_"
_BLOCKS = "transformer_blocks"
_OF_A_BLOCK_21 = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("img_mlp.gate_up", "img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out"),
)
_OTHERS_21 = (
    *("img_in", "txt_in.in_layer", "txt_in.out_layer", "modulation.1", "norm_out.linear", "proj_out"),
    *(f"time_text_embed.timestep_embedder.linear_{n}" for n in (1, 2)),
)
_GATE_UP, _HALVES = ".img_mlp.gate_up", (".img_mlp.gate_layer", ".img_mlp.proj")
"""ComfyUI's layer, and the layers whose rows it holds, in this order."""


def _dotted(names: Sequence[str]) -> dict[str, str] | None:
    """ComfyUI's names for those of musubi-tuner, if all are of layers of Qwen-Image-2.1; None for any other file."""
    of_a_block, others = ({name.replace(".", "_"): name for name in known} for known in (_OF_A_BLOCK_21, _OTHERS_21))
    found = {}
    for name in names:
        flat, _, part = name.partition(".")
        block = re.fullmatch(rf"{_FLAT}{_BLOCKS}_(\d+)_(.+)", flat)
        layer = of_a_block.get(block[2]) if block else others.get(flat.removeprefix(_FLAT))
        if layer is None or not flat.startswith(_FLAT):
            return None
        found[name] = f"diffusion_model.{f'{_BLOCKS}.{block[1]}.' if block else ''}{layer}.{part}"
    return found


def _separated(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, those of ComfyUI's joined layer as two layers, which read their input by the same factor."""
    found = {}
    for name, tensor in tensors.items():
        before, joined, part = name.partition(f"{_GATE_UP}.")
        if not joined:
            found[name] = tensor
            continue
        parts = (tensor, tensor.clone()) if f".{part}" == _DOWN else (half.clone() for half in tensor.chunk(2))
        found |= {f"{before}{layer}.{part}": half for layer, half in zip(_HALVES, parts, strict=True)}
    return found


@contextmanager
def explained_adapter(what: str, file: Path, key: str) -> Iterator[None]:
    """Turn whatever a library raises about an adapter's file into a ConfigError."""
    try:
        yield
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, RuntimeError, SafetensorError) as error:
        found = f"{type(error).__name__}: {one_line(error, 300)}"
        raise ConfigError(what, where=file, found=found, hint=f"correct {key}") from error


def find_adapter(place: Path) -> Path:
    """The adapter's file in a checkpoint, in the latest checkpoint of a run's output folder, or `place` itself.

    Raises:
        UsageError: no adapter is found.
    """
    if place.is_file():
        return place
    if found := adapter_in(place):
        return found
    try:
        latest = find_checkpoint("latest", place)
    except UsageError:
        latest = None
    if latest is None or (found := adapter_in(latest)) is None:
        raise UsageError(
            "no adapter found",
            where=latest or place,
            expected=f"a .safetensors file, or a folder with {ADAPTER_FILE}, {PEFT_FILE} or checkpoint-NNNNNN in it",
            hint="a run that trained all weights has no adapter, but the whole transformer" if latest else None,
        )
    return found


def check_adapters(
    transformer: QwenImageTransformer2DModel,
    adapters: Sequence[AdapterConfig],
    key: str,
    *,
    kind: str | None = None,
    quantize: Quantization | None = None,
) -> None:
    """Raise UsageError when an adapter does not fit the transformer, which needs no weights: see `empty_transformer`.

    Args:
        transformer: without adapters.
        adapters: to be on it together.
        key: where adapters are named, for messages.
        kind: of an adapter that is to be beside them.
        quantize: how the weights will be stored.
    """
    linears = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, torch.nn.Linear)}
    for adapter in adapters:
        lora = read_adapter(local_path(adapter.path), key)
        require_kind(lora.kind, kind or lora.kind, f"{key}: {lora.file}")
        kind = lora.kind
        if quantize == "nf4" and kind == "LOHA":
            raise ConfigError(
                "a LoHa needs the shapes of the weights, which nf4 does not keep",
                where=lora.file,
                expected="model.quantize: null, fp8 or int8",
                found=quantize,
            )
        if faults := list(_misfits(lora, linears)):
            raise UsageError(
                "the adapter does not fit this model",
                where=lora.file,
                expected="a LoRA of this model",
                found=f"{len(faults)} of its {len(lora.tensors)} tensors do not fit; {faults[0]}",
                hint=f"correct {key}",
            )


def _misfits(lora: AdapterFile, linears: dict[str, torch.nn.Linear]) -> Iterator[str]:
    if not lora.tensors:
        yield "it has none"
    for name, tensor in sorted(lora.tensors.items()):
        module, kind, part = PART.split(name)
        if module not in linears:
            yield f"the model has no layer {module}"
        elif kind == "lora":
            reads = part.startswith("lora_A")
            side, features = (1, linears[module].in_features) if reads else (0, linears[module].out_features)
            if tensor.ndim > 2 or tensor.ndim <= side or tensor.shape[side] != features:
                yield f"{name} is {list(tensor.shape)}, and the layer has {features} features on that side"
    if lora.kind != "LORA":
        for layer, parts in _layers(lora.tensors).items():
            found = _size_of_change(parts)
            if layer in linears and found != tuple(linears[layer].weight.shape):
                yield f"it changes {found} numbers of {layer}, which has {tuple(linears[layer].weight.shape)}"


def _size_of_change(parts: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
    """Of a LoKr's or LoHa's layer: rows and columns; None if factors are missing or are no matrices."""
    try:
        if "hada_w1_a" in parts:
            return parts["hada_w1_a"].shape[0], parts["hada_w1_b"].shape[1]
        rows, columns = 1, 1
        for factor in ("lokr_w1", "lokr_w2"):
            whole = parts.get(factor)
            rows *= (parts[f"{factor}_a"] if whole is None else whole).shape[0]
            columns *= (parts[f"{factor}_b"] if whole is None else whole).shape[1]
    except (KeyError, IndexError):
        return None
    return rows, columns


def export_adapter(place: Path, output: Path, format: Format, dtype: torch.dtype | None = None) -> None:
    """Write the adapter of `place` (see `find_adapter`) as one file that other programs load; see the module.

    Args:
        place: also a file of another program, in a format that diffusers reads.
        output: the .safetensors file to write; an existing one is replaced when the new one is complete.
        format: `comfyui` is for ComfyUI and diffusers; `diffusers` keeps names and scale apart, as in a checkpoint.
        dtype: of the factors; None for that in which they are stored.

    Raises:
        UsageError: the adapter is not found, cannot be read, or `format` cannot express it.
        QieError: a factor does not fit into `dtype`.
    """
    if output.suffix != ".safetensors" or output.is_dir():
        raise UsageError("the adapter cannot be written to this path", where=output, expected="a file NAME.safetensors")
    lora = read_adapter(find_adapter(place), "the path of the adapter")
    metadata = {"format": "pt"}
    if format == "comfyui":
        tensors = _comfyui_tensors(lora) if lora.kind == "LORA" else _comfyui_others(lora)
    elif lora.kind != "LORA":
        raise UsageError(
            f"diffusers has no file for a {KINDS[lora.kind]}: it reads one through peft",
            where=lora.file,
            expected="--format comfyui, or --merge",
            hint=f"peft reads {PEFT_FILE} and {PEFT_CONFIG} in the checkpoint; its README.md has the lines",
        )
    else:
        tensors = {PREFIX + name: tensor for name, tensor in lora.tensors.items()}
        if settings := lora.settings:
            prefixed = {PREFIX + name: value for name, value in settings.items()}
            metadata[LORA_ADAPTER_METADATA_KEY] = json.dumps(prefixed, sort_keys=True)
    LocalFolder(output.absolute().parent).write(output.name, save(_cast(tensors, dtype, lora.file), metadata))


def _comfyui_tensors(lora: AdapterFile) -> dict[str, torch.Tensor]:
    layers = [name.removesuffix(_DOWN) for name in lora.tensors if name.endswith(_DOWN)]
    pairs = {layer + end for layer in layers for end in (_DOWN, _UP)}
    if other := sorted(lora.tensors.keys() ^ pairs):
        dora = any("lora_magnitude_vector" in name for name in other)
        raise UsageError(
            "ComfyUI does not compute DoRA as it was trained" if dora else "the adapter is more than pairs of factors",
            where=lora.file,
            expected=f"for each layer {_DOWN[1:]} and {_UP[1:]}, nothing else",
            found=other[0],
            hint="merge it into the model, or export it for diffusers" if dora else None,
        )
    factors = {}
    for layer in layers:
        down, up = lora.tensors[layer + _DOWN], lora.tensors[layer + _UP]
        factors[layer] = _Factors(down, up, lora.alpha_of(layer, down.shape[0]))
    tensors = {}
    for layer, (down, up, alpha) in _with_joined(factors).items():
        tensors[f"diffusion_model.{layer}.lora_down.weight"] = down
        tensors[f"diffusion_model.{layer}.lora_up.weight"] = up
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(alpha)
    return tensors


def _comfyui_others(lora: AdapterFile) -> dict[str, torch.Tensor]:
    """Of a LoKr or LoHa: the factors, of which the first has the scale."""
    assert lora.metadata is not None
    if joined := sorted(name for name in lora.tensors if any(f"{half}." in name for half in _HALVES)):
        raise UsageError(
            f"ComfyUI has one layer where the {KINDS[lora.kind]} has two",
            where=lora.file,
            found=joined[0],
            hint="merge it into the model",
        )
    tensors = {}
    for layer, parts in _layers(lora.tensors).items():
        rank = _rank_of(lora.metadata, layer)
        first = min(parts)
        scaled = parts[first].float() * (lora.alpha_of(layer, rank) / rank)
        for part, tensor in (parts | {first: scaled.to(parts[first].dtype)}).items():
            tensors[f"diffusion_model.{layer}.{part}"] = tensor
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(float(rank))
    return tensors


def _layers(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each layer, by the names that its adapter gives them."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = PART.split(name)
        found.setdefault(layer, {})[part] = tensor
    return found


def _rank_of(metadata: Mapping[str, Any], layer: str) -> int:
    ranks = metadata.get("rank_pattern") or {}
    return int(ranks.get(get_pattern_key(ranks, layer), metadata["r"]))


class _Factors(NamedTuple):
    """Of a layer: alpha / rank · up · down is added to its weight."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / len(self.down)


def _with_joined(factors: Mapping[str, _Factors]) -> dict[str, _Factors]:
    """The factors, those of the layers that ComfyUI has as one joined: the sum of their ranks, each its own rows."""
    found = {}
    for layer, own in factors.items():
        end = next((end for end in _HALVES if layer.endswith(end)), None)
        if end is None:
            found[layer] = own
            continue
        block = layer.removesuffix(end)
        halves = [factors.get(block + name) for name in _HALVES]
        there = [half for half in halves if half is not None]
        scale = max((half.scale for half in there), key=abs) or 1.0
        ups = [torch.zeros_like(own.up[:, :0]) if half is None else half.up * (half.scale / scale) for half in halves]
        down = torch.cat([half.down for half in there])
        up: torch.Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        found[block + _GATE_UP] = _Factors(down, up.to(own.up.dtype), scale * len(down))
    return found


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None, path: Path) -> dict[str, torch.Tensor]:
    """The tensors in `dtype`; alphas, which have no axes, stay as exact as they are."""
    cast = {name: tensor.to(dtype) if dtype and tensor.ndim else tensor for name, tensor in tensors.items()}
    for name, tensor in cast.items():
        if not tensor.isfinite().all():
            raise QieError(
                "a factor of the adapter is not finite",
                where=f"{path}, {name}",
                found=f"absolute values up to {tensors[name].abs().max():.3g}, as {tensor.dtype}",
                hint="bfloat16 has the range of float32" if dtype == torch.float16 else None,
            )
    return cast

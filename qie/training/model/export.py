"""What leaves a run: the adapter as a file for other programs, or merged into the transformer.

**ComfyUI** takes the factors of a linear layer from `<layer>.lora_down.weight` [r, in], `<layer>.lora_up.weight`
[out, r] and `<layer>.alpha`, and adds alpha / r · up · down to its weight (comfyanonymous/ComfyUI
comfy/weight_adapter/lora.py, `LoRAAdapter`). `<layer>` is the name of its own model's weight, which begins with
`diffusion_model.` for any model (comfy/lora.py, `model_lora_keys_unet`), and behind that the layers of
comfy/ldm/qwen_image/model.py are named as diffusers names them. It reads no metadata: of the file in a checkpoint it
would take the factors, but not the scale.

**diffusers** strips the same prefix and multiplies the scale into `lora_down` (loaders/lora_conversion_utils.py,
`_convert_non_diffusers_qwen_lora_to_diffusers`): one file serves both.

**DoRA** has no such file. ComfyUI divides by the length of the base model's rows, not of the changed ones as DoRA does
(comfy/weight_adapter/base.py, `weight_decompose`), and diffusers drops `dora_scale`: neither would paint what was
trained. It is exported for diffusers, or merged.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from qie.errors import QieError, UsageError
from qie.pretrained import PretrainedModel, loading
from qie.stores import LocalFolder
from qie.training.checkpoint import find_checkpoint
from qie.training.model.load import load_transformer
from qie.training.model.lora_file import ADAPTER_FILE, PREFIX, LoraFile, explained, read_lora

Format = Literal["diffusers", "comfyui"]

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_KEY = "the path of the adapter"


def find_adapter(place: Path) -> Path:
    """The adapter's file in a checkpoint, in the latest checkpoint of a run's output folder, or `place` itself.

    Raises:
        UsageError: there is none.
    """
    if place.is_file():
        return place
    if (place / ADAPTER_FILE).is_file():
        return place / ADAPTER_FILE
    try:
        latest = find_checkpoint("latest", place) / ADAPTER_FILE
    except UsageError:
        latest = None
    if latest is None or not latest.is_file():
        raise UsageError(
            "there is no adapter",
            where=latest or place,
            expected=f"a .safetensors file, or a folder with {ADAPTER_FILE} or checkpoint-NNNNNN in it",
            hint="a run that trained all weights has no adapter, but the whole transformer" if latest else None,
        )
    return latest


def export_adapter(place: Path, output: Path, format: Format, dtype: torch.dtype | None = None) -> None:
    """Write the adapter of `place` (see `find_adapter`) as one file that other programs load; see the module.

    Args:
        place: also a file of another program, in a format that diffusers reads.
        output: the .safetensors file to write; one that is there is replaced when the new one is complete.
        format: `comfyui` is for ComfyUI and diffusers; `diffusers` keeps names and scale apart, as in a checkpoint.
        dtype: of the factors; None for that in which they are stored.

    Raises:
        UsageError: there is no adapter, it cannot be read, or `format` cannot express it.
        QieError: a factor does not fit into `dtype`.
    """
    if output.suffix != ".safetensors" or output.is_dir():
        raise UsageError("the adapter cannot be written there", where=output, expected="a file NAME.safetensors")
    lora = read_lora(find_adapter(place), _KEY)
    metadata = {"format": "pt"}
    if format == "comfyui":
        tensors = _comfyui_tensors(lora)
    else:
        tensors = {PREFIX + name: tensor for name, tensor in lora.tensors.items()}
        if settings := lora.settings:
            prefixed = {PREFIX + name: value for name, value in settings.items()}
            metadata[LORA_ADAPTER_METADATA_KEY] = json.dumps(prefixed, sort_keys=True)
    LocalFolder(output.absolute().parent).write(output.name, save(_cast(tensors, dtype, lora.file), metadata))


def merge_adapter(
    pretrained: PretrainedModel, place: Path, output: Path, dtype: torch.dtype | None = None, scale: float = 1.0
) -> None:
    """Write the transformer of `checkpoint` with the adapter of `place` (see `find_adapter`) merged into its weights.

    `output` becomes a folder that `QwenImageTransformer2DModel.from_pretrained` loads. It is written aside and renamed.
    The whole transformer is in host memory at once: 41 GB for 20 B parameters in bfloat16; as much goes to the disk.

    Args:
        dtype: of the weights; None for that in which they are stored.
        scale: strength of the adapter, as in diffusers' `fuse_lora`.

    Raises:
        UsageError: `output` is there already, there is no adapter, or it does not fit the model.
        QieError: the merged weights are not finite, or cannot be written.
    """
    if output.exists():
        raise UsageError("the output is there already", where=output, hint="remove it, or choose another")
    lora = read_lora(find_adapter(place), _KEY)
    transformer = load_transformer(pretrained, dtype or _stored_dtype(pretrained.component("transformer")))
    _attach(transformer, lora)
    _fuse(transformer, lora, scale)
    transformer.unload_lora()
    with _written_aside(output) as partial:
        transformer.save_pretrained(partial, safe_serialization=True)


def _comfyui_tensors(lora: LoraFile) -> dict[str, torch.Tensor]:
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
    tensors = {}
    for layer in layers:
        down, up = lora.tensors[layer + _DOWN], lora.tensors[layer + _UP]
        tensors[f"diffusion_model.{layer}.lora_down.weight"] = down
        tensors[f"diffusion_model.{layer}.lora_up.weight"] = up
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(_alpha(lora, layer, down.shape[0]))
    return tensors


def _alpha(lora: LoraFile, layer: str, rank: int) -> float:
    """What divided by the rank is the layer's scale."""
    if lora.metadata is None:  # the scale is 1, or was multiplied into the factors
        return float(rank)
    alphas = lora.metadata.get("alpha_pattern") or {}
    alpha = float(alphas.get(get_pattern_key(alphas, layer), lora.metadata["lora_alpha"]))
    return alpha * math.sqrt(rank) if lora.metadata.get("use_rslora") else alpha


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None, path: Path) -> dict[str, torch.Tensor]:
    """The tensors in `dtype`; alphas, which have no axes, stay as exact as they are."""
    cast = {name: tensor.to(dtype) if dtype and tensor.ndim else tensor for name, tensor in tensors.items()}
    for name, tensor in cast.items():
        if not tensor.isfinite().all():
            raise QieError(
                "a factor of the adapter is not finite",
                where=f"{path}, {name}",
                found=f"absolute values up to {tensors[name].abs().max():.3g}, as {tensor.dtype}",
                hint="bfloat16 reaches as far as float32" if dtype == torch.float16 else None,
            )
    return cast


def _attach(transformer: QwenImageTransformer2DModel, lora: LoraFile) -> None:
    """Load the adapter beside the weights, all of it: diffusers only warns of tensors that have no place."""
    what = "the adapter does not fit this model"
    modules = {name for name, _ in transformer.named_modules()}
    with explained(what, lora.file, _KEY):
        if foreign := sorted(name for name in lora.tensors if name.partition(".lora_")[0] not in modules):
            raise ValueError(f"{len(foreign)} of {len(lora.tensors)} tensors have no layer, such as {foreign[0]}")
        transformer.load_lora_adapter(lora.tensors, prefix=None, adapter_name="merged", metadata=lora.settings)
        loaded = get_peft_model_state_dict(transformer, adapter_name="merged")
        if other := sorted(loaded.keys() ^ lora.tensors.keys()):
            raise ValueError(f"{len(other)} tensors that only one of both has, such as {other[0]}")


def _fuse(transformer: QwenImageTransformer2DModel, lora: LoraFile, scale: float) -> None:
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


def _stored_dtype(folder: Path) -> torch.dtype:
    """Of the first weight of a component."""
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

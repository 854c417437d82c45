"""Products of tokens with linear layers that may have adapters, in as few products as their inputs allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.nn.functional import linear

from qie.training.model.fp8 import FP8Linear
from qie.training.model.quantize import ScaledLinear


def product(tokens: Tensor, layer: Any) -> Tensor:
    (found,) = products(tokens, layer)
    return found


def products(tokens: Tensor, *layers: Any) -> list[Tensor]:
    """What each of the layers makes of the same tokens. Plain adapters share the product with their A matrices."""
    found: list[Tensor] = []
    downs: list[Tensor] = []
    ups: list[list[Tensor]] = []
    for layer in layers:
        adapters = _plain_adapters(layer, tokens.dtype)
        found.append(layer(tokens) if adapters is None else layer.base_layer(tokens))
        downs += [down for down, _, _ in adapters or []]
        ups.append([up * scale if scale != 1 else up for _, up, scale in adapters or []])
    if not downs:
        return found
    inner = linear(tokens, _joined(downs, 0, tokens.dtype))
    parts = torch.split(inner, [sum(up.shape[1] for up in own) for own in ups], dim=-1)
    return [
        value + linear(part, _joined(own, 1, tokens.dtype)) if own else value
        for value, part, own in zip(found, parts, ups, strict=True)
    ]


def _joined(matrices: Sequence[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    return (torch.cat(list(matrices), dim) if len(matrices) > 1 else matrices[0]).to(dtype)


def _plain_adapters(layer: Any, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, float]] | None:
    """A, B and scale of a layer's active adapters; None if it has others than plain ones, or computes in another dtype.

    Then peft's layer itself is called: with a DoRA, with dropout, or if it is no adapter's layer at all.
    """
    if not isinstance(layer, LoraLayer) or layer.merged or layer.disable_adapters:
        return None
    found = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        rounded = layer.cast_input_dtype_enabled and down.weight.dtype != dtype
        dropping = isinstance(dropout, nn.Dropout) and dropout.training
        if name in layer.lora_variant or rounded or dropping or up.bias is not None:
            return None
        found.append((down.weight, up.weight, layer.scaling[name]))
    return found


def trace_doras(transformer: nn.Module) -> None:
    """Let torch.compile trace DoRAs: peft asks in which module the class of a weight is, and there it stops."""
    for module in transformer.modules():
        if type(module) is DoraLinearLayer:
            module.__class__ = _Dora


class _Dora(DoraLinearLayer):  # type: ignore[misc]
    def forward(self, tokens: Tensor, *, base_layer: Any, **named: Any) -> Tensor:
        if isinstance(base_layer, (ScaledLinear, FP8Linear)):
            weight = base_layer.weight.dequantize()
        elif type(base_layer) is nn.Linear:
            weight = base_layer.weight
        else:
            weight = dequantize_module_weight(base_layer)
        found: Tensor = super().forward(tokens, base_layer=_Weight(weight, base_layer.bias), **named)
        return found


@dataclass
class _Weight:
    """As a layer of HQQ, the one that peft has restore its weight itself."""

    W_q: Tensor
    bias: Tensor | None

    def dequantize(self) -> Tensor:
        return self.W_q

"""LoKr and LoHa: adapters whose change of a weight is no product of two thin matrices.

**LoKr** (Yeh et al. 2023, arXiv:2309.14859, section 3.3) adds the Kronecker product W1 ⊗ W2 of two small matrices, each
perhaps a product of two thinner ones. With in = m·n and out = l·k, an input x as the matrix X [m, n] is changed by
W1 X W2ᵀ, read as a vector: so the change of the whole weight is never made. Of 3,072 × 3,072 numbers that takes 1/27 of
the products, and works on weights of any storage.

**LoHa** (FedPara, arXiv:2108.06098) adds the product, value by value, of two low-rank matrices. Its change has as many
numbers as the weight, and is made in each forward pass.

peft has both, with its names and parameters; here only the products are others, and nothing is drawn: peft's layers
draw a number in each forward pass, to leave an adapter out if it falls below `module_dropout`, and torch.compile stops
there.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import loha, lokr
from peft.tuners.lycoris_utils import LycorisLayer
from torch import Tensor
from torch.nn.functional import linear


def _sum(layer: Any, tokens: Tensor) -> Tensor:
    """What a layer and its active adapters make of tokens."""
    found: Tensor = layer.base_layer(tokens)
    if layer.disable_adapters or layer.merged:
        return found
    for name in layer.active_adapters:
        if name in layer._available_adapters:
            found = found + layer._get_delta_activations(name, tokens)
    return found.to(tokens.dtype)


class LoKrLinear(lokr.layer.Linear):  # type: ignore[misc]
    """peft's layer, which does not make the Kronecker product."""

    forward = _sum

    def _get_delta_activations(self, adapter_name: str, input: Tensor, *_: Any, **__: Any) -> Tensor:
        left, right = (self._matrices(part, adapter_name) for part in ("lokr_w1", "lokr_w2"))
        tokens: Tensor = self._cast_input_dtype(input, left[0].dtype)
        tokens = tokens.view(*tokens.shape[:-1], left[-1].shape[1], right[-1].shape[1])
        for matrix in reversed(right):
            tokens = linear(tokens, matrix.to(tokens.dtype))
        tokens = tokens.transpose(-1, -2)
        for place, matrix in enumerate(reversed(left)):
            scaled = matrix * self.scaling[adapter_name] if place == 0 else matrix
            tokens = linear(tokens, scaled.to(tokens.dtype))
        return tokens.transpose(-1, -2).flatten(-2)

    def inner_widths(self, adapter: str) -> int:
        """How many numbers a token has between the factors, altogether."""
        left, right = (self._matrices(part, adapter) for part in ("lokr_w1", "lokr_w2"))
        rows, found = left[-1].shape[1], 0
        for matrix in reversed(right):
            found += rows * matrix.shape[0]
        return found + sum(right[0].shape[0] * matrix.shape[1] for matrix in left[:-1])

    def _matrices(self, part: str, adapter: str) -> list[Tensor]:
        """Whose product is a factor: itself, or two."""
        whole = getattr(self, part)
        if adapter in whole:
            return [whole[adapter]]
        return [getattr(self, f"{part}_{half}")[adapter] for half in "ab"]


class LoHaLinear(loha.layer.Linear):  # type: ignore[misc]
    """peft's layer, which rounds the change, not each step to it, to the dtype that it computes in."""

    forward = _sum

    def _get_delta_activations(self, adapter_name: str, input: Tensor, *_: Any, **__: Any) -> Tensor:
        change = self.get_delta_weight(adapter_name)
        tokens: Tensor = self._cast_input_dtype(input, change.dtype)
        return linear(tokens, change.to(tokens.dtype))


_OURS: dict[type, type] = {lokr.layer.Linear: LoKrLinear, loha.layer.Linear: LoHaLinear}


def use_own_products(transformer: torch.nn.Module) -> None:
    """Make all such layers of a transformer compute as here."""
    for layer in transformer.modules():
        if isinstance(layer, LycorisLayer) and type(layer) in _OURS:
            layer.__class__ = _OURS[type(layer)]

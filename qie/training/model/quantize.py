"""A frozen base in fewer bits: one byte a weight, or half a byte, under an adapter in full precision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from qie.config import Quantization
from qie.errors import ConfigError
from qie.training.model.fp8 import FP8Linear, computes_in_fp8
from qie.training.model.linear import SameLinear


def quantize_blocks(
    transformer: QwenImageTransformer2DModel,
    quantize: Quantization,
    device: torch.device | None = None,
    *,
    in_host_memory: Collection[int] = (),
    fp8_compute: bool = False,
) -> None:
    """Store the linear layers of the transformer's blocks in fewer bits; for good, since rounding loses the rest.

    fp8 (e4m3) and int8 keep a float32 scale for each row; nf4 keeps one of 8 bits for 64 weights (QLoRA,
    arXiv:2305.14314). They compute in the dtype that the layer had.

    Blocks hold 99.8 % of a released Qwen-Image-Edit's weights, and 98.1 % of Qwen-Image-2.1's. The projections into and
    out of them, the time embedding and the norms stay as they are: they are small, and everything after them depends on
    them. So does everything on the first block's img_mod, which the quantised copies of Qwen-Image that people share
    keep in full precision, too; and on 2.1's one modulation for all blocks, which stands outside them.

    Args:
        transformer: frozen, and not quantised yet.
        quantize: the format of a weight.
        device: layers are quantised there, one by one, and then stay; None: they are quantised where they are. A GPU
            takes seconds, a CPU minutes.
        in_host_memory: the numbers of blocks whose layers go back from there, one by one.
        fp8_compute: layers in fp8 also compute in it, but for those that `computes_in_fp8` leaves out. Theirs are the
            same bytes.

    Raises:
        ConfigError: the library for this format is missing.
    """
    make = _layer_maker(quantize)
    # By their names: a list of the layers would keep those that are replaced, in full precision and on the device.
    for name in [name for name, _ in _linears(transformer)]:
        linear = transformer.get_submodule(name)
        layer = make(linear if device is None else linear.to(device))
        if fp8_compute and quantize == "fp8" and computes_in_fp8(name, linear):
            layer = FP8Linear.of(layer)
        offloaded = device is not None and int(name.split(".")[1]) in in_host_memory
        transformer.set_submodule(name, layer.cpu() if offloaded else layer)
    # diffusers' own mark, by which peft chooses its layer, and parameters are counted.
    transformer.is_loaded_in_4bit = quantize == "nf4"


def is_quantized(transformer: torch.nn.Module) -> bool:
    """Whether `quantize_blocks` changed it."""
    marked = bool(getattr(transformer, "is_loaded_in_4bit", False))
    return marked or any(isinstance(module, (ScaledLinear, FP8Linear)) for module in transformer.modules())


class ScaledLinear(SameLinear):
    """A frozen linear layer whose weight is one of torchao's quantised tensors.

    torchao's own product keeps the weight in full precision for the backward pass, of every layer at once, and so
    loses the memory that quantising saved. This layer restores the weight again when the gradient needs it.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _RestoredProduct.apply(input, self.weight, self.bias)  # type: ignore[no-any-return,no-untyped-call]


class _RestoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        # By torch's own way: from a checkpointed block's forward pass it keeps nothing, offloaded weights above all.
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(input, weight.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        return gradient @ weight.dequantize().to(gradient.dtype), None, None


def _linears(transformer: QwenImageTransformer2DModel) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in transformer.named_modules():
        inside = name.startswith("transformer_blocks.") and not name.startswith("transformer_blocks.0.img_mod.")
        if inside and type(module) is torch.nn.Linear:
            yield name, module


def _layer_maker(quantize: Quantization) -> Callable[[torch.nn.Linear], torch.nn.Linear]:
    try:
        return _four_bits() if quantize == "nf4" else _eight_bits(quantize)
    except ImportError as error:
        raise ConfigError(
            "the library that quantises the transformer is not installed",
            where="model.quantize",
            found=f"{quantize}; {error}",
            hint="pip install qie[quant]",
        ) from error


def _eight_bits(quantize: Quantization) -> Callable[[torch.nn.Linear], torch.nn.Linear]:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    # Otherwise torchao sets options of the whole process, the precision of float32 products among them.
    config = (Float8WeightOnlyConfig if quantize == "fp8" else Int8WeightOnlyConfig)(set_inductor_config=False)

    def make(linear: torch.nn.Linear) -> torch.nn.Linear:
        layer = ScaledLinear.of(linear)
        quantize_(layer, config)
        return layer

    return make


def _four_bits() -> Callable[[torch.nn.Linear], torch.nn.Linear]:
    from bitsandbytes.nn import Linear4bit, Params4bit

    def make(linear: torch.nn.Linear) -> torch.nn.Linear:
        options: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
        layer = Linear4bit(
            linear.in_features, linear.out_features, compute_dtype=linear.weight.dtype, device="meta", **options
        )
        layer.weight = Params4bit(linear.weight.data, requires_grad=False, module=layer, **options)
        layer.bias = linear.bias
        # On some CPUs a forward pass without gradients would store weights again, rounded once more, and for good.
        layer.support_avx512bf16_for_cpu = False
        return layer.to(linear.weight.device)  # type: ignore[no-any-return]  # this quantises it

    return make

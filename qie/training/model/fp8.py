"""Products in FP8: of weights that are stored so, and of inputs and gradients that are rounded for each product."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from qie.errors import ConfigError, one_line
from qie.training.model.linear import SameLinear

E4M3 = torch.float8_e4m3fn

# Modulation scales all that its block computes; the others stay in bf16 in a released FP8 copy of Qwen-Image, after an
# ablation on its images (sgl-project/sglang#23155). The first block: see docs/decisions/0051. In Qwen-Image-2.1 the
# output of the MLP stands in the same place, and reads products of two projections, which grow outliers
# (arXiv:2409.12517); its images were not compared.
_ROUNDS_TOO_MUCH = re.compile(r"\.(img_mod|txt_mod)\.|\.img_mlp\.(net\.2|out)$|transformer_blocks\.0\.")


def require_fp8_products(device: torch.device) -> None:
    """Raise ConfigError unless `device` has what `train.fp8_compute` needs."""
    try:
        # Only torch knows which devices do it, in which of its releases. A CPU does, for tests, and gains nothing.
        some = torch.ones(16, 16, device=device).to(E4M3)
        scales = torch.ones(16, 1, device=device)
        _product(some, scales, some.t(), scales.t(), None, torch.bfloat16, fast=False).isfinite().all().item()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            "this device has no products in FP8",
            where="train.fp8_compute",
            expected="an NVIDIA GPU of compute capability 8.9 or more: Ada, Hopper, Blackwell",
            found=f"{device}; {one_line(error, 200)}",
            hint="set train.fp8_compute to false: the base stays in 8 bits, and computes in more",
        ) from error


def computes_in_fp8(name: str, linear: torch.nn.Linear) -> bool:
    """Whether the layer `name` of the transformer's blocks computes in FP8; the others restore their weights.

    GPUs want sizes that are multiples of 16: all of the released model are.
    """
    return not _ROUNDS_TOO_MUCH.search(name) and linear.in_features % 16 == linear.out_features % 16 == 0


class FP8Linear(SameLinear):
    """A frozen linear layer whose weight is one of torchao's, e4m3 with a scale for each row, and stays so.

    Its input is rounded to e4m3 with a scale for each token, so that an outlier coarsens its own token only; and so is
    the gradient of its output, for that of its input.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.weight, self.bias)  # type: ignore[no-any-return,no-untyped-call]


class _Product(torch.autograd.Function):
    """Plain operations about one product, which torch.compile fuses with what is around them."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        # By torch's own way: from a checkpointed block's forward pass it keeps nothing, offloaded weights above all.
        ctx.save_for_backward(weight)
        tokens, scales = rounded(input.reshape(-1, input.shape[-1]))
        product = _product(tokens, scales, weight.qdata.t(), weight.scale.t(), bias, input.dtype, fast=True)
        return product.view(*input.shape[:-1], product.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        # The sum is over the weight's rows: their scales become part of the gradient, before it is rounded. So one
        # e4m3 weight serves both directions, and the gradient is that of the product that was computed.
        tokens, scales = rounded(gradient.reshape(-1, gradient.shape[-1]) * weight.scale.t())
        product = _backward_product(tokens, scales, weight.qdata, gradient.dtype)
        return product.view(*gradient.shape[:-1], product.shape[-1]), None, None


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in e4m3, and the float32 scale of each, [rows, 1], by which its values have to be multiplied.

    The largest value of a row becomes e4m3's largest, 448. A row of zeros stays one; a row with a NaN or an infinity
    becomes NaN, so that a step that is not finite is noticed.
    """
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True)
    # Not constants of the module: torch.compile fails where two layers read one, taking it for a value that changes.
    scales = (largest.float() / torch.finfo(E4M3).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scales).to(E4M3, memory_format=torch.contiguous_format), scales


def _product(
    rows: Tensor,
    row_scales: Tensor,
    columns: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """`(rows · row_scales) @ (columns · column_scales) + bias`, summed in float32.

    A `fast` product lets a GPU sum in fewer bits, which torchao, too, does in the forward pass alone.
    """
    # Not all GPUs give another dtype.
    out = torch.bfloat16 if rows.device.type == "cuda" else dtype
    options: dict[str, Any] = {"out_dtype": out, "use_fast_accum": fast}
    bias = None if bias is None else bias.to(out)
    return torch._scaled_mm(rows, columns, row_scales, column_scales, bias, **options).to(dtype)


def _transposed_product(tokens: Tensor, scales: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`(tokens · scales) @ weight`.

    GPUs multiply by a matrix whose columns are contiguous. A second copy of all weights would take 11 GB; this one
    lasts for a product, and moves two bytes a weight.
    """
    columns = weight.t().contiguous().t()
    return _product(tokens, scales, columns, scales.new_ones(1, weight.shape[1]), None, dtype, fast=False)


# One operation to torch.compile, which would make some of the copies in the forward pass and keep them until here.
_backward_product = torch.library.custom_op(
    "qie::fp8_backward_product",
    _transposed_product,
    mutates_args=(),
    schema="(Tensor tokens, Tensor scales, Tensor weight, ScalarType dtype) -> Tensor",
)
_backward_product.register_fake(_transposed_product)


@register_flop_formula(torch.ops.qie.fp8_backward_product)
def _flops(tokens: Sequence[int], _: Sequence[int], weight: Sequence[int], *__: Any, **___: Any) -> int:
    return 2 * tokens[0] * weight[0] * weight[1]

"""What the GPU can do: bytes and FLOP a second, in the shapes of the released model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from measuring import Row, absolute, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .bench import Found, Place

RUNS = 5
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def repeated(work: Callable[[], object], place: Place) -> list[float]:
    """Seconds of one, by run of many, so that the host is far ahead of the device."""
    repeats = place.scale.repeats

    def many() -> None:
        for _ in range(repeats):
            work()

    many()
    return [seconds(many) / repeats for _ in range(RUNS)]


def rate(key: str, what: str, amount: float, taken: list[float], unit: str, detail: str = "") -> Row:
    told = f"{1e3 * statistics.median(taken):.3g} ms{f', {detail}' if detail else ''}"
    return absolute(key, what, [amount / one for one in taken], unit, detail=told)


def copy(place: Place) -> Found:
    """Within the device, and from page-locked host memory to it, as offloaded blocks come."""
    count = (1 << 32 if place.gpu else 1 << 16) // 2
    source, target = (torch.zeros(count, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    host = torch.zeros(count // 4, dtype=torch.bfloat16, pin_memory=place.gpu)
    inside = repeated(lambda: target.copy_(source), place)
    there = repeated(lambda: target[: count // 4].copy_(host, non_blocking=True), place)
    return Found(
        [
            rate("copy", "copy within the GPU, bytes read and written", 4 * count / 1e12, inside, " TB/s"),
            rate("copy host", "copy from page-locked host memory", count / 2 / 1e9, there, " GB/s"),
        ],
        {},
    )


def shapes(place: Place) -> dict[str, tuple[int, int, int]]:
    """Rows, inner size and columns of a block's products, image stream of target and control."""
    size = place.scale.size
    width = size.transformer["num_attention_heads"] * size.transformer["attention_head_dim"]
    tokens = 2 * (size.side_px // 16) ** 2
    return {
        "attention's": (tokens, width, width),
        "MLP's first": (tokens, width, 4 * width),
        "MLP's second": (tokens, 4 * width, width),
    }


def products_bf16(place: Place) -> Found:
    rows = []
    for name, (count, inner, columns) in shapes(place).items():
        left = torch.randn(count, inner, device=place.device, dtype=torch.bfloat16)
        right = torch.randn(columns, inner, device=place.device, dtype=torch.bfloat16)
        taken = repeated(lambda left=left, right=right: left @ right.T, place)  # type: ignore[misc]
        tflop, what = 2 * count * inner * columns / 1e12, f"product in bfloat16, {name} {count}×{inner}×{columns}"
        rows.append(rate(f"bf16 {name}", what, tflop, taken, " TFLOP/s"))
    return Found(rows, {})


def products_fp8(place: Place) -> Found:
    """By `torch._scaled_mm` with a scale for each row and column, with and without quantising the left side first."""
    rows = []
    for name, (count, inner, columns) in shapes(place).items():
        full = torch.randn(count, inner, device=place.device, dtype=torch.bfloat16)
        left, scale = quantized(full)
        right, right_scale = quantized(torch.randn(columns, inner, device=place.device, dtype=torch.bfloat16))

        def product(
            left: torch.Tensor,
            scale: torch.Tensor,
            right: torch.Tensor = right,
            right_scale: torch.Tensor = right_scale,
        ) -> torch.Tensor:
            return torch._scaled_mm(
                left, right.T, scale_a=scale, scale_b=right_scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        tflop, size = 2 * count * inner * columns / 1e12, f"{name} {count}×{inner}×{columns}"
        alone = repeated(lambda product=product, left=left, scale=scale: product(left, scale), place)  # type: ignore[misc]
        both = repeated(lambda product=product, full=full: product(*quantized(full)), place)  # type: ignore[misc]
        rows.append(rate(f"fp8 {name}", f"product in FP8, {size}", tflop, alone, " TFLOP/s"))
        what = f"product in FP8 with eager quantising of its input, {size}"
        rows.append(rate(f"fp8 quantised {name}", what, tflop, both, " TFLOP/s"))
    return Found(rows, {})


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """To e4m3 with a scale for each row."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = values.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / largest
    return (values / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


def attention(place: Place, backend: str, masked: bool) -> Found:
    """Forward and backward, of all tokens of a sample; masked as diffusers masks padding."""
    query, key, value = (one.requires_grad_() for one in inputs(place))
    tokens = query.shape[2]
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=place.device)
    mask[..., -10:] = False
    chosen: AbstractContextManager[object] = sdpa_kernel(BACKENDS[backend]) if backend in BACKENDS else nullcontext()
    with chosen:
        return both_ways(
            f"{backend}{' masked' if masked else ''}",
            f"attention, {'torch chooses' if backend == 'native' else backend}{', masked' if masked else ''}",
            lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask if masked else None),
            (query, key, value),
            place,
        )


def varlen(place: Place) -> Found:
    """Of four samples of other lengths, packed."""
    from torch.nn.attention.varlen import varlen_attn  # of newer releases

    _, heads, tokens, width = inputs(place)[0].shape
    lengths = [tokens, tokens - 13, tokens - 6, tokens - 2]
    bounds = torch.tensor([0, *lengths], device=place.device).cumsum(0).int()
    query, key, value = (
        torch.randn(sum(lengths), heads, width, device=place.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def work() -> torch.Tensor:
        found: Any = varlen_attn(query, key, value, bounds, bounds, tokens, tokens)
        return found  # type: ignore[no-any-return]

    share, what = sum(length**2 for length in lengths) / tokens**2, "attention, four samples of other lengths, packed"
    return both_ways("varlen", what, work, (query, key, value), place, share)


def inputs(place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of one sample: text, target and control."""
    size = place.scale.size.transformer
    tokens = 2 * (place.scale.size.side_px // 16) ** 2 + max(place.scale.texts["one"])
    shape = (1, size["num_attention_heads"], tokens, size["attention_head_dim"])
    one, two, three = (torch.randn(shape, device=place.device, dtype=torch.bfloat16) for _ in range(3))
    return one, two, three


def both_ways(
    key: str,
    what: str,
    work: Callable[[], torch.Tensor],
    leaves: tuple[torch.Tensor, ...],
    place: Place,
    samples: float = 1.0,
) -> Found:
    query = inputs(place)[0]
    tflop = 4 * query.shape[2] ** 2 * query.shape[1] * query.shape[3] * samples / 1e12
    out = work()
    gradient = torch.randn_like(out)
    forward = repeated(work, place)
    backward = repeated(lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True), place)
    return Found(
        [
            rate(f"attention {key}", f"{what}, forward", tflop, forward, " TFLOP/s"),
            rate(
                f"attention {key} backward", f"{what}, backward", 2 * tflop, backward, " TFLOP/s", "4 products counted"
            ),
        ],
        {},
    )

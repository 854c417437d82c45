"""How long a training step takes a GPU, not measured: operations, bytes and copies, divided by what GPUs reach."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qie.config import Quantization
from qie.training.datasheets import Datasheet
from qie.training.flops import step_flops
from qie.training.memory import Setup, offloaded_bytes

# Parts of a datasheet's figure that kernels reach: products and attention of the released shapes in bfloat16 (680, and
# 600 forward and 480 backward, of 989 TFLOP/s on an H100), and copies.
_PRODUCTS, _ATTENTION, _ATTENTION_BACKWARD, _MEMORY, _LINK = 0.69, 0.61, 0.49, 0.8, 0.8
# What operations between products read and write, in numbers of the width for each token and block: counted on the
# released shapes, forward and backward, and rounded. Compiled they fuse, into a third or less.
_NUMBERS, _NUMBERS_SINGLE, _FUSED = (100, 160), (120, 210), 0.35
# Bytes to read and write for a quantised weight, before each product that it takes part in.
_RESTORED: dict[Quantization, float] = {"fp8": 19.0, "int8": 11.0, "nf4": 2.5}
_RESTORED_FUSED = 3.0
# With train.fp8_compute: how much faster those products are, rounding included (1,000 TFLOP/s on an H100), their part
# of all, and the part of the weights that is restored as before, for the others.
_FP8_GAIN, _FP8_PRODUCTS, _FP8_RESTORED = 1000 / 680, 0.7, 16 / 36
_FP8_PRODUCTS_SINGLE, _FP8_RESTORED_SINGLE = 0.75, 0.25


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step.

    Attributes:
        products, attention: matrix products outside attention, and attention.
        pointwise: everything between them, which waits for the GPU's memory.
        copies: of offloaded weights, while the GPU computes.
        optimizer: its step.
        mfu: model FLOPs utilisation that this means, 0 to 1.
    """

    products: float
    attention: float
    pointwise: float
    copies: float
    optimizer: float
    mfu: float

    @property
    def total(self) -> float:
        return max(self.products + self.attention + self.pointwise, self.copies) + self.optimizer


def step_time(setup: Setup, datasheet: Datasheet, batches: int = 1) -> StepTime:
    """Seconds of an optimizer step over so many batches, on a GPU that has the memory for it.

    Several processes are counted as one: what they tell each other of a LoRA is little.
    """
    architecture, sequences = setup.architecture, setup.sequences * batches
    checkpointed = len(setup.checkpointed)
    flops = step_flops(
        architecture,
        setup.image_tokens,
        setup.text_tokens,
        all_trained=setup.all_trained,
        checkpointed_blocks=checkpointed,
        keeping_attention=len(setup.keeping_attention),
        target_tokens=setup.target_tokens,
        controls=setup.controls,
        draws=setup.noisy_targets,
        base_passes=setup.base_passes,
    )
    of_base, attention = setup.base_passes, flops.attention
    forward_attention = (1 + of_base) * attention + flops.attention_recomputed
    products = flops.model + flops.recomputed - forward_attention - 2 * attention
    peak, bandwidth = datasheet.tflops * 1e12, datasheet.bandwidth_gb_s * 1e9 * _MEMORY
    passes = (1 + of_base) * architecture.blocks + checkpointed
    forward, backward = _NUMBERS_SINGLE if architecture.single_stream else _NUMBERS
    of_blocks = forward * passes + backward * architecture.blocks
    moved = of_blocks * setup.tokens * architecture.width * setup.value_bytes * (_FUSED if setup.compiled else 1.0)
    restored = _restored_bytes(setup) * (passes + architecture.blocks) / architecture.blocks
    found = StepTime(
        products=sequences * products / (peak * _PRODUCTS) * _share(setup),
        attention=sequences * (forward_attention / _ATTENTION + 2 * attention / _ATTENTION_BACKWARD) / peak,
        pointwise=(sequences * moved + batches * restored) / bandwidth,
        # Once for each forward pass, and once for the recomputation.
        copies=batches * (2 + of_base) * offloaded_bytes(setup) / (datasheet.link_gb_s * 1e9 * _LINK),
        # Weights and states are read and written, gradients read.
        optimizer=setup.parameters.trained * (3 * setup.trained_bytes + 2 * setup.optimizer_bytes) / bandwidth,
        mfu=0.0,
    )
    return replace(found, mfu=sequences * flops.model / found.total / peak)


def _share(setup: Setup) -> float:
    """Of the time that all products would take in bfloat16."""
    part = _FP8_PRODUCTS_SINGLE if setup.architecture.single_stream else _FP8_PRODUCTS
    return 1 - part * (1 - 1 / _FP8_GAIN) if setup.fp8_compute else 1.0


def _restored_bytes(setup: Setup) -> float:
    """Bytes of a pass through all blocks to restore quantised weights."""
    if setup.quantize is None:
        return 0.0
    fused = setup.compiled and setup.quantize != "nf4"
    left = _FP8_RESTORED_SINGLE if setup.architecture.single_stream else _FP8_RESTORED
    part = left if setup.fp8_compute else 1.0
    return part * setup.parameters.matrices * (_RESTORED_FUSED if fused else _RESTORED[setup.quantize])

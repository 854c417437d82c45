"""Several draws of noise over one pass through text and controls, compared with as many samples: FLOPs and time.

    python benchmarks/draws.py [--steps 5] [--runs 5] [--draws 4]

FLOPs are counted for Qwen-Image-2.1's own shape: 32 blocks of width 4,096, 1024², a prompt of 80 tokens, a LoRA of rank
16, attention included; nothing is computed. The peers are as many samples in qie's own forward pass, whose last block
computes little for text and controls, and in diffusers', whose last block is as the others. In a LoRA's step attention,
which draws share least, weighs more than in its forward pass: frozen weights get no gradient. Times are those of a
small transformer of the same kind on this machine, in turn, beside qie's own samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from measuring import Results, absolute, beside, in_turn
from measuring import parser as common
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode

from qie.training.model.single_stream import predict_targets
from qie.training.model.training_forward import use_training_forward

TEXT = 80
BLOCKS, RELEASED = 32, {"num_attention_heads": 32, "context_in_dim": 4096}
SMALL = {"num_layers": 4, "num_attention_heads": 2, "context_in_dim": 64}


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=5)
    made.add_argument("--steps", type=int, default=5, help="timed steps of each in a run")
    made.add_argument("--draws", type=int, default=4)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    draws = options.draws
    for controls in (0, 1, 2, 3):
        for name, counts in zip(("forward pass", "LoRA step"), flops(controls, draws), strict=True):
            shared, own, theirs = counts
            what = f"FLOPs of a {name}, {draws} draws over one prefix, 1024², {controls} controls"
            detail = f"{shared / 1e12:.0f} TFLOP; {shared / own:.3f}× of {draws} samples in qie's forward pass"
            peer = f"{draws} samples in diffusers' forward pass"
            results.add(absolute(f"{name} {controls}", what, [shared / theirs], "×", peer, detail))
    for controls in (1, 3):
        small = transformer_of(SMALL)
        jobs = {
            name: lambda sizes=sizes, small=small, controls=controls: steps(options.steps, small, controls, *sizes)
            for name, sizes in (("shared", (1, draws)), ("apart", (draws, 1)))
        }
        taken = in_turn(jobs, options.runs)
        what = f"{draws} draws over one prefix, {controls} controls, small model"
        results.add(beside(f"time {controls}", what, f"{draws} samples", taken["apart"], taken["shared"]))
    results.save()


def transformer_of(shape: dict[str, int], device: str = "cpu") -> Any:
    """As a training step has it: a LoRA on frozen weights."""
    from diffusers import QwenImage21Transformer2DModel  # which releases before 0.42 lack

    torch.manual_seed(0)
    with torch.device(device):
        transformer = QwenImage21Transformer2DModel(**shape).requires_grad_(False).train()
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        transformer.add_adapter(LoraConfig(r=16, target_modules=targets, init_lora_weights=False))
    use_training_forward(transformer)
    return transformer


def loss(transformer: Any, side: int, controls: int, samples: int, draws: int, device: str) -> torch.Tensor:
    """Of random tokens: `side` is an image's in tokens."""
    with torch.device(device):
        targets, times = torch.randn(samples * draws, side**2, 64), torch.full((samples * draws,), 0.5)
        shown = [torch.randn(samples, side**2, 64)] * controls
        text = torch.randn(samples, TEXT, transformer.config.context_in_dim)
    slots, grids = range(8, 8 + controls), [(1, side, side)] * (controls + 1)
    return predict_targets(transformer, targets, times, shown, text, [TEXT] * samples, slots, grids).square().mean()


def flops(controls: int, draws: int) -> list[tuple[float, float, float]]:
    """Of a forward pass, then of a step, at full size: draws that share; and samples in qie's pass, in diffusers'."""
    shared, apart = ([counted(controls, *sizes, blocks) for blocks in (1, 2, 3)] for sizes in ((1, draws), (draws, 1)))
    found = []
    for (_, two, three), (last, own_two, own_three) in zip(
        zip(*shared, strict=True), zip(*apart, strict=True), strict=True
    ):
        # All blocks between the first and the last are alike, and diffusers' last is one more of them.
        block = own_three - own_two
        own = own_two + (BLOCKS - 2) * block
        found.append((two + (BLOCKS - 2) * (three - two), own, own + block - last))
    return found


def counted(controls: int, samples: int, draws: int, blocks: int) -> tuple[float, float]:
    """FLOPs of a forward pass and of a step at full width, on tensors without memory."""
    transformer = transformer_of({**RELEASED, "num_layers": blocks}, "meta")
    with FlopCounterMode(display=False) as counter:
        found = loss(transformer, 64, controls, samples, draws, "meta")
        forward = counter.get_total_flops()
        found.backward()  # type: ignore[no-untyped-call]
    return float(forward), float(counter.get_total_flops())


def steps(count: int, transformer: Any, controls: int, samples: int, draws: int) -> None:
    for _ in range(count):
        loss(transformer, 16, controls, samples, draws, "cpu").backward()  # type: ignore[no-untyped-call]
        transformer.zero_grad()


if __name__ == "__main__":
    main()

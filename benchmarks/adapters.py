"""What adapters of several kinds add to a linear layer's forward and backward pass: qie's products beside peft's.

python benchmarks/adapters.py [--width 3072] [--tokens 1024] [--rank 16] [--runs 5]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from measuring import Results, beside, figure, in_turn
from measuring import parser as common
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, inject_adapter_in_model

from qie.training.model.kronecker import use_own_products
from qie.training.model.lora import round_adapters


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=5)
    made.add_argument("--width", type=int, default=3072, help="of the layer, both ways")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--rank", type=int, default=16)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    tokens = torch.randn(options.tokens, options.width, requires_grad=True)
    rank = {"r": options.rank, "target_modules": ["0"]}
    kinds: dict[str, tuple[PeftConfig, bool]] = {
        "LoRA": (LoraConfig(**rank), True),
        "LoKr": (LoKrConfig(**rank), True),
        "LoHa": (LoHaConfig(**rank), True),
        "peft's LoKr": (LoKrConfig(**rank), False),
        "peft's LoHa": (LoHaConfig(**rank), False),
    }
    layers = {name: adapted(options.width, config, own=own) for name, (config, own) in kinds.items()}
    jobs = {name: passes(layer, tokens) for name, layer in layers.items()}
    took = in_turn(jobs | {"bare": passes(bare(options.width), tokens)}, options.runs)
    asked = f"{options.width:,} × {options.width:,}, {options.tokens:,} tokens, rank {options.rank}"
    for name, layer in layers.items():
        trained = sum(weight.numel() for weight in layer.parameters() if weight.requires_grad)
        row = beside(
            name,
            f"a layer with a {name.removeprefix(PEFTS)}{' of peft' if PEFTS in name else ''}, {asked}",
            "the layer without",
            took["bare"],
            took[name],
            unit="× the time",
            share=True,
            shown=lambda one: f"{figure(1000 * one)} ms",
            more=f"{trained:,} trained numbers",
        )
        results.add(row)
    results.save()


PEFTS = "peft's "


def bare(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width)).requires_grad_(False)


def adapted(width: int, config: PeftConfig, *, own: bool) -> torch.nn.Module:
    model: torch.nn.Module = inject_adapter_in_model(config, bare(width))
    if own:
        use_own_products(model)
        round_adapters(model)
    return model


def passes(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """Forward and backward, to the input and to the adapter."""

    def run() -> None:
        tokens.grad = None
        model(tokens).sum().backward()

    return run


if __name__ == "__main__":
    main()

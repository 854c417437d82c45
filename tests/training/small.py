"""A transformer of a few narrow blocks, with weights at which every path counts, and inputs for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig

from qie.training.model.kronecker import use_own_products
from qie.training.model.lora import round_adapters
from qie.training.model.quantize import quantize_blocks
from qie.training.model.training_forward import use_training_forward

WIDTH, JOINT, CHANNELS = 32, 24, 16
GRIDS = [(1, 4, 6), (1, 4, 4)]  # target and control, in tokens
IMAGE_TOKENS, TEXT_TOKENS = 40, 7
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def small_config(**changes: Any) -> dict[str, Any]:
    return {
        "num_layers": 6,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": JOINT,
        "in_channels": CHANNELS,
        "out_channels": 4,
        "axes_dims_rope": (4, 6, 6),
        "patch_size": 2,
        **changes,
    }


def small_transformer(lora: bool | PeftConfig = True, **changes: Any) -> QwenImageTransformer2DModel:
    """All weights from one seed. With `lora`, they are frozen under an adapter that does something, or under `lora`."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(**small_config(**changes)).train()
    if lora:
        transformer.requires_grad_(False)
        plain = LoraConfig(r=4, target_modules=LORA_TARGETS, init_lora_weights=False)
        transformer.add_adapter(plain if lora is True else lora)
        use_own_products(transformer)
    return transformer


def inputs(batch: int = 2, text_tokens: int = TEXT_TOKENS, joint: int = JOINT) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, IMAGE_TOKENS, CHANNELS, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text_tokens, joint, generator=generator),
        "timestep": torch.linspace(0.2, 0.8, batch),
        "img_shapes": [GRIDS] * batch,
        "return_dict": False,
    }


def gradients(transformer: QwenImageTransformer2DModel, **changes: Any) -> dict[str, torch.Tensor]:
    """Of every trained parameter that has one, and the output as `output`, for a loss to which every output counts.

    The last block's text goes nowhere, and weights after it have no gradient.
    """
    transformer.zero_grad()
    output = transformer(**{**inputs(), **changes})[0]
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    found = {name: weight.grad.clone() for name, weight in transformer.named_parameters() if weight.grad is not None}
    return {**found, "output": output.detach().clone()}


Kind = Callable[[Any], object]


def lora(name: str = "default", targets: Sequence[str] = LORA_TARGETS, **settings: Any) -> Kind:
    config = LoraConfig(**{"r": 4, "target_modules": list(targets), "init_lora_weights": False, **settings})
    return lambda transformer: transformer.requires_grad_(False).add_adapter(config, name)


def other(config: PeftConfig) -> Kind:
    """An adapter that is no LoRA."""

    def add(transformer: Any) -> None:
        transformer.requires_grad_(False).add_adapter(config)
        use_own_products(transformer)

    return add


LOKR = LoKrConfig(r=2, alpha=3, target_modules=list(LORA_TARGETS), init_weights=False)
LOHA = LoHaConfig(r=2, alpha=30, target_modules=list(LORA_TARGETS), init_weights=False)


def two_adapters(frozen: Sequence[str]) -> Kind:
    """Of other ranks, scales and targets; one is frozen."""

    def add(transformer: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            lora("frozen", frozen, lora_alpha=10)(transformer)
            lora()(transformer)
        transformer.set_adapters(["frozen", "default"], [0.7, 1.3])
        for name, weight in transformer.named_parameters():
            weight.requires_grad_(".default." in name)

    return add


def int8(transformer: Any) -> None:
    pytest.importorskip("torchao")
    quantize_blocks(transformer.requires_grad_(False), "int8")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
        lora()(transformer)


def kinds(everywhere: Sequence[str]) -> dict[str, Kind]:
    """What may be trained of a transformer."""
    return {
        "LoRA": lora(),
        "LoRA everywhere": lora(targets=everywhere, lora_alpha=3),
        "two adapters": two_adapters(everywhere),
        "DoRA": lora(use_dora=True),
        "LoKr": other(LOKR),
        "LoHa": other(LOHA),
        "all weights": lambda transformer: transformer.requires_grad_(True),
        "int8": int8,
    }


def ready(transformer: Any, kind: Kind, *, own: bool, dtype: torch.dtype) -> Any:
    """As a training step has it, in `dtype` already; `own` with the training's forward pass."""
    kind(transformer)
    if dtype != torch.float32:
        round_adapters(transformer)
    if own:
        use_training_forward(transformer)
    return transformer.train()


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference of each tensor, relative to its largest value."""
    assert found.keys() == expected.keys(), "weights without a gradient are not those of diffusers' forward pass"
    largest = {name: float(value.abs().max()) for name, value in expected.items()}
    apart = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    return {name: apart[name] / (largest[name] or 1.0) for name in expected}


class Graphs:
    """A backend of torch.compile that counts graphs, and runs them as they are."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        self.made.append(graph)
        return graph

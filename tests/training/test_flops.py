"""What a step computes agrees with what torch counts, and what a GPU can is known or honestly not."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import attention_backend
from torch.utils.flop_counter import FlopCounterMode

from qie.training.flops import Architecture, peak_flops, step_flops
from qie.training.model.blocks import checkpoint_activations
from tests.training.small import IMAGE_TOKENS, inputs, small_config, small_transformer

REAL = Architecture(60, 24, 128, 64, 64, 3584)


def counted(transformer, given) -> tuple[int, int]:
    """FLOP of the forward and the backward pass of one sample, whose inputs need gradients, too."""
    for name in ("hidden_states", "encoder_hidden_states"):
        given[name].requires_grad_(True)
    with attention_backend("_native_math"):  # torch does not count the CPU's fused attention
        with FlopCounterMode(display=False) as forward:
            output = transformer(**given)[0]
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("all_trained", [False, True])
def test_torch_counts_the_same(all_trained: bool) -> None:
    transformer = small_transformer(lora=False).requires_grad_(all_trained)
    forward, backward = counted(transformer, inputs(batch=1, text_tokens=60))
    flops = step_flops(Architecture.of(transformer.config), IMAGE_TOKENS, 60, all_trained=all_trained)
    assert flops.forward == pytest.approx(forward, rel=0.01)
    # The last block's text goes nowhere: a sixth of a small part.
    assert flops.backward == pytest.approx(backward, rel=0.07)


@pytest.mark.parametrize(("every", "again"), [(1, 6), (2, 3), (4, 2)])
def test_torch_counts_the_same_for_what_is_computed_again(every: int, again: int) -> None:
    transformer = small_transformer(lora=False).requires_grad_(False)
    _, plain = counted(transformer, inputs(batch=1, text_tokens=60))
    checkpoint_activations(transformer, every)
    _, backward = counted(transformer, inputs(batch=1, text_tokens=60))
    architecture = Architecture.of(transformer.config)
    flops = step_flops(architecture, IMAGE_TOKENS, 60, all_trained=False, checkpointed_blocks=again)
    # Recomputing ends when all that is needed was computed: each block's last products are not.
    assert flops.recomputed == pytest.approx(backward - plain, rel=0.2)
    assert flops.model == step_flops(architecture, IMAGE_TOKENS, 60, all_trained=False).model


def test_the_released_model_costs_what_torch_counts_for_it() -> None:
    """Two of its sixty blocks, without memory: on the meta device."""
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(num_layers=2, joint_attention_dim=3584).requires_grad_(False)
        given = {
            "hidden_states": torch.empty(1, 8192, 64),
            "encoder_hidden_states": torch.empty(1, 1408, 3584),
            "timestep": torch.empty(1),
            "img_shapes": [[(1, 64, 64), (1, 64, 64)]],
            "return_dict": False,
        }
        forward, backward = counted(transformer, given)
    flops = step_flops(Architecture.of(transformer.config), 8192, 1408, all_trained=False)
    assert flops.forward == pytest.approx(forward, rel=0.001)
    assert flops.backward == pytest.approx(backward, rel=0.05)


def test_a_step_of_the_released_model_at_9600_tokens() -> None:
    adapter = step_flops(REAL, 8192, 1408, all_trained=False, checkpointed_blocks=60)
    assert adapter.model / 1e12 == pytest.approx(464, abs=2)
    assert (adapter.model + adapter.recomputed) / 1e12 == pytest.approx(662, abs=2)
    everything = step_flops(REAL, 8192, 1408, all_trained=True)
    assert everything.model / adapter.model == pytest.approx(1.28, abs=0.01)


def test_the_architecture_is_read_from_the_config() -> None:
    found = Architecture.of(small_config(zero_cond_t=True))
    assert found == Architecture(6, 2, 16, 16, 16, 24, zero_cond_t=True)
    assert found.width == 32
    with torch.device("meta"):
        assert Architecture.of(QwenImageTransformer2DModel().config) == REAL


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_the_peak_of_common_gpus_is_known(name: str, tflops: float) -> None:
    assert peak_flops(name, torch.bfloat16) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A1000",
        "NVIDIA T4",
        "",
    ],
)
def test_the_peak_of_other_gpus_is_not_made_up(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None


def test_the_peak_in_full_precision_is_not_known() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None

"""What a step computes agrees with what torch counts, and what a GPU can is known or honestly not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode

from qie.training.flops import Architecture, peak_flops, step_flops
from qie.training.model.blocks import checkpoint_activations
from qie.training.model.dual_stream import predict_target
from qie.training.model.single_stream import predict_targets
from qie.training.model.training_forward import use_training_forward
from qie.training.reporting.metrics import Speed
from tests.training.small import GRIDS, IMAGE_TOKENS, LORA_TARGETS, inputs, small_config, small_transformer

REAL = Architecture(60, 24, 128, 64, 64, 3584)
SINGLE = Architecture(32, 32, 128, 64, 64, 4096, gated_mlp=3, patch=1)


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


@pytest.mark.parametrize(("all_trained", "every", "again"), [(True, 0, 0), (False, 1, 6), (False, 4, 2)])
def test_torch_counts_the_same(all_trained: bool, every: int, again: int) -> None:
    transformer = small_transformer(lora=False).requires_grad_(all_trained)
    forward, backward = counted(transformer, inputs(batch=1, text_tokens=60))
    architecture = Architecture.of(transformer.config)
    flops = step_flops(architecture, IMAGE_TOKENS, 60, all_trained=all_trained, checkpointed_blocks=again)
    assert flops.forward == pytest.approx(forward, rel=0.01)
    # The last block's text goes nowhere: a sixth of a small part.
    assert flops.backward == pytest.approx(backward, rel=0.07)
    assert flops.model == flops.forward + flops.backward
    checkpoint_activations(transformer, every)
    _, more = counted(transformer, inputs(batch=1, text_tokens=60))
    # Recomputing ends when all that is needed was computed: each block's last products are not.
    assert flops.recomputed == pytest.approx(more - backward, rel=0.2)


def test_torch_counts_the_same_where_the_target_alone_is_predicted() -> None:
    """A LoRA's base, without the adapter."""
    transformer = small_transformer(lora=False).requires_grad_(False)
    use_training_forward(transformer)
    given = inputs(batch=1, text_tokens=60)
    tokens, text = (given[name].requires_grad_(True) for name in ("hidden_states", "encoder_hidden_states"))
    with attention_backend("_native_math"), FlopCounterMode(display=False) as forward:
        found = predict_target(transformer, tokens, given["timestep"], text, [60], GRIDS)
    with FlopCounterMode(display=False) as backward:
        found.sum().backward()
    target = GRIDS[0][1] * GRIDS[0][2]
    assert found.shape[1] == target
    architecture = Architecture.of(transformer.config)
    flops = step_flops(architecture, IMAGE_TOKENS, 60, all_trained=False, target_tokens=target)
    assert flops.forward == pytest.approx(forward.get_total_flops(), rel=0.01)
    assert flops.backward == pytest.approx(backward.get_total_flops(), rel=0.01)


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
        assert Architecture.of(QwenImageTransformer2DModel().config) == REAL
    flops = step_flops(Architecture.of(transformer.config), 8192, 1408, all_trained=False)
    assert flops.forward == pytest.approx(forward, rel=0.001)
    assert flops.backward == pytest.approx(backward, rel=0.05)

    kept = step_flops(REAL, 8192, 1408, all_trained=False, checkpointed_blocks=60, keeping_attention=20)
    adapter = step_flops(REAL, 8192, 1408, all_trained=False, checkpointed_blocks=60)
    assert adapter.recomputed - kept.recomputed == pytest.approx(20 * 4 * 9600**2 * 3072)
    assert adapter.model / 1e12 == pytest.approx(464, abs=2)
    assert (adapter.model + adapter.recomputed) / 1e12 == pytest.approx(662, abs=2)
    target = {"all_trained": False, "checkpointed_blocks": 60, "target_tokens": 4096}
    lean, one = (step_flops(REAL, 8192, 1408, **target, keeping_attention=keeping) for keeping in (0, 1))
    assert lean.recomputed - one.recomputed == pytest.approx(4 * 9600 * 4096 * 3072)  # the last block's
    assert lean.attention_recomputed == lean.attention
    everything = step_flops(REAL, 8192, 1408, all_trained=True)
    assert everything.model / adapter.model == pytest.approx(1.28, abs=0.01)


def count(compute) -> tuple[int, int]:
    """FLOP of a forward pass on the meta device, and of its backward pass."""
    with torch.device("meta"), attention_backend("_native_math"):
        with FlopCounterMode(display=False) as forward:
            output = compute()
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def block_of_diffusers(controls: int) -> tuple[int, int]:
    """FLOP of diffusers' own block of Qwen-Image-2.1 at 1024²: 9 tokens of text before controls, 80 behind."""
    blocks = pytest.importorskip("diffusers.models.transformers.transformer_qwenimage21")
    ends = [9, *(9 + 4096 * (number + 1) for number in range(controls))]
    segments = [(0, 9, True), *((start, stop, False) for start, stop in itertools.pairwise(ends))]
    segments.append((ends[-1], ends[-1] + 80, True))
    tokens = segments[-1][1] + 4096
    with torch.device("meta"):
        block = blocks.QwenImage21TransformerBlock(4096, 32, 128).requires_grad_(False)
        given = torch.empty(1, tokens, 4096, requires_grad=True), torch.empty(2, 4 * 4096)
        is_target = torch.empty(tokens, dtype=torch.bool)
    return count(lambda: block(*given, target_token_mask=is_target, segments=segments))


def step_of_draws(controls: int, draws: int) -> list[float]:
    """FLOP of qie's forward pass of the released Qwen-Image-2.1 on the same sample, and of its backward pass under a
    LoRA of rank 16: each of its 32 blocks adds as much as the third."""
    kind = pytest.importorskip("diffusers.models.transformers.transformer_qwenimage21").QwenImage21Transformer2DModel

    def counted(blocks: int) -> tuple[int, int]:
        with torch.device("meta"):
            transformer = kind(num_layers=blocks).requires_grad_(False)
            transformer.add_adapter(LoraConfig(r=16, target_modules=LORA_TARGETS))
            use_training_forward(transformer)
            images = [torch.empty(1, 4096, 64) for _ in range(controls)]
            given = torch.empty(draws, 4096, 64), torch.empty(draws), images, torch.empty(1, 89, 4096)
        where = [89], [9 + number for number in range(controls)], [(1, 64, 64)] * (1 + controls)
        return count(lambda: predict_targets(transformer, *given, *where))

    return [two + 30 * (three - two) for two, three in zip(counted(2), counted(3), strict=True)]


@pytest.mark.parametrize("controls", [0, 1, 3])
def test_a_block_of_the_released_single_stream_costs_what_torch_counts_for_it(controls: int) -> None:
    sizes = {"all_trained": False, "target_tokens": 4096, "controls": controls}
    two, three = (step_flops(replace(SINGLE, blocks=count), 4096 * (1 + controls), 89, **sizes) for count in (2, 3))
    forward, backward = block_of_diffusers(controls)
    assert three.forward - two.forward == pytest.approx(forward, rel=1e-4)
    assert three.backward - two.backward == pytest.approx(backward, rel=1e-4)


@pytest.mark.parametrize(("controls", "share"), [(1, 0.65), (3, 0.47)])
def test_four_draws_that_share_text_and_controls_cost_less_than_four_samples(controls: int, share: float) -> None:
    """At full size. A step of a LoRA shares less of its attention, whose backward pass costs twice its forward pass."""
    counted = {draws: step_of_draws(controls, draws) for draws in (1, 4)}
    for draws, (forward, backward) in counted.items():
        sizes = {"all_trained": False, "target_tokens": 4096, "controls": controls, "draws": draws}
        told = step_flops(SINGLE, 4096 * (1 + controls), 89, **sizes)
        assert (told.forward, told.backward) == (pytest.approx(forward, rel=0.01), pytest.approx(backward, rel=0.01))
    plain = [32 * flop for flop in block_of_diffusers(controls)]
    assert counted[4][0] <= share * 4 * plain[0]
    assert sum(counted[4]) <= (share + 0.005) * 4 * sum(plain)
    assert sum(counted[4]) <= (share + 0.015) * 4 * sum(counted[1])  # in qie, whose last block is lean in any case


class Batch(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.pixel_latent)


def test_mfu_counts_the_draws_of_each_sample() -> None:
    with torch.device("meta"):
        latent, text = torch.empty(2, 64, 1, 64, 64), torch.empty(2, 89, 4096)
    batch = Batch(pixel_latent=latent, control_latent=(latent, latent), prompt_embed=text)
    sizes = {"all_trained": False, "target_tokens": 4096, "controls": 2, "draws": 4}
    assert Speed(SINGLE, False, None, 4).flops(batch) == 2 * step_flops(SINGLE, 3 * 4096, 89, **sizes).model


def test_draws_of_a_sample_share_all_but_their_targets() -> None:
    sizes = {"all_trained": False, "target_tokens": 4096, "checkpointed_blocks": 32}
    one, two, four = (step_flops(SINGLE, 8192, 89, **sizes, draws=draws) for draws in (1, 2, 4))
    for part in ("forward", "backward", "recomputed"):
        of_target = getattr(two, part) - getattr(one, part)
        assert getattr(four, part) == pytest.approx(getattr(one, part) + 3 * of_target)
    text = {"all_trained": False, "target_tokens": 4096, "controls": 0}
    alone, shared = (step_flops(SINGLE, 4096, 89, **text, draws=draws).forward for draws in (1, 4))
    assert shared / (4 * alone) == pytest.approx(0.986, abs=0.001)  # without controls there is little to share


def test_the_architecture_is_read_from_the_config() -> None:
    found = Architecture.of(small_config(zero_cond_t=True))
    assert found == Architecture(6, 2, 16, 16, 16, 24, zero_cond_t=True)
    assert found.width == 32
    released = {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 128, "mlp_ratio": 3}
    assert Architecture.of(released | {"patch_size": 1, "in_channels": 64, "context_in_dim": 4096}) == SINGLE


PEAKS = {
    312: ["A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"],
    989: ["H100 80GB HBM3", "H200", "GH200 480GB"],
    756: ["H100 PCIe"],
    835: ["H100 NVL"],
    2250: ["B200"],
    121: ["L4"],
    181: ["L40"],
    362: ["L40S"],
    125: ["A10"],
    70: ["A10G"],
    154.8: ["RTX A6000"],
    364.2: ["RTX 6000 Ada Generation"],
    71: ["GeForce RTX 3090"],
    80: ["GeForce RTX 3090 Ti"],
    165.2: ["GeForce RTX 4090"],
    209.5: ["GeForce RTX 5090"],
    None: [
        *("GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D", "GeForce RTX 4080 SUPER"),
        *("A100-SXM4-40GB MIG 1g.5gb", "H100 80GB HBM3 MIG 3g.40gb", "A1000", "T4"),
    ],
}


@pytest.mark.parametrize("tflops", PEAKS)
def test_the_peak_of_common_gpus_is_known_and_that_of_others_is_not_made_up(tflops: float | None) -> None:
    for name in PEAKS[tflops]:
        found = peak_flops(f"NVIDIA {name}", torch.bfloat16)
        assert found == (None if tflops is None else pytest.approx(tflops * 1e12)), name
        assert peak_flops(f"NVIDIA {name}", torch.float32) is None
    assert peak_flops("AMD Instinct MI300X", torch.bfloat16) == pytest.approx(1307.4e12)
    assert peak_flops("", torch.bfloat16) is None

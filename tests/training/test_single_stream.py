"""Qwen-Image-2.1's training forward gives what diffusers' gives, called for one draw of one sample after another."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch

from qie.training.model.blocks import KeptActivations, checkpoint_activations, compile_blocks, offloaded_blocks
from qie.training.model.fp8 import FP8Linear
from qie.training.model.quantize import quantize_blocks
from qie.training.model.single_stream import predict_targets
from qie.training.model.training_forward import use_training_forward
from tests.training.small import Graphs, Kind, differences, kinds, lora, ready

if not hasattr(diffusers, "QwenImage21Transformer2DModel"):
    pytest.skip("Qwen-Image-2.1 needs diffusers 0.42", allow_module_level=True)

CHANNELS, TEXT = 8, 24
CONTROLS, TARGET = [(1, 4, 6), (1, 2, 4), (1, 4, 4)], (1, 6, 4)
SLOTS = (3, 5, 6)
EVERYWHERE = [
    *("to_q", "to_v", "to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out", "modulation.1"),
    *("img_in", "txt_in.in_layer", "norm_out.linear", "proj_out"),
]
KINDS = kinds(EVERYWHERE)


def small(kind: Kind = KINDS["LoRA"], *, own: bool, dtype: torch.dtype = torch.float32, blocks: int = 3) -> Any:
    """A model of a few blocks, with weights at which every path counts; `own` with the training's forward pass."""
    torch.manual_seed(0)
    transformer = diffusers.QwenImage21Transformer2DModel(
        num_layers=blocks,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=TEXT,
        axes_dims_rope=(4, 6, 6),
    )
    for weight in transformer.parameters():
        torch.nn.init.normal_(weight, std=0.6 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.3)
    transformer.to(dtype)
    return ready(transformer, kind, own=own, dtype=dtype)


@dataclass(frozen=True)
class Given:
    """Inputs of `predict_targets`, of text of these lengths."""

    lengths: Sequence[int]
    controls: int = 1
    draws: int = 1
    dropped: Sequence[int] = ()

    @property
    def grids(self) -> list[tuple[int, int, int]]:
        return [*CONTROLS[: self.controls], TARGET]

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Targets, timesteps, controls, text."""
        random, samples = torch.Generator().manual_seed(1), len(self.lengths)
        controls = [torch.randn(samples, h * w, CHANNELS, generator=random).to(dtype) for _, h, w in self.grids[:-1]]
        text = torch.randn(samples, max(self.lengths), TEXT, generator=random).to(dtype)
        targets = torch.randn(samples * self.draws, 24, CHANNELS, generator=random).to(dtype)
        return targets, torch.rand(samples * self.draws, generator=random).to(dtype), controls, text

    def together(self, transformer: torch.nn.Module) -> torch.Tensor:
        targets, times, controls, text = self.tensors(transformer.dtype)
        without = [number in self.dropped for number in range(len(self.lengths))]
        slots = SLOTS[: self.controls]
        return predict_targets(transformer, targets, times, controls, text, self.lengths, slots, self.grids, without)

    def one_by_one(self, transformer: torch.nn.Module) -> torch.Tensor:
        """Each draw of each sample by diffusers' own forward pass."""
        targets, times, controls, text = self.tensors(transformer.dtype)
        found = []
        for draw in range(len(targets)):
            number, own = draw // self.draws, slice(draw, draw + 1)
            shown = [] if number in self.dropped else [one[number : number + 1] for one in controls]
            words = text[number : number + 1, : self.lengths[number]]
            found.append(theirs(transformer, targets[own], times[own], shown, words, self.grids))
        return torch.cat(found)


def theirs(
    transformer: torch.nn.Module,
    targets: torch.Tensor,
    times: torch.Tensor,
    controls: Sequence[torch.Tensor],
    text: torch.Tensor,
    grids: Sequence[tuple[int, int, int]],
    **others: Any,
) -> torch.Tensor:
    """Diffusers' forward pass, as its pipeline calls it. The embeddings at the slots of images are nobody's."""
    pieces, is_image, start = [], [], 0
    for slot, control in zip(SLOTS, controls, strict=False):
        pieces += [text[:, start:slot], text.new_full((len(text), control.shape[1] // 4, TEXT), 7.0)]
        is_image += [False] * (slot - start) + [True] * (control.shape[1] // 4)
        start = slot
    is_image += [False] * (text.shape[1] - start) + [True] * (targets.shape[1] // 4)
    found = transformer(
        torch.cat([*controls, targets], dim=1),
        encoder_hidden_states=torch.cat([*pieces, text[:, start:]], dim=1),
        timestep=times,
        img_shapes=[[*grids[: len(controls)], grids[-1]]] * len(text),
        img_mask=torch.tensor([is_image] * len(text)),
        **others,
    )
    return found.sample[:, -targets.shape[1] :]


def step(transformer: torch.nn.Module, predicted: torch.Tensor) -> dict[str, torch.Tensor]:
    """The prediction, and each trained weight's gradient, for a loss to which all of the prediction counts."""
    transformer.zero_grad()
    weight = torch.randn(predicted.shape, generator=torch.Generator().manual_seed(2))
    (predicted.float() * weight).sum().backward()
    found = {name: each.grad.float() for name, each in transformer.named_parameters() if each.grad is not None}
    return {**found, "prediction": predicted.detach().float()}


def apart(given: Given, kind: Kind = KINDS["LoRA"]) -> float:
    ours, expected = small(kind, own=True), small(kind, own=False)
    return max(differences(step(ours, given.together(ours)), step(expected, given.one_by_one(expected))).values())


@pytest.mark.parametrize("dropped", [(), (0,)], ids=["controls", "dropped"])
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("lengths", [(9,), (9, 9), (9, 7, 12)], ids=str)
@pytest.mark.parametrize("controls", range(4))
def test_a_batch_and_its_draws_are_what_diffusers_gives_one_by_one(controls, lengths, draws, dropped) -> None:
    """Predictions and gradients, of unequal prompts, several draws, and samples that lose their controls."""
    assert apart(Given(lengths, controls, draws, dropped)) <= 2e-6  # float32, and sums of other orders


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_trained_has_diffusers_gradients(kind: str) -> None:
    assert apart(Given((9, 7), draws=2), KINDS[kind]) <= 2e-6


def test_diffusers_own_padding_moves_a_prediction_and_ours_does_not() -> None:
    """Its rotary positions count padding before the target, though attention does not see it."""
    given, transformer = Given((9, 7)), small(own=False)
    targets, times, controls, text = given.tensors(torch.float32)
    with torch.no_grad():
        alone = given.one_by_one(transformer)
        # Its mask has a place for each token of the text encoder: four of a control's for one.
        is_text = torch.ones(2, 9 + 6, dtype=torch.bool)
        is_text[1, -2:] = False
        padded = theirs(transformer, targets, times, controls, text, given.grids, encoder_hidden_states_mask=is_text)
        ours = given.together(small(own=True))
    spread = alone.std()
    exact, moved = ((found - alone).abs().amax((1, 2)) / spread for found in (ours, padded))
    assert exact.max() < 1e-5 and moved[0] < 1e-5 and moved[1] > 3e-3, "the second sample has two padded tokens"


def test_bfloat16_is_as_near_to_float32_as_diffusers_forward_pass() -> None:
    given, kind = Given((9, 7)), KINDS["LoRA everywhere"]
    exact = small(kind, own=False)
    exact = step(exact, given.one_by_one(exact))
    theirs, ours = (small(kind, own=own, dtype=torch.bfloat16) for own in (False, True))
    far = differences(step(theirs, given.one_by_one(theirs)), exact)
    near = differences(step(ours, given.together(ours)), exact)
    assert sum(near.values()) <= 1.1 * sum(far.values())


def test_other_calls_are_diffusers_own_bit_for_bit_with_its_cache_of_keys_too() -> None:
    """Those of its pipeline, which generates samples in training."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    targets, times, controls, text = Given((9,)).tensors(torch.float32)
    found = []
    with torch.no_grad():
        for own in (False, True):
            transformer, cache = small(own=own), QwenImage21KVCache(3)
            for mode in ("extract", "cached"):
                cached = {"kv_cache": cache, "kv_cache_mode": mode}
                found.append(theirs(transformer, targets, times, controls, text, Given((9,)).grids, **cached))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("kept", [KeptActivations(), KeptActivations(attention=3), KeptActivations(blocks=1)], ids=str)
def test_checkpointed_blocks_give_the_same_bits(kept: KeptActivations) -> None:
    expected, found = (small(own=True) for _ in range(2))
    checkpoint_activations(found, 1, kept=kept)
    for given in (Given((9, 7, 12), draws=2), Given((9,))):
        same = differences(step(found, given.together(found)), step(expected, given.together(expected)))
        assert max(same.values()) == 0


@pytest.mark.parametrize(("every", "offload"), [(0, 1), (1, 2), (2, 3)])
def test_offloaded_blocks_give_the_same_bits_and_what_all_blocks_share_stays_resident(every: int, offload: int) -> None:
    expected, found = (small(KINDS["LoRA everywhere"], own=True) for _ in range(2))
    checkpoint_activations(found, every, offload, torch.device("cpu"))
    given = Given((9, 7), draws=2)
    for _ in range(2):
        same = differences(step(found, given.together(found)), step(expected, given.together(expected)))
        assert max(same.values()) == 0
    away = {name for name, weight in found.named_parameters() if weight.numel() and weight.isnan().all()}
    layers = ["attn.to_k", *(f"attn.{name}.base_layer" for name in ("to_q", "to_v", "to_out.0"))]
    layers += [f"img_mlp.{name}.base_layer" for name in ("proj", "gate_layer", "out")]
    blocks = offloaded_blocks(3, offload)
    assert away == {f"transformer_blocks.{block}.{layer}.weight" for block in blocks for layer in layers}


@pytest.mark.parametrize("how", ["fp8", "int8", "nf4"])
def test_a_quantised_base_keeps_all_that_blocks_share_and_learns_through_the_rest(how: str) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("bitsandbytes")
    transformer = small(lambda found: quantize_blocks(found.requires_grad_(False), how), own=False)
    plain = dict(small(lambda _: None, own=False).named_parameters())
    left = [name for name, weight in transformer.named_parameters() if type(weight) is torch.nn.Parameter]
    assert {name for name in left if not name.startswith("transformer_blocks.")} == {
        name for name in plain if not name.startswith("transformer_blocks.")
    }
    assert all(torch.equal(transformer.get_parameter(name), plain[name]) for name in left if "blocks" not in name)
    layers = [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
    layers += [f"img_mlp.{name}" for name in ("proj", "gate_layer", "out")]
    for block in transformer.transformer_blocks:
        assert all(type(block.get_submodule(layer)) is not torch.nn.Linear for layer in layers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
        lora()(transformer)
    use_training_forward(transformer)
    given = Given((9, 7), draws=2)
    found = step(transformer, given.together(transformer))
    assert all(value.isfinite().all() and value.abs().max() > 0 for value in found.values()) and len(found) > 20


def test_in_fp8_the_first_block_and_the_output_of_the_mlp_restore_their_weights() -> None:
    pytest.importorskip("torchao")
    transformer = small(lambda found: quantize_blocks(found, "fp8", fp8_compute=True), own=False)
    computed = {name for name, module in transformer.named_modules() if isinstance(module, FP8Linear)}
    layers = [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")] + ["img_mlp.proj", "img_mlp.gate_layer"]
    assert computed == {f"transformer_blocks.{block}.{layer}" for block in (1, 2) for layer in layers}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it elsewhere
def test_blocks_compile_whole_without_complex_numbers_and_serve_all_lengths() -> None:
    torch._dynamo.reset()
    expected, found = (small(own=True, blocks=2) for _ in range(2))
    graphs, numbers = Graphs(), []
    compile_blocks(found, graphs)
    for lengths in ((9,), (8,), (13,)):
        given = Given(lengths, draws=2)
        same = differences(step(found, given.together(found)), step(expected, given.together(expected)))
        assert max(same.values()) <= 2e-6
        numbers.append(len(graphs.made))
    assert numbers == [2, 2, 2], "of the first block and of the last, for all lengths"
    values = [node.meta.get("example_value") for graph in graphs.made for node in graph.graph.nodes]
    assert not [value for value in values if isinstance(value, torch.Tensor) and value.is_complex()]

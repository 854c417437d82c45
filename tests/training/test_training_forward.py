"""The training's own forward pass gives what diffusers' gives: predictions and gradients, whatever is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName

from qie.training.model.blocks import KeptActivations, checkpoint_activations, compile_blocks
from qie.training.model.dual_stream import predict_target
from tests.training.small import (
    CHANNELS,
    JOINT,
    Graphs,
    Kind,
    differences,
    inputs,
    kinds,
    lora,
    ready,
    small_transformer,
)

TWO, THREE = [(1, 4, 6), (1, 4, 4)], [(1, 4, 6), (1, 4, 4), (1, 2, 6), (1, 6, 2)]
EVERYWHERE = [
    *("to_q", "to_v", "add_q_proj", "add_k_proj", "to_out.0", "to_add_out"),
    *("img_mod.1", "txt_mod.1", "img_mlp.net.0.proj", "txt_mlp.net.2"),
]
KINDS = kinds(EVERYWHERE)


def made(kind: Kind, *, own: bool, dtype: torch.dtype = torch.float32, **changes: Any) -> QwenImageTransformer2DModel:
    """A model of two blocks; `own` with the training's forward pass."""
    transformer = small_transformer(lora=False, **{"num_layers": 2, **changes}).to(dtype)
    torch.manual_seed(3)
    return ready(transformer, kind, own=own, dtype=dtype)


def step(
    transformer: QwenImageTransformer2DModel, lengths: Sequence[int], grids: Sequence[tuple[int, int, int]] = TWO
) -> dict[str, torch.Tensor]:
    """The prediction, and each trained weight's gradient, for a loss to which all of the prediction counts."""
    generator, dtype = torch.Generator().manual_seed(5), transformer.dtype
    count, sizes = len(lengths), [height * width for _, height, width in grids]
    tokens = torch.randn(count, sum(sizes), CHANNELS, generator=generator).to(dtype)
    text = torch.randn(count, max(lengths), JOINT, generator=generator).to(dtype)
    weight = torch.randn(count, sizes[0], CHANNELS, generator=generator)
    transformer.zero_grad()
    predicted = predict_target(transformer, tokens, torch.linspace(0.2, 0.8, count).to(dtype), text, lengths, grids)
    assert predicted.shape == weight.shape
    (predicted.float() * weight).sum().backward()
    found = {name: each.grad for name, each in transformer.named_parameters() if each.grad is not None}
    return {**{name: grad.float() for name, grad in found.items()}, "prediction": predicted.detach().float()}


@pytest.mark.parametrize("lengths", [(7,), (7, 4, 6)], ids=str)
@pytest.mark.parametrize(("grids", "zero_cond_t"), [(TWO, False), (THREE, False), (THREE, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_prediction_and_gradients_are_those_of_diffusers_forward_pass(kind, grids, zero_cond_t, lengths) -> None:
    expected, found = (
        step(made(KINDS[kind], own=own, zero_cond_t=zero_cond_t), lengths, grids) for own in (False, True)
    )
    assert max(differences(found, expected).values()) <= 2e-6  # float32, and sums of other orders


def test_weights_that_only_the_last_blocks_text_queries_have_get_a_zero_and_what_follows_them_nothing() -> None:
    """As with diffusers: so weight decay acts on the ones, and not on the others."""
    found, last = step(made(KINDS["all weights"], own=True), (7,)), "transformer_blocks.1."
    for name in ("attn.add_q_proj.weight", "attn.add_q_proj.bias", "attn.norm_added_q.weight"):
        assert (found[last + name] == 0).all()
    assert not [name for name in found if name.startswith((f"{last}txt_mlp", f"{last}attn.to_add_out"))]


def test_a_sample_in_a_batch_of_other_lengths_is_computed_as_alone() -> None:
    transformer = made(KINDS["LoRA"], own=True).eval()
    generator = torch.Generator().manual_seed(5)
    tokens, text = (torch.randn(3, *size, generator=generator) for size in ((40, CHANNELS), (9, JOINT)))
    lengths, times = (9, 4, 6), torch.tensor([0.2, 0.5, 0.9])
    with torch.no_grad():
        together = predict_target(transformer, tokens, times, text, lengths, TWO)
        for number, length in enumerate(lengths):
            own = slice(number, number + 1)
            alone = predict_target(transformer, tokens[own], times[own], text[own, :length], [length], TWO)
            torch.testing.assert_close(together[own], alone, rtol=1e-6, atol=1e-6)


def test_a_batch_of_several_lengths_has_no_mask_and_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends such as flash take none."""
    transformer, masks = made(KINDS["LoRA"], own=True), []
    for block in transformer.transformer_blocks:  # not `set_attention_backend`, which sets that of the process
        block.attn.processor._attention_backend = AttentionBackendName("_native_math")
    attention = torch.nn.functional.scaled_dot_product_attention

    def watch(query: torch.Tensor, *others: Any, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        assert not torch.backends.cuda.flash_sdp_enabled(), "that of _native_math"
        masks.append(attn_mask)
        return attention(query, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    step(transformer, (7, 4))
    assert masks == [None] * 4  # two samples in two blocks


def test_blocks_may_keep_the_attention_of_each_sample_and_recompute_the_rest() -> None:
    expected, found = (made(KINDS["LoRA"], own=True) for _ in range(2))
    checkpoint_activations(found, 1, kept=KeptActivations(attention=2))
    for lengths in ((7, 4, 6), (7,)):
        assert max(differences(step(found, lengths), step(expected, lengths)).values()) == 0


def test_adapters_with_dropout_drop_in_training_alone() -> None:
    plain, dropping = (made(lora(lora_dropout=rate), own=True) for rate in (0.0, 0.5))
    expected = step(plain, (7,))["prediction"]
    assert not torch.allclose(step(dropping, (7,))["prediction"], expected)
    assert torch.equal(step(dropping.eval(), (7,))["prediction"], expected)


def test_adapters_may_be_switched_off_and_scaled_afterwards() -> None:
    expected, found = (made(KINDS["two adapters"], own=own) for own in (False, True))
    for change in (
        lambda transformer: transformer.set_adapters(["default"], [0.3]),
        lambda transformer: transformer.disable_adapters(),
    ):
        predictions = []
        for transformer in (expected, found):
            change(transformer)
            transformer.proj_out.requires_grad_(True)
            predictions.append(step(transformer, (7,))["prediction"])
        torch.testing.assert_close(predictions[1], predictions[0], rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_near_to_float32_as_diffusers_forward_pass() -> None:
    kind, lengths = KINDS["LoRA everywhere"], (7, 4)
    exact = step(made(kind, own=False), lengths)
    theirs, ours = (
        differences(step(made(kind, own=own, dtype=torch.bfloat16), lengths), exact) for own in (False, True)
    )
    assert sum(ours.values()) <= 1.1 * sum(theirs.values())
    assert ours["prediction"] <= 1.5 * theirs["prediction"]


def test_other_calls_are_diffusers_own_bit_for_bit() -> None:
    """Those of its pipelines, which generate samples in training."""
    transformer, given = made(KINDS["LoRA"], own=True), inputs(text_tokens=7)
    given["encoder_hidden_states_mask"] = torch.arange(7) < torch.tensor([[7], [4]])
    with torch.no_grad():
        assert torch.equal(transformer(**given)[0], made(KINDS["LoRA"], own=False)(**given)[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it elsewhere
def test_blocks_compile_whole_without_complex_numbers_and_serve_all_lengths_of_a_batch() -> None:
    torch._dynamo.reset()
    expected, found, graphs = made(KINDS["LoRA"], own=False), made(KINDS["LoRA"], own=True), Graphs()
    compile_blocks(found, graphs)
    numbers = []
    for lengths in ((9, 6, 8), (8, 9, 5), (12, 12, 3)):
        assert max(differences(step(found, lengths), step(expected, lengths)).values()) <= 2e-6
        numbers.append(len(graphs.made))
    assert numbers == [2, 2, 2], "of the first block and of the last, for all lengths"
    values = [node.meta.get("example_value") for graph in graphs.made for node in graph.graph.nodes]
    assert not [value for value in values if isinstance(value, torch.Tensor) and value.is_complex()]

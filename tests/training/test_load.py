"""The transformer: called on padded prompts, with an attention backend, and with all its weights trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from qie.config import AdapterConfig
from qie.data.sources import open_source
from qie.errors import ConfigError
from qie.training.model.load import train_all_weights
from qie.training.model.lora import add_frozen_adapters, save_adapter
from tests.training.adapters import batch_of, call, one_batch, trained_adapter, transformer_of


@pytest.fixture(autouse=True)
def _no_backend_stays():
    """diffusers keeps the one that was set for the whole process."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry._active_backend = before


def test_padding_of_prompts_changes_no_prediction(tiny_edit: Path, photos: Path, encoder) -> None:
    """Two samples of one shape and different prompt lengths, alone and together."""
    row = open_source(photos).read(0)
    prompts = ("short", "a much longer instruction than that")
    samples = [encoder.encode(replace(row, prompt=prompt)) for prompt in prompts]
    transformer = transformer_of(tiny_edit)
    together = call(transformer, batch_of(samples))
    alone = torch.cat([call(transformer, batch_of([sample])) for sample in samples])
    assert (alone[0] - alone[1]).abs().max() > 0.05, "the prompts have no effect"
    assert (together - alone).abs().max() < 1e-4 * alone.std()


def test_the_attention_backend_is_the_one_asked_for_and_predicts_the_same(tiny_edit: Path, photos, encoder) -> None:
    batch = one_batch(photos, encoder)
    expected = call(transformer_of(tiny_edit), batch)
    transformer = transformer_of(tiny_edit, attention_backend="_native_math")
    processors = [block.attn.processor for block in transformer.transformer_blocks]
    assert {processor._attention_backend.value for processor in processors} == {"_native_math"}
    # The reference attention: the same in another order of sums.
    assert (call(transformer, batch) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("natve", ["no such", "native"]),  # a slip
        ("flash", ["flash-attn"]),  # its package is not installed
        ("sage", ["does not support training"]),  # it has no gradient, and would train nothing without a word
        ("flash_hub", ["downloads its kernels"]),
    ],
)
def test_an_attention_backend_that_cannot_be_used_is_refused_with_the_reason(tiny_edit: Path, name, words) -> None:
    with pytest.raises(ConfigError) as caught:
        transformer_of(tiny_edit, attention_backend=name)
    assert all(word in str(caught.value) for word in ["model.attention_backend", name, *words])


def test_all_weights_can_be_trained_in_a_dtype_of_their_own(tiny_edit: Path) -> None:
    transformer = transformer_of(tiny_edit)
    assert not any(parameter.requires_grad for parameter in transformer.parameters())
    train_all_weights(transformer, torch.bfloat16)
    assert all(parameter.requires_grad for parameter in transformer.parameters())
    assert {parameter.dtype for parameter in transformer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("kind", "words"), [("fp8", "quantised"), ("nf4", "quantised"), ("adapters", "merge")])
def test_weights_that_are_quantised_or_adapted_are_not_trained_themselves(tiny_edit, tmp_path, kind, words) -> None:
    transformer = transformer_of(tiny_edit, quantize=None if kind == "adapters" else kind)
    if kind == "adapters":
        save_adapter(trained_adapter(tiny_edit, r=2), tmp_path)
        add_frozen_adapters(transformer, [AdapterConfig(path=str(tmp_path))])
    with pytest.raises(ConfigError, match=words):
        train_all_weights(transformer, torch.float32)

"""The transformer: loaded in several ways, and called on batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from qie.config import AdapterConfig, LoraConfig
from qie.data.sources import open_source
from qie.errors import ConfigError
from qie.training.model.load import train_all_weights
from qie.training.model.lora import add_frozen_adapters, add_lora, save_adapter
from tests.training.adapters import batch_of, call, one_batch, transformer_of


@pytest.fixture(autouse=True)
def _no_backend_stays():
    """diffusers keeps the one that was set for the whole process."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry._active_backend = before


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    return one_batch(photos, encoder)


def test_padding_of_prompts_changes_no_prediction(tiny_edit: Path, photos: Path, encoder) -> None:
    """Two samples of one shape and different prompt lengths, alone and together."""
    from dataclasses import replace

    source = open_source(photos)
    row = source.read(0)
    samples = [
        encoder.encode(replace(row, prompt=prompt)) for prompt in ("short", "a much longer instruction than that")
    ]
    transformer = transformer_of(tiny_edit)

    def predict(chosen):
        return call(transformer, batch_of(chosen))

    together = predict(samples)
    alone = torch.cat([predict([sample]) for sample in samples])
    assert (alone[0] - alone[1]).abs().max() > 0.05, "the prompts have no effect"
    assert (together - alone).abs().max() < 1e-4 * alone.std()


def test_the_attention_backend_is_the_one_asked_for_and_predicts_the_same(tiny_edit: Path, batch, monkeypatch) -> None:
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
        ("sage", ["cannot be trained with"]),  # it has no gradient, and would train nothing without a word
        ("flash_hub", ["downloads its program"]),
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


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_quantised_weights_are_not_trained_themselves(tiny_edit: Path, kind) -> None:
    with pytest.raises(ConfigError, match="quantised"):
        train_all_weights(transformer_of(tiny_edit, quantize=kind), torch.float32)


def test_weights_that_adapters_lie_on_are_not_trained_themselves(tiny_edit: Path, tmp_path: Path) -> None:
    source = transformer_of(tiny_edit)
    add_lora(source, LoraConfig(r=2), seed=0)
    save_adapter(source, tmp_path)
    transformer = transformer_of(tiny_edit)
    add_frozen_adapters(transformer, [AdapterConfig(path=str(tmp_path))])
    with pytest.raises(ConfigError, match="merge"):
        train_all_weights(transformer, torch.float32)

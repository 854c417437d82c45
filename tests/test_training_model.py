"""Adapters, and the transformer called on batches."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch

from qie.config import LoraConfig
from qie.data.batches import collate
from qie.data.epoch import PlannedBatch
from qie.data.sources import open_source
from qie.errors import ConfigError, QieError
from qie.pretrained import open_checkpoint
from qie.training.model import add_lora, load_adapter, load_transformer, save_adapter, velocity


def transformer_of(folder: Path):
    return load_transformer(open_checkpoint(str(folder), components=("transformer", "scheduler")), torch.float32)


def trained_adapter(folder: Path, **lora):
    """A transformer whose adapter does something: B matrices start at zero."""
    transformer = transformer_of(folder)
    add_lora(transformer, LoraConfig(**lora), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return transformer.eval()


def call(transformer, batch):
    sigmas = torch.full((len(batch),), 0.5)
    with torch.no_grad():
        return velocity(transformer, batch.pixel_latent, sigmas, batch, batch.prompt_embed, batch.prompt_embeds_mask)


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    source = open_source(photos)
    samples = [encoder.encode(source.read(index)) for index in range(12)]
    shape = samples[0].shape
    same = [sample for sample in samples if sample.shape == shape][:1]
    return collate(same, PlannedBatch((0,), (1.0,))).to(torch.device("cpu"), torch.float32)


def test_diffusers_loads_the_adapter_and_computes_the_same(tiny_edit: Path, batch, tmp_path: Path) -> None:
    # alpha is not r: an adapter without its alpha would be loaded at another strength.
    trained = trained_adapter(tiny_edit, r=4, lora_alpha=10.0)
    save_adapter(trained, tmp_path)

    pipeline = diffusers.QwenImageEditPipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        processor=None,
        transformer=transformer_of(tiny_edit),
    )
    plain = call(pipeline.transformer, batch)
    pipeline.load_lora_weights(tmp_path)
    loaded = call(pipeline.transformer, batch)

    expected = call(trained, batch)
    assert (expected - plain).abs().max() > 0.1, "the adapter does nothing"
    assert torch.equal(loaded, expected)


def test_a_saved_adapter_goes_back_into_a_run(tiny_edit: Path, batch, tmp_path: Path) -> None:
    trained = trained_adapter(tiny_edit, r=4)
    save_adapter(trained, tmp_path)
    fresh = transformer_of(tiny_edit)
    add_lora(fresh, LoraConfig(r=4), seed=9)
    load_adapter(fresh, tmp_path)
    assert torch.equal(call(fresh.eval(), batch), call(trained, batch))


def test_an_adapter_of_another_rank_is_refused(tiny_edit: Path, tmp_path: Path) -> None:
    save_adapter(trained_adapter(tiny_edit, r=4), tmp_path)
    other = transformer_of(tiny_edit)
    add_lora(other, LoraConfig(r=8), seed=0)
    with pytest.raises(QieError, match="other tensors"):
        load_adapter(other, tmp_path)


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(tiny_edit: Path, batch) -> None:
    plain = transformer_of(tiny_edit)
    expected = call(plain, batch)
    add_lora(plain, LoraConfig(r=4), seed=0)
    assert torch.equal(call(plain, batch), expected)
    trainable = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)


@pytest.mark.parametrize("targets", [["to_qq"], ["to_q", "nothing"], "no.*such"])
def test_a_target_that_names_no_module_is_refused_with_near_names(tiny_edit: Path, targets) -> None:
    with pytest.raises(ConfigError) as caught:
        add_lora(transformer_of(tiny_edit), LoraConfig(target_modules=targets), seed=0)
    assert "model.lora.target_modules" in str(caught.value)
    assert "to_q" in str(caught.value)


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
        plan = PlannedBatch(tuple(range(len(chosen))), (1.0,) * len(chosen))
        return call(transformer, collate(chosen, plan).to(torch.device("cpu"), torch.float32))

    together = predict(samples)
    alone = torch.cat([predict([sample]) for sample in samples])
    assert (alone[0] - alone[1]).abs().max() > 0.05, "the prompts have no effect"
    assert (together - alone).abs().max() < 1e-4 * alone.std()

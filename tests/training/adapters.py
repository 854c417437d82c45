"""What tests of the transformer and of its adapters share."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import ProcessorMixin

from qie.config import LoraConfig
from qie.data.batch import collate
from qie.data.plan import PlannedBatch
from qie.data.sources import open_source
from qie.pretrained import open_pretrained
from qie.training.model.load import load_transformer
from qie.training.model.lora import add_lora
from qie.training.model.training_forward import use_training_forward
from qie.training.objective import velocity


def transformer_of(folder: Path, dtype: torch.dtype = torch.float32, **how):
    return load_transformer(open_pretrained(str(folder), components=("transformer", "scheduler")), dtype, **how)


def randomise(transformer, seed: int = 2, spread: float = 0.2):
    """An adapter that does something: B matrices start at zero. Trained weights are drawn again."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * spread
                # DoRA's magnitudes are lengths, about which they vary.
                parameter.copy_(parameter * (1 + noise) if parameter.ndim == 1 else noise)
    return transformer.eval()


def trained_adapter(folder: Path, seed: int = 2, **lora):
    transformer = transformer_of(folder)
    add_lora(transformer, LoraConfig(**lora), seed=1)
    return randomise(transformer, seed)


def base_and_adapted(folder: Path):
    """The model as it was, and with an adapter that has learnt something, both as training calls them."""
    base, model = transformer_of(folder), transformer_of(folder)
    add_lora(model, LoraConfig(r=2), seed=0)
    randomise(model).train()
    use_training_forward(base)
    use_training_forward(model)
    return base, model


def taken_gradients(model) -> dict[str, torch.Tensor]:
    """Those of the trained weights, which are left without."""
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return gradients


def assert_gradients(model, expected: dict[str, torch.Tensor]) -> None:
    """Of each trained weight, up to 1e-6 of the largest."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            assert (expected[name] - weight.grad).abs().max() <= 1e-6 * max(largest, 1), name


def batch_of(samples, dtype: torch.dtype = torch.float32):
    plan = PlannedBatch(tuple(range(len(samples))), (1.0,) * len(samples))
    return collate(samples, plan).to(torch.device("cpu"), dtype)


def one_batch(photos: Path, encoder, count: int = 1, dtype: torch.dtype = torch.float32):
    """The first `count` photographs of the first one's shape."""
    source = open_source(photos)
    samples = [encoder.encode(source.read(index)) for index in range(12)]
    return batch_of([sample for sample in samples if sample.shape == samples[0].shape][:count], dtype)


def call(transformer, batch):
    sigmas = torch.full((len(batch),), 0.5, dtype=batch.pixel_latent.dtype)
    with torch.no_grad():
        return velocity(transformer, batch.pixel_latent, sigmas, batch, batch.prompt_embed, batch.prompt_lengths)


class NoProcessor(ProcessorMixin):
    """What the pipeline of Qwen-Image-2.1 asks of its processor when it is made; the true one needs torchvision."""

    def __init__(self) -> None:
        pass

    tokenizer = type("Tokenizer", (), {"encode": staticmethod(lambda text: [0])})()

    def apply_chat_template(self, *_: object, **__: object) -> list[list[int]]:
        return [[0]]

"""Collating: what the memory of batches promises to those who hold them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from qie.buffer_pool import ALIGNMENT, BufferPool
from qie.data.batch import collate
from qie.data.plan import PlannedBatch
from qie.types import Batch, Sample
from tests.builders import make_sample

TOKENS = 2048


def a_sample(number: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float16) -> Sample:
    """Large enough for memory that is used again."""
    random = torch.Generator().manual_seed(number)
    return replace(
        make_sample(number),
        prompt_embed=torch.randn(tokens, 128, generator=random).to(dtype),
        prompt_embeds_mask=torch.ones(tokens, dtype=torch.bool),
    )


def batch_of(*samples: Sample) -> Batch:
    return collate(samples, PlannedBatch(tuple(range(len(samples))), (1.0,) * len(samples)))


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.prompt_embed, batch.empty_tail, batch.pixel_latent, *batch.control_latent]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_batch_is_a_copy_of_its_samples_with_zeros_behind_shorter_prompts(dtype: torch.dtype) -> None:
    long, short = a_sample(0, dtype=dtype), a_sample(1, TOKENS - 3, dtype)
    batch = batch_of(long, short)
    assert torch.equal(batch.prompt_embed[0], long.prompt_embed)
    assert torch.equal(batch.prompt_embed[1, :-3], short.prompt_embed)
    assert not batch.prompt_embed[1, -3:].any()
    for number, sample in enumerate((long, short)):
        assert torch.equal(batch.pixel_latent[number], sample.pixel_latent)
        assert all(map(torch.equal, [latents[number] for latents in batch.control_latent], sample.control_latent))
        assert torch.equal(batch.empty_tail[number], sample.empty_tail)
    batch.prompt_embed.zero_()
    assert long.prompt_embed.any()


def test_a_sample_whose_memory_is_its_own_is_not_copied_into_a_batch_of_one_and_only_there() -> None:
    own = [replace(a_sample(number), own=True) for number in range(2)]
    alone, together = batch_of(own[0]), batch_of(*own)
    assert [tensor.data_ptr() for tensor in tensors(alone)] == [
        tensor.data_ptr()
        for tensor in (own[0].prompt_embed, own[0].empty_tail, own[0].pixel_latent, *own[0].control_latent)
    ]
    assert together.prompt_embed.data_ptr() != own[0].prompt_embed.data_ptr()
    copied = batch_of(replace(own[0], own=False))
    for one, other in zip(tensors(alone), tensors(copied), strict=True):
        assert torch.equal(one, other) and one.shape == other.shape and one.is_contiguous()


def test_no_two_batches_that_are_held_share_memory_and_each_tensor_is_aligned() -> None:
    held = [batch_of(a_sample(number)) for number in range(3)]
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for batch in held for tensor in tensors(batch)
    )
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert not any(start % ALIGNMENT for start, _ in spans)


def test_memory_is_used_again_only_when_the_last_tensor_of_its_batch_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.data.batch.BUFFERS", BufferPool())  # without what other tests left
    batch = batch_of(a_sample(0))
    kept, place = batch.pixel_latent, batch.prompt_embed.data_ptr()
    expected = kept.clone()
    del batch
    meanwhile = batch_of(a_sample(1))
    assert meanwhile.prompt_embed.data_ptr() != place
    assert torch.equal(kept, expected)
    del kept
    assert batch_of(a_sample(2)).prompt_embed.data_ptr() == place

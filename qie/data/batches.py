"""Samples of one shape to a batch: every tensor is copied once, from where it lies into the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qie.data.epoch import PlannedBatch
from qie.types import Batch, Sample


def collate(samples: Sequence[Sample], planned: PlannedBatch, *, pinned: bool = False) -> Batch:
    """The batch of samples of one shape.

    Args:
        samples: in the order of `planned`.
        planned: positions and weights.
        pinned: in page-locked memory, from which a GPU copies while the host goes on. torch keeps such memory when a
            batch is gone, for the next one.
    """
    prompts = [sample.prompt_embed for sample in samples]
    prompt = _room(prompts[0], (len(samples), max(map(len, prompts)), prompts[0].shape[1]), pinned)
    for slot, embed in zip(prompt, prompts, strict=True):
        slot[: len(embed)].copy_(embed)
        slot[len(embed) :].zero_()
    empty_lengths = [sample.shared_prefix + len(sample.empty_tail) for sample in samples]
    empty = _room(prompts[0], (len(samples), max(empty_lengths), prompts[0].shape[1]), pinned)
    for slot, sample, length in zip(empty, samples, empty_lengths, strict=True):
        slot[: sample.shared_prefix].copy_(sample.prompt_embed[: sample.shared_prefix])
        slot[sample.shared_prefix : length].copy_(sample.empty_tail)
        slot[length:].zero_()
    controls = zip(*(sample.control_latent for sample in samples), strict=True)
    return Batch(
        keys=tuple(sample.key for sample in samples),
        indices=planned.positions,
        weight=torch.tensor(planned.weights),
        pixel_latent=_stacked([sample.pixel_latent for sample in samples], pinned),
        control_latent=tuple(_stacked(latents, pinned) for latents in controls),
        prompt_embed=prompt,
        prompt_embeds_mask=_mask(list(map(len, prompts))),
        empty_prompt_embed=empty,
        empty_prompt_embeds_mask=_mask(empty_lengths),
        loss_mask=_loss_mask(samples),
    )


def _room(like: torch.Tensor, size: tuple[int, ...], pinned: bool) -> torch.Tensor:
    return torch.empty(size, dtype=like.dtype, device=like.device, pin_memory=pinned and like.device.type == "cpu")


def _stacked(tensors: Sequence[torch.Tensor], pinned: bool) -> torch.Tensor:
    return torch.stack(list(tensors), out=_room(tensors[0], (len(tensors), *tensors[0].shape), pinned))


def _mask(lengths: list[int]) -> torch.Tensor | None:
    """[B, L]: what is no padding; None where nothing is padded, which attention computes faster."""
    longest = max(lengths)
    return None if min(lengths) == longest else torch.arange(longest) < torch.tensor(lengths)[:, None]


def _loss_mask(samples: Sequence[Sample]) -> torch.Tensor | None:
    if all(sample.loss_mask is None for sample in samples):
        return None
    height, width = samples[0].shape.target
    everything = torch.full((height, width), 255, dtype=torch.uint8)
    return torch.stack([everything if sample.loss_mask is None else sample.loss_mask for sample in samples])

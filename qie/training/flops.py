"""How much a training step computes, and how much a GPU can: the two sides of MFU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qie.training.datasheets import find_datasheet


@dataclass(frozen=True)
class Architecture:
    """The sizes of a Qwen-Image transformer that decide what it computes and keeps.

    Attributes:
        blocks: each with an image and a text stream of the same shape.
        heads, head_width: attention heads and their width; the product is the width of both streams.
        in_channels: channels of an image token.
        out_channels: channels of a predicted image token, all of its patch.
        text_width: channels of a text token, as Qwen2.5-VL gives it.
        zero_cond_t: controls are modulated at t = 0, so that modulation differs from token to token.
    """

    blocks: int
    heads: int
    head_width: int
    in_channels: int
    out_channels: int
    text_width: int
    zero_cond_t: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """From the transformer's config, loaded or from its config.json."""
        return cls(
            blocks=config["num_layers"],
            heads=config["num_attention_heads"],
            head_width=config["attention_head_dim"],
            in_channels=config["in_channels"],
            out_channels=config["patch_size"] ** 2 * (config.get("out_channels") or config["in_channels"]),
            text_width=config["joint_attention_dim"],
            zero_cond_t=bool(config.get("zero_cond_t")),
        )

    @property
    def width(self) -> int:
        return self.heads * self.head_width


@dataclass(frozen=True)
class Flops:
    """The cost of one sample in a training step; a multiplication and an addition are two.

    Attributes:
        forward, backward: the model's own work.
        recomputed: the forward pass of checkpointed blocks once more, as far as nothing of it is kept.
        attention, attention_recomputed: of forward and of recomputed what attention takes; of backward it takes twice
            as much as of forward.
    """

    forward: float
    backward: float
    recomputed: float
    attention: float
    attention_recomputed: float

    @property
    def model(self) -> float:
        """The work that MFU counts, without recomputation (PaLM, arXiv:2204.02311, appendix B)."""
        return self.forward + self.backward


def step_flops(
    architecture: Architecture,
    image_tokens: int,
    text_tokens: int,
    *,
    all_trained: bool,
    checkpointed_blocks: int = 0,
    keeping_attention: int = 0,
    target_tokens: int | None = None,
) -> Flops:
    """Count the operations of a training step on one sample.

    Per token and block a stream has 4 d² weights in its attention and 8 d² in its MLP; each costs 2 forward, 2 for the
    gradient of its input and, where it is trained, 2 for its own. Attention costs 4 n² d forward, n being the tokens of
    both streams, and twice that backward, whether or not weights are trained. The count leaves out norms, activations,
    adapters (below 1 % at rank 16) and the scores that fused attention recomputes in its backward pass.

    Args:
        architecture: the transformer's.
        image_tokens: those of target and controls.
        text_tokens: those of the prompt as Qwen2.5-VL gives it, its images included.
        all_trained: all weights are trained, not an adapter on frozen ones.
        checkpointed_blocks: how many blocks are recomputed in the backward pass.
        keeping_attention: so many of them but for their attention.
        target_tokens: those of the image tokens that are predicted: the last block computes keys and values of the
            other tokens, and nothing else. None: all are predicted, and the last block's text is computed.
    """
    width, tokens = architecture.width, image_tokens + text_tokens
    blocks, all_attention = architecture.blocks, 4 * tokens**2 * width
    every_layer = 2 * 12 * width**2 * tokens
    # Queries, the output of attention and the MLP: 1, 1 and 8 d² of a stream's 12 d².
    unread = 0 if target_tokens is None else tokens - target_tokens
    unread_layers, unread_attention = 2 * 10 * width**2 * unread, 4 * tokens * unread * width
    layers, attention = every_layer * blocks - unread_layers, all_attention * blocks - unread_attention
    # Once for a sample, and without a gradient unless it is trained: each block's shifts, scales and gates.
    modulation = 2 * 12 * width**2 * blocks
    predicted = image_tokens if target_tokens is None else target_tokens
    ends = 2 * width * (image_tokens * architecture.in_channels + predicted * architecture.out_channels)
    ends += 2 * width * text_tokens * architecture.text_width
    forward = layers + attention + modulation + ends
    backward = layers + 2 * attention + ends + (layers + 2 * modulation + ends if all_trained else 0)
    recomputed = (every_layer + modulation / blocks) * checkpointed_blocks
    again = all_attention * (checkpointed_blocks - keeping_attention)
    if checkpointed_blocks == blocks:  # the last block is the first that is not recomputed, and that keeps attention
        recomputed -= unread_layers
        again -= 0 if keeping_attention else unread_attention
    return Flops(float(forward), float(backward), float(recomputed + again), float(attention), float(again))


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The dense operations of a GPU per second, by its `torch.cuda.get_device_name`; None: not known.

    The table knows half precision, see `find_datasheet`.
    """
    datasheet = find_datasheet(device_name) if dtype in (torch.bfloat16, torch.float16) else None
    return None if datasheet is None else datasheet.tflops * 1e12

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
        blocks: each with an image and a text stream of the same shape, or with a single stream of all tokens.
        heads, head_width: attention heads and their width; the product is the width of every stream.
        in_channels: channels of an image token.
        out_channels: channels of a predicted image token, all of its patch.
        text_width: channels of a text token, as the text encoder gives it.
        zero_cond_t: controls are modulated at t = 0, so that modulation differs from token to token.
        gated_mlp: of a single stream the width of its SwiGLU, in widths of the stream. 0: there are two streams.
        patch: side of an image token, in latent pixels.
    """

    blocks: int
    heads: int
    head_width: int
    in_channels: int
    out_channels: int
    text_width: int
    zero_cond_t: bool = False
    gated_mlp: int = 0
    patch: int = 2

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """From the transformer's config, loaded or from its config.json."""
        single_stream = "context_in_dim" in config
        return cls(
            blocks=config["num_layers"],
            heads=config["num_attention_heads"],
            head_width=config["attention_head_dim"],
            in_channels=config["in_channels"] * (config["patch_size"] ** 2 if single_stream else 1),
            out_channels=config["patch_size"] ** 2 * (config.get("out_channels") or config["in_channels"]),
            text_width=config["context_in_dim" if single_stream else "joint_attention_dim"],
            zero_cond_t=bool(config.get("zero_cond_t")),
            gated_mlp=config["mlp_ratio"] if single_stream else 0,
            patch=config["patch_size"],
        )

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @property
    def single_stream(self) -> bool:
        return self.gated_mlp > 0

    @property
    def matrices(self) -> int:
        """Weights that a block multiplies a token with, in squares of the width: the attention's and the MLP's."""
        return 4 + (3 * self.gated_mlp if self.single_stream else 8)


@dataclass(frozen=True)
class Flops:
    """The cost of one sample in a training step; a multiplication and an addition are two.

    Attributes:
        forward, backward: the model's own work.
        of_base: the forward passes of the base, which no backward pass follows.
        recomputed: the forward pass of checkpointed blocks once more, as far as nothing of it is kept.
        attention, attention_recomputed: of forward and of recomputed what attention takes; of backward it takes twice
            as much as of forward, and of `of_base` as much as there are passes.
    """

    forward: float
    backward: float
    of_base: float
    recomputed: float
    attention: float
    attention_recomputed: float

    @property
    def model(self) -> float:
        """The work that MFU counts, without recomputation (PaLM, arXiv:2204.02311, appendix B)."""
        return self.forward + self.backward + self.of_base


@dataclass(frozen=True)
class _Work:
    """Of one sample: the tokens whose layers a block computes, and the pairs of tokens that its attention compares;
    and how many of them the last block leaves out, but for keys and values."""

    tokens: float
    pairs: float
    unread_tokens: float
    unread_pairs: float
    image_tokens: float
    predicted: float

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        image_tokens: float,
        text_tokens: float,
        target_tokens: float | None,
        controls: float,
        draws: int,
    ) -> _Work:
        """See `step_flops`."""
        tokens, target = image_tokens + text_tokens, image_tokens if target_tokens is None else target_tokens
        lean = target_tokens is not None
        if not architecture.single_stream:
            unread = tokens - target if lean else 0
            return cls(tokens, tokens**2, unread, tokens * unread, image_tokens, target)
        prefix, of_controls = tokens - target, image_tokens - target
        # Each part of the prefix sees those before it and itself, in whatever order they stand.
        of_prefix = (prefix**2 + text_tokens**2 + (of_controls**2 / controls if of_controls else 0)) / 2
        return cls(
            prefix + draws * target,
            of_prefix + draws * target * tokens,
            prefix if lean else 0,
            of_prefix if lean else 0,
            of_controls + draws * target,
            draws * target,
        )


def step_flops(
    architecture: Architecture,
    image_tokens: float,
    text_tokens: float,
    *,
    all_trained: bool,
    checkpointed_blocks: int = 0,
    keeping_attention: int = 0,
    target_tokens: float | None = None,
    controls: float = 1,
    draws: int = 1,
    base_passes: float = 0,
) -> Flops:
    """Count the operations of a training step on one sample.

    Per token and block a stream has 4 d² weights in its attention and 8 d² in its MLP, 9 d² in one that is gated; each
    costs 2 forward, 2 for the gradient of its input and, where it is trained, 2 for its own. Attention costs 4 d for
    each pair of tokens forward, and twice that backward, whether or not weights are trained. With two streams these are
    all pairs; a single stream is block-causal: text and controls see what stands before them and themselves, and each
    draw's target sees text, controls and itself. The count leaves out norms, activations, adapters (below 1 % at rank
    16) and the scores that fused attention recomputes in its backward pass.

    Args:
        architecture: the transformer's.
        image_tokens: those of target and controls.
        text_tokens: those of the prompt as the text encoder gives it, its images included where the transformer reads
            them.
        all_trained: all weights are trained, not an adapter on frozen ones.
        checkpointed_blocks: how many blocks are recomputed in the backward pass.
        keeping_attention: so many of them but for their attention.
        target_tokens: those of the image tokens that are predicted: the last block computes keys and values of the
            other tokens, and nothing else. None: all are predicted, and the last block's text is computed.
        controls: the number of images, of equal size, that the other image tokens belong to.
        draws: so many noisy targets share text and controls, in a single stream; with two streams 1.
        base_passes: so many forward passes without gradient are needed beside it, as with the adapter off for what the
            base predicts; a fraction where that is so for some samples.
    """
    width, blocks = architecture.width, architecture.blocks
    work = _Work.of(architecture, image_tokens, text_tokens, target_tokens, controls, draws)
    every_layer, all_attention = 2 * architecture.matrices * width**2 * work.tokens, 4 * width * work.pairs
    # Queries, the output of attention and the MLP: all but keys and values.
    unread_layers = 2 * (architecture.matrices - 2) * width**2 * work.unread_tokens
    unread_attention = 4 * width * work.unread_pairs
    layers, attention = every_layer * blocks - unread_layers, all_attention * blocks - unread_attention
    # Once for a sample, and without a gradient unless it is trained: each block's shifts, scales and gates. A single
    # stream's blocks share theirs.
    modulation = 0 if architecture.single_stream else 2 * 12 * width**2 * blocks
    ends = 2 * width * (work.image_tokens * architecture.in_channels + work.predicted * architecture.out_channels)
    ends += 2 * width * text_tokens * (architecture.text_width + (width if architecture.single_stream else 0))
    forward = layers + attention + modulation + ends
    backward = layers + 2 * attention + ends + (layers + 2 * modulation + ends if all_trained else 0)
    recomputed = (every_layer + modulation / blocks) * checkpointed_blocks
    again = all_attention * (checkpointed_blocks - keeping_attention)
    if checkpointed_blocks == blocks:  # the last block is the first that is not recomputed, and that keeps attention
        recomputed -= unread_layers
        again -= 0 if keeping_attention else unread_attention
    found = forward, backward, base_passes * forward, recomputed + again, attention, again
    return Flops(*map(float, found))


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The dense operations of a GPU per second, by its `torch.cuda.get_device_name`; None: not known.

    The table knows half precision, see `find_datasheet`.
    """
    datasheet = find_datasheet(device_name) if dtype in (torch.bfloat16, torch.float16) else None
    return None if datasheet is None else datasheet.tflops * 1e12

"""The training forward of edit and edit_plus: a stream of image tokens and one of text, which attention joins.

- Texts of several lengths are not padded in the attention: it computes one sample after another, each at its length. So
  no kernel has a mask, and none is slower than for a single sample.
- The last block computes what the prediction of the target depends on: keys and values of all tokens, and the rest for
  the target's. Nobody reads its text, nor its controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MethodType
from typing import Any, NamedTuple

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from qie.training.model.adapted_linear import product, products
from qie.training.model.rotary import Grid, angles, rotated

# The function itself: torch.compile does not look into the class.
_DIFFUSERS_BLOCK_FORWARD = QwenImageTransformerBlock.forward


def use_dual_stream(transformer: QwenImageTransformer2DModel) -> None:
    """See `use_training_forward`."""
    for block in transformer.transformer_blocks:
        block.forward = MethodType(_block_forward, block)
    transformer.forward = MethodType(_forward, transformer)
    transformer.has_training_forward = True


def predict_target(
    model: nn.Module,
    tokens: Tensor,
    timestep: Tensor,
    text: Tensor,
    text_lengths: Sequence[int],
    grids: Sequence[Grid],
) -> Tensor:
    """What a transformer predicts for the tokens of the target, [B, target's tokens, out channels].

    Args:
        model: a transformer, perhaps wrapped by DDP; with the training forward or without.
        tokens: those of the target, then those of the controls, [B, tokens, in channels].
        timestep: σ of each sample, [B].
        text: prompt embeddings, [B, L, D], padded after their end.
        text_lengths: the length of each, on the host.
        grids: the sizes of target and controls; the batch shares them.
    """
    given: dict[str, Any] = {
        "hidden_states": tokens,
        "timestep": timestep,
        "encoder_hidden_states": text,
        "img_shapes": [list(grids)] * len(tokens),
    }
    if getattr(getattr(model, "module", model), "has_training_forward", False):
        return model(**given, text_lengths=tuple(text_lengths))[0]  # type: ignore[no-any-return]
    mask = None
    if min(text_lengths) < text.shape[1]:
        places = torch.arange(text.shape[1], device=text.device)
        mask = places < torch.tensor(text_lengths, device=text.device)[:, None]
    predicted = model(**given, encoder_hidden_states_mask=mask, return_dict=False)[0]
    return predicted[:, : prod(grids[0])]  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Layout:
    """What blocks know of a batch's tokens; stands where diffusers hands on complex frequencies.

    Not a tuple, in which FSDP would round the angles with a block's other inputs.

    Attributes:
        image, text: cosines and sines for each token of the stream, see `angles`.
        target_tokens: how many tokens of the image stream are the target's; these come first.
        text_lengths: that of each sample's text; None where nothing is padded.
        last: nobody reads what this block makes of the text and of the controls.
        text_asks: whether the text has queries in the attention.
    """

    image: tuple[Tensor, Tensor]
    text: tuple[Tensor, Tensor]
    target_tokens: int
    text_lengths: tuple[int, ...] | None
    last: bool = False
    text_asks: bool = True


def _forward(self: QwenImageTransformer2DModel, *args: Any, **kwargs: Any) -> Any:
    if "text_lengths" in kwargs:
        return (_predicted_target(self, **kwargs),)
    return QwenImageTransformer2DModel.forward(self, *args, **kwargs)


def _predicted_target(
    transformer: QwenImageTransformer2DModel,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    img_shapes: list[list[Grid]],
    text_lengths: tuple[int, ...],
) -> Tensor:
    image = transformer.img_in(hidden_states)
    text = transformer.txt_in(transformer.txt_norm(encoder_hidden_states))
    timestep = timestep.to(image.dtype)
    times = torch.cat([timestep, timestep * 0]) if transformer.zero_cond_t else timestep
    conditioning = transformer.time_text_embed(times, image)
    of_image, of_text = transformer.pos_embed(img_shapes, max_txt_seq_len=text.shape[1], device=image.device)
    padded = min(text_lengths) < text.shape[1]
    layout = _Layout(angles(of_image), angles(of_text), prod(img_shapes[0][0]), text_lengths if padded else None)
    checkpointed = torch.is_grad_enabled() and transformer.gradient_checkpointing
    run: Any = transformer._gradient_checkpointing_func if checkpointed else nn.Module.__call__
    *_, last = transformer.transformer_blocks
    for block in transformer.transformer_blocks:
        if block is last:
            layout = replace(layout, last=True, text_asks=_are_trained(block.attn.add_q_proj, block.attn.norm_added_q))
        text, image = run(block, image, text, None, conditioning, layout, None, None)
    return transformer.proj_out(transformer.norm_out(image, conditioning[: len(image)]))  # type: ignore[no-any-return]


def _are_trained(*modules: nn.Module) -> bool:
    """Whether weights of the last block's text queries are. Their gradient is zero, not None: weight decay acts."""
    return any(weight.requires_grad for module in modules for weight in module.parameters())


def _block_forward(
    self: QwenImageTransformerBlock,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Any = None,
) -> tuple[Tensor, Tensor]:
    """A block's two streams, text and image; of the last block the text as it came, and the target's tokens."""
    layout, image, text = image_rotary_emb, hidden_states, encoder_hidden_states
    if not isinstance(layout, _Layout):
        rest = (encoder_hidden_states_mask, temb, layout, joint_attention_kwargs, modulate_index)
        return _DIFFUSERS_BLOCK_FORWARD(self, image, text, *rest)  # type: ignore[no-any-return]
    target, activated = layout.target_tokens, silu(temb)
    of_image = _modulation(self.img_mod[1], activated, 2 if self.zero_cond_t else 1)
    of_text = _modulation(self.txt_mod[1], activated[: len(text)], 1)
    image_read, text_read = _attention(
        self.attn,
        _modulated(self.img_norm1(image), of_image.shift1, of_image.scale1, target),
        _modulated(self.txt_norm1(text), of_text.shift1, of_text.scale1, target),
        layout,
    )
    if layout.last:
        image = image[:, :target]
    image = _gated(image, product(image_read, self.attn.to_out[0]), of_image.gate1, target)
    changed = _mlp(self.img_mlp, _modulated(self.img_norm2(image), of_image.shift2, of_image.scale2, target))
    image = _gated(image, changed, of_image.gate2, target)
    if text_read is None:
        return text, image
    text = _gated(text, product(text_read, self.attn.to_add_out), of_text.gate1, target)
    changed = _mlp(self.txt_mlp, _modulated(self.txt_norm2(text), of_text.shift2, of_text.scale2, target))
    return _gated(text, changed, of_text.gate2, target), image


# Modulation. A stream has a shift, scale and gate for each sample; with zero_cond_t the controls have others.

_Parts = Sequence[Tensor]
"""A value for the target's tokens or for all, [B, 1, d]; perhaps another for the controls' tokens."""


class _Modulation(NamedTuple):
    """Of the attention, then of the MLP."""

    shift1: _Parts
    scale1: _Parts
    gate1: _Parts
    shift2: _Parts
    scale2: _Parts
    gate2: _Parts


def _modulation(layer: Any, activated: Tensor, parts: int) -> _Modulation:
    values = product(activated, layer).unsqueeze(1).chunk(parts)
    return _Modulation(*zip(*(part.chunk(6, dim=-1) for part in values), strict=True))


def _modulated(tokens: Tensor, shifts: _Parts, scales: _Parts, target: int) -> Tensor:
    return _by_part(_shifted, target, [tokens], [shifts, scales])


def _gated(tokens: Tensor, change: Tensor, gates: _Parts, target: int) -> Tensor:
    return _by_part(torch.addcmul, target, [tokens, change], [gates])


def _shifted(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, tokens, 1 + scale)


def _by_part(compute: Callable[..., Tensor], target: int, tokens: Sequence[Tensor], values: Sequence[_Parts]) -> Tensor:
    """Compute on the target's tokens with the first of each value, on those of controls with the second."""
    sizes = [target, tokens[0].shape[1] - target]
    if len(values[0]) == 1 or sizes[1] == 0:
        return compute(*tokens, *(value[0] for value in values))
    split = zip(*(torch.split(some, sizes, dim=1) for some in tokens), strict=True)
    return torch.cat([compute(*some, *own) for some, own in zip(split, zip(*values, strict=True), strict=True)], dim=1)


def _mlp(feed_forward: Any, tokens: Tensor) -> Tensor:
    activation, _, out = feed_forward.net
    return product(activation.gelu(product(tokens, activation.proj)), out)


# Attention


def _attention(attn: Any, image: Tensor, text: Tensor, layout: _Layout) -> tuple[Tensor, Tensor | None]:
    """What the tokens of the image and of the text read; of the last block those of the target, and no text."""
    asking = layout.target_tokens if layout.last else image.shape[1]
    if layout.last:
        query, key, value = product(image[:, :asking], attn.to_q), *products(image, attn.to_k, attn.to_v)
    else:
        query, key, value = products(image, attn.to_q, attn.to_k, attn.to_v)
    cos, sin = layout.image
    of_image = [
        rotated(attn.norm_q(_heads(attn, query)), cos[:asking], sin[:asking]),
        rotated(attn.norm_k(_heads(attn, key)), cos, sin),
        _heads(attn, value),
    ]
    layers = [attn.add_k_proj, attn.add_v_proj, *([attn.add_q_proj] if layout.text_asks else [])]
    key, value, *queries = products(text, *layers)
    of_text = [
        *(rotated(attn.norm_added_q(_heads(attn, query)), *layout.text) for query in queries),
        rotated(attn.norm_added_k(_heads(attn, key)), *layout.text),
        _heads(attn, value),
    ]
    if layout.text_lengths is None:
        text_read, image_read = _attended(attn, of_text, of_image)
        return image_read, None if layout.last else text_read
    samples = zip(*(torch.split(values, 1) for values in (*of_text, *of_image)), strict=True)
    read = [
        _attended(attn, [values[:, :length] for values in sample[:-3]], sample[-3:])
        for sample, length in zip(samples, layout.text_lengths, strict=True)
    ]
    image_read = torch.cat([own for _, own in read])
    if layout.last:
        return image_read, None
    return image_read, torch.cat([pad(own, (0, 0, 0, text.shape[1] - own.shape[1])) for own, _ in read])


def _attended(attn: Any, text: Sequence[Tensor], image: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What text and image read, of their queries, keys and values; the text may have no queries."""
    joined = [torch.cat(both, dim=1) for both in zip(text, image[-len(text) :], strict=True)]
    query, key, value = *image[: -len(text)], *joined
    read = dispatch_attention_fn(query, key, value, backend=attn.processor._attention_backend)
    asking = image[0].shape[1]
    of_text, of_image = torch.split(read.flatten(2).to(query.dtype), [query.shape[1] - asking, asking], dim=1)
    return of_text.contiguous(), of_image.contiguous()


def _heads(attn: Any, tokens: Tensor) -> Tensor:
    return tokens.view(*tokens.shape[:2], attn.heads, -1)

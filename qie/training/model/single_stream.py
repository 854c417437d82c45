"""The training forward of Qwen-Image-2.1: one stream, in which controls stand among the tokens of the text.

A sample's text and controls are its prefix. They are modulated at σ = 0, and no token of them sees the target: neither
noise nor noise level changes what they are. So several draws of the target share one pass over their prefix, exactly.

- Nothing is padded, for in this model that is not neutral: its rotary positions count all tokens before the target. The
  stream is [prefixes of all samples, one after another | targets of all draws].
- Attention goes by segments: a text sees what is before it, token by token; a control what is before it, and itself; a
  target its prefix, and itself. Only a text behind a control needs a mask.
- The last block computes keys and values of the prefixes, and the rest for the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from qie.errors import ModelError
from qie.training.model.adapted_linear import product, products
from qie.training.model.rotary import Grid, angles, rotated

try:
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21TransformerBlock
except ImportError:  # diffusers before 0.42 has no model of this kind
    pass
else:
    # The function itself: torch.compile does not look into the class.
    _DIFFUSERS_BLOCK_FORWARD = QwenImage21TransformerBlock.forward


def use_single_stream(transformer: Any) -> None:
    """See `use_training_forward`.

    Raises:
        ModelError: text and controls would depend on the noise level.
    """
    if not transformer.config.causal_condition:
        raise ModelError(
            "the transformer is not one that qie can train",
            where="transformer/config.json",
            expected="causal_condition: true",
            found="causal_condition: false",
            hint="use the model as released",
        )
    for block in transformer.transformer_blocks:
        block.forward = MethodType(_block_forward, block)
    transformer.forward = MethodType(_forward, transformer)


def predict_targets(
    model: nn.Module,
    targets: Tensor,
    timestep: Tensor,
    controls: Sequence[Tensor],
    text: Tensor,
    text_lengths: Sequence[int],
    slots: Sequence[int],
    grids: Sequence[Grid],
    without_controls: Sequence[bool] = (),
) -> Tensor:
    """What a transformer predicts for the tokens of the targets, [B·k, T, out channels].

    Args:
        model: a transformer with the training forward, perhaps wrapped by DDP.
        targets: k draws of each sample's target, sample by sample, [B·k, T, in channels].
        timestep: σ of each draw, [B·k].
        controls: each control's tokens, [B, h·w, in channels].
        text: embeddings of text tokens, [B, L, D]; what stands after a sample's length is not read.
        text_lengths: the length of each, on the host.
        slots: for each control, how many tokens of text stand before it.
        grids: sizes of the controls, then of the target; the batch shares them.
        without_controls: samples whose controls are left out; none by default.
    """
    return model(  # type: ignore[no-any-return]
        hidden_states=targets,
        timestep=timestep,
        controls=tuple(controls),
        encoder_hidden_states=text,
        text_lengths=tuple(text_lengths),
        slots=tuple(slots),
        img_shapes=tuple(grids),
        without_controls=tuple(without_controls) or (False,) * len(text),
    )[0]


class _Segment(NamedTuple):
    """Of a prefix, from `start` to `stop`. Text is causal: by itself, or behind other tokens by `mask`."""

    start: int
    stop: int
    is_text: bool
    mask: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Layout:
    """What blocks know of a batch's tokens; stands where diffusers hands on complex frequencies.

    Attributes:
        cos, sin: for each token of the stream, see `angles`.
        prefixes: the segments of each sample; one sample's where those of all are equal.
        samples: how many there are.
        prefix_tokens: those of all samples.
        draws: targets of each sample.
        target_tokens: of one target.
        last: nobody reads what this block makes of the prefixes.
    """

    cos: Tensor
    sin: Tensor
    prefixes: tuple[tuple[_Segment, ...], ...]
    samples: int
    prefix_tokens: int
    draws: int
    target_tokens: int
    last: bool = False


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if "text_lengths" in kwargs:
        return (_predicted_targets(self, **kwargs),)
    return type(self).forward(self, *args, **kwargs)


def _predicted_targets(
    transformer: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    controls: tuple[Tensor, ...],
    text_lengths: tuple[int, ...],
    slots: tuple[int, ...],
    img_shapes: tuple[Grid, ...],
    without_controls: tuple[bool, ...],
) -> Tensor:
    targets, device = hidden_states.shape, hidden_states.device
    layout = _lay_out(transformer.pos_embed, text_lengths, slots, img_shapes, without_controls, targets, device)
    shown = [of[sample] for sample, dropped in enumerate(without_controls) if not dropped for of in controls]
    images = transformer.img_in(torch.cat([*shown, hidden_states.flatten(0, 1)]))
    *conditions, noisy = torch.split(images, [*map(len, shown), targets[0] * targets[1]])
    text = torch.cat([own[:length] for own, length in zip(encoder_hidden_states, text_lengths, strict=True)])
    text = transformer.txt_in(text)
    tokens = torch.cat([*_interleaved(text, conditions, text_lengths, slots, without_controls), noisy])
    timestep = timestep.to(tokens.dtype)
    conditioning = transformer.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), tokens)
    modulation = transformer.modulation(conditioning)
    checkpointed = torch.is_grad_enabled() and transformer.gradient_checkpointing
    run: Any = transformer._gradient_checkpointing_func if checkpointed else nn.Module.__call__
    *_, last = transformer.transformer_blocks
    for block in transformer.transformer_blocks:
        tokens = run(block, tokens, modulation, replace(layout, last=True) if block is last else layout)
    # As a module: accelerate shards the last norm by itself, and FSDP gathers it when it is called.
    return transformer.proj_out(transformer.norm_out(tokens.view(*targets[:2], -1), conditioning[:-1]))  # type: ignore[no-any-return]


def _interleaved(
    text: Tensor,
    controls: Sequence[Tensor],
    lengths: Sequence[int],
    slots: Sequence[int],
    without_controls: Sequence[bool],
) -> Iterator[Tensor]:
    """The pieces of all prefixes, in their order; `text` is that of all samples, `controls` those that are shown."""
    left = iter(controls)
    for own, dropped in zip(torch.split(text, list(lengths)), without_controls, strict=True):
        start = 0
        for slot in () if dropped else slots:
            yield own[start:slot]
            yield next(left)
            start = slot
        yield own[start:]


# Where tokens stand, and what they see


def _lay_out(
    rotary: Any,
    lengths: Sequence[int],
    slots: Sequence[int],
    grids: Sequence[Grid],
    without_controls: Sequence[bool],
    targets: Sequence[int],
    device: torch.device,
) -> _Layout:
    kinds = list(zip(lengths, without_controls, strict=True))
    distinct = {kind: _sample(*kind, slots, grids) for kind in dict.fromkeys(kinds)}
    found = {kind: angles(_frequencies(rotary, positions, device)) for kind, (_, positions) in distinct.items()}
    draws, tokens = targets[0] // len(lengths), targets[1]
    parts = []
    for turned in zip(*(found[kind] for kind in kinds), strict=True):
        prefixes = [own[:-tokens] for own in turned]
        parts.append(torch.cat([*prefixes, *(own[-tokens:] for own in turned for _ in range(draws))]))
    alike = len(distinct) == 1
    masked = {kind: tuple(_masked(segments, device)) for kind, (segments, _) in distinct.items()}
    return _Layout(
        cos=parts[0],
        sin=parts[1],
        prefixes=tuple(masked[kind] for kind in (kinds[:1] if alike else kinds)),
        samples=len(lengths),
        prefix_tokens=len(parts[0]) - targets[0] * tokens,
        draws=draws,
        target_tokens=tokens,
    )


def _sample(
    length: int, without_controls: bool, slots: Sequence[int], grids: Sequence[Grid]
) -> tuple[list[_Segment], Tensor]:
    """A prefix's segments, and the positions of its tokens and of one target's: frame, row and column, [tokens, 3].

    Text tokens advance a position on all three axes. An image stands at the position that the text before it has
    reached, its rows and columns around zero, and the text goes on after its longer side: `QwenImage21Rope`.
    """
    *controls, target = grids
    shown = () if without_controls else tuple(zip(slots, controls, strict=True))
    segments: list[_Segment] = []
    positions: list[Tensor] = []
    position, written = 0, 0

    def add(places: Tensor, is_text: bool) -> None:
        start = segments[-1].stop if segments else 0
        if len(places):
            segments.append(_Segment(start, start + len(places), is_text))
            positions.append(places)

    for slot, grid in shown:
        add(_text(position, slot - written), is_text=True)
        position, written = position + slot - written, slot
        add(_image(position, grid), is_text=False)
        position += max(grid[1:])
    add(_text(position, length - written), is_text=True)
    return segments, torch.cat([*positions, _image(position + length - written, target)])


def _text(position: int, count: int) -> Tensor:
    return torch.arange(position, position + count)[:, None].expand(-1, 3)


def _image(position: int, grid: Grid) -> Tensor:
    _, height, width = grid
    rows, columns = (torch.arange(-(side - side // 2), side // 2) for side in (height, width))
    places = torch.cartesian_prod(rows, columns)
    return torch.cat([places.new_full((len(places), 1), position), places], dim=1)


def _frequencies(rotary: Any, positions: Tensor, device: torch.device) -> Tensor:
    """Diffusers' own complex frequencies, [tokens, head width / 2]. Negative positions stand at its tables' ends."""
    rotary.freqs = [table.to(device) for table in rotary.freqs]
    places = positions.to(device, non_blocking=True)
    return torch.cat([table[places[:, axis]] for axis, table in enumerate(rotary.freqs)], dim=-1)


def _masked(segments: Sequence[_Segment], device: torch.device) -> Iterator[_Segment]:
    for start, stop, is_text, _ in segments:
        behind = is_text and start > 0
        mask = torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril(start) if behind else None
        yield _Segment(start, stop, is_text, mask)


# Blocks


def _block_forward(
    self: Any, hidden_states: Tensor, modulation: Tensor, rotary_emb: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A block's stream; of the last block the targets alone."""
    layout, tokens = rotary_emb, hidden_states
    if not isinstance(layout, _Layout):
        return _DIFFUSERS_BLOCK_FORWARD(self, tokens, modulation, layout, *args, **kwargs)  # type: ignore[no-any-return]
    scale1, gate1, scale2, gate2 = modulation.chunk(4, dim=-1)
    read = _attention(self.attn, _scaled(self.img_norm1(tokens), scale1, layout), layout)
    if layout.last:
        tokens = tokens[layout.prefix_tokens :]
    tokens = _gated(tokens, product(read, self.attn.to_out[0]), gate1, layout)
    return _gated(tokens, _mlp(self.img_mlp, _scaled(self.img_norm2(tokens), scale2, layout)), gate2, layout)


def _scaled(tokens: Tensor, scale: Tensor, layout: _Layout) -> Tensor:
    return _by_part(torch.mul, layout, 1 + scale, tokens)


def _gated(tokens: Tensor, change: Tensor, gate: Tensor, layout: _Layout) -> Tensor:
    return _by_part(torch.addcmul, layout, gate.tanh(), tokens, change)


def _by_part(compute: Callable[..., Tensor], layout: _Layout, values: Tensor, *tokens: Tensor) -> Tensor:
    """Compute on each target with its own row of `values`, on prefixes with the last, that of σ = 0, [B·k + 1, d]."""
    prefixes, targets = zip(*(_parted(some, layout) for some in tokens), strict=True)
    found = compute(*targets, values[:-1, None]).flatten(0, 1)
    return torch.cat([compute(*prefixes, values[-1:]), found]) if len(prefixes[0]) else found


def _parted(tokens: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Those of prefixes, [P, ...], none in the last block; and of targets, [B·k, T, ...]."""
    targets = layout.samples * layout.draws
    prefixes, rest = torch.split(tokens, [len(tokens) - targets * layout.target_tokens, targets * layout.target_tokens])
    return prefixes, _grouped(rest, targets)


def _grouped(tokens: Tensor, count: int) -> Tensor:
    return tokens.view(count, -1, *tokens.shape[1:])


def _mlp(feed_forward: Any, tokens: Tensor) -> Tensor:
    gate, value = products(tokens, feed_forward.gate_layer, feed_forward.proj)
    return product(feed_forward.activation_fn(gate) * value, feed_forward.out)


# Attention


def _attention(attn: Any, tokens: Tensor, layout: _Layout) -> Tensor:
    """What tokens read, [tokens, width]; of the last block the targets alone."""
    asking = slice(layout.prefix_tokens if layout.last else 0, None)
    if layout.last:
        query, key, value = product(tokens[asking], attn.to_q), *products(tokens, attn.to_k, attn.to_v)
    else:
        query, key, value = products(tokens, attn.to_q, attn.to_k, attn.to_v)
    value = _heads(attn, value)
    query = rotated(attn.norm_q(_heads(attn, query)).to(value.dtype), layout.cos[asking], layout.sin[asking])
    key = rotated(attn.norm_k(_heads(attn, key)).to(value.dtype), layout.cos, layout.sin)
    of_prefixes, of_targets = [], []
    for segments, asked, *seen in zip(
        layout.prefixes, *(_groups(some, layout) for some in (query, key, value)), strict=True
    ):
        if not layout.last:
            of_prefixes.append(_prefix_read(attn, segments, asked[0], *(prefix for prefix, _ in seen)))
        joined = [_behind(prefix, drawn, layout.draws) for prefix, drawn in seen]
        of_targets.append(_attended(attn, asked[1], *joined))
    return torch.cat([read.flatten(0, 1).flatten(1).to(value.dtype) for read in (*of_prefixes, *of_targets)])


def _groups(values: Tensor, layout: _Layout) -> list[tuple[Tensor, Tensor]]:
    """Prefixes [G, P, ...] and targets [G·k, T, ...] of samples with equal segments: all, or one at a time."""
    samples = layout.samples // len(layout.prefixes)
    prefixes, targets = _parted(values, layout)
    sizes = [samples * segments[-1].stop if len(prefixes) else 0 for segments in layout.prefixes]
    parted = zip(torch.split(prefixes, sizes), torch.split(targets, samples * layout.draws), strict=True)
    return [(_grouped(own, samples), drawn) for own, drawn in parted]


def _prefix_read(attn: Any, segments: Sequence[_Segment], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What prefixes of the same segments read, [G, P, heads, head width]."""
    read = []
    for start, stop, is_text, mask in segments:
        seen = query[:, start:stop], key[:, :stop], value[:, :stop]
        read.append(_text_read(*seen, mask) if is_text else _attended(attn, *seen))
    return torch.cat(read, dim=1)


def _text_read(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """By torch's own choice of a kernel: not each backend takes a mask."""
    query, key, value = (some.transpose(1, 2) for some in (query, key, value))
    return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None).transpose(1, 2)


def _behind(prefixes: Tensor, targets: Tensor, draws: int) -> Tensor:
    """Each draw behind its sample's prefix: [G, P, ...] and [G·k, T, ...] to [G·k, P + T, ...]."""
    shared = prefixes[:, None].expand(-1, draws, *prefixes.shape[1:])
    return torch.cat([shared, targets.view(-1, draws, *targets.shape[1:])], dim=2).flatten(0, 1)


def _attended(attn: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    found: Tensor = dispatch_attention_fn(query, key, value, backend=attn.processor._attention_backend)
    return found


def _heads(attn: Any, tokens: Tensor) -> Tensor:
    return tokens.view(len(tokens), attn.heads, -1)

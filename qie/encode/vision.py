"""Qwen-VL's vision towers: transformers' own, with fewer calls and without waiting for the GPU.

Most layers of Qwen2.5-VL's attend within windows of 112 pixels, of which an image of 1024² has 100. transformers calls
attention for each: 2,800 calls an image. Here windows of equal length are the batch of one call: on a GPU all of them,
of at most four lengths in an image; on a CPU, where a call is cheap and gathering tokens is not, those next to each
other.

transformers also derives positions and windows from the images' sizes on the GPU, and reads them back in each layer.
Here the host computes them and hands them to it.

On a GPU, a matrix product embeds the patches. transformers does so by a Conv3d whose kernel is a patch, for which some
releases of cuDNN take seconds (huggingface/transformers#45750).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from transformers import vision_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
    eager_attention_forward,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchEmbed
from transformers.utils.generic import is_flash_attention_requested
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from qie.devices import sent

_PROBE_WINDOWS = (8, 8, 4, 8, 2, 4)
_PROBE_TOLERANCE = 0.1


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of one or several images, in groups of one length.

    Attributes:
        groups: the tokens of each group's windows, by their positions or from one to another; the number of windows,
            and their length.
        back: where each token's result stands among those of all groups; None for in order.
    """

    groups: tuple[tuple[torch.Tensor | slice, int, int], ...]
    back: torch.Tensor | None

    @classmethod
    def by_length(cls, bounds: Sequence[int], device: torch.device) -> Windows:
        """As few groups as there are lengths. Each window ends where the next one begins."""
        starts: dict[int, list[int]] = defaultdict(list)
        for start, end in pairwise(bounds):
            starts[end - start].append(start)
        if len(starts) == 1:
            return cls.of_neighbours(bounds)
        groups = {length: torch.tensor(first)[:, None] + torch.arange(length) for length, first in starts.items()}
        order = torch.cat([tokens.flatten() for tokens in groups.values()])
        return cls(
            tuple((sent(tokens.flatten(), device), *tokens.shape) for tokens in groups.values()),
            sent(torch.argsort(order), device),
        )

    @classmethod
    def of_neighbours(cls, bounds: Sequence[int]) -> Windows:
        """Groups of windows next to each other, whose tokens need not be gathered."""
        groups, start = [], bounds[0]
        for length, windows in groupby(end - start for start, end in pairwise(bounds)):
            count = len(list(windows))
            groups.append((slice(start, start + count * length), count, length))
            start += count * length
        return cls(tuple(groups), None)


class _WindowAttention(Qwen2_5_VLVisionAttention):  # type: ignore[misc]
    """Attention of a layer with windows: one call for each group of them. Otherwise its parent's forward.

    A group's windows are a batch, whose elements no kernel mixes.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        windows: Windows | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[tokens, D] to the same; `windows` stands for `cu_seqlens`."""
        if windows is None:
            return super().forward(hidden_states, cu_seqlens, position_embeddings, **kwargs)  # type: ignore[no-any-return]
        assert position_embeddings is not None
        shape = len(hidden_states), 3, self.num_heads, -1
        query, key, value = self.qkv(hidden_states).reshape(shape).unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended = []
        for tokens, *size in windows.groups:
            states = (part[tokens].unflatten(0, size).transpose(1, 2) for part in (query, key, value))
            attended.append(attend(self, *states, attention_mask=None, scaling=self.scaling, is_causal=False)[0])
        joined = torch.cat([part.reshape(-1, self.dim) for part in attended])
        return self.proj(joined if windows.back is None else joined[windows.back])  # type: ignore[no-any-return]


class _LinearPatchEmbed(nn.Module):
    """A convolution whose kernel is as large as a patch, as a matrix product."""

    proj: nn.Conv3d

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[patches, values] to [patches, D]."""
        weight = self.proj.weight
        return nn.functional.linear(hidden_states.to(weight.dtype), weight.flatten(1), self.proj.bias)


class _LinearPatchEmbed25(_LinearPatchEmbed, Qwen2_5_VisionPatchEmbed):  # type: ignore[misc]
    """Of Qwen2.5-VL."""


class _LinearPatchEmbed3(_LinearPatchEmbed, Qwen3VLVisionPatchEmbed):  # type: ignore[misc]
    """Of Qwen3-VL."""


_LINEAR = {Qwen2_5_VisionPatchEmbed: _LinearPatchEmbed25, Qwen3VLVisionPatchEmbed: _LinearPatchEmbed3}


def embed_patches_linearly(tower: Any) -> None:
    """Have a tower embed patches by a matrix product, if it does so by a convolution whose kernel is a patch.

    In another order of sums than Conv3d's: last bits differ.
    """
    embed = tower.patch_embed
    if type(embed) in _LINEAR and embed.proj.stride == embed.proj.kernel_size:
        embed.__class__ = _LINEAR[type(embed)]


class DeepTower:
    """Qwen3-VL's vision tower, each of whose layers sees whole images. Some hand on what they see to the first
    layers of the language model.

    Args:
        tower: of a Qwen3-VL.
        device: that it is on.
    """

    def __init__(self, tower: Any, device: torch.device) -> None:
        self._tower, self._device = tower, device
        if device.type != "cpu":
            embed_patches_linearly(tower)

    def features(self, values: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Embeddings of images' tokens, [tokens, D], and what each handing layer adds to them in the language model,
        from their patches' values and their grids, which are on the host."""
        tower = self._tower
        interpolation = getattr(vision_utils, "get_vision_interpolation_indices_and_weights", None)
        # Flash attention, by the model's folder, wants all on the GPU; an older transformers computes it there.
        if interpolation is None or is_flash_attention_requested(tower.config):
            output = tower(values, grid_thw=sent(grids, self._device))
        else:
            indices, weights = interpolation(
                grids,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
            )
            output = tower(
                values,
                grid_thw=grids,
                position_ids=sent(get_vision_position_ids(grids, tower.spatial_merge_size), self._device),
                interp_indices=sent(indices, self._device),
                interp_weights=sent(weights, self._device),
                cu_seqlens=get_vision_cu_seqlens(grids),  # on the host, where transformers reads them
            )
        return [output.pooler_output, *output.deepstack_features]


def add_deepstack(hidden: torch.Tensor, is_image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Hidden states [B, L, D] with features [tokens, D] added where `is_image`, [B, L], says so.

    As `_deepstack_process` of transformers' Qwen3VLTextModel, which has the host wait for a GPU to count the tokens.
    """
    return hidden + torch.zeros_like(hidden).masked_scatter(is_image[..., None], features.to(hidden.dtype))


class VisionTower:
    """A vision tower, whose layers this changes in place; those of another instance stay as they are.

    Args:
        tower: of a Qwen2.5-VL.
        device: that it is on.
    """

    def __init__(self, tower: Any, device: torch.device) -> None:
        self._tower, self._device = tower, device
        self._windowed = [block for n, block in enumerate(tower.blocks) if n not in tower.fullatt_block_indexes]
        # On a CPU, in bfloat16, the kernel chooses its layout by the size of the batch and the number of threads:
        # with 24 threads, windows of 64 tokens differ in their last bits. No such choice exists in float32.
        self.grouped = device.type != "cpu" or tower.dtype == torch.float32
        for block in self._windowed:
            block.attn.__class__ = _WindowAttention
        if device.type != "cpu":
            embed_patches_linearly(tower)

    def check(self) -> None:
        """Compare with transformers' own attention; if another version computes something else, warn and leave it to
        that."""
        if not (self.grouped and self._windowed):
            return
        try:
            worst = self._difference(self._windowed[0].attn)
            # On a GPU, a library may choose another kernel for a batch; a wrong result is far further away.
            if worst <= (0.0 if self._device.type == "cpu" else _PROBE_TOLERANCE):
                return
            reason = f"it is {worst:.1e} of the deviation away"
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = str(error)
        self.grouped = False
        warnings.warn(f"windows of images are encoded one by one, which is slower: together {reason}", stacklevel=2)

    def windows(self, bounds: Sequence[int]) -> Windows:
        """The groups that suit the device best."""
        return Windows.of_neighbours(bounds) if self._device.type == "cpu" else Windows.by_length(bounds, self._device)

    def features(self, values: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Embeddings of images' tokens, [tokens, D], from their patches' values and their grids, which are on the
        host."""
        tower = self._tower
        if is_flash_attention_requested(tower.config):  # by the model's folder: one call for all windows, of any length
            return tower(values, grid_thw=grids.to(self._device)).pooler_output  # type: ignore[no-any-return]
        index, bounds = get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)
        grouped = {"windows": self.windows(bounds.tolist())} if self.grouped else {}
        output = tower(
            values,
            grid_thw=grids,
            position_ids=sent(get_vision_position_ids(grids, tower.spatial_merge_size), self._device),
            window_index=sent(index, self._device),
            # On the host, where transformers reads them.
            cu_seqlens=get_vision_cu_seqlens(grids),
            cu_window_seqlens=bounds,
            **grouped,
        )
        return output.pooler_output  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _difference(self, attention: _WindowAttention) -> float:
        """Largest difference of grouped windows from transformers' own, in deviations of the latter."""
        bounds = torch.tensor([0, *_PROBE_WINDOWS]).cumsum(0, dtype=torch.int32)
        tokens, generator = int(bounds[-1]), torch.Generator().manual_seed(0)
        hidden, cos, sin = (
            torch.randn(tokens, width, generator=generator).to(self._device)
            for width in (attention.dim, attention.head_dim, attention.head_dim)
        )
        inputs = hidden.to(attention.qkv.weight.dtype), bounds, (cos, sin)
        expected = attention(*inputs).float()
        found = attention(*inputs, windows=self.windows(bounds.tolist())).float()
        return float((found - expected).abs().max() / expected.std())

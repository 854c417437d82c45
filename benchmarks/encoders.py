"""Encoding compared with diffusers and transformers, in one run, on the CPU or a GPU: the gain of the exact speed-ups.

    python benchmarks/encoders.py [--device cpu|cuda:0] [--size 512] [--layers 2] [--runs 5]

Models are random and of the released shapes: the VAE whole; Qwen2.5-VL in its true width on as many tokens as a 1024²
image has, but with fewer layers unless `--layers 28` is given.

vae:    one image through the encoder without its time axis. Peer: diffusers' `vae.encode`.
prompt: prompt and null prompt, as a full pass and its continuation. Peer: two full passes of transformers, images
        included.
windows: attention of a vision layer, with windows of one length in one call. Peer: transformers' own, a call for each
        window.
patches: the embedding of an image's patches by a matrix product, as on a GPU. Peer: transformers' own, by Conv3d.

Each line ends with the largest difference between the two results.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLQwenImage
from measuring import Results, Row, beside, in_turn
from measuring import parser as common
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_window_index

from qie.encode.vae import still_encoder
from qie.encode.vision import VisionTower, embed_patches_linearly

VISION_LAYERS = 32
TEXT_LAYERS = 28
PROMPT_TOKENS, NULL_TOKENS, TEMPLATE_TOKENS = 30, 6, 64
IMAGE = 990
"""The token that stands for a piece of the image, in the small vocabulary here."""


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=5)
    made.add_argument("--device", default="cpu")
    made.add_argument("--size", type=int, default=512, help="side of the image for the VAE, in pixels")
    made.add_argument("--layers", type=int, default=2, help="layers of Qwen2.5-VL's text and vision models, each")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.inference_mode():
        results.add(compare_vae(device, dtype, options.size, options.runs))
        gc.collect()
        results.add(compare_prompts(device, dtype, options.layers, options.runs))
        gc.collect()
        results.add(*compare_vision(device, dtype, options.runs))
    results.save()


def compare_vae(device: torch.device, dtype: torch.dtype, size: int, runs: int) -> Row:
    torch.manual_seed(0)
    diffusers.utils.logging.set_verbosity_error()
    vae = AutoencoderKLQwenImage().to(dtype).eval()
    ours = still_encoder(vae).to(device)
    vae.to(device)
    image = torch.randn(1, 3, 1, size, size, device=device, dtype=dtype)
    still = image[:, :, 0].contiguous(memory_format=torch.channels_last).unsqueeze(2)
    return measure(
        "vae",
        f"VAE without its time axis, {size}²",
        "diffusers' vae.encode",
        lambda: vae.encode(image).latent_dist.mode(),
        lambda: ours(still).chunk(2, dim=1)[0],
        runs,
    )


def compare_prompts(device: torch.device, dtype: torch.dtype, layers: int, runs: int) -> Row:
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config(layers)).model.to(dtype).eval().to(device)
    passes = Passes(model, device, dtype)
    name = f"prompt and null prompt, {layers} of {TEXT_LAYERS} text and {VISION_LAYERS} vision layers, 1024²"
    peer = "two full passes of transformers"
    return measure("prompt", name, peer, passes.two, passes.sharing_prefix, runs)


def compare_vision(device: torch.device, dtype: torch.dtype, runs: int, patches: int = 74) -> list[Row]:
    """`patches` of 14 pixels to a side of the image: 5,476, in 100 windows, for 1024²."""
    torch.manual_seed(0)
    tower = config(1).vision_config
    tower.fullatt_block_indexes = []
    own = Qwen2_5_VisionTransformerPretrainedModel(tower).to(dtype).eval().to(device)
    ours = copy.deepcopy(own)
    groups = VisionTower(ours, device).windows
    embed_patches_linearly(ours)
    _, bounds = get_vision_window_index(torch.tensor([[1, patches, patches]]), 2, own.window_size, own.patch_size)
    hidden, values = (
        torch.randn(patches**2, width, device=device, dtype=dtype) for width in (tower.hidden_size, 3 * 2 * 14 * 14)
    )
    angles = torch.randn(patches**2, tower.hidden_size // tower.num_heads, device=device)
    rope, windows = (angles.cos(), angles.sin()), groups(bounds.tolist())
    attention, grouped, on_device = own.blocks[0].attn, ours.blocks[0].attn, bounds.to(device)
    return [
        measure(
            "windows",
            f"a vision layer's attention, {len(bounds) - 1} windows in {len(windows.groups)} calls, {14 * patches}²",
            "transformers', a call for each window",
            lambda: attention(hidden, on_device, rope),
            lambda: grouped(hidden, bounds, rope, windows=windows),
            runs,
        ),
        measure(
            "patches",
            f"patch embedding by a matrix product, {14 * patches}²",
            "transformers', by Conv3d",
            lambda: own.patch_embed(values),
            lambda: ours.patch_embed(values),
            runs,
        ),
    ]


def config(layers: int) -> transformers.Qwen2_5_VLConfig:
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": layers,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "vocab_size": 1000,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": layers,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
        image_token_id=IMAGE,
        vision_start_token_id=991,
        vision_end_token_id=992,
    )


class Passes:
    """A prompt and the null prompt behind one image, both ways.

    Args:
        patches: of 14 pixels to a side of the image, an even number. For 1024² it is resized to 1036².
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype, patches: int = 74) -> None:
        self._model, self._device = model, device
        self._grid = torch.tensor([[1, patches, patches]], device=device)
        self._pixels = torch.randn(patches**2, 3 * 2 * 14 * 14, device=device, dtype=dtype)
        self._before = [1] * TEMPLATE_TOKENS + [991] + [IMAGE] * (patches // 2) ** 2 + [992]
        self._prompt, self._null = ([2] * count + [3] * 5 for count in (PROMPT_TOKENS, NULL_TOKENS - 5))

    def two(self) -> torch.Tensor:
        self._whole(self._ids(self._prompt), use_cache=False)
        states = self._whole(self._ids(self._null), use_cache=False).last_hidden_state
        return states[0, -len(self._null) :]  # type: ignore[no-any-return]

    def sharing_prefix(self) -> torch.Tensor:
        tokens, before, model = self._ids(self._prompt), len(self._before), self._model
        cache = self._whole(tokens, use_cache=True).past_key_values
        rope = model.get_rope_index(tokens, mm_token_type_ids=(tokens == IMAGE).int(), image_grid_thw=self._grid)
        start = int(rope[0][0, 0, before])
        visible = torch.ones(1, tokens.shape[1] + len(self._null), dtype=torch.long, device=self._device)
        visible[:, before : tokens.shape[1]] = 0
        positions = start + torch.arange(len(self._null), device=self._device).expand(3, 1, -1)
        tail = torch.tensor([self._null], device=self._device)
        states = model.language_model(
            inputs_embeds=model.get_input_embeddings()(tail),
            position_ids=positions,
            attention_mask=visible,
            past_key_values=cache,
            use_cache=True,
        )
        return states.last_hidden_state[0]  # type: ignore[no-any-return]

    def _ids(self, tail: list[int]) -> torch.Tensor:
        return torch.tensor([self._before + tail], device=self._device)

    def _whole(self, tokens: torch.Tensor, use_cache: bool) -> Any:
        return self._model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            pixel_values=self._pixels,
            image_grid_thw=self._grid,
            mm_token_type_ids=(tokens == IMAGE).int(),
            use_cache=use_cache,
        )


def measure(
    key: str,
    what: str,
    peer_name: str,
    peer: Callable[[], torch.Tensor],
    ours: Callable[[], torch.Tensor],
    runs: int,
) -> Row:
    """Compare both results, which warms up, then run them in turn."""
    difference = float((peer().float() - ours().float()).abs().max())
    taken = in_turn({"peer": peer, "ours": ours}, runs, warm_up=False)
    return beside(key, what, peer_name, taken["peer"], taken["ours"], more=f"differs by {difference:.1e}")


if __name__ == "__main__":
    main()

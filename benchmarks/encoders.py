"""Encoding beside what others do, in one run, on the CPU or a GPU: what the exact speed-ups are worth.

    python benchmarks/encoders.py [--device cpu|cuda:0] [--size 512] [--layers 2] [--runs 5]

Models are random and of the released shapes: the VAE whole; Qwen2.5-VL in its true width on as many tokens as a 1024²
image has, but with fewer layers unless `--layers 28` is given. Each line is a ratio of the medians of `--runs`
alternating runs, with the range of the paired ratios, and the largest difference between the two results.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLQwenImage

from qie.encode.vae import still_encoder

VISION_LAYERS = 32
TEXT_LAYERS = 28
PROMPT_TOKENS, NULL_TOKENS, TEMPLATE_TOKENS = 30, 6, 64


@dataclass(frozen=True)
class Comparison:
    """Two ways to one result."""

    name: str
    peer: str
    peer_s: list[float]
    ours_s: list[float]
    difference: float

    def __str__(self) -> str:
        ratios = [peer / ours for peer, ours in zip(self.peer_s, self.ours_s, strict=True)]
        peer, ours = statistics.median(self.peer_s), statistics.median(self.ours_s)
        return (
            f"{self.name}: {ours:.3f} s; {self.peer}: {peer:.3f} s; {peer / ours:.2f}× faster "
            f"({min(ratios):.2f}–{max(ratios):.2f}), {ours / peer:.2f} of the time; differs by {self.difference:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="encoders beside their peers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=512, help="side of the image for the VAE, in pixels")
    parser.add_argument("--layers", type=int, default=2, help="layers of Qwen2.5-VL's text and vision models, each")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}, {dtype}")
    with torch.inference_mode():
        print(compare_vae(device, dtype, options.size, options.runs))
        gc.collect()
        print(compare_prompts(device, dtype, options.layers, options.runs))


def compare_vae(device: torch.device, dtype: torch.dtype, size: int, runs: int) -> Comparison:
    """The released VAE's `encode` against its encoder without time axis, one image."""
    torch.manual_seed(0)
    diffusers.utils.logging.set_verbosity_error()
    vae = AutoencoderKLQwenImage().to(dtype).eval()
    ours = still_encoder(vae).to(device)
    vae.to(device)
    image = torch.randn(1, 3, 1, size, size, device=device, dtype=dtype)
    still = image[:, :, 0].contiguous(memory_format=torch.channels_last).unsqueeze(2)
    return measure(
        f"VAE without time axis, {size}²",
        "diffusers' vae.encode",
        lambda: vae.encode(image).latent_dist.mode(),
        lambda: ours(still).chunk(2, dim=1)[0],
        runs,
    )


def compare_prompts(device: torch.device, dtype: torch.dtype, layers: int, runs: int) -> Comparison:
    """Prompt and null prompt: two full passes, images included, against a pass and its continuation."""
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(
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
        image_token_id=990,
        vision_start_token_id=991,
        vision_end_token_id=992,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).model.to(dtype).eval().to(device)
    grid = torch.tensor([[1, 74, 74]], device=device)  # 1024² is resized to 1036²
    pixels = torch.randn(74 * 74, 3 * 2 * 14 * 14, device=device, dtype=dtype)
    before = [1] * TEMPLATE_TOKENS + [991] + [990] * (37 * 37) + [992]
    prompt, null = ([2] * count + [3] * 5 for count in (PROMPT_TOKENS, NULL_TOKENS - 5))

    def ids(tail: list[int]) -> torch.Tensor:
        return torch.tensor([before + tail], device=device)

    def whole(tokens: torch.Tensor, use_cache: bool) -> object:
        return model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=(tokens == 990).int(),
            use_cache=use_cache,
        )

    def two_passes() -> torch.Tensor:
        whole(ids(prompt), use_cache=False)
        return whole(ids(null), use_cache=False).last_hidden_state[0, -len(null) :]  # type: ignore[attr-defined]

    def continued() -> torch.Tensor:
        tokens = ids(prompt)
        cache = whole(tokens, use_cache=True).past_key_values  # type: ignore[attr-defined]
        start = int(
            model.get_rope_index(tokens, mm_token_type_ids=(tokens == 990).int(), image_grid_thw=grid)[0][
                0, 0, len(before)
            ]
        )
        seen = torch.ones(1, tokens.shape[1] + len(null), dtype=torch.long, device=device)
        seen[:, len(before) : tokens.shape[1]] = 0
        positions = start + torch.arange(len(null), device=device).expand(3, 1, -1)
        tail = torch.tensor([null], device=device)
        states = model.language_model(
            inputs_embeds=model.get_input_embeddings()(tail),
            position_ids=positions,
            attention_mask=seen,
            past_key_values=cache,
            use_cache=True,
        )
        return states.last_hidden_state[0]

    name = f"prompt + null prompt, {layers} of {TEXT_LAYERS} text and {VISION_LAYERS} vision layers, 1024²"
    return measure(name, "two full passes", two_passes, continued, runs)


def measure(
    name: str, peer_name: str, peer: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor], runs: int
) -> Comparison:
    """Warm up both, then run them in turn."""
    difference = float((peer().float() - ours().float()).abs().max())
    peer_s, ours_s = [], []
    for _ in range(runs):
        peer_s.append(seconds(peer))
        ours_s.append(seconds(ours))
    return Comparison(name, peer_name, peer_s, ours_s, difference)


def seconds(work: Callable[[], torch.Tensor]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

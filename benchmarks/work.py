"""The cost of a row in the released shapes, computed: FLOPs, bytes and memory. Nothing here is measured.

A multiplication and an addition are two. Layers of torch are counted by torch, on the meta device; attention in full,
though half of a causal one is masked. The vision tower cannot run there and is a formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from models import SIZES
from peft import LoraConfig
from samples import NULL, TAIL, WIDTH, made, record_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from qie.config import Quantization
from qie.encode.vae import still_encoder
from qie.training.flops import Architecture, Flops, step_flops
from qie.training.memory import Parameters, Setup, estimate

FULL = SIZES["full"]
TEMPLATE_TOKENS = 64
"""Before the image; they are encoded, and dropped."""
TERA, GB = 1e12, 1e9


@dataclass(frozen=True)
class Encoding:
    """FLOPs to encode a row of one control; of both images each way."""

    text: float
    vision: float
    vae: float
    vae_with_time: float

    @property
    def ours(self) -> float:
        return self.text + self.vision + self.vae

    @property
    def plain(self) -> float:
        """By diffusers' pipeline, the time axis of its VAE included."""
        return self.text + self.vision + self.vae_with_time


def image_tokens(side_px: int) -> int:
    """What Qwen2.5-VL makes of a square image: 28 pixels a token, rounded."""
    return round(side_px / 28) ** 2


def prompt_tokens(side_px: int) -> int:
    """Of an embedding as it is stored: the image between its two marks, and what follows it."""
    return image_tokens(side_px) + TAIL + 1


@cache
def encoding(side_px: int) -> Encoding:
    vae, ours = _vaes()
    image = torch.empty(1, 3, 1, side_px, side_px, device="meta")
    text = _qwen().model.language_model
    tokens = torch.empty(1, TEMPLATE_TOKENS + prompt_tokens(side_px), WIDTH, device="meta")
    with torch.inference_mode():
        return Encoding(
            text=_counted(text, tokens),
            vision=_vision(side_px),
            vae=2 * _counted(ours, image),
            vae_with_time=2 * _counted(vae.encode, image),
        )


def training(side_px: int, checkpointing: bool) -> Flops:
    """FLOPs of a LoRA's step on a row of one control."""
    with torch.device("meta"):
        architecture = Architecture.of(_transformer_config())
    blocks = architecture.blocks if checkpointing else 0
    target, text = (side_px // 16) ** 2, prompt_tokens(side_px)
    return step_flops(
        architecture, 2 * target, text, all_trained=False, checkpointed_blocks=blocks, target_tokens=target
    )


def encoder_bytes() -> tuple[int, int]:
    """Of both encoders in bfloat16: as diffusers' pipeline holds them, and without the language model's head."""
    qwen, (vae, _) = _qwen(), _vaes()
    whole = sum(weight.numel() for weight in (*qwen.parameters(), *vae.parameters()))
    return 2 * whole, 2 * (whole - sum(weight.numel() for weight in qwen.lm_head.parameters()))


def step_memory(side_px: int, quantize: Quantization | None, checkpointing: bool = True) -> float:
    """Bytes of a LoRA's training step, as qie-train estimates them before it loads anything."""
    setup = Setup(
        Architecture.of(_transformer_config()),
        _parameters(),
        2 * (side_px // 16) ** 2,
        prompt_tokens(side_px),
        target_tokens=(side_px // 16) ** 2,
        quantize=quantize,
        gradient_checkpointing=int(checkpointing),
    )
    return estimate(setup).total


def record_bytes(side_px: int = 1024) -> int:
    """Of a sample in a shard, its part of the tar included."""
    size = len(record_of(made(0, prompt_tokens(side_px), side=side_px // 8)))
    return 512 + -(-size // 512) * 512


def loose_bytes(side_px: int = 1024) -> int:
    """Of a sample's tensors as qwen-image-finetune keeps them: the null prompt's embedding is stored whole, too."""
    tokens = prompt_tokens(side_px)
    return (
        2 * 2 * 16 * (side_px // 8) ** 2 + 2 * WIDTH * (tokens + tokens - TAIL + NULL) + tokens + tokens - TAIL + NULL
    )


def text_alone_bytes(side_px: int = 1024, prompt: int = 80) -> tuple[int, int]:
    """Of a sample of Qwen-Image-2.1 with one control and a prompt of so many tokens, its part of the tar included; and
    of its tensors with embeddings of images, the null prompt's whole ones beside the prompt's."""
    width, side, prefix, null = 4096, side_px // 16, 9, 6  # 9 words of the template around the image
    generator = torch.Generator().manual_seed(0)

    def half(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 2**14, size, generator=generator, dtype=torch.int16).view(dtype)

    latent = half(64, 1, side, side, dtype=torch.float16)
    sample = replace(
        made(0, prefix + prompt, side=1, width=1),
        pixel_latent=latent,
        control_latent=(latent,),
        prompt_embed=half(prefix + prompt, width, dtype=torch.bfloat16),
        empty_tail=half(null, width, dtype=torch.bfloat16),
        empty_prompt_embeds_mask=torch.ones(prefix + null, dtype=torch.bool),
        shared_prefix=prefix,
        image_slots=(prefix - 1,),
    )
    size = len(record_of(sample))
    slots = side**2 // 4
    whole = 2 * latent.nbytes + 2 * width * (2 * (slots + prefix) + prompt + null)
    return 512 + -(-size // 512) * 512, whole


def _counted(work: torch.nn.Module, inputs: torch.Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        work(inputs_embeds=inputs) if inputs.ndim == 3 else work(inputs)
    return float(counter.get_total_flops())


def _vision(side_px: int) -> float:
    """Of the vision tower: layers, attention (four layers see the whole image, the others windows of 64), merger."""
    config, out = FULL.vision, WIDTH
    width, inner, layers, whole = config["hidden_size"], config["intermediate_size"], config["depth"], 4
    tokens = image_tokens(side_px)
    patches = 4 * tokens
    weights = layers * (4 * width**2 + 3 * width * inner) + 3 * 2 * 14 * 14 * width
    attention = 4 * patches * width * (whole * patches + (layers - whole) * 64)
    return float(2 * patches * weights + attention + 2 * tokens * (4 * width) * (4 * width + out))


@cache
def _vaes() -> tuple[AutoencoderKLQwenImage, torch.nn.Module]:
    """The released VAE and qie's encoder of it, which is made of real weights."""
    vae = AutoencoderKLQwenImage().eval()
    ours = still_encoder(vae)
    return vae.to("meta"), ours.to("meta")


@cache
def _qwen() -> Qwen2_5_VLForConditionalGeneration:
    ends = {"bos_token_id": None, "eos_token_id": None}
    vision = FULL.vision | {"out_hidden_size": WIDTH}
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=FULL.text | ends, vision_config=vision))


def _transformer_config() -> dict[str, int]:
    return FULL.transformer | {"joint_attention_dim": WIDTH}


@cache
def _parameters() -> Parameters:
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(**_transformer_config()).requires_grad_(False)
        transformer.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return Parameters.of(transformer)

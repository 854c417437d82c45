"""Qwen-Image-2.1: text-to-image and edits with any number of controls, which both encoders get at one size."""

from __future__ import annotations

from qie.families.family import Family

_SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"

QWEN_IMAGE_21 = Family(
    name="qwen_image_21",
    title="Qwen-Image-2.1",
    pipeline="QwenImage21Pipeline",
    vae="AutoencoderKLQwenImage21",
    text_encoder="Qwen3VLForConditionalGeneration",
    transformer="QwenImage21Transformer2DModel",
    diffusers="0.42",
    tokenizer_folder="processor",
    area_px=1024 * 1024,
    text_area_px=None,
    dropped=_SYSTEM,
    before_images=_SYSTEM + "<|im_start|>user\n",
    image_text="<image{number}><|vision_start|>{pads}<|vision_end|>",
    between_images=" ",
    after_prompt="<|im_end|>\n<|im_start|>assistant\n",
    min_controls=0,
    alpha=True,
    latent_channels=64,
    latent_scale=16,
    final_norm=False,
    interleaved=True,
    positions=8192,
    prompt_dtype="bfloat16",
    patch=1,
    guidance=1.0,
    steps=40,
    hub_tag="qwen-image-2.1",
)

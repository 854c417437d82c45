"""Qwen-Image-Edit: one control, which both encoders get at one size."""

from __future__ import annotations

from qie.families.family import Family

SYSTEM = (
    "<|im_start|>system\n"
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n"
)

EDIT = Family(
    name="edit",
    title="Qwen-Image-Edit",
    pipeline="QwenImageEditPipeline",
    vae="AutoencoderKLQwenImage",
    text_encoder="Qwen2_5_VLForConditionalGeneration",
    transformer="QwenImageTransformer2DModel",
    area_px=1024 * 1024,
    text_area_px=None,
    dropped=SYSTEM,
    dropped_tokens=64,
    before_images=SYSTEM,
    image_text="<|vision_start|>{pads}<|vision_end|>",
    after_prompt="<|im_end|>\n<|im_start|>assistant\n",
    max_controls=1,
)

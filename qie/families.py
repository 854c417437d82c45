"""The families of models that qie trains: the values in which they differ, and the texts around a prompt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

NULL_PROMPT = " "
"""What the released pipelines are called with for classifier-free guidance without a negative prompt."""

_SYSTEM = (
    "<|im_start|>system\n"
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n"
)


@dataclass(frozen=True)
class Family:
    """The values in which one family of models differs from another. The texts are those of diffusers' pipelines.

    Attributes:
        name: as in the configuration.
        pipeline: class name of the diffusers pipeline, as in `model_index.json`.
        area_px: image area that the VAE gets.
        text_area_px: image area that Qwen2.5-VL gets; None when it gets the VAE's own image.
        image_text: what stands for image number `{number}` in the text; `{pads}` becomes its image tokens.
        max_controls: how many controls a row may have; None for any number.
    """

    name: str
    pipeline: str
    area_px: int
    text_area_px: int | None
    image_text: str
    max_controls: int | None
    before_prompt: str = _SYSTEM
    after_prompt: str = "<|im_end|>\n<|im_start|>assistant\n"
    drop_tokens: int = 64
    multiple_px: int = 32


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="edit",
            pipeline="QwenImageEditPipeline",
            area_px=1024 * 1024,
            text_area_px=None,
            image_text="<|vision_start|>{pads}<|vision_end|>",
            max_controls=1,
        ),
        Family(
            name="edit_plus",
            pipeline="QwenImageEditPlusPipeline",
            area_px=1024 * 1024,
            text_area_px=384 * 384,
            image_text="Picture {number}: <|vision_start|>{pads}<|vision_end|>",
            max_controls=None,
        ),
    )
}


def template_digest(family: Family) -> str:
    """Hash of all text around a prompt, and of what is dropped of it."""
    texts = (family.before_prompt, family.image_text, family.after_prompt, str(family.drop_tokens), NULL_PROMPT)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()

"""Qwen-Image-Edit-2509 and 2511: any number of controls, which the text encoder gets smaller than the VAE."""

from __future__ import annotations

from dataclasses import replace

from qie.families.edit import EDIT

EDIT_PLUS = replace(
    EDIT,
    name="edit_plus",
    title="Qwen-Image-Edit-2509 and 2511",
    pipeline="QwenImageEditPlusPipeline",
    text_area_px=384 * 384,
    image_text="Picture {number}: <|vision_start|>{pads}<|vision_end|>",
    max_controls=None,
)

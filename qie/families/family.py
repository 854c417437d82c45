"""What one family of models differs by from another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

NULL_PROMPT = " "
"""What the released pipelines are called with for classifier-free guidance without a negative prompt."""


@dataclass(frozen=True)
class Family:
    """The values in which one family of models differs from another. The texts are those of diffusers' pipelines.

    Attributes:
        name: as in the configuration.
        title: as people know it.
        pipeline: class name of the diffusers pipeline, as in `model_index.json`.
        vae, text_encoder, transformer: class names of the components, as in their `config.json`.
        diffusers: the first release of diffusers that has these classes.
        tokenizer_folder: component whose folder holds the tokenizer.
        area_px: image area that the VAE gets.
        text_area_px: image area that the text encoder gets; None when it gets the VAE's own image.
        multiple_px: image sides are multiples of this.
        dropped: the beginning of the text, whose tokens the pipeline drops after encoding.
        dropped_tokens: how many these are, where the pipeline says so; None where it counts them.
        before_images: all text before the first image, or before the prompt; begins with `dropped`.
        image_text: what stands for image number `{number}` in the text; `{pads}` becomes its image tokens.
        between_images: text between one image and the next.
        after_prompt: the rest of the text.
        min_controls, max_controls: how many controls a row may have; None for any number.
        alpha: the VAE takes a fourth channel, opacity; the text encoder gets the image on a background.
        latent_channels, latent_scale: of the VAE's latents; image pixels per latent pixel, in each direction.
        final_norm: embeddings are the text encoder's hidden states after its final norm.
        interleaved: in the transformer, controls stand among the tokens of the text, where the text encoder saw them,
            and replace its embeddings there: text tokens alone are stored.
        positions: length of the transformer's table of rotary positions, which targets, controls and text share.
        prompt_dtype: precision in which embeddings are stored.
        patch: side of the square of latent pixels that is a token of the transformer.
        guidance: the scale of classifier-free guidance that the model is meant for; 1 is none.
        steps: denoising steps, where neither the user nor the model says how many.
        hub_tag: what model cards on the Hub call it.
    """

    name: str
    title: str
    pipeline: str
    vae: str
    text_encoder: str
    transformer: str
    area_px: int
    text_area_px: int | None
    dropped: str
    before_images: str
    image_text: str
    after_prompt: str
    dropped_tokens: int | None = None
    between_images: str = ""
    diffusers: str = "0.41"
    tokenizer_folder: str = "tokenizer"
    multiple_px: int = 32
    min_controls: int = 1
    max_controls: int | None = None
    alpha: bool = False
    latent_channels: int = 16
    latent_scale: int = 8
    final_norm: bool = True
    interleaved: bool = False
    positions: int = 4096
    prompt_dtype: str = "float16"
    patch: int = 2
    guidance: float = 4.0
    steps: int = 20
    hub_tag: str = "qwen-image-edit"

    @property
    def token_px(self) -> int:
        """Sides of a generated image are multiples of this: of a token of the transformer or, where one token of the
        text encoder stands for 2×2 of these, of two."""
        return self.latent_scale * self.patch * (2 if self.interleaved else 1)

    def text_tokens(self, area_px: float) -> float:
        """Tokens that stored embeddings have for images of so many pixels: one of Qwen2.5-VL is 28×28 of them."""
        return 0.0 if self.interleaved else area_px / 28**2

    @property
    def component_classes(self) -> dict[str, str]:
        """Class name of each component that has weights or is configured by name."""
        return {
            "vae": self.vae,
            "text_encoder": self.text_encoder,
            "transformer": self.transformer,
            "scheduler": "FlowMatchEulerDiscreteScheduler",
        }


def template_digest(family: Family) -> str:
    """Hash of all text around a prompt, and of what is dropped of it."""
    dropped = family.dropped if family.dropped_tokens is None else str(family.dropped_tokens)
    texts = [family.before_images, family.image_text, family.after_prompt, dropped, NULL_PROMPT]
    if family.between_images:
        texts.append(family.between_images)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()

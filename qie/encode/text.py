"""Prompts and the images they speak of, to the embeddings that the transformer was trained with.

Built from the tokenizer and the PIL image processor directly: `Qwen2VLProcessor` needs torchvision, and the pipelines
of diffusers up to 0.42.1 do not pass `mm_token_type_ids`, without which transformers 5 gives image tokens other
positions than the released model had (huggingface/diffusers#14194).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qie.errors import ModelError, RowError
from qie.pretrained import Checkpoint
from qie.recipe import NULL_PROMPT, Family

_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """Embeddings of a prompt and of the null prompt over the same images, template prefix dropped.

    Attributes:
        prompt: [L, D].
        empty: [L0, D]; its first `shared_prefix` tokens are those of `prompt`, bit for bit.
        shared_prefix: tokens before the prompt: images, and the words between them.
    """

    prompt: torch.Tensor
    empty: torch.Tensor
    shared_prefix: int


def check_prompt(prompt: str) -> None:
    """Raise RowError when a prompt cannot stand in the template: nothing in it, or a token that would be taken for an
    image or for the prompt's end."""
    if not prompt.strip():
        raise RowError("the prompt is empty")
    if special := _SPECIAL_TOKEN.search(prompt):
        raise RowError("the prompt contains a special token", found=special[0], hint="remove it from the prompt")


@dataclass(frozen=True, eq=False)
class _Images:
    """Images as Qwen2.5-VL takes them: flattened patches, their grids [n, 3], and tokens per image."""

    pixel_values: torch.Tensor
    grids: torch.Tensor
    tokens: tuple[int, ...]


class PromptEncoder:
    """Qwen2.5-VL on its device, without its language head, which embeddings do not use.

    Raises:
        ModelError: the tokenizer does not give the template the length that is dropped, so it is another model's.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._family: Family = checkpoint.family
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint.component("tokenizer"))
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint.component("processor"))
        self._check_template(checkpoint)
        folder = checkpoint.component("text_encoder")
        whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model = whole.model.eval().requires_grad_(False).to(device)
        self._image_token = whole.config.image_token_id
        self._vision_end = self._tokenizer.convert_tokens_to_ids("<|vision_end|>")

    @torch.inference_mode()
    def encode(self, images: Sequence[Image.Image], prompt: str) -> PromptEmbeds:
        """Embeddings of `prompt` and of the null prompt over `images`, already of the sizes that the recipe gives them.

        The prompt takes one full pass, exactly as the released pipeline's. The null prompt continues on the part of
        that pass's key-value cache that stands before the prompt: the model is causal, so it does not depend on it.
        """
        prepared = self._prepare(images)
        tokens, empty_tokens = (self._tokens(prepared, text) for text in (prompt, NULL_PROMPT))
        behind_images = int((tokens[0] == self._vision_end).nonzero()[-1]) + 1

        whole = self._model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            pixel_values=prepared.pixel_values,
            image_grid_thw=prepared.grids,
            mm_token_type_ids=self._token_types(tokens),
            use_cache=True,
        )
        cache = whole.past_key_values
        cache.crop(behind_images - tokens.shape[1])
        positions, _ = self._model.get_rope_index(
            empty_tokens, mm_token_type_ids=self._token_types(empty_tokens), image_grid_thw=prepared.grids
        )
        tail = self._model.language_model(
            inputs_embeds=self._model.get_input_embeddings()(empty_tokens[:, behind_images:]),
            attention_mask=torch.ones_like(empty_tokens),
            position_ids=positions[:, :, behind_images:],
            past_key_values=cache,
            use_cache=True,
        )
        drop = self._family.drop_tokens
        embed = whole.last_hidden_state[0, drop:]
        prefix = behind_images - drop
        return PromptEmbeds(embed, torch.cat([embed[:prefix], tail.last_hidden_state[0]]), prefix)

    def _prepare(self, images: Sequence[Image.Image]) -> _Images:
        inputs = self._processor(images=list(images), return_tensors="pt")
        grids = inputs["image_grid_thw"]
        tokens = tuple(int(grid.prod()) // self._processor.merge_size**2 for grid in grids)
        return _Images(inputs["pixel_values"].to(self.device), grids.to(self.device), tokens)

    def _tokens(self, images: _Images, prompt: str) -> torch.Tensor:
        """[1, L] ids of the whole text: template, image tokens, prompt."""
        pictures = "".join(
            self._family.image_text.format(number=number, pads="<|image_pad|>" * count)
            for number, count in enumerate(images.tokens, start=1)
        )
        text = self._family.before_prompt + pictures + prompt + self._family.after_prompt
        return torch.tensor([self._tokenizer(text)["input_ids"]], device=self.device)

    def _token_types(self, tokens: torch.Tensor) -> torch.Tensor:
        types: torch.Tensor = tokens == self._image_token
        return types.int()

    def _check_template(self, checkpoint: Checkpoint) -> None:
        found = len(self._tokenizer(self._family.before_prompt)["input_ids"])
        if found != self._family.drop_tokens:
            raise ModelError(
                "the tokenizer is not this model's: it gives the template another length",
                where=checkpoint.component("tokenizer"),
                expected=f"{self._family.drop_tokens} tokens before the images",
                found=found,
            )

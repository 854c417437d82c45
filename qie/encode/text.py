"""Prompts and their images, to the embeddings that the transformer was trained with.

This module uses the tokenizer and the PIL image processor directly. The processors of both together need torchvision,
and the Qwen-Image-Edit pipelines of diffusers up to 0.42.1 do not pass `mm_token_type_ids`, without which transformers
5 gives image tokens other positions than the released model had (huggingface/diffusers#14194).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qie.devices import sent, staged
from qie.encode.vision import DeepTower, VisionTower, add_deepstack
from qie.errors import ModelError, RowError
from qie.families import NULL_PROMPT, Family
from qie.pretrained import PretrainedModel, loading

_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")

MAX_PROMPT_CHARS = 65_536
"""Longer prompts are refused before they are tokenized, which can take minutes: 4,096 tokens are far fewer."""


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """Embeddings of a prompt and of the null prompt over the same images, template prefix dropped.

    Attributes:
        prompt: [L, D].
        null: [L0, D]; its first `shared_prefix` tokens equal those of `prompt`, bit for bit.
        shared_prefix: tokens before the prompt: images, and the words between them.
        is_image: [shared_prefix], on the host: which of these are tokens of an image.
    """

    prompt: torch.Tensor
    null: torch.Tensor
    shared_prefix: int
    is_image: torch.Tensor

    @property
    def image_slots(self) -> tuple[int, ...]:
        """For each image, how many tokens of text stand before it."""
        before = torch.nn.functional.pad(self.is_image, (1, 0))[:-1]
        starts = (self.is_image & ~before).nonzero().flatten()
        return tuple((~self.is_image).cumsum(0)[starts].tolist())

    def of_text(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Prompt and null prompt without their image tokens, and how many tokens these share."""
        places = (~self.is_image).nonzero().flatten()  # on the host, which need not wait for its GPU then
        text = self.prompt[sent(places, self.prompt.device)]
        prompt, null = (torch.cat([text, part[self.shared_prefix :]]) for part in (self.prompt, self.null))
        return prompt, null, len(text)


@dataclass(frozen=True, eq=False)
class Patches:
    """The vision tower's input, on the host: pixel values, and the grid of patches of each image, [n, 3]."""

    values: torch.Tensor
    grids: torch.Tensor


@dataclass(eq=False)
class VisionFeatures:
    """What Qwen-VL's vision tower gives for images, for any number of prompts.

    Attributes:
        text: template and image tokens, up to the prompt.
        features: the embeddings of the image tokens, [tokens, D].
        grids: the grid of patches of each image, [n, 3], on the host.
        deepstack: what is added to the image tokens after each of the language model's first layers, [tokens, D] each;
            none for Qwen2.5-VL.
        prefix: with share_prefix, a pass over `text`: key-value cache, last hidden states, next rotary position.
    """

    text: str
    features: torch.Tensor
    grids: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()
    prefix: tuple[Any, torch.Tensor, int] | None = None

    @property
    def nbytes(self) -> int:
        """Memory, about: with a prefix, the cache of every layer, too."""
        tensors = [self.features, *self.deepstack]
        if self.prefix is not None:
            cache, hidden, _ = self.prefix
            tensors += [hidden, *(part for layer in cache.layers for part in (layer.keys, layer.values))]
        return sum(tensor.nbytes for tensor in tensors)


def check_prompt(prompt: str) -> None:
    """Raise RowError for a prompt that does not fit the template: it is empty, far too long, no Unicode, or contains a
    special token, which the model would take for an image or for the prompt's end."""
    if not prompt.strip():
        raise RowError("the prompt is empty")
    if len(prompt) > MAX_PROMPT_CHARS:
        raise RowError("the prompt is too long", expected=f"at most {MAX_PROMPT_CHARS} characters", found=len(prompt))
    if half := re.search("[\ud800-\udfff]", prompt):
        raise RowError("the prompt is not valid Unicode", found=repr(half[0]), hint="write it as UTF-8")
    if special := _SPECIAL_TOKEN.search(prompt):
        raise RowError("the prompt contains a special token", found=special[0], hint="remove it from the prompt")


class PromptEncoder:
    """A Qwen-VL without its language head, which embeddings do not need. The first use loads the weights.

    Args:
        pretrained: with text_encoder, tokenizer and processor.
        device, dtype: where and in what precision it computes.
        share_prefix: see `encode`.

    Raises:
        ModelError: the tokenizer belongs to another model: it gives the template another length than the one dropped.
    """

    def __init__(
        self, pretrained: PretrainedModel, device: torch.device, dtype: torch.dtype, *, share_prefix: bool = False
    ) -> None:
        self.device, self.dtype, self._share_prefix = device, dtype, share_prefix
        self._folder = pretrained.component("text_encoder")
        self._family: Family = pretrained.family
        tokenizer, processor = pretrained.component("tokenizer"), pretrained.component("processor")
        with loading(tokenizer):
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        with loading(processor):
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(processor)
            self._processor.get_number_of_image_patches(56, 56)  # fails where it divides by a size of 0
        self._dropped = self._count_dropped(tokenizer)

    @cached_property
    def _model(self) -> Any:
        with loading(self._folder):
            whole = getattr(transformers, self._family.text_encoder).from_pretrained(
                # Straight from the mapped file to the device: processes share one copy of the weights in host memory.
                self._folder,
                dtype=self.dtype,
                use_safetensors=True,
                device_map={"": self.device},
            )
        model = whole.model.eval().requires_grad_(False)
        if hasattr(model.language_model, "_deepstack_process"):
            model.language_model._deepstack_process = add_deepstack
        if not self._family.final_norm:  # transformers 5 gives no hidden states from before it
            model.language_model.norm = torch.nn.Identity()
        return model

    @cached_property
    def _tower(self) -> VisionTower | DeepTower:
        if hasattr(self._model.visual, "deepstack_merger_list"):
            return DeepTower(self._model.visual, self.device)
        tower = VisionTower(self._model.visual, self.device)
        tower.check()
        return tower

    def count_tokens(self, image_sizes: Sequence[tuple[int, int]], prompt: str) -> int:
        """Length L of the prompt's embedding with images of these (width, height), as it is stored. Encodes nothing."""
        pads = [0] * len(image_sizes) if self._family.interleaved else self.image_tokens(image_sizes)
        text = self._before_prompt(pads) + prompt + self._family.after_prompt
        return len(self._tokenizer(text)["input_ids"]) - self._dropped

    def image_tokens(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """How many tokens each image of these (width, height) takes."""
        patches = (self._processor.get_number_of_image_patches(height, width) for width, height in sizes)
        return [count // self._processor.merge_size**2 for count in patches]

    def patches(self, images: Sequence[Image.Image]) -> Patches:
        """The vision tower's input for images that already have the recipe's sizes."""
        if not images:
            return Patches(torch.empty(0, dtype=self.dtype), torch.empty(0, 3, dtype=torch.long))
        inputs = self._processor(images=list(images), return_tensors="pt")
        return Patches(staged(inputs["pixel_values"], self.device, self.dtype), inputs["image_grid_thw"])

    @torch.inference_mode()
    def vision_features(self, patches: Patches) -> VisionFeatures:
        """Images through the vision tower; with share_prefix, through the language model, too."""
        features, *deepstack = self._seen(patches)
        pads = [int(grid.prod()) // self._processor.merge_size**2 for grid in patches.grids]
        images = VisionFeatures(self._before_prompt(pads), features, patches.grids, tuple(deepstack))
        if self._share_prefix:
            embeds, positions, is_image = self._inputs(images, images.text)
            output = self._model.language_model(
                inputs_embeds=embeds[None],
                position_ids=sent(positions, self.device)[:, None],
                use_cache=True,
                **self._deepstack([images], is_image[None]),
            )
            images.prefix = output.past_key_values, output.last_hidden_state[0], int(positions[0, -1]) + 1
        return images

    @torch.inference_mode()
    def encode(self, images: Sequence[VisionFeatures], prompts: Sequence[str]) -> list[PromptEmbeds]:
        """Embeddings of each prompt and of the null prompt with its images, in one batch.

        A prompt takes one full pass, exactly as in the released pipeline. The null prompt continues on the part of that
        pass's key-value cache that precedes the prompt: the model is causal, so that part does not depend on it.

        With `share_prefix` the prompt, too, continues on a cache: that of a pass over the images alone, which rows with
        the same images share. In float32 the result differs from a full pass by about 1e-6 of the values' deviation.

        The last bits depend on the batch; one row at a time, they depend on the row alone.
        """
        if self._share_prefix:
            return [self._continue(one, prompt) for one, prompt in zip(images, prompts, strict=True)]
        return self._whole(images, prompts)

    def _whole(self, images: Sequence[VisionFeatures], prompts: Sequence[str]) -> list[PromptEmbeds]:
        inputs = [
            self._inputs(one, one.text + prompt + self._family.after_prompt)
            for one, prompt in zip(images, prompts, strict=True)
        ]
        mask = _padded([torch.ones(len(embeds), dtype=torch.long) for embeds, *_ in inputs])
        positions = _padded([positions.T for _, positions, _ in inputs]).permute(2, 0, 1)
        output = self._model.language_model(
            inputs_embeds=_padded([embeds for embeds, *_ in inputs]),
            position_ids=sent(positions, self.device),
            # transformers reads a mask back from the GPU, to leave it out if nothing is padded.
            attention_mask=None if mask.all() else sent(mask, self.device),
            use_cache=True,
            **self._deepstack(images, _padded([is_image for *_, is_image in inputs])),
        )
        lengths = [len(self._tokenizer(one.text)["input_ids"]) for one in images]
        before = torch.arange(mask.shape[1]) < torch.tensor(lengths)[:, None]
        starts = [int(positions[0, length - 1]) + 1 for (_, positions, _), length in zip(inputs, lengths, strict=True)]
        tails = self._tails(output.past_key_values, before.long(), starts, [NULL_PROMPT] * len(images))
        hidden = [states[: len(embeds)] for states, (embeds, *_) in zip(output.last_hidden_state, inputs, strict=True)]
        return [
            self._embeds(states[:length], states[length:], tail, is_image[:length])
            for states, length, tail, (*_, is_image) in zip(hidden, lengths, tails, inputs, strict=True)
        ]

    def _continue(self, images: VisionFeatures, prompt: str) -> PromptEmbeds:
        assert images.prefix is not None
        cache, hidden, start = images.prefix
        texts = [prompt, NULL_PROMPT]
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(len(texts))
        before = torch.ones(len(texts), len(hidden), dtype=torch.long)
        tail, null_tail = self._tails(cache, before, [start] * len(texts), texts)
        return self._embeds(hidden, tail, null_tail, self._is_image(self._ids(images.text)))

    def _tails(
        self, cache: Any, before: torch.Tensor, starts: Sequence[int], texts: Sequence[str]
    ) -> list[torch.Tensor]:
        """Hidden states of prompts that continue on a cache, in one batch.

        Args:
            cache: of [B, P] tokens.
            before: [B, P], on the host: 1 where a cached token precedes the prompt, 0 where attention is to ignore it.
            starts: rotary position of each prompt's first token.
            texts: the prompts.
        """
        tokens = [self._tokenizer(text + self._family.after_prompt)["input_ids"] for text in texts]
        ids = _padded([torch.tensor(one) for one in tokens])
        mask = _padded([torch.ones(len(one), dtype=torch.long) for one in tokens])
        positions = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
        output = self._model.language_model(
            inputs_embeds=self._model.get_input_embeddings()(sent(ids, self.device)),
            position_ids=sent(positions, self.device).expand(3, -1, -1),
            attention_mask=sent(torch.cat([before, mask], dim=1), self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return [states[: len(one)] for states, one in zip(output.last_hidden_state, tokens, strict=True)]

    def _seen(self, patches: Patches) -> list[torch.Tensor]:
        """What the vision tower gives for images: their embeddings first."""
        if not len(patches.grids):
            return [torch.empty(0, self._model.config.text_config.hidden_size, device=self.device, dtype=self.dtype)]
        seen = self._tower.features(patches.values.to(self.device, non_blocking=True), patches.grids)
        return seen if isinstance(seen, list) else [seen]

    def _deepstack(self, images: Sequence[VisionFeatures], is_image: torch.Tensor) -> dict[str, Any]:
        """Arguments of the language model, for rows whose tokens are of an image where `is_image`, [B, L], says so."""
        layers = [torch.cat(layer) for layer in zip(*(one.deepstack for one in images if one.deepstack), strict=True)]
        if not layers:
            return {}
        return {"visual_pos_masks": sent(is_image, self.device), "deepstack_visual_embeds": layers}

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self._tokenizer(text)["input_ids"])

    def _is_image(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ids == self._model.config.image_token_id
        return found

    def _inputs(self, images: VisionFeatures, text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input embeddings [L, D] of a text with its images in place; on the host, rotary positions [3, L], and which
        tokens are of an image [L]."""
        ids = self._ids(text)[None]
        is_image = self._is_image(ids)
        embeds = self._model.get_input_embeddings()(sent(ids, self.device))
        embeds = embeds.masked_scatter(sent(is_image, self.device)[..., None], images.features.to(embeds.dtype))
        positions, _ = self._model.get_rope_index(ids, mm_token_type_ids=is_image.int(), image_grid_thw=images.grids)
        return embeds[0], positions[:, 0], is_image[0]

    def _embeds(
        self, before: torch.Tensor, tail: torch.Tensor, null_tail: torch.Tensor, is_image: torch.Tensor
    ) -> PromptEmbeds:
        prefix, is_image = before[self._dropped :], is_image[self._dropped :]
        return PromptEmbeds(torch.cat([prefix, tail]), torch.cat([prefix, null_tail]), len(prefix), is_image)

    def _before_prompt(self, pads: Sequence[int]) -> str:
        """Template and images; `pads` says how many tokens each image takes."""
        pictures = (
            self._family.image_text.format(number=number, pads="<|image_pad|>" * count)
            for number, count in enumerate(pads, start=1)
        )
        return self._family.before_images + self._family.between_images.join(pictures)

    def _count_dropped(self, folder: Path) -> int:
        """How many tokens of the template are dropped."""
        dropped, whole = (
            self._tokenizer(text)["input_ids"] for text in (self._family.dropped, self._family.before_images)
        )
        expected = self._family.dropped_tokens
        if len(dropped) != (expected or len(dropped)) or whole[: len(dropped)] != dropped:
            raise ModelError(
                "the tokenizer does not belong to this model: it gives the template another length",
                where=folder,
                expected=f"{expected or 'the same'} tokens before the images",
                found=len(dropped),
            )
        return len(dropped)


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as one tensor, the shorter ones padded with zeros at the end."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

"""diffusers' own pipelines without their encoders, at the image sizes of a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import diffusers
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import DiffusionPipeline

from qie.encode.images import Size
from qie.pretrained import PretrainedModel
from qie.training.model.load import load_scheduler


def make_pipeline(pretrained: PretrainedModel, vae: torch.nn.Module, transformer: torch.nn.Module) -> DiffusionPipeline:
    """The family's pipeline of diffusers, without encoders. All but the transformer computes on the VAE's device."""
    # With components on several devices, or offloaded ones, diffusers would choose any device; it asks a hook first.
    add_hook_to_module(vae, AlignDevicesHook(execution_device=vae.device))
    kind: Any = getattr(diffusers, pretrained.family.pipeline)
    parts: dict[str, Any] = {"scheduler": load_scheduler(pretrained), "vae": vae, "transformer": transformer}
    if pretrained.family.interleaved:
        pipeline = _with_slots(kind)(**parts, text_encoder=None, processor=_NoProcessor())
    else:
        pipeline = kind(**parts, **dict.fromkeys(("text_encoder", "tokenizer", "processor")))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class _NoProcessor:
    """Stands where QwenImage21Pipeline asks, as it is made, for tokens that only its own encoding needs."""

    def apply_chat_template(self, *_: object, **__: object) -> list[list[int]]:
        return [[]]

    @property
    def tokenizer(self) -> _NoProcessor:
        return self

    def encode(self, _: str) -> list[int]:
        return [0]


@cache  # made when it is asked for: older releases of diffusers do not have the class
def _with_slots(kind: type[Any]) -> type[Any]:
    """QwenImage21Pipeline, whose call takes embeddings of text alone, but has no way to say where controls stand."""

    class WithSlots(kind):  # type: ignore[misc]
        def encode_prompt(
            self, *given: Any, prompt_embeds: torch.Tensor, prompt_embeds_mask: torch.Tensor, **named: Any
        ) -> Any:
            """The embeddings as they are. The mask is true where they hold text, and false at the slots of controls."""
            slots = ~prompt_embeds_mask.bool()
            return super().encode_prompt(*given, prompt_embeds=prompt_embeds, image_pad_mask=slots, **named)

    return WithSlots


@contextmanager
def sized_by_area(pipeline: DiffusionPipeline, area_px: int) -> Iterator[None]:
    """Let the pipeline size its images for `area_px` instead of its constant of 1024².

    The pipelines have no argument for it, and take no latents in place of images. At the family's own area this changes
    nothing. A test compares the generated images with the pipeline's own.
    """
    module = _sizing_module(pipeline)
    original = module.calculate_dimensions
    with mock.patch.object(module, "calculate_dimensions", lambda _, ratio: original(area_px, ratio)):
        yield


@contextmanager
def sized_as_given(pipeline: DiffusionPipeline, sizes: Sequence[Size]) -> Iterator[None]:
    """Let QwenImage21Pipeline, in one call, leave its controls at the `sizes` that they have: it knows square areas
    alone, and the slots of the text are for these sizes.

    The pipeline asks for that of the last control, whose proportions an image has, and then for each control's.
    """
    asked = iter([*sizes[-1:], *sizes])

    def given(_: float, ratio: float) -> tuple[int, int, None]:
        width, height = next(asked)
        assert ratio == width / height, "the pipeline asks for sizes in another order"
        return width, height, None

    with mock.patch.object(_sizing_module(pipeline), "calculate_dimensions", given):
        yield


def _sizing_module(pipeline: DiffusionPipeline) -> Any:
    """The module of diffusers whose function says what size an image of given proportions has."""
    modules = (sys.modules[kind.__module__] for kind in type(pipeline).__mro__)
    return next(module for module in modules if hasattr(module, "calculate_dimensions"))

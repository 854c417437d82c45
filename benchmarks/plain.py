"""The plain loop that qie's is compared with: diffusers, peft and accelerate, put together with care."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling
from models import NEWER, PROMPT, Bench
from PIL import Image
from samples import SLOT
from transformers import AutoTokenizer, BatchFeature, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qie.data.opening import open_stream
from qie.data.sources import open_source


@contextmanager
def plain_loop(bench: Bench, live: bool, newer: bool = False) -> Iterator[Callable[[], None]]:
    """The training script of diffusers in short: as fast as it gets without changing how it works. `newer`: for
    Qwen-Image-2.1, on samples."""
    accelerator = bench.accelerator()
    kind = getattr(diffusers, NEWER) if newer else QwenImageTransformer2DModel
    packed, predicted = (packed_newer, predicted_newer) if newer else (packed_older, predicted_older)
    transformer = kind.from_pretrained(bench.model / "transformer", torch_dtype=torch.bfloat16)
    transformer.requires_grad_(False)
    transformer.to(accelerator.device)
    transformer.set_attention_backend("native")  # the default, unless a variant before set another
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(peft.LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian", target_modules=targets))
    transformer.enable_gradient_checkpointing()
    cast_training_params(transformer, dtype=torch.float32)
    weights = [weight for weight in transformer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    model, optimizer = accelerator.prepare(transformer.train(), optimizer)
    inputs = encoded(bench) if live else ready(bench)

    def step() -> None:
        target, control, prompt, mask = next(inputs)
        sigma = compute_density_for_timestep_sampling("logit_normal", 1, 0.0, 1.0).to(target)
        noise = torch.randn_like(target)
        noisy, beside, wanted = map(packed, ((1 - sigma) * target + sigma * noise, control, noise - target))
        found = predicted(model, noisy, beside, sigma, prompt, mask, (target.shape[-2], target.shape[-1]))
        accelerator.backward(torch.nn.functional.mse_loss(found.float(), wanted.float()))
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield step
    accelerator.free_memory()


def packed_older(latent: torch.Tensor) -> torch.Tensor:
    _, channels, _, height, width = latent.shape
    tokens: torch.Tensor = QwenImageEditPipeline._pack_latents(latent, 1, channels, height, width)
    return tokens


def packed_newer(latent: torch.Tensor) -> torch.Tensor:
    return latent.flatten(2).transpose(1, 2)


def predicted_older(
    model: Callable[..., Any],
    noisy: torch.Tensor,
    beside: torch.Tensor,
    sigma: torch.Tensor,
    prompt: torch.Tensor,
    mask: torch.Tensor | None,
    size: tuple[int, int],
) -> torch.Tensor:
    found: torch.Tensor = model(
        hidden_states=torch.cat([noisy, beside], dim=1),
        timestep=sigma,
        encoder_hidden_states=prompt,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, size[0] // 2, size[1] // 2)] * 2],
        return_dict=False,
    )[0]
    return found[:, : noisy.shape[1]]


def predicted_newer(
    model: Callable[..., Any],
    noisy: torch.Tensor,
    beside: torch.Tensor,
    sigma: torch.Tensor,
    prompt: torch.Tensor,
    _: torch.Tensor | None,
    size: tuple[int, int],
) -> torch.Tensor:
    """A place of an image among the text stands for four of its tokens, whatever its embedding."""
    places = noisy.shape[1] // 4
    embeds = torch.cat([prompt[:, :SLOT], prompt.new_zeros(1, places, prompt.shape[2]), prompt[:, SLOT:]], dim=1)
    is_image = torch.zeros(1, embeds.shape[1] + places, dtype=torch.bool, device=noisy.device)
    is_image[:, SLOT : SLOT + places] = is_image[:, -places:] = True
    found: torch.Tensor = model(
        hidden_states=torch.cat([beside, noisy], dim=1),
        timestep=sigma,
        encoder_hidden_states=embeds,
        img_shapes=[[(1, *size)] * 2],
        img_mask=is_image,
        return_dict=False,
    )[0]
    return found[:, -noisy.shape[1] :]


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def ready(bench: Bench) -> Iterator[Inputs]:
    """Target, control, prompt and its mask: those of the shards, on the device."""
    batches = [batch.to(bench.device, torch.bfloat16) for batch in open_stream([bench.folder / "shards"])]
    inputs = [(one.pixel_latent, one.control_latent[0], one.prompt_embed, one.prompt_embeds_mask) for one in batches]
    return itertools.cycle(inputs)


def encoded(bench: Bench) -> Iterator[Inputs]:
    """The same, made by diffusers' pipeline when they are asked for. Images are prepared before."""
    pipe = encoders(bench)
    prepared = [prepare(pipe, row) for row in decoded(bench)]

    def encode(row: Prepared) -> Inputs:
        target, control, prompt, mask = encode_row(pipe, row, PROMPT)
        return target.bfloat16(), control.bfloat16(), prompt.bfloat16(), mask

    return map(encode, itertools.cycle(prepared))


def saved(bench: Bench, folder: Path) -> Iterator[Path]:
    """Files of rows with both prompts' embeddings, as a script writes them: a row is decoded, encoded and saved, then
    the next."""
    pipe = encoders(bench)
    folder.mkdir(parents=True)
    for number, images in enumerate(decoded(bench)):
        row = prepare(pipe, images)
        found = [*encode_row(pipe, row, PROMPT), *encode_prompt(pipe, row, " ")]
        file = folder / f"{number}.pt"
        torch.save([one if one is None else one.cpu() for one in found], file)
        yield file


def encoders(bench: Bench) -> QwenImageEditPipeline:
    """The pipeline without its transformer."""
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32  # as qie's encoder
    vae = AutoencoderKLQwenImage.from_pretrained(bench.model / "vae", torch_dtype=dtype)
    text = Qwen2_5_VLForConditionalGeneration.from_pretrained(bench.model / "text_encoder", dtype=dtype)
    pipe = QwenImageEditPipeline(None, vae.eval(), text.eval(), None, Processor(bench.model), None)
    return pipe.to(bench.device)


def decoded(bench: Bench) -> Iterator[list[Image.Image]]:
    """Target and control of each row."""
    rows = open_source(bench.folder / "rows")
    for row in map(rows.read, range(len(rows))):
        yield [Image.open(io.BytesIO(file)).convert("RGB") for file in (row.target, *row.controls)]


Prepared = tuple[list[torch.Tensor], BatchFeature]


def prepare(pipe: QwenImageEditPipeline, images: list[Image.Image]) -> Prepared:
    """Pixels of target and control, and the control in patches."""
    pixels = [pipe.image_processor.preprocess(image).unsqueeze(2) for image in images]
    return pixels, pipe.processor.patches(images[-1])


@torch.no_grad()
def encode_row(pipe: QwenImageEditPipeline, row: Prepared, prompt: str) -> Inputs:
    embedding, mask = encode_prompt(pipe, row, prompt)
    moved = (pixels.to(pipe.vae.device, pipe.vae.dtype) for pixels in row[0])
    target, control = (pipe._encode_vae_image(pixels, generator=None) for pixels in moved)
    return target, control, embedding, mask


@torch.no_grad()
def encode_prompt(pipe: QwenImageEditPipeline, row: Prepared, prompt: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    embedding, mask = pipe.encode_prompt(prompt, image=row[1], device=pipe.text_encoder.device)
    return embedding, mask


class Processor:
    """Stands for Qwen2VLProcessor, which needs torchvision. An image is its patches, made before."""

    def __init__(self, model: Path) -> None:
        self._images = Qwen2VLImageProcessorPil.from_pretrained(model / "processor")
        self._tokenizer = AutoTokenizer.from_pretrained(model / "tokenizer")

    def patches(self, image: Image.Image) -> BatchFeature:
        return self._images(images=[image], return_tensors="pt")

    def __call__(self, text: list[str], images: BatchFeature, **_: object) -> BatchFeature:
        pad = "<|image_pad|>"
        pads = int(images["image_grid_thw"].prod()) // self._images.merge_size**2
        tokens = self._tokenizer([one.replace(pad, pad * pads) for one in text], return_tensors="pt")
        return BatchFeature({**tokens, **images})

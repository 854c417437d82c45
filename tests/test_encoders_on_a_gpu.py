"""The encoders on a GPU that is not there, in their true width: devices, waits and copies, from a row to its sample."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from qie.devices import staged
from qie.encode import Encoder, EncoderOptions
from qie.encode.text import PromptEncoder
from qie.encode.vae import VaeEncoder, _Still, without_time
from qie.encode.vision import VisionTower, add_deepstack
from qie.families import FAMILIES
from qie.pretrained import open_pretrained
from qie.shards.tensors import store_together, to_storage
from qie.types import Row
from tests.conftest import AREA_PX, ROOT
from tests.fake_cuda import GPU, FakeGpu, fake_gpu

HALF = torch.bfloat16


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as made:
        yield made


def text_model(pretrained) -> torch.nn.Module:
    """Two of the released model's layers each, one of which has windows."""
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
        import encoders as benchmark
    tiny = Qwen2_5_VLConfig.from_pretrained(pretrained.component("text_encoder"))
    config = benchmark.config(2)
    config.image_token_id, config.text_config.vocab_size = tiny.image_token_id, tiny.text_config.vocab_size
    config.vision_config.fullatt_block_indexes = [1]
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(config).model.eval().to(HALF).requires_grad_(False)


def prompt_encoder(pretrained, gpu: FakeGpu, share_prefix: bool = False) -> PromptEncoder:
    made = PromptEncoder(pretrained, GPU, HALF, share_prefix=share_prefix)
    made.__dict__["_model"] = gpu.moved(text_model(pretrained))
    made.__dict__["_tower"] = VisionTower(made._model.visual, GPU)
    return made


def image_encoder(folder: Path, gpu: FakeGpu) -> VaeEncoder:
    with torch.device("meta"):
        still = without_time(_Still(AutoencoderKLQwenImage())).to(HALF).requires_grad_(False)
    tiny = VaeEncoder(folder, torch.device("cpu"), HALF)
    tiny.device, tiny._moments = GPU, gpu.moved(still)
    tiny._mean, tiny._std = tiny._mean.to(GPU), tiny._std.to(GPU)
    return tiny


def picture(width: int, height: int) -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert("RGB")


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    picture(width, height).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(("family", "controls"), [("edit", 1), ("edit_plus", 3)])
def test_a_row_is_encoded_on_the_gpu_and_the_host_waits_once_for_each_image_and_once_for_the_text(
    family: str, controls: int, tiny_edit: Path, gpu: FakeGpu
) -> None:
    pretrained = replace(open_pretrained(str(tiny_edit)), family=FAMILIES[family])
    encoder = Encoder.open(
        pretrained, vae_device=GPU, text_device=GPU, options=EncoderOptions(compute_dtype="bfloat16")
    )
    encoder.__dict__ |= {
        "vae": image_encoder(pretrained.component("vae"), gpu),
        "text": prompt_encoder(pretrained, gpu),
    }
    row = Row(0, "row", png(64, 48), tuple(png(48 + 16 * n, 64) for n in range(controls)), "make it night")
    gpu.forget()
    sample = encoder.encode(row)
    images = ["store_together reads a value"] * (1 + controls)
    assert gpu.waits == [*images, "store_together reads a value"]
    stored = [sample.pixel_latent, *sample.control_latent, sample.prompt_embed, sample.empty_tail]
    assert gpu.to_host == [(tensor.nbytes, torch.float16) for tensor in stored]
    assert all(tensor.device.type == "cpu" for tensor in stored)
    assert not gpu.calls["conv3d"]


def test_an_image_of_1024_is_encoded_without_a_wait_and_without_casts(tiny_edit: Path, gpu: FakeGpu) -> None:
    vae = image_encoder(tiny_edit / "vae", gpu)
    pixels = staged(torch.zeros(1, 3, 1024, 1024), GPU, HALF)
    gpu.forget()
    latent = vae.encode(pixels)
    assert (latent.shape, latent.dtype, latent.device) == ((16, 1, 128, 128), HALF, GPU)
    assert not gpu.waits and gpu.calls["_to_copy"] == 1, "of the pixels"


def test_prompts_that_share_their_prefix_are_encoded_without_a_wait(tiny_edit: Path, gpu: FakeGpu) -> None:
    encoder = prompt_encoder(open_pretrained(str(tiny_edit)), gpu, share_prefix=True)
    gpu.forget()
    features = encoder.vision_features(encoder.patches([picture(256, 192)]))
    (embeds,) = encoder.encode([features], ["make it night"])
    assert embeds.prompt.device == embeds.null.device == GPU and not gpu.waits


def test_storage_rounds_on_the_gpu_and_copies_to_page_locked_memory_with_one_wait(gpu: FakeGpu) -> None:
    values = torch.empty(1400, 3584, dtype=HALF, device=GPU)
    to_storage(values, "x")
    assert gpu.to_host == [(2 * values.numel(), torch.float16)] and gpu.waits == ["store_together reads a value"]
    gpu.forget()
    store_together((values, "x"), (values[:6], "y"))
    assert len(gpu.to_host) == 2 and len(gpu.waits) == 1


@pytest.mark.parametrize("controls", [0, 2])
def test_a_row_of_qwen_image_21_is_encoded_on_the_gpu(controls: int, tiny_21: Path, gpu: FakeGpu) -> None:
    pretrained = open_pretrained(str(tiny_21))
    options = EncoderOptions(compute_dtype="bfloat16", areas_px=(AREA_PX,))
    encoder = Encoder.open(pretrained, vae_device=GPU, text_device=GPU, options=options)
    with torch.device("meta"):
        config = diffusers.AutoencoderKLQwenImage21.load_config(tiny_21 / "vae")
        still = _Still(diffusers.AutoencoderKLQwenImage21.from_config(config)).to(HALF).requires_grad_(False)
        config = Qwen3VLConfig.from_pretrained(tiny_21 / "text_encoder")
        model = Qwen3VLForConditionalGeneration(config).model.eval().to(HALF).requires_grad_(False)
    vae = VaeEncoder(tiny_21 / "vae", torch.device("cpu"), HALF, pretrained.family.vae)
    vae.device, vae._moments, vae._mean, vae._std = GPU, gpu.moved(still), vae._mean.to(GPU), vae._std.to(GPU)
    text = PromptEncoder(pretrained, GPU, HALF)
    model.language_model._deepstack_process, model.language_model.norm = add_deepstack, torch.nn.Identity()
    text.__dict__["_model"] = gpu.moved(model)
    encoder.__dict__ |= {"vae": vae, "text": text}
    row = Row(0, "row", png(64, 48), tuple(png(48 + 16 * n, 64) for n in range(controls)), "make it night")
    gpu.forget()
    sample = encoder.encode(row)
    stored = [sample.pixel_latent, *sample.control_latent, sample.prompt_embed, sample.empty_tail]
    halves = [torch.float16] * (1 + controls) + [HALF] * 2
    assert gpu.to_host == [(tensor.nbytes, dtype) for tensor, dtype in zip(stored, halves, strict=True)]
    assert gpu.waits == ["store_together reads a value"] * (2 + controls)
    assert not gpu.calls["conv3d"]

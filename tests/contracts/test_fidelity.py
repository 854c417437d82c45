"""Law 7: embeddings, latents and pictures are those of the diffusers pipelines as released."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import numpy as np
import PIL
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image
from safetensors.torch import load_file

from qie.encode.images import show, to_pixels
from qie.encode.sizes import choose_view
from qie.encode.text import PromptEncoder
from qie.predict import Painter
from qie.pretrained import Checkpoint, open_checkpoint
from qie.recipe import FAMILIES, NULL_PROMPT
from tests.conftest import AREA_PX

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())
CPU = torch.device("cpu")


# The golden files were made with Pillow 13, which resizes otherwise than Pillow 12.
needs_golden_pillow = pytest.mark.skipif(
    int(PIL.__version__.partition(".")[0]) < 13, reason="golden files need Pillow 13"
)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="module")
def encoders() -> dict[str, PromptEncoder]:
    return {name: PromptEncoder(Checkpoint(GOLDEN, family), CPU, torch.float32) for name, family in FAMILIES.items()}


def resized(image: Image.Image, area_px: int) -> Image.Image:
    return show(image, choose_view(image.size, (area_px,), (), 32))


def golden_images(case: dict) -> list[Image.Image]:
    return [resized(Image.open(GOLDEN / name).convert("RGB"), case["area"]) for name in case["images"]]


@needs_golden_pillow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_embeddings_equal_the_released_pipelines_bit_for_bit(case: dict, encoders, expected) -> None:
    encoder = encoders[case["family"]]
    (embeds,) = encoder.encode([encoder.see(encoder.patches(golden_images(case)))], [case["prompt"]])
    assert torch.equal(embeds.prompt, expected[case["name"]])


@needs_golden_pillow
def test_the_null_prompt_continued_on_the_cache_is_the_null_prompt_encoded_whole(encoders, expected) -> None:
    case = next(case for case in CASES if case["name"] == "edit.gray")
    encoder = encoders["edit"]
    (embeds,) = encoder.encode([encoder.see(encoder.patches(golden_images(case)))], [case["prompt"]])
    whole = expected["edit.null"]
    assert embeds.empty.shape == whole.shape
    assert embeds.shared_prefix > 50
    assert torch.equal(embeds.empty[: embeds.shared_prefix], embeds.prompt[: embeds.shared_prefix])
    assert (embeds.empty - whole).abs().max() < 2e-6 * whole.std()
    assert (embeds.prompt[: len(whole)] - whole)[embeds.shared_prefix :].abs().max() > 0.1, "the prompt has no effect"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_template_is_the_pipelines(family) -> None:
    pipeline = getattr(diffusers, family.pipeline)(None, None, None, None, None, None)
    template = pipeline.prompt_template_encode
    image = family.image_text.format(number=1, pads="<|image_pad|>") if family.max_controls == 1 else ""
    assert template.format("PROMPT") == f"{family.before_prompt}{image}PROMPT{family.after_prompt}"
    assert pipeline.prompt_template_encode_start_idx == family.drop_tokens


def test_latents_equal_the_pipelines(tiny_edit: Path, encoder) -> None:
    pipeline = diffusers.QwenImageEditPipeline(
        scheduler=None,
        vae=AutoencoderKLQwenImage.from_pretrained(tiny_edit / "vae"),
        text_encoder=None,
        tokenizer=None,
        processor=None,
        transformer=None,
    )
    image = Image.open(GOLDEN / "coffee.png").convert("RGB")
    small = resized(image, AREA_PX)
    pixels = pipeline.image_processor.preprocess(image, small.height, small.width).unsqueeze(2)
    with torch.no_grad():
        reference = pipeline._encode_vae_image(pixels, generator=None)[0]
    latent = encoder.vae.encode(to_pixels(small))
    assert reference.std() > 0.3
    assert (latent - reference).abs().max() <= 1e-5


@pytest.mark.parametrize(("family", "count", "cfg"), [("edit", 1, 3.0), ("edit_plus", 2, 1.0)])
def test_painting_equals_the_pipeline_from_the_same_embeddings(
    family: str, count: int, cfg: float, request: pytest.FixtureRequest
) -> None:
    """At the family's own area, one of them with guidance, bit for bit."""
    from dataclasses import replace

    from qie.encode import Encoder

    folder = request.getfixturevalue(f"tiny_{family}")
    checkpoint = open_checkpoint(str(folder), components=("vae", "transformer", "scheduler"))
    small = request.getfixturevalue("encoder" if family == "edit" else "encoder_plus")
    # The text encoder sees small images, to be quick; the VAE and the transformer see what the pipeline gives them.
    recipe = replace(small.recipe, areas_px=(FAMILIES[family].area_px,), text_area_px=16384)
    encoder = Encoder(small.checkpoint, recipe, CPU, CPU)
    encoder.__dict__["text"] = small.text
    images = [Image.open(GOLDEN / name).convert("RGB") for name in ("chelsea.png", "coffee.png")][:count]
    painter = Painter(checkpoint, encoder, vae_device=CPU, transformer_device=CPU, dtype=torch.float32)
    painted = painter.paint(images, "make it night", steps=2, cfg=cfg, seed=7)

    embeds = [encoder.embed(images, prompt)[None] for prompt in ("make it night", NULL_PROMPT)]
    mask = torch.ones(embeds[1].shape[:2], dtype=torch.long)
    negative = {"negative_prompt_embeds": embeds[1], "negative_prompt_embeds_mask": mask}
    reference = painter.pipeline(
        image=images if count > 1 else images[0],
        prompt_embeds=embeds[0],
        prompt_embeds_mask=torch.ones(embeds[0].shape[:2], dtype=torch.long),
        **(negative if cfg > 1 else {}),
        true_cfg_scale=cfg,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert np.array_equal(np.array(painted), np.array(reference))
    assert np.array(painted).std() > 5

"""Law 7 for Qwen-Image-2.1: embeddings and latents are those of diffusers' QwenImage21Pipeline.

Its own `encode_prompt` and `prepare_latents` compute the reference in this process, over the tiny model. One thing is
ours: `Qwen3VLProcessor` needs torchvision, so its parts are called one by one.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import diffusers
import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, BatchFeature, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qie.encode.images import apply_view, choose_view, on_background, to_pixels
from qie.encode.text import PromptEmbeds, PromptEncoder
from qie.families import FAMILIES, NULL_PROMPT
from qie.inference import Predictor
from qie.pretrained import PretrainedModel, open_pretrained
from qie.shards.tensors import store_together
from qie.types import Row, Sample

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"
GOLDEN_21 = GOLDEN.with_name("golden_21")
CPU = torch.device("cpu")
FAMILY = FAMILIES["qwen_image_21"]
AREA_PX = 96 * 96
ROUNDING = 1e-5  # of the values' deviation: what a sum in another order moves


class Processor:
    """`Qwen3VLProcessor` without torchvision."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def apply_chat_template(self, messages: list[dict], **options: bool) -> list[list[int]]:
        return [self.tokenizer.apply_chat_template(messages, **options)]

    def __call__(self, text: list[str], images: list[Image.Image] | None = None, **options: object) -> BatchFeature:
        seen = self.images(images=images, return_tensors="pt") if images else {}
        pads = [int(grid.prod()) // 4 for grid in seen.get("image_grid_thw", ())]
        parts = [part.split("<|image_pad|>") for part in text]
        for part in parts:
            for number in range(len(part) - 1):
                part[number] += "<|image_pad|>" * pads.pop(0)
        tokens = self.tokenizer(["".join(part) for part in parts], **options)
        image = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        types = (tokens["input_ids"] == image).int()
        return BatchFeature({**tokens, **seen, "mm_token_type_ids": types})


class Released:
    """The pipeline as released, over a model's encoders."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.pipeline = diffusers.QwenImage21Pipeline(
            scheduler=None,
            vae=diffusers.AutoencoderKLQwenImage21.from_pretrained(folder / "vae"),
            text_encoder=None,
            processor=Processor(folder / "processor"),
            transformer=None,
        )
        model = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype)
        self.pipeline.text_encoder = model.eval()

    @torch.no_grad()
    def embed(self, images: list[Image.Image], prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, D], and which of the L tokens are of an image."""
        (embeds,), mask, (is_image,) = self.pipeline.encode_prompt(prompt, images or None, CPU)
        assert mask is None
        return embeds, is_image


@pytest.fixture(scope="module")
def released(tiny_21: Path) -> Released:
    return Released(tiny_21)


@pytest.fixture(scope="module")
def prompts(tiny_21: Path) -> PromptEncoder:
    return PromptEncoder(open_pretrained(str(tiny_21)), CPU, torch.float32)


def picture(name: str, size: tuple[int, int] | None = None, *, alpha: bool = False) -> Image.Image:
    """RGBA, at the size that the recipe gives it."""
    image = Image.open(GOLDEN / f"{name}.png").convert("RGB")
    image = image.resize(size) if size else image
    image.putalpha(Image.linear_gradient("L").resize(image.size) if alpha else 255)
    return apply_view(image, choose_view(image.size, (AREA_PX,), (), FAMILY.multiple_px))


CHINESE = "把咖啡变成茶，背景换成夜晚的城市 ☕ — naïve façade"
LONG = "Make the cat look at the coffee, and paint both as if they were made of paper; " * 12
CASES = {
    "text alone": ([], "a capybara that wears a wizard's hat"),
    "text alone, Chinese": ([], CHINESE),
    "text alone, long": ([], LONG),
    "text alone, digits and tags": ([], "<image1> of 12 images: 3 + 4 = 7?"),
    "null": ([], NULL_PROMPT),
    "one": ([("chelsea", None, False)], "turn the photo black and white"),
    "one, null": ([("chelsea", None, False)], NULL_PROMPT),
    "one, Chinese": ([("coffee", None, False)], CHINESE),
    "one, alpha": ([("coffee", None, True)], "fill what is missing"),
    "one, wide": ([("chelsea", (1200, 60), False)], "make it night"),
    "one, tall": ([("coffee", (20, 700), True)], "make it day"),
    "two": ([("chelsea", None, False), ("coffee", None, False)], "put the cat next to the coffee"),
    "two, long": ([("chelsea", None, True), ("coffee", (90, 200), False)], LONG),
    "three": ([("chelsea", None, False), ("coffee", None, True), ("chelsea", (300, 90), False)], "all in one"),
    "four": ([("chelsea", None, False), ("coffee", None, False)] * 2, "一二三四"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[list[Image.Image], str]:
    images, prompt = CASES[request.param]
    return [picture(name, size, alpha=alpha) for name, size, alpha in images], prompt


def embedded(prompts: PromptEncoder, images: list[Image.Image], prompt: str) -> PromptEmbeds:
    patches = prompts.patches([on_background(image, "#ffffff") for image in images])
    return prompts.encode([prompts.vision_features(patches)], [prompt])[0]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in deviations of what is expected."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.std())


def test_a_prompt_s_embedding_is_the_pipeline_s_bit_for_bit_and_the_null_prompt_s_but_for_rounding(
    case: tuple[list[Image.Image], str], prompts: PromptEncoder, released: Released
) -> None:
    images, prompt = case
    found = embedded(prompts, images, prompt)
    expected, is_image = released.embed(images, prompt)
    assert torch.equal(found.prompt, expected)
    null, _ = released.embed(images, NULL_PROMPT)
    assert distance(found.null, null) < ROUNDING
    assert torch.equal(found.null[: found.shared_prefix], found.prompt[: found.shared_prefix])
    assert torch.equal(found.is_image, is_image[: found.shared_prefix]) and not is_image[found.shared_prefix :].any()
    assert prompts.count_tokens([image.size for image in images], prompt) == len(found.of_text()[0])


@pytest.fixture(scope="module")
def golden() -> PromptEncoder:
    return PromptEncoder(PretrainedModel(GOLDEN_21, FAMILY), CPU, torch.float32)


EXPECTED = load_file(GOLDEN_21 / "expected.safetensors")


@pytest.mark.skipif(int(PIL.__version__.partition(".")[0]) < 13, reason="golden files need Pillow 13")
@pytest.mark.parametrize("name", EXPECTED)
def test_embeddings_of_text_are_those_that_the_pipeline_gave_on_another_machine(
    name: str, golden: PromptEncoder
) -> None:
    images, prompt = CASES[name]
    pictures = [picture(file, size, alpha=alpha) for file, size, alpha in images]
    assert distance(embedded(golden, pictures, prompt).of_text()[0], EXPECTED[name]) < ROUNDING


def test_the_template_is_the_pipeline_s(released: Released, prompts: PromptEncoder) -> None:
    pipeline = released.pipeline
    image = FAMILY.image_text.format(number=1, pads="<|image_pad|>")
    for template, images in ((pipeline.prompt_template_t2i, ""), (pipeline.prompt_template_ti2i, image)):
        assert template.format("PROMPT") == f"{FAMILY.before_images}{images}PROMPT{FAMILY.after_prompt}"
    assert pipeline._drop_idx == prompts._dropped


def stored(embeds: PromptEmbeds) -> list[torch.Tensor]:
    """Prompt and null prompt as records have them."""
    prompt, null, _ = embeds.of_text()
    return [one.values for one in store_together((prompt, "it"), (null, "it"), dtype=torch.bfloat16)]


def test_what_is_stored_of_a_prompt_is_the_pipeline_s_text_bit_for_bit_also_in_bfloat16(tiny_21: Path) -> None:
    half, reference = (
        PromptEncoder(open_pretrained(str(tiny_21)), CPU, torch.bfloat16),
        Released(tiny_21, torch.bfloat16),
    )
    for images, prompt in (([], CHINESE), ([picture("chelsea"), picture("coffee", alpha=True)], "make it night")):
        expected, is_image = reference.embed(images, prompt)
        found = embedded(half, images, prompt)
        assert found.prompt.dtype == torch.bfloat16 and torch.equal(stored(found)[0], expected[~is_image])
        assert expected.abs().max() > 3, "after the final norm, values would be near 1"


@pytest.mark.parametrize(
    ("name", "size", "alpha"),
    [("chelsea", None, False), ("coffee", None, True), ("chelsea", (1200, 60), False), ("coffee", (20, 700), True)],
)
def test_latents_are_the_pipeline_s(name: str, size, alpha: bool, released: Released, encoder_21) -> None:
    pipeline, image = released.pipeline, picture(name, size, alpha=alpha)
    pixels = pipeline.image_processor.preprocess(image, image.height, image.width).unsqueeze(2)
    with torch.no_grad():
        _, packed = pipeline.prepare_latents([pixels], 1, 64, image.height, image.width, torch.float32, CPU, None)
    latent = encoder_21.vae.encode(to_pixels(image))
    assert latent.shape == (64, 1, image.height // 16, image.width // 16)
    assert distance(latent.flatten(1).T, packed[0]) <= ROUNDING


def with_slots(sample: Sample, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A stored prompt's embedding [1, L, D] in which `rest` fills the slots of images, and which those are, [1, L]."""
    counts = [latent.shape[-2] * latent.shape[-1] // 4 for latent in sample.control_latent]
    is_image = torch.zeros(len(sample.prompt_embed) + sum(counts), dtype=torch.bool)
    for start, before, count in zip(sample.image_slots, [0, *torch.tensor(counts).cumsum(0)], counts, strict=False):
        is_image[start + before : start + before + count] = True
    embeds = torch.empty(len(is_image), sample.prompt_embed.shape[1])
    embeds[~is_image], embeds[is_image] = sample.prompt_embed.float(), rest[: int(is_image.sum())]
    return embeds[None], is_image[None]


@pytest.mark.parametrize("controls", range(4))
def test_what_is_not_stored_changes_neither_output_nor_loss_nor_any_gradient_by_a_bit(
    controls: int, tiny_21: Path, encoder_21, released: Released
) -> None:
    """Of diffusers' own transformer, all of whose weights are trained."""
    files = [(GOLDEN / f"{name}.png").read_bytes() for name in ("chelsea", "coffee", "chelsea", "coffee")]
    sample = encoder_21.encode(Row(0, "", files[0], tuple(files[:controls]), "make it night"))
    latents = [*sample.control_latent, torch.randn(sample.pixel_latent.shape)]
    shapes = [(1, latent.shape[-2], latent.shape[-1]) for latent in latents]
    target = torch.ones(1, shapes[-1][1] * shapes[-1][2] // 4, dtype=torch.bool)
    model = diffusers.QwenImage21Transformer2DModel.from_pretrained(tiny_21 / "transformer").train()

    def output(embeds: torch.Tensor, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        found = model(
            torch.cat([latent.float().flatten(1).T for latent in latents])[None],
            encoder_hidden_states=embeds,
            timestep=torch.tensor([0.5]),
            img_shapes=[shapes],
            img_mask=torch.cat([is_image, target], dim=1),
        ).sample
        loss = (found[:, -target.shape[1] * 4 :] - latents[0].float().mean()).square().mean()
        loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()} | {"": found, "loss": loss}

    images = [Image.open(GOLDEN / f"{name}.png").convert("RGBA") for name in ("chelsea", "coffee", "chelsea")]
    views = [apply_view(image, choose_view(image.size, encoder_21.recipe.areas_px, (), 32)) for image in images]
    whole, is_image = released.embed(views[:controls], "make it night")
    expected = output(whole.bfloat16().float()[None], is_image[None])
    noise = torch.randn(5000, whole.shape[1]) * 9
    found = output(*with_slots(sample, noise))
    assert torch.equal(with_slots(sample, noise)[1], is_image[None])
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert found[""].std() > 0.1 and found["txt_in.in_layer.weight"].abs().max() > 1e-3


SIGMAS = (1.0, 0.8, 0.35)
NEGATIVE = "dull colours"
GENERATED = {
    "text alone": ([], {"steps": 3}),
    "one control": ([("chelsea", None, False)], {"steps": 2}),
    "one control, guidance": ([("coffee", (300, 90), False)], {"steps": 2, "cfg": 3.0, "negative_prompt": NEGATIVE}),
    "text alone, guidance by the null prompt": ([], {"steps": 2, "cfg": 2.0, "negative_prompt": NULL_PROMPT}),
    "two controls with alpha": ([("chelsea", (200, 330), True), ("coffee", None, True)], {"steps": 2}),
    "two controls, the model's own noise levels": ([("chelsea", None, False), ("coffee", None, True)], {}),
    "one control, another size": ([("chelsea", None, False)], {"steps": 2, "size": (96, 160)}),
}


@pytest.mark.parametrize("name", GENERATED)
def test_an_image_is_the_one_that_the_pipeline_makes_as_it_is(
    name: str, tiny_21: Path, encoder_21, released: Released, tmp_path: Path
) -> None:
    """From prompt and files to pixels, opacity among them: its own encoding, sizes, noise, schedule and KV cache."""
    controls, how = GENERATED[name]
    folder = tmp_path / "model"
    folder.mkdir()
    for part in tiny_21.iterdir():
        (folder / part.name).symlink_to(part)
    (folder / "model_index.json").unlink()
    index = json.loads((tiny_21 / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index if how else index | {"sample_sigmas": SIGMAS}))
    images = []
    for file, size, alpha in controls:
        image = Image.open(GOLDEN / f"{file}.png").convert("RGB")
        image = image.resize(size) if size else image
        if alpha:
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        images.append(image)
    predictor = Predictor(
        open_pretrained(str(folder)), encoder_21, vae_device=CPU, transformer_device=CPU, dtype=torch.float32
    )
    found = predictor.generate(images, "make it night", seed=7, alpha=True, **how)

    own = released.pipeline
    pipeline = diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=own.vae,
        text_encoder=own.text_encoder,
        processor=own.processor,
        transformer=diffusers.QwenImage21Transformer2DModel.from_pretrained(folder / "transformer").eval(),
        sample_sigmas=None if how else SIGMAS,
    )
    width, height = how.get("size", (None, None))
    expected = pipeline(
        "make it night",
        image=images or None,
        negative_prompt=how.get("negative_prompt"),
        true_cfg_scale=how.get("cfg", 1.0),
        num_inference_steps=how.get("steps", 40),
        width=width,
        height=height,
        generator=torch.Generator().manual_seed(7),
        output_resolution=128,
    ).images[0]
    assert found.mode == expected.mode == "RGBA" and found.size == expected.size
    assert found.tobytes() == expected.tobytes()
    assert all(np.asarray(found)[..., channel].std() > 5 for channel in range(4))
    assert predictor.pipeline.scheduler.num_inference_steps == how.get("steps", len(SIGMAS))


def test_an_image_of_one_family_is_encoded_with_its_opacity_and_one_of_another_on_its_background(
    encoder_21, encoder
) -> None:
    def encoded(by, alpha: bool) -> Sample:
        content = io.BytesIO()
        picture("coffee", alpha=alpha).save(content, "PNG")
        return by.encode(Row(0, "", content.getvalue(), (content.getvalue(),), "make it night"))

    opaque, transparent = encoded(encoder_21, False), encoded(encoder_21, True)
    assert not torch.equal(opaque.pixel_latent, transparent.pixel_latent)
    assert encoded(encoder, True).pixel_latent.shape[0] == 16

"""The demo, shorter: a LoRA teaches the small model an edit, and photographs that it never saw show it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio

from qie.cli import precompute, predict, train
from qie.config import Config
from qie.from_config import open_predictor
from tests.conftest import AREA_PX, ROOT
from tests.contracts.test_fidelity import Released

SMALL_MODEL = ROOT / "configs" / "small_model"
STEPS, ROWS, SIDE_PX = 60, 24, 128


@dataclass(frozen=True)
class Demo:
    """What the demo's commands left in a folder, on small pictures and with fewer steps."""

    work: Path
    config: Path

    @property
    def adapter(self) -> Path:
        return self.work / "run" / f"checkpoint-{STEPS:06d}"

    def psnr(self, column: str) -> float:
        """Of the photographs kept out, in dB: the mean of `before` or `after` beside the true edit."""
        scores = []
        for file in sorted((self.work / "held_out" / "training_images").glob("*.png")):
            with Image.open(file) as true, Image.open(self.work / column / file.name) as found:
                scores.append(psnr(true.resize(found.size, Image.Resampling.LANCZOS), found))
        return float(np.mean(scores))


def psnr(one: Image.Image, other: Image.Image) -> float:
    """In dB, over all pixels and colours."""
    return float(peak_signal_noise_ratio(np.asarray(one), np.asarray(other), data_range=255))


def run(command, *arguments: object) -> None:
    result = CliRunner().invoke(command.main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    work = tmp_path_factory.mktemp("demo")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import make_demo_photos
    finally:
        sys.path.remove(str(ROOT / "tools"))
    make_demo_photos.write_demo(work)
    demo = Demo(work, ROOT / "configs" / "demo.yaml")
    values = {
        "model.pretrained_model_name_or_path": SMALL_MODEL,
        "data.source": work / "photos",
        "data.allow_tiny": "true",
        "data.area_px": AREA_PX,
        "cache.cache_dir": work / "shards",
        "train.output_dir": work / "run",
        "train.max_steps": STEPS,
        "validation.every": STEPS,
        "validation.rows": 2,
        "data.batch_size": 4,
        "train.ema_decay": 0.9,
        "logging.report_to": "[]",
    }
    words = ["--config", demo.config, *(word for item in values.items() for word in ("--set", "{}={}".format(*item)))]
    run(precompute, *words, "--end-idx", ROWS)
    run(train, *words)
    generating = ["--steps", 6, "--cfg", 1, "--quiet"]
    run(predict, *words, *generating, "--batch", work / "before.jsonl")
    run(predict, *words, *generating, "--batch", work / "after.jsonl", "--lora", demo.adapter / "ema")
    shutil.copytree(work / "after", work / "averaged")
    run(predict, *words, *generating, "--batch", work / "after.jsonl", "--lora", demo.adapter)
    return demo


@pytest.mark.parametrize("weights", ["after", "averaged"])
def test_what_a_lora_was_taught_shows_on_photographs_that_it_never_saw(demo: Demo, weights: str) -> None:
    before, after = demo.psnr("before"), demo.psnr(weights)
    assert after > before + 3, f"{before:.2f} dB before, {after:.2f} dB after"


def test_diffusers_own_pipeline_makes_the_same_pixels_with_the_adapter(demo: Demo, monkeypatch) -> None:
    """All of it, from the text encoder to `load_lora_weights`; but for the area, which the pipeline fixes."""
    row = json.loads((demo.work / "after.jsonl").read_text().splitlines()[0])
    released = Released("edit", folder=SMALL_MODEL)
    pipeline = QwenImageEditPipeline.from_pretrained(SMALL_MODEL, processor=None, text_encoder=None, tokenizer=None)
    pipeline.load_lora_weights(demo.adapter)
    pipeline.set_progress_bar_config(disable=True)
    dimensions = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: dimensions(AREA_PX, ratio))
    with Image.open(demo.work / row["image"]) as source:
        image = source.convert("RGB")
    embeds = released.embed([image.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)], row["prompt"])[None]
    theirs = pipeline(
        image=image,
        prompt_embeds=embeds,
        prompt_embeds_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
        true_cfg_scale=1.0,
        num_inference_steps=6,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    with Image.open(demo.work / row["output"]) as ours:
        assert np.array_equal(ours, theirs)


@dataclass(frozen=True)
class Base:
    """The small model without an adapter, on a photograph that it never saw."""

    photograph: Image.Image

    def edited(self, prompt: str, cfg: float = 1.0, quantize: str | None = None) -> Image.Image:
        sections = {
            "model": {"pretrained_model_name_or_path": str(SMALL_MODEL), "quantize": quantize},
            "data": {"area_px": AREA_PX, "allow_tiny": True},
        }
        predictor = open_predictor(Config.model_validate(sections))
        return predictor.generate([self.photograph], prompt, steps=6, cfg=cfg, seed=0)


@pytest.fixture(scope="module")
def base(demo: Demo) -> Base:
    with Image.open(demo.work / "held_out" / "control_images" / "cat.png") as image:
        return Base(image.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS))


def brightness(image: Image.Image) -> float:
    return float(np.mean(image))


def contrast(image: Image.Image) -> float:
    return float(np.std(image))


def warmth(image: Image.Image) -> float:
    red, _, blue = np.moveaxis(np.asarray(image, dtype=np.float64), -1, 0)
    return float(np.mean(red - blue))


@pytest.mark.parametrize(
    ("prompt", "measure", "direction"),
    [
        ("Darken the photo.", brightness, -1),
        ("Brighten the photo.", brightness, 1),
        ("Make the colours cooler.", warmth, -1),
        ("Make the contrast a lot weaker.", contrast, -1),
    ],
)
def test_the_small_model_follows_an_instruction_that_it_knows(base: Base, prompt: str, measure, direction: int) -> None:
    assert direction * (measure(base.edited(prompt)) - measure(base.photograph)) > 20


@pytest.mark.parametrize(
    ("prompt", "measure", "direction"),
    [("Make the colours cooler.", warmth, -1), ("Make the contrast a lot weaker.", contrast, -1)],
)
def test_guidance_strengthens_an_instruction(base: Base, prompt: str, measure, direction: int) -> None:
    plain, guided = (measure(base.edited(prompt, cfg)) for cfg in (1.0, 2.0))
    assert direction * (guided - plain) > 3


@pytest.mark.parametrize(("kind", "least_db"), [("int8", 30), ("fp8", 25)])
def test_a_base_in_fewer_bits_makes_nearly_the_same_picture(base: Base, kind: str, least_db: float) -> None:
    exact, found = (base.edited("Make the photo black and white.", quantize=one) for one in (None, kind))
    assert least_db < psnr(exact, found) < 60

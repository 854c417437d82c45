"""Make the small Qwen-Image-Edit that has learnt: from photographs to a model that follows a dozen instructions.

    python tools/train_small_model.py WORK [--only STEP] [--device cuda:0]

WORK/packages holds unpacked Debian packages of photographs (see PACKAGES). Hours on two cores; whatever is there is not
made again, and a training that was stopped goes on. The steps, in order:

    photographs  WORK/photographs, from WORK/packages
    vae          WORK/vae, fitted and trained by tools/small_vae.py
    rows         WORK/rows: crops of the photographs, edited, with instructions
    model        WORK/start: the VAE, a random text encoder, and a transformer that begins by copying the control
    small        WORK/run128: the transformer trained with configs/small_model.yaml, at 128²
    large        WORK/run256: trained on at 256²
    finish       WORK/small: the model that has learnt, in FP16
    measure      WORK/measured.json: PSNR of each edit on photographs kept out; WORK/curves.png and edits.jpg
"""

# ruff: noqa: E402 - what libraries say while they are imported is silenced before that
from __future__ import annotations

import argparse
import io
import json
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qie.quiet_libraries import quiet_imports, quiet_libraries

quiet_imports()
import diffusers
import make_tiny_model as tiny
import matplotlib

matplotlib.use("Agg")
import numpy as np
import small_vae
import torch
from make_photo_edits import COOL, WARM, crop_centre, photo_folder
from matplotlib import pyplot
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from qie.families import FAMILIES
from qie.training.reporting.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).resolve().parent.parent
SEED, ROWS, VAE_STEPS, TRIALS = 0, 14_000, 3500, 64
TEXT_WIDTH = 64
MOST_TEXT_PIXELS = 112 * 112  # 16 image tokens: random vision features are worth no more
HEADS, HEAD_WIDTH, LAYERS, AXES = 5, 32, 4, (8, 12, 12)
TOKEN = 64  # numbers of a packed latent's token
WORDS_OF_NEW_EDITS = (
    "Give the photo a brown sepia tone. Put a white border around it, like an old postcard or photograph."
)
SIDE_PX = 256

# Photographs

PACKAGES = {  # Debian's packages of photographs, and which of their files
    "gcompris-qt-data": "*.rcc",
    "lomiri-wallpapers-16.04": "*.jpg",
    "lomiri-wallpapers-20.04": "*.jpg",
    "mate-backgrounds": "nature/*.jpg",
    "plasma-workspace-wallpapers": "*x*.jpg",
}
DRAWN = (
    "Altai",
    "FlyingKonqui",
    "PastelHills",
    "Volna",
    "Opal",
    "Cluster",
    "Flow",
    "Shell",
    "Honeywave",
    "SafeLanding",
)
RCC_PARTS = ("categorization", "details", "erase", "explore_", "louis")  # files of gcompris that hold photographs
RCC_IMAGE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP", re.DOTALL)
LEAST_PX, MOST_PX = 220, 1024


def take_photographs(packages: Path, out: Path) -> int:
    """Copy the photographs in unpacked packages to `out`, each once, no larger than MOST_PX; gives their number."""
    missing = [name for name in PACKAGES if not (packages / name).is_dir()]
    if missing:
        raise SystemExit(f"{packages} lacks {', '.join(missing)}: apt-get download them, and dpkg -x each into it")
    out.mkdir(parents=True, exist_ok=True)
    seen: list[np.ndarray[Any, Any]] = []
    for name, image in _iter_images(packages):
        look = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=np.float64)
        # Sizes of one picture, cut-outs and empty pages are no photographs more.
        white = (np.asarray(image.resize((64, 64), Image.Resampling.BOX)).min(-1) > 250).mean()
        if white > 0.25 or look.std() < 8 or any(np.abs(look - other).mean() < 4 for other in seen):
            continue
        seen.append(look)
        image.thumbnail((MOST_PX, MOST_PX), Image.Resampling.LANCZOS)
        image.save(out / f"{name}.jpg", quality=92)
    return len(seen)


def _iter_images(packages: Path) -> Iterator[tuple[str, Image.Image]]:
    for package, pattern in PACKAGES.items():
        for file in sorted((packages / package).rglob(pattern)):
            if file.suffix == ".rcc":
                if file.stem.startswith(RCC_PARTS):
                    yield from _iter_rcc(file)
            elif file.is_file() and "screenshot" not in file.name and not set(DRAWN) & set(file.parts):
                name = "-".join(file.relative_to(packages).with_suffix("").parts[-4:])
                if image := _photograph(file.read_bytes()):
                    yield f"{package}-{name}", image


def _iter_rcc(file: Path) -> Iterator[tuple[str, Image.Image]]:
    """The images in a file of Qt's resources, which stores each after its length of four bytes."""
    content = file.read_bytes()
    for found in RCC_IMAGE.finditer(content):
        start = found.start()
        (length,) = struct.unpack(">I", content[max(start - 4, 0) : start].rjust(4, b"\0"))
        if 15_000 <= length <= len(content) - start and (image := _photograph(content[start : start + length])):
            yield f"gcompris-{file.stem}-{start:09d}", image


def _photograph(content: bytes) -> Image.Image | None:
    try:
        with Image.open(io.BytesIO(content)) as source:
            opaque = "A" not in source.getbands() or np.asarray(source.getchannel("A")).min() > 250
            return source.convert("RGB") if opaque and min(source.size) >= LEAST_PX else None
    except (OSError, SyntaxError, ValueError):
        return None


# Rows


@dataclass(frozen=True)
class Edit:
    instructions: tuple[str, ...]
    apply: Callable[[Image.Image], Image.Image]


def zoom(image: Image.Image) -> Image.Image:
    return crop_centre(image).resize(image.size, Image.Resampling.LANCZOS)


def black_frame(image: Image.Image) -> Image.Image:
    width = round(min(image.size) * 0.1)
    return ImageOps.expand(ImageOps.crop(image, width), width, "black")


# fmt: off
EDITS = {
    "identity": Edit(("Keep the photo as it is.", "Change nothing.", "Leave this picture untouched."), lambda im: im),
    "darker": Edit(("Darken the photo.", "Make this picture much darker.", "Turn down the brightness."),
                   lambda im: ImageEnhance.Brightness(im).enhance(0.45)),
    "brighter": Edit(("Brighten the photo.", "Make this picture much lighter.", "Turn up the brightness."),
                     lambda im: ImageEnhance.Brightness(im).enhance(1.6)),
    "black_and_white": Edit(("Make the photo black and white.", "Remove all the colour.", "Turn this picture grey."),
                            lambda im: ImageOps.grayscale(im).convert("RGB")),
    "blurred": Edit(("Blur the photo.", "Make this picture strongly out of focus.", "Soften everything heavily."),
                    lambda im: im.filter(ImageFilter.GaussianBlur(im.width / 43))),
    "warmer": Edit(("Make the colours warmer.", "Give this picture a warm, golden light."),
                   lambda im: im.convert("RGB", WARM)),
    "cooler": Edit(("Make the colours cooler.", "Give this picture a cold, bluish light."),
                   lambda im: im.convert("RGB", COOL)),
    "negative": Edit(("Invert the photo.", "Show this picture as a photographic negative."), ImageOps.invert),
    "high_contrast": Edit(("Make the contrast a lot stronger.", "Give this picture much more contrast."),
                          lambda im: ImageEnhance.Contrast(im).enhance(1.9)),
    "low_contrast": Edit(("Make the contrast a lot weaker.", "Fade this picture."),
                         lambda im: ImageEnhance.Contrast(im).enhance(0.4)),
    "hue": Edit(("Shift the hues: red to green, green to blue.", "Swap the colours around."),
                lambda im: Image.merge("RGB", [im.getchannel(channel) for channel in "BRG"])),
    "mirrored": Edit(("Mirror the photo left to right.", "Flip this picture horizontally."), ImageOps.mirror),
    "cropped": Edit(("Crop the photo to its centre.", "Zoom in on the middle."), zoom),
    "black_frame": Edit(("Put a black frame around the photo.", "Paint the edges black."), black_frame),
}
# fmt: on


def write_rows(files: Sequence[Path], out: Path, rows: int, seed: int) -> None:
    """A folder source: `rows` crops of photographs, each with an edit in turn and one of its instructions."""
    chance = random.Random(seed)
    controls, targets = out / "control_images", out / "training_images"
    for folder in (controls, targets):
        folder.mkdir(parents=True, exist_ok=True)
    opened: dict[Path, Image.Image] = {}
    for number in range(rows):
        name, edit = list(EDITS.items())[number % len(EDITS)]
        file = chance.choice(files)
        if file not in opened:
            with Image.open(file) as source:
                opened[file] = source.convert("RGB")
        image, stem = any_crop(opened[file], chance), f"{number:06d}-{name}"
        image.save(controls / f"{stem}.jpg", quality=95)
        edit.apply(image).save(targets / f"{stem}.jpg", quality=95)
        (targets / f"{stem}.txt").write_text(f"{chance.choice(edit.instructions)}\n", encoding="utf-8")


def any_crop(image: Image.Image, chance: random.Random) -> Image.Image:
    """A square of any size and place, as it is or mirrored, at SIDE_PX."""
    most = min(image.size)
    side = int(chance.uniform(min(SIDE_PX, most), most + 1))
    left, top = chance.randrange(image.width - side + 1), chance.randrange(image.height - side + 1)
    crop = image.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
    return ImageOps.mirror(crop) if chance.random() < 0.5 else crop


# The model at its start


def build(work: Path, out: Path, seed: int) -> None:
    """Write the whole model: VAE of WORK/vae, random text encoder, transformer at its start."""
    prompts = [text for edit in EDITS.values() for text in edit.instructions]
    prompts += [WORDS_OF_NEW_EDITS, *(f" {text.lower()}" for text in prompts)]
    tokenizer = tiny.make_tokenizer("edit", prompts)
    tokenizer.save_pretrained(out / "tokenizer")
    tiny.save_processor(out / "processor", tokenizer, "edit", MOST_TEXT_PIXELS)
    tiny.save_text_encoder(out / "text_encoder", tokenizer, seed, sharded=False, width=TEXT_WIDTH)
    save_vae(work, out / "vae")
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=TOKEN,
        out_channels=small_vae.LATENTS,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=AXES,
    )
    start_transformer(transformer, seed)
    transformer.save_pretrained(out / "transformer")
    diffusers.FlowMatchEulerDiscreteScheduler(**tiny.SCHEDULER).save_pretrained(out / "scheduler")
    index = {"_class_name": FAMILIES["edit"].pipeline, "_diffusers_version": diffusers.__version__}
    tiny.write_json(out / "model_index.json", index | tiny.COMPONENTS)


@torch.no_grad()
def save_vae(work: Path, out: Path) -> None:
    """The VAE, with the mean and deviation of its latents over the photographs' central squares."""
    state = torch.load(work / "vae" / "vae.pt", weights_only=True)
    still = small_vae.still_vae()
    still.load_state_dict(state)
    files, _ = small_vae.split(work / "photographs")
    latents = torch.cat([small_vae.encode(still, small_vae.pixels([small_vae.central_square(file)])) for file in files])
    video = small_vae.to_video(state)
    mean, std = (values.tolist() for values in (latents.mean((0, 2, 3)), latents.std((0, 2, 3))))
    video.register_to_config(latents_mean=[round(x, 4) for x in mean], latents_std=[round(x, 4) for x in std])
    video.save_pretrained(out)


FLAT = (
    20.0  # a pair of numbers of a token, FLAT and -FLAT, so large that LayerNorm divides all tokens by about the same
)
CONTROL_VARIANCE = 0.1  # how far the target is from the control, as the start believes
PLACE_PAIRS = (0, 4, 5, 10, 11)  # of a head's RoPE pairs: the frame, and the two fastest of height and of width
PLACE_GAIN = 3.2


@torch.no_grad()
def start_transformer(model: Any, seed: int) -> None:
    """Weights from which the model learns edits in hours: it begins by copying the control.

    Of a token's width, 64 numbers hold the token itself, and 64 the control's token at the same place, which heads 0
    and 1 of the first block fetch. The output is the velocity that leads to the mean of a Gaussian posterior: x_t is x₀
    seen through noise, the control is x₀ give or take CONTROL_VARIANCE. All other weights are random, their outputs
    small.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
    width = model.inner_dim
    spread = ((2 * FLAT**2 + 2 * TOKEN * 0.8) / width) ** 0.5  # what LayerNorm divides by
    model.img_in.weight.zero_()[:TOKEN] = torch.eye(TOKEN)
    model.img_in.bias[-2:] = torch.tensor([FLAT, -FLAT])
    for block in model.transformer_blocks:
        _start_block(block, width, spread)
    _fetch_control(model.transformer_blocks[0])
    _posterior(model)
    start = torch.randn(model.proj_out.weight.shape, generator=generator) * 0.01
    start[:, :TOKEN] += torch.eye(TOKEN) * spread
    start[:, TOKEN : 2 * TOKEN] -= torch.eye(TOKEN) * spread
    model.proj_out.weight.copy_(start)


def _start_block(block: Any, width: int, spread: float) -> None:
    """Open gates before layers of small output; the image stream's numbers as large after LayerNorm as before it."""
    for modulation in (block.img_mod[1], block.txt_mod[1]):
        modulation.weight.mul_(0.1)
        modulation.bias.view(6, width)[[2, 5]] = 1.0
    scales = block.img_mod[1].bias.view(6, width)
    scales[[1, 4]] = spread - 1
    scales[1, -2:] = scales[4, -2:] = spread / FLAT - 1
    for layer in (block.attn.to_out[0], block.attn.to_add_out, block.img_mlp.net[2], block.txt_mlp.net[2]):
        layer.weight.mul_(0.1)


def _fetch_control(block: Any) -> None:
    """Heads 0 and 1 read the token of the next frame at their own place: constant queries and keys, turned by RoPE."""
    attention = block.attn
    places = [2 * pair + part for pair in PLACE_PAIRS for part in (0, 1)]
    for layer, turn in ((attention.to_q, 1.0), (attention.to_k, 0.0)):  # frames are one radian apart
        heads = layer.weight.view(HEADS, HEAD_WIDTH, -1)
        heads[2:, places] *= 0.3
        heads[:2] *= 0.02
        constant = torch.zeros(HEAD_WIDTH)
        for pair in PLACE_PAIRS:
            angle = torch.tensor(turn if pair == 0 else 0.0)
            constant[2 * pair], constant[2 * pair + 1] = 4 * angle.cos(), 4 * angle.sin()
        layer.bias.view(HEADS, HEAD_WIDTH)[:2] = constant
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight[places] = PLACE_GAIN
    attention.to_v.weight[:TOKEN] = torch.eye(TOKEN, attention.to_v.weight.shape[1])
    out = attention.to_out[0].weight
    out[:, :TOKEN] = 0
    out[TOKEN : 2 * TOKEN, :TOKEN] = torch.eye(TOKEN)
    out[: 2 * TOKEN, TOKEN:] *= 0.1
    block.img_mod[1].weight[: 3 * block.dim] *= 0.1


def _posterior(model: Any) -> None:
    """Fit the last norm's scales, over the time embedding, to what x_t and the control weigh at each noise level.

    With x_t = (1 - σ)·x₀ + σ·ε and x₀ ~ N(control, τ²), the velocity (x_t - E[x₀ | x_t]) / σ is linear in both.
    """
    model.time_text_embed.timestep_embedder.linear_1.weight.mul_(0.5)
    sigma = torch.linspace(0.001, 1, 1000).double()
    precision = 1 / CONTROL_VARIANCE + (1 - sigma) ** 2 / sigma**2
    of_noisy = (1 - (1 - sigma) / sigma**2 / precision) / sigma
    of_control = 1 / CONTROL_VARIANCE / precision / sigma
    embedded = silu(model.time_text_embed(sigma.float(), torch.zeros(1))).double()
    known = torch.cat([embedded, torch.ones(len(sigma), 1)], 1)
    ridge = known.T @ known + 1e-2 * torch.eye(known.shape[1])
    linear = model.norm_out.linear
    linear.weight.zero_()
    for rows, wanted in ((slice(0, TOKEN), of_noisy), (slice(TOKEN, 2 * TOKEN), of_control)):
        fitted = torch.linalg.solve(ridge, known.T @ (wanted - 1)).float()
        linear.weight[rows], linear.bias[rows] = fitted[:-1], fitted[-1]


# Training, by qie itself


@dataclass(frozen=True)
class Stage:
    """A training of all weights with configs/small_model.yaml, and what differs from it."""

    side_px: int
    rows: int
    steps: int
    rate: float

    def checkpoint(self, work: Path) -> Path:
        """Where its last averaged weights are."""
        return work / f"run{self.side_px}" / f"checkpoint-{self.steps:06d}" / "ema"


SMALL, LARGE = Stage(128, ROWS, 8000, 1e-3), Stage(256, 2000, 800, 3e-4)


def train(work: Path, model: Path, stage: Stage, device: str) -> None:
    """Encode rows and train the transformer of a model with qie's own commands."""
    run = stage.checkpoint(work).parents[1]
    values = {
        "model.pretrained_model_name_or_path": model,
        "data.source": work / "rows",
        "data.area_px": stage.side_px**2,
        "cache.cache_dir": work / f"shards{stage.side_px}",
        "cache.vae_encoder_device": device,
        "cache.text_encoder_device": device,
        "train.output_dir": run,
        "train.max_steps": stage.steps,
        "optimizer.init_args.lr": stage.rate,
    }
    words = ["--config", str(ROOT / "configs" / "small_model.yaml")]
    words += [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    resume = ["--resume", "latest"] if any(run.glob("checkpoint-*")) else []
    shards_alone = ["--set", "data.source=null"]  # the other rows are not to be encoded live
    for command, *more in (["precompute", "--end-idx", str(stage.rows)], ["train", *shards_alone, *resume]):
        subprocess.run([sys.executable, "-m", f"qie.cli.{command}", *words, *more], check=True)


def with_transformer(work: Path, checkpoint: Path, out: Path) -> None:
    """The start's model with a checkpoint's transformer and the VAE as it is now."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(work / "start", out, ignore=shutil.ignore_patterns("transformer", "vae"))
    shutil.copytree(checkpoint / "transformer", out / "transformer")
    save_vae(work, out / "vae")


def to_fp16(model: Path) -> int:
    """Store all weights in FP16; gives their bytes."""
    files = sorted(model.rglob("*.safetensors"))
    for file in files:
        weights = {name: weight.half() for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return sum(file.stat().st_size for file in files)


# What it has learnt


class Editor:
    """The finished model on squares of SIDE_PX, with the instructions that it was trained on."""

    def __init__(self, model: Path, steps: int = 10) -> None:
        from qie.config import Config
        from qie.from_config import open_predictor

        sections = {
            "model": {"pretrained_model_name_or_path": str(model)},
            "data": {"area_px": SIDE_PX * SIDE_PX, "allow_tiny": True},
        }
        self._predictor, self._steps = open_predictor(Config.model_validate(sections)), steps

    def edited(self, square: Image.Image, name: str, number: int) -> Image.Image:
        """By the edit's `number`-th instruction, from noise of its own."""
        prompt = EDITS[name].instructions[number % len(EDITS[name].instructions)]
        return self._predictor.generate([square], prompt, steps=self._steps, cfg=1.0, seed=number)


def similarity(found: Image.Image, expected: Image.Image) -> float:
    return float(small_vae.psnr(small_vae.pixels([found]), small_vae.pixels([expected])))


def measure(editor: Editor, squares: Sequence[Image.Image], trials: int) -> dict[str, Any]:
    """PSNR of each edit, and how often darken and brighten are told apart, half of the trials with either.

    A trial counts if the image is nearer to what was asked for than to the opposite.
    """
    table: dict[str, Any] = {}
    for name, edit in EDITS.items():
        expected = [edit.apply(square) for square in squares]
        pairs = list(zip(squares, expected, strict=True))
        found = [similarity(editor.edited(square, name, number), one) for number, (square, one) in enumerate(pairs)]
        unedited = [similarity(square, one) for square, one in pairs]
        table[name] = {"psnr": float(np.mean(found)), "unedited": float(np.mean(unedited))}
        print(f"{name:<16} {table[name]['psnr']:6.2f} dB (the input: {table[name]['unedited']:.2f})", flush=True)
    right = 0
    for number in range(trials):
        asked, other = ("darker", "brighter") if number % 2 else ("brighter", "darker")
        square = squares[number // 2 % len(squares)]
        image = editor.edited(square, asked, number)
        right += similarity(image, EDITS[asked].apply(square)) > similarity(image, EDITS[other].apply(square))
    table["told apart"] = {"right": right, "of": trials}
    print(f"darken and brighten told apart: {right} of {trials}")
    return table


def draw_edits(editor: Editor, out: Path, across: int = 5) -> None:
    """All edits of a photograph that may be shown: scikit-image's astronaut, which no training saw."""
    with Image.open(photo_folder() / "astronaut.png") as source:
        square = source.convert("RGB").resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
    tiles = {"input": square} | {name: editor.edited(square, name, 0) for name in EDITS}
    figure, grid = pyplot.subplots(
        -(-len(tiles) // across), across, figsize=(2 * across, 2.2 * -(-len(tiles) // across)), layout="constrained"
    )
    for axes, (name, image) in zip(grid.flat, tiles.items(), strict=False):
        axes.imshow(image)
        axes.set_title(name.replace("_", " "), fontsize=10)
    for axes in grid.flat:
        axes.axis("off")
    figure.savefig(out, dpi=100, pil_kwargs={"quality": 88})


def draw_curves(work: Path, out: Path) -> None:
    """PSNR of the VAE, and validation losses of the transformer, over steps."""
    figure, (left, *others) = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    lines = [json.loads(line) for line in (work / "vae" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    left.plot([line["step"] for line in lines], [line["psnr"] for line in lines], label="mean")
    left.plot([line["step"] for line in lines], [line["least"] for line in lines], label="least", alpha=0.6)
    left.set(title="VAE: PSNR at 256², photographs kept out", xlabel="step", ylabel="dB", xscale="symlog")
    left.legend()
    for axes, stage in zip(others, (SMALL, LARGE), strict=True):
        metrics = read_metrics(stage.checkpoint(work).parents[1] / METRICS_FILE)
        found = [(line["step"], line["validation_loss_by_level"]) for line in metrics if "validation_loss" in line]
        for level in range(len(found[0][1])):
            axes.plot([step for step, _ in found], [losses[level] for _, losses in found], label=f"level {level + 1}")
        axes.set(title=f"transformer at {stage.side_px}²: validation loss", xlabel="step", ylim=(0, 1.2))
        axes.legend()
    figure.savefig(out, dpi=100)


STEPS = ("photographs", "vae", "rows", "model", "small", "large", "finish", "measure")


def run(step: str, work: Path, device: str) -> None:
    """One step, whether its result is there or not."""
    if step == "photographs":
        print(f"{take_photographs(work / 'packages', work / 'photographs')} photographs")
        return
    files, kept_out = small_vae.split(work / "photographs")
    start, grown, done = work / "start", work / "grown", work / "small"
    if step == "vae":
        small_vae.Training(work, VAE_STEPS, SEED).run()
    elif step == "rows":
        write_rows(files, work / "rows", ROWS, SEED)
    elif step == "model":
        build(work, start, SEED)
    elif step == "small":
        train(work, start, SMALL, device)
        with_transformer(work, SMALL.checkpoint(work), grown)
    elif step == "large":
        train(work, grown, LARGE, device)
    elif step == "finish":
        with_transformer(work, LARGE.checkpoint(work), done)
        print(f"{done}: {to_fp16(done) / 1e6:.1f} MB of weights")
    else:
        editor = Editor(done)
        draw_curves(work, work / "curves.png")
        draw_edits(editor, work / "edits.jpg")
        table = measure(editor, [small_vae.central_square(file, SIDE_PX) for file in kept_out], TRIALS)
        (work / "measured.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the small Qwen-Image-Edit that has learnt.")
    parser.add_argument("work", metavar="WORK", type=Path, help="folder of all that is made")
    parser.add_argument("--only", metavar="STEP", choices=STEPS, help="this step alone, though its result be there")
    parser.add_argument("--device", default="cpu", help="of the encoders; default: %(default)s")
    options = parser.parse_args(arguments)
    quiet_libraries()
    for step in STEPS:
        mark = options.work / f"{step}.done"
        if options.only == step or (options.only is None and not mark.exists()):
            print(f"== {step}", flush=True)
            run(step, options.work, options.device)
            mark.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""qie-predict: images and an instruction in, images out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qie.cli.common import FiniteRange, command, config_option, quiet_option, set_option
from qie.cli.progress import Progress
from qie.cli.terminal import echo, warn

if TYPE_CHECKING:
    from qie.config import AdapterConfig, Config
    from qie.inference.requests import Request

SIDE_MAX = 8192
"""Pixels of an image's side: more than any model of today was trained for."""


@command
@config_option
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="Image to edit; repeatable for edit_plus and qwen_image_21, which also takes none.",
)
@click.option("--prompt", help="The instruction.")
@click.option("--output", metavar="FILE", help="The image to write.")
@click.option(
    "--batch", metavar="FILE", help="JSONL file with image(s), prompt and output, instead of these three options."
)
@click.option("--negative-prompt", default=" ", help="What guidance steers away from.")
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="PATH[:SCALE]",
    help="LoRA: a file, checkpoint, or run (its latest one); repeatable.",
)
@click.option("--transformer", metavar="DIR", help="Checkpoint of a run that trained all weights.")
@click.option(
    "--size",
    metavar="WxH",
    help="Size of the generated image, in multiples of 16 (qwen_image_21: 32).  [default: as the image's]",
)
@click.option(
    "--steps",
    type=click.IntRange(2, 1000),
    help="Denoising steps.  [default: 20; qwen_image_21: the model's own, or 40]",
)
@click.option(
    "--cfg",
    type=FiniteRange(0, 100),
    help="Guidance scale; 1 turns guidance off.  [default: 4; qwen_image_21: 1]",
)
@click.option("--alpha", is_flag=True, help="Write a transparent image: qwen_image_21.  [default: put it on white]")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Seed of the noise.")
@click.option(
    "--num-images",
    default=1,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Images to generate, each with the next seed.",
)
@set_option
@quiet_option
def main(
    config_path: str,
    loras: tuple[str, ...],
    transformer: str | None,
    size: str | None,
    steps: int | None,
    cfg: float | None,
    alpha: bool,
    overrides: tuple[str, ...],
    quiet: bool,
    **asked: Any,
) -> None:
    """Edit images by instructions, with the base model or with a trained one. Qwen-Image-2.1 also makes images from
    text alone.

    Each line of a --batch file is a JSON object with image or images, prompt and output, and optionally negative_prompt
    and seed. Its paths are relative to the folder of the file. qie checks all lines before it generates any image.

    The text field qie of a PNG holds its settings. Existing files are overwritten.
    """
    from qie.config import load_config
    from qie.from_config import open_predictor
    from qie.inference.requests import Sampling, check_alpha, check_requests, embed_requests, iter_generated
    from qie.paths import local_path
    from qie.pretrained import open_pretrained
    from qie.quiet_libraries import quiet_libraries

    requests = _requests(**asked)
    config = with_loras(load_config(config_path, overrides), loras)
    quiet_libraries()
    pretrained = open_pretrained(config.model.pretrained_model_name_or_path, config.model.family, ())
    family = pretrained.family
    check_alpha(family, alpha, "--alpha")
    measures = None if size is None else parse_size(size, family.token_px)
    behind = None if family.alpha else config.data.background
    sampling = Sampling.of(pretrained, steps=steps, cfg=cfg, size=measures, alpha=alpha, background=behind)
    check_requests(requests, family, sampling)
    if cfg is None and sampling.cfg <= 1 and any(request.negative_prompt.strip() for request in requests):
        warn("a negative prompt changes nothing without guidance: give --cfg, such as --cfg 2")
    predictor = open_predictor(config, transformer=local_path(transformer) if transformer else None)
    with Progress("embedding", len(requests), "prompts", quiet=quiet or len(requests) == 1) as progress:
        conditions = embed_requests(predictor, requests, sampling, progress.at)
    settings = sampling.told | {"model": config.model.pretrained_model_name_or_path}
    settings |= {"transformer": transformer} if transformer else {}
    settings |= {"vae": config.model.vae} if config.model.vae else {}
    settings |= {"quantize": config.model.quantize} if config.model.quantize else {}
    settings |= {"loras": [adapter.model_dump(exclude={"train_only"}) for adapter in config.model.permanent_adapters]}
    total = sum(len(request.outputs) for request in requests) * sampling.steps
    with Progress("generating", total, "steps", quiet=quiet) as progress:
        for file, image in iter_generated(predictor, requests, conditions, sampling, settings, progress.at):
            echo(f"{file}: {image.width}×{image.height}")


def _requests(
    images: tuple[str, ...],
    prompt: str | None,
    output: str | None,
    batch: str | None,
    negative_prompt: str,
    seed: int,
    num_images: int,
) -> list[Request]:
    from qie.errors import UsageError
    from qie.inference.requests import Request, numbered_paths, read_batch
    from qie.paths import local_path

    options = {"--prompt": prompt, "--output": output}
    if batch is not None:
        if given := [name for name, value in {"--image": images or None, **options}.items() if value is not None]:
            raise UsageError("with --batch, each line of the file gives these", where=", ".join(given))
        return read_batch(local_path(batch), negative_prompt=negative_prompt, seed=seed, count=num_images)
    if missing := [name for name, value in options.items() if value is None]:
        raise click.UsageError(f"Missing option {', '.join(missing)}; or give --batch.")
    assert prompt is not None and output is not None
    return [Request(images, prompt, negative_prompt, seed, numbered_paths(local_path(output), num_images))]


def parse_size(text: str, multiple: int = 16) -> tuple[int, int]:
    """'1024x768' -> (1024, 768). Raises UsageError when a side is not a multiple of `multiple`, or too long."""
    from qie.errors import UsageError

    sides = re.fullmatch(r"(\d{1,6})[x×](\d{1,6})", text.strip().lower(), re.ASCII)
    width, height = (int(side) for side in sides.groups()) if sides else (0, 0)
    if not all(multiple <= side <= SIDE_MAX and side % multiple == 0 for side in (width, height)):
        near = "x".join(str(min(max(round(side / multiple), 1) * multiple, SIDE_MAX)) for side in (width, height))
        raise UsageError(
            "no image of this size can be generated",
            where="--size",
            expected=f"WIDTHxHEIGHT, both multiples of {multiple} of at most {SIDE_MAX}",
            found=text,
            hint=f"--size {near}" if width and height else "such as --size 1024x768",
        )
    return width, height


def parse_lora(text: str) -> AdapterConfig:
    """PATH or PATH:SCALE; of a run's folder its latest checkpoint. Raises UsageError when there is no adapter."""
    from pydantic import ValidationError

    from qie.config import AdapterConfig
    from qie.errors import UsageError
    from qie.paths import local_path
    from qie.training.checkpoint_folders import checkpoints
    from qie.training.model.adapter_file import ADAPTER_FILE, adapter_in

    path, scale = local_path(text), 1.0
    before, colon, after = text.rpartition(":")
    if colon and not path.exists():
        try:
            path, scale = local_path(before), float(after)
        except ValueError:
            path = local_path(text)
    if not adapter_in(path) and (of_run := checkpoints(path)):
        path = of_run[-1]
    if not adapter_in(path) and not (path.is_file() and path.suffix == ".safetensors"):
        whole = (path / "transformer").is_dir() or path.name == "transformer"
        raise UsageError(
            "this is neither an adapter file nor a folder that holds one",
            where=path,
            expected=f"{ADAPTER_FILE}, or a .safetensors file",
            hint="it holds a whole transformer: pass it as --transformer"
            if whole
            else "give a run's folder, a checkpoint-NNNNNN folder, or PATH:SCALE",
        )
    try:
        return AdapterConfig(path=str(path), scale=scale)
    except ValidationError as error:
        expected = error.errors(include_url=False)[0]["msg"]
        raise UsageError("the scale of a LoRA is invalid", where=f"--lora {text}", expected=expected) from error


def with_loras(config: Config, words: Sequence[str]) -> Config:
    """The configuration, with the adapters of --lora added to its model.adapters, less those of training alone.

    Raises:
        UsageError: a path holds no adapter, or the same one is named twice and would count twice.
    """
    from qie.errors import UsageError
    from qie.paths import local_path
    from qie.training.model.adapter_file import adapter_in

    adapters = [*config.model.permanent_adapters, *map(parse_lora, words)]
    files: set[Path] = set()
    for adapter in adapters:
        path = local_path(adapter.path)
        file = (adapter_in(path) or path).resolve()
        if file in files:
            raise UsageError(
                "the same LoRA is given twice",
                where=adapter.path,
                expected="each file once among --lora and model.adapters",
                hint="give it once, with its scale",
            )
        files.add(file)
    return config.model_copy(update={"model": config.model.model_copy(update={"adapters": adapters})})


if __name__ == "__main__":
    main()

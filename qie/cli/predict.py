"""qie-predict: images and an instruction in, images out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from qie.cli.common import (
    Command,
    FiniteRange,
    Progress,
    config_option,
    echo,
    explained,
    quiet_libraries,
    quiet_option,
    set_option,
)

if TYPE_CHECKING:
    from qie.cli.paintings import Request
    from qie.config import Config
    from qie.encode.scene import Scene
    from qie.inference import Predictor


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@config_option
@click.option("--image", "images", multiple=True, metavar="FILE", help="Image to edit; repeatable for edit_plus.")
@click.option("--prompt", help="The instruction.")
@click.option("--output", metavar="FILE", help="The image to write.")
@click.option("--batch", metavar="FILE", help="Instead of these three: JSONL of image(s), prompt and output.")
@click.option("--negative-prompt", default=" ", help="What to steer away from.")
@click.option("--lora", "loras", multiple=True, metavar="PATH[:SCALE]", help="Folder or file of a LoRA; repeatable.")
@click.option("--transformer", metavar="DIR", help="Checkpoint of a run that trained all weights.")
@click.option("--size", metavar="WxH", help="Of the painted image, in multiples of 16.  [default: as the image's]")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(2, 1000), help="Denoising steps.")
@click.option("--cfg", default=4.0, show_default=True, type=FiniteRange(0, 100), help="Guidance scale; 1 does without.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Of the noise.")
@click.option(
    "--num-images", default=1, show_default=True, type=click.IntRange(1, 10_000), help="Each with the next seed."
)
@set_option
@quiet_option
@explained
def main(
    config_path: str,
    loras: tuple[str, ...],
    transformer: str | None,
    size: str | None,
    steps: int,
    cfg: float,
    overrides: tuple[str, ...],
    quiet: bool,
    **asked: Any,
) -> None:
    """Paint: edit images by instructions, with the base model or with what was trained.

    Each line of a --batch is a JSON object with image or images, prompt and output, and maybe negative_prompt and seed;
    its paths are relative to the folder of the file. All lines are checked before the first is painted.

    A PNG tells in its text field qie how it was painted. Existing files are overwritten.
    """
    from qie.cli.paintings import check_paintings, parse_size, with_loras
    from qie.config import load_config
    from qie.opening import open_predictor
    from qie.paths import local_path

    paintings = _asked_for(**asked)
    measures = None if size is None else parse_size(size)
    config = with_loras(load_config(config_path, overrides), loras)
    quiet_libraries()
    check_paintings(paintings, config.data.background)
    painter = open_predictor(config, transformer=local_path(transformer) if transformer else None)
    scenes = _embed(painter, paintings, config, cfg, measures, quiet=quiet)
    made_by = {"steps": steps, "cfg": cfg, "model": config.model.pretrained_model_name_or_path}
    made_by |= {"transformer": transformer} if transformer else {}
    made_by |= {"quantize": config.model.quantize} if config.model.quantize else {}
    made_by |= {"loras": [adapter.model_dump() for adapter in config.model.adapters]}
    total = sum(len(painting.outputs) for painting in paintings) * steps
    with Progress("painting", total, "steps", quiet=quiet) as progress:
        _paint(painter, list(zip(paintings, scenes, strict=True)), config, measures, made_by, progress)


def _asked_for(
    images: tuple[str, ...],
    prompt: str | None,
    output: str | None,
    batch: str | None,
    negative_prompt: str,
    seed: int,
    num_images: int,
) -> list[Request]:
    from qie.cli.paintings import Request, numbered, read_batch
    from qie.errors import UsageError
    from qie.paths import local_path

    options = {"--image": images or None, "--prompt": prompt, "--output": output}
    if batch is not None:
        if given := [name for name, value in options.items() if value is not None]:
            raise UsageError("the lines of a --batch say this themselves", where=", ".join(given))
        return read_batch(local_path(batch), negative_prompt=negative_prompt, seed=seed, count=num_images)
    if missing := [name for name, value in options.items() if value is None]:
        raise click.UsageError(f"Missing option {', '.join(missing)}; or give a --batch.")
    assert prompt is not None and output is not None
    return [Request(images, prompt, negative_prompt, seed, numbered(local_path(output), num_images))]


def _embed(
    painter: Predictor,
    paintings: Sequence[Request],
    config: Config,
    cfg: float,
    size: tuple[int, int] | None,
    *,
    quiet: bool,
) -> list[Scene]:
    """Every painting's prompts, in host memory, without its images. The encoder that embedded them is gone."""
    from dataclasses import replace

    from qie.cli.assemble import read_images
    from qie.cli.paintings import placed
    from qie.encode.scene import check_controls

    for painting in paintings:
        check_controls(painter.pretrained.family.name, len(painting.images), painting.where)
    scenes = []
    with Progress("embedding", len(paintings), "prompts", quiet=quiet or len(paintings) == 1) as progress:
        for painting in paintings:
            with placed(painting.where):
                images = read_images(painting.images, config.data.background)
                negative = painting.negative_prompt if cfg > 1 else None
                scenes.append(replace(painter.embed(images, painting.prompt, negative, size), images=()))
            progress.at(len(scenes))
    painter.free_encoder()
    return scenes


def _paint(
    painter: Predictor,
    work: Sequence[tuple[Request, Scene]],
    config: Config,
    size: tuple[int, int] | None,
    made_by: dict[str, Any],
    progress: Progress,
) -> None:
    """Paint and write one after the other, so that what is painted stays when a later one fails."""
    from dataclasses import replace

    from qie.cli.assemble import read_images, save_image
    from qie.cli.paintings import placed
    from qie.inference import paint_scene

    steps, cfg, done = made_by["steps"], made_by["cfg"], 0
    for painting, scene in work:
        about = {"prompt": painting.prompt, "negative_prompt": painting.negative_prompt, "images": painting.images}
        with placed(painting.where):
            seen = replace(scene, images=tuple(read_images(painting.images, config.data.background)))
            for seed, output in enumerate(painting.outputs, start=painting.seed):
                on_step = partial(_on_step, progress, done, output.name)
                image = paint_scene(painter.pipeline, seen, steps=steps, cfg=cfg, seed=seed, size=size, on_step=on_step)
                save_image(image, output, about | {"seed": seed, "size": image.size} | made_by)
                done += steps
                _say(f"{output}: {image.width}×{image.height}")


def _on_step(progress: Progress, before: int, name: str, step: int) -> None:
    progress.at(before + step, name)


def _say(line: str) -> None:
    """A result, on stdout, above the bar."""
    from tqdm import tqdm

    with tqdm.external_write_mode():
        echo(line)


if __name__ == "__main__":
    main()

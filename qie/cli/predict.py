"""qie-predict: an image and an instruction in, an image out."""

from __future__ import annotations

import click

from qie.cli.common import Progress, config_option, explained, quiet_libraries, quiet_option, set_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@config_option
@click.option(
    "--image", "images", multiple=True, required=True, metavar="FILE", help="Image to edit; repeatable for edit_plus."
)
@click.option("--prompt", required=True, help="The instruction.")
@click.option("--negative-prompt", default=" ", help="What to steer away from.")
@click.option("--lora", metavar="DIR", help="Folder of an adapter, such as a training checkpoint.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(2), help="Denoising steps.")
@click.option("--cfg", default=4.0, show_default=True, help="Guidance scale; 1 does without guidance.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Of the noise.")
@click.option("--output", required=True, metavar="FILE", help="The image to write.")
@set_option
@quiet_option
@explained
def main(
    config_path: str,
    images: tuple[str, ...],
    prompt: str,
    negative_prompt: str,
    lora: str | None,
    steps: int,
    cfg: float,
    seed: int,
    output: str,
    overrides: tuple[str, ...],
    quiet: bool,
) -> None:
    """Paint: edit an image by an instruction, with the base model or with an adapter."""
    from qie.cli.assemble import check_output, check_prompts, open_painter, read_images, save_image
    from qie.config import load_config
    from qie.paths import local_path

    config = load_config(config_path, overrides)
    quiet_libraries()
    target = local_path(output)
    check_output(target)
    controls = read_images(images, config.data.background)
    check_prompts(prompt, negative_prompt)
    painter = open_painter(config, local_path(lora) if lora else None)
    with Progress("painting", steps, "steps", quiet=quiet) as progress:
        image = painter.paint(
            controls,
            prompt,
            negative_prompt=negative_prompt,
            steps=steps,
            cfg=cfg,
            seed=seed,
            on_step=progress.at,
            keep_encoder=False,
        )
    save_image(
        image, target, {"prompt": prompt, "negative_prompt": negative_prompt, "steps": steps, "cfg": cfg, "seed": seed}
    )
    click.echo(f"{target}: {image.width}×{image.height}")


if __name__ == "__main__":
    main()

"""qie export: a trained adapter in a form that other programs load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qie.cli.common import FiniteRange, command
from qie.cli.terminal import echo, tell_next

if TYPE_CHECKING:
    from qie.training.model.adapter_file import Format


@command
@click.argument("checkpoint")
@click.option("--output", required=True, metavar="FILE|FOLDER", help="FILE.safetensors, or with --merge a new folder.")
@click.option("--format", "form", type=click.Choice(["comfyui", "diffusers"]), help="Of the file; default: comfyui.")
@click.option(
    "--dtype", type=click.Choice(["float16", "bfloat16", "float32"]), help="Of the output; default: as stored."
)
@click.option("--merge", is_flag=True, help="Write a transformer with the adapter merged into its weights.")
@click.option("--model", metavar="MODEL", help="With --merge: the trained model, a folder or a name on the Hub.")
@click.option("--scale", type=FiniteRange(-100, 100), help="With --merge: strength of the adapter; default: 1.")
def main(
    checkpoint: str,
    output: str,
    form: Format | None,
    dtype: str | None,
    merge: bool,
    model: str | None,
    scale: float | None,
) -> None:
    """Export the adapter of CHECKPOINT: a checkpoint's folder, a run's train.output_dir (its latest checkpoint), or a
    LoRA file.

    Without --merge the adapter becomes one file. The format comfyui is read by ComfyUI and diffusers; that of an
    adapter of the MLP of Qwen-Image-2.1 by ComfyUI alone. The format diffusers is that of the checkpoint.

    With --merge, the transformer of MODEL is written with the adapter merged into its weights. Meanwhile all of it is
    in memory, 41 GB for Qwen-Image-Edit in bfloat16 and 14 GB for Qwen-Image-2.1.
    """
    _check(merge, form, model, scale)
    import logging

    import torch

    from qie.paths import local_path
    from qie.pretrained import open_pretrained
    from qie.quiet_libraries import quiet_libraries
    from qie.training.model.adapter_file import export_adapter
    from qie.training.model.lora import merge_adapter

    quiet_libraries()
    logging.getLogger("diffusers").setLevel(logging.CRITICAL)  # it tells of errors that are then told here
    kind = getattr(torch, dtype) if dtype else None
    place, file = local_path(checkpoint), local_path(output)
    if model is None:
        export_adapter(place, file, form or "comfyui", kind)
    else:
        pretrained = open_pretrained(model, components=("transformer",))
        merge_adapter(pretrained, place, file, kind, 1.0 if scale is None else scale)
    echo(file)
    if not merge and form != "diffusers":
        tell_next("cp", output, "ComfyUI/models/loras/")


def _check(merge: bool, form: str | None, model: str | None, scale: float | None) -> None:
    from qie.errors import UsageError

    if merge and (form or model is None):
        raise UsageError("--merge needs --model, and takes no --format")
    if not merge and (model is not None or scale is not None):
        raise UsageError("--model and --scale need --merge")

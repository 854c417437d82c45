"""Export a trained adapter in a form that other programs load.

    python tools/export_adapter.py CHECKPOINT --output FILE.safetensors [--format comfyui|diffusers] [--dtype DTYPE]
    python tools/export_adapter.py CHECKPOINT --merge --model MODEL --output FOLDER [--dtype DTYPE] [--scale S]

CHECKPOINT is a checkpoint's folder, a run's train.output_dir (its latest checkpoint), or a LoRA file.

Without --merge the adapter becomes one file. The format comfyui is read by ComfyUI and diffusers; that of an adapter of
the MLP of Qwen-Image-2.1 by ComfyUI alone. The format diffusers is that of the checkpoint. With --merge the tool writes
the transformer of MODEL, a folder or a name on the Hugging Face Hub, with the adapter merged into its weights.
Meanwhile all of it is in memory, 41 GB for Qwen-Image-Edit in bfloat16 and 14 GB for Qwen-Image-2.1.

Exit status: 0 if the output is written, 1 if the adapter has a fault, 2 for wrong usage. The reason is one line on
stderr.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

from qie.errors import QieError
from qie.paths import local_path
from qie.pretrained import open_pretrained
from qie.quiet_libraries import quiet_libraries
from qie.training.model.adapter_file import export_adapter
from qie.training.model.lora import merge_adapter

DTYPES = ("float16", "bfloat16", "float32")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="an adapter for other programs, or merged into its model")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--output", type=Path, required=True, help="FILE.safetensors, or a folder, to write")
    parser.add_argument("--format", choices=("comfyui", "diffusers"), help="format of the file; default: comfyui")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the output; default: as stored")
    parser.add_argument(
        "--merge", action="store_true", help="write a transformer with the adapter merged into its weights"
    )
    parser.add_argument("--model", help="with --merge: the trained model, a folder or a name on the Hub")
    parser.add_argument("--scale", type=float, help="with --merge: strength of the adapter; default: 1")
    given = parser.parse_args()
    if given.merge and (given.format or not given.model):
        parser.error("--merge needs --model, and takes no --format")
    if not given.merge and (given.model or given.scale is not None):
        parser.error("--model and --scale need --merge")
    return given


def run(given: argparse.Namespace) -> None:
    checkpoint, output = local_path(given.checkpoint), local_path(given.output)
    dtype = getattr(torch, given.dtype) if given.dtype else None
    if given.merge:
        model = open_pretrained(given.model, components=("transformer",))
        merge_adapter(model, checkpoint, output, dtype, 1.0 if given.scale is None else given.scale)
    else:
        export_adapter(checkpoint, output, given.format or "comfyui", dtype)
    print(output)


def main() -> int:
    given = arguments()
    quiet_libraries()
    logging.getLogger("diffusers").setLevel(logging.CRITICAL)  # it tells of errors that are then told here
    try:
        run(given)
    except (QieError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code if isinstance(error, QieError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

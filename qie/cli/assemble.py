"""From a configuration to the objects that the commands call: the one place where encoders meet data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, PngImagePlugin

from qie.config import Config
from qie.devices import resolve_device
from qie.encode.images import decode_image
from qie.encode.text import check_prompt
from qie.errors import RowError, UsageError
from qie.paths import local_path, open_own, require_writable
from qie.stores import File, MissingError, RefusedError, TooLargeError


def worker_configs(config: Config, devices: str) -> list[Config]:
    """A configuration for each worker that `devices` names, such as `cuda:0,cuda:1` or `cuda:0+cuda:1,cuda:2+cuda:3`.

    Raises:
        UsageError: `devices` names none.
    """
    names = [f"cuda:{n}" for n in range(torch.cuda.device_count())] if devices == "all" else devices.split(",")
    workers = []
    for name in names:
        vae, plus, text = (part.strip() for part in name.partition("+"))
        if not vae or (plus and not text):
            raise UsageError(
                "--devices cannot be understood",
                expected="a device for each worker, or VAE+TEXT: cuda:0,cuda:1 or cuda:0+cuda:1,cuda:2+cuda:3",
                found=devices,
            )
        for device in (vae, text or vae):
            resolve_device(device, "--devices")
        cache = config.cache.model_copy(update={"vae_encoder_device": vae, "text_encoder_device": text or vae})
        workers.append(config.model_copy(update={"cache": cache}))
    if not workers:
        raise UsageError("--devices all finds no GPU")
    return workers


def check_prompts(prompt: str, negative_prompt: str, where: str = "--{}", negative: str = "negative-prompt") -> None:
    """Raise UsageError when one of the prompts cannot be encoded. A blank negative prompt is the null prompt.

    `where` names, with `prompt` or `negative` put in, the place that a prompt is from.
    """
    for name, text in (("prompt", prompt), (negative, negative_prompt)):
        try:
            if name == "prompt" or text.strip():
                check_prompt(text)
        except RowError as error:
            raise UsageError(error.what, where=where.format(name), found=error.found, hint=error.hint) from error


def read_images(paths: Iterable[str], background: str, where: str | None = None) -> list[Image.Image]:
    """Image files, decoded as rows are.

    Args:
        paths: the files.
        background: colour behind transparent pixels.
        where: configuration key that names them, for messages.

    Raises:
        UsageError: one is missing or is no image.
    """
    images = []
    for path in paths:
        place = f"{where}: {path}" if where else path
        try:
            images.append(decode_image(File.at(local_path(path)).read(), "the file", background))
        except (MissingError, RefusedError) as error:
            raise UsageError(f"the image cannot be read: {error.reason}", where=place) from error
        except (RowError, TooLargeError) as error:
            raise UsageError(error.what, where=place, expected=error.expected, found=error.found) from error
    return images


def check_output(path: Path) -> None:
    """Raise UsageError when no image can be written to `path`: to be asked before the work, not after it."""
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise UsageError("the ending names no image format", where=path, expected="such as .png or .jpg")
    require_writable(path)


def save_image(image: Image.Image, path: Path, settings: dict[str, Any]) -> None:
    """Write an image whole or not at all; a PNG carries `settings` as text under the name qie."""
    check_output(path)
    about = PngImagePlugin.PngInfo()
    about.add_itxt("qie", json.dumps(settings, ensure_ascii=False))
    partial = path.with_name(f".{path.name}.partial")
    file = open_own(partial)
    try:
        with file:
            file.truncate(0)
            image.save(file, format=Image.registered_extensions()[path.suffix.lower()], pnginfo=about)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

"""From a configuration to the objects that the commands call: the one place where encoders meet data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image

from qie.cli.common import quiet_libraries
from qie.config import Config, required
from qie.data.sources import Source, SourceSpec, open_source
from qie.data.variants import Versions
from qie.devices import resolve_device, resolve_dtype
from qie.encode import Encoder, EncoderOptions
from qie.encode.images import decode_image
from qie.encode.text import check_prompt
from qie.errors import RowError, UsageError
from qie.paths import local_path
from qie.predict import Painter
from qie.pretrained import ENCODERS, open_checkpoint
from qie.recipe import Recipe


def open_encoder(config: Config) -> Encoder:
    """The encoder of a configuration; its weights are hashed now and loaded on first use.

    Raises:
        ModelError: the checkpoint lacks an encoder, or is of another kind.
        ConfigError: a device is not there.
    """
    vae_device = resolve_device(config.cache.vae_encoder_device, "cache.vae_encoder_device")
    text_device = resolve_device(config.cache.text_encoder_device, "cache.text_encoder_device")
    checkpoint = open_checkpoint(config.model.pretrained_model_name_or_path, config.model.family)
    return Encoder.open(checkpoint, vae_device=vae_device, text_device=text_device, options=_options(config))


def open_rows(config: Config, expected: str) -> Source:
    """The rows of a configuration's data.source.

    Raises:
        ConfigError: there is none; says what is `expected`.
        SourceError: it cannot be opened.
    """
    source = config.data.source
    if isinstance(source, list):
        return open_source([SourceSpec(part.source, part.name, part.weight) for part in source])
    return open_source(required(source, "data.source", expected))


def open_job(config: Config) -> tuple[Source, Encoder]:
    """What a worker process works with."""
    quiet_libraries()
    return open_rows(config, "rows"), open_encoder(config)


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


def versions(config: Config) -> Versions:
    """Which versions of rows are stored."""
    return Versions(config.cache.variants, config.data.augment.flip, config.data.augment.crop)


def _options(config: Config) -> EncoderOptions:
    data, cache = config.data, config.cache
    areas = [data.area_px] if isinstance(data.area_px, int) else data.area_px
    return EncoderOptions(
        areas_px=None if areas is None else tuple(areas),
        buckets_px=tuple((width, height) for width, height in data.buckets_px),
        text_area_px=data.text_area_px,
        multiple_px=data.multiple_px,
        background=data.background,
        compute_dtype=cache.compute_dtype,
        continued=cache.share_prefix,
        batch_size=cache.encode_batch_size,
        compiled=cache.compile,
        max_image_px=data.max_image_px,
    )


def open_painter(config: Config, lora: Path | None) -> Painter:
    """The painter of a configuration, on the devices of its section predict."""
    devices = config.predict.devices
    vae_device = resolve_device(devices.vae, "predict.devices.vae")
    text_device = resolve_device(devices.text_encoder, "predict.devices.text_encoder")
    transformer_device = resolve_device(devices.transformer, "predict.devices.transformer")
    checkpoint = open_checkpoint(
        config.model.pretrained_model_name_or_path, config.model.family, (*ENCODERS, "transformer", "scheduler")
    )
    return Painter(
        checkpoint,
        Encoder.open(checkpoint, vae_device=vae_device, text_device=text_device, options=_options(config)),
        vae_device=vae_device,
        transformer_device=transformer_device,
        dtype=getattr(torch, resolve_dtype(config.cache.compute_dtype, transformer_device)),
        lora=lora,
    )


def check_prompts(prompt: str, negative_prompt: str) -> None:
    """Raise UsageError when one of the prompts cannot be encoded. A blank negative prompt is the null prompt."""
    for name, text in (("prompt", prompt), ("negative-prompt", negative_prompt)):
        try:
            if name == "prompt" or text.strip():
                check_prompt(text)
        except RowError as error:
            raise UsageError(error.what, where=f"--{name}", found=error.found, hint=error.hint) from error


def read_images(paths: Iterable[str]) -> list[Image.Image]:
    """Image files, decoded as rows are. Raises UsageError when one is missing or is no image."""
    images = []
    for path in paths:
        try:
            images.append(decode_image(local_path(path).read_bytes(), "the file", Recipe.background))
        except OSError as error:
            raise UsageError(f"the image cannot be read: {error.strerror}", where=path) from error
        except RowError as error:
            raise UsageError(error.what, where=path, found=error.found) from error
    return images

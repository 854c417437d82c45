"""From a configuration to the objects that it describes: encoder, rows, accelerator, painter. Batches: `qie.streams`.

Encoders are imported only where rows are encoded, and what trains only where something is trained: who trains on shards
loads no encoder, and who fills them no accelerate.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qie.config import AdapterConfig, Config, required
from qie.data.sources import Source, SourceSpec, open_source
from qie.data.variants import Variants
from qie.devices import resolve_device, resolve_dtype
from qie.pretrained import ENCODERS, PretrainedModel, open_pretrained

if TYPE_CHECKING:
    from accelerate import Accelerator

    from qie.encode import Encoder, EncoderOptions
    from qie.inference import Predictor


def open_encoder(config: Config) -> Encoder:
    """The encoder of a configuration; its weights are hashed now and loaded on first use.

    Raises:
        ModelError: the model lacks an encoder, or is of another kind.
        ConfigError: a device is not there.
    """
    from qie.encode import Encoder

    vae_device = resolve_device(config.cache.vae_encoder_device, "cache.vae_encoder_device")
    text_device = resolve_device(config.cache.text_encoder_device, "cache.text_encoder_device")
    pretrained = open_pretrained(config.model.pretrained_model_name_or_path, config.model.family)
    return Encoder.open(pretrained, vae_device=vae_device, text_device=text_device, options=encoder_options(config))


def encoder_options(config: Config) -> EncoderOptions:
    """What sections data and cache say of encoding."""
    from qie.encode import EncoderOptions

    data, cache = config.data, config.cache
    areas = [data.area_px] if isinstance(data.area_px, int) else data.area_px
    return EncoderOptions(
        areas_px=None if areas is None else tuple(areas),
        buckets_px=tuple((width, height) for width, height in data.buckets_px),
        text_area_px=data.text_area_px,
        multiple_px=data.multiple_px,
        background=data.background,
        compute_dtype=cache.compute_dtype,
        share_prefix=cache.share_prefix,
        batch_size=cache.encode_batch_size,
        compiled=cache.compile,
        thumbnail_px=cache.thumbnail_px,
        max_image_px=data.max_image_px,
    )


def open_rows(config: Config, expected: str = "rows") -> Source:
    """The rows of a configuration's data.source.

    Raises:
        ConfigError: there is none; says what is `expected`.
        SourceError: it cannot be opened.
    """
    source = config.data.source
    if isinstance(source, list):
        return open_source([SourceSpec(part.source, part.name, part.weight) for part in source])
    return open_source(required(source, "data.source", expected))


def variants(config: Config) -> Variants:
    """Which variants of rows are stored."""
    return Variants(config.cache.variants, config.data.augment.flip, config.data.augment.crop)


def open_accelerator(config: Config) -> Accelerator:
    """Device, precision, processes and trackers of a training run; see `qie.training.processes.accelerator_of`."""
    from qie.training.processes import accelerator_of

    return accelerator_of(config)


def open_predictor(config: Config, lora: str | Path | None = None, transformer: str | Path | None = None) -> Predictor:
    """The painter of a configuration, on the devices of its section predict, its base as model.quantize has it.

    Args:
        config: its model.adapters are part of the model.
        lora: folder or file of one more adapter, such as a checkpoint.
        transformer: a checkpoint of a run that trained all weights, whose transformer takes the place of the base's.

    Raises:
        UsageError: an adapter or the transformer does not fit the base model.
        ModelError, ConfigError: see `open_encoder`.
    """
    from qie.inference import Predictor
    from qie.training.model.adapter_file import check_adapters
    from qie.training.model.load import empty_transformer, open_transformer

    devices, model = config.predict.devices, config.model
    vae_device = resolve_device(devices.vae, "predict.devices.vae")
    text_device = resolve_device(devices.text_encoder, "predict.devices.text_encoder")
    transformer_device = resolve_device(devices.transformer, "predict.devices.transformer")
    adapters = [*model.adapters, *([AdapterConfig(path=str(lora))] if lora else [])]
    pretrained = open_pretrained(
        model.pretrained_model_name_or_path, model.family, (*ENCODERS, "transformer", "scheduler")
    )
    trained = open_transformer(Path(transformer), pretrained) if transformer else None
    if adapters:
        check_adapters(empty_transformer(trained or pretrained), adapters, "the adapter, or model.adapters")
    return Predictor(
        pretrained,
        inference_encoder(config, pretrained, vae_device, text_device),
        vae_device=vae_device,
        transformer_device=transformer_device,
        dtype=getattr(torch, resolve_dtype(config.cache.compute_dtype, transformer_device)),
        adapters=adapters,
        quantize=model.quantize,
        trained=trained,
    )


def inference_encoder(
    config: Config, pretrained: PretrainedModel, vae_device: torch.device, text_device: torch.device
) -> Encoder:
    """An encoder under the configuration's recipe, on other devices than those of section cache."""
    from qie.encode import Encoder

    return Encoder.open(pretrained, vae_device=vae_device, text_device=text_device, options=encoder_options(config))

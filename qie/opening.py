"""From a configuration to the objects that it describes: encoder, rows, batches, accelerator, painter.

Encoders are imported only where rows are encoded, and what trains only where something is trained: who trains on shards
loads no encoder, and who fills them no accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qie.config import AdapterConfig, Config, required
from qie.data import open_stream
from qie.data.memory import Keep
from qie.data.sources import Source, SourceSpec, open_source
from qie.data.stream import Stream
from qie.data.variants import Versions
from qie.devices import resolve_device, resolve_dtype
from qie.errors import RecipeMismatchError, UsageError
from qie.paths import local_path
from qie.pretrained import ENCODERS, Checkpoint, open_checkpoint
from qie.recipe import Recipe
from qie.shards.cache import ShardCache

if TYPE_CHECKING:
    from accelerate import Accelerator

    from qie.encode import Encoder, EncoderOptions
    from qie.predict import Painter


def open_encoder(config: Config) -> Encoder:
    """The encoder of a configuration; its weights are hashed now and loaded on first use.

    Raises:
        ModelError: the checkpoint lacks an encoder, or is of another kind.
        ConfigError: a device is not there.
    """
    from qie.encode import Encoder

    vae_device = resolve_device(config.cache.vae_encoder_device, "cache.vae_encoder_device")
    text_device = resolve_device(config.cache.text_encoder_device, "cache.text_encoder_device")
    checkpoint = open_checkpoint(config.model.pretrained_model_name_or_path, config.model.family)
    return Encoder.open(checkpoint, vae_device=vae_device, text_device=text_device, options=encoder_options(config))


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
        continued=cache.share_prefix,
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


def versions(config: Config) -> Versions:
    """Which versions of rows are stored."""
    return Versions(config.cache.variants, config.data.augment.flip, config.data.augment.crop)


def open_training_stream(
    config: Config,
    checkpoint: Checkpoint,
    accelerator: Accelerator,
    *shards: str,
    progress: Callable[[int], object] = lambda done: None,
) -> Stream:
    """This process's batches: of `shards`, of cache.cache_dir, or of rows that are encoded live, as for qie-train.

    Args:
        checkpoint: the model that is trained.
        accelerator: says which part of each batch is this process's.
        shards: folders, globs or brace patterns; none for what the configuration says.
        progress: called with the number of rows looked at while raw rows are scanned.

    Raises:
        ConfigError: neither shards nor rows are named.
        RecipeMismatchError: the shards are of another model family.
        UsageError: cache.write_through is set, which is a matter of two threads and for qie-train.
    """
    cache = config.cache
    places = shards or ((cache.cache_dir,) if cache.use_cache and cache.cache_dir else ())
    if places:
        return cached_stream(config, checkpoint.family.name, accelerator, places)
    if cache.write_through:
        raise UsageError("cache.write_through is for qie-train", hint="precompute first: qie.precompute.precompute")
    return live_stream(config, accelerator, open_rows(config, "shards, cache.cache_dir, or a source of rows"), progress)


def cached_stream(config: Config, family: str, accelerator: Accelerator, places: tuple[str, ...]) -> Stream:
    """Batches of the shards in `places`. Raises RecipeMismatchError when they are of another model family."""
    keep = memory(config, accelerator.device)
    stream = open_stream(places, **stream_settings(config, accelerator), **reading(config), keep=keep)
    require_family(stream.samples.recipe, family, places)
    return stream


def live_stream(config: Config, accelerator: Accelerator, source: Source, progress: Callable[[int], object]) -> Stream:
    """Batches of rows that are encoded as they come; `progress` is called with the number of rows looked at."""
    keep = memory(config, accelerator.device)
    live: dict[str, Any] = {"encoder": open_encoder(config), "versions": versions(config), "progress": progress}
    return open_stream(source, keep=keep, **live, **stream_settings(config, accelerator))


def stream_settings(config: Config, accelerator: Accelerator) -> dict[str, Any]:
    """The arguments of `open_stream` that decide order and batches."""
    data = config.data
    sources = data.source if isinstance(data.source, list) else []
    return {
        "batch_size": data.batch_size,
        "seed": config.train.seed,
        "tail": data.tail,
        "order": data.order,
        "block_size": data.block_size,
        "similar_lengths": data.similar_lengths,
        "weights": {SourceSpec(part.source, part.name).title: part.weight for part in sources},
        "validation_rows": config.validation.rows,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "prefetch": data.prefetch,
        "threads": data.reader_threads,
    }


def reading(config: Config) -> dict[str, Any]:
    """The arguments of `open_stream` that say how shards are read."""
    cache = config.cache
    kept_in = None if cache.local_dir is None else ShardCache(local_path(cache.local_dir), cache.local_bytes)
    return {"verify": cache.verify, "cache": kept_in}


def memory(config: Config, gpu: torch.device) -> Keep | None:
    """What of the samples stays in memory; None for nothing."""
    keep = config.cache.keep
    devices = {"none": None, "cpu": torch.device("cpu"), "gpu": gpu}
    if keep.latents == keep.embeds == "none":
        return None
    return Keep(devices[keep.latents], devices[keep.embeds], keep.budget_bytes)


def require_family(found: Recipe, family: str, places: tuple[str, ...]) -> None:
    """Raise RecipeMismatchError unless the shards in `places` are of the model's family."""
    if found.family != family:
        raise RecipeMismatchError(
            "the shards are of another model family",
            where=", ".join(places),
            expected=family,
            found=f"{found.family} (recipe {found.digest})",
            hint="train the model that they were made for, or precompute again for this one",
        )


def open_accelerator(config: Config) -> Accelerator:
    """Device, precision, processes and trackers; accelerate launch tells of them by its environment variables."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from qie.training.tracking import require_trackers

    require_trackers(config.logging.report_to)
    sharding = None
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and config.train.mixed_precision == "bf16":
        # accelerate's own policy would add up gradients in bfloat16; DDP adds those of a LoRA in float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    return Accelerator(
        # The last block's text stream feeds nothing: adapters on it never get a gradient, for which DDP would wait.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        mixed_precision=config.train.mixed_precision,
        fsdp_plugin=sharding,
        log_with=config.logging.report_to or None,
        project_dir=config.train.output_dir,
    )


def open_painter(config: Config, lora: str | Path | None = None, transformer: str | Path | None = None) -> Painter:
    """The painter of a configuration, on the devices of its section predict, its base as model.quantize has it.

    Args:
        config: its model.adapters are part of the model.
        lora: folder or file of one more adapter, such as a checkpoint.
        transformer: a checkpoint of a run that trained all weights, whose transformer takes the place of the base's.

    Raises:
        UsageError: an adapter or the transformer does not fit the base model.
        ModelError, ConfigError: see `open_encoder`.
    """
    from qie.predict import Painter
    from qie.training.fitting import check_adapters, open_transformer

    devices, model = config.predict.devices, config.model
    vae_device = resolve_device(devices.vae, "predict.devices.vae")
    text_device = resolve_device(devices.text_encoder, "predict.devices.text_encoder")
    transformer_device = resolve_device(devices.transformer, "predict.devices.transformer")
    adapters = [*model.adapters, *([AdapterConfig(path=str(lora))] if lora else [])]
    checkpoint = open_checkpoint(
        model.pretrained_model_name_or_path, model.family, (*ENCODERS, "transformer", "scheduler")
    )
    trained = open_transformer(Path(transformer), checkpoint) if transformer else None
    if adapters:
        check_adapters(trained or checkpoint, adapters, "the adapter, or model.adapters")
    return Painter(
        checkpoint,
        painting_encoder(config, checkpoint, vae_device, text_device),
        vae_device=vae_device,
        transformer_device=transformer_device,
        dtype=getattr(torch, resolve_dtype(config.cache.compute_dtype, transformer_device)),
        adapters=adapters,
        quantize=model.quantize,
        trained=trained,
    )


def painting_encoder(
    config: Config, checkpoint: Checkpoint, vae_device: torch.device, text_device: torch.device
) -> Encoder:
    """An encoder under the configuration's recipe, on other devices than those of section cache."""
    from qie.encode import Encoder

    return Encoder.open(checkpoint, vae_device=vae_device, text_device=text_device, options=encoder_options(config))

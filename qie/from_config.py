"""From a configuration to its objects: encoder, rows, workers, predictor. Streams: `qie.stream_chooser`.

Each function imports its own libraries: a training run on shards loads no encoder, and precompute no accelerate.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from qie.config import AdapterConfig, Config, SampleConfig, required
from qie.data.live import RowEncoder
from qie.data.sources import Layout, Names, Source, SourceSpec, open_laid_out, with_concepts
from qie.data.variants import Variants
from qie.devices import resolve_device, resolve_dtype
from qie.errors import QieError, RowError, UsageError
from qie.families import FAMILIES
from qie.pretrained import ENCODERS, PretrainedModel, open_pretrained
from qie.quiet_libraries import quiet_imports, quiet_libraries, spare_imports
from qie.recipe import Recipe
from qie.shards.grid import SHARD_ROWS
from qie.stages import Stages, quick_turns
from qie.stores import Folder

if TYPE_CHECKING:
    from qie.config.schema import ColumnsConfig
    from qie.encode import Encoder
    from qie.inference import Predictor
    from qie.inference.predictor import Conditions
    from qie.inference.sample_images import SampleImages
    from qie.precompute import Report, Settings
    from qie.types import Facts, Row, Sample


def open_model(config: Config, components: tuple[str, ...] = ENCODERS) -> PretrainedModel:
    """The pretrained model of a configuration, its VAE that of model.vae; see `open_pretrained`."""
    model = config.model
    return open_pretrained(model.pretrained_model_name_or_path, model.family, components, vae=model.vae)


def open_encoder(config: Config, *, only_tensors: bool = False, like: Recipe | None = None) -> Encoder:
    """The encoder of a configuration. Hashes its weights now; the first row loads them.

    Args:
        config: says how to encode.
        only_tensors: leave out what people look at: the small pictures that `cache.thumbnail_px` asks for, and how a
            target lies on its control. Training reads neither.
        like: the recipe of shards that it works beside. If it only differs by the thumbnails that an earlier qie kept
            in records, it is taken: their keys depend on it.

    Raises:
        ModelError: the model lacks an encoder, or is of another kind.
        ConfigError: a device is not there.
    """
    from qie.encode import Encoder, EncoderOptions

    vae_device = resolve_device(config.cache.vae_encoder_device, "cache.vae_encoder_device")
    text_device = resolve_device(config.cache.text_encoder_device, "cache.text_encoder_device")
    pretrained = open_model(config)
    options = EncoderOptions.of(config)
    if only_tensors:
        options = replace(options, thumbnail_px=None, compare_pairs=False)
    encoder = Encoder.open(pretrained, vae_device=vae_device, text_device=text_device, options=options)
    if like is not None and replace(like, thumbnail_px=None) == encoder.recipe:
        encoder.recipe = like
    return encoder


def recipe_there(output: Folder) -> Recipe | None:
    """The recipe of the shards in a folder; None where there are none, or none that can be read, which others tell."""
    from qie.shards.discovery import published
    from qie.shards.index import read_index

    try:
        return next((read_index(index).recipe for index in published(output)[:1]), None)
    except QieError:
        return None


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
                "--devices cannot be parsed",
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


def open_worker(config: Config, like: Recipe | None = None) -> tuple[Source, Encoder]:
    """Source and encoder of a process that only encodes; see `open_encoder`."""
    quiet_imports()
    spare_imports()
    quiet_libraries()
    quick_turns()
    return open_rows(config), open_encoder(config, like=like)


def precompute_config(
    config: Config,
    source: Source,
    output: Folder,
    *,
    engine: Literal["local", "ray"] = "local",
    devices: str | None = None,
    rows: tuple[int, int],
    shard_size: int = SHARD_ROWS,
    settings: Settings,
    progress: Callable[[Report], object],
    say: Callable[[str], object] = warnings.warn,
    prune: bool = False,
) -> Report:
    """Precompute rows of a configuration's source in this process, in workers, or on a Ray cluster.

    Args:
        config: says how to encode.
        source, output, rows, shard_size, settings, progress, prune: see `qie.precompute.precompute`.
        engine: this machine, or a Ray cluster.
        devices: those of local workers, see `worker_configs`; None for this process.
        say: told what a Ray cluster is waited for, and which of its nodes died.
    """
    from qie.precompute import precompute

    cut: dict[str, Any] = {"rows": rows, "shard_size": shard_size, "settings": settings}
    if engine == "ray":
        from qie.precompute.ray import precompute_on_ray

        _require_unpruned(output, prune)
        placed = config.cache.vae_encoder_device, config.cache.text_encoder_device
        opener = partial(open_worker, config, recipe_there(output))
        return precompute_on_ray(opener, output, devices=placed, progress=progress, say=say, tell=True, **cut)
    workers = worker_configs(config, devices) if devices else []
    if not workers:
        quick_turns()
    like = recipe_there(output)
    encoder = open_encoder(workers[0] if workers else config, like=like)
    openers = [partial(open_worker, one, like) for one in workers]
    return precompute(source, encoder, output, workers=openers, progress=progress, prune=prune, tell=True, **cut)


def _require_unpruned(output: Folder, prune: bool) -> None:
    """Raise UsageError for what a Ray cluster does not do: to prune, or to end a run that did."""
    from qie.precompute.prune import require_pruned

    if prune:
        raise UsageError("--prune cannot be combined with --engine ray", hint="prune on one machine first")
    require_pruned(output)


def open_rows(config: Config, expected: str = "rows") -> Source:
    """The rows of a configuration's data.source.

    Raises:
        ConfigError: it is not set; says what is `expected`.
        SourceError: it cannot be opened.
    """
    data = config.data
    source = data.source if isinstance(data.source, list) else required(data.source, "data.source", expected)
    layout = Layout.of(data.preset, _names(data.columns), data.root, text_to_image=_takes_text_alone(config))
    return open_laid_out(source if isinstance(source, str) else source_specs(config), layout)


def source_specs(config: Config) -> list[SourceSpec]:
    """The sources of a mixture in data.source, with their weights; none for a source alone.

    A folder of kohya's is a mixture of its N_concept folders. Raises SourceError when it is not there.
    """
    data = config.data
    layout = Layout.of(data.preset, _names(data.columns), data.root)
    if isinstance(data.source, list):
        specs = [
            SourceSpec(
                part.source,
                part.name,
                part.weight,
                part.preset,
                _names(part.columns),
                part.root,
                part.replace,
                part.preserve,
            )
            for part in data.source
        ]
        return with_concepts(specs, layout)
    alone = [SourceSpec(data.source)] if data.source else []
    concepts = with_concepts(alone, layout)
    return [] if concepts == alone else concepts


def _names(columns: ColumnsConfig) -> Names:
    controls = None if columns.controls is None else tuple(columns.controls)
    return Names(columns.target, controls, columns.prompt, columns.mask, columns.rejected, columns.name)


def _takes_text_alone(config: Config) -> bool:
    """Whether the model takes rows without controls."""
    if config.model.family != "auto":
        return FAMILIES[config.model.family].min_controls == 0
    try:
        pretrained = open_pretrained(config.model.pretrained_model_name_or_path, config.model.family, ())
    except QieError:  # what is wrong with the model is told where it is needed
        return False
    return pretrained.family.min_controls == 0


def variants(config: Config) -> Variants:
    """Which variants of rows are stored."""
    return Variants(config.cache.variants, config.data.augment.flip, config.data.augment.crop)


def open_predictor(config: Config, lora: str | Path | None = None, transformer: str | Path | None = None) -> Predictor:
    """The predictor of a configuration, on the devices of its section predict, its base quantized as model.quantize.

    Args:
        config: its model.adapters are part of the model, but for those with train_only.
        lora: folder or file of one more adapter, such as a checkpoint.
        transformer: a checkpoint of a run that trained all weights; its transformer replaces the base model's.

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
    adapters = [*model.permanent_adapters, *([AdapterConfig(path=str(lora))] if lora else [])]
    pretrained = open_model(config, (*ENCODERS, "transformer", "scheduler"))
    trained = open_transformer(Path(transformer), pretrained) if transformer else None
    if adapters:
        check_adapters(
            empty_transformer(trained or pretrained),
            adapters,
            "the adapter, or model.adapters",
            quantize=model.quantize,
        )
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
    """An encoder under the configuration's recipe, on the given devices instead of those of section cache."""
    from qie.encode import Encoder, EncoderOptions

    return Encoder.open(pretrained, vae_device=vae_device, text_device=text_device, options=EncoderOptions.of(config))


def open_samples(config: Config, device: torch.device) -> SampleImages | None:
    """The sample images of a run; None without validation.samples.

    Args:
        config: of the run.
        device: where this process trains. `predict.devices.text_encoder` says where prompts are embedded; auto is this
            device, too.

    Raises:
        UsageError: an image or a prompt cannot be used; names its configuration key.
        ModelError: the model lacks an encoder.
    """
    if not config.validation.samples:
        return None
    from qie.inference.sample_images import SampleImages

    named = config.predict.devices.text_encoder
    text_device = device if named == "auto" else resolve_device(named, "predict.devices.text_encoder")
    pretrained = open_model(config, (*ENCODERS, "scheduler"))
    return SampleImages(config, pretrained, _embed_samples(config, pretrained, text_device), device)


def _embed_samples(config: Config, pretrained: PretrainedModel, text_device: torch.device) -> list[Conditions]:
    from qie.inference.sample_images import embed_samples, read_samples

    controls = read_samples(config, pretrained.family)
    # The VAE takes no part in this.
    return embed_samples(config, controls, inference_encoder(config, pretrained, text_device, text_device))


class LaterSamples:
    """Sample images of other `validation.samples`, for a run that trains already; see `qie.training.run.OtherSamples`.

    The CPU embeds them: the device's memory is planned for training. The text encoder is loaded for them, in the
    precision of the device, and freed.

    Args:
        config: of the run.
        device: where this process trains.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device

    def embed(self, samples: Sequence[SampleConfig]) -> tuple[Config, list[Conditions]]:
        """The configuration with these samples, and the samples embedded. Raises as `open_samples`."""
        config = self._config
        cache = {"compute_dtype": resolve_dtype(config.cache.compute_dtype, self._device)}
        parts = {
            "cache": config.cache.model_copy(update=cache),
            "validation": config.validation.model_copy(update={"samples": list(samples)}),
        }
        config = config.model_copy(update=parts)
        if not samples:
            return config, []
        pretrained = open_model(config, (*ENCODERS, "scheduler"))
        with torch.random.fork_rng(devices=()):
            return config, _embed_samples(config, pretrained, torch.device("cpu"))

    def open(self, embedded: tuple[Config, list[Conditions]]) -> SampleImages | None:
        """The generator of what `embed` gave, in this process or another."""
        from qie.inference.sample_images import SampleImages

        config, samples = embedded
        if not samples:
            return None
        return SampleImages(config, open_model(config, (*ENCODERS, "scheduler")), samples, self._device)


class LaterEncoder:
    """The encoder of a configuration under the recipe of shards, opened when the first row has to be encoded.

    What the configuration leaves open, a precision that is `auto`, is as in the shards.
    """

    def __init__(self, config: Config, recipe: Recipe) -> None:
        self.recipe = recipe
        self._config = config
        self._encoder: RowEncoder | None = None
        self._lock = threading.Lock()

    @property
    def stages(self) -> Stages[Sequence[Row], list[Sample | RowError]]:
        return self._opened().stages

    def inspect(self, row: Row) -> Facts:
        return self._opened().inspect(row)

    def _opened(self) -> RowEncoder:
        with self._lock:
            if self._encoder is None:
                cache = self._config.cache
                if cache.compute_dtype == "auto" and self.recipe.vae_dtype == self.recipe.text_dtype:
                    cache = cache.model_copy(update={"compute_dtype": self.recipe.vae_dtype})
                config = self._config.model_copy(update={"cache": cache})
                encoder = open_encoder(config, only_tensors=True, like=self.recipe)
                self.recipe.require_equal(
                    encoder.recipe, "the encoder of this machine", "encode the missing rows where the shards were made"
                )
                self._encoder = encoder
            return self._encoder

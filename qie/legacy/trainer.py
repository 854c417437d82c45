"""`QwenImageEditTrainer` of qwen-image-finetune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from numpy.typing import NDArray
from PIL import Image
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, SequentialSampler

from qie.config import Config, load_config, required
from qie.data.sources import Source
from qie.data.stream import Stream
from qie.devices import resolve_device, resolve_dtype
from qie.encode import Encoder
from qie.errors import GoneError, UsageError
from qie.families import NULL_PROMPT
from qie.from_config import open_encoder, open_model, open_predictor, open_rows, variants
from qie.inference import Predictor, free, load_vae
from qie.legacy.dataset import ImageDataset, pictures
from qie.legacy.embedding_cache import check_cache_exists
from qie.legacy.names import ignored, missing
from qie.legacy.settings import changed, require_frozen
from qie.precompute import Report, Settings, precompute
from qie.pretrained import ENCODERS, PretrainedModel
from qie.stream_chooser import open_training_stream
from qie.training.loop import Outcome, save_checkpoint, train
from qie.training.model.adapter_file import ADAPTER_FILE, export_adapter, find_adapter
from qie.training.model.load import load_scheduler
from qie.training.model.lora import merge_adapter, save_adapter, without_train_only
from qie.training.model.quantize import quantize_blocks
from qie.training.processes import open_accelerator
from qie.training.reporting.card import Reporter
from qie.training.run import Run
from qie.types import Batch, Row

Mode = Literal["train", "cache", "predict"]
Pixels = NDArray[np.uint8]

SETTINGS = {
    "use_cache": "cache.use_cache",
    "cache_dir": "cache.cache_dir",
    "batch_size": "data.batch_size",
    "quantize": "model.quantize",
    "weight_dtype": "train.mixed_precision",
}
"""Attributes that are keys of the configuration."""
STATE = ("accelerator", "config", "global_step", "lr_scheduler", "optimizer", "outcome")
"""What else can be set."""
QUANTIZE: dict[object, object] = {True: "fp8", False: None}
PRECISION: dict[object, object] = {torch.bfloat16: "bf16", torch.float32: "no"}


class Pictures(list[Image.Image]):
    """Generated images: a list, as the guides of qwen-image-finetune use it (`result[0].save(…)`), and an array, as its
    reference says: [height, width, 3] uint8 of one image, [B, height, width, 3] of several."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Pixels:
        arrays = [np.asarray(image) for image in self]
        return np.array(arrays[0] if len(arrays) == 1 else arrays, dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


class QwenImageEditTrainer:
    """Caches, trains and generates by a configuration. Now: `qie-precompute`, `qie-train`, `qie-predict`; docs/api.md.

    `fit` is the whole training. For a loop of one's own call `setup_accelerator`, `load_model`, `set_lora`,
    `configure_optimizers`, and for each batch of `stream` `training_step`; then step `optimizer` and `lr_scheduler`,
    and add 1 to `global_step`.

    Args:
        config: a configuration, or its file.

    Attributes:
        accelerator: once `setup_accelerator` was called.
        outcome: of `fit`.
        use_cache, cache_dir, batch_size, quantize, weight_dtype: of the configuration, which they change when they are
            set. `quantize` True is fp8.

    Raises:
        UsageError: an attribute that does not exist is read (it is an AttributeError, too) or set. Of those that
            qwen-image-finetune had, it says what took their place.
    """

    def __init__(self, config: Config | str | Path) -> None:
        if isinstance(config, (str, Path)):
            config = load_config(config)
        self._run: Run | None = None
        self.config = config
        self.accelerator: Accelerator | None = None
        self.outcome: Outcome | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in SETTINGS:
            raise missing(name, type(self).__name__)
        section, key = SETTINGS[name].split(".")
        value = getattr(getattr(self.config, section), key)
        return (torch.bfloat16 if value == "bf16" else torch.float32) if name == "weight_dtype" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            words = {"quantize": QUANTIZE, "weight_dtype": PRECISION}.get(name, {})
            self.config = changed(self.config, {SETTINGS[name]: words.get(value, value)})
        elif name in STATE or name.startswith("_"):
            object.__setattr__(self, name, value)
        elif hasattr(type(self), name):
            raise GoneError(f"{name} cannot be set", where=type(self).__name__, hint="set it in the configuration")
        else:
            raise missing(name, type(self).__name__)

    # What the configuration describes

    @property
    def config(self) -> Config:
        """Frozen; another one takes its place when it is set. Now: `qie.load_config`."""
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        given: object = config
        if not isinstance(given, Config):
            hint = "qie.load_config reads a YAML file; docs/migration.md lists the keys that changed"
            raise UsageError("this is not a qie configuration", found=type(given).__name__, hint=hint)
        if self._run is not None:
            raise UsageError(
                "the model is already loaded for training", hint="change the configuration before set_lora"
            )
        self._config = given
        self._pretrained: PretrainedModel | None = None
        self._encoder: Encoder | None = None
        self._predictor: Predictor | None = None
        self._vae: AutoencoderKLQwenImage | None = None
        self._stream: Stream | None = None

    @property
    def pretrained(self) -> PretrainedModel:
        """The base model. Now: `qie.open_pretrained`."""
        if self._pretrained is None:
            self._pretrained = open_model(self.config, (*ENCODERS, "transformer", "scheduler"))
        return self._pretrained

    @property
    def encoder(self) -> Encoder:
        """VAE and text encoder under one recipe. Now: `qie.open_encoder(config)`."""
        if self._encoder is None:
            self._encoder = open_encoder(self.config)
        return self._encoder

    @property
    def vae(self) -> AutoencoderKLQwenImage:
        """The VAE of diffusers, frozen, for `decode_vae_latent`. Now: `qie.inference.load_vae`."""
        if self._vae is None:
            device = resolve_device(self.config.predict.devices.vae, "predict.devices.vae")
            dtype = getattr(torch, resolve_dtype(self.config.cache.compute_dtype, device))
            self._vae = load_vae(self.pretrained, dtype).to(device).eval().requires_grad_(False)
        return self._vae

    @property
    def vae_scale_factor(self) -> int:
        """Pixels to a latent pixel's side. Now: `vae.config.temperal_downsample`."""
        return 2 ** len(self.vae.config.temperal_downsample)  # type: ignore[no-any-return]

    @property
    def vae_latent_mean(self) -> list[float]:
        """Of each channel. Now: `vae.config.latents_mean`."""
        return self.vae.config.latents_mean  # type: ignore[no-any-return]

    @property
    def vae_latent_std(self) -> list[float]:
        """Of each channel. Now: `vae.config.latents_std`."""
        return self.vae.config.latents_std  # type: ignore[no-any-return]

    @property
    def vae_z_dim(self) -> int:
        """Channels of a latent. Now: `vae.config.z_dim`."""
        return self.vae.config.z_dim  # type: ignore[no-any-return]

    @property
    def scheduler(self) -> FlowMatchEulerDiscreteScheduler:
        """The model's noise schedule. Now: section `loss` of the configuration."""
        return load_scheduler(self.pretrained)

    @property
    def cache_exist(self) -> bool:
        """Now: `qie-stats DIR`."""
        return self.config.cache.cache_dir is not None and check_cache_exists(self.config.cache.cache_dir)

    # The cache

    def cache(self, train_dataloader: Source | DataLoader[Any] | None = None) -> Report:
        """Encode all rows that are not in `cache.cache_dir` yet. Now: `qie-precompute`, or `qie.precompute.precompute`.

        Args:
            train_dataloader: of `loader`; or rows; None for those of `data.source`. Other DataLoaders are refused.
        """
        if isinstance(train_dataloader, DataLoader):
            self._configure(train_dataloader)
            train_dataloader = None
        rows: Any = train_dataloader if train_dataloader is not None else open_rows(self.config)
        if not all(hasattr(rows, name) for name in ("read", "name", "__len__")):
            raise _no_loader(rows, "what qie.legacy.loader gives, qie.open_source, or nothing")
        return self._precompute(rows, (0, len(rows)))

    cache_embeddings = cache

    def cache_step(
        self,
        data: Row | int | dict[str, Any],
        vae_encoder_device: str | None = None,
        text_encoder_device: str | None = None,
    ) -> Report:
        """Encode one row of `data.source` into a shard of its own. Now: `qie-precompute --start-idx N --end-idx N+1`.

        Args:
            data: a row of the source, its number, or an item of an `ImageDataset` of the source.
            vae_encoder_device, text_encoder_device: ignored. Now: `cache.vae_encoder_device` and the other.
        """
        if vae_encoder_device is not None or text_encoder_device is not None:
            ignored("a device", "cache.vae_encoder_device and cache.text_encoder_device in the configuration")
        row = data.get("row") if isinstance(data, dict) else data
        if not isinstance(row, (Row, int)):
            raise UsageError("this is not a row", expected="a qie.Row, or its number", found=type(data).__name__)
        rows, number = open_rows(self.config), row.index if isinstance(row, Row) else row
        if isinstance(row, Row) and not (number < len(rows) and rows.read(number) == row):
            raise UsageError("the row is not in data.source", where=row.name, hint="its number is enough")
        return self._precompute(rows, (number, number + 1))

    def _precompute(self, rows: Source, wanted: tuple[int, int]) -> Report:
        output = required(self.config.cache.cache_dir, "cache.cache_dir", "where shards go")
        settings = Settings(variants=variants(self.config))
        return precompute(rows, self.encoder, output, rows=wanted, settings=settings)

    def _configure(self, given: DataLoader[Any]) -> None:
        """Take rows, cache and batch size from what `loader` gave."""
        dataset = given.dataset
        if not isinstance(dataset, ImageDataset):
            raise _no_loader(given, "what qie.legacy.loader gives, or nothing")
        if isinstance(given.sampler, SequentialSampler):
            ignored("shuffle=False", "nothing: epochs are always shuffled, by train.seed")
        config = changed(self.config, dataset.settings | {"data.batch_size": given.batch_size})
        if config != self.config:
            self.config = config

    # Training

    @property
    def stream(self) -> Stream:
        """What is trained on. Now: `qie.open_training_stream(config, pretrained, accelerator)`."""
        if self._stream is None:
            self._stream = open_training_stream(self.config, self.pretrained, self._accelerated())
        return self._stream

    @property
    def transformer(self) -> QwenImageTransformer2DModel:
        """The model that `set_lora` made ready. Now: `qie.training.run.Run`."""
        return self._running().trainable.transformer

    @property
    def global_step(self) -> int:
        """Optimizer steps done. Now: `qie.training.loop.Outcome.step`."""
        return self._run.step if self._run else self.outcome.step if self.outcome else 0

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._running().step = step

    def load_model(self, text_encoder_device: str | None = None) -> None:
        """Check that the model has all components; weights are loaded by what needs them first.

        Now: `qie.open_pretrained`. `text_encoder_device` is ignored: `cache.text_encoder_device`.
        """
        if text_encoder_device is not None:
            ignored("text_encoder_device", "cache.text_encoder_device in the configuration")
        _ = self.pretrained

    def setup_accelerator(self) -> None:
        """Now: `qie.open_accelerator(config)`."""
        self.accelerator = open_accelerator(self.config)

    def set_lora(self) -> None:
        """Load the transformer, quantised where `model.quantize` says so, with a new adapter, for a loop of one's own.

        Now: `qie.training.run.Run`, which `qie.train` drives. Its optimizer is made here, too.
        """
        self._require_frozen()
        self._run = Run(self.config, self.pretrained, self.stream, self._accelerated())

    def configure_optimizers(self) -> None:
        """Give `optimizer` and `lr_scheduler`. Now: sections `optimizer` and `lr_scheduler`; `Run` makes them."""
        self.optimizer, self.lr_scheduler = self._running().optimizer, self._running().schedule

    def accelerator_prepare(self, train_dataloader: Stream | DataLoader[Any]) -> Stream:
        """The batches to loop over, for what `loader` gave. Now: nothing; `set_lora` has prepared the rest."""
        if isinstance(train_dataloader, DataLoader):
            self._configure(train_dataloader)
            return self.stream
        if not isinstance(train_dataloader, Stream):
            raise _no_loader(train_dataloader, "what qie.legacy.loader gives")
        return train_dataloader

    def set_model_devices(self, mode: Mode = "train") -> None:
        """Free what `mode` does not need. Now: nothing; each command loads what it needs, where it is needed."""
        if mode not in get_args(Mode):
            raise UsageError("no such mode", expected=", ".join(get_args(Mode)), found=mode)
        if mode == "train" and self.use_cache and self.cache_exist:
            if self._encoder is not None:
                free(self._encoder)
            self._encoder, self._predictor, self._vae = None, None, None
        if mode != "train":
            self._run, self.optimizer, self.lr_scheduler = None, None, None

    def quantize_model(
        self, model: QwenImageTransformer2DModel, device: torch.device | str | None = None
    ) -> QwenImageTransformer2DModel:
        """Quantise a transformer's blocks in place, by `model.quantize`, or to fp8. Now: `model.quantize: fp8`.

        Args:
            model: not quantised yet.
            device: where all of it goes; None: it stays where it is.
        """
        place = None if device is None else torch.device(device)
        quantize_blocks(model, self.config.model.quantize or "fp8", place)
        return model if place is None else model.to(place)

    def fit(self, train_dataloader: Stream | DataLoader[Any] | None = None, *, resume: str | None = None) -> Outcome:
        """Train to the end. Now: `qie-train`, or `qie.train(config, pretrained, stream, accelerator)`.

        Args:
            train_dataloader: of `loader`; or a stream; None for what the configuration says. Other DataLoaders are
                refused.
            resume: "latest", or a checkpoint.
        """
        self._run = None
        stream = self.stream if train_dataloader is None else self.accelerator_prepare(train_dataloader)
        self._require_frozen()
        self.outcome = train(self.config, self.pretrained, stream, self._accelerated(), resume=resume)
        self.accelerator, self._stream = None, None  # the loop ended what they are made of
        return self.outcome

    def training_step(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch, to be given to `accelerator.backward`. Now: `qie.train`, or `Objective.loss`.

        Cached rows and rows that are encoded live are one kind of batch.
        """
        if not isinstance(batch, Batch):
            raise UsageError(
                "this is not a batch of qie",
                found=type(batch).__name__,
                hint="loop over trainer.stream, or over what trainer.accelerator_prepare(train_dataloader) gives",
            )
        run = self._running()
        run.batches_done += 1
        return run.objective.loss(run.trainable.model, batch, run.batches_done - 1)

    _training_step_cached = _training_step_compute = training_step

    def save_lora(self, save_path: str | Path) -> None:
        """Write the adapter that is trained, or was trained last, into a folder. Now: it is in every checkpoint."""
        folder = Path(save_path)
        if self._run is not None:
            save_adapter(self.transformer, folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        export_adapter(self._adapter(), folder / ADAPTER_FILE, "diffusers")

    def load_lora(self, pretrained_weight: str | Path, adapter_name: str | None = None) -> None:
        """Begin with this adapter in `set_lora` and `fit`, and generate with it.

        Now: `model.lora.continue_from` to train on, `qie-predict --lora` for inference.

        Args:
            pretrained_weight: a run's folder, a checkpoint, or a file that diffusers reads.
            adapter_name: ignored; there is one. Now: `model.adapters` for further ones.

        Raises:
            UsageError: there is no adapter, `set_lora` was called already, or all weights are trained.
        """
        if adapter_name is not None:
            ignored("adapter_name", "model.adapters in the configuration, for further adapters")
        section = self.config.model.lora
        if section is None:
            raise UsageError("all weights are trained: there is no adapter", where="model.lora")
        lora = section.model_copy(update={"continue_from": str(find_adapter(Path(pretrained_weight)))})
        model = self.config.model.model_copy(update={"lora": lora})
        self.config = self.config.model_copy(update={"model": model})

    def merge_lora(self, output: str | Path | None = None) -> None:
        """Merge the adapter into the transformer: in memory, or from the last checkpoint into the folder `output`.

        Now: `qie export RUN --merge --model M --output DIR`, or `qie.training.model.lora.merge_adapter`.
        """
        if output is None:
            with without_train_only(self.transformer):
                self.transformer.fuse_lora()
        else:
            merge_adapter(self.pretrained, self._adapter(), Path(output))

    def save_checkpoint(self, epoch: int | None = None, global_step: int | None = None) -> Path:
        """Write a checkpoint of one's own loop over `stream`, and give its folder. Now: `train.checkpoint_every`.

        A run that resumes from it continues after the last batch that `stream` gave. `epoch` is ignored.
        """
        if epoch is not None:
            ignored("epoch", "the state of the stream")
        run = self._running()
        run.step = run.step if global_step is None else global_step
        run.position = run.stream.state_dict()
        return save_checkpoint(run, Reporter(run.config, run.pretrained, run.stream, run.accelerator, resumed=False))

    # Generation

    def setup_predict(self) -> None:
        """Prepare for inference, with the adapter of `load_lora`, which is `model.lora.continue_from`.

        Weights are loaded by the first `predict`. Now: `predictor = qie.open_predictor(config, lora)`.
        """
        lora = self.config.model.lora
        self._predictor = open_predictor(self.config, lora.continue_from if lora else None)

    def predict(
        self,
        prompt_image: object,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = "",
        num_inference_steps: int = 20,
        true_cfg_scale: float = 4.0,
        image_latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        weight_dtype: torch.dtype | None = None,
        *,
        seed: int = 0,
    ) -> Pictures:
        """Edited images, a list that is an array, too. Now: `predictor.generate(images, prompt, steps=, cfg=, seed=)`.

        Args:
            prompt_image: an image of PIL, an array [H, W, 3] of uint8, or a path. With several prompts, one for each of
                them; with one prompt, all of its controls.
            prompt: one, or several for several results.
            negative_prompt: one, or one for each prompt. Empty guides away from the null prompt; None does without
                guidance, in half the time.
            true_cfg_scale: of guidance; 1 and below does without.
            image_latents, prompt_embeds, prompt_embeds_mask: refused. Now: `qie.inference.generate`.
            weight_dtype: ignored. Now: `cache.compute_dtype`.
            seed: of the noise.

        Raises:
            UsageError: an argument is not an image or a prompt, their numbers do not fit, or tensors are given.
        """
        if any(given is not None for given in (image_latents, prompt_embeds, prompt_embeds_mask)):
            raise UsageError("predict takes images and prompts, no tensors", hint="qie.inference.generate takes both")
        if weight_dtype is not None:
            ignored("weight_dtype", "cache.compute_dtype in the configuration")
        scenes = self._scenes(prompt_image, prompt)
        against = [negative_prompt] * len(scenes) if negative_prompt is None else _texts(negative_prompt)
        against = against * len(scenes) if len(against) == 1 else against
        if len(against) != len(scenes):
            raise UsageError("each negative prompt needs its own prompt", expected=len(scenes), found=len(against))
        if self._predictor is None:
            self.setup_predict()
        assert self._predictor is not None
        pictures = Pictures()
        for (images, text), negative in zip(scenes, against, strict=True):
            cfg = 1.0 if negative is None else true_cfg_scale
            told: dict[str, Any] = {"steps": num_inference_steps, "cfg": cfg, "seed": seed}
            pictures.append(self._predictor.generate(images, text, negative_prompt=negative or NULL_PROMPT, **told))
        return pictures

    def encode_prompt(
        self, prompt: str | Sequence[str], image: object, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [B, L, D], padded with zeros, and their mask [B, L]. Now: `encoder.embed(images, prompt)`.

        Args:
            prompt: one or several.
            image: see `predict`.
            device: where the outcome goes; the encoder computes on `cache.text_encoder_device`.
        """
        embeds = [self.encoder.embed(images, text) for images, text in self._scenes(image, prompt)]
        padded = torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
        lengths = torch.tensor([len(embed) for embed in embeds])
        mask = (torch.arange(padded.shape[1])[None] < lengths[:, None]).long()
        return padded.to(device), mask.to(device or padded.device)

    encode_prompt_image_embedding = encode_prompt

    def decode_vae_latent(self, latents: torch.Tensor) -> Pixels:
        """Latents as shards hold them, [C, 1, H, W] or [B, C, 1, H, W], to pixels: [8H, 8W, 3] or [B, 8H, 8W, 3] uint8.

        Now: the VAE of diffusers, `qie.inference.load_vae`, which takes z · std + mean.
        """
        if latents.ndim not in (4, 5) or latents.shape[-3] != 1:
            found = list(latents.shape)
            raise UsageError("these are not latents", expected="[C, 1, H, W] or [B, C, 1, H, W]", found=found)
        vae, batch = self.vae, latents if latents.ndim == 5 else latents[None]
        mean, std = (
            torch.tensor(values, device=vae.device, dtype=vae.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        with torch.inference_mode():
            pixels = vae.decode(batch.to(vae.device, vae.dtype) * std + mean, return_dict=False)[0][:, :, 0]
        decoded = (VaeImageProcessor().postprocess(pixels, output_type="np") * 255).round().astype(np.uint8)
        return decoded if latents.ndim == 5 else decoded[0]  # type: ignore[no-any-return]

    def _scenes(self, images: object, prompt: str | Sequence[str]) -> list[tuple[list[Image.Image], str]]:
        """The controls of each prompt."""
        given, prompts = pictures(images, self.config.data.background), _texts(prompt)
        if isinstance(prompt, str):
            return [(given, prompt)]
        if len(given) != len(prompts):
            raise UsageError("each prompt needs its own image", expected=len(prompts), found=len(given))
        return [([image], text) for image, text in zip(given, prompts, strict=True)]

    def _adapter(self) -> Path:
        """Of the last checkpoint."""
        return find_adapter(self.outcome.checkpoint if self.outcome else Path(self.config.train.output_dir))

    def _accelerated(self) -> Accelerator:
        if self.accelerator is None:
            self.setup_accelerator()
        assert self.accelerator is not None
        return self.accelerator

    def _require_frozen(self) -> None:
        if self.use_cache:
            require_frozen({"vae": self._vae})

    def _running(self) -> Run:
        if self._run is None:
            raise UsageError(
                "no model is loaded for training", hint="call set_lora first, or call fit, which does it all"
            )
        return self._run


def _texts(given: str | Sequence[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError("this is not a prompt", expected="a text, or several", found=type(given).__name__)
    return list(texts)


def _no_loader(given: object, expected: str) -> UsageError:
    """What is wrong with a DataLoader where `expected` is taken."""
    hint = "section data of the configuration says how rows are dealt into batches"
    return UsageError(
        "data loaders of other libraries are not supported", expected=expected, found=type(given).__name__, hint=hint
    )

"""`QwenImageEditTrainer` of qwen-image-finetune."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch
from accelerate import Accelerator
from diffusers import QwenImageTransformer2DModel
from torch.optim.lr_scheduler import LRScheduler

from qie.config import Config, load_config
from qie.data.stream import Stream
from qie.errors import UsageError
from qie.legacy.caching import CachingTrainer, no_loader
from qie.legacy.painting import ignored
from qie.legacy.settings import require_frozen
from qie.opening import open_accelerator, open_training_stream
from qie.training.export import export_adapter, find_adapter, merge_adapter
from qie.training.loop import Outcome, train
from qie.training.lora import save_adapter
from qie.training.lora_file import ADAPTER_FILE
from qie.training.metrics import METRICS_FILE
from qie.training.quantize import quantize_blocks
from qie.training.reporting import Reporter
from qie.training.run import Run
from qie.types import Batch

Mode = Literal["train", "cache", "predict"]


class QwenImageEditTrainer(CachingTrainer):
    """Caches, trains and paints by a configuration. Now: `qie-precompute`, `qie-train`, `qie-predict`, or docs/api.md.

    `fit` is the whole training. For a loop of one's own call `setup_accelerator`, `load_model`, `set_lora`,
    `configure_optimizers`, and for each batch of `stream` `training_step`; then step `optimizer` and `lr_scheduler`,
    and add 1 to `global_step`.

    Args:
        config: a configuration, or its file.

    Attributes:
        config: frozen; `load_lora` replaces it.
        accelerator: once `setup_accelerator` was called.
        outcome: of `fit`.
    """

    def __init__(self, config: Config | str | Path) -> None:
        if isinstance(config, (str, Path)):
            config = load_config(config)
        given: object = config
        if not isinstance(given, Config):
            hint = "qie.load_config reads a YAML file; docs/migration.md lists the keys that changed"
            raise UsageError("this is no configuration of qie", found=type(given).__name__, hint=hint)
        super().__init__(given)
        self.accelerator: Accelerator | None = None
        self.outcome: Outcome | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self._run: Run | None = None
        self._stream: Stream | None = None

    @property
    def stream(self) -> Stream:
        """What is trained on. Now: `qie.open_training_stream(config, checkpoint, accelerator)`."""
        if self._stream is None:
            self._stream = open_training_stream(self.config, self.checkpoint, self._accelerated())
        return self._stream

    @property
    def transformer(self) -> QwenImageTransformer2DModel:
        """The model that `set_lora` made ready."""
        return self._running().trainee.transformer

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self._run.step if self._run else self.outcome.step if self.outcome else 0

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._running().step = step

    def load_model(self, text_encoder_device: str | None = None) -> None:
        """Check that the checkpoint has all components; weights are loaded by what needs them first.

        Now: `qie.open_checkpoint`. `text_encoder_device` is ignored: `cache.text_encoder_device`.
        """
        if text_encoder_device is not None:
            ignored("text_encoder_device", "cache.text_encoder_device in the configuration")
        _ = self.checkpoint

    def setup_accelerator(self) -> None:
        """Now: `qie.open_accelerator(config)`."""
        self.accelerator = open_accelerator(self.config)

    def set_lora(self) -> None:
        """Load the transformer, quantised where `model.quantize` says so, with a new adapter, for a loop of one's own.

        Now: `qie.training.run.Run`, which `qie.train` drives. Its optimizer is made here, too.
        """
        self._require_frozen()
        self._run = Run(self.config, self.checkpoint, self.stream, self._accelerated(), None)

    def configure_optimizers(self) -> None:
        """Give `optimizer` and `lr_scheduler`. Now: sections `optimizer` and `lr_scheduler`; `Run` makes them."""
        self.optimizer, self.lr_scheduler = self._running().optimizer, self._running().schedule

    def set_model_devices(self, mode: Mode = "train") -> None:
        """Let go of what `mode` does not need. Now: nothing; each command loads what it needs, where it is needed."""
        if mode not in get_args(Mode):
            raise UsageError("no such mode", expected=", ".join(get_args(Mode)), found=mode)
        if mode == "train" and self.use_cache and self.cache_exist:
            self._release_encoders()
        if mode != "train":
            self._run, self.optimizer, self.lr_scheduler = None, None, None

    def quantize_model(
        self, model: QwenImageTransformer2DModel, device: torch.device | str | None = None
    ) -> QwenImageTransformer2DModel:
        """Quantise a transformer's blocks in place, by `model.quantize`, or to fp8. Now: `model.quantize: fp8`."""
        quantize_blocks(model, self.config.model.quantize or "fp8", None if device is None else torch.device(device))
        return model

    def fit(self, train_dataloader: Stream | None = None, *, resume: str | None = None) -> Outcome:
        """Train to the end. Now: `qie-train`, or `qie.train(config, checkpoint, stream, accelerator)`.

        Args:
            train_dataloader: a stream; None for what the configuration says. DataLoaders of other datasets are refused.
            resume: "latest", or a checkpoint.
        """
        if train_dataloader is not None and not isinstance(train_dataloader, Stream):
            raise no_loader(train_dataloader, "a stream: qie.open_stream, or nothing")
        self._require_frozen()
        self._run = None
        stream = train_dataloader or self.stream
        self.outcome = train(self.config, self.checkpoint, stream, self._accelerated(), resume=resume)
        self.accelerator, self._stream = None, None  # the loop ended what they are made of
        return self.outcome

    def training_step(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch, to be given to `accelerator.backward`. Now: `qie.train`, or `Objective.loss`."""
        if not isinstance(batch, Batch):
            raise UsageError("this is no batch of qie", expected="one of a stream", found=type(batch).__name__)
        run = self._running()
        run.taken += 1
        return run.objective.loss(run.trainee.model, batch, run.taken - 1)

    def save_lora(self, save_path: str | Path) -> None:
        """Write the adapter that is trained, or was trained last, into a folder. Now: it is in every checkpoint."""
        folder = Path(save_path)
        if self._run is not None:
            save_adapter(self.transformer, folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        export_adapter(self._adapter(), folder / ADAPTER_FILE, "diffusers")

    def load_lora(self, pretrained_weight: str | Path, adapter_name: str | None = None) -> None:
        """Begin with this adapter in `set_lora` and `fit`, and paint with it.

        Now: `model.lora.continue_from` to train on, `qie-predict --lora` to paint.

        Args:
            pretrained_weight: a run's folder, a checkpoint, or a file that diffusers reads.
            adapter_name: ignored; there is one. Now: `model.adapters` for further ones.

        Raises:
            UsageError: there is no adapter, `set_lora` was called already, or all weights are trained.
        """
        if adapter_name is not None:
            ignored("adapter_name", "model.adapters in the configuration, for further adapters")
        if self._run is not None:
            raise UsageError("the adapter is there already", hint="call load_lora before set_lora")
        section = self.config.model.lora
        if section is None:
            raise UsageError("all weights are trained: there is no adapter", where="model.lora")
        lora = section.model_copy(update={"continue_from": str(find_adapter(Path(pretrained_weight)))})
        model = self.config.model.model_copy(update={"lora": lora})
        self.config, self._painter = self.config.model_copy(update={"model": model}), None

    def merge_lora(self, output: str | Path | None = None) -> None:
        """Merge the adapter into the transformer: in memory, or from the last checkpoint into the folder `output`.

        Now: `tools/export_adapter.py RUN --merge --model M --output DIR`, or `qie.training.export.merge_adapter`.
        """
        if output is None:
            self.transformer.fuse_lora()
        else:
            merge_adapter(self.checkpoint, self._adapter(), Path(output))

    def save_checkpoint(self, epoch: int | None = None, global_step: int | None = None) -> Path:
        """Write a checkpoint of one's own loop over `stream`, and give its folder. Now: `train.checkpoint_every`.

        A run that resumes from it goes on behind the last batch that `stream` gave. `epoch` is ignored.
        """
        if epoch is not None:
            ignored("epoch", "the state of the stream")
        run = self._running()
        run.step = run.step if global_step is None else global_step
        run.position = run.stream.state_dict()
        metrics = Path(run.config.train.output_dir) / METRICS_FILE
        metrics.parent.mkdir(parents=True, exist_ok=True)
        metrics.touch()  # the report reads it; one's own loop need not write it
        reporter = Reporter(run.config, run.checkpoint, run.stream, run.accelerator, resumed=False)
        return run.save(lambda: reporter.report(run.step, ended=False))

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
            raise UsageError("there is no model in training", hint="call set_lora first, or fit for all of it")
        return self._run

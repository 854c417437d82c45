"""What is trained: the transformer with its adapter, or all of its weights; and their average."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import QwenImageTransformer2DModel
from torch.distributed.tensor import DTensor

from qie.config import Config
from qie.pretrained import PretrainedModel
from qie.training.checkpoint import explained_damage
from qie.training.memory import empty_transformer
from qie.training.model.blocks import checkpoint_blocks, compile_blocks
from qie.training.model.ema import Ema
from qie.training.model.load import load_transformer, train_everything
from qie.training.model.lora import add_frozen_adapters, add_lora, as_saved, fill_adapter, load_adapter, save_adapter
from qie.training.model.lora_file import ADAPTER_FILE
from qie.training.model.sharding import all_whole, fill, reshard
from qie.training.model.weights import not_finite, read_transformer, require_finite, save_transformer

EMA_FOLDER = "ema"


class Trainee:
    """A transformer in training.

    Args:
        pretrained: the base model.
        config: its sections model and train.
        start: a checkpoint folder from which its weights are taken; None for a new run.
        dtype: in which it computes.
        device: where.

    Attributes:
        transformer: the module, as diffusers has it.
        model: what a training step calls: the same, perhaps wrapped for several processes.
    """

    def __init__(
        self, pretrained: PretrainedModel, config: Config, start: Path | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        model, section = config.model, config.train
        trained = getattr(torch, section.trained_dtype)
        if model.lora:
            self.transformer = load_transformer(
                pretrained,
                dtype,
                quantize=model.quantize,
                attention_backend=model.attention_backend,
                device=device,
            )
            add_frozen_adapters(self.transformer, model.adapters)
            lora = model.lora.model_copy(update={"continue_from": None}) if start else model.lora
            add_lora(self.transformer, lora, section.seed, dtype=trained)
            if start:
                with explained_damage(start, ADAPTER_FILE):
                    load_adapter(self.transformer, start)
        else:
            source = PretrainedModel(start, pretrained.family) if start else pretrained
            with explained_damage(start, "transformer") if start else nullcontext():
                self.transformer = load_transformer(source, trained, attention_backend=model.attention_backend)
                if start:
                    _require_same_layers(self.transformer, pretrained, start / "transformer")
            train_everything(self.transformer, trained)
        self._lora = model.lora is not None
        every = int(section.gradient_checkpointing)
        if every or section.offload_blocks:
            checkpoint_blocks(self.transformer, every, section.offload_blocks, device)
        if section.compile:
            compile_blocks(self.transformer)
        self.model: torch.nn.Module = self.transformer
        self._ema: Ema | None = None
        self._decay = section.ema_decay

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained ones by name, as they are: plain, or sharded after `prepare`."""
        return {name: weight for name, weight in self.transformer.named_parameters() if weight.requires_grad}

    @property
    def sharded(self) -> bool:
        """Whether each process holds a part of the weights alone."""
        return any(isinstance(weight, DTensor) for weight in self.transformer.parameters())

    def prepare(
        self, accelerator: Accelerator, optimizer: torch.optim.Optimizer, start: Path | None
    ) -> torch.optim.Optimizer:
        """Spread the model over the processes; returns the optimizer to step with."""
        self.model, prepared = accelerator.prepare(self.transformer, optimizer)
        self.model.train()
        if self._decay is not None:
            self._ema = Ema(self.parameters, self._decay)
            if start:
                with explained_damage(start, EMA_FOLDER):
                    self._load_average(start / EMA_FOLDER)
        return prepared  # type: ignore[no-any-return]

    def after_step(self, step: int) -> None:
        """Take optimizer step number `step`, from 1, into the average."""
        if self._ema:
            self._ema.update(step)

    @contextmanager
    def as_used(self) -> Iterator[torch.nn.Module]:
        """Within, the transformer is what a user of the outcome has: averaged weights, no dropout."""
        with self._ema.applied() if self._ema else nullcontext():
            self.transformer.eval()
            try:
                yield self.transformer
            finally:
                reshard(self.transformer)
                self.transformer.train()

    def gathered(self, *, wanted: bool) -> Callable[[Path], None]:
        """What writes the weights into a folder.

        Every process asks for it, since each may hold a part of them; one that does not want it keeps nothing.

        Raises:
            QieError: one is not finite; names it.
        """
        trained = all_whole(self._named(self.parameters), wanted=wanted)
        average = all_whole(self._named(self._ema.averages), wanted=wanted) if self._ema else None
        require_finite(trained)
        require_finite(average or {})

        def write(folder: Path) -> None:
            self._write(trained, folder)
            if average:
                self._write(average, folder / EMA_FOLDER)

        return write

    def release(self) -> None:
        """Let go of the wrapper of several processes."""
        self.model = self.transformer

    def _named(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values by the names of parameters, by those in a file instead."""
        return as_saved(self.transformer, values) if self._lora else dict(values)

    def _write(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        if self._lora:
            save_adapter(self.transformer, folder, state)
        else:
            save_transformer(self.transformer, folder / "transformer", state)

    def _load_average(self, folder: Path) -> None:
        assert self._ema is not None
        averages = self._named(self._ema.averages)
        if self._lora:
            fill_adapter(averages, folder)
        else:
            fill(averages, read_transformer(folder / "transformer"))


def _require_same_layers(transformer: QwenImageTransformer2DModel, base: PretrainedModel, folder: Path) -> None:
    """Raise ValueError unless a transformer is as the base model's, and all of it, finite, stands in its files."""
    expected = {name: value for name, value in empty_transformer(base).config.items() if not name.startswith("_")}
    if other := [name for name in expected if json.dumps(expected[name]) != json.dumps(transformer.config.get(name))]:
        raise ValueError(f"in config.json, {other[0]} is not that of the base model")
    if others := transformer.state_dict().keys() ^ read_transformer(folder).keys():
        raise ValueError(f"{min(others)} is missing, or too many")
    if bad := not_finite(transformer.state_dict()):
        raise ValueError(f"{bad} is not finite")

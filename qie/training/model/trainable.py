"""The model in training: a transformer with an adapter, or with all its weights trained, and their average."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import QwenImageTransformer2DModel
from torch.distributed.tensor import DTensor

from qie.config import Config
from qie.pretrained import PretrainedModel
from qie.training.checkpoint_folders import explained_damage
from qie.training.model.adapter_file import ADAPTER_FILE, adapter_in, check_adapters
from qie.training.model.blocks import NOTHING_KEPT, KeptActivations, checkpoint_activations, compile_blocks
from qie.training.model.ema import Ema
from qie.training.model.load import (
    TRANSFORMER_FOLDER,
    empty_transformer,
    load_transformer,
    read_transformer,
    save_transformer,
    train_all_weights,
)
from qie.training.model.lora import (
    adapter_tensors,
    add_frozen_adapters,
    add_lora,
    load_adapter,
    round_adapters,
    save_adapter,
    without_train_only,
)
from qie.training.model.sharding import all_whole, fill, not_finite, require_finite, require_own_blocks, reshard_weights
from qie.training.model.training_forward import use_training_forward

TRAINED, EMA = "trained", "ema"
"""The groups of tensors in a checkpoint: the trained weights, and in a folder `ema` their averages, laid out alike."""

Tensors = Mapping[str, torch.Tensor]


class TrainableModel:
    """A transformer in training.

    Args:
        pretrained: the base model.
        config: its sections model and train.
        dtype: in which it computes.
        device: where it is trained.
        weights: the checkpoint folder that `load` is to be called with; None for a new run. What that checkpoint
            replaces is not read: neither model.lora.continue_from, nor the base model's weights where all are trained.
        kept: what activation checkpointing keeps.

    Attributes:
        transformer: the module, as diffusers has it.
        model: the module that a training step calls: the transformer, perhaps wrapped for several processes.

    Raises:
        QieError: the transformer in `weights` is damaged, or is not one of the base model.
    """

    def __init__(
        self,
        pretrained: PretrainedModel,
        config: Config,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weights: Path | None = None,
        kept: KeptActivations = NOTHING_KEPT,
    ) -> None:
        section = config.train
        self._lora, self._decay, self._weights = config.model.lora is not None, section.ema_decay, weights
        self.transformer = (
            _with_adapter(pretrained, config, dtype, device, fresh=weights is None)
            if self._lora
            else _all_trained(pretrained, config, device, weights)
        )
        use_training_forward(self.transformer)
        checkpoint_activations(
            self.transformer,
            section.checkpointed_every,
            section.offload_blocks,
            device,
            kept=kept,
            compiled=section.compile,
        )
        if section.compile:
            compile_blocks(self.transformer)
        self.model: torch.nn.Module = self.transformer
        self._ema: Ema | None = None

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained ones by name, as they are: plain, or sharded after `prepare`."""
        return {name: weight for name, weight in self.transformer.named_parameters() if weight.requires_grad}

    @property
    def sharded(self) -> bool:
        """Whether each process holds only a part of the weights."""
        return any(isinstance(weight, DTensor) for weight in self.transformer.parameters())

    def prepare(self, accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Spread the model over the processes; returns the optimizer to step with.

        A LoRA's base is in the dtype that it computes in, and the adapter rounds its weights itself. Autocast would
        only take LayerNorms on a GPU to float32, and with nf4 all that blocks hand on.
        """
        accelerator.native_amp &= not self._lora
        if sharding := getattr(accelerator.state, "fsdp_plugin", None):
            require_own_blocks(self.transformer, sharding.transformer_cls_names_to_wrap)
        self.model, prepared = accelerator.prepare(self.transformer, optimizer)
        self.model.train()
        if self._decay is not None:
            self._ema = Ema(self.parameters, self._decay)
        return prepared  # type: ignore[no-any-return]

    def update_average(self, step: int) -> None:
        """Take optimizer step number `step`, from 1, into the average."""
        if self._ema:
            self._ema.update(step)

    @contextmanager
    def evaluating(self, *, as_released: bool = False) -> Iterator[torch.nn.Module]:
        """A context in which the transformer has averaged weights and no dropout.

        Args:
            as_released: it is as its users get it, also without the adapters of training alone. A validation loss has
                them: it stands beside the training loss, and both are of one model.
        """
        adapters = without_train_only(self.transformer) if as_released else nullcontext()
        with self._ema.applied() if self._ema else nullcontext(), adapters:
            self.transformer.eval()
            try:
                yield self.transformer
            finally:
                reshard_weights(self.transformer)
                self.transformer.train()

    def tensors(self, *, wanted: bool) -> dict[str, dict[str, torch.Tensor]]:
        """The weights that a checkpoint holds: whole, on the CPU, by their names in a file.

        Collective: every process has to call it, since each may hold a part. A process that does not want the tensors
        keeps none.

        Returns:
            TRAINED: the trained weights. EMA: their averages, with train.ema_decay.

        Raises:
            QieError: a weight is not finite; names it.
        """
        found = {group: all_whole(values, wanted=wanted) for group, values in self._groups().items()}
        for values in found.values():
            require_finite(values)
        return found

    def save(self, folder: Path, tensors: Mapping[str, Tensors]) -> None:
        """Write the result of `tensors` into a checkpoint's folder, in the diffusers layout."""
        for group, values in tensors.items():
            place = _place(folder, group)
            if self._lora:
                save_adapter(self.transformer, place, values)
            else:
                save_transformer(self.transformer, place / TRANSFORMER_FOLDER, values)

    def load(self, folder: Path) -> None:
        """Fill the trained weights and their averages from a checkpoint; every process calls it, after `prepare`.

        Raises:
            QieError: the checkpoint is damaged, or of another adapter; names the file.
        """
        for group, values in self._groups().items():
            place = _place(folder, group)
            name = (adapter_in(place) or Path(ADAPTER_FILE)).name if self._lora else TRANSFORMER_FOLDER
            if group == TRAINED and not self._lora and folder == self._weights:
                continue  # already loaded by the constructor
            with explained_damage(folder, EMA if group == EMA else name):
                if self._lora:
                    load_adapter(values, place)
                else:
                    fill(values, read_transformer(place / TRANSFORMER_FOLDER))

    def release(self) -> None:
        """Drop the wrapper for several processes."""
        self.model = self.transformer

    def _groups(self) -> dict[str, Tensors]:
        """The tensors themselves, perhaps sharded, by their names in a file."""
        found: dict[str, Tensors] = {TRAINED: {name: weight.detach() for name, weight in self.parameters.items()}}
        if self._ema:
            found[EMA] = self._ema.averages
        if self._lora:
            return {group: adapter_tensors(self.transformer, values) for group, values in found.items()}
        return found


def _place(folder: Path, group: str) -> Path:
    return folder if group == TRAINED else folder / group


def check_given_adapters(config: Config, pretrained: PretrainedModel) -> None:
    """Refuse, before weights are read, adapters of section model that cannot be on the model or be continued from.

    Raises:
        ConfigError: an adapter cannot be read, or is of another kind or scale than model.lora.
        UsageError: it does not fit the transformer.
    """
    model = config.model
    if model.lora and model.adapters:
        check_adapters(
            empty_transformer(pretrained),
            model.adapters,
            "model.adapters",
            kind=model.lora.kind.upper(),
            quantize=model.quantize,
        )
    if model.lora and model.lora.continue_from:
        add_lora(empty_transformer(pretrained), model.lora, config.train.seed)


def _with_adapter(
    pretrained: PretrainedModel, config: Config, dtype: torch.dtype, device: torch.device, *, fresh: bool
) -> QwenImageTransformer2DModel:
    """The frozen transformer with its adapters; the trained one is new, or begins from model.lora.continue_from."""
    model = config.model
    assert model.lora is not None
    transformer = load_transformer(
        pretrained,
        dtype,
        quantize=model.quantize,
        attention_backend=model.attention_backend,
        device=device,
        offload_blocks=config.train.offload_blocks,
        fp8_compute=config.train.fp8_compute,
    )
    add_frozen_adapters(transformer, model.adapters)
    lora = model.lora if fresh else model.lora.model_copy(update={"continue_from": None})
    add_lora(transformer, lora, config.train.seed, dtype=getattr(torch, config.train.trained_dtype))
    if dtype != torch.float32:
        round_adapters(transformer)
    return transformer


def _all_trained(
    pretrained: PretrainedModel, config: Config, device: torch.device, weights: Path | None
) -> QwenImageTransformer2DModel:
    """The base model's transformer, or that of the checkpoint `weights`, with all weights trainable."""
    trained, backend = getattr(torch, config.train.trained_dtype), config.model.attention_backend
    source = PretrainedModel(weights, pretrained.family) if weights else pretrained
    with explained_damage(weights, TRANSFORMER_FOLDER) if weights else nullcontext():
        transformer = load_transformer(source, trained, attention_backend=backend, device=device)
        if weights:
            _require_same_layers(transformer, pretrained, weights / TRANSFORMER_FOLDER)
    train_all_weights(transformer, trained)
    return transformer


def _require_same_layers(transformer: QwenImageTransformer2DModel, base: PretrainedModel, folder: Path) -> None:
    """Raise ValueError unless a transformer is as the base model's, and all of it, finite, stands in its files."""
    expected = {name: value for name, value in empty_transformer(base).config.items() if not name.startswith("_")}
    if other := [name for name in expected if json.dumps(expected[name]) != json.dumps(transformer.config.get(name))]:
        raise ValueError(f"in config.json, {other[0]} is not that of the base model")
    if others := transformer.state_dict().keys() ^ read_transformer(folder).keys():
        raise ValueError(f"{min(others)} is missing, or too many")
    if bad := not_finite(transformer.state_dict()):
        raise ValueError(f"{bad} is not finite")

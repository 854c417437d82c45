"""A run: its model, optimizer and batches, and its operations: training step, validation, saving and restoring."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import QwenImageTransformer2DModel
from PIL import Image

from qie.config import Config, SampleConfig
from qie.data.live import LiveSamples
from qie.data.stream import Stream
from qie.errors import ConfigError, QieError
from qie.families import Family
from qie.pretrained import PretrainedModel
from qie.stages import Pipeline, Stages
from qie.training.checkpoint import (
    OPTIMIZER_FILE,
    RunState,
    RunTensors,
    identity,
    load,
    require_same,
    require_steps,
)
from qie.training.checkpoint_folders import STATE_FILE, explained_damage
from qie.training.model.blocks import NOTHING_KEPT, KeptActivations
from qie.training.model.load import load_shift
from qie.training.model.sharding import TensorFiles, require_finite, whole
from qie.training.model.trainable import TrainableModel, check_given_adapters
from qie.training.objective import LossFunction, NoiseDraws, Objective, derive_seed, loss_name, require_plain
from qie.training.optimizer import check_optimizer, load_named_state, make_optimizer, make_schedule, named_state
from qie.training.reporting.metrics import (
    Preference,
    Speed,
    StepMetrics,
    Validation,
    by_level,
    mean_of,
    peak_memory_bytes,
)
from qie.types import Batch

ROWS_TOLD = 8
"""Of those that a run cannot learn from."""

SampleGenerator = Callable[[QwenImageTransformer2DModel], Sequence[Image.Image]]
"""Generates the images of validation.samples with the model as it is."""


class OtherSamples(Protocol):
    """Makes a generator for other `validation.samples`, while the run trains."""

    def embed(self, samples: Sequence[SampleConfig]) -> Any:
        """The samples, embedded, for `open`. May take minutes. Raises QieError when one cannot be used."""

    def open(self, embedded: Any) -> SampleGenerator | None:
        """The generator of what `embed` gave, perhaps in another process; None for no samples."""


class Run:
    """Model, optimizer, schedule, batches, and the number of steps done.

    Args:
        config: every section but data and cache, which made the stream.
        pretrained: the base model.
        stream: this process's batches.
        accelerator: device, precision and processes.
        resume_from: a checkpoint folder; None for a new run.
        kept: what activation checkpointing keeps.
        loss_fn: takes the place of the loss, see `LossFunction`.
        accepted: called when nothing is left to refuse, before weights are read.

    Attributes:
        step, steps: optimizer steps done, and planned.
        batches: prepared batches, from the next one on.
        batches_done: the number of batches trained on; the next one's noise is a function of it.
        position: the stream's state after them. The stream itself is ahead.

    Raises:
        ConfigError: optimizer or schedule cannot be made, there are no null prompts for dropped captions, or a setting
            cannot be combined with `loss_fn`.
        QieError: the checkpoint is damaged, or of another run.
    """

    def __init__(
        self,
        config: Config,
        pretrained: PretrainedModel,
        stream: Stream,
        accelerator: Accelerator,
        resume_from: Path | None = None,
        *,
        kept: KeptActivations = NOTHING_KEPT,
        loss_fn: LossFunction | None = None,
        accepted: Callable[[], object] = lambda: None,
    ) -> None:
        self.config, self.pretrained, self.stream, self.accelerator = config, pretrained, stream, accelerator
        train = config.train
        planned = self._planned_batches = None if train.epochs is None else stream.count(train.epochs)
        self.steps = planned_steps(config, stream)
        # Everything that can be refused is refused before the weights are read.
        require_one_draw(pretrained.family, train.draws_per_sample)
        check_optimizer(config.optimizer, config.lr_scheduler, accelerator.device, self.steps)
        require_null_prompts(stream, config.data.caption_dropout_rate)
        if loss_fn is not None:
            require_plain(config)
        require_pairs(config, stream)
        require_preserved(config, stream)
        if resume_from is None:
            check_given_adapters(config, pretrained)
        state = self._checked_state(resume_from, loss_fn)
        accepted()
        if isinstance(stream.samples, LiveSamples):
            stream.samples.load_encoder()
        dtype = torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32
        self.trainable = TrainableModel(pretrained, config, dtype, accelerator.device, weights=resume_from, kept=kept)
        self.optimizer = make_optimizer(config.optimizer, self.trainable.parameters)
        self.schedule = make_schedule(config.lr_scheduler, self.optimizer, self.steps)
        self._stepper = self.trainable.prepare(accelerator, self.optimizer)
        self.objective = _objective(
            config, pretrained, accelerator.device, dtype, loss_fn, together=self.trainable.sharded
        )
        self.step, self.batches_done, self._nonfinite, self._unproved = 0, 0, 0, resume_from
        if resume_from and state:
            self.load_state_dict(state, resume_from)
        self.position = stream.state_dict()
        every = self.steps * train.gradient_accumulation_steps if planned is None else planned
        self.batches = iter_prepared(stream, self.objective, self.batches_done, every)
        self._speed = _speed(config, self.trainable.transformer.config, accelerator.device, dtype)

    def _checked_state(self, resume_from: Path | None, loss_fn: LossFunction | None) -> RunState | None:
        """What a checkpoint says; one of another run is refused."""
        main = self.accelerator.is_main_process
        state = load(resume_from, hashes=main) if resume_from else None
        if resume_from and state:
            require_steps(state, self.steps, resume_from)
        self._identity = identity(self.config, self.pretrained, loss_name(loss_fn)) if main else {}
        if resume_from and state:
            if main:
                require_same(state, self._identity, resume_from)
            with explained_damage(resume_from, STATE_FILE):
                self.stream.load_state_dict(state.stream)  # which refuses those of another stream
        return state

    def training_step(self) -> StepMetrics:
        """One optimizer step over `gradient_accumulation_steps` batches, or over the rest of the last epoch.

        Raises:
            QieError: neither its loss nor those of the `max_nonfinite_steps` - 1 steps before it are finite.
        """
        section, started = self.config.train, time.perf_counter()
        # Other random numbers, such as those of LoRA dropout, are the same in this step of any run.
        torch.manual_seed(derive_seed(section.seed, self.step, "dropout", self.accelerator.process_index))
        planned = self._planned_batches
        parts = section.gradient_accumulation_steps
        parts = parts if planned is None else min(parts, planned - self.batches_done)
        waited_s, flops = 0.0, 0.0
        rows: list[torch.Tensor] = []
        keys: list[str] = []
        for part in range(parts):
            waiting = time.perf_counter()
            prepared = next(self.batches)
            waited_s += time.perf_counter() - waiting
            with nullcontext() if part == parts - 1 else self.accelerator.no_sync(self.trainable.model):
                rows.append(self._backward(prepared, parts))
            keys.extend(key for key in prepared.batch.keys for _ in range(section.draws_per_sample))
            flops += self._speed.flops(prepared.batch, base_passes=self._base_passes(prepared.batch))
        self.position, self.batches_done = prepared.position, self.batches_done + parts
        grad_norm = self._clip()
        losses, sigmas, weights, *more = self.accelerator.gather(torch.cat(rows)).cpu().unbind(1)
        lr = float(self.schedule.get_last_lr()[0])
        self._update(finite=math.isfinite(grad_norm) and bool(torch.isfinite(losses).all()))
        if self._nonfinite >= section.max_nonfinite_steps:
            raise self._not_finite(keys, rows)
        step_time_s, counted = time.perf_counter() - started, weights > 0  # padding of a batch weighs 0
        return StepMetrics(
            step=self.step,
            epoch=prepared.epoch,
            loss=float((losses * weights).mean()),
            loss_by_level=by_level(sigmas[counted], losses[counted]),
            grad_norm=grad_norm,
            lr=lr,
            samples=int(counted.sum()),
            samples_per_s=int(counted.sum()) / step_time_s,
            step_time_s=step_time_s,
            data_wait_s=waited_s,
            peak_memory_bytes=peak_memory_bytes(self.accelerator.device),
            mfu=self._speed.mfu(flops, step_time_s),
            **self._further(sigmas[counted], losses[counted], [each[counted] for each in more]),
        )

    def _base_passes(self, batch: Batch) -> float:
        """The model is also asked without its adapter for both targets of a pair, and for preserved samples."""
        return 1 if self.config.loss.of_pairs else sum(batch.preserved) / len(batch)

    def _further(
        self, sigmas: torch.Tensor, losses: torch.Tensor, more: Sequence[torch.Tensor]
    ) -> dict[Literal["preference", "preserved_loss"], Any]:
        """The metrics of what `Losses.columns` has besides loss, noise level and weight."""
        if self.config.loss.of_pairs:
            return {"preference": Preference.of(sigmas, *more)}
        return {"preserved_loss": mean_of(losses[more[0] > 0])} if more else {}

    def _backward(self, prepared: PreparedBatch, parts: int) -> torch.Tensor:
        """Add the gradients of one of `parts` batches; gives the columns of `Losses`."""
        found = self.objective.losses(self.trainable.model, prepared.batch, prepared.draws)
        self.accelerator.backward(found.mean / parts)
        return found.columns

    def _clip(self) -> float:
        """Scale gradients longer than `max_grad_norm` down to it; gives their length before."""
        limit = self.config.train.max_grad_norm
        parameters = list(self.trainable.parameters.values())
        norm = self.accelerator.clip_grad_norm_(parameters, math.inf if limit is None else limit)
        return float(whole(norm)) if isinstance(norm, torch.Tensor) else float(norm)

    def _update(self, *, finite: bool) -> None:
        """Step the optimizer. When the gradients are not finite, only count."""
        # Some damage of a restored state shows only when the optimizer uses it.
        unproved, self._unproved = self._unproved, None
        with explained_damage(unproved, f"{OPTIMIZER_FILE} or {STATE_FILE}") if unproved else nullcontext():
            if finite:
                self._stepper.step()
            self._stepper.zero_grad()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns where the first step is left out
            self.schedule.step()
        self.step += 1
        self._nonfinite = 0 if finite else self._nonfinite + 1
        if finite:
            self.trainable.update_average(self.step)

    def _not_finite(self, keys: list[str], rows: list[torch.Tensor]) -> QieError:
        finite = torch.isfinite(torch.cat(rows)[:, 0]).tolist()
        bad = gather_object(list(dict.fromkeys(key[:12] for key, good in zip(keys, finite, strict=True) if not good)))
        steps = f" in {self._nonfinite} steps in a row" if self._nonfinite > 1 else ""
        return QieError(
            f"the loss is not finite{steps}",
            where=f"step {self.step}, samples {', '.join(bad) or 'none alone: the gradient'}",
            hint="no weight was changed: inspect the samples, continue with --resume latest and skip such steps with "
            "train.max_nonfinite_steps, or start a new run with a lower optimizer.init_args.lr",
        )

    def validate(self) -> Validation | None:
        """The loss on the rows kept out, the same in every process and for any number of them; None without rows.
        Those of preserved sources have a loss of their own.

        Row i of n takes the noise level (i + ½)/n before the shift, and noise that never changes: the rows cover all
        levels, and two losses of a run differ only by what the model has learnt between them.
        """
        planned = self.stream.validation_batches()
        if not planned:
            return None
        total, world, rank = len(planned), self.accelerator.num_processes, self.accelerator.process_index
        losses: list[torch.Tensor] = []
        with self.trainable.evaluating() as model:
            for turn in range(math.ceil(total / world)):
                # A process without a row of its own takes the first one again: sharded models compute together.
                number = turn * world + rank if turn * world + rank < total else 0
                batch, level = self.stream.load(planned[number]), (number + 0.5) / total
                found = self.objective.validation_losses(model, batch, level)
                losses.append(self.accelerator.gather(found.columns))
        rows, _, _, *more = torch.cat(losses)[:total].cpu().unbind(1)
        levels = (torch.arange(total) + 0.5) / total
        further = self._further(levels, rows, more)
        learnt = more[0] == 0 if "preserved_loss" in further else torch.ones(total, dtype=torch.bool)
        return Validation(float(rows[learnt].mean()), by_level(levels[learnt], rows[learnt]), **further)

    def sample_images(self, generate: SampleGenerator) -> Sequence[Image.Image]:
        """The sample images, in the main process. Where the model is spread over processes, all of them take part."""
        main = self.accelerator.is_main_process
        if not main and not self.trainable.sharded:
            return []
        with self.trainable.evaluating(as_released=True) as model:
            images = generate(model)
        return images if main else []

    def state_dict(self) -> tuple[RunState, RunTensors]:
        """The run between two steps: JSON and tensors, for `checkpoint.save`.

        Collective: every process calls it, since each may hold a part of the tensors. Only the main one gets them.

        Raises:
            QieError: a tensor is not finite; names it.
        """
        main = self.accelerator.is_main_process
        moments, numbers = named_state(self.optimizer, self.trainable.parameters, wanted=main)
        weights = self.trainable.tensors(wanted=main)
        require_finite(moments)
        schedule = self.schedule.state_dict()
        state = RunState(
            self.step, self.batches_done, self._nonfinite, self.position, numbers, schedule, self._identity
        )
        return state, RunTensors(weights, moments)

    def load_state_dict(self, state: RunState, folder: Path) -> None:
        """Resume from a checkpoint. Every process calls it, and reads from the folder's files its part of each tensor.

        Args:
            state: what `checkpoint.load` gave for the folder.
            folder: the checkpoint's.

        Raises:
            QieError: the checkpoint is damaged; names the file.
            UsageError: the stream is another one; names the difference.
        """
        self.trainable.load(folder)
        with explained_damage(folder, f"{OPTIMIZER_FILE} or {STATE_FILE}"):
            moments = TensorFiles([folder / OPTIMIZER_FILE])
            load_named_state(self.optimizer, self.trainable.parameters, moments, state.optimizer)
        with explained_damage(folder, STATE_FILE):
            self.schedule.load_state_dict(state.schedule)
            rates = self.schedule.get_last_lr()
            if self.schedule.last_epoch != state.step or not (rates and all(map(math.isfinite, rates))):
                raise ValueError("schedule is not a value that a run saves")
            self.stream.load_state_dict(state.stream)
            if self.stream.plans.whole and self.stream.position >= len(self.stream):
                raise ValueError("stream.position is after the end of its epoch")
        self.step, self.batches_done, self._nonfinite = state.step, state.batches, state.nonfinite

    def finish(self) -> None:
        """Leave the process group, all together: one that leaves while the main process still saves can hang.

        So can one that leaves with its DDP wrapper alive: Python then frees the wrapper's reference to the group last,
        and holds its lock while it waits for a thread of gloo that waits for the lock.
        """
        self.accelerator.wait_for_everyone()
        self.trainable.release()
        self.accelerator.free_memory()
        self.accelerator.end_training()


def planned_steps(config: Config, stream: Stream) -> int:
    """Optimizer steps of a whole run."""
    section = config.train
    if section.epochs is None:
        return section.max_steps
    return math.ceil(stream.count(section.epochs) / section.gradient_accumulation_steps)


@dataclass(frozen=True)
class PreparedBatch:
    """A batch on the model's device, its noise draws, its epoch, and the stream's state after it."""

    batch: Batch
    draws: NoiseDraws
    epoch: int
    position: dict[str, Any]


def iter_prepared(stream: Stream, objective: Objective, first: int, last: int) -> Generator[PreparedBatch]:
    """Prepared batches of a stream, one ahead of the training step.

    Their numbers in the run start at `first`. Behind `last`, where the run ends, the stream prepares none ahead.

    A thread draws the noise and starts the copy to the device. Closing the generator ends the thread, even where it
    waits for a shard that nobody writes.
    """
    return Pipeline(Stages[PreparedBatch, PreparedBatch](), depth=1).run(_prepare(stream, objective, first, last))


def _prepare(stream: Stream, objective: Objective, first: int, last: int) -> Iterator[PreparedBatch]:
    with closing(stream.forever(last - first)) as batches:
        for number in count(first):
            epoch = stream.epoch
            batch = next(batches)
            position = stream.state_dict()
            draws = objective.draw(batch, number)
            yield PreparedBatch(objective.moved(batch), draws, epoch, position)
            del batch, draws


def _speed(config: Config, transformer: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Speed:
    draws, targets = config.train.draws_per_sample, 2 if config.loss.of_pairs else 1
    return Speed.of(transformer, device, dtype, config.logging.peak_tflops, not config.model.lora, draws, targets)


def _objective(
    config: Config,
    pretrained: PretrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    loss_fn: LossFunction | None,
    *,
    together: bool,
) -> Objective:
    return Objective(
        config.loss,
        config.data.caption_dropout_rate,
        config.train.seed,
        load_shift(pretrained),
        device,
        dtype,
        config.data.control_dropout_rate,
        patch=pretrained.family.patch,
        draws_per_sample=config.train.draws_per_sample,
        loss_fn=loss_fn,
        together=together,
    )


def require_one_draw(family: Family, draws_per_sample: int) -> None:
    """Raise ConfigError when a sample is to be drawn several times, and its text and controls see the target."""
    if draws_per_sample > 1 and not family.interleaved:
        raise ConfigError(
            "this model has no prefix that several draws could share",
            where="train.draws_per_sample",
            expected=f"1 for {family.title}: its text and controls depend on the noise",
            found=draws_per_sample,
            hint="data.batch_size or train.gradient_accumulation_steps give a step more draws",
        )


def require_pairs(config: Config, stream: Stream) -> None:
    """Raise ConfigError when preferences are to be learnt, and a sample that is not excluded has no rejected target.

    Of a stream that grows, those that are there by now: a batch of others is refused when it comes.
    """
    samples = stream.samples
    if not config.loss.of_pairs:
        return
    lacking = [position for position in np.flatnonzero(~samples.paired).tolist() if not stream.is_excluded(position)]
    if lacking:
        rows = ", ".join(str(samples.columns.rows[position]) for position in lacking[:ROWS_TOLD])
        more = " …" * (len(lacking) > ROWS_TOLD)
        remedy = "exclude them with qie-stats" if samples.paired.any() else "encode pairs with qie-precompute"
        raise ConfigError(
            "samples have no rejected target, and loss.kind: flow_dpo learns from pairs alone",
            where="loss.kind",
            expected="a rejected target for each row: x_rejected.png, or data.columns.rejected",
            found=f"{len(lacking):,} of {len(samples.columns):,} samples have none: of rows {rows}{more}",
            hint=f"{remedy}, or train with loss.kind: mse",
        )


def require_preserved(config: Config, stream: Stream) -> None:
    """Raise ConfigError when sources are to be preserved of which the stream knows nothing."""
    if config.data.preserved and not stream.preserved:
        raise ConfigError(
            "the stream preserves no source, and the configuration does",
            where="data.source",
            expected="a stream with preserved={…}, the names of these sources",
            hint="qie.open_training_stream makes it from the configuration",
        )


def require_null_prompts(stream: Stream, caption_dropout_rate: float) -> None:
    """Raise ConfigError when captions are to be dropped, and a sample has no null prompt to take their place."""
    if caption_dropout_rate and not stream.samples.columns.null_prompts:
        raise ConfigError(
            "the samples have no null prompt, which replaces dropped captions",
            where="data.caption_dropout_rate",
            expected="0 for shards that were imported without null prompts",
            found=caption_dropout_rate,
            hint="--set data.caption_dropout_rate=0, or encode the rows with qie-precompute",
        )

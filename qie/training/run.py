"""A run's state, and what can be done with it: a step, a validation, a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import save_file

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import QieError
from qie.pretrained import PretrainedModel
from qie.training.checkpoint import STATE_FILE, checkpoints, explained_damage, publish_checkpoint, remove_old
from qie.training.feed import Prepared, batches_of, iter_prepared, planned_steps, require_null_prompts
from qie.training.model.load import load_shift
from qie.training.model.sharding import require_finite, whole
from qie.training.model.trainable import TrainableModel
from qie.training.objective import Objective, derive_seed
from qie.training.optimizer import check_optimizer, make_optimizer, make_schedule, named_state
from qie.training.resuming import OPTIMIZER_FILE, Saved, identity, require_same, require_steps
from qie.training.telling.card import RunReport, read_run, write_card, write_run
from qie.training.telling.metrics import Speed, StepMetrics, by_level, peak_memory_bytes
from qie.training.validation import Validation, validate

Predictor = Callable[[QwenImageTransformer2DModel], Sequence[Image.Image]]
"""Paints the images of validation.samples with the model as it is."""


class Run:
    """Model, optimizer, schedule, batches, and the number of steps done.

    Args:
        config: every section but data and cache, which made the stream.
        pretrained: the base model.
        stream: this process's batches.
        accelerator: device, precision and processes.
        start: a checkpoint folder to go on from.

    Attributes:
        step, steps: optimizer steps done, and planned.
        taken: batches trained on; noise is a function of their number.
        position: of the stream behind them; the stream itself is ahead of it.

    Raises:
        QieError: `start` is damaged, or of another run.
    """

    def __init__(
        self, config: Config, pretrained: PretrainedModel, stream: Stream, accelerator: Accelerator, start: Path | None
    ) -> None:
        self.config, self.pretrained, self.stream, self.accelerator = config, pretrained, stream, accelerator
        self.step, self._nonfinite = 0, 0
        self.taken = 0
        self._batches = None if config.train.epochs is None else batches_of(stream, config.train.epochs)
        self.steps = planned_steps(config.train, self._batches)
        check_optimizer(config.optimizer, config.lr_scheduler, accelerator.device, self.steps)
        require_null_prompts(stream, config.data.caption_dropout_rate)
        main = accelerator.is_main_process
        state = Saved.read(start, hashes=main) if start else None
        if start and state:
            require_steps(state, self.steps, start)
        self._identity = identity(config, pretrained) if main else {}
        if start and state and main:
            require_same(state, self._identity, start)
        self._unproved = start
        dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
        self.trainable = TrainableModel(pretrained, config, dtype, accelerator.device, weights=start)
        self.optimizer = make_optimizer(config.optimizer, list(self.trainable.parameters.values()))
        self.schedule = make_schedule(config.lr_scheduler, self.optimizer, self.steps)
        self._stepper = self.trainable.prepare(accelerator, self.optimizer)
        self.objective = Objective(
            config.loss,
            config.data.caption_dropout_rate,
            config.train.seed,
            load_shift(pretrained),
            accelerator.device,
            dtype,
            config.data.control_dropout_rate,
        )
        if start and state:
            self._restore(start, state)
        self.position = stream.state_dict()
        self._speed = Speed.of(
            self.trainable.transformer.config,
            accelerator.device,
            dtype,
            config.logging.peak_tflops,
            not config.model.lora,
        )
        self.feed = iter_prepared(stream, self.objective, self.taken)

    def take_step(self) -> StepMetrics:
        """One optimizer step over `gradient_accumulation_steps` batches, or what is left of the last epoch.

        Raises:
            QieError: neither its loss nor those of `max_nonfinite_steps` - 1 steps before it are finite.
        """
        section, started = self.config.train, time.perf_counter()
        # What else draws numbers, such as LoRA dropout, draws the same ones in this step of any run.
        torch.manual_seed(derive_seed(section.seed, self.step, "dropout", self.accelerator.process_index))
        count = section.gradient_accumulation_steps
        count = count if self._batches is None else min(count, self._batches - self.taken)
        waited, flops = 0.0, 0.0
        rows: list[torch.Tensor] = []
        keys: list[str] = []
        for part in range(count):
            waiting = time.perf_counter()
            prepared = next(self.feed)
            waited += time.perf_counter() - waiting
            with nullcontext() if part == count - 1 else self.accelerator.no_sync(self.trainable.model):
                rows.append(self._backward(prepared, count))
            keys.extend(prepared.batch.keys)
            flops += self._speed.flops(prepared.batch)
        self.position, self.taken = prepared.position, self.taken + count
        limit = math.inf if section.max_grad_norm is None else section.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(list(self.trainable.parameters.values()), limit)
        grad_norm = float(whole(norm)) if isinstance(norm, torch.Tensor) else float(norm)
        losses, sigmas, weights = self.accelerator.gather(torch.cat(rows)).cpu().unbind(1)
        lr = float(self.schedule.get_last_lr()[0])
        self._update(finite=math.isfinite(grad_norm) and bool(torch.isfinite(losses).all()))
        if self._nonfinite >= section.max_nonfinite_steps:
            raise self._not_finite(keys, rows)
        took = time.perf_counter() - started
        samples = int((weights > 0).sum())  # what only fills a batch up is none
        return StepMetrics(
            step=self.step,
            epoch=prepared.epoch,
            loss=float((losses * weights).mean()),
            loss_by_level=by_level(sigmas[weights > 0], losses[weights > 0]),
            grad_norm=grad_norm,
            lr=lr,
            samples=samples,
            samples_per_s=samples / took,
            step_time_s=took,
            data_wait_s=waited,
            peak_memory_bytes=peak_memory_bytes(self.accelerator.device),
            mfu=self._speed.mfu(flops, took),
        )

    def _backward(self, prepared: Prepared, count: int) -> torch.Tensor:
        """Gradients of one of `count` batches; gives loss, noise level and weight of each sample, [B, 3]."""
        batch = prepared.batch
        found = self.objective.losses(self.trainable.model, batch, prepared.draws)
        self.accelerator.backward((found.loss * batch.weight).mean() / count)
        return torch.stack([found.loss.detach(), found.sigmas.to(found.loss.device), batch.weight], 1)

    def _update(self, *, finite: bool) -> None:
        """Step the optimizer; when the gradients are of no use, only count."""
        # What no look at a restored state tells, its first use does.
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
        bad = gather_object([key[:12] for key, good in zip(keys, finite, strict=True) if not good])
        return QieError(
            f"the loss is not finite in {self._nonfinite} steps in a row"
            if self._nonfinite > 1
            else "the loss is not finite",
            where=f"step {self.step}, samples {', '.join(bad) or 'none alone: the gradient'}",
            hint="no weight was changed: look at the samples, go on with --resume latest and leave such steps out with "
            "train.max_nonfinite_steps, or start anew with a lower optimizer.init_args.lr",
        )

    def validate(self) -> Validation | None:
        """The loss on the rows kept out; None when there are none."""
        with self.trainable.evaluating() as model:
            return validate(self.objective, model, self.stream, self.accelerator)

    def paint(self, painter: Predictor) -> Sequence[Image.Image]:
        """The sample images, in the main process. Where the model is spread over processes, all of them take part."""
        main = self.accelerator.is_main_process
        if not main and not self.trainable.sharded:
            return []
        with self.trainable.evaluating() as model:
            images = painter(model)
        return images if main else []

    def save(self, report: Callable[[], RunReport]) -> Path:
        """Write a checkpoint with its model card, and run.json. Every process takes part; the main one writes."""
        output_dir = Path(self.config.train.output_dir)
        main = self.accelerator.is_main_process
        tensors, numbers = named_state(self.optimizer, self.trainable.parameters, wanted=main)
        weights = self.trainable.tensors(wanted=main)
        require_finite(tensors)
        if not main:
            return output_dir

        told = report()

        def write(folder: Path) -> dict[str, Any]:
            self.trainable.save(folder, weights)
            save_file(tensors, folder / OPTIMIZER_FILE)
            write_card(folder, told)
            return {
                "step": self.step,
                "batches": self.taken,
                "nonfinite": self._nonfinite,
                "stream": self.position,
                "optimizer": numbers,
                "schedule": self.schedule.state_dict(),
                "run": self._identity,
            }

        saved = publish_checkpoint(output_dir, self.step, write)
        write_run(output_dir, replace(told, checkpoints=self._kept(output_dir)))
        return saved

    def tidy(self, report: Callable[[], RunReport]) -> None:
        """Do what `save` does behind a checkpoint, where a run was killed behind its last one. Else nothing changes."""
        output_dir = Path(self.config.train.output_dir)
        if not self.accelerator.is_main_process or not checkpoints(output_dir):
            return
        kept = self._kept(output_dir)
        with suppress(QieError):
            told = read_run(output_dir)
            if told.finished and (told.steps, told.checkpoints) == (self.step, kept):
                return
        write_run(output_dir, replace(report(), checkpoints=kept))

    def _kept(self, output_dir: Path) -> tuple[str, ...]:
        """The names of the checkpoints that stay; the others are removed."""
        remove_old(output_dir, self.step, self.config.train.keep_last, self.config.train.keep_every)
        return tuple(folder.name for folder in checkpoints(output_dir))

    def finish(self) -> None:
        """Leave the process group, all together: one that leaves while the main process still saves can hang.

        So can one that leaves with its DDP wrapper alive: Python then frees the wrapper's reference to the group last,
        and holds its lock while it waits for a thread of gloo that waits for the lock.
        """
        self.accelerator.wait_for_everyone()
        self.trainable.release()
        self.accelerator.free_memory()
        self.accelerator.end_training()

    def _restore(self, start: Path, state: Saved) -> None:
        self.trainable.load(start)
        state.restore(start, self.optimizer, self.trainable.parameters, self.schedule)
        with explained_damage(start, STATE_FILE):
            self.stream.load_state_dict(state.stream)
            if type(self.stream) is Stream and self.stream.position >= len(self.stream):
                raise ValueError("stream.position is behind the end of its epoch")
        self.step, self.taken, self._nonfinite = state.step, state.batches, state.nonfinite

"""The loop: steps, validations and checkpoints until the last step, or until someone asks it to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import QieError, UsageError
from qie.pretrained import Checkpoint
from qie.training.checkpoint import Progress, find_checkpoint, load_checkpoint, save_checkpoint
from qie.training.metrics import MetricsFile, StepMetrics
from qie.training.model import add_lora, load_shift, load_transformer
from qie.training.objective import derive_seed
from qie.training.optimizer import make_optimizer
from qie.training.step import Objective
from qie.training.stopping import stop_requested


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last step, its last checkpoint, and whether it was asked to stop before max_steps."""

    step: int
    checkpoint: Path
    interrupted: bool


def train(
    config: Config,
    checkpoint: Checkpoint,
    stream: Stream,
    accelerator: Accelerator,
    *,
    resume: str | None = None,
    on_step: Callable[[StepMetrics], object] = lambda metrics: None,
    on_validation: Callable[[int, float], object] = lambda step, loss: None,
) -> Outcome:
    """Train an adapter until `train.max_steps`. SIGINT and SIGTERM end the run after the current step, saved.

    Args:
        config: every section but data and cache, which made the stream.
        checkpoint: the base model.
        stream: this process's batches.
        accelerator: device, precision and process group.
        resume: a checkpoint folder, or "latest"; the run goes on as if it had never stopped.
        on_step, on_validation: called in the main process.

    Raises:
        UsageError: the output folder holds another run, or there is nothing to resume from.
        QieError: the loss is not finite; names the samples of the batch.
    """
    output_dir = Path(config.train.output_dir)
    start = find_checkpoint(resume, output_dir) if resume else None
    if start is None:
        _require_unused(output_dir)
    run = _Run(config, checkpoint, stream, accelerator)
    if start:
        run.restore(start)

    def validate() -> None:
        if (loss := run.validation_loss()) is not None:
            log.write({"step": run.step, "validation_loss": loss})
            accelerator.log({"validation_loss": loss}, step=run.step)
            on_validation(run.step, loss)

    with (
        MetricsFile(run.output_dir, run.step, accelerator.is_main_process) as log,
        stop_requested(accelerator) as stopping,
    ):
        if run.step == 0:
            validate()
        saved, stop = start or output_dir, False
        while run.step < config.train.max_steps and not stop:
            metrics = run.take_step()
            log.write(asdict(metrics))
            accelerator.log({"loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": metrics.lr}, step=run.step)
            if accelerator.is_main_process:
                on_step(metrics)
            stop = stopping()
            last = stop or run.step == config.train.max_steps
            if last or run.step % config.validation.every == 0:
                validate()
            if last or run.step % config.train.checkpoint_every == 0:
                saved = run.save()
    run.finish()
    return Outcome(run.step, saved, interrupted=run.step < config.train.max_steps)


class _Run:
    """A run's state: model, optimizer, schedule, stream, and the number of steps done."""

    def __init__(self, config: Config, checkpoint: Checkpoint, stream: Stream, accelerator: Accelerator) -> None:
        section = config.train
        self.config, self.stream, self.accelerator = config, stream, accelerator
        self.output_dir = Path(section.output_dir)
        self.step = 0
        dtype = torch.bfloat16 if section.mixed_precision == "bf16" else torch.float32
        self.transformer = load_transformer(checkpoint, dtype)
        if config.model.lora:
            add_lora(self.transformer, config.model.lora, section.seed)
        if section.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.trainable = [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(config.optimizer, self.trainable)
        self.schedule = get_scheduler(
            config.lr_scheduler.scheduler_type,
            self.optimizer,
            num_warmup_steps=config.lr_scheduler.warmup_steps,
            num_training_steps=section.max_steps,
        )
        self.model, self.prepared = accelerator.prepare(self.transformer, self.optimizer)
        self.model.train()
        self.objective = Objective(
            config.loss,
            config.data.caption_dropout_rate,
            section.seed,
            load_shift(checkpoint),
            accelerator.device,
            dtype,
        )
        self.batches = stream.forever()
        if config.logging.report_to:
            accelerator.init_trackers("qie")

    def take_step(self) -> StepMetrics:
        """One optimizer step over `gradient_accumulation_steps` batches."""
        section, started = self.config.train, time.perf_counter()
        # What else draws numbers, such as LoRA dropout, draws the same ones in this step of any run.
        torch.manual_seed(derive_seed(section.seed, self.step, "dropout"))
        epoch, waited, losses, samples = self.stream.epoch, 0.0, [], 0
        for part in range(section.gradient_accumulation_steps):
            waiting = time.perf_counter()
            batch = next(self.batches)
            waited += time.perf_counter() - waiting
            last_part = part == section.gradient_accumulation_steps - 1
            with nullcontext() if last_part else self.accelerator.no_sync(self.model):
                loss = self.objective.loss(self.model, batch, self.step * section.gradient_accumulation_steps + part)
                _require_finite(loss, self.step, batch.keys)
                self.accelerator.backward(loss / section.gradient_accumulation_steps)
            losses.append(loss.detach())
            samples += len(batch)
        grad_norm = self.accelerator.clip_grad_norm_(self.trainable, section.max_grad_norm)
        self.prepared.step()
        self.prepared.zero_grad()
        lr = self.schedule.get_last_lr()[0]
        self.schedule.step()
        self.step += 1
        mean = float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))
        took = time.perf_counter() - started
        return StepMetrics(self.step, epoch, mean, float(grad_norm), lr, took, waited, samples)

    def validation_loss(self) -> float | None:
        """The loss on the rows kept out; None when there are none, or in other processes than the main one."""
        planned = self.stream.validation_batches()
        if not planned or not self.accelerator.is_main_process:
            return None
        batches = (self.stream.load(batch) for batch in planned)
        return self.objective.validation_loss(self.transformer, batches, len(planned))

    def save(self) -> Path:
        """Write a checkpoint; the main process does."""
        progress = Progress(self.step, self.stream.state_dict())
        if not self.accelerator.is_main_process:
            return self.output_dir
        return save_checkpoint(self.output_dir, progress, self.transformer, self.optimizer, self.schedule)

    def finish(self) -> None:
        """Leave the process group, all together: one that leaves while the main process still saves can hang.

        So can one that leaves with its DDP wrapper alive: Python then frees the wrapper's reference to the group last,
        and holds its lock while it waits for a thread of gloo that waits for the lock.
        """
        self.accelerator.wait_for_everyone()
        del self.model, self.prepared
        self.accelerator.free_memory()
        self.accelerator.end_training()

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        progress = load_checkpoint(folder, self.transformer, self.optimizer, self.schedule)
        self.stream.load_state_dict(progress.stream)
        self.step = progress.step


def _require_unused(output_dir: Path) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError("train.output_dir is no folder", where=output_dir)
    if any(output_dir.glob("checkpoint-*")):
        raise UsageError(
            "the output folder holds a run already",
            where=output_dir,
            hint="go on with --resume latest, or give the new run its own train.output_dir",
        )


def _require_finite(loss: torch.Tensor, step: int, keys: tuple[str, ...]) -> None:
    if not bool(torch.isfinite(loss)):
        raise QieError(
            "the loss is not finite",
            where=f"step {step}, samples {', '.join(key[:12] for key in keys)}",
            found=loss.item(),
            hint="lower optimizer.init_args.lr, or go on from the last checkpoint",
        )

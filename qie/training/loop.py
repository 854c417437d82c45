"""The loop: steps, validations and checkpoints until the last step, or until someone asks it to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import UsageError
from qie.pretrained import PretrainedModel
from qie.training.checkpoint import checkpoints, find_checkpoint, remove_leftovers
from qie.training.lock import locked, require_folder
from qie.training.memory import explained_memory, plan_memory, tell_memory
from qie.training.run import Predictor, Run
from qie.training.stopping import stop_requested
from qie.training.telling.journal import Journal, Listener
from qie.training.telling.reporting import Reporter


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last step, its last checkpoint, and whether it was asked to stop before its end."""

    step: int
    checkpoint: Path
    interrupted: bool


def train(
    config: Config,
    pretrained: PretrainedModel,
    stream: Stream,
    accelerator: Accelerator,
    *,
    resume: str | None = None,
    paint: Predictor | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Train until `train.max_steps` or `train.epochs`. SIGINT and SIGTERM end the run after the current step, saved.

    Args:
        config: every section but data and cache, which made the stream.
        pretrained: the base model.
        stream: this process's batches.
        accelerator: device, precision and process group.
        resume: a checkpoint folder, or "latest"; the run goes on as if it had never stopped.
        paint: what paints the sample images at each validation.
        listener: is told how it goes.

    Raises:
        UsageError: the output folder holds another run, or one is using it; or there is nothing to resume from.
        QieError: the loss is not finite; names the samples of the batch. Or a checkpoint is damaged, or of another run;
            or memory is out, with what to change.
    """
    output_dir, main = Path(config.train.output_dir), accelerator.is_main_process
    listener = listener if listener and main else Listener()
    with locked(output_dir) if main else nullcontext():
        # The main process holds the lock: where it starts, the others do.
        start = broadcast_object_list([find_start(resume, output_dir) if main else None])[0]
        if main:
            remove_leftovers(output_dir)
        setup = plan_memory(config, pretrained, stream, accelerator)
        tell_memory(setup, accelerator.device, listener.say)
        with explained_memory(setup):
            run = Run(config, pretrained, stream, accelerator, start)
            for line in unheeded(config, run.steps, masked=stream.samples.masked):
                listener.say(line)
            listener.start(run.step, run.steps)
            saved = _taken(run, start or output_dir, paint, listener)
            run.finish()
    return Outcome(run.step, saved, interrupted=run.step < run.steps)


def unheeded(config: Config, steps: int, *, masked: bool) -> Iterator[str]:
    """What the user may have meant and will not get in a run of so many steps, a line each.

    Args:
        masked: whether a sample has a loss mask.
    """
    schedule, loss = config.lr_scheduler, config.loss
    warms_up = schedule.class_path is None and schedule.scheduler_type != "constant"
    if warms_up and schedule.warmup_steps >= steps:
        yield (
            "warning: the learning rate never reaches its value: lr_scheduler.warmup_steps is "
            f"{schedule.warmup_steps}, and the run has {steps} steps; set it to a tenth of them, or to 0"
        )
    if masked and loss.mask_foreground_weight == loss.mask_background_weight:
        yield (
            "warning: rows have masks, which change nothing while loss.mask_foreground_weight and "
            "loss.mask_background_weight are equal"
        )


def _taken(run: Run, saved: Path, paint: Predictor | None, listener: Listener) -> Path:
    """All steps of a run that are left; gives its last checkpoint, which is `saved` if there is none left."""
    train, every = run.config.train, run.config.validation.every
    reporter = Reporter(run.config, run.pretrained, run.stream, run.accelerator, resumed=run.step > 0)
    with (
        Journal(run.config, run.accelerator, listener, run.step) as journal,
        stop_requested(run.accelerator) as stopping,
        closing(run.feed),
    ):

        def look() -> None:
            if validation := run.validate():
                journal.validation(run.step, validation)
            if paint and (images := run.paint(paint)):
                journal.images(run.step, images)

        if run.step == 0:
            look()
        last = run.step == run.steps
        if last:
            run.tidy(lambda: reporter.report(run.step, ended=True))
        while not last:
            journal.step(run.take_step())
            last = stopping() or run.step == run.steps
            # Not where it was asked to stop: a run that goes on from there is to be the run that was never stopped.
            if run.step == run.steps or run.step % every == 0:
                look()
            if last or run.step % train.checkpoint_every == 0:
                saved = run.save(lambda: reporter.report(run.step, ended=run.step == run.steps))
    return saved


def find_start(resume: str | None, output_dir: Path) -> Path | None:
    """The checkpoint that a run resumes from; None for a new run. Asked before the work, and under the lock.

    Raises:
        UsageError: there is no such checkpoint; or the output folder holds another run, or is no folder.
    """
    require_folder(output_dir)
    start = find_checkpoint(resume, output_dir) if resume else None
    if checkpoints(output_dir) and (start is None or start.parent.resolve() != output_dir.resolve()):
        raise UsageError(
            "the output folder holds a run already",
            where=output_dir,
            hint="go on with --resume latest, or give the new run its own train.output_dir",
        )
    return start

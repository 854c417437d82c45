"""The loop: steps, validations and checkpoints until the last step, or until someone asks the run to stop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from PIL import Image

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import QieError
from qie.pretrained import PretrainedModel
from qie.training import checkpoint
from qie.training.checkpoint_folders import checkpoints, find_resume, remove_leftovers, remove_old
from qie.training.memory import explained_memory, fill_memory, memory_to_fill, plan_memory, tell_memory
from qie.training.objective import LossFunction
from qie.training.processes import deterministic, stop_requested
from qie.training.reporting.card import Reporter, read_run, write_run
from qie.training.reporting.metrics import MetricsFile, StepMetrics, Validation
from qie.training.reporting.trackers import Trackers
from qie.training.run import Run, SampleGenerator
from qie.training.run_lock import locked


def _nothing(*_: object) -> None:
    """For a caller who does not listen."""


@dataclass(frozen=True)
class Listener:
    """Functions of the caller that a run calls in the main process. MetricsFile and Trackers get the same calls.

    A run waits for each; what one raises ends it.

    Attributes:
        start: with the steps done before, and the steps altogether.
        step: with the numbers of a step.
        validation, images: with the step, and the validation loss or the sample images.
        say: with a line for a person.
    """

    start: Callable[[int, int], object] = _nothing
    step: Callable[[StepMetrics], object] = _nothing
    validation: Callable[[int, Validation], object] = _nothing
    images: Callable[[int, Sequence[Image.Image]], object] = _nothing
    say: Callable[[str], object] = _nothing


Hooks = Sequence[MetricsFile | Trackers | Listener]


def together(listeners: Sequence[Listener]) -> Listener:
    """A listener that calls each of some, in their order."""

    def each(name: str) -> Callable[..., None]:
        def call(*values: object) -> None:
            for listener in listeners:
                getattr(listener, name)(*values)

        return call

    return Listener(**{field.name: each(field.name) for field in fields(Listener)})


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its last step, its last checkpoint, and whether it was asked to stop before its end."""

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
    generate_samples: SampleGenerator | None = None,
    callbacks: Sequence[Listener] = (),
    loss_fn: LossFunction | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Train until `train.max_steps` or `train.epochs`. SIGINT and SIGTERM end the run after the current step, saved.

    Args:
        config: every section but data and cache, which made the stream.
        pretrained: the base model.
        stream: this process's batches.
        accelerator: device, precision and process group.
        resume: a checkpoint folder, or "latest"; the run continues as if it had never stopped.
        generate_samples: generates the sample images at each validation.
        callbacks: hear how the run goes, one after the other.
        loss_fn: the loss instead of the configuration's, in training and validation; see `LossFunction`. Noise levels,
            shift and dropout stay the configuration's; `loss.weighting`, `loss.kind` and weights of masks are refused
            beside it. A resumed run needs a function of the same name; that it computes the same is the caller's part,
            and so is the memory that it takes.
        listener: the name of a single callback in version 0.1.

    Raises:
        ConfigError: a setting cannot be combined with `loss_fn`.
        UsageError: the output folder holds another run, or one is using it; or there is nothing to resume from; or
            `loss_fn` does not give one loss for each draw.
        QieError: the loss is not finite; names the samples of the batch. Or a checkpoint is damaged, or of another run;
            or memory is out, with what to change.
    """
    output_dir, main = Path(config.train.output_dir), accelerator.is_main_process
    if listener is not None:
        warnings.warn("qie.train(listener=…) is now qie.train(callbacks=[…])", DeprecationWarning, stacklevel=2)
        callbacks = [*callbacks, listener]
    listeners = together(callbacks if main else ())
    with locked(output_dir) if main else nullcontext():
        # The main process holds the lock: the others resume from the checkpoint that it finds.
        resume_from = broadcast_object_list([find_resume(resume, output_dir) if main else None])[0]
        if main:
            remove_leftovers(output_dir)
        setup = plan_memory(config, pretrained, stream, accelerator)
        if config.train.gradient_checkpointing == "auto":
            setup = fill_memory(setup, memory_to_fill(config, stream, accelerator.device))
        tell_memory(setup, accelerator.device, listeners.say)
        with explained_memory(setup), deterministic() if config.train.deterministic else nullcontext():
            run = Run(config, pretrained, stream, accelerator, resume_from, kept=setup.kept, loss_fn=loss_fn)
            for line in unheeded(config, run.steps, masked=stream.samples.masked and loss_fn is None):
                listeners.say(line)
            listeners.start(run.step, run.steps)
            saved = _train(run, resume_from or output_dir, generate_samples, listeners)
            run.finish()
    return Outcome(run.step, saved, interrupted=run.step < run.steps)


def unheeded(config: Config, steps: int, *, masked: bool) -> Iterator[str]:
    """Settings that have no effect in a run of so many steps, a warning each.

    Args:
        masked: whether a sample has a loss mask, and the configuration's loss is used.
    """
    schedule, loss = config.lr_scheduler, config.loss
    warms_up = schedule.class_path is None and schedule.scheduler_type != "constant"
    if warms_up and schedule.warmup_steps >= steps:
        yield (
            "warning: the learning rate never reaches its value: lr_scheduler.warmup_steps is "
            f"{schedule.warmup_steps}, and the run has {steps} steps; set it to a tenth of them, or to 0"
        )
    if loss.stratified_sigmas and config.train.draws_per_sample == 1:
        yield "warning: loss.stratified_sigmas changes nothing while train.draws_per_sample is 1"
    if masked and loss.mask_foreground_weight == loss.mask_background_weight:
        yield (
            "warning: rows have masks, which change nothing while loss.mask_foreground_weight and "
            "loss.mask_background_weight are equal"
        )


def _train(run: Run, saved: Path, generate_samples: SampleGenerator | None, listener: Listener) -> Path:
    """Take the steps that are left; returns the last checkpoint, which is `saved` when no step is left."""
    config, accelerator = run.config, run.accelerator
    reporter = Reporter(config, run.pretrained, run.stream, accelerator, resumed=run.step > 0)
    with (
        MetricsFile(Path(config.train.output_dir), run.step, enabled=accelerator.is_main_process) as metrics_file,
        Trackers(config, accelerator) as trackers,
        stop_requested(accelerator) as stop,
        closing(run.batches),
    ):
        hooks = (metrics_file, trackers, listener)
        if run.step == 0:
            _validate(run, generate_samples, hooks)
        if run.step == run.steps:
            _complete(run, reporter)
        stopped = False
        while run.step < run.steps and not stopped:
            metrics = run.training_step()
            for hook in hooks:
                hook.step(metrics)
            stopped, ended = stop(), run.step == run.steps
            # Not where the run stops: one that goes on from there is to be the run that was never stopped.
            if ended or run.step % config.validation.every == 0:
                _validate(run, generate_samples, hooks)
            if stopped or ended or run.step % config.train.checkpoint_every == 0:
                saved = save_checkpoint(run, reporter)
    return saved


def _validate(run: Run, generate_samples: SampleGenerator | None, hooks: Hooks) -> None:
    if validation := run.validate():
        for hook in hooks:
            hook.validation(run.step, validation)
    if generate_samples and (images := run.sample_images(generate_samples)):
        for hook in hooks:
            hook.images(run.step, images)


def save_checkpoint(run: Run, reporter: Reporter) -> Path:
    """Write a checkpoint with its model card, and run.json. Every process takes part; the main one writes."""
    output_dir = Path(run.config.train.output_dir)
    state, tensors = run.state_dict()
    if not run.accelerator.is_main_process:
        return output_dir
    report = reporter.report(run.step, ended=run.step == run.steps)
    folder = checkpoint.save(output_dir, state, tensors, run.trainable, report)
    write_run(output_dir, replace(report, checkpoints=_kept(run, output_dir)))
    return folder


def _complete(run: Run, reporter: Reporter) -> None:
    """Do what `save_checkpoint` does after the checkpoint, if a kill prevented that. Else change nothing."""
    output_dir = Path(run.config.train.output_dir)
    if not run.accelerator.is_main_process or not checkpoints(output_dir):
        return
    kept = _kept(run, output_dir)
    with suppress(QieError):
        report = read_run(output_dir)
        if report.finished and (report.steps, report.checkpoints) == (run.step, kept):
            return
    write_run(output_dir, replace(reporter.report(run.step, ended=True), checkpoints=kept))


def _kept(run: Run, output_dir: Path) -> tuple[str, ...]:
    """The names of the checkpoints that stay; the others are removed."""
    remove_old(output_dir, run.step, run.config.train.keep_last, run.config.train.keep_every)
    return tuple(folder.name for folder in checkpoints(output_dir))

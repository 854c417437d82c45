"""The loop: steps, validations and checkpoints until the last step, or until someone asks the run to stop.

Between two steps it obeys what it is asked: `qie.training.control`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from PIL import Image

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import QieError, UsageError, one_line
from qie.pretrained import PretrainedModel
from qie.training import checkpoint
from qie.training.checkpoint_folders import checkpoints, find_resume, remove_leftovers, remove_old
from qie.training.control import PROMPTS_FILE, Control
from qie.training.memory import Setup, explained_memory, fill_memory, lacking_memory, memory_to_fill, plan_memory
from qie.training.objective import LossFunction
from qie.training.opening_summary import opening_lines
from qie.training.processes import Agreement, agreement, deterministic
from qie.training.reporting.card import Reporter, read_run, write_run
from qie.training.reporting.metrics import MetricsFile, StepMetrics, Validation
from qie.training.reporting.state_file import StateFile
from qie.training.reporting.trackers import Trackers
from qie.training.run import OtherSamples, Run, SampleGenerator, planned_steps
from qie.training.run_lock import locked


def _nothing(*_: object) -> None:
    """For a caller who does not listen."""


@dataclass(frozen=True)
class Listener:
    """Functions of the caller that a run calls in the main process. MetricsFile, StateFile and Trackers get the same
    calls.

    A run waits for each; what one raises ends it.

    Attributes:
        opening: before weights are read, with what the run will do: a word and a text for each line.
        start: with the steps done before, and the steps altogether. go_on: the same, after a pause.
        step: with the numbers of a step.
        validation, images: with the step, and the validation loss or the sample images.
        say: with a line for a person, such as a warning.
    """

    opening: Callable[[Sequence[tuple[str, str]]], object] = _nothing
    start: Callable[[int, int], object] = _nothing
    go_on: Callable[[int, int], object] = _nothing
    step: Callable[[StepMetrics], object] = _nothing
    validation: Callable[[int, Validation], object] = _nothing
    images: Callable[[int, Sequence[Image.Image]], object] = _nothing
    say: Callable[[str], object] = _nothing


Hooks = Sequence[MetricsFile | StateFile | Trackers | Listener]


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
    other_samples: OtherSamples | None = None,
    callbacks: Sequence[Listener] = (),
    loss_fn: LossFunction | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Train until `train.max_steps` or `train.epochs`. SIGINT and SIGTERM end the run after the current step, saved.

    The run also obeys files in its folder: see `qie.training.control`.

    Args:
        config: every section but data and cache, which made the stream.
        pretrained: the base model.
        stream: this process's batches.
        accelerator: device, precision and process group.
        resume: a checkpoint folder, or "latest"; the run continues as if it had never stopped.
        generate_samples: generates the sample images at each validation.
        other_samples: makes such a function for the samples of control/prompts.json; None: the run says that it cannot.
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
    control = Control(output_dir)
    with locked(output_dir) if main else nullcontext():
        # The main process holds the lock: the others resume from the checkpoint that it finds.
        resume_from = broadcast_object_list([find_resume(resume, output_dir) if main else None])[0]
        if main:
            remove_leftovers(output_dir)
            for line in control.forget_old():
                listeners.say(line)
        setup = plan_memory(config, pretrained, stream, accelerator)
        if config.train.gradient_checkpointing == "auto":
            setup = fill_memory(setup, memory_to_fill(config, stream, accelerator.device))
        said = partial(
            _open, config, pretrained, stream, accelerator, setup, resume_from, listeners, own_loss=loss_fn is not None
        )
        with explained_memory(setup), deterministic() if config.train.deterministic else nullcontext():
            run = Run(
                config, pretrained, stream, accelerator, resume_from, kept=setup.kept, loss_fn=loss_fn, accepted=said
            )
            listeners.start(run.step, run.steps)
            saved = _train(run, resume_from or output_dir, generate_samples, other_samples, control, listeners)
            run.finish()
    return Outcome(run.step, saved, interrupted=run.step < run.steps)


def _open(
    config: Config,
    pretrained: PretrainedModel,
    stream: Stream,
    accelerator: Accelerator,
    setup: Setup,
    resume_from: Path | None,
    listeners: Listener,
    *,
    own_loss: bool,
) -> None:
    """Tell what the run will do, and then each warning."""
    if not accelerator.is_main_process:
        return
    steps = planned_steps(config, stream)
    listeners.opening(list(opening_lines(config, pretrained, stream, accelerator, setup, steps, resume_from)))
    masked = stream.samples.masked and not own_loss
    unused = unheeded(config, steps, masked=masked, paired=bool(stream.samples.paired.any()) and not own_loss)
    for line in (*lacking_memory(setup, accelerator.device), *unused, *unvalidated(stream)):
        listeners.say(line)


def unvalidated(stream: Stream) -> Iterator[str]:
    """A warning if the validation loss is of no row: those that are kept out are all of preserved sources."""
    if not (stream.preserved and stream.plans.whole and len(stream.held_out)):
        return
    if stream.samples.columns.of_sources(stream.preserved, stream.held_out).all():
        yield (
            "warning: there is no validation loss: the rows that are kept out for it are all of preserved sources; "
            "raise validation.rows"
        )


_OF_ONE_VALUE = (
    ("loss", "kind", "huber", ("huber_delta",)),
    ("loss", "kind", "flow_dpo", ("beta", "supervised_weight")),
    ("loss", "timestep_sampling", "logit_normal", ("logit_mean", "logit_std")),
    ("loss", "timestep_sampling", "mode", ("mode_scale",)),
    ("lr_scheduler", "scheduler_type", "cosine_with_restarts", ("num_cycles",)),
    ("lr_scheduler", "scheduler_type", "polynomial", ("power",)),
)
"""Of a section, a field, and others that count only while that has one value."""


def unheeded(config: Config, steps: int, *, masked: bool, paired: bool = False) -> Iterator[str]:
    """Settings that have no effect in a run of so many steps, a warning each.

    Args:
        masked: whether a sample has a loss mask, and the configuration's loss is used.
        paired: whether a sample has a rejected target, and the configuration's loss is used.
    """
    for name, field, value, others in _OF_ONE_VALUE:
        section = getattr(config, name)
        for other in others:
            if getattr(section, field) != value and getattr(section, other) != getattr(type(section)(), other):
                yield f"warning: {name}.{other} changes nothing while {name}.{field} is {getattr(section, field)}"
    if paired and not config.loss.of_pairs:
        yield "warning: rows have rejected targets, which change nothing unless loss.kind is flow_dpo"
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


def _train(
    run: Run,
    saved: Path,
    generate_samples: SampleGenerator | None,
    other_samples: OtherSamples | None,
    control: Control,
    listener: Listener,
) -> Path:
    """Take the steps that are left; returns the last checkpoint, which is `saved` when no step is left."""
    config, accelerator = run.config, run.accelerator
    output_dir, main = Path(config.train.output_dir), accelerator.is_main_process
    reporter = Reporter(config, run.pretrained, run.stream, accelerator, resumed=run.step > 0)
    with (
        StateFile(output_dir, run.steps, enabled=main) as state_file,
        MetricsFile(output_dir, run.step, enabled=main) as metrics_file,
        Trackers(config, accelerator) as trackers,
        control if main else nullcontext(),
        agreement(accelerator, control.look) as agreed,
        closing(run.batches),
    ):
        hooks = (metrics_file, trackers, state_file, listener)
        loop = _Loop(
            run, reporter, hooks, state_file, agreed, control, listener, saved, generate_samples, other_samples
        )
        if run.step == run.steps:
            _complete(run, reporter)
        else:
            loop.run_steps()
        state_file.at("finished" if run.step == run.steps else "stopped", run.step)
    return loop.saved


@dataclass
class _Loop:
    """The steps of a run, and what comes between them.

    Attributes:
        saved: the last checkpoint.
        configured_samples: generates the sample images of the configuration.
        other_samples: makes such a function for others.
        generate_samples: the function for those that were asked for last.
    """

    run: Run
    reporter: Reporter
    hooks: Hooks
    state_file: StateFile
    agreed: Agreement
    control: Control
    listener: Listener
    saved: Path
    configured_samples: SampleGenerator | None
    other_samples: OtherSamples | None

    def __post_init__(self) -> None:
        self.generate_samples = self.configured_samples

    def run_steps(self) -> None:
        """Until the last step, or until one is asked to be the last."""
        run, config = self.run, self.run.config
        self._write_beginning()
        stopped = self._between_steps(validate=run.step == 0, save=False)
        while run.step < run.steps and not stopped:
            metrics = run.training_step()
            for hook in self.hooks:
                hook.step(metrics)
            ended = run.step == run.steps
            stopped = self._between_steps(
                validate=ended or run.step % config.validation.every == 0,
                save=ended or run.step % config.train.checkpoint_every == 0,
            )

    def _write_beginning(self) -> None:
        """state.json and run.json, which who watches reads from the first step on."""
        output_dir = Path(self.run.config.train.output_dir)
        if self.run.accelerator.is_main_process:
            self.state_file.at("training", self.run.step)
            kept = tuple(folder.name for folder in checkpoints(output_dir))
            write_run(output_dir, replace(self.reporter.report(self.run.step, ended=False), checkpoints=kept))

    def _between_steps(self, *, validate: bool, save: bool) -> bool:
        """Do what is due, and what is asked; returns whether to stop. Holds as long as the run is asked to pause."""
        run, last, held = self.run, self.run.step == self.run.steps, False
        while True:
            asked = self.agreed()
            if asked.prompts:
                self._change_samples()
            if asked.pause and not (asked.stop or asked.checkpoint or last):
                if not held:
                    self.listener.say(f"paused after step {run.step}: to go on, remove {self.control.pause_file}")
                held = True
                self.state_file.at("paused", run.step)
                self.agreed.wait()
                continue
            # A checkpoint comes after the validation of its step: a run that goes on from there has it behind it.
            if validate:
                self._validate()
            if save or asked.stop or asked.checkpoint:
                self.saved = save_checkpoint(run, self.reporter)
                self.control.done(asked)
            if asked.stop or last or not asked.pause:
                break
            validate = save = False
        if held and not asked.stop:
            self.listener.say("going on")
            self.listener.go_on(run.step, run.steps)
            self.state_file.at("training", run.step)
        return asked.stop

    def _validate(self) -> None:
        run = self.run
        if not len(run.stream.held_out) and not self.generate_samples:
            return
        self.state_file.at("validating", run.step)
        if validation := run.validate():
            for hook in self.hooks:
                hook.validation(run.step, validation)
        if images := self._sample_images():
            for hook in self.hooks:
                hook.images(run.step, images)
        self.state_file.at("training", run.step)

    def _sample_images(self) -> Sequence[Image.Image]:
        """In the main process. Without room for what was asked for meanwhile, the run goes on with what was planned."""
        if self.generate_samples is None:
            return []
        try:
            return self.run.sample_images(self.generate_samples)
        except torch.OutOfMemoryError:
            # Processes that share a model compute together: one that has room left would wait for the others.
            if self.generate_samples is self.configured_samples or self.run.trainable.sharded:
                raise
            self.generate_samples = self.configured_samples
            self._refuse_samples("the device lacks memory to generate them")
            return []

    def _refuse_samples(self, why: str) -> None:
        self.state_file.note(prompts=why)
        self.listener.say(f"other prompts are refused, and pictures are those of before: {why}")

    def _change_samples(self) -> None:
        """Generate what control/prompts.json asks for from the next validation on; without it, what was configured."""
        main, sharded = self.run.accelerator.is_main_process, self.run.trainable.sharded
        found = self._embedded() if main else None
        if sharded:  # they generate together, and one has embedded for all
            found = broadcast_object_list([found])[0]
        if found == "configured":
            self.generate_samples = self.configured_samples
        elif found is not None and self.other_samples:
            self.generate_samples = self.other_samples.open(found)

    def _embedded(self) -> Any:
        """The samples that are asked for, embedded; "configured" without any; None where they are refused."""
        found: Any = "configured"
        try:
            samples = self.control.prompts()
            if samples is not None:
                if self.other_samples is None:
                    raise UsageError("this program generates no other samples than its own")
                found = self.other_samples.embed(samples)
        except (QieError, OSError, RuntimeError) as error:
            # Such as lack of host memory: a run does not end for pictures.
            self._refuse_samples(one_line(error, 500))
            return None
        self.state_file.note(prompts=None)
        told = "the configuration" if samples is None else PROMPTS_FILE
        self.listener.say(f"from the next validation on, pictures are those of {told}")
        return found


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

"""qie-train: batches in, an adapter out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from qie.cli.common import FiniteRange, command, config_option, quiet_option, set_option, tell_interrupted, typed_again
from qie.cli.progress import Progress
from qie.cli.terminal import Warnings, echo, tell_next, tell_summary
from qie.quantities import human_count

GENERATES = ("model.", "data.", "cache.compute_dtype", "predict.")
"""Beginnings of the keys of a configuration that count for what a trained model generates, too."""

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator
    from PIL import Image

    from qie.config import Config
    from qie.pretrained import PretrainedModel
    from qie.stream_chooser import Telling
    from qie.training.loop import Listener, Outcome
    from qie.training.run import SampleGenerator


@command
@click.argument("shards", nargs=-1)
@config_option
@click.option("--resume", metavar="DIR|latest", help="Resume from a checkpoint as if the run had never stopped.")
@click.option("--follow", is_flag=True, help="Train on shards that qie-precompute is still writing.")
@click.option(
    "--index",
    metavar="FILE|URL",
    help="Take this compacted index at its word (qie-stats --compact): no folder is listed, no other index read.",
)
@click.option("--dry-run", is_flag=True, help="Print what a run would do, its memory and its time; read no weights.")
@click.option("--gpu", metavar="NAME", help="With --dry-run: plan for such a GPU, as GeForce RTX 4090 or H100.")
@click.option(
    "--vram", type=FiniteRange(min=0, min_open=True), metavar="GB", help="With --dry-run: plan for so much GPU memory."
)
@click.option("--accept-recipe", is_flag=True, help="Train on shards whose recipe differs from the configuration's.")
@set_option
@quiet_option
def main(
    shards: tuple[str, ...],
    config_path: str,
    index: str | None,
    accept_recipe: bool,
    overrides: tuple[str, ...],
    dry_run: bool,
    gpu: str | None,
    vram: float | None,
    **options: Any,
) -> None:
    """Train on SHARDS: folders, globs, or patterns with braces such as {a,b}/*.tar, paths or URLs.

    Without SHARDS, qie-train reads the shards in cache.cache_dir. It encodes rows of data.source live if the shards
    lack them, and encodes all rows live if cache.use_cache is false or cache_dir is not set.

    Ctrl-C finishes the current step, saves a checkpoint and exits with 0. Continue with --resume latest.
    """
    from qie.config import load_config
    from qie.errors import UsageError
    from qie.pretrained import open_pretrained
    from qie.quiet_libraries import quiet_libraries

    if not dry_run and (gpu or vram):
        raise UsageError("--gpu and --vram belong to a dry run", hint="add --dry-run; a run takes the GPU that is here")
    named = {"cache.accept_recipe": accept_recipe and "true", "cache.index": index}
    config = load_config(config_path, [*overrides, *(f"{name}={value}" for name, value in named.items() if value)])
    name, family, vae = config.model.pretrained_model_name_or_path, config.model.family, config.model.vae
    pretrained = open_pretrained(name, family, ("transformer", "scheduler"), vae=vae, weights=not dry_run)
    quiet_libraries()
    if dry_run:
        _dry_run(config, pretrained, shards, gpu, vram, follow=options["follow"], quiet=options["quiet"])
    else:
        _train(config, pretrained, shards, **options)


def _dry_run(
    config: Config,
    pretrained: PretrainedModel,
    shards: tuple[str, ...],
    gpu: str | None,
    vram: float | None,
    *,
    follow: bool,
    quiet: bool,
) -> None:
    """Print what a run would do; exit with 1 if it lacks memory."""
    from qie.stream_chooser import choose, chosen_indexes, open_training_stream
    from qie.training.dry_run import forecast
    from qie.training.processes import open_accelerator

    accelerator, choice = open_accelerator(config), choose(config, shards, follow=follow)
    # Rows without shards would be encoded live, which takes the encoders; a writer's shards are not all there yet.
    there = choice.kind == "shards" and (choice.named or chosen_indexes(choice, or_none=True))
    with _told(quiet or not accelerator.is_main_process, Warnings()) as telling:
        opening = open_training_stream(config, pretrained, accelerator, *shards, telling=telling) if there else None
        with opening or nullcontext() as stream:
            found = forecast(config, pretrained, stream, accelerator, gpu=gpu, vram_gb=vram)
    if accelerator.is_main_process:
        echo(*found.lines())
    found.require_memory()
    if accelerator.is_main_process and gpu is None and vram is None:
        tell_next(*typed_again("train", flags=["--dry-run"]), quiet=quiet)


def _train(
    config: Config,
    pretrained: PretrainedModel,
    shards: tuple[str, ...],
    *,
    resume: str | None,
    follow: bool,
    quiet: bool,
) -> None:
    from qie.from_config import LaterSamples
    from qie.paths import local_path
    from qie.stream_chooser import open_training_stream
    from qie.training.checkpoint_folders import find_resume
    from qie.training.loop import train
    from qie.training.processes import open_accelerator

    accelerator = open_accelerator(config)
    main_process = accelerator.is_main_process
    if main_process:
        find_resume(resume, local_path(config.train.output_dir))  # before rows are looked at
    warnings = Warnings()
    with (
        _interruptible(local_path(config.train.output_dir)),
        _told(quiet or not main_process, warnings) as telling,
        open_training_stream(config, pretrained, accelerator, *shards, follow=follow, telling=telling) as stream,
        Progress("training", config.train.max_steps, "steps", quiet=quiet or not main_process) as progress,
    ):
        outcome = train(
            config,
            pretrained,
            stream,
            accelerator,
            resume=resume,
            generate_samples=_generator(config, accelerator),
            other_samples=LaterSamples(config, accelerator.device),
            callbacks=[_listener(progress, local_path(config.train.output_dir), warnings, quiet)],
        )
    if main_process:
        state = "stopped" if outcome.interrupted else "done"
        echo(f"{state} after {human_count(outcome.step, 'step')}; weights and state in {outcome.checkpoint}")
        _tell_next(config, outcome, accelerator.num_processes, quiet)


def _tell_next(config: Config, outcome: Outcome, processes: int, quiet: bool) -> None:
    """To resume what was stopped, or to make a picture with what was trained."""
    if not outcome.interrupted:
        typed = click.get_current_context().params
        sets = [word for text in typed["overrides"] if text.startswith(GENERATES) for word in ("--set", text)]
        weights = "--lora" if config.model.lora else "--transformer"
        words = ["qie", "predict", "--config", typed["config_path"], *sets, weights, str(outcome.checkpoint)]
        tell_next(*words, rest='--image in.png --prompt "…" --output out.png', quiet=quiet)
    elif processes == 1:
        tell_next(*typed_again("train", options=["--resume"]), "--resume", "latest", quiet=quiet)
    else:  # the launcher's words are not known here
        tell_next(rest="the same command with --resume latest", quiet=quiet)


def _generator(config: Config, accelerator: Accelerator) -> SampleGenerator | None:
    """All processes of a sharded model compute together; else one generates, and the others need no encoder."""
    from qie.from_config import open_samples

    generates = accelerator.is_main_process or accelerator.distributed_type == "FSDP"
    return open_samples(config, accelerator.device) if generates else None


@contextmanager
def _interruptible(output_dir: Path) -> Iterator[None]:
    """Say how to go on after a second Ctrl-C, or one before the first step."""
    try:
        yield
    except KeyboardInterrupt:
        from qie.threads import leave
        from qie.training.checkpoint_folders import checkpoints

        resumed = "checkpoints stay; continue from the last one with --resume latest"
        tell_interrupted(resumed if checkpoints(output_dir) else "nothing was saved yet; run the same command again")
        leave(130)


@contextmanager
def _told(quiet: bool, warnings: Warnings) -> Iterator[Telling]:
    """Progress while rows are checked, and lines; warnings are shown with --quiet, too, and if there is no summary."""
    from qie.stream_chooser import Telling

    with ExitStack() as bars:
        looking: list[Progress] = []

        def look(done: int, total: int) -> None:
            if not looking:
                looking.append(bars.enter_context(Progress("checking", total, "rows", quiet=quiet)))
            looking[0].at(done)
            if done == total:
                bars.close()

        def say(line: str) -> None:
            echo(line, err=True)

        try:
            yield Telling(look, (lambda line: None) if quiet else say, warnings.warn)
        finally:
            warnings.show()


def _listener(progress: Progress, output_dir: Path, warnings: Warnings, quiet: bool) -> Listener:
    from qie.training.loop import Listener

    def tell_opening(lines: Sequence[tuple[str, str]]) -> None:
        progress.at(0, "loading the weights")
        tell_summary([*lines, ("to watch", shlex.join(["qie", "watch", str(output_dir)]))], quiet=quiet)
        warnings.show()

    def save_images(step: int, images: Sequence[Image.Image]) -> None:
        from qie.inference.sample_images import save_samples  # with diffusers' pipelines: only for a run with samples

        save_samples(images, output_dir, step)

    return Listener(
        opening=tell_opening,
        start=progress.begin,
        go_on=progress.begin,  # the pace is that of training
        step=lambda metrics: progress.at(metrics.step, *metrics.notes),
        validation=lambda step, found: progress.say(f"step {step}: validation loss {found.loss:.4f}"),
        images=save_images,
        say=progress.say,
    )


if __name__ == "__main__":  # accelerate launch --module qie.cli.train
    sys.exit(main())

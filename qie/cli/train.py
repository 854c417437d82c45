"""qie-train: batches in, an adapter out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from qie.cli.common import Progress, config_option, explained, quiet_libraries, quiet_option, set_option

if TYPE_CHECKING:
    pass


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shards", nargs=-1)
@config_option
@click.option("--resume", metavar="DIR|latest", help="Go on from a checkpoint as if the run had never stopped.")
@click.option("--follow", is_flag=True, help="Train on shards that qie-precompute is still writing.")
@set_option
@quiet_option
@explained
def main(
    shards: tuple[str, ...],
    config_path: str,
    resume: str | None,
    follow: bool,
    overrides: tuple[str, ...],
    quiet: bool,
) -> None:
    """Train on SHARDS: folders, globs, or patterns with {000..999} braces, paths or URLs.

    Without SHARDS those in cache.cache_dir are used; with cache.use_cache false, or without a cache_dir, the rows of
    data.source are encoded live.

    Ctrl-C finishes the current step, saves a checkpoint and exits with 0; go on with --resume latest.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from qie.cli.streams import training_stream
    from qie.config import load_config
    from qie.pretrained import open_checkpoint
    from qie.training.loop import train

    config = load_config(config_path, overrides)
    checkpoint = open_checkpoint(
        config.model.pretrained_model_name_or_path, config.model.family, components=("transformer", "scheduler")
    )
    quiet_libraries()
    accelerator = Accelerator(
        # The last block's text stream feeds nothing: adapters on it never get a gradient, for which DDP would wait.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        mixed_precision=config.train.mixed_precision,
        log_with=config.logging.report_to or None,
        project_dir=config.train.output_dir,
    )
    quiet = quiet or not accelerator.is_main_process
    with (
        training_stream(config, checkpoint.family.name, shards, accelerator, follow=follow, quiet=quiet) as stream,
        Progress("training", config.train.max_steps, "steps", quiet=quiet) as progress,
    ):
        outcome = train(
            config,
            checkpoint,
            stream,
            accelerator,
            resume=resume,
            on_step=lambda metrics: progress.at(metrics.step, f"loss {metrics.loss:.4f}"),
            on_validation=lambda step, loss: progress.say(f"step {step}: validation loss {loss:.4f}"),
        )
    if accelerator.is_main_process:
        state = "stopped" if outcome.interrupted else "done"
        click.echo(f"{state} after {outcome.step} steps; adapter and state in {outcome.checkpoint}")


if __name__ == "__main__":  # accelerate launch --module qie.cli.train
    sys.exit(main())

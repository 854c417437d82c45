"""qie: every command under one name."""

from __future__ import annotations

import difflib
import importlib

import click

from qie.cli.terminal import echo

SUBCOMMANDS = {
    "init": ("qie.cli.init", "Write a configuration that fits a model, rows and a GPU."),
    "precompute": ("qie.cli.precompute", "Encode the rows of a source once, and write them as shards."),
    "stats": ("qie.cli.stats", "Summarise and verify shards; say why a row is missing."),
    "train": ("qie.cli.train", "Train on shards, or on rows that are encoded live."),
    "predict": ("qie.cli.predict", "Edit images by instructions, or make images from text."),
    "watch": ("qie.cli.watch", "Show how runs are getting on, on a page that changes as they do."),
    "doctor": ("qie.cli.doctor", "Check devices, libraries, space, model, rows and stores; say what to mend."),
    "export": ("qie.cli.export", "Write an adapter for ComfyUI or diffusers, or merge it into its model."),
    "import": ("qie.cli.import_cache", "Turn a cache of qwen-image-finetune into shards."),
}
"""Name -> the module whose `main` it is, and a line for the list; in the order in which one uses them."""


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when the subcommand is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in SUBCOMMANDS:
            return None
        command: click.Command = importlib.import_module(SUBCOMMANDS[cmd_name][0]).main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in SUBCOMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0].removeprefix("qie-")  # `qie qie-train` is a slip of those who know the older names
        if name in SUBCOMMANDS or args[0].startswith("-"):
            return super().resolve_command(ctx, [name, *args[1:]] if name in SUBCOMMANDS else args)
        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f"Did you mean {ctx.command_path} {near[0]}?" if near else f"There are {', '.join(SUBCOMMANDS)}."
        raise click.UsageError(f"No such command: {args[0]}. {hint}", ctx)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from qie import __version__

        echo(f"qie {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def main() -> None:
    """Fine-tune Qwen-Image-Edit and Qwen-Image-2.1: encode once, train forever.

    `qie COMMAND --help` explains a command.
    """


def run_command() -> None:
    """The command in a process of its own, which does nothing else afterwards."""
    from qie.quiet_libraries import spare_imports

    main(obj=spare_imports)  # qie.cli.precompute calls it

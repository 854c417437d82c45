"""Shared by the commands: options, error messages and exit codes, progress as JSON lines."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from qie.cli.terminal import ERASED, echo, erase_line, is_terminal, warn

PATH_ERRORS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
"""Errors of a path that the user gave, rather than of the machine."""

TYPED = "qie.typed"
"""The words that a command was called with, among what click keeps of a call."""

INTERRUPTED = {
    "qie.cli.train": "checkpoints stay; continue from the last one with --resume latest",
    "qie.cli.predict": "finished images stay; run the same command again for all of them",
    "qie.cli.stats": "nothing was changed",
    "qie.cli.doctor": "nothing was changed",
    "qie.cli.init": "nothing was written",
    "qie.cli.export": "run the same command again",
}
"""What is left of a command's work after Ctrl-C, where it is not shards."""

_OWN = str(Path(__file__).parents[1])

Function = TypeVar("Function", bound=Callable[..., Any])

config_option = click.option("--config", "config_path", required=True, metavar="FILE", help="YAML configuration.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a configuration value; repeatable."
)
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress, only results and errors.")


class FiniteRange(click.FloatRange):
    """A range of numbers that excludes nan, which is neither below nor above any number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number.", param, ctx)


class Command(click.Command):
    """A command that answers options of earlier programs, and keys of the configuration, with their replacement."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from qie.config.earlier_programs import moved

            name = error.option_name.lstrip("-").replace("-", "_")
            own, answer = f"--{name.replace('_', '-')}", moved(name)
            if any(own in option.opts for option in self.params):
                raise click.UsageError(f"No such option {error.option_name}. Did you mean {own}?", ctx) from error
            if answer is None:
                raise
            how = "" if "→ none" in answer else ", in the configuration or as --set KEY=VALUE"
            raise click.UsageError(f"No such option: --{answer}{how}", ctx) from error

    def get_help(self, ctx: click.Context) -> str:
        """It names the commands as this one was typed: `qie train`, or `qie-train`."""
        text = super().get_help(ctx)
        if ctx.parent is None:
            return text
        return re.sub(r"\bqie-(\s*)(precompute|stats|train|predict)\b", lambda m: f"qie{m[1] or ' '}{m[2]}", text)


def typed_again(command: str, flags: Sequence[str] = (), options: Sequence[str] = ()) -> list[str]:
    """The command that is running, as it was typed, less some flags and options with their values."""
    words, kept = list(click.get_current_context().meta[TYPED]), ["qie", command]
    while words:
        word = words.pop(0)
        if word in options:
            del words[:1]
        elif word not in flags and word.partition("=")[0] not in options:
            kept.append(word)
    return kept


def explained(command: Function) -> Function:
    """Show a QieError as a message instead of a traceback, and exit by its code; Ctrl-C exits with 130."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from qie.errors import QieError
        from qie.quiet_libraries import quiet_imports

        quiet_imports()
        try:
            with _heard(), _own_warnings():
                return command(*args, **kwargs)
        except QieError as error:
            echo(*f"error: {error}".split("\n"), err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            # The reader of our output is gone (such as `| head`); nothing may be flushed at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except OSError as error:
            echo(f"error: the system refused: {error.strerror or error}", f"  where:    {error.filename}", err=True)
            sys.exit(2 if error.errno in PATH_ERRORS else 1)
        except KeyboardInterrupt:
            _interrupted(command.__module__)
        except Exception as error:
            if not _was_interrupt(error):
                raise
            _interrupted(command.__module__)

    return wrapper  # type: ignore[return-value]


def command(function: Callable[..., None]) -> Command:
    """A function and its options as a command: explained, with help at -h, too."""
    made = click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
    return made(explained(function))


@contextmanager
def _heard() -> Iterator[None]:
    """Ctrl-C within an import ends the process. An exception might not: modules turn it into other errors, or none, and
    Python drops it in the callbacks of its import locks. Elsewhere Ctrl-C raises KeyboardInterrupt, as usual."""

    def on_signal(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                os.write(2, f"{ERASED * is_terminal(sys.stderr)}interrupted\n".encode())
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Python's warnings in the form of ours: those of qie, and what torch says of a GPU that it cannot use well.

    Those of other libraries are for who writes programs: -W or PYTHONWARNINGS shows them.
    """

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:  # noqa: ARG001
        place = filename.replace(os.sep, "/")
        if filename.startswith(_OWN) or "/torch/cuda/" in place:
            warn(" ".join(str(message).split()))

    if sys.warnoptions:
        yield
        return
    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _interrupted(module: str) -> NoReturn:
    from qie.threads import leave

    stays = INTERRUPTED.get(module, "published shards stay; run the same command again to continue")
    tell_interrupted(stays)
    leave(130)


def tell_interrupted(what: str) -> None:
    """Say what is left after Ctrl-C, in the place of the bar that the terminal has written ^C behind."""
    erase_line()
    echo(f"interrupted: {what}", err=True)


def _was_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error: transformers raises one of its own when an import of its parts ends."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


class JsonLog:
    """Progress as JSON lines appended to a file, one every `every_s` seconds and a last one; nothing without a file."""

    def __init__(self, path: str | None, every_s: float = 10.0) -> None:
        self._path, self._every_s, self._written = path, every_s, time.monotonic()
        self._file: Any = None

    def __enter__(self) -> JsonLog:
        if self._path is not None:
            from qie.paths import local_path

            self._file = local_path(self._path).open("a", encoding="utf-8")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def at(self, values: Callable[[], dict[str, Any]]) -> None:
        """Write `values()` if it is time."""
        if self._file is not None and time.monotonic() - self._written >= self._every_s:
            self.last(values())

    def last(self, values: dict[str, Any]) -> None:
        """Write `values` now."""
        if self._file is not None:
            self._file.write(json.dumps({"time": round(time.time(), 3)} | values) + "\n")
            self._file.flush()
            self._written = time.monotonic()

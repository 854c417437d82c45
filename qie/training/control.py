"""Requests to a run that trains: small files in its folder, so that `touch RUN/control/pause` works from anywhere.

    RUN/control/
        pause           as long as it is there, the run holds between two steps
        checkpoint      write a checkpoint now; the run removes the file once it is written
        stop            stop after a checkpoint; the run removes the file once it is written
        prompts.json    validation.samples that take the place of the configuration's, as long as it is there

`ask`, `take_back` and `ask_prompts` write them; the run's main process reads them with `Control`, once in each step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticError

from qie.config import SampleConfig
from qie.errors import UsageError
from qie.stores import LocalFolder, MissingError
from qie.training.run_lock import holder

CONTROL_FOLDER = "control"
PROMPTS_FILE = "prompts.json"
MOST_PROMPT_BYTES = 1 << 20

Wish = Literal["pause", "checkpoint", "stop"]
_SAMPLES = TypeAdapter(list[SampleConfig])


@dataclass(frozen=True)
class Asked:
    """What is asked of a run between two steps.

    Attributes:
        stop: stop after a checkpoint.
        checkpoint: write a checkpoint.
        pause: hold.
        prompts: prompts.json has changed, or is gone, since the run looked last.
    """

    stop: bool = False
    checkpoint: bool = False
    pause: bool = False
    prompts: bool = False


def ask(run: Path, wish: Wish) -> None:
    """Ask the run that trains into the folder `run`; it obeys after the step that it is in.

    Raises:
        UsageError: no run does.
        StoreError: the folder cannot be written.
    """
    _require_running(run)
    LocalFolder(run / CONTROL_FOLDER).write(wish, b"")


def take_back(run: Path, wish: Wish) -> None:
    """Take a request back; of `pause`: the run goes on. Without effect where there is none.

    Raises:
        StoreError: the folder cannot be written.
    """
    LocalFolder(run / CONTROL_FOLDER).delete(wish)


def ask_prompts(run: Path, samples: Sequence[dict[str, Any]] | None) -> None:
    """Ask for pictures of other `validation.samples`; None: of those of the configuration again.

    Raises:
        UsageError: no run trains into the folder, or a sample is not one of `validation.samples`.
        StoreError: the folder cannot be written.
    """
    _require_running(run)
    folder = LocalFolder(run / CONTROL_FOLDER)
    if samples is None:
        folder.delete(PROMPTS_FILE)
        return
    content = json.dumps(list(samples), indent=1, ensure_ascii=False).encode()
    read_prompts(content, "the samples")
    folder.write(PROMPTS_FILE, content)


def read_prompts(content: bytes, where: object) -> list[SampleConfig]:
    """The samples of a prompts.json.

    Raises:
        UsageError: it is not a list of `validation.samples`; names the first fault.
    """
    hint = 'a list such as [{"images": ["a.png"], "prompt": "make it night", "seed": 7}]'
    try:
        return _SAMPLES.validate_python(json.loads(content))
    except PydanticError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"a sample cannot be read: {first['msg']}", where=f"{where}, {place}" if place else where, expected=hint
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("the samples are not JSON", where=where, expected=hint, found=error) from error


def is_training(run: Path) -> bool:
    """Whether a run trains into the folder, here or on a machine that shares its disk."""
    return holder(run) is not None


def _require_running(run: Path) -> None:
    if not is_training(run):
        raise UsageError(
            "no run trains into this folder",
            where=run,
            expected="train.output_dir of a run that goes on",
            hint="ask on the machine that it runs on, or on one that shares its disk",
        )


class Control:
    """The requests to a run, as its main process reads them. As a context manager it makes the folder for them.

    Args:
        output_dir: of the run.
    """

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir / CONTROL_FOLDER
        self._prompts: tuple[int, ...] | None = None
        self._kept: set[str] = set()

    def __enter__(self) -> Control:
        with suppress(OSError):  # nobody can then ask for anything, and the run goes on
            self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # a request is still there, for the next run
            self._folder.rmdir()

    @property
    def pause_file(self) -> Path:
        """The file that makes the run hold."""
        return self._folder / "pause"

    def forget_old(self) -> Iterator[str]:
        """Remove what was asked of an earlier run and is done with it; a line for each request that is there."""
        asked = self.look()
        self._prompts = None
        for wish in ("stop", "checkpoint"):
            if getattr(asked, wish):
                yield f"{self._folder / wish}: asked of an earlier run; removed"
                self._remove(wish)
        if asked.pause:
            yield f"{self.pause_file}: this run will hold before its first step, until the file is removed"

    def look(self) -> Asked:
        """What is asked now. A change of prompts.json is told once."""
        found: dict[str, os.DirEntry[str]] = {}
        stamp = None
        try:
            with os.scandir(self._folder) as entries:
                found = {entry.name: entry for entry in entries if entry.name not in self._kept}
            if PROMPTS_FILE in found:
                facts = found[PROMPTS_FILE].stat()
                stamp = facts.st_mtime_ns, facts.st_size, facts.st_ino
        except OSError:  # the folder was removed, or a file meanwhile
            stamp = None
        changed, self._prompts = stamp != self._prompts, stamp
        return Asked("stop" in found, "checkpoint" in found, "pause" in found, changed)

    def prompts(self) -> list[SampleConfig] | None:
        """The samples of prompts.json; None where it is not there.

        Raises:
            QieError: it cannot be read, or is not a list of samples.
        """
        try:
            content = LocalFolder(self._folder).read(PROMPTS_FILE, most=MOST_PROMPT_BYTES)
        except MissingError:
            return None
        return read_prompts(content, self._folder / PROMPTS_FILE)

    def done(self, asked: Asked) -> None:
        """Remove the requests that a checkpoint, which is written, has answered."""
        for wish in ("stop", "checkpoint"):
            if getattr(asked, wish):
                self._remove(wish)

    def _remove(self, wish: str) -> None:
        try:
            (self._folder / wish).unlink(missing_ok=True)
        except OSError:  # a folder of that name, or a disk that became read-only: it must not ask in each step
            self._kept.add(wish)

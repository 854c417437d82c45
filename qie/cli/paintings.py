"""What qie-predict is to paint, by its options or by the lines of a JSONL file: all is checked before any work."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

if TYPE_CHECKING:
    from qie.config import AdapterConfig, Config

SIDE_MULTIPLE, SIDE_MAX = 16, 8192
"""Of a painted image's side: pixels of a patch of the transformer, and more than any model of today was trained for."""


@dataclass(frozen=True)
class Request:
    """Images to be painted from the same controls and prompts, each with the seed after the one before.

    Attributes:
        images: files of the controls.
        prompt, negative_prompt: instruction, and what to steer away from.
        seed: of the first one's noise.
        outputs: the files to write, one for each seed.
        where: file and line that ask for it; None for options.
    """

    images: tuple[str, ...]
    prompt: str
    negative_prompt: str
    seed: int
    outputs: tuple[Path, ...]
    where: str | None = None


_Path = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


class _Line(BaseModel):
    """A line of a batch. What it leaves out is as the options have it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    image: _Path | None = None
    images: Annotated[list[_Path], Field(min_length=1)] | None = None
    prompt: str
    negative_prompt: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    output: _Path

    @model_validator(mode="after")
    def _check_images(self) -> _Line:
        if (self.image is None) == (self.images is None):
            raise ValueError("one of image and images")
        return self


def read_batch(file: Path, *, negative_prompt: str, seed: int, count: int) -> list[Request]:
    """The paintings of a JSONL file, whose paths are relative to the folder that it lies in.

    Args:
        file: UTF-8, one JSON object for each line; blank lines are skipped.
        negative_prompt, seed: of lines without.
        count: images for each line.

    Raises:
        UsageError: the file cannot be read, holds no line, or a line is none; names file and line.
    """
    from qie.errors import UsageError
    from qie.paths import local_path
    from qie.stores import File, MissingError, RefusedError

    try:
        lines = File.at(file).read().decode("utf-8-sig").split("\n")
    except (MissingError, RefusedError) as error:
        raise UsageError(f"the batch cannot be read: {error.reason}", where=file) from error
    except UnicodeDecodeError as error:
        raise UsageError("the batch is not UTF-8", where=file, found=f"byte {error.start}") from error
    paintings = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        where = f"{file}, line {number}"
        line = _parsed(text, where)
        images = [line.image] if line.image is not None else line.images or []
        paintings.append(
            Request(
                tuple(str(file.parent / local_path(image)) for image in images),
                line.prompt,
                negative_prompt if line.negative_prompt is None else line.negative_prompt,
                seed if line.seed is None else line.seed,
                numbered(file.parent / local_path(line.output), count),
                where,
            )
        )
    if not paintings:
        raise UsageError("the batch has no lines", where=file, expected='{"image": …, "prompt": …, "output": …}')
    return paintings


def numbered(output: Path, count: int) -> tuple[Path, ...]:
    """Files for several images: out.png is out-0.png, out-1.png and so on; for one, itself."""
    if count == 1 or not output.name:
        return (output,)
    digits = len(str(count - 1))
    return tuple(output.with_name(f"{output.stem}-{number:0{digits}}{output.suffix}") for number in range(count))


def check_paintings(paintings: Sequence[Request], background: str) -> None:
    """Raise UsageError when one of them cannot be read, written or understood, or would write over another."""
    from qie.cli.assemble import check_output, check_prompts, read_images
    from qie.errors import UsageError

    writers: dict[Path, str | None] = {}
    for painting in paintings:
        with placed(painting.where):
            for output in painting.outputs:
                check_output(output)
                if (place := output.resolve()) in writers:
                    raise UsageError("a file would be painted twice", where=output, found=f"also {writers[place]}")
                writers[place] = painting.where
            read_images(painting.images, background)
            check_prompts(painting.prompt, painting.negative_prompt)


@contextmanager
def placed(where: str | None) -> Iterator[None]:
    """Within, an error also says which line of a batch it is about."""
    from qie.errors import QieError

    try:
        yield
    except QieError as error:
        if where is not None:
            error.where = where if error.where is None else f"{where}: {error.where}"
        raise


def parse_size(text: str) -> tuple[int, int]:
    """'1024x768' -> (1024, 768). Raises UsageError when a side is no multiple of 16, or too long."""
    from qie.errors import UsageError

    sides = re.fullmatch(r"(\d{1,6})[x×](\d{1,6})", text.strip().lower(), re.ASCII)
    width, height = (int(side) for side in sides.groups()) if sides else (0, 0)
    if not all(SIDE_MULTIPLE <= side <= SIDE_MAX and side % SIDE_MULTIPLE == 0 for side in (width, height)):
        near = "x".join(str(min(max(round(side / 16), 1) * 16, SIDE_MAX)) for side in (width, height))
        raise UsageError(
            "the size cannot be painted",
            where="--size",
            expected=f"WIDTHxHEIGHT, both multiples of {SIDE_MULTIPLE} of at most {SIDE_MAX}",
            found=text,
            hint=f"--size {near}" if width and height else "such as --size 1024x768",
        )
    return width, height


def parse_lora(text: str) -> AdapterConfig:
    """A path, or a path, a colon and a scale. Raises UsageError when no adapter can be there."""
    from qie.config import AdapterConfig
    from qie.errors import UsageError
    from qie.paths import local_path
    from qie.training.model.adapter_file import ADAPTER_FILE

    path, scale = local_path(text), 1.0
    before, colon, after = text.rpartition(":")
    if colon and not path.exists():
        try:
            path, scale = local_path(before), float(after)
        except ValueError:
            path = local_path(text)
    if not (path / ADAPTER_FILE).is_file() and not (path.is_file() and path.suffix == ".safetensors"):
        whole = (path / "transformer").is_dir() or path.name == "transformer"
        raise UsageError(
            "no adapter in this folder, and no file of one",
            where=path,
            expected=f"{ADAPTER_FILE}, or a .safetensors file",
            hint="it holds all weights of a transformer: give it as --transformer"
            if whole
            else "give a checkpoint-NNNNNN folder, or PATH:SCALE",
        )
    try:
        return AdapterConfig(path=str(path), scale=scale)
    except ValidationError as error:
        expected = error.errors(include_url=False)[0]["msg"]
        raise UsageError("the scale of a LoRA is refused", where=f"--lora {text}", expected=expected) from error


def with_loras(config: Config, words: Sequence[str]) -> Config:
    """The configuration whose model.adapters are also those that --lora names.

    Raises:
        UsageError: there is no adapter, or the same one twice, of which each would count.
    """
    from qie.errors import UsageError
    from qie.paths import local_path
    from qie.training.model.adapter_file import ADAPTER_FILE

    adapters = [*config.model.adapters, *map(parse_lora, words)]
    files: set[Path] = set()
    for adapter in adapters:
        path = local_path(adapter.path)
        file = (path / ADAPTER_FILE if path.is_dir() else path).resolve()
        if file in files:
            raise UsageError(
                "the same LoRA twice",
                where=adapter.path,
                expected="each file once among --lora and model.adapters",
                hint="give it once, with the scale that it is to have",
            )
        files.add(file)
    return config.model_copy(update={"model": config.model.model_copy(update={"adapters": adapters})})


def _parsed(text: str, where: str) -> _Line:
    from qie.errors import UsageError

    try:
        return _Line.model_validate_json(text)
    except ValidationError as error:
        faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] == "missing")
        first, known = faults[0], list(_Line.model_fields)
    key = ".".join(str(step) for step in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        raise UsageError("the line is no JSON", where=where, found=message)
    if first["type"] == "model_type":
        raise UsageError("the line is no JSON object", where=where, found=text.strip()[:60])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else None
        raise UsageError(f"unknown key {key!r}", where=where, expected=f"one of {', '.join(known)}", hint=hint)
    if first["type"] == "missing":
        raise UsageError(f"a required key is missing: {key}", where=where)
    place = f"{where}, {key}" if key else where
    found = repr(first["input"])[:100] if key else None
    raise UsageError("a value is refused", where=place, expected=message, found=found)

"""Requests of images, from the options of a command or from the lines of a JSONL file.

All requests are checked before any work. Their prompts are embedded first; then the encoder is freed and the images are
generated, one after the other.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from PIL import Image, PngImagePlugin
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qie.encode.images import Size, decode_layers
from qie.encode.text import check_prompt
from qie.errors import QieError, RowError, UsageError
from qie.families import FAMILIES, Family
from qie.paths import local_path, open_own, require_writable
from qie.stores import File, MissingError, RefusedError, TooLargeError

if TYPE_CHECKING:
    from qie.inference.predictor import Conditions, Predictor
    from qie.pretrained import PretrainedModel


@dataclass(frozen=True)
class Request:
    """Images to generate from the same controls and prompts, each with the seed after the one before.

    Attributes:
        images: files of the controls.
        prompt, negative_prompt: instruction, and what to steer away from.
        seed: of the first one's noise.
        outputs: the files to write, one for each seed.
        where: file and line of the request; None for options.
    """

    images: tuple[str, ...]
    prompt: str
    negative_prompt: str
    seed: int
    outputs: tuple[Path, ...]
    where: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How images are generated, for all requests.

    Attributes:
        steps, cfg, size, alpha: see `Predictor.generate`.
        sigmas: the noise levels of the steps, before the scheduler shifts them; None for evenly spaced ones.
        background: colour behind transparent pixels of controls; None to keep these transparent.
    """

    steps: int
    cfg: float
    size: Size | None = None
    alpha: bool = False
    sigmas: tuple[float, ...] | None = None
    background: str | None = None

    @classmethod
    def of(cls, pretrained: PretrainedModel, *, steps: int | None, cfg: float | None, **others: Any) -> Sampling:
        """Without `steps`, at the noise levels that the model names, or in the family's number of steps. Without `cfg`,
        with the family's guidance.

        Raises:
            ModelError: the model names no noise levels, but something else.
        """
        family, sigmas = pretrained.family, pretrained.sample_sigmas if steps is None else None
        steps = steps or len(sigmas or ()) or family.steps
        return cls(steps, family.guidance if cfg is None else cfg, sigmas=sigmas, **others)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        return {name: value for name, value in vars(self).items() if name != "background"}

    @property
    def told(self) -> dict[str, Any]:
        """What an image tells of them."""
        told: dict[str, Any] = {"steps": self.steps, "cfg": self.cfg}
        told |= {} if self.sigmas is None else {"sample_sigmas": list(self.sigmas)}
        return told | ({"alpha": True} if self.alpha else {})


WITH_ALPHA = frozenset({"PNG", "WEBP", "TIFF", "JPEG2000", "AVIF", "TGA"})
"""Pillow's names of formats that have a place for the opacity of each pixel."""

_Path = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


class _Line(BaseModel):
    """A line of a batch. The options fill in what it leaves out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    image: _Path | None = None
    images: Annotated[list[_Path], Field(min_length=1)] | None = None
    prompt: str
    negative_prompt: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    output: _Path

    @model_validator(mode="after")
    def _check_images(self) -> _Line:
        if self.image is not None and self.images is not None:
            raise ValueError("either image or images")
        return self


def read_batch(file: Path, *, negative_prompt: str, seed: int, count: int) -> list[Request]:
    """The requests of a JSONL file. Its paths are relative to its folder.

    Args:
        file: UTF-8, one JSON object for each line; blank lines are skipped.
        negative_prompt, seed: for lines without.
        count: images per line.

    Raises:
        UsageError: the file cannot be read or is empty, or a line is invalid; names file and line.
    """
    try:
        lines = File.at(file).read().decode("utf-8-sig").split("\n")
    except (MissingError, RefusedError) as error:
        raise UsageError(f"the batch cannot be read: {error.reason}", where=file) from error
    except UnicodeDecodeError as error:
        raise UsageError("the batch is not UTF-8", where=file, found=f"byte {error.start}") from error
    requests = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        where = f"{file}, line {number}"
        line = _parsed(text, where)
        images = [line.image] if line.image is not None else line.images or []
        requests.append(
            Request(
                tuple(str(file.parent / local_path(image)) for image in images),
                line.prompt,
                negative_prompt if line.negative_prompt is None else line.negative_prompt,
                seed if line.seed is None else line.seed,
                numbered_paths(file.parent / local_path(line.output), count),
                where,
            )
        )
    if not requests:
        raise UsageError("the batch has no lines", where=file, expected='{"image": …, "prompt": …, "output": …}')
    return requests


def numbered_paths(output: Path, count: int) -> tuple[Path, ...]:
    """Names for several images: out.png becomes out-0.png, out-1.png and so on; a single one keeps its name."""
    if count == 1 or not output.name:
        return (output,)
    digits = len(str(count - 1))
    return tuple(output.with_name(f"{output.stem}-{number:0{digits}}{output.suffix}") for number in range(count))


def check_requests(requests: Sequence[Request], family: Family, sampling: Sampling) -> None:
    """Raise UsageError when a request cannot be read, written or understood, would overwrite another's image, or has
    another number of images than the family takes."""
    writers: dict[Path, str | None] = {}
    for request in requests:
        with _located(request.where):
            for output in request.outputs:
                check_image_path(output, alpha=sampling.alpha)
                if (place := output.resolve()) in writers:
                    raise UsageError(
                        "two images would go into the same file", where=output, found=f"also {writers[place]}"
                    )
                writers[place] = request.where
            read_images(request.images, sampling.background)
            check_prompts(request.prompt, request.negative_prompt)
            check_controls(family, len(request.images))


def check_controls(family: Family, count: int, where: str | None = None) -> None:
    """Raise UsageError when the family does not take `count` images."""
    least, limit = family.min_controls, family.max_controls
    expected = f"{limit or f'{least} or more'} for family {family.name}"
    if count < least:
        raise UsageError(
            "the model edits images, and was given none",
            where=where,
            expected=expected,
            found=count,
            hint="name an image to edit; Qwen-Image-2.1 also makes images from text alone",
        )
    if limit is not None and count > limit:
        raise UsageError(
            "too many images for the model",
            where=where,
            expected=expected,
            found=count,
            hint="an edit_plus model takes several",
        )


def check_alpha(family: Family, alpha: bool, where: str | None = None) -> None:
    """Raise UsageError when transparency is asked of a family that makes none."""
    if alpha and not family.alpha:
        raise UsageError(
            "the model makes no transparent images",
            where=where,
            expected="a model of family " + " or ".join(one.name for one in FAMILIES.values() if one.alpha),
            found=f"{family.name} ({family.title})",
        )


def embed_requests(
    predictor: Predictor, requests: Sequence[Request], sampling: Sampling, progress: Callable[[int], object]
) -> list[Conditions]:
    """The conditions of each request, in host memory, without its images. Frees the encoder's weights.

    `progress` is called with the number of requests embedded.

    Raises:
        UsageError: a prompt is too long, or the text encoder resizes an image.
    """
    conditions = []
    for request in requests:
        with _located(request.where):
            images = read_images(request.images, sampling.background)
            negative = request.negative_prompt if sampling.cfg > 1 else None
            try:
                embedded = predictor.embed(images, request.prompt, negative, sampling.size)
            except RowError as error:
                raise UsageError(
                    error.what, where=error.where, expected=error.expected, found=error.found, hint=error.hint
                ) from error
            conditions.append(replace(embedded, images=()))
        progress(len(conditions))
    predictor.free_encoder()
    return conditions


def iter_generated(
    predictor: Predictor,
    requests: Sequence[Request],
    conditions: Sequence[Conditions],
    sampling: Sampling,
    settings: dict[str, Any],
    on_step: Callable[[int, str], object],
) -> Iterator[tuple[Path, Image.Image]]:
    """Generate and write one image after the other, so that images stay when a later one fails.

    Args:
        predictor, requests, conditions, sampling: see `embed_requests`.
        settings: what a PNG tells besides the request.
        on_step: called with the number of steps done, of all images together, and the name of the current file.
    """
    from qie.inference.predictor import generate

    done = 0
    for request, condition in zip(requests, conditions, strict=True):
        about = {"prompt": request.prompt, "negative_prompt": request.negative_prompt, "images": request.images}
        with _located(request.where):
            given = replace(condition, images=tuple(read_images(request.images, sampling.background)))
            for seed, output in enumerate(request.outputs, start=request.seed):
                image = generate(
                    predictor.pipeline,
                    given,
                    seed=seed,
                    **sampling.settings,
                    on_step=lambda step, before=done, name=output.name: on_step(before + step, name),  # type: ignore[misc]
                )
                save_image(image, output, about | {"seed": seed, "size": image.size} | settings)
                done += sampling.steps
                yield output, image


def check_prompts(prompt: str, negative_prompt: str, where: str = "--{}", negative: str = "negative-prompt") -> None:
    """Raise UsageError when a prompt cannot be encoded. A blank negative prompt is the null prompt.

    `where`, filled in with `prompt` or `negative`, names the place of a prompt.
    """
    for name, text in (("prompt", prompt), (negative, negative_prompt)):
        try:
            if name == "prompt" or text.strip():
                check_prompt(text)
        except RowError as error:
            raise UsageError(error.what, where=where.format(name), found=error.found, hint=error.hint) from error


def read_images(paths: Iterable[str], background: str | None, where: str | None = None) -> list[Image.Image]:
    """Image files, decoded as rows are.

    Args:
        paths: the files.
        background: colour behind transparent pixels; None to keep these transparent, in RGBA.
        where: configuration key that names them, for messages.

    Raises:
        UsageError: one is missing or is not an image.
    """
    images = []
    for path in paths:
        place = f"{where}: {path}" if where else path
        try:
            layers = decode_layers(File.at(local_path(path)).read(), "the file")
            images.append(layers.rgba if background is None else layers.on(background))
        except (MissingError, RefusedError) as error:
            raise UsageError(f"the image cannot be read: {error.reason}", where=place) from error
        except (RowError, TooLargeError) as error:
            raise UsageError(error.what, where=place, expected=error.expected, found=error.found) from error
    return images


def check_image_path(path: Path, *, alpha: bool = False) -> None:
    """Raise UsageError when no image, with `alpha` none that is transparent, can be written to `path`: for a check
    before the work, not after it."""
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind not in Image.SAVE:
        raise UsageError(
            "the file extension is not that of an image format", where=path, expected="such as .png or .jpg"
        )
    if alpha and kind not in WITH_ALPHA:
        raise UsageError("this format has no transparency", where=path, expected="such as .png or .webp", found=kind)
    require_writable(path)


def save_image(image: Image.Image, path: Path, settings: dict[str, Any]) -> None:
    """Write an image completely or not at all. A PNG carries `settings` as text under the name qie."""
    check_image_path(path)
    about = PngImagePlugin.PngInfo()
    about.add_itxt("qie", json.dumps(settings, ensure_ascii=False))
    partial = path.with_name(f".{path.name}.partial")
    file = open_own(partial)
    try:
        with file:
            file.truncate(0)
            image.save(file, format=Image.registered_extensions()[path.suffix.lower()], pnginfo=about)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _located(where: str | None) -> Iterator[None]:
    """Within, an error also names its line of a batch."""
    try:
        yield
    except QieError as error:
        if where is not None:
            error.where = where if error.where is None else f"{where}: {error.where}"
        raise


def _parsed(text: str, where: str) -> _Line:
    try:
        return _Line.model_validate_json(text)
    except ValidationError as error:
        faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] == "missing")
        first, known = faults[0], list(_Line.model_fields)
    key = ".".join(str(step) for step in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        raise UsageError("the line is not valid JSON", where=where, found=message)
    if first["type"] == "model_type":
        raise UsageError("the line is not a JSON object", where=where, found=text.strip()[:60])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else None
        raise UsageError(f"unknown key {key!r}", where=where, expected=f"one of {', '.join(known)}", hint=hint)
    if first["type"] == "missing":
        raise UsageError(f"a required key is missing: {key}", where=where)
    place = f"{where}, {key}" if key else where
    found = repr(first["input"])[:100] if key else None
    raise UsageError("a value is refused", where=place, expected=message, found=found)

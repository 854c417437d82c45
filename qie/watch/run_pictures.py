"""The sample images of a run, by what was asked for: one prompt, its images and its seed make a row of pictures."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from qie.data.sources.folder_names import CONTROL_FOLDERS, TARGET_FOLDERS
from qie.image_formats import IMAGE_FORMATS, IMAGE_SUFFIXES
from qie.watch.live_page import WebFile

FOLDER = "samples"
SMALL_PX = 560
"""Of a picture on the page, its longer side. A click shows it whole."""
MOST_BYTES = 1 << 26
MOST_PIXELS = 1 << 26
MOST_INPUTS = 16
KEPT = 256
"""Small pictures that are kept in memory."""

_NAME = re.compile(r"step-(\d{6,15})-(\d{1,4})\.png", re.ASCII)
_INPUT = re.compile(r"inputs/[0-9a-f]{16}\.(png|jpg)", re.ASCII)
_CONTROL = re.compile(r"(.+?)(_control_\d+)?")


class RunPictures:
    """The pictures in a run's folder. What has not changed is not read again.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._about: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._found: dict[str, dict[str, Any]] = {}
        self._stamp = -1

    def read(self) -> list[dict[str, Any]]:
        """The rows of pictures, those of the newest step first.

        Each has `id`, `prompt`, `seed`, `negative_prompt`, `inputs` (how many of its images are there), `target`
        (whether it is there), and `steps` with the `names` of their files.
        """
        folder = self._run / FOLDER
        try:
            stamp = folder.stat().st_mtime_ns
            if stamp != self._stamp:
                self._found = self._grouped(folder)
                self._stamp = stamp
        except OSError:
            self._found = {}
        rows = sorted(self._found.values(), key=lambda row: (-row["steps"][-1], row["names"][-1]))
        return [{name: value for name, value in row.items() if name != "files"} for row in rows]

    def _grouped(self, folder: Path) -> dict[str, dict[str, Any]]:
        rows: dict[str, tuple[dict[str, Any], list[int], list[str]]] = {}
        about: dict[tuple[str, int, int], dict[str, Any]] = {}
        for step, path in sorted(_pictures(folder)):
            with suppress(OSError):
                facts = path.stat()
                key = path.name, facts.st_mtime_ns, facts.st_size
                asked = about[key] = self._about.get(key) or _asked_for(path)
                name = _identity(asked)
                _, steps, names = rows.get(name, (asked, [], []))
                steps.append(step)
                names.append(path.name)
                rows[name] = asked, steps, names  # what the last one says: earlier ones may lack their inputs
        self._about = about
        return {name: self._row(name, *row) for name, row in rows.items()}

    def _row(self, name: str, asked: dict[str, Any], steps: list[int], names: list[str]) -> dict[str, Any]:
        originals = [place for image in asked["images"][:MOST_INPUTS] if (place := self._place(image))]
        target = _target(originals[0]) if originals else None
        kept = [self._run / FOLDER / one for one in asked["inputs"][:MOST_INPUTS]]
        files = kept if kept and all(map(Path.is_file, kept)) else originals
        told = {name: asked[name] for name in ("prompt", "seed", "negative_prompt", "images")}
        files_of = {f"input-{number}": file for number, file in enumerate(files)}
        return told | {
            "id": name,
            "inputs": len(files),
            "target": target is not None,
            "steps": steps,
            "names": names,
            "files": files_of | ({"target": target} if target else {}),
        }

    def _place(self, image: str) -> Path | None:
        """An image of a prompt. qie-train found it from its working directory: any folder above the run may be that."""
        with suppress(OSError, ValueError, RuntimeError):
            path = Path(image).expanduser()
            for folder in (Path(), *self._run.resolve().parents):
                if path.suffix.lower() in IMAGE_SUFFIXES and (folder / path).is_file():
                    return folder / path
        return None

    def file(self, name: str) -> WebFile | None:
        """A picture, whole, or small where the name begins with small/; None: there is none."""
        small = name.startswith("small/")
        first, _, second = name.removeprefix("small/").partition("/")
        if not second:
            path = self._run / FOLDER / first if _NAME.fullmatch(first) else None
        else:
            path = self._found.get(first, {}).get("files", {}).get(second)
        if path is None:
            return None
        try:
            facts = path.stat()
            if facts.st_size > MOST_BYTES:
                return None
            return _small(path, facts.st_mtime_ns, facts.st_size) if small else _whole(path)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None


def _pictures(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            yield int(match[1]), path


def _asked_for(path: Path) -> dict[str, Any]:
    """What a picture was generated from, as it says itself; of one that says nothing, its number."""
    told: dict[str, Any] = {}
    with suppress(OSError, ValueError, SyntaxError, RecursionError), Image.open(path, formats=("PNG",)) as image:
        found = json.loads(str(image.info.get("qie", "{}")))
        told = found if isinstance(found, dict) else {}
    match = _NAME.fullmatch(path.name)
    prompt, images, inputs = told.get("prompt"), told.get("images"), told.get("inputs")
    return {
        "prompt": prompt if isinstance(prompt, str) else f"sample {match[2] if match else path.name}",
        "images": [image for image in images if isinstance(image, str)] if isinstance(images, list) else [],
        "inputs": [one for one in inputs if isinstance(one, str) and _INPUT.fullmatch(one)]
        if isinstance(inputs, list)
        else [],
        "seed": told["seed"] if isinstance(told.get("seed"), int) else None,
        "negative_prompt": told["negative_prompt"] if isinstance(told.get("negative_prompt"), str) else None,
    }


def _identity(asked: dict[str, Any]) -> str:
    same = {name: value for name, value in asked.items() if name != "inputs"}  # which pictures of earlier versions lack
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def _target(control: Path) -> Path | None:
    """The image that training edits a control to, where both lie as a folder source has them."""
    match = _CONTROL.fullmatch(control.stem)
    if control.parent.name not in CONTROL_FOLDERS or match is None:
        return None
    places: Sequence[Path] = [control.parent.parent / name for name in TARGET_FOLDERS]
    for folder in places:
        for suffix in IMAGE_SUFFIXES:
            if (folder / f"{match[1]}{suffix}").is_file():
                return folder / f"{match[1]}{suffix}"
    return None


@functools.lru_cache(maxsize=KEPT)
def _small(path: Path, _changed: int, _size: int) -> WebFile:
    with _opened(path) as image:
        image.draft("RGB", (SMALL_PX, SMALL_PX))
        small = ImageOps.exif_transpose(image)
        small.thumbnail((SMALL_PX, SMALL_PX), Image.Resampling.LANCZOS)
        content = io.BytesIO()
        small.convert("RGBA" if small.has_transparency_data else "RGB").save(content, "WEBP", quality=90)
    return WebFile(content.getvalue(), "image/webp")


def _whole(path: Path) -> WebFile:
    with _opened(path) as image:  # nothing but an image is given out, whatever it is called
        kind = Image.MIME[str(image.format)]
    return WebFile(path.read_bytes(), kind)


def _opened(path: Path) -> Image.Image:
    image = Image.open(path, formats=tuple(IMAGE_FORMATS))
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise ValueError("too large")
    return image

"""Sources: anything that yields rows. A source is opened cheaply; a row's bytes are read when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qie.errors import RowError, SourceError
from qie.paths import local_path
from qie.types import Row

TARGET_FOLDERS = ("training_images", "images", "target_images")
CONTROL_FOLDERS = ("control_images", "control")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")

_BESIDE = re.compile(r"(.*)_(mask|control_\d+)")


class Source(Protocol):
    """Rows by index. The order is fixed: the same source opened anywhere gives the same row for an index."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the owner calls the row, known without reading it."""

    def read(self, index: int) -> Row:
        """The row with its bytes. Raises RowError when a file is missing or cannot be read."""


def open_source(place: str | Path) -> Source:
    """The source in a folder.

    Raises:
        SourceError: there is no such folder, or its layout is none that qie understands.
    """
    folder = local_path(place)
    if not folder.is_dir():
        raise SourceError(
            "the source is no folder",
            where=place,
            expected=f"a folder with {TARGET_FOLDERS[0]}/ and {CONTROL_FOLDERS[0]}/",
            found="a file" if folder.exists() else "nothing",
            hint="correct data.source, or --source",
        )
    return FolderSource.open(folder)


@dataclass(frozen=True)
class FolderSource:
    """Images in two folders, paired by name.

        training_images/x.png   the target, with x.txt (in either folder) as its prompt
        control_images/x.png    its first control; x_control_1.png, x_control_2.png … are further ones
        x_mask.png              its mask, in either folder

    Rows are in the order of the targets' names. A target whose control or prompt is missing is a row that cannot be
    read, not a row that is left out: it keeps its index and its reason is reported.
    """

    targets: Path
    controls: Path
    stems: tuple[str, ...]
    target_files: dict[str, Path]
    control_files: dict[str, Path]
    texts: dict[str, Path]

    @classmethod
    def open(cls, folder: Path) -> FolderSource:
        """List the folder. Raises SourceError when its layout is another one, or it holds no target."""
        targets, controls = (_first_folder(folder, names) for names in (TARGET_FOLDERS, CONTROL_FOLDERS))
        target_images, control_images = _images(targets), _images(controls)
        stems = tuple(sorted(stem for stem in target_images if not _stands_beside(stem, target_images)))
        if not stems:
            raise SourceError(
                "the source holds no target images",
                where=targets,
                expected=f"files ending in {', '.join(IMAGE_SUFFIXES)}",
            )
        texts = {path.stem: path for place in (controls, targets) for path in place.glob("*.txt")}
        return cls(targets, controls, stems, target_images, control_images, texts)

    def __len__(self) -> int:
        return len(self.stems)

    def name(self, index: int) -> str:
        return self.stems[index]

    def read(self, index: int) -> Row:
        stem = self.stems[index]
        if stem not in self.control_files:
            raise RowError(
                "no control image", where=stem, expected=f"{self.controls / stem}.png (or another image ending)"
            )
        if stem not in self.texts:
            raise RowError("no prompt", where=stem, expected=f"{self.targets / stem}.txt")
        mask = self.target_files.get(f"{stem}_mask") or self.control_files.get(f"{stem}_mask")
        return Row(
            index=index,
            name=stem,
            target=_bytes(self.target_files[stem]),
            controls=tuple(_bytes(path) for path in self._control_paths(stem)),
            prompt=_text(self.texts[stem]),
            mask=_bytes(mask) if mask else None,
        )

    def _control_paths(self, stem: str) -> list[Path]:
        paths = [self.control_files[stem]]
        while further := self.control_files.get(f"{stem}_control_{len(paths)}"):
            paths.append(further)
        beyond = sorted(name for name in self.control_files if re.fullmatch(rf"{re.escape(stem)}_control_\d+", name))
        if len(beyond) != len(paths) - 1:
            raise RowError("its controls are not numbered 1, 2, 3 … without gaps", where=stem, found=", ".join(beyond))
        return paths


def _stands_beside(stem: str, targets: Container[str]) -> bool:
    """Whether an image is the mask or a further control of another one, by its name and by that one being there."""
    match = _BESIDE.fullmatch(stem)
    return match is not None and match[1] in targets


def _first_folder(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    found = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    raise SourceError(
        "the source has another layout",
        where=folder,
        expected=f"a folder {' or '.join(f'{name}/' for name in names)}",
        found=", ".join(found[:8]) or "an empty folder",
    )


def _images(folder: Path) -> dict[str, Path]:
    """Image files by stem. Two files of one stem are an error: which of them is meant cannot be known."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith("."):
            continue
        if path.stem in found:
            raise SourceError(
                "two images have the same name", where=path, found=found[path.stem].name, hint="rename or delete one"
            )
        found[path.stem] = path
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RowError(f"a file cannot be read: {error.strerror}", where=path) from error


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise RowError("the prompt is not UTF-8", where=path, found=f"byte {error.object[error.start]:#x}") from error

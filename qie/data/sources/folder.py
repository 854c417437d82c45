"""Folders of images, paired by name."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

from qie.data.sources.resolve import MAX_TEXT_BYTES, readable, row_bytes
from qie.data.sources.source import TEXT_TO_IMAGE
from qie.errors import RowError, SourceError
from qie.image_formats import IMAGE_SUFFIXES
from qie.recipe import normal_prompt
from qie.stores import File, Folder
from qie.types import Row

TARGET_FOLDERS = ("training_images", "images", "target_images")
CONTROL_FOLDERS = ("control_images", "control")

_BESIDE = re.compile(r"(.*)_(mask|control_\d+)")
_CONTROL = re.compile(r"(.*)_control_\d+")
_PROMPT = re.compile(r"(.*)_prompt_\d+")


@dataclass(frozen=True)
class ImageFolder:
    """One of the two folders: its images' endings by stem, and the stems of its texts."""

    folder: Folder
    endings: dict[str, str]
    texts: frozenset[str]

    @classmethod
    def list(cls, folder: Folder) -> ImageFolder:
        """List a folder. Raises SourceError for two images with the same stem, because either could be meant."""
        endings: dict[str, str] = {}
        texts = []
        for name in folder.names():
            stem, ending = os.path.splitext(name)  # noqa: PTH122 - a million Path objects take long
            if ending == ".txt":
                texts.append(stem)
            if ending.lower() not in IMAGE_SUFFIXES or name.startswith("."):
                continue
            if stem in endings:
                raise SourceError(
                    "two images have the same name",
                    where=File(folder, name),
                    found=stem + endings[stem],
                    hint="rename or delete one",
                )
            endings[stem] = ending
        return cls(folder, endings, frozenset(texts))

    def image(self, stem: str) -> File | None:
        return File(self.folder, stem + self.endings[stem]) if stem in self.endings else None

    def text(self, stem: str) -> File | None:
        return File(self.folder, f"{stem}.txt") if stem in self.texts else None


@dataclass(frozen=True)
class FolderSource:
    """Images in two folders, paired by name.

        training_images/x.png   the target, with x.txt (in either folder) as its prompt
        control_images/x.png    its first control; x_control_1.png, x_control_2.png … are further ones
        x_mask.png              its mask, in either folder
        x_prompt_1.txt …        further captions, in either folder

    Where rows may be text-to-image and there is no folder of controls, no row has one.

    Rows are in the order of the targets' names. A target whose control or prompt is missing is a row that cannot be
    read, not a row that is left out: it keeps its index and its reason is reported.
    """

    targets: ImageFolder
    controls: ImageFolder
    stems: tuple[str, ...]
    more_controls: dict[str, tuple[str, ...]]
    more_prompts: dict[str, tuple[str, ...]]
    edits: bool = True

    @classmethod
    def open(cls, folder: Folder, *, text_to_image: bool = False) -> FolderSource:
        """List the folder. Raises SourceError when it has another layout, or holds no target."""
        edits = not text_to_image or any(name in folder.folders() for name in CONTROL_FOLDERS)
        targets = ImageFolder.list(_first_folder(folder, TARGET_FOLDERS))
        controls = ImageFolder(targets.folder, {}, frozenset())
        if edits:
            controls = ImageFolder.list(_first_folder(folder, CONTROL_FOLDERS))
        stems = tuple(sorted(stem for stem in targets.endings if not _stands_beside(stem, targets.endings)))
        if not stems:
            raise SourceError(
                "the source holds no target images",
                where=targets.folder,
                expected=f"files ending in {', '.join(IMAGE_SUFFIXES)}",
            )
        # `x_prompt_1.txt` beside an image of that name is that row's prompt, not another one of `x`.
        texts = (stem for stem in targets.texts | controls.texts if stem not in targets.endings)
        return cls(targets, controls, stems, _further(_CONTROL, controls.endings), _further(_PROMPT, texts), edits)

    def __len__(self) -> int:
        return len(self.stems)

    def name(self, index: int) -> str:
        return readable(self.stems[index])

    def read(self, index: int) -> Row:
        stem = self.stems[index]
        target, control = self.targets.image(stem), self.controls.image(stem)
        assert target is not None
        if control is None and self.edits:
            expected = f"{File(self.controls.folder, stem)}.png (or another image ending)"
            raise RowError("no control image", where=stem, expected=expected)
        if self._text(stem) is None:
            raise RowError("no prompt", where=stem, expected=f"{File(self.targets.folder, stem)}.txt")
        mask = self.targets.image(f"{stem}_mask") or self.controls.image(f"{stem}_mask")
        controls = [control, *(self.controls.image(name) for name in self._more(self.more_controls, stem, "control"))]
        prompts = [self._text(name) for name in (stem, *self._more(self.more_prompts, stem, "prompt"))]
        prompt, *more_prompts = (_decoded(text) for text in prompts if text)
        return Row(
            index=range(len(self))[index],
            name=self.name(index),
            target=row_bytes(target),
            controls=tuple(row_bytes(image) for image in controls if image),
            prompt=prompt,
            mask=row_bytes(mask) if mask else None,
            more_prompts=tuple(more_prompts),
        )

    def _text(self, stem: str) -> File | None:
        return self.targets.text(stem) or self.controls.text(stem)

    def _more(self, further: dict[str, tuple[str, ...]], stem: str, what: str) -> list[str]:
        found = further.get(stem, ())
        expected = [f"{stem}_{what}_{number}" for number in range(1, len(found) + 1)]
        if set(found) != set(expected):
            raise RowError(
                f"its {what}s are not numbered 1, 2, 3 … without gaps", where=stem, found=", ".join(sorted(found))
            )
        return expected


def _stands_beside(stem: str, targets: Container[str]) -> bool:
    """Whether an image is the mask or a further control of another one, by its name and if that one exists."""
    match = _BESIDE.fullmatch(stem)
    return match is not None and match[1] in targets


def _further(pattern: re.Pattern[str], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names that continue another one by a number, by that other one."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            found[match[1]] = (*found.get(match[1], ()), name)
    return {stem: tuple(sorted(several)) for stem, several in found.items()}


def _first_folder(root: Folder, names: tuple[str, ...]) -> Folder:
    folders = root.folders()
    for name in names:
        if name in folders:
            return root.child(name)
    found = [name + "/" * (name in folders) for name in root.names()]
    raise SourceError(
        "the source does not have the expected layout",
        where=root,
        expected=f"a folder {' or '.join(f'{name}/' for name in names)}",
        found=", ".join(found[:8]) or "an empty folder",
        hint="to read a table, name the .csv, .jsonl, .parquet or .tar file itself"
        + (TEXT_TO_IMAGE if names is CONTROL_FOLDERS else ""),
    )


def _decoded(file: File) -> str:
    try:
        return normal_prompt(row_bytes(file, MAX_TEXT_BYTES).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowError("the prompt is not UTF-8", where=file, found=f"byte {error.object[error.start]:#x}") from error

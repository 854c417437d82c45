"""Folders of images, paired by name."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from qie.data.sources.concepts import concept_of
from qie.data.sources.folder_names import folders_of
from qie.data.sources.layouts import DEFAULT, Layout
from qie.data.sources.resolve import MAX_TEXT_BYTES, readable, row_bytes
from qie.errors import RowError, SourceError
from qie.image_formats import IMAGE_SUFFIXES
from qie.recipe import normal_prompt
from qie.stores import File, Folder
from qie.types import Row

_BESIDE = re.compile(r"(.*)_(mask|rejected|control_\d+)")
_CONTROL = re.compile(r"(.*)_control_\d+")
_PROMPT = re.compile(r"(.*)_prompt_\d+")
_NUMBER = re.compile(r"(.*)_(\d+)")


@dataclass(frozen=True)
class ImageFolder:
    """A folder: its images' endings by stem, and its texts' endings by stem."""

    folder: Folder
    endings: dict[str, str]
    texts: dict[str, str]

    @classmethod
    def list(cls, folder: Folder, captions: Sequence[str] = (".txt",)) -> ImageFolder:
        """List a folder. Raises SourceError for two images with the same stem, because either could be meant."""
        endings: dict[str, str] = {}
        texts: dict[str, str] = {}
        for name in folder.names():
            stem, ending = os.path.splitext(name)  # noqa: PTH122 - a million Path objects take long
            if ending in captions:
                texts[stem] = min(texts.get(stem, ending), ending, key=captions.index)
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
        return cls(folder, endings, texts)

    def image(self, stem: str) -> File | None:
        return File(self.folder, stem + self.endings[stem]) if stem in self.endings else None

    def text(self, stem: str) -> File | None:
        return File(self.folder, stem + self.texts[stem]) if stem in self.texts else None


@dataclass(frozen=True)
class FolderSource:
    """Images in folders, paired by name.

        training_images/x.png   the target, with x.txt (in either folder) as its prompt
        control_images/x.png    its first control; x_control_1.png, x_control_2.png … are further ones
        x_mask.png              its mask, in either folder
        x_rejected.png          its rejected target, in either folder
        x_prompt_1.txt …        further captions, in either folder

    Folders of other names are read as their owner, or a preset, calls them. A row may have its further controls, its
    mask and its prompt in folders of their own, as x.png and x.txt. Presets have other rules for names in a folder:

        musubi                  x_0.png, x_1.png … are the controls of x.png, if there is not one x.png
        ai_toolkit              each folder of controls has one x.png
        kohya                   x.caption is a prompt, too; without one, it is what the folder 10_cat is called: cat

    Where rows may be text-to-image and there is no folder of controls, no row has one.

    Rows are in the order of the targets' names. A target whose control or prompt is missing is a row that cannot be
    read, not a row that is left out: it keeps its index and its reason is reported.
    """

    targets: ImageFolder
    controls: tuple[ImageFolder, ...]
    stems: tuple[str, ...]
    more_controls: tuple[dict[str, tuple[str, ...]], ...]
    more_prompts: dict[str, tuple[str, ...]]
    masks: ImageFolder | None = None
    prompts: ImageFolder | None = None
    preset: str | None = None
    rejected: ImageFolder | None = None

    @classmethod
    def open(cls, folder: Folder, layout: Layout = DEFAULT) -> FolderSource:
        """List the folder. Raises SourceError when it has another layout, or holds no target."""
        captions = (".txt", ".caption") if layout.preset == "kohya" else (".txt",)
        found = folders_of(folder, layout)
        targets = ImageFolder.list(found.target, captions)
        controls = tuple(ImageFolder.list(place) for place in found.controls)
        masks, rejected = (None if one is None else ImageFolder.list(one) for one in (found.mask, found.rejected))
        prompts = None if found.prompt is None else ImageFolder.list(found.prompt, captions)
        own = layout.preset is None  # other tools take every image of the folder for a target
        stems = tuple(sorted(stem for stem in targets.endings if not (own and _stands_beside(stem, targets.endings))))
        if not stems:
            raise SourceError(
                "the source holds no target images",
                where=targets.folder,
                expected=f"files ending in {', '.join(IMAGE_SUFFIXES)}",
            )
        # `x_prompt_1.txt` beside an image of that name is that row's prompt, not another one of `x`.
        places = [targets, *controls, *([prompts] if prompts else [])] if own else []
        texts = {stem for place in places for stem in place.texts if stem not in targets.endings}
        pattern = {None: _CONTROL, "musubi": _NUMBER}.get(layout.preset)
        further = tuple(_further(pattern, place.endings) if pattern else {} for place in controls)
        more_prompts = _further(_PROMPT, texts)
        return cls(targets, controls, stems, further, more_prompts, masks, prompts, layout.preset, rejected)

    def __len__(self) -> int:
        return len(self.stems)

    @property
    def notes(self) -> list[str]:
        """Captions of images that are not there, as a user should know: see `source_notes`."""
        if self.preset is not None:
            return []
        images = self.targets.endings
        texts = [stem for place in (self.targets, self.prompts) if place for stem in place.texts]
        lone = sorted({stem for stem in texts if stem not in images and not _is_further(stem, images)})
        if not lone:
            return []
        said = "captions have no image" if len(lone) > 1 else "caption has no image"
        return [f"{len(lone)} {said} that qie reads: {', '.join(map(readable, lone[:3]))}{' …' * (len(lone) > 3)}"]

    def name(self, index: int) -> str:
        return readable(self.stems[index])

    def read(self, index: int) -> Row:
        stem = self.stems[index]
        target = self.targets.image(stem)
        assert target is not None
        controls = [image for number in range(len(self.controls)) for image in self._controls(number, stem)]
        if (prompt := self._prompt(stem)) is None:
            raise self._lacks("no prompt", stem, f"{File((self.prompts or self.targets).folder, stem)}.txt")
        prompts = [self._text(name) for name in self._more(self.more_prompts, stem, "prompt")]
        mask, rejected = self._beside(stem, "mask", self.masks), self._beside(stem, "rejected", self.rejected)
        return Row(
            index=range(len(self))[index],
            name=self.name(index),
            target=row_bytes(target),
            controls=tuple(row_bytes(image) for image in controls),
            prompt=prompt,
            mask=row_bytes(mask) if mask else None,
            rejected=row_bytes(rejected) if rejected else None,
            more_prompts=tuple(_decoded(text) for text in prompts if text),
        )

    def _controls(self, number: int, stem: str) -> list[File]:
        """The images of a row in a folder of controls. Raises RowError when there is none, or a number is missing."""
        place, further = self.controls[number], self.more_controls[number]
        first = place.image(stem)
        if self.preset == "musubi":
            names = [stem] if first else _in_order(stem, further.get(stem, ()))
        else:
            names = [stem, *self._more(further, stem, "control")] if first else []
        if not names:
            expected = f"{File(place.folder, stem)}.png (or another image ending)"
            raise self._lacks("no control image", stem, expected)
        return [image for name in names if (image := place.image(name))]

    def _lacks(self, what: str, stem: str, expected: str) -> RowError:
        """The error of a row that lacks something, perhaps because it is no row: what it would stand beside is gone."""
        if self.preset is None and (beside := _BESIDE.fullmatch(stem)):
            kind = {"mask": "mask", "rejected": "rejected target"}.get(beside[2], "control")
            what += f"; or this is a {kind}, and its target is missing"
        return RowError(what, where=stem, expected=expected)

    def _beside(self, stem: str, what: str, folder: ImageFolder | None) -> File | None:
        """A row's mask, or rejected target: in a folder of its own, or beside others."""
        if folder is not None:
            return folder.image(stem) or folder.image(f"{stem}_{what}")
        if self.preset is not None:
            return None
        found = (place.image(f"{stem}_{what}") for place in (self.targets, *self.controls))
        return next((image for image in found if image), None)

    def _prompt(self, stem: str) -> str | None:
        text = self._text(stem)
        if text is None and self.preset == "kohya":
            return concept_of(self.targets.folder.url.rstrip("/").rpartition("/")[2])
        return None if text is None else _decoded(text)

    def _text(self, stem: str) -> File | None:
        places = (*([self.prompts] if self.prompts else []), self.targets, *self.controls)
        return next((text for place in places if (text := place.text(stem))), None)

    def _more(self, further: dict[str, tuple[str, ...]], stem: str, what: str) -> list[str]:
        found = further.get(stem, ())
        expected = [f"{stem}_{what}_{number}" for number in range(1, len(found) + 1)]
        if set(found) != set(expected):
            raise RowError(
                f"its {what}s are not numbered 1, 2, 3 … without gaps", where=stem, found=", ".join(sorted(found))
            )
        return expected


def _in_order(stem: str, found: Sequence[str]) -> list[str]:
    """Names that end in a number, by it. Raises RowError for a gap: an image may have been forgotten."""
    numbered = sorted((int(name[len(stem) + 1 :]), name) for name in found)
    numbers = [number for number, _ in numbered]
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise RowError("its controls are not numbered 0, 1, 2 … without gaps", where=stem, found=", ".join(found))
    return [name for _, name in numbered]


def _stands_beside(stem: str, targets: Container[str]) -> bool:
    """Whether an image is the mask or a further control of another one, by its name and if that one exists."""
    match = _BESIDE.fullmatch(stem)
    return match is not None and match[1] in targets


def _is_further(stem: str, targets: Container[str]) -> bool:
    """Whether a text is a further caption of an image."""
    match = _PROMPT.fullmatch(stem)
    return match is not None and match[1] in targets


def _further(pattern: re.Pattern[str], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names that continue another one by a number, by that other one."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            found[match[1]] = (*found.get(match[1], ()), name)
    return {stem: tuple(sorted(several)) for stem, several in found.items()}


def _decoded(file: File) -> str:
    try:
        return normal_prompt(row_bytes(file, MAX_TEXT_BYTES).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowError("the prompt is not UTF-8", where=file, found=f"byte {error.object[error.start]:#x}") from error

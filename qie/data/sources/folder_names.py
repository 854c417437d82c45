"""Which folders of a source hold what: by qie's names, its owner's, or by their content."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from qie.data.sources.layouts import DEFAULT, Layout, Names
from qie.data.sources.source import TEXT_TO_IMAGE
from qie.errors import SourceError
from qie.image_formats import IMAGE_SUFFIXES
from qie.stores import Folder, LocalFolder, StoreError, open_folder, scheme_of

TARGET_FOLDERS = ("training_images", "images", "target_images")
CONTROL_FOLDERS = ("control_images", "control")

_CAPTIONS = (".txt", ".caption")
_FEW = 64  # folders that are looked into


@dataclass(frozen=True)
class Folders:
    """The folders of a source."""

    target: Folder
    controls: tuple[Folder, ...]
    mask: Folder | None = None
    prompt: Folder | None = None
    rejected: Folder | None = None


def folders_of(folder: Folder, layout: Layout = DEFAULT) -> Folders:
    """The folders of a source. Raises SourceError when there are none of the expected names."""
    names = layout.names
    if layout.preset is not None:
        names = names.over(_by_content(folder, layout) if names.target is None or names.controls is None else Names())
    controls: tuple[Folder, ...]
    if names.controls is not None:
        controls = tuple(_named(folder, name) for name in names.controls)
    elif layout.preset is not None or (
        layout.text_to_image and not any(name in folder.folders() for name in CONTROL_FOLDERS)
    ):
        controls = ()
    else:
        target = _first_folder(folder, TARGET_FOLDERS, layout) if names.target is None else _named(folder, names.target)
        return Folders(target, (_first_folder(folder, CONTROL_FOLDERS, layout),), *_others(folder, names))
    target = _first_folder(folder, TARGET_FOLDERS, layout) if names.target is None else _named(folder, names.target)
    if not controls and not layout.text_to_image:
        raise SourceError(
            "the source has no folder of control images",
            where=folder,
            expected="a folder whose images are called as the targets are",
            found=_content(folder),
            hint="name it: data.columns: {controls: [folder]}" + TEXT_TO_IMAGE,
        )
    return Folders(target, controls, *_others(folder, names))


def pairs_in(folder: Folder) -> Names | None:
    """The folders of targets and controls by what they hold: captions stand beside targets, and controls are called as
    targets are. "." is the folder itself. None when there are no images with captions, or in several folders.
    """
    inner = [name for name in folder.folders() if not name.startswith(".")][:_FEW]
    found = {name: _stems(folder.child(name)) for name in inner}
    captioned = {name: stems for name, stems in {".": _stems(folder), **found}.items() if stems[0] & stems[1]}
    if len(captioned) != 1:
        return None
    target = next(iter(captioned))
    others = {name: images for name, (images, _) in found.items() if name != target}
    return _with_controls(target, captioned[target][0], others)


def pairs_with_siblings(folder: LocalFolder) -> Names | None:
    """As `pairs_in`, for a folder of targets whose controls are in folders beside it, such as ../cats_control."""
    images, texts = _stems(folder)
    beside = LocalFolder(Path(os.path.normpath(folder.root / "..")))
    own = folder.root.resolve().name
    names = [name for name in beside.folders() if name != own and not name.startswith(".")][:_FEW]
    if not images & texts:
        return None
    return _with_controls(".", images, {f"../{name}": _stems(beside.child(name))[0] for name in names})


def _with_controls(target: str, wanted: set[str], others: dict[str, set[str]]) -> Names:
    controls = {name: images for name, images in others.items() if _are_controls(images, wanted)}
    numbered = any(not images & wanted for images in controls.values())
    return Names(target, tuple(controls) or None, numbered=numbered)


def _by_content(folder: Folder, layout: Layout) -> Names:
    """What a preset's folders are called: as `pairs_in` finds, or qie's own names."""
    if (found := pairs_in(folder)) is not None:
        return found
    if _stems(folder)[0]:
        return Names(".")
    if any(name in folder.folders() for name in TARGET_FOLDERS):
        controls = tuple(name for name in CONTROL_FOLDERS if name in folder.folders())[:1]
        return Names(None, controls or None)
    raise _other_layout(folder, "images with captions, x.png and x.txt, in the folder itself or in one within", layout)


def _stems(folder: Folder) -> tuple[set[str], set[str]]:
    """The stems of a folder's images, and of its captions."""
    try:
        names = folder.names()
    except StoreError:  # such as lost+found: what cannot be listed is no part of the source
        return set(), set()
    parts = [os.path.splitext(name) for name in names if not name.startswith(".")]  # noqa: PTH122
    images = {stem for stem, ending in parts if ending.lower() in IMAGE_SUFFIXES}
    return images, {stem for stem, ending in parts if ending in _CAPTIONS}


def _are_controls(images: set[str], targets: set[str]) -> bool:
    """Whether most targets have an image of their name, which may be numbered, and most images are of a target."""
    plain = {stem if stem in targets else re.sub(r"_[0-9]+$", "", stem) for stem in images}
    return 2 * len(plain & targets) > max(len(plain), len(targets))


def _others(folder: Folder, names: Names) -> tuple[Folder | None, Folder | None, Folder | None]:
    """Those of masks, prompts and rejected targets, where they are named."""
    mask, prompt, rejected = (
        None if name is None else _named(folder, name) for name in (names.mask, names.prompt, names.rejected)
    )
    return mask, prompt, rejected


def _named(folder: Folder, name: str) -> Folder:
    """A folder by the name that its owner gives: within the source, a path beside it, or a URL."""
    if scheme_of(name) is not None:
        return open_folder(name)
    if isinstance(folder, LocalFolder):
        place: Folder = LocalFolder(Path(os.path.normpath(folder.root / Path(name).expanduser())))
    else:
        place = folder if name == "." else folder.child(os.path.normpath(name))
    if not place.names():
        raise SourceError(
            "a folder that data.columns names is not there, or empty", where=place, found=_content(folder)
        )
    return place


def _first_folder(root: Folder, names: tuple[str, ...], layout: Layout) -> Folder:
    folders = root.folders()
    for name in names:
        if name in folders:
            return root.child(name)
    raise _other_layout(root, f"a folder {' or '.join(f'{name}/' for name in names)}", layout, names is CONTROL_FOLDERS)


def _other_layout(root: Folder, expected: str, layout: Layout, controls: bool = False) -> SourceError:
    hint = "to read a table, name the .csv, .jsonl, .parquet or .tar file itself"
    if not layout.preset and (found := pairs_in(root)) is not None:
        named = f"target: {found.target}, controls: [{', '.join(found.controls or ('FOLDER',))}]"
        hint = f"this looks like folder pairs as of ai-toolkit: set data.preset: ai_toolkit, data.columns: {{{named}}}"
    return SourceError(
        "the source does not have the expected layout",
        where=root,
        expected=expected,
        found=_content(root),
        hint=hint + (TEXT_TO_IMAGE if controls else ""),
    )


def _content(folder: Folder) -> str:
    folders = folder.folders()
    found = [name + "/" * (name in folders) for name in folder.names()]
    return ", ".join(found[:8]) or "an empty folder"

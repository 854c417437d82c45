"""What to write into section data for a place: `qie.data.sources.guess(place)`, of which `qie init` makes YAML."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qie.data.sources.concepts import with_concepts
from qie.data.sources.folder_names import TARGET_FOLDERS, pairs_in, pairs_with_siblings
from qie.data.sources.kinds import open_laid_out
from qie.data.sources.layouts import PRESETS, Layout, Names
from qie.data.sources.mixture import SourceSpec
from qie.data.sources.source import Source, source_notes
from qie.errors import RowError, SourceError
from qie.paths import local_path
from qie.stores import LocalFolder, scheme_of

_ROWS = 8
_PATHS = 1000
_UP = 3


@dataclass(frozen=True)
class Guess:
    """How a place is laid out.

    Attributes:
        title: what it looks like, in words.
        sources: one source, or those of a mixture; layouts are theirs.
        rows: how many rows there are.
        controls: how many controls the first readable row has; None if none of the first rows can be read.
        notes: what the user should know, such as which of several splits was taken.
    """

    title: str
    sources: tuple[SourceSpec, ...]
    rows: int
    controls: int | None
    notes: tuple[str, ...] = ()

    def settings(self) -> dict[str, object]:
        """Keys of section data: source, and preset, columns and root where they are needed; ready for YAML."""
        if len(self.sources) == 1 and self.sources[0].weight == 1:
            return _settings(self.sources[0])
        return {"source": [_settings(spec, mixed=True) for spec in self.sources]}


def guess(place: str | Path, *, text_to_image: bool = False) -> Guess:
    """How a place is laid out: the first of qie's own names, the presets and what is found by content that opens it.

    Args:
        place: as for `open_source`.
        text_to_image: rows without controls will do.

    Raises:
        SourceError: nothing that is understood is there; says what is.
        StoreError: a store cannot be reached or refuses.
    """
    first: SourceError | None = None
    for spec in _candidates(str(place)):
        layout = replace(spec.layout, text_to_image=text_to_image)
        try:
            source = open_laid_out(spec.source, layout)
        except SourceError as error:
            first = first or error
            continue
        notes = source_notes(source)
        if (root := _root(spec, source)) is not None:
            spec, layout = replace(spec, root=root), replace(layout, root=root)
            source = open_laid_out(spec.source, layout)
            notes.append(f"paths begin at {root}")
        title = "named as qie reads them" if spec.preset is None else f"as {PRESETS[spec.preset].title} has it"
        return Guess(title, tuple(with_concepts([spec], layout)), len(source), _controls(source), tuple(notes))
    assert first is not None
    raise first


def _candidates(place: str) -> list[SourceSpec]:
    """Layouts in the order they are tried."""
    tables = [SourceSpec(place, preset=name) for name, preset in PRESETS.items() if preset.columns is not None]
    folder = _folder_at(place)
    pairs = None if folder is None else _pairs(folder, place)
    own = folder is not None and any(name in folder.folders() for name in TARGET_FOLDERS)
    candidates = [SourceSpec(place), pairs] if own else [pairs, SourceSpec(place)]
    return [spec for spec in candidates if spec is not None] + tables


def _folder_at(place: str) -> LocalFolder | None:
    if scheme_of(place) is None:
        return LocalFolder(local_path(place)) if local_path(place).is_dir() else None
    return None


def _pairs(folder: LocalFolder, place: str) -> SourceSpec | None:
    """Folders of images with captions: kohya's if they are called so, musubi's if controls are numbered."""
    if not folder.names():
        return None
    concepts = with_concepts([SourceSpec(place, preset="kohya")], Layout())
    if len(concepts) > 1 or concepts[0].source != place:
        return SourceSpec(place, preset="kohya")
    names = pairs_in(folder)
    if names is not None and names.controls is None:
        names = pairs_with_siblings(folder) or names
    if names is None:
        return None
    numbered = names.numbered
    return SourceSpec(place, preset="musubi" if numbered else "ai_toolkit", columns=replace(names, numbered=False))


def _controls(source: Source) -> int | None:
    """How many controls the first readable row has."""
    for index in range(min(len(source), _ROWS)):
        try:
            return len(source.read(index).controls)
        except RowError:
            continue
    return None


def _root(spec: SourceSpec, source: Source) -> str | None:
    """The folder at which the paths of a table begin, if it is not the table's: that of absolute paths, the working
    directory, or one above the table.
    """
    cells = getattr(source, "cells", None)
    if cells is None or scheme_of(spec.source) is not None or _controls(source) is not None:
        return None
    paths = []
    for index in range(min(len(source), _ROWS if spec.source.endswith(".parquet") else _PATHS)):
        with suppress(RowError):
            paths += [path for path in cells(index).paths() if scheme_of(path) is None]
    if absolute := [str(Path(path).parent) for path in paths if Path(path).is_absolute()]:
        common = os.path.commonpath(absolute)
        # A table from a stranger names what it likes: all of a disk is for its user to open, not for a guess.
        return common if len(Path(common).parts) > 2 and Path(common) != Path.home() else None
    above = local_path(spec.source).resolve().parents
    roots = [Path.cwd(), *above[1 : 1 + _UP]]
    return next((str(root) for root in roots if any((root / path).is_file() for path in paths)), None)


def _settings(spec: SourceSpec, *, mixed: bool = False) -> dict[str, object]:
    found: dict[str, object] = {"source": spec.source}
    if mixed:
        found |= {"name": spec.title, "weight": spec.weight}
    if spec.preset:
        found["preset"] = spec.preset
    names = Names.of(spec.columns)
    roles = ("target", "controls", "prompt", "mask", "rejected", "name")
    columns = {role: name for role in roles if (name := getattr(names, role))}
    if columns:
        found["columns"] = {role: list(name) if isinstance(name, tuple) else name for role, name in columns.items()}
    if spec.root:
        found["root"] = spec.root
    return found

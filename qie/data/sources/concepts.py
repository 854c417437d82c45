"""kohya's folders: each is called N_concept, and N is how often an epoch repeats its images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from qie.data.sources.layouts import Layout
from qie.data.sources.mixture import SourceSpec
from qie.errors import SourceError
from qie.stores import Folder, LocalFolder, open_folder

_CONCEPT = re.compile(r"(?P<repeats>[1-9][0-9]{0,2})_(?P<concept>.+)")


def concept_of(folder: str) -> str | None:
    """The concept in the name of a folder: `cat` of `10_cat`, which is the prompt of images without a caption."""
    match = _CONCEPT.fullmatch(folder)
    return str(match["concept"]) if match else None


def with_concepts(specs: Sequence[SourceSpec], layout: Layout) -> list[SourceSpec]:
    """Sources, of which one with the preset kohya and N_concept folders becomes one for each, with N times its weight.

    Args:
        specs: of a mixture.
        layout: what holds for those that say nothing else.

    Raises:
        SourceError: a folder with the preset kohya is not there.
    """
    found = []
    for spec in specs:
        own = spec.layout.over(layout)
        found += _concepts(spec, own) if own.preset == "kohya" else [spec]
    return found


def _concepts(spec: SourceSpec, layout: Layout) -> list[SourceSpec]:
    root = open_folder(spec.source)
    if (isinstance(root, LocalFolder) and not root.root.is_dir()) or not root.names():
        raise SourceError(
            "the source is no folder, or is empty",
            where=spec.source,
            expected="folders such as 10_cat, whose names say how often their images are repeated",
            hint="where it cannot be read, name each of its folders in data.source, with its number as the weight",
        )
    controls = layout.names.controls or ()
    concepts = [(name, match) for name in root.folders() if (match := _CONCEPT.fullmatch(name))]
    return [
        replace(
            spec,
            source=f"{spec.source.rstrip('/')}/{name}",
            name=f"{spec.name}/{name}" if spec.name else name,
            weight=spec.weight * int(match["repeats"]),
            preset="kohya",
            columns=replace(layout.names, controls=tuple(_beside(root, place, name) for place in controls) or None),
        )
        for name, match in concepts
        if name not in controls
    ] or [spec]


def _beside(root: Folder, controls: str, concept: str) -> str:
    """The folder of a concept's controls, as seen from the concept's: one of the same name within, or the whole."""
    inner = concept in open_folder(f"{root.url}/{controls}").folders()
    return f"../{controls}/{concept}" if inner else f"../{controls}"

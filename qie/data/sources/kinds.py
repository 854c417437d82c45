"""Which source a place holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qie.data.sources.concepts import with_concepts
from qie.data.sources.csv import CsvSource
from qie.data.sources.folder import FolderSource
from qie.data.sources.folder_names import CONTROL_FOLDERS, TARGET_FOLDERS
from qie.data.sources.hub_layout import hub_split
from qie.data.sources.huggingface import DatasetSource, is_saved_dataset
from qie.data.sources.jsonl import JsonlSource
from qie.data.sources.layouts import PRESETS, Layout, Names
from qie.data.sources.mixture import Mixture, SourceSpec
from qie.data.sources.parquet import ParquetSource
from qie.data.sources.source import Source
from qie.data.sources.tars import TarSource
from qie.errors import SourceError
from qie.paths import local_path
from qie.stores import (
    REMOTE_SCHEMES,
    File,
    Folder,
    LocalFolder,
    matching_files,
    open_folder,
    scheme_of,
    spelled_out,
    unreadable,
)

KINDS = "a folder, .csv, .jsonl, .ndjson, .parquet, .tar, or hf://datasets/owner/name"

SourceLike = str | Path | SourceSpec | Mapping[str, object]


def open_source(
    place: SourceLike | Sequence[SourceLike],
    *,
    text_to_image: bool = False,
    preset: str | None = None,
    columns: Names | Mapping[str, object] | None = None,
    root: str | None = None,
) -> Source:
    """The source that a place holds; several of them are a mixture.

    Args:
        place: a folder, or the name of a .csv, .jsonl, .ndjson, .parquet or .tar file, with globs and {000..999} braces
            for parquet and tar, local or as a URL; `hf://datasets/owner/name[@revision][?config=…&split=…]`; or several
            of them, each as it is, as a SourceSpec, or as a mapping with its fields.
        text_to_image: a row may have no control: its cell is empty, or the source has no place for any.
        preset: a key of `qie.data.sources.PRESETS`: names of columns or folders as another tool has them.
        columns: names of columns, or of folders in a folder, by role: target, controls, prompt, mask, name.
        root: the folder or URL that relative paths in a table begin at.

    For entries of a mixture without a preset, columns or a root of their own, these three hold, too.

    Raises:
        SourceError: there is nothing of a kind that is understood.
        StoreError: a store cannot be reached or refuses.
    """
    return open_laid_out(place, Layout.of(preset, columns, root, text_to_image=text_to_image))


def open_laid_out(place: SourceLike | Sequence[SourceLike], layout: Layout) -> Source:
    """As `open_source`, with the layout as one value."""
    if isinstance(place, (str, Path)):
        alone = SourceSpec(str(place))
        if with_concepts([alone], layout) == [alone]:
            return _open(place, layout)
    several = [place] if isinstance(place, (str, Path, SourceSpec, Mapping)) else list(place)
    specs = with_concepts([SourceSpec.of(spec) for spec in several], layout)
    return Mixture.of([(spec, _open(spec.source, spec.layout.over(layout))) for spec in specs])


def _open(place: str | Path, layout: Layout) -> Source:
    text = str(place)
    scheme = scheme_of(text)
    if scheme is not None and scheme not in REMOTE_SCHEMES:
        raise SourceError(unreadable(scheme), where=place, expected=KINDS)
    if DatasetSource.is_hub_name(text):
        return DatasetSource.from_hub(text, layout)
    if scheme is None and local_path(text).is_dir():
        return _open_folder(LocalFolder(local_path(text)), layout)
    kind = next((kind for kind in (".csv", ".jsonl", ".ndjson", ".parquet", ".tar") if text.lower().endswith(kind)), "")
    if kind == ".csv":
        return CsvSource.open(File.at(text), layout)
    if kind in (".jsonl", ".ndjson"):
        return JsonlSource.open(File.at(text), layout)
    if kind == ".parquet":
        return ParquetSource.open(_files(text, kind), layout)
    if kind == ".tar":
        return TarSource.open(_files(text, kind), layout)
    if scheme is None:
        raise _no_source(text)
    return _open_folder(open_folder(text), layout)


def _files(place: str, ending: str) -> list[File]:
    """The files of a pattern, each once. Raises SourceError when a name that its braces spell out stands for none."""
    found: dict[str, File] = {}
    for name in spelled_out(place):
        files = matching_files(name, ending)
        if not files:
            raise SourceError(
                "the source has no files", where=name, expected=f"files ending in {ending}", found="nothing"
            )
        found.update((str(file), file) for file in files)
    return list(found.values())


def _open_folder(folder: Folder, layout: Layout) -> Source:
    """Folders of images come first: what else lies beside them does not make them something else."""
    names = [name for name in folder.names() if not name.startswith(".")]
    if any(name in names for name in TARGET_FOLDERS) or (layout.preset and PRESETS[layout.preset].columns is None):
        return FolderSource.open(folder, layout)
    if isinstance(folder, LocalFolder) and is_saved_dataset(names):
        return DatasetSource.from_disk(folder.root, layout)
    if parquet := [name for name in names if name.endswith(".parquet")]:
        return ParquetSource.open([File(folder, name) for name in parquet], layout)
    if tars := [name for name in names if name.endswith(".tar")]:
        return TarSource.open([File(folder, name) for name in tars], layout)
    if split := hub_split(folder, names):
        return ParquetSource.open(split.files, layout, split.note)
    return FolderSource.open(folder, layout)


def _no_source(place: str) -> SourceError:
    path = local_path(place)
    compressed = place.lower().endswith((".gz", ".tgz", ".zst", ".xz", ".bz2", ".zip"))
    return SourceError(
        "the source is neither a folder nor a file of a known kind",
        where=path,
        expected=f"a folder with {TARGET_FOLDERS[0]}/ and {CONTROL_FOLDERS[0]}/, or {KINDS.partition(', ')[2]}",
        found="a file" if path.exists() else "nothing",
        hint="unpack it first: qie reads rows in any order" if compressed else "correct data.source, or --source",
    )

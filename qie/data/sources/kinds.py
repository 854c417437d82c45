"""Which source a place holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qie.data.sources.csv import CsvSource
from qie.data.sources.folder import CONTROL_FOLDERS, TARGET_FOLDERS, FolderSource
from qie.data.sources.huggingface import DatasetSource, is_saved_dataset
from qie.data.sources.jsonl import JsonlSource
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


def open_source(place: SourceLike | Sequence[SourceLike], *, text_to_image: bool = False) -> Source:
    """The source that a place holds; several of them are a mixture.

    Args:
        place: a folder, or the name of a .csv, .jsonl, .ndjson, .parquet or .tar file, with globs and {000..999} braces
            for parquet and tar, local or as a URL; `hf://datasets/owner/name[@revision][?config=…&split=…]`; or several
            of them, each as it is, as a SourceSpec, or as a mapping with its fields.
        text_to_image: a row may have no control: its cell is empty, or the source has no place for any.

    Raises:
        SourceError: there is nothing of a kind that is understood.
        StoreError: a store cannot be reached or refuses.
    """
    if isinstance(place, (str, Path)):
        return _open(place, text_to_image)
    several = [place] if isinstance(place, (SourceSpec, Mapping)) else list(place)
    specs = [SourceSpec.of(spec) for spec in several]
    return Mixture.of([(spec, _open(spec.source, text_to_image)) for spec in specs])


def _open(place: str | Path, text_to_image: bool) -> Source:
    text = str(place)
    scheme = scheme_of(text)
    if scheme is not None and scheme not in REMOTE_SCHEMES:
        raise SourceError(unreadable(scheme), where=place, expected=KINDS)
    if DatasetSource.is_hub_name(text):
        return DatasetSource.from_hub(text, text_to_image=text_to_image)
    if scheme is None and local_path(text).is_dir():
        return _open_folder(LocalFolder(local_path(text)), text_to_image)
    kind = next((kind for kind in (".csv", ".jsonl", ".ndjson", ".parquet", ".tar") if text.lower().endswith(kind)), "")
    if kind == ".csv":
        return CsvSource.open(File.at(text), text_to_image=text_to_image)
    if kind in (".jsonl", ".ndjson"):
        return JsonlSource.open(File.at(text), text_to_image=text_to_image)
    if kind == ".parquet":
        return ParquetSource.open(_files(text, kind), text_to_image=text_to_image)
    if kind == ".tar":
        return TarSource.open(_files(text, kind), text_to_image=text_to_image)
    if scheme is None:
        raise _no_source(text)
    return _open_folder(open_folder(text), text_to_image)


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


def _open_folder(folder: Folder, text_to_image: bool) -> Source:
    """Folders of images come first: what else lies beside them does not make them something else."""
    names = [name for name in folder.names() if not name.startswith(".")]
    if any(name in names for name in TARGET_FOLDERS):
        return FolderSource.open(folder, text_to_image=text_to_image)
    if isinstance(folder, LocalFolder) and is_saved_dataset(names):
        return DatasetSource.from_disk(folder.root, text_to_image=text_to_image)
    if parquet := [name for name in names if name.endswith(".parquet")]:
        return ParquetSource.open([File(folder, name) for name in parquet], text_to_image=text_to_image)
    if tars := [name for name in names if name.endswith(".tar")]:
        return TarSource.open([File(folder, name) for name in tars], text_to_image=text_to_image)
    return FolderSource.open(folder, text_to_image=text_to_image)


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

"""Which source a place holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qie.data.sources.csv_source import CsvSource
from qie.data.sources.folder import CONTROL_FOLDERS, TARGET_FOLDERS, FolderSource
from qie.data.sources.huggingface import DatasetSource, is_saved_dataset
from qie.data.sources.jsonl_source import JsonlSource
from qie.data.sources.mixture import Mixture, SourceSpec
from qie.data.sources.parquet import ParquetSource
from qie.data.sources.places import REMOTE_SCHEMES, LocalPlace, Place, file_at, files_at, place_at
from qie.data.sources.source import Source
from qie.data.sources.tars import TarSource
from qie.errors import SourceError
from qie.paths import local_path
from qie.stores import scheme_of

KINDS = "a folder, .csv, .jsonl, .ndjson, .parquet, .tar, or hf://datasets/owner/name"

Places = str | Path | SourceSpec | Mapping[str, object]


def open_source(place: Places | Sequence[Places]) -> Source:
    """The source that a place holds; several of them are a mixture.

    Args:
        place: a folder, or the name of a .csv, .jsonl, .ndjson, .parquet or .tar file, with globs and {000..999} braces
            for parquet and tar, local or as a URL; `hf://datasets/owner/name[@revision][?config=…&split=…]`; or several
            of them, each as it is, as a SourceSpec, or as a mapping with its fields.

    Raises:
        SourceError: there is nothing of a kind that is understood.
        StoreError: a store cannot be reached or refuses.
    """
    if isinstance(place, (str, Path)):
        return _open(place)
    several = [place] if isinstance(place, (SourceSpec, Mapping)) else list(place)
    specs = [SourceSpec.of(spec) for spec in several]
    return Mixture.of([(spec, _open(spec.source)) for spec in specs])


def _open(place: str | Path) -> Source:
    text = str(place)
    scheme = scheme_of(text)
    if scheme is not None and scheme not in REMOTE_SCHEMES:
        why = "because they run a shell command" if scheme == "pipe" else "by qie"
        raise SourceError(f"{scheme}: URLs are not read {why}", where=place, expected=KINDS)
    if DatasetSource.is_hub_name(text):
        return DatasetSource.from_hub(text)
    if scheme is None and local_path(text).is_dir():
        return _open_folder(LocalPlace(local_path(text)))
    kind = next((kind for kind in (".csv", ".jsonl", ".ndjson", ".parquet", ".tar") if text.lower().endswith(kind)), "")
    if kind == ".csv":
        return CsvSource.open(*file_at(text))
    if kind in (".jsonl", ".ndjson"):
        return JsonlSource.open(*file_at(text))
    if kind == ".parquet":
        return ParquetSource.open(files_at(text, kind))
    if kind == ".tar":
        return TarSource.open([file for _, file in files_at(text, kind)])
    if scheme is None:
        raise _no_source(text)
    return _open_folder(place_at(text))


def _open_folder(place: Place) -> Source:
    """Folders of images come first: what else lies beside them does not make them something else."""
    names = place.names()
    files = [name for name in names if not name.startswith(".")]
    if any(name in files for name in TARGET_FOLDERS):
        return FolderSource.open(place)
    if isinstance(place, LocalPlace) and is_saved_dataset(files):
        return DatasetSource.from_disk(place.path)
    if parquet := [name for name in files if name.endswith(".parquet")]:
        return ParquetSource.open([(place, place.file(name)) for name in parquet])
    if tars := [name for name in files if name.endswith(".tar")]:
        return TarSource.open([place.file(name) for name in tars])
    return FolderSource.open(place)


def _no_source(place: str) -> SourceError:
    path = local_path(place)
    compressed = place.lower().endswith((".gz", ".tgz", ".zst", ".xz", ".bz2", ".zip"))
    return SourceError(
        "the source is no folder, nor a file of a known kind",
        where=path,
        expected=f"a folder with {TARGET_FOLDERS[0]}/ and {CONTROL_FOLDERS[0]}/, or {KINDS.partition(', ')[2]}",
        found="a file" if path.exists() else "nothing",
        hint="unpack it: rows are read in any order" if compressed else "correct data.source, or --source",
    )

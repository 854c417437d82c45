"""Datasets of the Hugging Face library: on the hub, or as `save_to_disk` wrote them.

Rows are taken from its Arrow tables as they are: its own decoding would give pictures instead of the bytes of their
files, of which content keys are hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from qie.data.sources.cells import Cells, Roles, checked_roles
from qie.data.sources.layouts import DEFAULT, Layout
from qie.data.sources.lines import require_unique
from qie.data.sources.resolve import image_roots, readable
from qie.data.sources.source import library
from qie.errors import SourceError
from qie.stores import Folder, LocalFolder
from qie.types import Row

_HUB = re.compile(
    r"hf://datasets/(?P<repo>[^/@?]+/[^/@?]+)(?:@(?P<revision>[^?/]+))?/?(?:\?(?P<query>.*))?", re.IGNORECASE
)


@dataclass(frozen=True)
class DatasetSource:
    """Rows of a dataset. Sent to another process, it is opened there again, at the same revision.

    Attributes:
        where: hub name or folder.
        label: stands for the names of rows that have none: label[0], label[1] …
        roots: the folders of images, for rows that hold paths instead; see `Cells`.
        roles: of the columns.
        dataset: the dataset, giving Arrow tables.
    """

    where: str
    label: str
    roots: tuple[Folder, ...]
    roles: Roles
    dataset: Any = field(compare=False, repr=False)

    @staticmethod
    def is_hub_name(place: str) -> bool:
        """Whether a place is a dataset on the hub, not a file or folder in one."""
        return _HUB.fullmatch(place) is not None

    @classmethod
    def from_hub(cls, place: str, layout: Layout = DEFAULT) -> DatasetSource:
        """Open a dataset of the hub, through its library's cache.

        Args:
            place: hf://datasets/owner/name[@revision][?config=…&split=…]; the split is train when none is given.

        Raises:
            SourceError: there is no such dataset, configuration or split, it cannot be reached, it lacks a column or
                holds no rows, or `datasets` is not installed.
        """
        from huggingface_hub.constants import HF_HUB_CACHE

        datasets = _datasets()
        match = _HUB.fullmatch(place)
        assert match is not None
        repo, revision, query = match["repo"], match["revision"], _options(match["query"])
        if unknown := set(query) - {"config", "split"}:
            raise SourceError(
                "the dataset has an unknown option", where=place, expected="config, split", found=", ".join(unknown)
            )
        if Path(repo).exists():
            raise SourceError(
                "a local folder has the name of the dataset and would be read instead", where=Path(repo).absolute()
            )
        split = query.get("split", "train")
        try:
            builder = datasets.load_dataset_builder(repo, name=query.get("config"), revision=revision)
            if features := getattr(getattr(builder, "info", None), "features", None):
                checked_roles(list(features), place, layout=layout)  # before terabytes are downloaded
            builder.download_and_prepare()
            dataset = builder.as_dataset(split=split)
        except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as error:
            raise SourceError("the dataset cannot be opened", where=place, found=str(error)) from error
        options = "&".join(f"{key}={value}" for key, value in query.items())
        pinned = f"hf://datasets/{repo}@{builder.hash or revision or 'main'}?{options}"
        # What a dataset of image files was downloaded to: its rows are paths there.
        cache = (LocalFolder(Path(datasets.config.HF_DATASETS_CACHE)), LocalFolder(Path(HF_HUB_CACHE)))
        return cls._of(dataset, pinned.rstrip("?"), repo.partition("/")[2], cache, layout)

    @classmethod
    def from_disk(cls, folder: Path, layout: Layout = DEFAULT) -> DatasetSource:
        """Open what `save_to_disk` wrote.

        Raises:
            SourceError: the folder holds several splits, is damaged, lacks a column or holds no rows, or `datasets` is
                not installed.
        """
        datasets = _datasets()
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
            if len(splits) == 1:
                whole = cls.from_disk(folder / splits[0], layout=layout)
                return replace(whole, label=folder.name)
            names = " or ".join(str(folder / split) for split in splits)
            raise SourceError("the dataset has several splits", where=folder, expected=f"one of them: {names}")
        try:
            dataset = datasets.load_from_disk(str(folder))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SourceError("the dataset cannot be opened", where=folder, found=str(error)) from error
        return cls._of(dataset, str(folder), folder.name, (LocalFolder(folder),), layout)

    @classmethod
    def _of(cls, dataset: Any, where: str, label: str, roots: tuple[Folder, ...], layout: Layout) -> DatasetSource:
        roles = checked_roles(dataset.column_names, where, layout=layout)
        if not len(dataset):
            raise SourceError("the dataset holds no rows", where=where)
        if layout.root:
            roots = (*image_roots(layout.root, roots[0]), *roots[1:])
        source = cls(where, label, roots, roles, dataset.select_columns(roles.used()).with_format("arrow"))
        if roles.name:
            source._check_names()
        return source

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.where, self.label, len(self), self.roles.layout)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        label = self._label(index)
        if self.roles.name is None:
            return label
        values = self.dataset.select_columns([self.roles.name])[range(len(self))[index]].to_pylist()[0]
        return Cells(values, self.roles, "", self.roots).name(label)

    def read(self, index: int) -> Row:
        index = range(len(self))[index]
        values = self.dataset[index].to_pylist()[0]
        cells = Cells(values, self.roles, f"{self.where}, row {index}", self.roots)
        return cells.row(index, cells.name(self._label(index)))

    def _label(self, index: int) -> str:
        return readable(f"{self.label}[{range(len(self))[index]}]")

    def _check_names(self) -> None:
        names: Iterable[Any] = self.dataset.select_columns([self.roles.name])[:][self.roles.name].to_pylist()
        hashes = (hash(str(name)) if name not in (None, "") else row for row, name in enumerate(names))
        require_unique(np.fromiter(hashes, np.int64, len(self)), self.name, self.where)


def is_saved_dataset(names: Iterable[str]) -> bool:
    """Whether files of these names are what `save_to_disk` writes."""
    names = set(names)
    return {"dataset_info.json", "state.json"} <= names or "dataset_dict.json" in names


def _options(query: str | None) -> dict[str, str]:
    """config=…&split=…; a + stays what it is, since split=train+test means both."""
    pairs = (pair.partition("=") for pair in (query or "").split("&") if pair)
    return {key: unquote(value) for key, _, value in pairs}


def _datasets() -> Any:
    datasets = library("datasets")
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise SourceError(
            "this version of datasets can run a dataset's own code",
            expected="datasets ≥ 4",
            found=datasets.__version__,
            hint='pip install -U "qie[datasets]"',
        )
    return datasets


def _reopened(where: str, label: str, rows: int, layout: Layout) -> DatasetSource:
    if DatasetSource.is_hub_name(where):
        source = DatasetSource.from_hub(where, layout=layout)
    else:
        source = DatasetSource.from_disk(Path(where), layout=layout)
    source = replace(source, label=label)
    if len(source) != rows:
        raise SourceError(
            "the source changed since it was opened", where=where, expected=f"{rows} rows", found=len(source)
        )
    return source

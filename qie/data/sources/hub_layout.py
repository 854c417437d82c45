"""The folder of a dataset as it is downloaded from the Hugging Face Hub: data/train-00000-of-00012.parquet …"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from qie.errors import SourceError
from qie.stores import File, Folder

_SPLIT = re.compile(r"(?P<split>.+?)-[0-9]{5}-of-[0-9]{5}(?:-[0-9a-f]+)?\.parquet")
_CONFIG = "default"


@dataclass(frozen=True)
class HubSplit:
    """The files of one split, in order, and what a user should know of it."""

    files: list[File]
    note: str


def hub_split(folder: Folder, names: Sequence[str]) -> HubSplit | None:
    """The split to read: train, or the only one. None when the folder is none of the Hub's.

    Args:
        folder: with data/*.parquet, or default/train/*.parquet as in the Hub's own conversion.
        names: of what lies directly in it.

    Raises:
        SourceError: there are several splits, none of which is train.
    """
    splits = _splits(folder, names)
    if not splits:
        return None
    if len(splits) == 1:
        return HubSplit(next(iter(splits.values())), "")
    if "train" not in splits:
        name, files = next(iter(splits.items()))
        pattern = f"{name}-*.parquet" if _SPLIT.fullmatch(files[0].name) else "*.parquet"
        raise SourceError(
            "the dataset has several splits, and none is called train",
            where=folder,
            found=", ".join(splits),
            hint=f"name the files of one, such as {files[0].folder}/{pattern}",
        )
    others = ", ".join(split for split in splits if split != "train")
    return HubSplit(splits["train"], f"{folder}: the split train is read, and not {others}")


def _splits(folder: Folder, names: Sequence[str]) -> dict[str, list[File]]:
    """The files of each split, by its name."""
    splits: dict[str, list[File]] = {}
    if "data" in names:
        for file in _parquet(folder.child("data")):
            match = _SPLIT.fullmatch(file.name)
            splits.setdefault(match["split"] if match else file.stem, []).append(file)
        if len(splits) > 1 and not any(_SPLIT.fullmatch(files[0].name) for files in splits.values()):
            return {"": [file for files in splits.values() for file in files]}
    elif _CONFIG in names:
        config = folder.child(_CONFIG)
        splits = {split: files for split in config.folders() if (files := _parquet(config.child(split)))}
    return splits


def _parquet(folder: Folder) -> list[File]:
    return [File(folder, name) for name in folder.names() if name.endswith(".parquet") and not name.startswith(".")]

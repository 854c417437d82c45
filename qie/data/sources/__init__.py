"""Sources: anything that yields rows. Opened cheaply; a row's bytes are read when it is asked for."""

from qie.data.sources.csv import CsvSource
from qie.data.sources.folder import CONTROL_FOLDERS, TARGET_FOLDERS, FolderSource
from qie.data.sources.huggingface import DatasetSource
from qie.data.sources.jsonl import JsonlSource
from qie.data.sources.kinds import open_source
from qie.data.sources.mixture import Mixture, MixturePart, SourceSpec
from qie.data.sources.parquet import ParquetSource
from qie.data.sources.source import Source, source_name
from qie.data.sources.tars import TarSource

__all__ = [
    "CONTROL_FOLDERS",
    "TARGET_FOLDERS",
    "CsvSource",
    "DatasetSource",
    "FolderSource",
    "JsonlSource",
    "Mixture",
    "MixturePart",
    "ParquetSource",
    "Source",
    "SourceSpec",
    "TarSource",
    "open_source",
    "source_name",
]

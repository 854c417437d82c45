"""Folders of files: on local disks, in object stores, over HTTP and on the Hugging Face Hub."""

from qie.stores.errors import (
    WHOLE_BYTES,
    MissingError,
    StoreError,
    TooLargeError,
    UnlistedError,
    WholeFilesError,
    require_whole,
)
from qie.stores.files import File
from qie.stores.folder import Folder, open_folder, scheme_of
from qie.stores.local import LocalFolder
from qie.stores.objects import ObjectFolder
from qie.stores.patterns import is_glob, spelled_out

__all__ = [
    "WHOLE_BYTES",
    "File",
    "Folder",
    "LocalFolder",
    "MissingError",
    "ObjectFolder",
    "StoreError",
    "TooLargeError",
    "UnlistedError",
    "WholeFilesError",
    "is_glob",
    "open_folder",
    "require_whole",
    "scheme_of",
    "spelled_out",
]

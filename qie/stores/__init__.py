"""Folders of files: on local disks, in object stores, over HTTP and on the Hugging Face Hub."""

from qie.stores.contract import (
    WHOLE_BYTES,
    ChangedError,
    Folder,
    MissingError,
    RefusedError,
    StoreError,
    TooLargeError,
    UnlistedError,
    WholeFilesError,
    require_whole,
)
from qie.stores.copies import local_copy
from qie.stores.disk import LocalFolder
from qie.stores.objects import ObjectFolder
from qie.stores.patterns import glob_files, is_glob, matching_files, spelled_out
from qie.stores.urls import REMOTE_SCHEMES, File, open_folder, scheme_of, unreadable

__all__ = [
    "REMOTE_SCHEMES",
    "WHOLE_BYTES",
    "ChangedError",
    "File",
    "Folder",
    "LocalFolder",
    "MissingError",
    "ObjectFolder",
    "RefusedError",
    "StoreError",
    "TooLargeError",
    "UnlistedError",
    "WholeFilesError",
    "glob_files",
    "is_glob",
    "local_copy",
    "matching_files",
    "open_folder",
    "require_whole",
    "scheme_of",
    "spelled_out",
    "unreadable",
]

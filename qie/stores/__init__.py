"""Folders of files: on local disks, in object stores, over HTTP and on the Hugging Face Hub."""

from qie.stores.errors import MissingError, StoreError
from qie.stores.files import File
from qie.stores.folder import Folder, open_folder, scheme_of
from qie.stores.local import LocalFolder
from qie.stores.patterns import is_glob, spelled_out

__all__ = [
    "File",
    "Folder",
    "LocalFolder",
    "MissingError",
    "StoreError",
    "is_glob",
    "open_folder",
    "scheme_of",
    "spelled_out",
]

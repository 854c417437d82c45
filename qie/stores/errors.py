"""What can go wrong with files in a store.

QieError
└── StoreError            a store cannot be reached, refuses, or gives other bytes than asked for
    └── MissingError      there is no such file
"""

from __future__ import annotations

from qie.errors import QieError


class StoreError(QieError):
    """A store cannot be reached, does not allow it, or broke its promise."""


class MissingError(StoreError):
    """There is no file of that name."""

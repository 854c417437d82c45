"""The families of models that qie knows: one file for each, one row here."""

from __future__ import annotations

from qie.families.edit import EDIT
from qie.families.edit_plus import EDIT_PLUS
from qie.families.family import NULL_PROMPT, Family, template_digest

__all__ = ["FAMILIES", "NULL_PROMPT", "Family", "template_digest"]

FAMILIES = {family.name: family for family in (EDIT, EDIT_PLUS)}

"""The families of models that qie knows: one file for each, one row here."""

from __future__ import annotations

from qie.families.edit import EDIT
from qie.families.edit_plus import EDIT_PLUS
from qie.families.family import NULL_PROMPT, Family, template_digest
from qie.families.qwen_image_21 import QWEN_IMAGE_21

__all__ = ["FAMILIES", "NULL_PROMPT", "Family", "template_digest"]

FAMILIES = {family.name: family for family in (EDIT, EDIT_PLUS, QWEN_IMAGE_21)}

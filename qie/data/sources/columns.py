"""What the columns of a table are called, and which of them says what. One list for CSV, JSONL, parquet and datasets.

Case does not matter, and of several names that a role goes by the first one listed here counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from qie.errors import SourceError

TARGET = ("path_target", "target_image", "target", "edited_image", "output_image", "image")
CONTROL = (
    "path_control", "control_images", "control_image", "control", "controls", "source_image", "input_image",
)  # fmt: skip
PROMPT = ("prompt", "caption", "instruction", "edit_prompt", "text")
PROMPT_LIST = ("prompts", "captions")
MASK = ("path_mask", "control_mask", "mask")
NAME = ("name", "id")


@dataclass(frozen=True)
class Roles:
    """Columns by what they say; None where no column says it.

    Attributes:
        target: the image to be learnt.
        control: the first image to edit, or a list of all.
        more_controls: numbers and columns of the further ones: control_1, control_2 …
        prompt: the instruction.
        more_prompts: numbers and columns of further captions: prompt_1, prompt_2 … Without a column `prompt`, prompt_1
            is the prompt.
        prompt_list: a column of several captions.
        mask: the mask.
        name: what the owner calls the row.
    """

    target: str | None
    control: str | None
    more_controls: tuple[tuple[int, str], ...]
    prompt: str | None
    more_prompts: tuple[tuple[int, str], ...]
    prompt_list: str | None
    mask: str | None
    name: str | None

    def used(self) -> list[str]:
        """The columns that are read."""
        single = (self.target, self.control, self.prompt, self.prompt_list, self.mask, self.name)
        numbered = (*self.more_controls, *self.more_prompts)
        return [column for column in (*single, *(column for _, column in numbered)) if column is not None]

    def missing(self) -> dict[str, tuple[str, ...]]:
        """The roles that no column has, and the names they go by."""
        absent = {
            "target image": None if self.target else TARGET,
            "control image": None if self.control else CONTROL,
            "prompt": None if self.prompt or self.prompt_list else (*PROMPT, *PROMPT_LIST),
        }
        return {role: names for role, names in absent.items() if names}


@lru_cache(maxsize=256)
def roles_of(columns: tuple[str, ...]) -> Roles:
    """Who says what. Raises ValueError when two columns have one name but for case and outer space."""
    known: dict[str, str] = {}
    for column in columns:
        folded = column.strip().lower()
        if folded in known and _is_understood(folded):
            raise ValueError(f"{known[folded]!r} and {column!r}")
        known.setdefault(folded, column)
    control, prompt, prompt_list = (_first(known, names) for names in (CONTROL, PROMPT, PROMPT_LIST))
    more_prompts = _numbered(known, prompt) if prompt else ()
    if prompt is None and prompt_list is None and (first := _first(known, (f"{name}_1" for name in PROMPT))):
        prompt, more_prompts = first, tuple((n - 1, column) for n, column in _numbered(known, first[:-2]) if n != 1)
    return Roles(
        target=_column(known, _first(known, TARGET)),
        control=_column(known, control),
        more_controls=_numbered(known, control) if control else (),
        prompt=_column(known, prompt),
        more_prompts=more_prompts,
        prompt_list=_column(known, prompt_list),
        mask=_column(known, _first(known, MASK)),
        name=_column(known, _first(known, NAME)),
    )


def checked_roles(columns: Iterable[str], where: object, hint: str | None = None) -> Roles:
    """The roles of a table's columns. Raises SourceError when a required one is missing or two are the same."""
    columns = tuple(columns)
    try:
        roles = roles_of(columns)
    except ValueError as error:
        raise SourceError("two columns have the same name", where=where, found=str(error)) from error
    for role, names in roles.missing().items():
        raise SourceError(
            f"no column holds the {role}",
            where=where,
            expected="one of " + ", ".join(names),
            found=", ".join(columns[:20]) + (f", … ({len(columns)} columns)" if len(columns) > 20 else "")
            or "no columns",
            hint=hint or "rename a column",
        )
    return roles


def _first(known: dict[str, str], names: Iterable[str]) -> str | None:
    return next((name for name in names if name in known), None)


def _column(known: dict[str, str], folded: str | None) -> str | None:
    return None if folded is None else known[folded]


def _numbered(known: dict[str, str], folded: str) -> tuple[tuple[int, str], ...]:
    pattern = re.compile(rf"{re.escape(folded)}_([0-9]+)")
    return tuple(sorted((int(match[1]), known[name]) for name in known if (match := pattern.fullmatch(name))))


def _is_understood(folded: str) -> bool:
    """Whether a column of this name can have a role."""
    names = (*TARGET, *CONTROL, *PROMPT, *PROMPT_LIST, *MASK, *NAME)
    return re.sub(r"_[0-9]+$", "", folded) in names or folded in names

"""From a table's columns and cells to Rows: the role of each column, and the content of its cells.

One list of names for CSV, JSONL, parquet, datasets and tars. Case does not matter, and of several names that a role
goes by, the first one listed here counts.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from qie.data.sources.layouts import DEFAULT, PRESETS, Layout, Names, fitting_preset
from qie.data.sources.resolve import named_bytes, readable
from qie.data.sources.source import TEXT_TO_IMAGE
from qie.errors import RowError, SourceError
from qie.recipe import normal_prompt
from qie.stores import Folder
from qie.types import Row

TARGET = ("path_target", "target_image", "target", "edited_image", "output_image", "image")
CONTROL = (
    "path_control", "control_images", "control_image", "control", "controls", "source_image", "input_image",
)  # fmt: skip
PROMPT = ("prompt", "caption", "instruction", "edit_prompt", "text")
PROMPT_LIST = ("prompts", "captions")
MASK = ("path_mask", "control_mask", "mask")
REJECTED = ("path_rejected", "rejected_image", "rejected")
NAME = ("name", "id")

_NO_BYTES = {"bytes": None, "path": None}
"""What a dataset's column of images holds where there is none."""
_NO_IMAGE: tuple[object, ...] = (None, "", [], _NO_BYTES)
_TYPES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bytes: "bytes",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "nothing",
}


@dataclass(frozen=True)
class Roles:
    """The column of each role; None where there is none.

    Attributes:
        target: the image to be learnt.
        control: the first image to edit, or a list of all.
        more_controls: numbers and columns of the further ones: control_1, control_2 …
        prompt: the instruction.
        more_prompts: numbers and columns of further captions: prompt_1, prompt_2 … Without a column `prompt`, prompt_1
            is the prompt.
        prompt_list: a column of several captions.
        mask: the mask.
        rejected: an image that is liked less than the target.
        name: what the owner calls the row.
        layout: what the owner says of it.
    """

    target: str | None
    control: str | None
    more_controls: tuple[tuple[int, str], ...]
    prompt: str | None
    more_prompts: tuple[tuple[int, str], ...]
    prompt_list: str | None
    mask: str | None
    rejected: str | None
    name: str | None
    layout: Layout = DEFAULT

    @property
    def text_to_image(self) -> bool:
        """A row may have no control."""
        return self.layout.text_to_image

    def used(self) -> list[str]:
        """The columns that are read."""
        single = (self.target, self.control, self.prompt, self.prompt_list, self.mask, self.rejected, self.name)
        numbered = (*self.more_controls, *self.more_prompts)
        return [column for column in (*single, *(column for _, column in numbered)) if column is not None]

    def missing(self) -> dict[str, tuple[str, ...]]:
        """The roles that no column has, and the names they go by."""
        names = self.layout.columns
        prompts = (names.prompt,) if names.prompt else (*PROMPT, *PROMPT_LIST)
        absent = {
            "target image": None if self.target else (names.target,) if names.target else TARGET,
            "control image": None if self.control or self.text_to_image else names.controls or CONTROL,
            "prompt": None if self.prompt or self.prompt_list else prompts,
        }
        return {role: names for role, names in absent.items() if names}


@lru_cache(maxsize=256)
def roles_of(columns: tuple[str, ...], layout: Layout = DEFAULT) -> Roles:
    """The roles of columns. Raises ValueError when two columns have one name but for case and outer space."""
    known: dict[str, str] = {}
    names = layout.columns
    given = {name.strip().lower() for name in names.given()}
    for column in columns:
        folded = column.strip().lower()
        if folded in known and (folded in given or _is_understood(folded)):
            raise ValueError(f"{known[folded]!r} and {column!r}")
        known.setdefault(folded, column)
    control, more_controls = _controls(known, names)
    prompt, more_prompts, prompt_list = _prompts(known, names)
    return Roles(
        target=_column(known, _named(known, names.target, TARGET)),
        control=_column(known, control),
        more_controls=more_controls,
        prompt=_column(known, prompt),
        more_prompts=more_prompts,
        prompt_list=_column(known, prompt_list),
        mask=_column(known, _named(known, names.mask, MASK)),
        rejected=_column(known, _named(known, names.rejected, REJECTED)),
        name=_column(known, _named(known, names.name, NAME)),
        layout=layout,
    )


def _controls(known: dict[str, str], names: Names) -> tuple[str | None, tuple[tuple[int, str], ...]]:
    """The first control's column, and the numbered further ones."""
    if names.controls is None:
        control = _first(known, CONTROL)
        return control, _numbered(known, control) if control else ()
    given = [name.strip().lower() for name in names.controls]
    if names.numbered and given[0] not in known:
        numbered = _numbered(known, given[0])  # name_0, name_1 …: the first number is the first control's
        first = next((column.strip().lower() for number, column in numbered if number == 0), None)
        return first, tuple((number, column) for number, column in numbered if number)
    further = [(number, known[name]) for number, name in enumerate(given[1:], 1) if name in known]
    return given[0] if given and given[0] in known else None, tuple(further)


def _prompts(known: dict[str, str], names: Names) -> tuple[str | None, tuple[tuple[int, str], ...], str | None]:
    """The prompt's column, the numbered further ones, and that of several captions, which a named one may hold."""
    if names.prompt is not None:
        return None, (), _named(known, names.prompt, ())
    prompt, prompt_list = _first(known, PROMPT), _first(known, PROMPT_LIST)
    more = _numbered(known, prompt) if prompt else ()
    if prompt is None and prompt_list is None and (first := _first(known, (f"{name}_1" for name in PROMPT))):
        prompt, more = first, tuple((n - 1, column) for n, column in _numbered(known, first[:-2]) if n != 1)
    return prompt, more, prompt_list


def checked_roles(columns: Iterable[str], where: object, hint: str | None = None, *, layout: Layout = DEFAULT) -> Roles:
    """The roles of a table's columns.

    Raises SourceError when required ones or named ones are missing, all in one, or when two columns are the same.
    """
    columns = tuple(columns)
    try:
        roles = roles_of(columns, layout)
    except ValueError as error:
        raise SourceError("two columns have the same name", where=where, found=str(error)) from error
    missing = roles.missing()
    absent = _absent(columns, layout, missing)
    unnamed = layout.text_to_image and roles.control is None and layout == Layout(text_to_image=True)
    preset = None if layout.preset else fitting_preset(columns)
    if unnamed and preset and not missing:  # rows that have controls would be taken for text-to-image
        missing = {"control image": CONTROL}
    if not missing and not absent:
        return roles
    words = [f"no column holds the {' or the '.join(missing)}"] if missing else []
    words += [f"there is no column {' or '.join(absent)}"] if absent else []
    several = len(missing) > 1
    expected = [f"{role}: {_one_of(names)}" if several else _one_of(names) for role, names in missing.items()]
    raise SourceError(
        "; ".join(words),
        where=where,
        expected="\n".join(expected) or ", ".join(absent),
        found=", ".join(columns[:20]) + (f", … ({len(columns)} columns)" if len(columns) > 20 else "") or "no columns",
        hint=_advice(preset, hint, "control image" in missing),
    )


def _absent(columns: tuple[str, ...], layout: Layout, missing: Mapping[str, object]) -> list[str]:
    """The columns that the owner named and that are not there, of roles that are not missing as a whole."""
    known = {column.strip().lower() for column in columns}
    given = layout.names.given().items()
    return [name for name, role in given if name.strip().lower() not in known and role not in missing]


def _one_of(names: tuple[str, ...]) -> str:
    return ("one of " if len(names) > 1 else "") + ", ".join(names)


def _advice(preset: str | None, hint: str | None, controls: bool) -> str:
    if preset:
        return f"this looks like {PRESETS[preset].title}: set data.preset: {preset}"
    return hint or (
        "rename a column, or name it, for example data.columns: {target: edited, controls: [source], prompt: text}"
        + (TEXT_TO_IMAGE if controls else "")
    )


def _named(known: dict[str, str], given: str | None, names: Iterable[str]) -> str | None:
    """A role's column: the one that the owner names, or else one of qie's own names."""
    if given is None:
        return _first(known, names)
    folded = given.strip().lower()
    return folded if folded in known else None


def _first(known: dict[str, str], names: Iterable[str]) -> str | None:
    return next((name for name in names if name in known), None)


def _column(known: dict[str, str], folded: str | None) -> str | None:
    return None if folded is None else known[folded]


def _numbered(known: dict[str, str], folded: str) -> tuple[tuple[int, str], ...]:
    pattern = re.compile(rf"{re.escape(folded)}_([0-9]+)")
    return tuple(sorted((int(match[1]), known[name]) for name in known if (match := pattern.fullmatch(name))))


def _is_understood(folded: str) -> bool:
    """Whether a column of this name can have a role."""
    names = (*TARGET, *CONTROL, *PROMPT, *PROMPT_LIST, *MASK, *REJECTED, *NAME)
    return re.sub(r"_[0-9]+$", "", folded) in names or folded in names


@dataclass(frozen=True)
class Cells:
    """The cells of one row.

    Attributes:
        values: by column. None is a cell that was not given, and so is an empty text, except as the prompt.
        roles: of the columns.
        where: file and line, for messages.
        roots: the folders in which a row may name files, its paths being relative to the first; none where images are
            never paths.
    """

    values: Mapping[str, object]
    roles: Roles
    where: str
    roots: tuple[Folder, ...] = ()

    def row(self, index: int, name: str) -> Row:
        """The row with its bytes.

        Raises:
            RowError: something is missing, of another type, or cannot be read.
            StoreError: a store is at fault, not the row.
        """
        roles = self.roles
        for role in roles.missing():
            raise self._missing(role)
        prompt, *more_prompts = self._prompts()
        target = self._images(roles.target, "target image")
        if len(target) != 1:
            raise RowError("several target images", where=f"{self.where}, column {roles.target}", found=len(target))
        return Row(
            index=index,
            name=name,
            target=target[0],
            controls=self._controls(),
            prompt=prompt,
            more_prompts=tuple(more_prompts),
            mask=self._optional(self.roles.mask),
            rejected=self._optional(self.roles.rejected),
        )

    def name(self, otherwise: str) -> str:
        """The owner's name of the row: the cell of the name column, if there is one."""
        value = self.values.get(self.roles.name) if self.roles.name else None
        given = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
        return readable(str(value)) if given else otherwise

    def paths(self) -> list[str]:
        """The paths and URLs of its images, as they are written."""
        roles = self.roles
        further = (column for _, column in roles.more_controls)
        columns = (roles.target, roles.control, *further, roles.mask, roles.rejected)
        cells = [self.values.get(column) for column in columns if column]
        flat = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell])]
        texts = [one.get("path") if isinstance(one, dict) and one.get("bytes") is None else one for one in flat]
        return [text for text in texts if isinstance(text, str) and text and text[:5].lower() != "data:"]

    def _controls(self) -> tuple[bytes, ...]:
        further, control = self._numbered(self.roles.more_controls, "controls"), self.roles.control
        if self.roles.text_to_image and not further and (control is None or self.values.get(control) in _NO_IMAGE):
            return ()
        return (
            *self._images(control, "control image"),
            *(self._image(column, self.values[column]) for column in further),
        )

    def _optional(self, column: str | None) -> bytes | None:
        return self._image(column, self.values[column]) if column and self._given(column) else None

    def _images(self, column: str | None, role: str) -> list[bytes]:
        value = self.values.get(column) if column else None
        if column is None or value in (None, "", []):
            raise self._missing(role)
        return [self._image(column, entry) for entry in (value if isinstance(value, list) else [value])]

    def _image(self, column: str, value: object) -> bytes:
        try:
            content = _inline(value) if isinstance(value, dict) else value
            if isinstance(content, str) and content[:5].lower() == "data:":
                return _data_url(content)
            if isinstance(content, str) and content and self.roots:
                return named_bytes(content, self.roots)
        except RowError as error:
            error.what = f"{column}: {error.what}"  # which of a row's images, in the list of skipped rows
            raise
        except ValueError as error:
            raise RowError(
                f"{column}: an image cannot be read",
                where=f"{self.where}, column {column}",
                found=f"{str(value)[:80]!r}: {error}",
            ) from error
        if content is None or content in ("", b""):
            raise RowError(f"{column}: an image is empty", where=f"{self.where}, column {column}")
        if not isinstance(content, bytes):
            raise self._wrong(column, "a path, a URL or an image", content)
        return content

    def _prompts(self) -> list[str]:
        """All captions, the prompt first. A list may start with the prompt that has a column of its own, too."""
        roles = self.roles
        first = self._text(roles.prompt, self.values.get(roles.prompt)) if roles.prompt else None
        listed = self.values.get(roles.prompt_list) if roles.prompt_list else None
        several = listed if isinstance(listed, list) else [] if listed in (None, "") else [listed]
        texts = [self._text(roles.prompt_list, value) for value in several]
        if first is not None and (first or not texts) and texts[:1] != [first]:
            texts.insert(0, first)
        texts += [self._text(column, self.values[column]) for column in self._numbered(roles.more_prompts, "prompts")]
        if not texts:
            raise self._missing("prompt")
        captions = [text for text in texts if text is not None]
        if len(captions) < len(texts):
            raise RowError("a caption is empty", where=f"{self.where}, column {roles.prompt_list}")
        return captions

    def _text(self, column: str | None, value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._wrong(column, "text", value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                "text is not Unicode", where=f"{self.where}, column {column}", found=ascii(value[error.start])
            ) from error
        return normal_prompt(value)

    def _numbered(self, columns: tuple[tuple[int, str], ...], what: str) -> list[str]:
        """The given ones of numbered columns. Raises RowError for a gap."""
        given = [(number, column) for number, column in columns if self._given(column)]
        if [number for number, _ in given] != list(range(1, len(given) + 1)):
            raise RowError(
                f"its {what} are not numbered 1, 2, 3 … without gaps",
                where=self.where,
                found=", ".join(column for _, column in given),
            )
        return [column for _, column in given]

    def _given(self, column: str) -> bool:
        value = self.values.get(column)
        return value not in (None, "", _NO_BYTES)

    def _missing(self, role: str) -> RowError:
        present = ", ".join(list(self.values)[:20])
        return RowError(f"no {role}", where=self.where, found=f"columns {present}" if present else "no columns")

    def _wrong(self, column: str | None, expected: str, value: object) -> RowError:
        found = _TYPES.get(type(value), type(value).__name__)
        return RowError(f"{column}: {found} instead of {expected}", where=f"{self.where}, column {column}")


def _inline(value: dict[str, object]) -> object:
    """The image in {"bytes": …, "path": …}; JSON holds bytes as base64. Any other object is returned as it is."""
    content = value.get("bytes")
    if content is None:
        return value.get("path", None if "bytes" in value else value)
    return base64.b64decode(content, validate=True) if isinstance(content, str) else content


def _data_url(text: str) -> bytes:
    kind, comma, content = text.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise ValueError("a data: URL without ;base64,")
    return base64.b64decode(content, validate=True)

"""From the cells of a row to the Row: text, paths, URLs, bytes and lists of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from qie.data.sources.columns import Roles
from qie.data.sources.files import readable
from qie.data.sources.places import Place, bytes_named
from qie.errors import RowError
from qie.recipe import normal_prompt
from qie.types import Row

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
class Cells:
    """The cells of one row.

    Attributes:
        values: by column. None is a cell that was not given, and so is an empty text, except as the prompt.
        roles: which column says what.
        where: file and line, for messages.
        place: the folder in which paths are; None where images are never paths.
    """

    values: Mapping[str, object]
    roles: Roles
    where: str
    place: Place | None = None

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
            mask=self._mask(),
        )

    def name(self, otherwise: str) -> str:
        """What the owner calls the row: the cell of the column for it, if it has one."""
        value = self.values.get(self.roles.name) if self.roles.name else None
        given = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
        return readable(str(value)) if given else otherwise

    def _controls(self) -> tuple[bytes, ...]:
        further = self._numbered(self.roles.more_controls, "controls")
        return (
            *self._images(self.roles.control, "control image"),
            *(self._image(column, self.values[column]) for column in further),
        )

    def _mask(self) -> bytes | None:
        column = self.roles.mask
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
            if isinstance(content, str) and content and self.place:
                return bytes_named(content, self.place)
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
        return value not in (None, "", {"bytes": None, "path": None})

    def _missing(self, role: str) -> RowError:
        present = ", ".join(list(self.values)[:20])
        return RowError(f"no {role}", where=self.where, found=f"columns {present}" if present else "no columns")

    def _wrong(self, column: str | None, expected: str, value: object) -> RowError:
        found = _TYPES.get(type(value), type(value).__name__)
        return RowError(f"{column}: {found} instead of {expected}", where=f"{self.where}, column {column}")


def _inline(value: dict[str, object]) -> object:
    """What is in {"bytes": …, "path": …}; JSON holds bytes as base64. The object itself when it is another one."""
    content = value.get("bytes")
    if content is None:
        return value.get("path", None if "bytes" in value else value)
    return base64.b64decode(content, validate=True) if isinstance(content, str) else content


def _data_url(text: str) -> bytes:
    kind, comma, content = text.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise ValueError("a data: URL without ;base64,")
    return base64.b64decode(content, validate=True)

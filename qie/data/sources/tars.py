"""Raw WebDataset tars: members of one key are a row.

Keys are webdataset's own: `dir/000.control_1.png` is the member `control_1.png` of the row `dir/000`. Members of a row
are adjacent.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qie.data.sources.cells import NAME, PROMPT, PROMPT_LIST, Cells, checked_roles, roles_of
from qie.data.sources.layouts import DEFAULT, Layout, Names
from qie.data.sources.lines import equal_pairs
from qie.data.sources.resolve import MAX_TEXT_BYTES, readable, source_bytes, source_size
from qie.data.sources.tar_members import iter_members
from qie.errors import RowError, SourceError
from qie.image_formats import IMAGE_SUFFIXES
from qie.stores import WHOLE_BYTES, File, TooLargeError, require_whole
from qie.types import Row

HEADER_BUFFER_BYTES = 256 * 2**10
PARALLEL_TARS = 16

# webdataset.tariterators.base_plus_ext, and the members that its tar_file_iterator passes over. Hidden files are passed
# over in folders, too: of the `d/._x.png` that macOS packs beside `d/x.png` webdataset makes a row `d/`.
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")
_TEXT = re.compile(rf"({'|'.join(PROMPT)})(_[0-9]+)?")
_SHORT = {"": "image", "source": "source_image", "input": "input_image"}
_JSON = "json"


@dataclass(frozen=True)
class TarRows:
    """Where the rows of a tar are.

    Attributes:
        file: the tar.
        size: its bytes when it was opened.
        endings: what follows the key in members' names, each once.
        members: [members, 3] offset, bytes and ending of each.
        stops: [rows] the number of members up to the end of each row.
        keys: all rows' keys, UTF-8, one after the other.
        key_stops: [rows] where each key ends.
    """

    file: File
    size: int
    endings: tuple[str, ...]
    members: NDArray[np.int64] = field(compare=False, repr=False)
    stops: NDArray[np.int64] = field(compare=False, repr=False)
    keys: bytes = field(repr=False)
    key_stops: NDArray[np.int64] = field(compare=False, repr=False)

    @classmethod
    def open(cls, file: File) -> TarRows:
        """Read the headers. Raises SourceError when it is not there, cut, or holds a member or a row twice."""
        size = source_size(file)
        endings: dict[str, int] = {}
        members, stops, key_stops, hashes, keys = array("q"), array("q"), array("q"), array("q"), bytearray()
        current, seen = None, set[str]()
        with file.open(HEADER_BUFFER_BYTES) as stream:
            for name, offset, file_bytes in iter_members(stream, size, file):
                match = _MEMBER.fullmatch(name)
                if match is None or _META.match(name) or match[1].endswith("/"):
                    continue
                key, ending = match[1], match[2].lower()
                if key != current:
                    if current is not None:
                        stops.append(len(members) // 3)
                    current = key
                    seen.clear()
                    keys += key.encode("utf-8", "surrogateescape")
                    key_stops.append(len(keys))
                    hashes.append(hash(key))
                if ending in seen:
                    raise SourceError("the tar holds a file twice", where=f"{file}, byte {offset}", found=name)
                seen.add(ending)
                members.extend((offset, file_bytes, endings.setdefault(ending, len(endings))))
        if current is not None:
            stops.append(len(members) // 3)
        shaped = np.array(members, np.int64).reshape(-1, 3)
        tar = cls(file, size, tuple(endings), shaped, np.array(stops), bytes(keys), np.array(key_stops))
        tar._check_keys(hashes)
        return tar

    def __len__(self) -> int:
        return len(self.stops)

    def key(self, row: int) -> str:
        start = int(self.key_stops[row - 1]) if row else 0
        return self.keys[start : int(self.key_stops[row])].decode("utf-8", "surrogateescape")

    def _check_keys(self, hashes: array[int]) -> None:
        for first, second in equal_pairs(np.frombuffer(hashes, np.int64)):
            if self.key(first) == self.key(second):
                raise SourceError(
                    "two rows have the same name",
                    where=f"{self.file}, byte {self.members[self.stops[second - 1], 0]}",
                    found=f"{readable(self.key(second))}, with other rows between its files",
                    hint="give each row a key of its own; pack the files of a row together, as with tar --sort=name",
                )

    def row(self, row: int) -> dict[str, tuple[int, int]]:
        """Offset and bytes of the row's members, by ending."""
        start = int(self.stops[row - 1]) if row else 0
        members = self.members[start : int(self.stops[row])].tolist()
        return {self.endings[ending]: (offset, size) for offset, size, ending in members}


@dataclass(frozen=True)
class TarSource:
    """Rows of WebDataset tars, in the order of the tars and in theirs.

    target.png, or one image alone      the target; columns' names count as well: edited_image.webp
    control.png, control_1.png …        the controls; source.png and input.png as well
    txt, prompt.txt, caption            the prompt; prompt_1.txt … are further ones
    json                                without those: an object with a prompt, named as columns are
    mask.png                            the mask
    rejected.png                        the rejected target
    """

    tars: tuple[TarRows, ...]
    starts: tuple[int, ...]
    rows: int
    layout: Layout = DEFAULT

    @classmethod
    def open(cls, files: Sequence[File], layout: Layout = DEFAULT) -> TarSource:
        """Read the headers of all tars; remote ones several at once, in requests of 256 kB.

        Raises:
            SourceError: a tar is not there, cut or damaged, there are no rows, or no member holds a target, control or
                prompt.
        """
        threads = 1 if all(file.path for file in files) else PARALLEL_TARS
        with ThreadPoolExecutor(threads) as pool:
            tars = tuple(pool.map(TarRows.open, files))
        stops = np.cumsum([len(tar) for tar in tars]).tolist()
        if not stops or not stops[-1]:
            raise SourceError(
                "the tar holds no rows",
                where=files[0] if files else None,
                expected="members such as 000.target.png",
            )
        endings = sorted({ending for tar in tars for ending in tar.endings})
        layout = _of_members(layout)
        prompt = layout.names.prompt or PROMPT[0]
        columns = dict.fromkeys(column for ending in endings if (column := _column(ending, prompt)))
        columns |= dict.fromkeys((prompt,) if _JSON in endings else ())
        checked_roles(columns, files[0], _present(endings), layout=layout)
        return cls(tars, (0, *stops[:-1]), stops[-1], layout)

    def __len__(self) -> int:
        return self.rows

    def name(self, index: int) -> str:
        tar, row = self._find(index)
        return readable(f"{tar.file.name}/{tar.key(row)}")

    def read(self, index: int) -> Row:
        tar, row = self._find(index)
        return _cells(tar, row, self.layout).row(range(self.rows)[index], self.name(index))

    def _find(self, index: int) -> tuple[TarRows, int]:
        index = range(self.rows)[index]
        number = bisect_right(self.starts, index) - 1
        return self.tars[number], index - self.starts[number]


def _cells(tar: TarRows, row: int, layout: Layout) -> Cells:
    """The cells of a row. Raises RowError for two members of one role, or a text that is not UTF-8."""
    where = f"{tar.file}, {tar.key(row)}"
    members = tar.row(row)
    prompt = layout.names.prompt or PROMPT[0]
    endings: dict[str, str] = {}
    for ending in members:
        if (column := _column(ending, prompt)) and endings.setdefault(column, ending) != ending:
            raise RowError("two files of a row have the same role", where=where, found=f"{endings[column]}, {ending}")
    roles = roles_of(tuple(endings), layout)
    values: dict[str, object] = dict.fromkeys(endings)
    for column in roles.used():
        is_text = _is_text(column) or column == prompt
        content = _member(tar, members[endings[column]], MAX_TEXT_BYTES if is_text else WHOLE_BYTES, where)
        values[column] = _text(content, where) if is_text else content
    if roles.prompt is None and roles.prompt_list is None and _JSON in members:
        values.update(_prompts(_text(_member(tar, members[_JSON], MAX_TEXT_BYTES, where), where), where, prompt))
    return Cells(values, roles_of(tuple(values), layout), where)


def _of_members(layout: Layout) -> Layout:
    """The layout with the names of columns that members stand for."""
    names = layout.columns
    if names == Names():
        return layout

    def column(name: str | None) -> str | None:
        return None if name is None else _SHORT.get(name.strip().lower(), name.strip().lower())

    controls = None if names.controls is None else tuple(column(name) or "" for name in names.controls)
    prompt = None if names.prompt is None else names.prompt.strip().lower()
    target, mask, rejected = map(column, (names.target, names.mask, names.rejected))
    names = replace(names, controls=controls, prompt=prompt, target=target, mask=mask, rejected=rejected)
    return replace(layout, names=names, preset=None)


def _member(tar: TarRows, place: tuple[int, int], most: int, where: str) -> bytes:
    offset, size = place
    try:
        require_whole(size, where, most)
    except TooLargeError as error:
        raise RowError(error.what, where=where, expected=error.expected, found=error.found) from error
    return source_bytes(tar.file, offset, offset + size, tar.size)


def _prompts(text: str, where: str, prompt: str) -> dict[str, object]:
    """The prompts in a JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("the row's .json is not valid JSON", where=where, found=str(error)) from error
    if not isinstance(values, dict):
        raise RowError("the row's .json is not a JSON object", where=where, found=type(values).__name__)
    return {
        name: value
        for name, value in values.items()
        if _is_text(name.lower()) or name.lower() in (*PROMPT_LIST, prompt)
    }


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowError("the prompt is not UTF-8", where=where, found=f"byte {content[error.start]:#x}") from error


@lru_cache(maxsize=1024)
def _column(ending: str, prompt: str = PROMPT[0]) -> str | None:
    """The column that a member stands for; `prompt` is one of texts."""
    stem, _, last = ending.rpartition(".")
    if f".{last}" in IMAGE_SUFFIXES:
        column = _SHORT.get(stem, stem)
        return None if _is_text(column) or column in (*PROMPT_LIST, *NAME) else column
    if last == "txt":
        return "text" if not stem else stem if _is_text(stem) or stem == prompt else None
    return ending if _is_text(ending) or ending == prompt else None


def _is_text(column: str) -> bool:
    return _TEXT.fullmatch(column) is not None


def _present(endings: Sequence[str]) -> str:
    shown = ", ".join(endings[:12]) or "nothing"
    return f"name members key.target.png, key.control.png, key.txt; here they end in {shown}"

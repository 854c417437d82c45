"""Folders of rows: layouts, order, pairing, and a reason for every row that cannot be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from qie.data.sources import Source, open_source, source_notes
from qie.data.sources.folder import FolderSource
from qie.data.sources.folder_names import CONTROL_FOLDERS, TARGET_FOLDERS
from qie.errors import RowError, SourceError
from qie.image_formats import IMAGE_SUFFIXES
from qie.stores import disk
from qie.types import Row
from tests.sources.tables import names, refused


class Folder:
    """A source being written, with a row `a`. Files hold what they are called, with the role of their folder."""

    def __init__(self, root: Path, targets: str = TARGET_FOLDERS[0], controls: str = CONTROL_FOLDERS[0]) -> None:
        self.root, self.folders = root, {"targets": root / targets, "controls": root / controls}
        for folder in self.folders.values():
            folder.mkdir(parents=True)
        self.add("targets/a.png", "controls/a.png", "targets/a.txt")

    def path(self, name: str) -> Path:
        role, _, file = name.partition("/")
        return self.folders[role] / file

    def add(self, *names: str, content: bytes | None = None) -> None:
        for name in names:
            self.path(name).write_bytes(name.encode() if content is None else content)

    def open(self) -> Source:
        return open_source(self.root)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "rows")


def row(stem: str, target: str = "", control: str = "", *, more: Sequence[str] = (), **given: object) -> dict:
    """What a row should be: what files of its own name make it, unless another one is named."""
    made = {
        "name": stem,
        "target": target or f"targets/{stem}.png",
        "controls": [control or f"controls/{stem}.png", *more],
        "mask": None,
        "prompts": [f"targets/{stem}.txt"],
    }
    return made | given


def as_files(row: Row) -> dict:
    return {
        "name": row.name,
        "target": row.target.decode(),
        "controls": [control.decode() for control in row.controls],
        "mask": row.mask and row.mask.decode(),
        "prompts": [row.prompt, *row.more_prompts],
    }


def files(*stems: str) -> list[str]:
    return [name for stem in stems for name in (f"targets/{stem}.png", f"controls/{stem}.png", f"targets/{stem}.txt")]


SHUFFLED = (2, 1, 10, 3, 4, 5, 6, 7, 8, 9)
JUNK = ("._a.png", ".b.png", ".DS_Store", "._a.txt")  # macOS leaves `._a.png` beside `a.png`, and an editor its own

PAIRED: dict[str, tuple[list[str], list[dict]]] = {
    "rows are in the order of their names however they were written": (
        files("b", "a10", "a2", "Z", "é", "a-1", "a_1"),
        [row(stem) for stem in ("Z", "a", "a-1", "a10", "a2", "a_1", "b", "é")],
    ),
    "the order does not depend on endings": (  # "-" stands before ".", so the file names are in the other order
        ["targets/a-b.bmp", "controls/a-b.png", "targets/a-b.txt"],
        [row("a"), row("a-b", "targets/a-b.bmp")],
    ),
    **{
        f"a target in {ending}": (
            [f"targets/b{ending}", "controls/b.jpg", "targets/b.txt"],
            [row("a"), row("b", f"targets/b{ending}", "controls/b.jpg")],
        )
        for ending in (*IMAGE_SUFFIXES, ".PNG", ".Jpg")
    },
    **{
        f"a control in {ending}": (
            ["targets/b.webp", f"controls/b{ending}", "targets/b.txt"],
            [row("a"), row("b", "targets/b.webp", f"controls/b{ending}")],
        )
        for ending in (*IMAGE_SUFFIXES, ".PNG", ".Jpg")
    },
    "a stem may contain dots": (files("a.1", "a.2"), [row("a"), row("a.1"), row("a.2")]),
    "further controls follow in the order of their numbers": (
        [f"controls/a_control_{number}.{'jpg' if number % 2 else 'png'}" for number in SHUFFLED],
        [row("a", more=[f"controls/a_control_{n}.{'jpg' if n % 2 else 'png'}" for n in range(1, 11)])],
    ),
    "controls of one row are not those of another": (
        [*files("a_b"), "controls/a_b_control_1.png"],
        [row("a"), row("a_b", more=["controls/a_b_control_1.png"])],
    ),
    "further controls that lie beside the targets, too, are no rows": (["targets/a_control_1.png"], [row("a")]),
    "a target that is only called like a mask is a row": (files("gas_mask"), [row("a"), row("gas_mask")]),
    "a target that is only called like a control is a row": (files("b_control_2"), [row("a"), row("b_control_2")]),
    "a control without a target is no row": (["controls/b.png"], [row("a")]),
    "hidden files are no rows": ([f"{role}/{name}" for role in ("targets", "controls") for name in JUNK], [row("a")]),
    "of two prompts the one beside the target counts": (["controls/a.txt"], [row("a")]),
    "a row that is called like a caption has its own prompt": (files("a_prompt_1"), [row("a"), row("a_prompt_1")]),
    **{
        f"a mask may lie beside the {role} and is no row {ending}": (
            [*files("b"), f"{role}/a_mask{ending}"],
            [row("a", mask=f"{role}/a_mask{ending}"), row("b")],
        )
        for role in ("targets", "controls")
        for ending in (".png", ".jpg")
    },
    **{
        f"a prompt may lie beside the {role}": (
            ["targets/b.png", "controls/b.png", f"{role}/b.txt"],
            [row("a"), row("b", prompts=[f"{role}/b.txt"])],
        )
        for role in ("targets", "controls")
    },
    **{
        f"further captions beside the {role} follow in the order of their numbers": (
            [*files("a_b"), *(f"{role}/a_prompt_{number}.txt" for number in SHUFFLED)],
            [row("a", prompts=["targets/a.txt", *(f"{role}/a_prompt_{n}.txt" for n in range(1, 11))]), row("a_b")],
        )
        for role in ("targets", "controls")
    },
}


@pytest.mark.parametrize(("more", "rows"), PAIRED.values(), ids=PAIRED)
def test_rows_are_made_of_files_by_their_names(folder: Folder, more: list[str], rows: list[dict]) -> None:
    folder.add(*more)
    source = folder.open()
    assert isinstance(source, FolderSource) and source == open_source(str(folder.root))
    assert [as_files(source.read(index)) for index in range(len(source))] == rows
    assert names(source) == [row["name"] for row in rows]
    assert [source.read(index).index for index in range(len(rows))] == list(range(len(rows)))


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"\xef\xbb\xbfmake it blue", "make it blue"),
        (b"  make it\tblue \r\n", "make it\tblue"),
        ("把天空变蓝 🌌".encode(), "把天空变蓝 🌌"),
        (b"one\ntwo\n", "one\ntwo"),
        (b"", ""),
    ],
)
def test_a_prompt_is_its_file_without_byte_order_mark_and_outer_space(
    folder: Folder, content: bytes, prompt: str
) -> None:
    folder.add("targets/a.txt", content=content)
    assert folder.open().read(0).prompt == prompt


# Layouts


@pytest.mark.parametrize("targets", TARGET_FOLDERS)
@pytest.mark.parametrize("controls", CONTROL_FOLDERS)
def test_each_accepted_pair_of_folder_names_is_read(tmp_path: Path, targets: str, controls: str) -> None:
    assert as_files(Folder(tmp_path, targets, controls).open().read(0)) == row("a")


def test_of_several_target_folders_the_first_accepted_one_is_read(folder: Folder) -> None:
    (folder.root / "images").mkdir()
    (folder.root / "images" / "b.png").touch()
    assert names(folder.open()) == ["a"]


@pytest.mark.parametrize(("missing", "accepted"), [("targets", TARGET_FOLDERS), ("controls", CONTROL_FOLDERS)])
def test_an_unknown_layout_lists_what_is_expected_and_a_few_of_what_is_there(
    folder: Folder, missing: str, accepted: Sequence[str]
) -> None:
    shutil.move(folder.folders[missing], folder.root / "Pictures")
    for number in range(1000):
        (folder.root / f"x{number}.png").touch()
    (folder.root / "A.md").touch()
    error = refused(SourceError, folder.root)
    assert str(error.where) == str(folder.root) and all(f"{name}/" in str(error.expected) for name in accepted)
    assert "Pictures/" in str(error.found) and "A.md" in str(error.found) and len(str(error)) < 700


def test_a_source_without_images_lists_the_endings_that_count(folder: Folder) -> None:
    folder.path("targets/a.png").rename(folder.path("targets/a.psd"))
    error = refused(SourceError, folder.root)
    assert "no target images" in error.what and str(error.where) == str(folder.folders["targets"])
    assert all(ending in str(error.expected) for ending in IMAGE_SUFFIXES)


@pytest.mark.parametrize(("name", "found"), [("nowhere", "nothing"), ("file", "a file"), ("empty", "an empty folder")])
def test_a_source_that_is_no_folder_or_an_empty_one_is_refused(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    error = refused(SourceError, tmp_path / name)
    assert (str(error.where), error.found) == (str(tmp_path / name), found)
    assert "neither a folder" in error.what or name == "empty"


@pytest.mark.parametrize("role", ["targets", "controls"])
def test_two_images_of_one_name_are_refused(folder: Folder, role: str) -> None:
    folder.add(f"{role}/a.jpg")
    error = refused(SourceError, folder.root)
    assert "same name" in error.what and {Path(str(error.where)).name, error.found} == {"a.jpg", "a.png"}


# Rows that cannot be read


def spoil(path: Path, how: str) -> None:
    path.unlink(missing_ok=True)
    if how == "a folder":
        path.mkdir()
    elif how == "a link to nowhere":
        path.symlink_to("gone.png")
    elif how == "a pipe":
        os.mkfifo(path)


@pytest.mark.parametrize(
    ("file", "how", "reason"),
    [
        ("controls/a.png", "not there", "no control image"),
        ("targets/a.txt", "not there", "no prompt"),
        ("controls/a.png", "a link to nowhere", "a file cannot be read: No such file or directory"),
        ("controls/a.png", "a pipe", "a file cannot be read: it is not a regular file"),
        ("targets/a.txt", "deleted after opening", "a file cannot be read: No such file or directory"),
        *(
            (file, "a folder", "a file cannot be read: Is a directory")
            for file in ("targets/a.png", "controls/a.png", "controls/a_control_1.png", "targets/a_mask.png")
        ),
    ],
)
def test_a_row_with_a_file_that_cannot_be_read_keeps_its_place_and_says_which(
    folder: Folder, file: str, how: str, reason: str
) -> None:
    folder.add(*files("b"))
    opened = folder.open()
    spoil(folder.path(file), how)
    source = opened if how == "deleted after opening" else folder.open()
    assert names(source) == ["a", "b"] and as_files(source.read(1)) == row("b")
    with pytest.raises(RowError) as caught:
        source.read(0)
    assert caught.value.what == reason
    missing = str(folder.path(file))
    if how == "not there":
        assert caught.value.where == "a" and missing in str(caught.value.expected)
    else:
        assert str(caught.value.where) == missing


@pytest.mark.parametrize("content", ["café".encode("latin-1"), "make it blue".encode("utf-16"), b"a\xff"])
def test_a_prompt_that_is_not_utf8_is_refused_by_its_file(folder: Folder, content: bytes) -> None:
    folder.add("targets/a.txt", content=content)
    error = refused(RowError, folder.root, 0)
    assert error.what == "the prompt is not UTF-8"
    assert str(error.where) == str(folder.path("targets/a.txt")) and "0x" in str(error.found)


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (0, 1), ("01",)])
@pytest.mark.parametrize(("role", "kind", "ending"), [("targets", "prompt", "txt"), ("controls", "control", "png")])
def test_a_gap_in_captions_or_controls_is_refused(
    folder: Folder, role: str, kind: str, ending: str, numbers: tuple[object, ...]
) -> None:
    folder.add(*(f"{role}/a_{kind}_{number}.{ending}" for number in numbers))
    assert f"its {kind}s are not numbered" in refused(RowError, folder.root, 0).what


# What is touched


def test_opening_reads_no_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> tuple[int, int]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(disk, "_open_regular", refuse)
    source = folder.open()
    assert names(source) == ["a"]
    with pytest.raises(RowError, match="Permission denied"):
        source.read(0)


def test_links_may_lead_out_of_the_folder(folder: Folder, tmp_path: Path) -> None:
    """A folder of links is how people choose among their photographs."""
    folder.path("targets/a.png").rename(tmp_path / "elsewhere.png")
    folder.path("targets/a.png").symlink_to(tmp_path / "elsewhere.png")
    assert as_files(folder.open().read(0)) == row("a")


def test_reading_a_row_does_not_look_at_the_others(folder: Folder) -> None:
    """With a look at every name for every row, a million rows would take years."""

    class Names(dict):
        def __iter__(self):
            raise AssertionError("all names were looked at")

    folder.add("controls/a_control_1.png")
    source = folder.open()
    for side in (source.targets, *source.controls):
        object.__setattr__(side, "endings", Names(side.endings))
    assert len(source.read(0).controls) == 2


def test_a_caption_whose_image_is_missing_or_of_a_format_that_is_not_read_is_told(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add("targets/a_prompt_1.txt", "targets/a_mask.png")
    assert source_notes(folder.open()) == []
    folder.add("targets/b.heic", "targets/b.txt", "controls/b.png", "targets/a_prompt.txt")
    assert source_notes(folder.open()) == ["2 captions have no image that qie reads: a_prompt, b"]

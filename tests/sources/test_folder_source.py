"""Folders of rows: layouts, order, pairing, and a reason for every row that cannot be read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from qie.data.sources import (
    CONTROL_FOLDERS,
    TARGET_FOLDERS,
    FolderSource,
    Source,
    open_source,
)
from qie.errors import RowError, SourceError
from qie.image_formats import IMAGE_SUFFIXES
from qie.stores import disk


class Folder:
    """A source being written. Files hold what they are called, so that a row shows where its bytes are from."""

    def __init__(self, root: Path, targets: str = TARGET_FOLDERS[0], controls: str = CONTROL_FOLDERS[0]) -> None:
        self.root, self.targets, self.controls = root, root / targets, root / controls
        self.targets.mkdir(parents=True)
        self.controls.mkdir()

    def add(self, path: Path, content: bytes | None = None) -> Path:
        path.write_bytes(f"{path.parent.name}/{path.name}".encode() if content is None else content)
        return path

    def row(self, stem: str, ending: str = ".png", control_ending: str = ".png") -> None:
        self.add(self.targets / f"{stem}{ending}")
        self.add(self.controls / f"{stem}{control_ending}")
        self.add(self.targets / f"{stem}.txt", f"do {stem}".encode())

    def open(self) -> Source:
        return open_source(self.root)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "rows")


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


# Layouts


@pytest.mark.parametrize("targets", TARGET_FOLDERS)
@pytest.mark.parametrize("controls", CONTROL_FOLDERS)
def test_each_accepted_pair_of_folder_names_is_read(tmp_path: Path, targets: str, controls: str) -> None:
    folder = Folder(tmp_path / "rows", targets, controls)
    folder.row("a")
    row = folder.open().read(0)
    assert (row.index, row.name, row.prompt, row.mask) == (0, "a", "do a", None)
    assert row.target == f"{targets}/a.png".encode()
    assert row.controls == (f"{controls}/a.png".encode(),)


def test_of_several_target_folders_the_first_accepted_one_is_read(folder: Folder) -> None:
    folder.row("a")
    other = Folder(folder.root / "x", "images").targets
    shutil.move(other, folder.root / "images")
    folder.add(folder.root / "images" / "b.png")
    assert names(folder.open()) == ["a"]


def test_a_source_may_be_named_by_a_string(folder: Folder) -> None:
    folder.row("a")
    assert open_source(str(folder.root)) == folder.open()
    assert isinstance(folder.open(), FolderSource)


@pytest.mark.parametrize("missing", ["targets", "controls"])
def test_an_unknown_layout_lists_what_is_expected_and_what_is_there(folder: Folder, missing: str) -> None:
    folder.row("a")
    shutil.move(getattr(folder, missing), folder.root / "pictures")
    folder.add(folder.root / "README.md")
    with pytest.raises(SourceError) as caught:
        folder.open()
    assert str(caught.value.where) == str(folder.root)
    for name in TARGET_FOLDERS if missing == "targets" else CONTROL_FOLDERS:
        assert f"{name}/" in str(caught.value.expected)
    assert "pictures/" in str(caught.value.found) and "README.md" in str(caught.value.found)


def test_an_unknown_layout_of_many_files_lists_a_few_of_them(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"{number}.png").touch()
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    assert len(str(caught.value)) < 500


def test_an_empty_folder_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    assert caught.value.found == "an empty folder"


def test_a_source_without_images_lists_the_endings_that_count(folder: Folder) -> None:
    folder.add(folder.targets / "a.txt")
    folder.add(folder.targets / "a.psd")
    with pytest.raises(SourceError, match="no target images") as caught:
        folder.open()
    assert str(caught.value.where) == str(folder.targets)
    assert all(ending in str(caught.value.expected) for ending in IMAGE_SUFFIXES)


@pytest.mark.parametrize(("name", "found"), [("nowhere", "nothing"), ("file", "a file")])
def test_a_source_that_is_no_folder_is_refused(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match="no folder") as caught:
        open_source(tmp_path / name)
    assert (caught.value.where, caught.value.found) == (tmp_path / name, found)


def test_a_home_folder_is_expanded(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.row("a")
    monkeypatch.setenv("HOME", str(folder.root.parent))
    assert names(open_source("~/rows")) == ["a"]


# Order and pairing


def test_rows_are_in_the_order_of_their_names_however_they_were_written(folder: Folder) -> None:
    stems = ["b", "a10", "a2", "Z", "é", "a", "a-1", "a_1"]
    for stem in stems:
        folder.row(stem)
    source = folder.open()
    assert names(source) == sorted(stems)
    assert [source.read(index).index for index in range(len(source))] == list(range(len(stems)))
    assert [source.read(index).prompt for index in range(len(source))] == [f"do {stem}" for stem in sorted(stems)]


def test_the_order_does_not_depend_on_endings(folder: Folder) -> None:
    folder.row("a", ".png")
    folder.row("a-b", ".bmp")  # "-" stands before ".", so the file names are in the other order
    assert names(folder.open()) == ["a", "a-b"]


@pytest.mark.parametrize("ending", [*IMAGE_SUFFIXES, ".PNG", ".Jpg"])
def test_target_and_control_may_have_different_endings(folder: Folder, ending: str) -> None:
    folder.row("a", ending, ".jpg")
    folder.row("b", ".webp", ending)
    source = folder.open()
    assert source.read(0).target == f"training_images/a{ending}".encode()
    assert source.read(0).controls == (b"control_images/a.jpg",)
    assert source.read(1).controls == (f"control_images/b{ending}".encode(),)


def test_a_stem_may_contain_dots(folder: Folder) -> None:
    folder.row("a.1")
    folder.row("a.2")
    assert names(folder.open()) == ["a.1", "a.2"]
    assert folder.open().read(1).prompt == "do a.2"


def test_further_controls_follow_in_the_order_of_their_numbers(folder: Folder) -> None:
    folder.row("a")
    for number in (2, 1, 10, 3, 4, 5, 6, 7, 8, 9):
        folder.add(folder.controls / f"a_control_{number}.{'jpg' if number % 2 else 'png'}")
    controls = folder.open().read(0).controls
    further = [f"control_images/a_control_{n}.{'jpg' if n % 2 else 'png'}".encode() for n in range(1, 11)]
    assert controls == (b"control_images/a.png", *further)


def test_controls_of_one_row_are_not_those_of_another(folder: Folder) -> None:
    folder.row("a")
    folder.row("a_b")
    folder.add(folder.controls / "a_b_control_1.png")
    source = folder.open()
    assert [len(source.read(index).controls) for index in range(2)] == [1, 2]


@pytest.mark.parametrize("place", ["targets", "controls"])
@pytest.mark.parametrize("ending", [".png", ".jpg"])
def test_a_mask_may_lie_in_either_folder_and_is_no_row(folder: Folder, place: str, ending: str) -> None:
    folder.row("a")
    folder.row("b")
    mask = folder.add(getattr(folder, place) / f"a_mask{ending}")
    source = folder.open()
    assert names(source) == ["a", "b"]
    assert source.read(0).mask == f"{mask.parent.name}/{mask.name}".encode()
    assert source.read(1).mask is None


def test_controls_that_lie_beside_the_targets_are_no_rows(folder: Folder) -> None:
    """Some layouts keep further controls in both folders; a target is never called so."""
    folder.row("a")
    folder.add(folder.targets / "a_control_1.png")
    assert names(folder.open()) == ["a"]


@pytest.mark.parametrize("stem", ["gas_mask", "remote_control_2"])
def test_a_target_that_is_only_called_like_a_mask_or_control_is_a_row(folder: Folder, stem: str) -> None:
    """There is no target `gas` that it could be the mask of. What is left out silently would never be missed."""
    folder.row("a")
    folder.row(stem)
    assert names(folder.open()) == ["a", stem]


# Prompts


@pytest.mark.parametrize("place", ["targets", "controls"])
def test_a_prompt_may_lie_in_either_folder(folder: Folder, place: str) -> None:
    folder.row("a")
    (folder.targets / "a.txt").unlink()
    folder.add(getattr(folder, place) / "a.txt", b"make it blue")
    assert folder.open().read(0).prompt == "make it blue"


def test_of_two_prompts_the_one_beside_the_target_counts(folder: Folder) -> None:
    folder.row("a")
    folder.add(folder.controls / "a.txt", b"the other one")
    assert folder.open().read(0).prompt == "do a"


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
    folder.row("a")
    folder.add(folder.targets / "a.txt", content)
    assert folder.open().read(0).prompt == prompt


@pytest.mark.parametrize("content", ["café".encode("latin-1"), "make it blue".encode("utf-16"), b"a\xff"])
def test_a_prompt_that_is_not_utf8_is_refused_by_its_file(folder: Folder, content: bytes) -> None:
    folder.row("a")
    path = folder.add(folder.targets / "a.txt", content)
    with pytest.raises(RowError, match="the prompt is not UTF-8") as caught:
        folder.open().read(0)
    assert str(caught.value.where) == str(path)
    assert "0x" in str(caught.value.found)


# Rows that cannot be read


def test_a_missing_control_keeps_its_row_and_says_which_file_is_missing(folder: Folder) -> None:
    for stem in "abc":
        folder.row(stem)
    (folder.controls / "b.png").unlink()
    source = folder.open()
    assert names(source) == ["a", "b", "c"]
    with pytest.raises(RowError, match="no control image") as caught:
        source.read(1)
    assert caught.value.where == "b"
    assert str(folder.controls / "b.png") in str(caught.value.expected)
    assert source.read(2).index == 2


def test_a_missing_prompt_keeps_its_row_and_says_which_file_is_missing(folder: Folder) -> None:
    folder.row("a")
    folder.row("b")
    (folder.targets / "a.txt").unlink()
    source = folder.open()
    with pytest.raises(RowError, match="no prompt") as caught:
        source.read(0)
    assert caught.value.where == "a"
    assert caught.value.expected == f"{folder.targets / 'a.txt'}"
    assert source.read(1).name == "b"


def test_a_control_without_a_target_is_no_row(folder: Folder) -> None:
    folder.row("b")
    folder.add(folder.controls / "a.png")
    assert names(folder.open()) == ["b"]


@pytest.mark.parametrize("file", ["targets/a.png", "controls/a.png", "controls/a_control_1.png", "targets/a_mask.png"])
def test_an_image_that_cannot_be_read_is_refused_by_its_file_and_the_reason(folder: Folder, file: str) -> None:
    folder.row("a")
    place, name = file.split("/")
    path: Path = getattr(folder, place) / name
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(RowError, match="a file cannot be read: Is a directory") as caught:
        folder.open().read(0)
    assert str(caught.value.where) == str(path)


def test_a_link_to_nowhere_is_refused_by_its_name(folder: Folder) -> None:
    folder.row("a")
    (folder.controls / "a.png").unlink()
    (folder.controls / "a.png").symlink_to(folder.root / "gone.png")
    with pytest.raises(RowError, match="No such file") as caught:
        folder.open().read(0)
    assert str(caught.value.where) == str(folder.controls / "a.png")


def test_a_file_that_was_deleted_after_opening_is_refused(folder: Folder) -> None:
    folder.row("a")
    source = folder.open()
    (folder.targets / "a.txt").unlink()
    with pytest.raises(RowError, match="cannot be read") as caught:
        source.read(0)
    assert str(caught.value.where) == str(folder.targets / "a.txt")


def test_opening_reads_no_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.row("a")

    def refuse(path: Path) -> tuple[int, int]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(disk, "_open_regular", refuse)
    source = folder.open()
    assert names(source) == ["a"]
    with pytest.raises(RowError, match="Permission denied"):
        source.read(0)


@pytest.mark.parametrize("place", ["targets", "controls"])
def test_two_images_of_one_name_are_refused(folder: Folder, place: str) -> None:
    folder.row("a")
    folder.add(getattr(folder, place) / "a.jpg")
    with pytest.raises(SourceError, match="same name") as caught:
        folder.open()
    assert {Path(str(caught.value.where)).name, caught.value.found} == {"a.jpg", "a.png"}


def test_hidden_files_are_no_rows(folder: Folder) -> None:
    """macOS leaves `._a.png` beside `a.png`, and an editor its own copies."""
    folder.row("a")
    for name in ("._a.png", ".b.png", ".DS_Store", "._a.txt"):
        folder.add(folder.targets / name)
        folder.add(folder.controls / name)
    assert names(folder.open()) == ["a"]
    assert folder.open().read(0).prompt == "do a"


def test_a_photograph_source_is_read_as_its_tool_wrote_it(photos: Path) -> None:
    source = open_source(photos)
    assert len(source) == 12
    for index, stem in enumerate(names(source)):
        row = source.read(index)
        assert row.target == (photos / "training_images" / f"{stem}.png").read_bytes()
        assert row.controls == ((photos / "control_images" / f"{stem}.png").read_bytes(),)
        assert row.prompt == (photos / "training_images" / f"{stem}.txt").read_text().strip()


# Further captions


@pytest.mark.parametrize("place", ["targets", "controls"])
def test_further_captions_follow_in_the_order_of_their_numbers(folder: Folder, place: str) -> None:
    folder.row("a")
    folder.row("a_b")
    for number in (10, 2, 1, 3, 4, 5, 6, 7, 8, 9):
        folder.add(getattr(folder, place) / f"a_prompt_{number}.txt", f"or {number}\n".encode())
    source = folder.open()
    assert source.read(0).more_prompts == tuple(f"or {number}" for number in range(1, 11))
    assert source.read(1).more_prompts == () and names(source) == ["a", "a_b"]


def test_the_prompt_of_a_row_that_is_called_like_a_caption_is_its_own(folder: Folder) -> None:
    folder.row("a")
    folder.row("a_prompt_1")
    source = folder.open()
    assert source.read(0).more_prompts == () and source.read(1).prompt == "do a_prompt_1"


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (0, 1), ("01",)])
@pytest.mark.parametrize(("place", "kind", "ending"), [("targets", "prompt", "txt"), ("controls", "control", "png")])
def test_a_gap_in_captions_or_controls_is_refused(
    folder: Folder, place: str, kind: str, ending: str, numbers: tuple[object, ...]
) -> None:
    folder.row("a")
    for number in numbers:
        folder.add(getattr(folder, place) / f"a_{kind}_{number}.{ending}")
    with pytest.raises(RowError, match=f"its {kind}s are not numbered"):
        folder.open().read(0)


def test_a_pipe_among_the_images_is_refused_instead_of_waited_for(folder: Folder) -> None:
    folder.row("a")
    (folder.controls / "a.png").unlink()
    os.mkfifo(folder.controls / "a.png")
    with pytest.raises(RowError, match="no regular file"):
        folder.open().read(0)


def test_links_may_lead_out_of_the_folder(folder: Folder, tmp_path: Path) -> None:
    """A folder of links is how people choose among their photographs."""
    folder.row("a")
    (tmp_path / "elsewhere.png").write_bytes(b"elsewhere")
    (folder.targets / "a.png").unlink()
    (folder.targets / "a.png").symlink_to(tmp_path / "elsewhere.png")
    assert folder.open().read(0).target == b"elsewhere"


def test_reading_a_row_does_not_look_at_the_others(folder: Folder) -> None:
    """With a look at every name for every row, a million rows would take years."""

    class Names(dict):
        def __iter__(self):
            raise AssertionError("all names were looked at")

    folder.row("a")
    folder.add(folder.controls / "a_control_1.png")
    source = folder.open()
    for side in (source.targets, source.controls):
        object.__setattr__(side, "endings", Names(side.endings))
    assert len(source.read(0).controls) == 2

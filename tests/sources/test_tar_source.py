"""Raw WebDataset tars: webdataset's own rows, members' names, and tars that are cut."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_iterator

from qie.data.sources import open_source, tars
from qie.data.sources.tar_members import iter_members
from qie.errors import RowError, SourceError, UsageError
from qie.stores import patterns
from tests.sources.tables import names, packed, refused, write_tar


def members(key: str, *endings: str) -> list[tuple[str, bytes]]:
    """Members of a row, which hold what they are called."""
    return [(f"{key}.{ending}", f"{key}.{ending}".encode()) for ending in endings]


ROW = ("target.png", "control.png", "txt")


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tmp_path / "x.tar"


UNDERSTOOD: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    **{
        f"target {target}": (("control.png", target, "txt"), {"target": target})
        for target in ("jpg", "png", "jpeg", "webp", "target.webp", "edited_image.jpg", "TARGET.PNG", "image.png")
    },
    **{
        f"control {control}": (("target.png", control, "txt"), {"controls": [control]})
        for control in ("control.jpg", "source.png", "input.webp", "input_image.png", "path_control.png")
    },
    **{
        f"prompt {prompt}": (("target.png", "control.png", prompt), {"prompts": [prompt]})
        for prompt in ("txt", "prompt.txt", "caption", "caption.txt", "prompt", "Instruction.TXT")
    },
    "further controls, captions and the mask": (
        (*ROW, "control_2.jpg", "control_1.png", "mask.png", "text_1.txt", "text_2.txt"),
        {
            "controls": ["control.png", "control_1.png", "control_2.jpg"],
            "prompts": ["txt", "text_1.txt", "text_2.txt"],
            "mask": "mask.png",
        },
    ),
    "a text comes before JSON": ((*ROW, "json"), {}),
    "other members are passed over": ((*ROW, "cls", "npy", "control.txt", "text.png", "name.png", "md5"), {}),
}


@pytest.mark.parametrize(("endings", "given"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_members_are_understood_by_their_endings(tar: Path, endings: tuple[str, ...], given: dict[str, object]) -> None:
    """In a row of a folder, behind another row."""
    row = open_source(write_tar(tar, [*members("000", *ROW), *members("dir/a", *endings)])).read(1)
    parts = {"target": row.target.decode(), "mask": row.mask and row.mask.decode()}
    parts |= {"controls": [control.decode() for control in row.controls], "prompts": [row.prompt, *row.more_prompts]}
    expected = {"target": "target.png", "controls": ["control.png"], "prompts": ["txt"], "mask": None} | given
    assert parts == {
        role: [f"dir/a.{name}" for name in names] if isinstance(names, list) else names and f"dir/a.{names}"
        for role, names in expected.items()
    }
    assert (row.index, row.name) == (1, "x.tar/dir/a")


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ({"Prompt": "p", "target": "no.png", "id": 3}, ["p"]),
        ({"caption": "p", "captions": ["p", "q"]}, ["p", "q"]),
        ({"instruction": "p", "instruction_1": "q"}, ["p", "q"]),
    ],
)
def test_the_prompt_may_be_in_json(tar: Path, content: object, prompts: list[str]) -> None:
    write_tar(tar, [*members("a", "png", "control.png"), ("a.json", b"\xef\xbb\xbf" + json.dumps(content).encode())])
    row = open_source(tar).read(0)
    assert [row.prompt, *row.more_prompts] == prompts and row.target == b"a.png"


SPOILT: list[tuple[list[tuple[str, bytes]], str]] = [
    (members("a", "control.png", "txt"), "no target image"),
    (members("a", "target.png", "txt"), "no control image"),
    (members("a", "target.png", "control.png"), "no prompt"),
    (members("a", "jpg", "png", "control.png", "txt"), "two files of a row have the same role"),
    (members("a", "target.png", "control.png", "control.jpg", "txt"), "two files of a row have the same role"),
    (members("a", *ROW, "control_2.png"), "its controls are not numbered"),
    (members("a", *ROW, "text_2.txt"), "its prompts are not numbered"),
    *(
        ([*members("a", "png", "control.png"), (f"a.{ending}", content)], reason)
        for ending, content, reason in (
            ("txt", b"\xe9", "the prompt is not UTF-8"),
            ("json", b"{", "not valid JSON"),
            ("json", b"[" * 100_000, "not valid JSON"),
            ("json", b"[]", "not a JSON object"),
            ("json", b'{"prompt": 3}', "prompt: a number instead of text"),
            ("json", b'{"words": "p"}', "no prompt"),
        )
    ),
]


@pytest.mark.parametrize(("row", "reason"), SPOILT, ids=[reason for _, reason in SPOILT])
def test_a_row_that_lacks_something_is_refused_and_keeps_its_index(
    tar: Path, row: list[tuple[str, bytes]], reason: str
) -> None:
    error = refused(RowError, write_tar(tar, [*row, *members("b", *ROW)]), 0)
    assert reason in error.what and str(error.where).startswith(f"{tar}, a")
    assert open_source(tar).read(1).prompt == "b.txt"


# As webdataset reads it


NAMES = ["a.png", "a.b.c", "./a.png", "d.e/a.b.png", "a", ".a", "d/.a.b", "a.", "é/日本.target.png", "d/a.B", "x/y/z.w"]


@pytest.mark.parametrize(
    "content",
    [
        [*members("a", *ROW), *members("b", *ROW), *members("a", *ROW)],
        [(f"{key}.{ending}", b"x") for ending in ROW for key in "ab"],
    ],
    ids=["two rows", "files by kind"],
)
def test_two_rows_of_one_key_are_refused(tar: Path, content: list[tuple[str, bytes]]) -> None:
    """As webdataset, which makes a row of what stands together, would take them for rows that lack something."""
    error = refused(SourceError, write_tar(tar, content))
    assert error.what == "two rows have the same name" and str(error.found)[:3] in ("a, ", "b, ")
    assert str(tar) in str(error.where) and "tar --sort=name" in str(error.hint)


@pytest.mark.parametrize("name", NAMES)
def test_members_are_divided_into_key_and_ending_as_webdataset_does(name: str) -> None:
    match = tars._MEMBER.fullmatch(name)
    assert (match.groups() if match else (None, None)) == base_plus_ext(name)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_rows_are_those_of_webdataset(tar: Path, format: int) -> None:
    keys = ["a", "d.e/b", "x/" * 60 + "c" * 80, "日本" * 10, "z"]
    content = [member for key in keys for member in members(key, *ROW, "control_1.png")]
    content[3:3] = [("__meta__/x.png", b"-"), ("README", b"-"), ("__x__", b"-"), (".hidden.png", b"-")]
    if format != tarfile.USTAR_FORMAT:
        content += members("y" * 300, *ROW)
    write_tar(tar, content, format=format)
    with tar.open("rb") as file:
        theirs = list(group_by_keys({"__url__": "", **member} for member in tar_file_iterator(file)))
    source = open_source(tar)
    assert names(source) == [f"x.tar/{sample['__key__']}" for sample in theirs]
    for index, sample in enumerate(theirs):
        row = source.read(index)
        assert (row.target, row.prompt) == (sample["target.png"], sample["txt"].decode())
        assert row.controls == tuple(sample[name] for name in ("control.png", "control_1.png") if name in sample)


def test_hidden_files_in_folders_are_no_rows(tar: Path) -> None:
    """macOS packs `d/._a.png` beside `d/a.png`."""
    content = [item for member in members("d/a", *ROW) for item in ((f"d/._{member[0][2:]}", b"-"), member)]
    source = open_source(write_tar(tar, content))
    assert names(source) == ["x.tar/d/a"] and source.read(0).target == b"d/a.target.png"


def test_links_folders_and_devices_are_passed_over(tar: Path) -> None:
    with tarfile.open(tar, "w") as file:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            facts = tarfile.TarInfo("a.png")
            facts.type, facts.linkname, facts.size = kind, "/etc/passwd", 5000  # some programs state the other's size
            file.addfile(facts)
    with tarfile.open(tar, "a") as file:
        for name, content in members("a", *ROW):
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            file.addfile(facts, io.BytesIO(content))
    assert open_source(tar).read(0).target == b"a.target.png"


def test_a_size_beyond_the_octal_field_is_understood() -> None:
    """GNU tar writes sizes of 8 GiB and more in base 256, and pax in a header of its own."""
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        facts = tarfile.TarInfo("a.png")
        facts.size = 9 * 2**30
        header = facts.tobuf(format)
        with pytest.raises(SourceError, match="truncated") as caught:
            list(iter_members(io.BytesIO(header), len(header), "x.tar"))
        assert caught.value.expected == f"{facts.size + len(header)} bytes"


# Damage


def test_a_tar_that_is_cut_anywhere_is_refused_by_its_name_and_byte(tar: Path) -> None:
    content = write_tar(tar, [*members("a", *ROW), ("b.png", b"x" * 1500)]).read_bytes()
    whole = 4 * 512 + 3 * 512 + 3 * 512
    assert not content[whole : whole + 512].strip(b"\0")
    for stop in [*range(0, whole + 512, 171), *range(512, whole + 512, 512), whole + 511]:
        tar.write_bytes(content[:stop])
        error = refused(SourceError, tar)
        assert error.what == "the tar is truncated" and str(error.where).startswith(f"{tar}, byte ")
    tar.write_bytes(content[: whole + 512])
    assert len(open_source(tar)) == 2


def test_every_damaged_byte_of_a_header_is_noticed(tar: Path) -> None:
    content = write_tar(tar, members("a", *ROW)).read_bytes()
    for at in range(1024, 1024 + 512, 3):
        damaged = bytearray(content)
        damaged[at] ^= 0x15
        tar.write_bytes(damaged)
        if not 148 <= at - 1024 < 156:
            assert str(refused(SourceError, tar).where) == f"{tar}, byte 1024"


def pax(record: bytes) -> bytes:
    facts = tarfile.TarInfo("pax")
    facts.type, facts.size = tarfile.XHDTYPE, len(record)
    return facts.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")


GOOD = packed(members("a", *ROW))
REFUSED = {
    "text": (b"x" * 2048, "the file is not a tar"),
    "high bits": (b"\x80" * 2048, "the file is not a tar"),
    "ZIP": (b"PK\3\4" + bytes(1000), "the file is not a tar"),
    "compressed": (gzip.compress(GOOD + bytes(range(256)) * 8), "gzip -d"),
    "more after its end": (GOOD * 2, "continues after its end marker"),
    "no members": (packed([]), "the tar holds no rows"),
    "no rows": (packed([("README", b"x"), ("__meta__", b"x"), (".hidden.png", b"x")]), "the tar holds no rows"),
    "a member twice": (packed(members("a", *ROW, "TXT")), "a.TXT"),
    "no control": (packed(members("a", "cls", "jpg", "txt")), "control image"),
    "no control but others": (packed(members("a", "cls", "jpg", "txt")), "end in cls, jpg, txt"),
    **{
        f"pax {record!r}": (pax(record) + GOOD, "the tar is damaged")
        for record in (b"8 path=x\n", b"x path=x\n", b"12 path\n", b"0 x=y\n", b"25 GNU.sparse.major=1\n\n\n")
    },
}


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED)
def test_a_file_without_a_tar_of_rows_is_refused_with_what_is_wrong(tar: Path, content: bytes, words: str) -> None:
    tar.write_bytes(content)
    assert words in str(refused(SourceError, tar))


def test_a_compressed_tar_is_refused_by_its_name_too(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").touch()
    assert "unpack it" in str(refused(SourceError, tmp_path / "x.tar.gz").hint)


def test_a_name_of_a_gigabyte_is_not_read(tar: Path) -> None:
    facts = tarfile.TarInfo("././@LongLink")
    facts.type, facts.size = b"L", 2**30
    with tar.open("wb") as file:
        file.write(facts.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(2**30 + 2048)
    assert "a name of" in str(refused(SourceError, tar).found)


def test_an_end_of_zeros_may_be_long(tar: Path) -> None:
    tar.write_bytes(GOOD + bytes(3 * 2**20))
    assert len(open_source(tar)) == 1


# Several tars, laziness, threads, processes


@pytest.mark.parametrize("place", ["", "*.tar", "x-{000..002}.tar", "x-00[0-2].tar"])
def test_several_tars_follow_each_other(tmp_path: Path, place: str) -> None:
    write_tar(tmp_path / "x-000.tar", [*members("a", *ROW), *members("b", *ROW)])
    write_tar(tmp_path / "x-001.tar", [])
    write_tar(tmp_path / "x-002.tar", members("a", *ROW))
    source = open_source(tmp_path / place)
    assert names(source) == ["x-000.tar/a", "x-000.tar/b", "x-002.tar/a"]
    assert [source.read(index).name for index in range(3)] == names(source)


def test_two_stars_match_folders_of_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for place in ("x.tar", "a/y.tar", "a/b/z.tar"):
        write_tar(tmp_path / place, members(place[-5], *ROW))
    assert names(open_source(tmp_path / "**" / "*.tar")) == ["z.tar/z", "y.tar/y", "x.tar/x"]


def test_the_order_of_tars_is_not_that_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [str(write_tar(tmp_path / f"{name}.tar", members(name, *ROW))) for name in "cab"]
    monkeypatch.setattr("glob.glob", lambda pattern, recursive: found)
    assert names(open_source(tmp_path / "?.tar")) == ["a.tar/a", "b.tar/b", "c.tar/c"]


def test_a_gap_in_braces_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "x-0.tar", members("a", *ROW))
    assert str(refused(SourceError, tmp_path / "x-{0..1}.tar").where).endswith("x-1.tar")


def test_a_file_that_two_patterns_name_is_one(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", members("a", *ROW))
    assert len(open_source(tmp_path / "{x,*}.tar")) == 1


@pytest.mark.parametrize("place", ["{a.tar", "{0..99999999}.tar", "{0..99}{0..99}.tar", "{0..9999999999..2}.tar"])
def test_braces_that_cannot_be_expanded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(patterns, "MAX_NAMES", 1000)
    assert "the braces of a pattern" in refused(UsageError, tmp_path / place).what


def test_a_tar_whose_name_looks_like_a_pattern_is_read(tmp_path: Path) -> None:
    write_tar(tmp_path / "x[0]{a,b}.tar", members("a", *ROW))
    assert len(open_source(tmp_path / "x[0]{a,b}.tar")) == 1


def test_opening_passes_over_what_members_hold(tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = [(f"{row:03d}.{ending}", bytes(50_000)) for row in range(100) for ending in ROW]
    write_tar(tar, big)
    read = []

    class Counted(io.FileIO):
        def read(self, size: int = -1) -> bytes:  # type: ignore[override]
            read.append(size)
            return super().read(size)

    monkeypatch.setattr("qie.stores.File.open", lambda file, size=0: Counted(file.path))
    source = open_source(tar)
    assert len(source) == 100 and sum(read[:-2]) == 2 + 512 * 301

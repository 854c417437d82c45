"""tools/read_shard.py knows only docs/format.md and Python: where it and qie agree on a shard, the page is right."""

from __future__ import annotations

import hashlib
import io
import json
import random
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qie.errors import ShardError
from qie.shards.index import Entry, member_name, read_index
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet
from qie.shards.tensors import BY_NAME, DTYPES, stored_tensors
from qie.shards.writer import ShardWriter
from qie.types import Sample
from tests.builders import (
    RECIPE,
    RECIPE_21,
    ROOT,
    assert_same,
    join_record,
    make_entry,
    make_recipe,
    make_sample,
    make_sample_21,
    mutated_json,
    rewrite_index,
    split_record,
    write_shard,
    write_variants,
)

TOOL = ROOT / "tools" / "read_shard.py"
PLAIN = make_sample(0, prompt="make it bluer")
RICH = make_sample(1, controls=((2, 3), (4, 6)), masked=True, paired=True, clipped=3, prompt='naïve "日本"\n\x1b[31m')
LARGE = make_sample(3, target=(80, 80), tokens=300, width=400)
STEM = "00000000-00000004"


def run_alone(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The tool by itself: -I and -S leave Python neither this repository nor any installed package."""
    command = [sys.executable, "-I", "-S", "-X", "utf8", TOOL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd="/", check=False)


_main = runpy.run_path(str(TOOL))["main"]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which takes a hundredth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True))
        code = _main(list(map(str, arguments)))
        printed = [stream.buffer.getvalue().decode() for stream in (sys.stdout, sys.stderr)]
    return subprocess.CompletedProcess(arguments, code, *printed)


def faults(*arguments: str | Path) -> list[str]:
    """The lines that the tool ends with when it finds faults."""
    result = run(*arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    """Rows 0 to 3: plain, rich, skipped, plain again."""
    write_shard(tmp_path, [PLAIN, RICH, None, PLAIN])
    return tmp_path / f"{STEM}.tar"


def rewrite(tar: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite_index(tar.with_suffix(".json"), change)


def one_record(folder: Path, record: bytes, **entry: Any) -> Path:
    """A shard of one row whose record and entry are whatever they are; all hashes are right."""
    fields = vars(make_entry(PLAIN, 0)) | entry
    with ShardWriter(folder, 0, 1, RECIPE) as shard:
        shard.add(Entry(**fields), record)
        shard.publish()
    return folder / "00000000-00000001.tar"


# Sound shards


def test_it_needs_no_package_to_list_a_shard(tar: Path) -> None:
    result = run_alone(tar)

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "rows [0, 4): 3 samples in 2 records, 1 skipped",
        f"recipe {RECIPE.digest}",
        f"       0  {PLAIN.key[:12]}  'row 0'  sizes 4x6 4x6  tokens 9 7",
        f"       1  {RICH.key[:12]}  'row 1'  sizes 4x6 2x3 4x6  tokens 9 7",
        "       2  skipped       'row 2'  'the target is no image'",
        f"       3  {PLAIN.key[:12]}  'row 3'  sizes 4x6 4x6  tokens 9 7",
    ]


def test_it_reads_text_alone_as_qie_does_with_and_without_controls(tmp_path: Path) -> None:
    recipe = replace(RECIPE_21, thumbnail_px=32)
    samples = [make_sample_21(0, recipe=recipe), make_sample_21(1, controls=(), recipe=recipe)]
    samples.append(make_sample_21(2, controls=((2, 2), (4, 2)), masked=True, recipe=recipe))
    write_shard(tmp_path, samples, recipe=recipe)
    path = tmp_path / "00000000-00000003.tar"
    assert (run(path).returncode, run(path).stderr) == (0, "")
    shards = ShardSet.open([tmp_path], verify="always")
    for number, sample in enumerate(samples):
        assert_same(shards.load(number), sample)
        shown = run(path, sample.key).stdout
        low = float(sample.prompt_embed.float().min())
        assert f"prompt_embed              BF16  [9, 8]               min {low:.6g} " in shown


@pytest.mark.parametrize("slots", [[], [1, 2], [6], [-1]])
def test_it_and_qie_refuse_places_of_controls_that_do_not_fit(tmp_path: Path, slots: list[int]) -> None:
    sample = make_sample_21(0)
    header, about, body = split_record(encode(sample, RECIPE_21.digest))
    with ShardWriter(tmp_path, 0, 1, RECIPE_21) as shard:
        shard.add(make_entry(sample, 0), join_record(header, about | {"image_slots": slots}, body))
        shard.publish()
    assert any("image_slots" in line for line in faults(tmp_path / "00000000-00000001.tar"))
    with pytest.raises(ShardError, match="image_slots"):
        ShardSet.open([tmp_path]).load(0)


def test_records_of_two_layouts_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Text alone under a recipe of images and text, and the other way round."""
    for number, (sample, recipe) in enumerate([(make_sample_21(0), RECIPE), (PLAIN, RECIPE_21)]):
        with ShardWriter(tmp_path / f"{number}", 0, 1, recipe) as shard:
            shard.add(make_entry(sample, 0), encode(sample, recipe.digest))
            shard.publish()
        assert faults(tmp_path / f"{number}" / "00000000-00000001.tar")
        with pytest.raises(ShardError, match="sizes"):
            ShardSet.open([tmp_path / f"{number}"]).load(0)


@pytest.fixture
def variants(tmp_path: Path) -> Path:
    """Rows 0 to 2 of source mine: two variants, of which the first is skipped; three, two of them equal; one."""
    write_variants(tmp_path, [[None, RICH], [PLAIN, RICH, PLAIN], [PLAIN]], source="mine")
    return tmp_path / "00000000-00000003.tar"


def test_it_lists_the_variants_of_a_row(variants: Path) -> None:
    result = run(variants)

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "rows [0, 3): 5 samples in 2 records, 1 skipped",
        f"recipe {RECIPE.digest}",
        "       0  skipped       'mine' 'row 0'  'the target is no image'",
        f"     0.1  {RICH.key[:12]}  'mine' 'row 0'  sizes 4x6 2x3 4x6  tokens 9 7",
        f"       1  {PLAIN.key[:12]}  'mine' 'row 1'  sizes 4x6 4x6  tokens 9 7",
        f"     1.1  {RICH.key[:12]}  'mine' 'row 1'  sizes 4x6 2x3 4x6  tokens 9 7",
        f"     1.2  {PLAIN.key[:12]}  'mine' 'row 1'  sizes 4x6 4x6  tokens 9 7",
        f"       2  {PLAIN.key[:12]}  'mine' 'row 2'  sizes 4x6 4x6  tokens 9 7",
    ]


def test_variants_of_a_row_in_another_order_are_a_fault(variants: Path) -> None:
    rewrite(variants, lambda values: values["samples"].insert(1, values["samples"].pop(2)))

    assert faults(variants) == [
        "index: order of rows and variants in samples: [(0, 1), (1, 1), (1, 0), (1, 2), (2, 0)] "
        "where [(0, 1), (1, 0), (1, 1), (1, 2), (2, 0)] is due"
    ]


def test_a_fault_in_the_record_of_a_variant_names_the_version(variants: Path) -> None:
    rewrite(variants, lambda values: values["samples"][2].update(clipped=0))

    assert faults(variants) == ["row 1.1: clipped: 3 where 0 is due"]


@pytest.mark.parametrize("missing", [["source", "variant"], ["source"], ["variant"]], ids=" and ".join)
def test_it_accepts_an_index_from_before_sources_and_variants(tar: Path, missing: list[str]) -> None:
    expected = run(tar).stdout

    def strip(values: dict[str, Any]) -> None:
        for one in values["samples"] + values["skipped"]:
            for name in missing:
                del one[name]

    rewrite(tar, strip)
    result = run(tar)

    assert (result.returncode, result.stderr, result.stdout) == (0, "", expected)


def test_it_and_qie_accept_variants_that_number_each_row_from_0_and_no_others(variants: Path) -> None:
    dice, found = random.Random(0), Counter[bool]()
    for _ in range(150):
        counts = dice.choice([(1, 1, 4), (2, 3, 1), (4, 1, 1), (2, 2, 2), (1, 3, 2)])
        numbers = [(row, variant) for row, count in enumerate(counts) for variant in range(count)]
        if dice.random() < 0.8:
            numbers[dice.randrange(6)] = dice.randint(-1, 3), dice.randint(-1, 4)
        rows = Counter(row for row, _ in numbers)
        sound = set(rows) == {0, 1, 2} and set(numbers) == {(row, n) for row in rows for n in range(rows[row])}
        skipped = numbers.pop(dice.randrange(6))
        ordered = (skipped, *sorted(numbers))

        def renumber(values: dict[str, Any], places: Any = ordered) -> None:
            for one, (row, variant) in zip(values["skipped"] + values["samples"], places, strict=True):
                one.update(row=row, variant=variant)

        rewrite(variants, renumber)
        result = run(variants)
        found[sound] += 1
        assert result.returncode == (0 if sound else 1), result.stderr
        if sound:
            accounts = read_index(variants.with_suffix(".json")).accounts
            assert [(one.row, one.variant) for one in accounts] == sorted([skipped, *numbers])
        else:
            assert result.stderr.startswith("index: ")
            with pytest.raises(ShardError, match=r"the rows of the index do not add up|damaged"):
                read_index(variants.with_suffix(".json"))
    assert min(found.values()) > 30


def test_it_and_qie_take_tensors_in_any_order_and_ignore_fields_that_the_format_does_not_know(tmp_path: Path) -> None:
    header, about, body = split_record(encode(PLAIN, RECIPE.digest))
    header |= {"pixel_latent": header["control_latent"], "control_latent": header["pixel_latent"]}
    tar = one_record(tmp_path, join_record(header, about | {"colour": 1}, body))

    def add(values: dict[str, Any]) -> None:
        for part in (values, values["samples"][0]):
            part.update(colour=1)

    rewrite_index(tar.with_suffix(".json"), add, own_hash=True)

    result = run(tar)

    assert (result.returncode, result.stderr) == (0, "")
    swapped = replace(PLAIN, pixel_latent=PLAIN.control_latent[0], control_latent=(PLAIN.pixel_latent,))
    assert_same(ShardSet.open([tmp_path]).load(0), swapped)


def test_rows_that_are_all_skipped_and_a_recipe_that_is_not_ascii_are_no_faults(tmp_path: Path) -> None:
    write_shard(tmp_path, [None, None], recipe=make_recipe(background="weiß"))

    result = run(tmp_path / "00000000-00000002.tar")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("rows [0, 2): 0 samples in 0 records, 2 skipped\n")


@pytest.mark.parametrize("sample", [PLAIN, RICH, LARGE], ids=["plain", "rich", "larger than a piece"])
def test_it_prints_every_tensor_as_qie_has_it(tmp_path: Path, sample: Sample) -> None:
    write_shard(tmp_path, [sample])
    tar = tmp_path / "00000000-00000001.tar"
    result = run(tar, sample.key)

    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        f"key {sample.key}",
        f"recipe {RECIPE.digest}",
        f"prompt {sample.prompt!r}",
    ]
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[3:]}
    expected = stored_tensors(sample) | {"empty_prompt_embed": sample.empty_prompt_embed}
    del expected["control_latent"]
    expected |= {f"control_latent[{number}]": latent for number, latent in enumerate(sample.control_latent)}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        dtype, rest = found[name].split(maxsplit=1)
        shape, numbers = rest.split("]")
        words = numbers.split()
        values = tensor.double()
        assert DTYPES[dtype] == tensor.dtype == DTYPES[BY_NAME[name.partition("[")[0]].dtype]
        assert json.loads(shape + "]") == list(tensor.shape)
        assert words[::2] == ["min", "mean", "max"]
        assert [float(word) for word in words[1::2]] == pytest.approx(
            [values.min().item(), values.mean().item(), values.max().item()], rel=1e-5
        )


def test_nothing_that_a_shard_holds_reaches_the_terminal_raw(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 1, RECIPE) as shard:
        shard.add(make_entry(RICH, 0, "\x1b[2J\nname\x9b\x7f"), encode(RICH, RECIPE.digest))
        shard.publish()
    tar = tmp_path / "00000000-00000001.tar"

    results = [run(tar), run(tar, RICH.key)]
    rewrite(tar, lambda values: values["samples"][0].update(key=RICH.key[:6] + "\x1b\x9b"))
    results += [run(tar), run(tar, RICH.key[:6])]

    assert [result.returncode for result in results] == [0, 0, 1, 1]
    printed = "".join(result.stdout + result.stderr for result in results)
    assert all(line.isprintable() for line in printed.split("\n"))


# Wrong usage


@pytest.mark.parametrize("arguments", [[], ["shard"], ["shard.json"], ["a.tar", "b", "c"]], ids=str)
def test_wrong_usage_is_answered_with_the_usage(arguments: list[str]) -> None:
    result = run(*arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert "python tools/read_shard.py SHARD.tar" in result.stderr


def test_a_record_is_found_by_the_beginning_of_a_key_that_no_other_has(tar: Path) -> None:
    for key in (RICH.key, PLAIN.key):  # the latter of two rows
        assert run(tar, key[:6]).stdout == run(tar, key).stdout
    for key in ("", "zz", "0" * 64):
        result = run(tar, key)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.endswith(f"samples of this shard have a key that begins with {key!r}\n")


# Damage to the files


def test_a_tar_or_an_index_that_is_not_there_or_no_json_is_a_fault(tar: Path) -> None:
    index = tar.with_suffix(".json")
    tar.rename(tar.with_suffix(".gone"))
    assert faults(tar) == [f"tar: [Errno 2] No such file or directory: '{tar}'"]
    index.write_text("{")
    assert faults(tar)[0].startswith("index: Expecting property name")
    index.unlink()
    assert faults(tar) == [f"index: [Errno 2] No such file or directory: '{index}'"]


@pytest.mark.parametrize("size", [0, 100, 512, 3000, 7000])
def test_a_truncated_tar_is_a_fault(tar: Path, size: int) -> None:
    tar.write_bytes(tar.read_bytes()[:size])

    assert all(line.startswith(("tar: ", "row ")) for line in faults(tar))


def test_a_flipped_payload_bit_is_a_fault_of_its_rows(tar: Path) -> None:
    content = bytearray(tar.read_bytes())
    content[1500] ^= 1
    tar.write_bytes(content)

    sha256, first, again = faults(tar)

    assert sha256.startswith("tar: sha256: ")
    assert first == "row 0: the record's sha256 differs from the index"
    assert again == "row 3: the record's sha256 differs from the index"
    assert faults(tar, PLAIN.key) == [first, again]
    assert run(tar, RICH.key).returncode == 0


def test_a_tar_header_with_an_owner_and_a_time_is_a_fault(tar: Path) -> None:
    content = tar.read_bytes()
    header = bytearray(content[:512])
    header[108:116], header[136:148], header[148:156] = b"0001750\x00", b"14720000000\x00", b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    tar.write_bytes(bytes(header) + content[512:])
    rewrite(tar, lambda values: values.update(sha256=hashlib.sha256(tar.read_bytes()).hexdigest()))

    (fault,) = faults(tar)
    assert fault.startswith(f"tar: header of {member_name(PLAIN.key)}: ")


# Damage to the index: the tool's word for each

FILE = member_name(PLAIN.key)
INDEX_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no version": (lambda v: v.pop("format_version"), "index: 'format_version' is missing"),
    "version": (lambda v: v.update(format_version=2), "index: format version 2, this script knows 1"),
    "range": (lambda v: v.update(stop=5), "index: range, by its name: '00000000-00000005'"),
    "digest": (lambda v: v["recipe"].update(digest="0" * 16), "index: digest of the recipe: '0000000000000000'"),
    "recipe": (lambda v: v["recipe"].update(areas_px=[1]), f"index: digest of the recipe: '{RECIPE.digest}'"),
    "row gone": (lambda v: v["skipped"].clear(), "index: its rows are not each of [0, 4)"),
    "row in place of another": (lambda v: v["skipped"][0].update(row=3), "index: its rows are not each of [0, 4)"),
    "row outside": (lambda v: v["samples"][2].update(row=4), "index: its rows are not each of [0, 4)"),
    "row twice": (lambda v: v["skipped"].append(v["skipped"][0]), "index: the variants of its rows are not numbered "),
    "no variant 0": (lambda v: v["skipped"][0].update(variant=1), "index: the variants of its rows are not numbered "),
    "row no number": (lambda v: v["samples"][0].update(row="0"), "index: types in row 0: "),
    "variant no number": (lambda v: v["samples"][0].update(variant=False), "index: types in row 0: "),
    "source no name": (lambda v: v["samples"][1].update(source=None), "index: types in row 1: "),
    "own hash": (lambda v: v.update(this_sha256="0" * 64), "index: its own sha256: '0000000000000000"),
    "order": (
        lambda v: v["samples"].reverse(),
        "index: order of rows and variants in samples: [(3, 0), (1, 0), (0, 0)] where [(0, 0), (1, 0), (3, 0)] is due",
    ),
    "field gone": (lambda v: v["samples"][1].pop("tokens"), "index: fields of row 1: "),
    "file gone": (lambda v: v["files"].pop(FILE), "index: names of files, by samples: "),
    "key": (lambda v: v["samples"][1].update(key="K" * 64), "index: names that hold no key: "),
    "filesize": (lambda v: v.update(filesize=1), "tar: size: "),
    "tar's hash": (lambda v: v.update(sha256="0" * 64), "tar: sha256: "),
    "offset": (lambda v: v["files"][FILE].update(offset=1024), f"tar: place of {FILE}: "),
    "far offset": (lambda v: v["files"][FILE].update(offset=10**9), "row 0: offset 1000000000 and size "),
    "size": (lambda v: v["files"][FILE].update(size=100), f"tar: place of {FILE}: "),
    "record's hash": (lambda v: v["files"][FILE].update(sha256=""), "row 0: the record's sha256 differs from the"),
    "target": (lambda v: v["samples"][0]["shape"].update(target=[6, 4]), "row 0: pixel_latent: ('F16', [16, 1, 4, 6])"),
    "controls": (lambda v: v["samples"][1]["shape"]["controls"].reverse(), "row 1: control_shapes: [[16, 1, 2, 3], "),
    "tokens": (lambda v: v["samples"][0].update(tokens=8), "row 0: prompt_embed: ('F16', [9, 8]) where "),
    "empty tokens": (lambda v: v["samples"][0].update(empty_tokens=9), "row 0: empty_prompt_embed: ('F16', [2, 8])"),
    "bytes": (lambda v: v["samples"][0].update(tensor_bytes={}), "row 0: tensor_bytes: {} where "),
    "clipped": (lambda v: v["samples"][1].update(clipped=0), "row 1: clipped: 3 where 0 is due"),
    "nonsense": (lambda v: v.update(samples={"0": 1}), "index: "),
    "infinite": (lambda v: v.update(stop=float("inf")), "index: "),
}


@pytest.mark.parametrize(("change", "fault"), INDEX_FAULTS.values(), ids=INDEX_FAULTS)
def test_a_damaged_index_is_a_fault(tar: Path, change: Callable[[dict[str, Any]], object], fault: str) -> None:
    rewrite(tar, change)

    found = faults(tar)

    assert any(line.startswith(fault) for line in found), found


# Damage within a record whose hashes are right

RECORD_FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "version": (lambda header, about: about.update(format_version=2), "row 0: format_version: 2 where 1 is due"),
    "key": (lambda header, about: about.update(key=RICH.key), f"row 0: key: '{RICH.key}' where '{PLAIN.key}' is due"),
    "recipe": (lambda header, about: about.update(recipe="0" * 16), "row 0: recipe: '0000000000000000' where "),
    "prompt": (lambda header, about: about.update(prompt="e\u0301"), "row 0: prompt: 'e\u0301' where '\u00e9' is due"),
    "no prompt": (lambda header, about: about.pop("prompt"), "row 0: 'prompt' is missing"),
    "prefix": (lambda header, about: about.update(shared_prefix=4), "row 0: empty_prompt_embed: "),
    "long prefix": (lambda header, about: about.update(shared_prefix=99), "row 0: shared_prefix: 99 where 7 is due"),
    "no tensor": (lambda header, about: header.pop("prompt_embeds_mask"), "row 0: "),
    "dtype": (lambda header, about: header["prompt_embed"].update(dtype="F32"), "row 0: not a dtype: 'F32'"),
    "shape": (lambda header, about: header["prompt_embed"].update(shape=[8, 9]), "row 0: prompt_embed: "),
    "size": (lambda header, about: header["prompt_embed"].update(shape=[9, 9]), "row 0: prompt_embed has data_offsets"),
    "negative": (lambda header, about: header["prompt_embed"].update(shape=[-9, -8]), "row 0: not a shape: [-9, -8]"),
    "offsets": (
        lambda header, about: header["prompt_embed"].update(data_offsets=[0, 144]),
        "row 0: control_latent has data_offsets [0, 768] instead of [144, 912]",
    ),
}


@pytest.mark.parametrize(("change", "fault"), RECORD_FAULTS.values(), ids=RECORD_FAULTS)
def test_a_record_that_its_index_does_not_describe_is_a_fault(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object], fault: str
) -> None:
    header, about, body = split_record(encode(PLAIN, RECIPE.digest))
    change(header, about)
    tar = one_record(tmp_path, join_record(header, about, body))

    found = faults(tar)

    assert any(line.startswith(fault) for line in found), found
    assert faults(tar, PLAIN.key) == found


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (b"", "row 0: cut short or damaged, "),
        (b"\x00" * 7, "row 0: cut short or damaged, "),
        (b"\xff" * 8 + b"{}", "row 0: the header is longer than the record"),
        (b"\x02" + b"\x00" * 7 + b"{}", "row 0: '__metadata__' is missing"),
        (encode(PLAIN, RECIPE.digest) + b"\x00", "row 0: the record's tensors end at "),
    ],
    ids=["empty", "short", "header", "metadata", "long"],
)
def test_bytes_that_are_no_record_are_a_fault(tmp_path: Path, record: bytes, fault: str) -> None:
    (found,) = faults(one_record(tmp_path, record))

    assert found.startswith(fault)


# And any other damage


def test_a_mutated_index_is_never_more_than_a_fault(tar: Path) -> None:
    dice = random.Random(0)
    text = tar.with_suffix(".json").read_text(encoding="utf-8")

    found = Counter[int]()
    for _ in range(150):
        tar.with_suffix(".json").write_text(mutated_json(text, dice), encoding="utf-8")
        result = run(tar)
        assert bool(result.returncode) == bool(result.stderr)
        found[result.returncode] += 1

    assert found.keys() == {0, 1} and found[1] > 120, "what the tool does not look at should be little"


def test_a_flipped_bit_anywhere_in_the_tar_is_a_fault(tar: Path) -> None:
    dice = random.Random(0)
    content = tar.read_bytes()

    for bit in [8 * 110, 8 * 1500, *dice.sample(range(8 * len(content)), 100)]:  # an owner, a record, anything
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        tar.write_bytes(damaged)
        assert faults(tar)[0].startswith("tar: sha256: ")

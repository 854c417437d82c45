"""qie-stats --html --gallery all: every row on the page, its pictures in the page or in files beside it."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from qie.errors import ShardError
from qie.html_report import all_rows
from qie.html_report.all_rows import write_all_rows
from qie.html_report.gallery import look_at
from qie.shards.discovery import find_indexes
from qie.shards.pictures import SmallPictures, decode_pictures, encode_pictures
from qie.shards.reader import Shard
from qie.shards.writer import ShardWriter
from qie.stats import change_excluded, summarise
from qie.stores import LocalFolder
from tests.builders import RECIPE, encode, make_entry, make_sample, make_skipped, plant_shard, write_shard
from tests.stats.pages import COLOURS, SCRIPT, Page, run

PROMPTS = [SCRIPT, "make it \u202e night", "w" * 1000, "", "make it blue"]


def pictures(number: int, *, mask: bool = False) -> bytes:
    colour, other = COLOURS[number % len(COLOURS)], COLOURS[(number + 1) % len(COLOURS)]
    grey = Image.new("L", (24, 16)) if mask else None
    return encode_pictures(
        SmallPictures(Image.new("RGB", (24, 16), colour), (Image.new("RGB", (24, 16), other),), grey)
    )


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Five samples with pictures, one of them with notes, and one row that was skipped."""
    folder = tmp_path / "my shards"
    with ShardWriter(folder, 0, 6, RECIPE) as writer:
        for row, prompt in enumerate(PROMPTS):
            sample = make_sample(row, prompt=prompt, tokens=9 + row)
            notes = ("the target has several frames: the first is used",) if row == 1 else ()
            entry = replace(make_entry(sample, row), notes=notes)
            writer.add(entry, encode(sample, RECIPE.digest), pictures(row, mask=row == 2))
        writer.skip(make_skipped(5, "</script> no image"))
        writer.publish()
    return folder


def browsed(folder: Path, page: Path) -> tuple[dict[str, Any], list[Any]]:
    """The facts that a page has, and the pictures of all samples, in order, wherever they are."""
    run(folder, "--html", page, "--gallery", "all")
    found = Page(page.read_text("utf-8"))
    assert found.all("script")[0] == {"type": "application/json", "id": "all-rows"}
    about = json.loads(found.inside["script"][0])
    if "facts" in about:
        return about["facts"], list(chain(*about["chunks"]))

    def call(file: Path, name: str) -> Any:
        text = file.read_text("ascii")
        assert text.startswith(f"{name}(") and text.endswith(");\n") and "<" not in text
        return json.loads(f"[{text[len(name) + 1 : -3]}]")

    beside = page.with_name(about["folder"])
    (facts,) = call(beside / "facts.js", "qieFacts")
    chunks = [call(file, "qiePictures") for file in sorted(beside.glob("pictures-*.js"))]
    assert [number for number, _ in chunks] == list(range(len(chunks)))
    return facts, list(chain(*(chunk for _, chunk in chunks)))


@pytest.mark.parametrize("inline", [True, False])
def test_every_row_has_its_facts_and_its_pictures(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    if not inline:
        monkeypatch.setattr(all_rows, "MOST_INLINE", 2)
        monkeypatch.setattr(all_rows, "CHUNK", 2)
    facts, found = browsed(shards, tmp_path / "page.html")
    assert (tmp_path / "page_files").exists() is not inline
    assert facts["row"] == list(range(6)) and facts["samples"] == 5 and facts["tokens"] == [*range(9, 14), 0]
    assert facts["prompt"] == [SCRIPT, r"make it \u202e night", "w" * 400 + " … (1,000 characters)", "", PROMPTS[4], ""]
    assert len(facts["keys"]) == 5 * 16 and facts["folders"] == [f"'{shards}'"]
    assert facts["sizes"][0] == ["48×32 px", "48×32", 48 * 32]
    said = {int(at): [facts["reasons"][one] for one in why] for at, why in facts["why"].items()}
    assert said == {1: ["the target has several frames: the first is used"], 5: ["skipped: </script> no image"]}
    jpegs = [base64.b64decode(content) for *_, content in found]
    assert jpegs == [pictures(row, mask=row == 2) for row in range(5)]
    assert found[2][:3] == [72, 16, [["control", 0, 24, 16], ["target", 24, 24, 16], ["mask", 48, 24, 16]]]


def test_excluded_and_damaged_samples_say_so_and_what_has_no_pictures_has_none(shards: Path, tmp_path: Path) -> None:
    plant_shard(shards, [make_sample(9), replace(make_sample(10), pictures=b"no JPEG")], start=6)
    change_excluded(find_indexes([shards]), ["3"], [])
    run(shards, "--html", tmp_path / "page.html", "--gallery", "all", code=1)
    about = json.loads(Page((tmp_path / "page.html").read_text("utf-8")).inside["script"][0])
    said = [about["facts"]["reasons"][one] for one in about["facts"]["why"]["3"]]
    assert said == ["excluded"]
    assert about["chunks"][0][5:7] == [None, None]
    assert "the pictures of a sample cannot be read" in (tmp_path / "page.html").read_text("utf-8")


def test_a_second_page_takes_the_place_of_the_first_and_leaves_other_files(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_rows, "MOST_INLINE", 2)
    beside = tmp_path / "page_files"
    beside.mkdir()
    (beside / "pictures-00099.js").write_text("old")
    (beside / "mine.txt").write_text("kept")
    facts, _ = browsed(shards, tmp_path / "page.html")
    assert len(facts["row"]) == 6
    assert {path.name for path in beside.iterdir()} == {"mine.txt", "facts.js", "pictures-00000.js"}


def test_cards_of_a_page_of_some_show_controls_beside_the_target_under_its_mask(shards: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run(shards, "--html", page)
    alts = [image["alt"] for image in Page(page.read_text("utf-8")).all("img")]
    due = [[f"control of row {row}", f"target of row {row}"] + ["its mask"] * (row == 2) for row in range(5)]
    assert alts == list(chain(*due))


def test_the_prompt_of_a_sample_is_read_without_its_tensors(tmp_path: Path) -> None:
    samples = [make_sample(0, prompt="short"), make_sample(1, prompt="long " * 3000), make_sample(2)]
    for number, sample in enumerate(samples):
        plant_shard(tmp_path, [sample], start=number)
        shard = Shard(tmp_path / f"{number:08d}-{number + 1:08d}.json")
        assert shard.prompt(shard.index.samples[0]) == sample.prompt
    tar = tmp_path / "00000002-00000003.tar"
    content = bytearray(tar.read_bytes())
    content[512:520] = b"\xff" * 8
    tar.write_bytes(content)
    with pytest.raises(ShardError, match="longer than the record"):
        Shard(tar.with_suffix(".json")).prompt(shard.index.samples[0])


def test_without_pictures_a_decoder_shows_the_rejected_target_too(tmp_path: Path) -> None:
    write_shard(tmp_path, [make_sample(0, paired=True), make_sample(1)])
    indexes, seen = find_indexes(tmp_path), []

    def decode(latent: torch.Tensor) -> Image.Image:
        seen.append(latent)
        return Image.new("RGB", (8, 8))

    look = look_at(indexes, summarise(indexes), gallery=2, decode=decode)
    assert [card.pictures.rejected is not None for card in look.cards] == [True, False]
    found, _ = write_all_rows(indexes, LocalFolder(tmp_path / "beside"), rows=2, decode=decode)
    names = [[name for name, *_ in pictures[2]] for pictures in found["chunks"][0]]
    assert names == [["control", "target", "rejected"], ["control", "target"]]
    rejected = make_sample(0, paired=True).rejected_latent
    assert sum(torch.equal(one, rejected) for one in seen) == 2 and len(seen) == 2 * 5


def test_pictures_that_say_they_are_elsewhere_are_not_shown(tmp_path: Path) -> None:
    jpeg = pictures(0).replace(b'["target",24,', b'["target",25,')
    with pytest.raises(ShardError, match="cannot be read"):
        decode_pictures(jpeg, "here")

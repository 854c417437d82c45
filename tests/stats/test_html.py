"""The page of qie-stats --html: it needs nothing but itself, shows what is there, and believes nothing of it."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import re
import shutil
import tomllib
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qie.html_report import gallery
from qie.html_report.charts import whiskers
from qie.html_report.gallery import LOOKED_AT, look_at, spread
from qie.html_report.latents import LatentCounts
from qie.html_report.markup import Html, join, shown, tag
from qie.shards.discovery import find_indexes
from qie.shards.index import Entry, Skipped
from qie.shards.record import encode
from qie.shards.writer import ShardWriter
from qie.stats import summarise
from qie.types import Row
from tests.builders import RECIPE, make_recipe, make_sample, write_shard
from tests.conftest import ROOT
from tests.stats.pages import COLOURS, SCRIPT, Page, page_of, run, write_colours

NASTY = [
    SCRIPT,
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "\"' onmouseover='alert(4)",
    "</style><svg onload=alert(5)>",
    "<!-- & --> &lt;b&gt; &#x3c;",
]
KNOWN = set(
    re.findall(
        r"\w+",
        "html head meta title link style script body header main footer nav section div p span strong small h1 h2 h3 a "
        "ul ol li dl dt dd table thead tbody tr th td details summary code bdi img svg g rect line circle polyline "
        "text",
    )
)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Six rows of known colours and one that was skipped, in two shards."""
    folder = tmp_path / "shards"
    write_colours(folder, ["make it red", "make it green", "make it blue"])
    write_colours(folder, ["make it night", None], start=3)
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


def damage(tar: Path, at: int = 3000) -> None:
    content = bytearray(tar.read_bytes())
    content[at] ^= 1
    tar.write_bytes(content)


# One file, whatever is in it


def assert_safe(found: Page) -> None:
    """That nothing is in the page but what the page itself is made of."""
    assert {name for name, _ in found.tags} - {""} <= KNOWN
    assert len(found.all("script")) == len(found.all("style")) == 1
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("data:", "#")), attributes
    assert not re.search(r"https?:|@import|url\(", found.source)


def test_the_page_is_one_file_whose_policy_allows_its_own_script_and_style_and_no_other(
    shards: Path, page: Path
) -> None:
    found = page_of(shards, page=page)
    assert_safe(found)
    assert page_of(shards, page=page).source == found.source, "equal shards are equal pages"
    (policy,) = [meta["content"] for meta in found.all("meta") if "http-equiv" in meta]
    for kind in ("script", "style"):
        (text,) = found.inside[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ") and "unsafe" not in policy


@pytest.mark.parametrize("text", NASTY)
def test_whatever_a_shard_says_or_its_folder_is_called_stays_text(tmp_path: Path, page: Path, text: str) -> None:
    sample = replace(make_sample(0, prompt=text), notes=(text,))
    folder = tmp_path / text.replace("/", "")
    with ShardWriter(folder, 0, 2, RECIPE) as shard:
        row = Row(0, text, b"", (), "", source=text)
        shard.add(Entry.of(sample, row), encode(sample, RECIPE.digest))
        shard.skip(Skipped(1, text, text, source=text))
        shard.publish()

    found = page_of(folder, page=page)

    assert_safe(found)
    assert folder.name in found.text
    assert found.text.count(text) >= 5, "prompt, name and source of the card; name and reason of the skipped row"


def test_what_cannot_be_seen_or_turns_the_text_is_written_out(tmp_path: Path, page: Path) -> None:
    prompt = "a\u202eb\u2066c\x00d\x1b[31me\x85f\u2028g\ud800h"
    fine = "\u0627\u062c\u0639\u0644 \U0001f468\u200d\U0001f467"
    write_colours(tmp_path / "shards", [prompt.replace("\ud800", ""), fine])
    found = page_of(tmp_path / "shards", page=page)
    assert r"a\u202eb\u2066c\x00d\x1b[31me\x85f\u2028gh" in found.text
    assert fine in found.text, "other scripts and emoji are as they are"
    kinds = {unicodedata.category(char) for char in found.source if char not in "\n\u200d"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert shown(prompt).encode(), "not even half a character stops the page"


def test_markup_escapes_all_but_markup() -> None:
    made = tag("p", "<&>", Html("<br>"), class_="a\"b'", data_x=None)
    assert made == '<p class="a&quot;b&#x27;">&lt;&amp;&gt;<br></p>'
    assert join("<", tag("b", "<")) == "&lt;<b>&lt;</b>"
    assert tag("rect", x=1.0, y=2.345, width=3) == '<rect x="1" y="2.35" width="3"></rect>'


def test_a_page_of_many_faults_skipped_rows_and_shapes_stays_small_and_says_what_it_leaves_out(
    tmp_path: Path, page: Path
) -> None:
    folder = tmp_path / "shards"
    sample = make_sample(0, prompt="y" * 100_000)
    with ShardWriter(folder, 0, 1500, RECIPE) as shard:
        shard.add(Entry.of(sample, Row(0, "n" * 5000, b"", (), "", source="s" * 5000)), encode(sample, RECIPE.digest))
        for row in range(1, 1500):
            shard.skip(Skipped(row, "n" * 5000, f"{row} " + "r" * 5000))
        shard.publish()
    for number in range(2, 132):
        (folder / f"{number * 1000:08d}-{number * 1000 + 1:08d}.json").write_text("{")

    found = page_of(folder, page=page, code=1)

    assert page.stat().st_size < 1_000_000
    assert "(100,000 characters)" in found.text and "y" * 401 not in found.text
    assert "and 1,299 more skipped rows" in found.text and "and 30 more faults" in found.text
    assert "and 1,479 more, 1,479 rows in all" in found.text, "reasons"


# What it shows


def test_the_page_shows_the_summary_that_table_and_json_show(shards: Path, page: Path) -> None:
    plain = json.loads(run(shards, "--json").stdout)
    values = json.loads(run(shards, "--json", "--html", page).stdout)
    text = Page(page.read_text("utf-8")).text

    assert values == plain
    assert f"samples {values['samples']} " in text and f"rows {values['rows']} 1 skipped" in text
    for shape, count in values["shapes"].items():
        assert f"{shape} {count}" in text
    for name, value in values["tokens"].items():
        assert name in text and f" {value} " in text
    for digest, fields in values["recipe_fields"].items():
        assert digest in text and fields["family"] in text
    assert "the target is no image 1 " in text, "by reason"
    assert f"4 row 4 the target is no image {shards / '00000003-00000005.tar'}" in text


def test_each_sample_has_its_prompt_its_sizes_and_its_thumbnail(shards: Path, page: Path) -> None:
    found = page_of(shards, page=page)

    for prompt in ("make it red", "make it green", "make it blue", "make it night"):
        assert prompt in found.text
    assert found.text.count("size 64×48 px from 64×48 px") == 4
    assert [image["alt"] for image in found.all("img")] == [f"target of row {row}" for row in range(4)]
    for pixels, colour in zip(found.pictures, [*COLOURS[:3], COLOURS[0]], strict=True):
        assert pixels.shape == (36, 48, 3)
        assert np.abs(pixels.astype(int) - colour).max() <= 4


def test_without_thumbnails_the_page_says_how_to_get_pictures(tmp_path: Path, page: Path) -> None:
    write_shard(tmp_path / "shards", [make_sample(0, prompt="make it night")])
    found = page_of(tmp_path / "shards", page=page)
    assert not found.all("img") and "no picture" in found.text and "make it night" in found.text
    assert "--vae MODEL_DIR" in found.text and "cache.thumbnail_px" in found.text


def test_with_a_vae_latents_become_the_pictures_that_diffusers_makes_of_them(
    tmp_path: Path, page: Path, tiny_edit: Path, encoder, photos: Path
) -> None:
    from diffusers import AutoencoderKLQwenImage
    from diffusers.image_processor import VaeImageProcessor

    from qie.data.sources import open_source
    from qie.precompute import precompute

    precompute(open_source(photos), encoder, tmp_path / "shards", rows=(0, 2), shard_size=2)
    found = page_of(tmp_path / "shards", "--vae", tiny_edit, page=page)
    vae = AutoencoderKLQwenImage.from_pretrained(tiny_edit / "vae")
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    assert len(found.pictures) == 4 and "colours may be off" not in found.text
    samples = [encoder.encode(open_source(photos).read(number)) for number in range(2)]
    latents = [latent for one in samples for latent in (*one.control_latent, one.pixel_latent)]
    for latent, pixels in zip(latents, found.pictures, strict=True):
        with torch.inference_mode():
            decoded = vae.decode(latent[None].float() * std + mean).sample[:, :, 0]
        expected = VaeImageProcessor().postprocess(decoded, output_type="pil")[0]
        assert np.abs(pixels.astype(int) - np.asarray(expected)).mean() < 6, "no more than JPEG does"


def test_a_stored_thumbnail_goes_before_a_vae_and_that_another_vae_decoded_what_is_shown_is_said(
    shards: Path, tmp_path: Path, page: Path, tiny_edit: Path
) -> None:
    found = page_of(shards, "--vae", tiny_edit, page=page)
    assert np.abs(found.pictures[0].astype(int) - COLOURS[0]).max() <= 4
    assert "colours may be off" not in found.text
    write_shard(tmp_path / "none", [make_sample(0)])
    found = page_of(tmp_path / "none", "--vae", tiny_edit, page=page)
    assert len(found.pictures) == 2 and "colours may be off" in found.text


def test_the_gallery_has_as_many_samples_as_are_asked_for_and_as_there_are(
    shards: Path, tmp_path: Path, page: Path
) -> None:
    for count in (2, 0):
        assert len(page_of(shards, "--gallery", count, page=page).all("img")) == count
    write_shard(tmp_path / "none", [None, None])
    found = page_of(tmp_path / "none", page=page)
    assert "0 of 0 samples" in found.text and "No record could be read" in found.text


def test_statistics_of_latents_are_those_of_their_values() -> None:
    latents = [torch.randn(16, 1, 5, 7, generator=torch.Generator().manual_seed(n)).half() * 3 for n in range(3)]
    counts = LatentCounts()
    assert counts.statistics() is None
    for latent in latents:
        counts.add(latent)
    found = counts.statistics()
    assert found is not None
    values = torch.stack(latents, dim=1).reshape(16, -1).double()
    assert (found.samples, found.values) == (3, values.numel())
    assert found.means == pytest.approx(values.mean(dim=1).tolist())
    assert found.deviations == pytest.approx(values.std(dim=1, correction=0).tolist())
    assert sum(found.histogram) + found.beyond == found.values
    assert found.beyond == int((values.abs() > found.limit).sum()) <= 0.005 * found.values
    expected, _ = np.histogram(values.numpy(), len(found.histogram), (-found.limit, found.limit))
    assert list(found.histogram) == expected.tolist()


@pytest.mark.parametrize("channels", [16, 64])
def test_of_many_channels_some_have_their_number_under_them(channels: int) -> None:
    drawing = str(whiskers([0.0] * channels, [1.0] * channels, "it", "channel", "value"))
    numbered = re.findall(r'<text x="[\d.]+" y="191"[^>]*>(\d+)</text>', drawing)
    assert [int(number) for number in numbered] == list(range(0, channels, channels // 16))
    assert drawing.count("<circle") == channels


@pytest.mark.parametrize(("count", "among"), [(0, 5), (3, 0), (1, 7), (3, 9), (9, 3), (64, 10_000), (7, 7)])
def test_what_is_looked_at_is_spread_evenly(count: int, among: int) -> None:
    chosen = spread(count, among)
    assert len(chosen) == min(count, among) == len(set(chosen))
    assert all(0 <= place < among for place in chosen)
    gaps = np.diff([-1, *chosen, among]) if chosen else [0]
    assert max(gaps[1:-1], default=0) - min(gaps[1:-1], default=0) <= 1


def test_of_many_records_a_bounded_number_is_read_from_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in range(0, 90, 30):
        write_shard(tmp_path, [make_sample(start + n) for n in range(30)], start=start)
    read: list[int] = []
    attempt = gallery._attempt
    monkeypatch.setattr(gallery, "_attempt", lambda shard, entry: read.append(entry.row) or attempt(shard, entry))
    indexes = find_indexes([tmp_path])

    look = look_at(indexes, summarise(indexes), gallery=10)

    assert len(read) == LOOKED_AT == look.latents.samples and len(look.cards) == 10
    assert [sum(start <= row < start + 30 for row in read) for start in (0, 30, 60)] == [21, 22, 21]
    assert [card.entry.row // 30 for card in look.cards].count(1) in (3, 4)


def test_colours_can_be_told_from_what_is_behind_them() -> None:
    """The contrast that WCAG 2 asks of text, of both colour schemes."""
    css = (ROOT / "qie" / "html_report" / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for ink in ("ink", "soft", "main", "bad", "good", "warn"):
            for behind in ("page", "card"):
                one, other = sorted((luminance(colours[ink]), luminance(colours[behind])))
                assert (other + 0.05) / (one + 0.05) >= 4.5, (ink, behind)


def test_the_pages_files_are_part_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["qie.html_report"]
    folder = ROOT / "qie" / "html_report"
    others = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert others == {path.name for pattern in data for path in folder.glob(pattern)} != set()


# Faults


def test_a_damaged_record_is_a_fault_on_the_page_and_of_the_command_and_the_others_are_shown(
    shards: Path, page: Path
) -> None:
    damage(shards / "00000000-00000003.tar")

    assert run(shards).exit_code == 0, "indexes alone do not tell"
    result = run(shards, "--html", page, code=1)
    found = Page(page.read_text("utf-8"))

    assert "fault: a record is damaged" in result.stderr and "00000000-00000003.tar" in result.stderr
    assert "1 fault " in found.text and "a record is damaged" in found.text
    assert len(found.all("img")) == 3 and "No faults found" not in found.text
    plain = json.loads(run(shards, "--verify", "--json", code=1).stdout)["faults"]
    assert json.loads(run(shards, "--verify", "--json", "--html", page, code=1).stdout)["faults"] == plain
    assert "in shards with faults" in page.read_text("utf-8"), "rehashing and looking blame a shard once"


@pytest.mark.parametrize("kind", ["no json", "foreign", "no tar", "short tar", "mixed"])
def test_what_is_wrong_with_a_shard_stands_on_the_page_beside_the_others(shards: Path, page: Path, kind: str) -> None:
    index, tar = shards / "00000003-00000005.json", shards / "00000003-00000005.tar"
    if kind in ("no json", "foreign"):
        index.write_text("{" if kind == "no json" else '{"images": []}')
    elif kind == "no tar":
        tar.unlink()
    elif kind == "short tar":
        tar.write_bytes(tar.read_bytes()[:-512])
    else:
        other = make_recipe(multiple_px=16, thumbnail_px=48)
        write_shard(shards, [make_sample(9, recipe=other)], start=5, recipe=other)

    result = run(shards, "--html", page, code=1)
    found = Page(page.read_text("utf-8"))

    (line,) = [line for line in result.stderr.splitlines() if line.startswith("fault: ")]
    assert line.removeprefix("fault: ") in found.text
    assert "1 fault " in found.text and "make it red" in found.text
    assert ("multiple_px: 32 here, 16 there" in found.text) == (kind == "mixed")


def test_a_latent_that_holds_nan_is_a_fault_and_counts_for_nothing(tmp_path: Path, page: Path) -> None:
    sample = make_sample(1)
    sample.pixel_latent.view(-1)[7] = float("nan")
    write_shard(tmp_path / "shards", [make_sample(0), sample])
    found = page_of(tmp_path / "shards", page=page, code=1)
    assert "NaN or infinity" in found.text and "of 1 samples, mean" in found.text


def test_a_shard_that_is_gone_while_it_is_looked_at_is_a_fault(shards: Path) -> None:
    indexes = find_indexes([shards])
    summary = summarise(indexes)
    (shards / "00000003-00000005.tar").unlink()
    look = look_at(indexes, summary, gallery=5)
    assert len(look.cards) == 3 and len(look.faults) == 1 and "the shard is missing" in look.faults[0]


def test_coverage_says_what_is_there_of_each_folder(shards: Path, tmp_path: Path, page: Path) -> None:
    write_colours(shards, ["a", "b"], start=8)
    (shards / "00000010-00000012.json").write_text("{")
    write_colours(tmp_path / "other", ["c"])
    found = page_of(shards, tmp_path / "other", page=page, code=1)
    labels = [svg["aria-label"] for svg in found.all("svg") if svg.get("class") == "strip"]
    assert labels == [
        "rows 0 to 12: 7 covered, 2 in shards with faults, 1 skipped, 3 missing",
        "rows 0 to 1: 1 covered",
    ]
    cells = [
        (rect["class"], int(rect["x"]), int(rect["width"])) for rect in found.all("rect") if "cell" in rect["class"]
    ]
    assert cells[:5] == [
        ("cell covered", 0, 5),
        ("cell missing", 5, 3),
        ("cell covered", 8, 2),
        ("cell faulty", 10, 2),
        ("cell skipped", 4, 1),
    ]


# Places that are refused, and pages that stay


@pytest.mark.parametrize(
    "place", ["page.txt", "page", "shards/00000000-00000003.tar", "nowhere/page.html", "taken.html", ""]
)
def test_a_page_that_could_not_be_written_is_refused_before_the_work(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "taken.html").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qie.stats.summarise", lambda *_, **__: pytest.fail("it worked first"))
    before = (shards / "00000000-00000003.tar").read_bytes()
    result = run(shards, "--html", place, code=2)
    assert result.stderr.startswith(("error: --html names no page", "error: the file cannot be written there"))
    assert (shards / "00000000-00000003.tar").read_bytes() == before
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    error = run(shards, "--html", "page.html", code=2).stderr
    assert "the file cannot be written there" in error and "found:    a folder that must not be written to" in error


def test_a_vae_that_is_none_or_has_no_weights_is_refused_before_the_work(
    shards: Path, page: Path, tmp_path: Path, tiny_edit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    shutil.copytree(tiny_edit, tmp_path / "model", ignore=lambda _, names: fnmatch.filter(names, "*.safetensors"))
    monkeypatch.setattr("qie.stats.summarise", lambda *_, **__: pytest.fail("it worked first"))
    none = "--vae takes the folder of a model"
    for place, what in (("photos", none), ("nowhere", none), ("model", "the vae cannot be loaded")):
        result = run(shards, "--html", page, "--vae", tmp_path / place, code=2)
        assert what in result.stderr and place in result.stderr
        assert not page.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plan", "--html", "a.html"], "--plan cannot be combined with --html"),
        (["--explain", "s", "--config", "c", "--html", "a.html"], "--explain cannot be combined with --html"),
        (["--vae", "m"], "--vae and --gallery need --html"),
        (["--gallery", "3"], "--vae and --gallery need --html"),
    ],
)
def test_options_that_do_not_fit_the_page_are_refused(shards: Path, arguments: list[str], named: str) -> None:
    assert named in run(shards, *arguments, code=2).stderr


def test_a_page_that_fails_while_it_is_written_leaves_the_old_one(
    shards: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_text("old")

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = run(shards, "--html", page, code=1)
    assert "No space left on device" in result.stderr
    assert page.read_text() == "old" and sorted(path.name for path in page.parent.iterdir()) == ["page.html", "shards"]


def test_no_shards_no_page(tmp_path: Path, page: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no shards found" in run(tmp_path / "empty", "--html", page, code=2).stderr
    assert not page.exists()

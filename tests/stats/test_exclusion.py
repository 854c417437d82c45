"""Leaving samples out by qie-stats: the list is changed whole or not at all, and no count has what is on it."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from qie.data.opening import open_stream
from qie.shards.discovery import find_indexes
from qie.shards.excluded import EXCLUDED_NAME, read_excluded
from qie.shards.shard_set import ShardSet
from qie.stats import explain_rows, preview_epoch, summarise
from qie.stores import LocalFolder
from tests.builders import make_sample, write_shard
from tests.precompute.test_engine import files
from tests.stats.pages import page_of, run, write_colours
from tests.stream.checks import all_facts, write
from tests.stubs import RECIPE, StubSource

ROWS, GONE = 60, (4, 31, 59)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "shards", ROWS, shard_size=16)


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "shards"))


def keys(shards: Path) -> list[str]:
    return ShardSet.open(shards).keys


def listed(shards: Path) -> dict[str, str]:
    return read_excluded(LocalFolder(shards))


def test_three_of_sixty_by_row_key_and_prefix_are_listed_with_their_row_and_no_shard_is_touched(shards: Path) -> None:
    known, before = keys(shards), files(shards)
    said = run(shards, "--exclude", 4, "--exclude", known[31], "--exclude", known[59][:16].upper()).stdout
    assert [line.split(" in ")[0] for line in said.splitlines()] == [
        *(f"excluded row {row} (row{row})" for row in GONE),
        f"3 keys are excluded now: {shards / EXCLUDED_NAME}",
    ]
    assert sorted(listed(shards)) == sorted(known[row] for row in GONE)
    assert all(re.fullmatch(rf"row {row} row{row}, \d{{4}}-\d\d-\d\d", listed(shards)[known[row]]) for row in GONE)
    text = (shards / EXCLUDED_NAME).read_text()
    assert (run(shards, "--exclude", 4).exit_code, (shards / EXCLUDED_NAME).read_text()) == (0, text)
    assert {name: content for name, content in files(shards).items() if name != EXCLUDED_NAME} == before

    by_hand = text.replace("row 4 ", "its owner asked, row 4 ")
    (shards / EXCLUDED_NAME).write_text(by_hand)
    run(shards, "--exclude", 4)
    assert (shards / EXCLUDED_NAME).read_text() == by_hand
    assert "at once" in run(shards, "--exclude", 4, "--include", 4, code=2).stderr
    run(shards, "--include", 4, "--include", known[31][:8])
    assert list(listed(shards)) == [known[59]]
    assert "0 keys are excluded now in" in run(shards, "--include", 59).stdout
    assert files(shards) == before


def test_all_variants_of_a_row_go_and_so_does_equal_content_in_any_folder(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    samples = [make_sample(n) for n in range(3)]
    write_shard(one, [samples[0], samples[1], samples[0]])
    write_shard(two, [samples[2]] * 8 + [samples[0]])
    said = run(one, two, "--exclude", samples[0].key).stdout
    assert [line.partition(" (")[0] for line in said.splitlines()[:3]] == [f"excluded row {row}" for row in (0, 2, 8)]
    assert list(listed(one)) == list(listed(two)) == [samples[0].key]
    assert listed(one)[samples[0].key].startswith("row 0 ") and listed(two)[samples[0].key].startswith("row 8 ")
    assert summarise(find_indexes([one, two])).excluded == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--exclude", "60"], "no sample has a row of this number"),
        (["--exclude", "f" * 64], "no sample has a key that begins so"),
        (["--exclude", "0123456789"], "no sample has a key that begins so"),  # too long for a row
        (["--exclude", "row4"], "this names no sample"),
        (["--exclude", "abcdef1"], "this names no sample"),
        (["--include", "4"], "no excluded sample has a row of this number"),
        (["--include", "f" * 8], "no excluded sample has a key that begins so"),
        (["--exclude", "4", "--verify"], "--exclude cannot be combined with --verify"),
        (["--exclude", "4", "--plan"], "--exclude cannot be combined with --plan"),
        (["--include", "4", "--json"], "--exclude cannot be combined with --json"),
    ],
)
def test_what_names_no_sample_is_refused_and_nothing_is_half_done(
    shards: Path, arguments: list[str], said: str
) -> None:
    assert said in run(shards, "--exclude", "7", *arguments, code=2).stderr
    assert not (shards / EXCLUDED_NAME).exists()


def test_a_row_of_several_folders_and_the_beginning_of_several_keys_are_ambiguous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("one", "two")):
        write_shard(tmp_path / name, [make_sample(number)])
    said = run(tmp_path / "one", tmp_path / "two", "--exclude", 0, code=2).stderr
    assert "several folders have a row of this number" in said and "name one folder" in said
    key = make_sample(0).key
    (tmp_path / "one" / EXCLUDED_NAME).write_text(f"{key[:10]}{'0' * 54}\n{key[:10]}{'1' * 54}\n")
    said = run(tmp_path / "one", "--include", key[:9] + key[9], code=2).stderr
    assert "several samples have a key that begins so" in said and "give more of the key" in said


def test_summary_plan_and_explanation_leave_them_out_and_say_so(shards: Path) -> None:
    indexes = find_indexes([shards])
    before, plans = summarise(indexes), preview_epoch(indexes, batch_size=2, world=2)
    run(shards, *(argument for row in GONE for argument in ("--exclude", row)))
    now = summarise(indexes, verify=True)
    assert (before.excluded, now.excluded, now.samples, now.rows, now.faults) == (0, 3, ROWS - 3, ROWS, [])
    assert now.records == ROWS - 3 and sum(now.shapes.values()) == sum(now.sources.values()) == ROWS - 3
    assert sum(count for *_, count in now.lengths) == ROWS - 3 and now.bytes == before.bytes
    entries = [entry for entry in ShardSet.open(shards).entries if entry.row in GONE]
    for name, size in before.tensor_bytes_total.items():
        assert now.tensor_bytes_total[name] == size - sum(entry.tensor_bytes[name] for entry in entries)
    assert "\nexcluded  3\n" in run(shards).stdout and json.loads(run(shards, "--json").stdout)["excluded"] == 3

    for old, new in zip(plans, preview_epoch(indexes, batch_size=2, world=2), strict=True):
        assert (new.steps, new.samples) == (old.steps, old.samples - 3)
        assert (new.samples - new.dropped) + new.fillers == 4 * new.steps
    explained = explain_rows(StubSource.of(40), RECIPE, indexes)
    assert [one.row for one in explained.verdicts if one.state == "excluded"] == [4, 31]


def test_a_preview_counts_the_places_that_the_stream_fills(shards: Path) -> None:
    first = all_facts(open_stream(shards, batch_size=3))
    known, gone = keys(shards), {key for number in (0, 2) for key in first[number][0]} | set(first[5][0][:1])
    run(shards, *(argument for key in gone for argument in ("--exclude", known[known.index(key)])))
    batches = all_facts(open_stream(shards, batch_size=3))
    plan = preview_epoch(find_indexes([shards]), batch_size=3, world=1)[0]
    sizes = ShardSet.open(shards).table.sizes
    assert round(plan.bytes_per_step * plan.steps) == sum(sizes[list(indices)].sum() for _, indices, *_ in batches)
    assert (plan.steps, plan.fillers) == (len(batches), sum(weights.count(0) for _, _, weights, _ in batches))


def test_a_broken_list_is_a_fault_that_names_its_line_and_the_shards_are_summarised(shards: Path) -> None:
    (shards / EXCLUDED_NAME).write_text("photos/012.png\n")
    result: Any = run(shards, code=1)
    assert f"{EXCLUDED_NAME}, line 1" in result.stderr and "samples   60" in result.stdout
    run(shards, "--html", shards / "page.html", code=1)


def test_the_page_has_a_command_for_each_sample_that_leaves_it_out_of_the_next_page(tmp_path: Path) -> None:
    shards = tmp_path / "it's here"
    write_colours(shards, ["one", "two", "three"])
    before = page_of(shards, page=tmp_path / "page.html")
    commands = re.findall(r"<code>(qie-stats .*?)</code>", before.source)
    assert len(commands) == 3
    run(*shlex.split(html.unescape(commands[1]))[1:])
    now = page_of(shards, page=tmp_path / "page.html")
    assert len(re.findall(r"<code>qie-stats ", now.source)) == 2 and "1 excluded" in now.source
    assert ">two<" not in now.source and ">three<" in now.source

"""tools/reshard.py and what it calls: the same records on another grid, as qie-precompute would have written them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qie.errors import RecipeMismatchError, ShardError, UsageError
from qie.precompute import precompute
from qie.precompute.reshard import SampleChoice, reshard
from qie.shards.discovery import find_indexes, published
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet
from qie.shards.writer import ShardWriter
from qie.stats import summarise
from qie.stores import open_folder
from tests.builders import RECIPE as sample_recipe
from tests.builders import ROOT, make_entry, make_sample, rewrite_index, without_fast_hashes, write_shard
from tests.s3 import S3
from tests.stubs import RECIPE, StubEncoder, StubSource

SOURCE = StubSource(StubSource.of(30).changed(7, target=b"broken").changed(20, target=b"missing").rows)
TWINS = SOURCE.changed(5, target=SOURCE.rows[2].target, controls=SOURCE.rows[2].controls, prompt=SOURCE.rows[2].prompt)


def encoded(folder: Path, size: int, rows: tuple[int, int] = (0, 30), source: StubSource = TWINS) -> Path:
    precompute(source, StubEncoder(), folder, rows=rows, shard_size=size)
    return folder


def cut(places: list[Path | str], output: Path | str, **options: object):
    return reshard([find_indexes([place]) for place in places], open_folder(output), **options)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def tool(monkeypatch):
    """tools/reshard.py as a function of its arguments."""
    spec = importlib.util.spec_from_file_location("reshard_tool", ROOT / "tools" / "reshard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["reshard.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            module.main()
        return ended.value.code

    return run


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 3), (30, 5)])
def test_another_shard_size_gives_the_files_that_precompute_writes_with_it(tmp_path, before: int, after: int) -> None:
    report = cut([encoded(tmp_path / "old", before)], tmp_path / "new", shard_size=after)
    assert files(tmp_path / "new") == files(encoded(tmp_path / "due", after))
    assert (report.samples, report.skipped, report.left_out) == (28, 2, 0)


def test_parts_are_merged_into_the_files_of_one_run_and_rows_split_off_again(tmp_path: Path) -> None:
    parts = [encoded(tmp_path / name, 4, rows) for name, rows in (("b", (13, 30)), ("a", (0, 13)))]
    cut(parts, tmp_path / "whole", shard_size=8)
    assert files(tmp_path / "whole") == files(encoded(tmp_path / "due", 8))
    cut([tmp_path / "whole"], tmp_path / "some", shard_size=4, choice=SampleChoice(rows=(6, 21)))
    assert files(tmp_path / "some") == files(encoded(tmp_path / "some due", 4, (6, 21)))
    apart = [tmp_path / "some", encoded(tmp_path / "last", 4, (25, 30))]
    cut(apart, tmp_path / "gap", shard_size=8)
    ranges = [(shard.index.start, shard.index.stop) for shard in map(Shard, published(tmp_path / "gap"))]
    assert ranges == [(6, 8), (8, 16), (16, 21), (25, 30)], "rows that no shard holds stay a gap"


def test_indexes_of_before_there_was_a_fast_hash_give_files_that_have_one(tmp_path: Path) -> None:
    for index in encoded(tmp_path / "old", 8).glob("*.json"):
        rewrite_index(index, without_fast_hashes, own_hash=True)

    cut([tmp_path / "old"], tmp_path / "new", shard_size=5)

    assert files(tmp_path / "new") == files(encoded(tmp_path / "fresh", 5))


def test_what_is_left_out_is_a_skipped_row_with_its_reason_and_its_record_is_gone(tmp_path: Path) -> None:
    rows = [replace(row, source="day" if row.index % 3 else "night") for row in SOURCE.rows]
    encoded(tmp_path / "old", 8, source=StubSource(tuple(rows)))
    samples = ShardSet.open([tmp_path / "old"])
    gone = samples.keys[1]  # row 1, by day
    report = cut(
        [tmp_path / "old"], tmp_path / "new", choice=SampleChoice(source="day", dropped=frozenset([gone, "f" * 64]))
    )
    assert (report.samples, report.skipped, report.left_out, report.dropped) == (17, 2, 11, {gone})
    [shard] = map(Shard, published(tmp_path / "new"))
    assert len(shard.index.accounts) == 30 and len(shard.index.files) == 17
    reasons = {one.row: one.reason for one in shard.index.skipped}
    assert reasons[0] == "left out: its source is not day" and reasons[1] == "left out: its key was to be dropped"
    assert "broken" in reasons[7]
    assert summarise(published(tmp_path / "new"), verify=True).faults == []


def test_rows_of_two_sources_are_numbered_one_behind_the_other_when_asked_to(tmp_path: Path) -> None:
    one, other = encoded(tmp_path / "a", 8, (8, 16)), encoded(tmp_path / "b", 8, (4, 30))
    with pytest.raises(UsageError, match="hold the same rows") as caught:
        cut([one, other], tmp_path / "new")
    assert "--renumber" in str(caught.value)
    assert not (tmp_path / "new").exists()
    cut([one, other], tmp_path / "new", renumber=True, shard_size=10)
    shards = list(map(Shard, published(tmp_path / "new")))
    assert [(shard.index.start, shard.index.stop) for shard in shards] == [(0, 10), (10, 20), (20, 30), (30, 34)]
    names = [entry.name for shard in shards for entry in shard.index.accounts]
    assert names == [f"row{n}" for n in [*range(8, 16), *range(4, 30)]]
    samples = ShardSet.open([tmp_path / "new"], verify="always")
    assert samples.load(0).prompt == "p8"
    assert samples.load(len(samples) - 1).prompt == "p29"


def test_run_again_it_writes_only_what_is_missing_or_damaged(tmp_path: Path, monkeypatch) -> None:
    encoded(tmp_path / "old", 4)
    cut([tmp_path / "old"], tmp_path / "new", shard_size=8)
    due = files(tmp_path / "new")
    (tmp_path / "new" / "00000008-00000016.json").unlink()
    (tmp_path / "new" / "00000016-00000024.tar").write_bytes(b"cut short")
    written = []
    publish = ShardWriter.publish
    monkeypatch.setattr(ShardWriter, "publish", lambda self: (written.append(self.start), publish(self))[1])
    assert cut([tmp_path / "old"], tmp_path / "new", shard_size=8).present == 2
    assert written == [8, 16] and files(tmp_path / "new") == due


def test_a_shard_there_with_other_bytes_or_other_words_is_written_again(tmp_path: Path) -> None:
    """Of the same rows and keys: encoded on another machine, or of a source whose rows were renamed."""
    sample = make_sample(0)
    write_shard(tmp_path / "a", [sample])
    write_shard(tmp_path / "b", [replace(sample, pixel_latent=-sample.pixel_latent)])
    with ShardWriter(tmp_path / "c", 0, 1, sample_recipe) as shard:
        shard.add(make_entry(sample, 0, "renamed"), encode(sample, sample_recipe.digest))
        shard.publish()
    for name in ("a", "b", "c", "a"):
        assert cut([tmp_path / name], tmp_path / "new").present == 0
        assert files(tmp_path / "new") == files(tmp_path / name)
        assert cut([tmp_path / name], tmp_path / "new").present == 1


def test_stopped_half_way_nothing_half_is_there_and_it_goes_on(tmp_path: Path) -> None:
    encoded(tmp_path / "old", 4)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut([tmp_path / "old"], tmp_path / "new", shard_size=8, progress=stop)
    assert len(published(tmp_path / "new")) == 2
    assert cut([tmp_path / "old"], tmp_path / "new", shard_size=8).present == 2
    assert files(tmp_path / "new") == files(encoded(tmp_path / "due", 8))


def test_to_a_bucket_and_back_not_a_byte_is_lost(s3: S3, tmp_path: Path) -> None:
    encoded(tmp_path / "old", 8)
    cut([tmp_path / "old"], f"{s3.url}/shards", shard_size=10)
    assert cut([tmp_path / "old"], f"{s3.url}/shards", shard_size=10).present == 3
    cut([f"{s3.url}/shards/*.tar"], tmp_path / "back", shard_size=8)
    assert files(tmp_path / "back") == files(tmp_path / "old")


def test_a_damaged_record_is_named_and_what_was_published_stays(tmp_path: Path) -> None:
    encoded(tmp_path / "old", 8)
    tar = tmp_path / "old" / "00000016-00000024.tar"
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(content)
    with pytest.raises(ShardError, match="a record is damaged") as caught:
        cut([tmp_path / "old"], tmp_path / "new", shard_size=8)
    assert "00000016-00000024.tar" in str(caught.value)
    assert [path.name for path in sorted((tmp_path / "new").iterdir())][-1] == "00000008-00000016.tar"


def test_outputs_of_other_shards_or_another_recipe_two_recipes_no_rows_and_no_size_are_refused(
    tmp_path: Path, monkeypatch
) -> None:
    encoded(tmp_path / "old", 8)
    with pytest.raises(UsageError, match="other shards"):
        cut([tmp_path / "old"], encoded(tmp_path / "taken", 4))
    precompute(SOURCE, StubEncoder(replace(RECIPE, vae="9" * 64)), tmp_path / "foreign", rows=(0, 30), shard_size=8)
    before = files(tmp_path / "foreign")
    with pytest.raises(RecipeMismatchError, match="vae"):
        cut([tmp_path / "old"], tmp_path / "foreign", shard_size=8)
    assert files(tmp_path / "foreign") == before
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="own folder"):
        cut([tmp_path / "old"], "old", shard_size=8, choice=SampleChoice(dropped=frozenset(["0" * 64])))
    with pytest.raises(RecipeMismatchError, match="vae"):
        cut([tmp_path / "old", tmp_path / "foreign"], tmp_path / "new", renumber=True)
    for rows in ((30, 40), (9, 9)):
        with pytest.raises(UsageError):
            cut([tmp_path / "old"], tmp_path / "new", choice=SampleChoice(rows=rows))
    with pytest.raises(UsageError):
        cut([tmp_path / "old"], tmp_path / "new", shard_size=0)
    assert not (tmp_path / "new").exists()


def test_the_tool_copies_counts_and_exits_by_what_it_found(tool, tmp_path: Path, capsys) -> None:
    encoded(tmp_path / "old", 8)
    key = ShardSet.open([tmp_path / "old"]).keys[0]
    (tmp_path / "keys").write_text(f"{key} # row 0 as an exclude list has it\n")
    words = [tmp_path / "old" / "*.tar", "--output", tmp_path / "new", "--shard-size", 4, "--rows", "0-12", "--quiet"]
    assert tool(*words, "--drop-keys", tmp_path / "keys") == 0
    assert capsys.readouterr().out == "3 shards, 0 of them written before: 10 samples, 1 skipped rows, 1 left out\n"
    (tmp_path / "keys").write_text(f"{'0' * 64}\n")
    assert tool(tmp_path / "old", "--output", tmp_path / "all", "--drop-keys", tmp_path / "keys", "--rows", "8-") == 0
    assert "1 of 1 keys to drop are in none of the rows copied" in capsys.readouterr().err
    assert tool(tmp_path / "old", "--output", tmp_path / "none", "--only-source", "x") == 1
    assert "no sample is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}/nowhere", "--output", "{}/new"], "no shards found"),
        (["{}/old", "--output", "{}/new", "--drop-keys", "{}/nowhere"], "No such file"),
        (["{}/old", "--output", "{}/new", "--drop-keys", "{}/odd"], "this is not a key"),
        (["{}/old", "--output", "pipe:touch {}/ran"], "shell"),
    ],
)
def test_the_tool_tells_of_wrong_usage(tool, tmp_path: Path, capsys, words, message: str) -> None:
    encoded(tmp_path / "old", 8)
    (tmp_path / "odd").write_text("abc\n")
    assert tool(*[word.format(tmp_path) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error
    assert not (tmp_path / "new").exists() and not (tmp_path / "ran").exists()

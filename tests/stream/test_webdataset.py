"""`qie.webdataset`: samples of shards in a pipeline of the library webdataset."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
import webdataset as wds

from qie.data.webdataset_pipeline import webdataset
from qie.errors import QieError, RecipeMismatchError, ShardError, UsageError
from qie.precompute import precompute
from qie.shards.excluded import write_excluded
from qie.shards.shard_set import ShardSet
from qie.stores import open_folder
from tests.builders import make_sample, write_shard
from tests.conftest import ROOT
from tests.stores.servers import Ranged, serving
from tests.stream.checks import write
from tests.stubs import RECIPES, StubEncoder, StubSource

ROWS = 11


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("wds") / "shards", rows=ROWS, shard_size=3)


def keys(pipeline) -> list[str]:
    return [sample["__key__"] for sample in pipeline]


def test_samples_are_those_of_the_shards_in_order_with_the_null_prompt_joined(family: str, tmp_path: Path) -> None:
    precompute(StubSource.of(6), StubEncoder(RECIPES[family]), tmp_path, rows=(0, 6), shard_size=4)
    stored = ShardSet.open(tmp_path)
    pipeline = webdataset(tmp_path)
    assert isinstance(pipeline, wds.WebDataset)
    for position, found in enumerate(pipeline):
        sample = stored.load(position)
        assert (found["__key__"], found["prompt"]) == (sample.key, sample.prompt)
        assert Path(found["__url__"]).parent == tmp_path and found["__url__"].endswith(".tar")
        for name in (
            "pixel_latent",
            "prompt_embed",
            "prompt_embeds_mask",
            "empty_prompt_embed",
            "empty_prompt_embeds_mask",
        ):
            assert torch.equal(found[name], getattr(sample, name)), name
        assert all(map(torch.equal, found["control_latent"], sample.control_latent))
        assert found.get("image_slots") == sample.image_slots
        assert found["loss_mask"].unique().tolist() == [255] and found["loss_mask"].shape == sample.shape.target
    assert position == 5


def test_a_mask_comes_as_it_is_stored(tmp_path: Path) -> None:
    masked = make_sample(1, masked=True)
    write_shard(tmp_path, [masked, make_sample(2)])
    first, second = webdataset(tmp_path)
    assert torch.equal(first["loss_mask"], masked.loss_mask) and second["loss_mask"].min() == 255


def test_places_are_folders_tars_globs_and_braces_each_shard_once(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = keys(webdataset(shards))
    assert len(whole) == ROWS and whole == ShardSet.open(shards).keys
    braces = f"{shards}/{{00000000-00000003,00000003-00000006}}.tar"
    assert keys(webdataset(braces)) == whole[:6]
    assert keys(webdataset([shards / "00000003-00000006.tar", f"{shards}/*.tar"])) == [
        *whole[3:6],
        *whole[:3],
        *whole[6:],
    ]
    monkeypatch.chdir(shards.parent)
    assert keys(webdataset("shards")) == whole
    with pytest.raises(UsageError, match="no shards found"):
        webdataset(shards / "none")
    with pytest.raises(UsageError, match="pipe"):
        webdataset("pipe:cat a.tar")


def test_it_is_shuffled_composed_and_batched_as_any_other(shards: Path) -> None:
    whole = keys(webdataset(shards))
    shuffled = keys(webdataset(shards, shardshuffle=10, seed=1).shuffle(20, seed=2))
    assert shuffled != whole and sorted(shuffled) == sorted(whole)
    epochs = [
        keys(pipeline) for pipeline in [webdataset(shards, shardshuffle=10, detshuffle=True, seed=3)] for _ in "ab"
    ]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == sorted(whole)
    assert len(keys(webdataset(shards, resampled=True, seed=4).with_epoch(30))) == 30
    of_a_size = webdataset(shards).select(lambda sample: sample["pixel_latent"].shape[-1] == 4)
    batches = list(of_a_size.to_tuple("__key__", "pixel_latent", "prompt").batched(2))
    assert {tuple(latents.shape[1:]) for _, latents, _ in batches} == {(16, 1, 4, 4)}
    assert [key for names, *_ in batches for key in names] == keys(of_a_size)


WORKERS = """
import json, sys, webdataset, qie
from pathlib import Path
loaded = {}
for place in sys.argv[2:]:
    pipeline = qie.webdataset(place, cache=qie.ShardCache(Path(sys.argv[1]), 10**9))
    loader = webdataset.WebLoader(pipeline, batch_size=None, num_workers=2, multiprocessing_context="fork")
    loaded[place] = {sample["__key__"]: float(sample["empty_prompt_embed"].sum()) for sample in loader}
print(json.dumps(loaded))
"""


def test_two_workers_read_each_shard_once_from_a_disk_and_over_http(shards: Path, tmp_path: Path) -> None:
    """In a process of its own: what is forked has to be without threads, and without a store that was used before."""
    names = ",".join(path.stem for path in sorted(shards.glob("*.tar")))
    with serving(partial(Ranged, directory=str(shards))) as url:
        places = [str(shards), f"{url}/{{{names}}}.tar"]
        command = [sys.executable, "-c", WORKERS, tmp_path / "copies", *places]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = {sample["__key__"]: float(sample["empty_prompt_embed"].sum()) for sample in webdataset(shards)}
    assert json.loads(done.stdout) == dict.fromkeys(places, whole)
    assert list((tmp_path / "copies").rglob("*")), "copies are kept"


def of_rank(rank: int, source):
    return (shard for number, shard in enumerate(source) if number % 2 == rank)


def test_two_nodes_read_each_shard_once(shards: Path) -> None:
    nodes = [keys(webdataset(shards, nodesplitter=partial(of_rank, rank))) for rank in range(2)]
    assert all(nodes) and sorted(chain.from_iterable(nodes)) == sorted(keys(webdataset(shards)))


def test_a_tensor_holds_no_more_memory_than_its_own(shards: Path) -> None:
    """A worker sends the whole memory that a tensor lies in."""
    for sample in webdataset(shards):
        for name in ("pixel_latent", "prompt_embed", "empty_prompt_embed"):
            assert sample[name].untyped_storage().nbytes() == sample[name].nbytes


def test_the_pipeline_can_be_sent_to_a_process_that_is_spawned(shards: Path) -> None:
    assert keys(pickle.loads(pickle.dumps(webdataset(shards, shardshuffle=3, seed=0)))) != []


def test_excluded_samples_are_left_out(shards: Path, tmp_path: Path) -> None:
    copy = write(tmp_path / "shards", rows=ROWS, shard_size=3)
    whole = keys(webdataset(copy))
    write_excluded(open_folder(copy), {whole[4]: "", whole[7]: "bad"})
    assert keys(webdataset(copy)) == [key for key in whole if key not in (whole[4], whole[7])]


# What is wrong


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The last byte of the second sample is another one, and the second shard is cut."""
    write_shard(tmp_path, [make_sample(0), make_sample(1), make_sample(2)])
    write_shard(tmp_path, [make_sample(3)], start=3)
    write_shard(tmp_path, [None, make_sample(5)], start=4)
    write_shard(tmp_path, [None], start=6)
    entry = ShardSet.open(tmp_path / "00000000-00000003.tar").table
    with (tmp_path / "00000000-00000003.tar").open("r+b") as tar:
        tar.seek(int(entry.offsets[1] + entry.sizes[1]) - 1)
        tar.write(b"\xff")
    os.truncate(tmp_path / "00000003-00000004.tar", 512)
    return tmp_path


def test_damage_ends_the_pipeline_or_is_told_to_its_handler(damaged: Path) -> None:
    with pytest.raises(ShardError, match="a record is damaged"):
        keys(webdataset(damaged))
    told: list[Exception] = []

    def go_on(error: Exception) -> bool:
        told.append(error)
        return True

    found = keys(webdataset(damaged, handler=go_on))
    assert found == [make_sample(number).key for number in (0, 2, 5)]
    assert [error.what for error in told if isinstance(error, QieError)] == [
        "a record is damaged",
        "the shard is cut short or is not the one its index describes",
    ]
    assert keys(webdataset(damaged, handler=lambda error: False)) == [make_sample(0).key]
    assert len(keys(webdataset(damaged / "00000000-00000003.tar", verify="off"))) == 3


def test_shards_of_another_recipe_are_refused(shards: Path, tmp_path: Path) -> None:
    write_shard(tmp_path, [make_sample(0)])
    with pytest.raises(RecipeMismatchError, match="one recipe at a time"):
        keys(webdataset([shards, tmp_path]))


def test_a_worker_without_a_shard_is_told_by_webdataset_and_can_be_meant(tmp_path: Path) -> None:
    write_shard(tmp_path, [None])
    with pytest.raises(ValueError, match="No samples found"):
        keys(webdataset(tmp_path))
    assert keys(webdataset(tmp_path, empty_check=False)) == []

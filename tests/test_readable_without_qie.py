"""Shards of the real encoder, read by the tools that everybody has."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest
import torch
import webdataset
from safetensors.torch import load

from qie.data.sources import open_source
from qie.precompute import precompute
from qie.shards.shard_set import ShardSet


@pytest.fixture(scope="module")
def shards(photos: Path, encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readable") / "shards"
    precompute(open_source(photos), encoder, folder, rows=(0, 4))
    return folder


# webdataset leaves the closing of its file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_and_safetensors_read_what_qie_reads(shards: Path) -> None:
    ours = ShardSet.open([shards])
    dataset = webdataset.WebDataset(str(shards / "00000000-00000004.tar"), shardshuffle=False)
    theirs = list(dataset)
    assert [sample["__key__"] for sample in theirs] == list(ours.keys)
    for position, sample in enumerate(theirs):
        tensors, mine = load(sample["safetensors"]), ours.load(position)
        assert torch.equal(tensors["pixel_latent"], mine.pixel_latent)
        assert torch.equal(tensors["control_latent"], mine.control_latent[0])
        assert torch.equal(tensors["prompt_embed"], mine.prompt_embed)
        joined = torch.cat([tensors["prompt_embed"][: mine.shared_prefix], tensors["empty_prompt_embed"]])
        assert torch.equal(joined, mine.empty_prompt_embed)


def test_tar_lists_the_shard(shards: Path) -> None:
    listed = subprocess.run(
        ["tar", "tvf", shards / "00000000-00000004.tar"],
        check=True,
        capture_output=True,
        text=True,
        env={"TZ": "UTC", "LC_ALL": "C"},
    ).stdout.splitlines()
    assert len(listed) == 4
    assert all(line.startswith("-rw-r--r-- 0/0") and line.endswith(".safetensors") for line in listed)
    assert all("1970-01-01 00:00" in line for line in listed)


def test_the_file_is_plain_ustar_without_extended_headers(shards: Path) -> None:
    import tarfile

    content = (shards / "00000000-00000004.tar").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert all(member.pax_headers == {} and member.type == tarfile.REGTYPE for member in tar)
    assert content[257:263] == b"ustar\x00"

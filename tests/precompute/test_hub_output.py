"""Shards written to a repository of the Hugging Face Hub, or of what stands for it here."""

from __future__ import annotations

from pathlib import Path

from qie.precompute import Settings, precompute
from qie.shards.shard_set import ShardSet
from qie.stores import Folder, open_folder
from tests.stores.fake_hub import FakeHub
from tests.stubs import StubEncoder, StubSource

SOURCE = StubSource.of(20).changed(7, target=b"broken")


def contents(folder: Folder) -> dict[str, bytes]:
    return {name: folder.read(name) for name in folder.listing()}


def test_the_hub_gets_the_files_that_a_disk_gets_and_they_are_not_encoded_again(hub: FakeHub, tmp_path: Path) -> None:
    output = f"{hub.folder_url}/shards"
    report = precompute(SOURCE, StubEncoder(), output, rows=(0, 20), shard_size=8)
    assert (report.encoded, len(report.skipped), report.shards_written) == (19, 1, 3)
    precompute(SOURCE, StubEncoder(), tmp_path / "disk", rows=(0, 20), shard_size=8)
    assert contents(open_folder(output)) == contents(open_folder(tmp_path / "disk"))

    again = precompute(SOURCE, StubEncoder(), output, rows=(0, 20), shard_size=8)
    assert (again.encoded, again.shards_kept) == (0, 3)
    reusing = Settings(reuse=(output,))
    copied = precompute(SOURCE, StubEncoder(), tmp_path / "out", rows=(0, 20), shard_size=5, settings=reusing)
    assert (copied.encoded, copied.reused) == (0, 19)
    samples = ShardSet.open([output])
    assert samples.load(3).key == samples.keys[3]

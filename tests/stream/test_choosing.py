"""Which stream a configuration asks for, and what is said where shards are not what it describes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch.distributed import HashStore

import qie
from qie.config import load_config
from qie.data.announcements import Announcements
from qie.data.follow import GrowingSamples
from qie.data.kept_samples import DeviceTier
from qie.data.shared_tier import SharedTier
from qie.data.sources import open_source
from qie.errors import QieError, RecipeMismatchError, UsageError
from qie.precompute import precompute
from qie.shards.excluded import EXCLUDED_NAME
from qie.shards.reader import Shard
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stores import File, LocalFolder, disk
from qie.stream_chooser import Choice, Telling, choose, open_training_stream
from tests.conftest import AREA_PX, ROOT
from tests.stream.checks import all_facts, spoil


@pytest.fixture(scope="module")
def whole(photos: Path, encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of all photographs."""
    folder = tmp_path_factory.mktemp("whole") / "shards"
    precompute(open_source(photos), encoder, folder, rows=(0, 12), shard_size=5)
    return folder


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "shards"))


@pytest.fixture
def settings(tiny_edit: Path, photos: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.pretrained_model_name_or_path": str(tiny_edit),
        "data.source": str(photos),
        "data.area_px": AREA_PX,
        "data.allow_tiny": True,
        "data.batch_size": 2,
        "cache.cache_dir": str(tmp_path / "shards"),
        "validation.rows": 1,
        "train.output_dir": str(tmp_path / "run"),
    }


def config_of(tmp_path: Path, settings: dict[str, Any]) -> qie.Config:
    (tmp_path / "config.yaml").write_text("model: {pretrained_model_name_or_path: model}")
    return load_config(str(tmp_path / "config.yaml"), [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def opened(tmp_path: Path, settings: dict[str, Any], *named: str) -> tuple[qie.Stream, list[str]]:
    """The stream, and what is said."""
    said: list[str] = []
    config = config_of(tmp_path, settings)
    components = ("transformer", "scheduler")
    pretrained = qie.open_pretrained(config.model.pretrained_model_name_or_path, components=components)
    stream = open_training_stream(config, pretrained, Accelerator(cpu=True), *named, telling=Telling(say=said.append))
    return stream, said


# The table


@pytest.mark.parametrize(
    ("shards", "cache", "follow", "expected"),
    [
        (("a", "b"), {}, False, Choice("shards", ("a", "b"), True)),
        (("a",), {"use_cache": False, "write_through": True}, False, Choice("shards", ("a",), True)),
        ((), {"cache_dir": "c"}, False, Choice("shards", ("c",))),
        ((), {"cache_dir": "c", "use_cache": False}, False, Choice("live")),
        ((), {}, False, Choice("live")),
        ((), {"cache_dir": "c", "write_through": True}, False, Choice("write_through")),
        ((), {"cache_dir": "c", "write_through": True, "use_cache": False}, False, Choice("write_through")),
        (("a",), {"cache_dir": "c"}, True, Choice("follow", ("a",), True)),
        ((), {"cache_dir": "c"}, True, Choice("follow", ("c",))),
        ((), {"cache_dir": "c", "index": "i/all.safetensors"}, False, Choice("shards", ("i",), True)),
        (("a",), {"index": "i/all.safetensors"}, False, Choice("shards", ("a",), True)),
        ((), {"index": "i/all.safetensors"}, True, "all there"),
        ((), {"index": "i/all.safetensors", "cache_dir": "c", "write_through": True}, False, "all there"),
        (("a", "b"), {}, True, "one folder"),
        ((), {"cache_dir": "c", "use_cache": False}, True, "one folder"),
    ],
)
def test_named_shards_then_write_through_then_the_cache_then_live_rows(
    tmp_path: Path, shards: tuple[str, ...], cache: dict[str, Any], follow: bool, expected: Choice | str
) -> None:
    config = config_of(tmp_path, {f"cache.{name}": value for name, value in cache.items()})
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            choose(config, shards, follow=follow)
    else:
        assert choose(config, shards, follow=follow) == expected


@pytest.mark.parametrize("follow", [False, True])
def test_processes_of_a_machine_share_the_host_memory_that_keeps_samples(
    tmp_path: Path, shards: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: mine)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", HashStore)
    settings |= {"cache.trust_published": True, "cache.keep.latents": "cpu", "validation.rows": 0}
    config = config_of(tmp_path, settings)
    pretrained = qie.open_pretrained(config.model.pretrained_model_name_or_path, components=("transformer",))
    tiers = []
    for processes in (1, 2):
        with open_training_stream(config, pretrained, process(0, processes), follow=follow) as stream:
            assert stream.kept is not None
            tiers.extend(tier for tier, _ in stream.kept._tiers)
            next(iter(stream))
    alone, shared = tiers
    assert isinstance(alone, DeviceTier) and isinstance(shared, SharedTier) and shared.bytes > 0


def test_a_named_index_gives_the_stream_that_its_folder_gives_and_lists_nothing(
    tmp_path: Path, shards: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("00000005-00000010.tar", "00000005-00000010.json"):
        (shards / name).unlink()
    compact_folder(LocalFolder(shards))
    index = (shards / "index.safetensors").rename(tmp_path / "all.safetensors")
    for source in ({}, {"data.source": None}):
        found, said = opened(tmp_path, settings | source)
        with monkeypatch.context() as patch:
            look = mock.Mock(wraps=disk._entries)
            patch.setattr(disk, "_entries", look)
            named, told = opened(tmp_path, settings | source | {"cache.index": str(index)}, str(shards))
        assert mock.call(shards) not in look.mock_calls
        assert "rows [5, 10) are missing" in said[0] and "rows [5, 10) are missing" in told[0]
        assert all_facts(named, len(named)) == all_facts(found, len(found))
        assert named.plans.identity == found.plans.identity


def test_with_several_processes_the_first_tells_the_others_of_shards_that_are_written(
    tmp_path: Path, shards: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "one name for all"
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [name] if isinstance(mine[0], str) else mine)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", HashStore().clone)
    config = config_of(tmp_path, settings)
    pretrained = qie.open_pretrained(config.model.pretrained_model_name_or_path, components=("transformer",))

    def announcements(rank: int, processes: int) -> Announcements | None:
        with open_training_stream(config, pretrained, process(rank, processes), follow=True) as stream:
            assert isinstance(stream.samples, GrowingSamples) and stream.samples.complete
            return stream.samples.announcements

    assert announcements(0, 1) is None
    first, other = (announcements(rank, 2) for rank in range(2))
    assert first and first.first and other and not other.first and other.ended


def test_with_several_processes_the_exclude_list_that_the_first_has_read_counts(
    tmp_path: Path, shards: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ShardSet.open(shards).keys
    first, later = (frozenset([bytes.fromhex(key)]) for key in known[:2])
    (shards / EXCLUDED_NAME).write_text(f"{known[1]}\n")
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [first, *mine])
    config = config_of(tmp_path, settings | {"data.source": None})
    pretrained = qie.open_pretrained(config.model.pretrained_model_name_or_path, components=("transformer",))
    with open_training_stream(config, pretrained, process(1, 2)) as stream:
        assert (stream.samples.excluded, stream.excluded) == (later, first)


def test_a_row_whose_key_is_on_the_shards_list_is_not_trained_on_though_its_source_has_it(
    tmp_path: Path, shards: Path, settings: dict[str, Any]
) -> None:
    gone = ShardSet.open(shards).keys[3]
    (shards / "00000000-00000005.json").unlink()  # its row would be encoded live
    (shards / EXCLUDED_NAME).write_text(f"{gone}\n")
    stream, said = opened(tmp_path, settings)
    assert gone in stream.samples.keys
    assert gone not in {key for batch in stream for key in batch.keys}
    assert any("leaves out 1 keys" in line for line in said)


def process(rank: int, processes: int) -> Any:
    """As accelerate describes one of several processes to itself."""
    found: Any = SimpleNamespace(num_processes=processes, process_index=rank, device=torch.device("cpu"))
    found.is_main_process = found.is_local_main_process = rank == 0
    found.wait_for_everyone = lambda: None
    return found


# Shards of another recipe

CHANGES = {
    "area": ({"data.area_px": 4096}, "areas_px (data.area_px): (4096,) by the configuration, (16384,) in the shards"),
    "buckets": ({"data.area_px": None, "data.buckets_px": [[128, 128]]}, "buckets_px (data.buckets_px): ((128, 128),)"),
    "text area": ({"data.text_area_px": 4096}, "text_area_px (data.text_area_px): 4096"),
    "multiple": ({"data.multiple_px": 16}, "multiple_px (data.multiple_px): 16"),
    "background": ({"data.background": "#000000"}, "background (data.background): #000000"),
    "dtype": ({"cache.compute_dtype": "bfloat16"}, "vae_dtype (cache.compute_dtype): bfloat16"),
    "prefix": ({"cache.share_prefix": True}, "share_prefix (cache.share_prefix): True"),
    "batch": ({"cache.encode_batch_size": 2}, "batch_size (cache.encode_batch_size): 2"),
    "compiled": ({"cache.compile": True}, "compiled (cache.compile): True"),
    "two of them": (
        {"data.multiple_px": 16, "cache.compile": True},
        "multiple_px (data.multiple_px): 16 by the configuration, 32 in the shards; compiled (cache.compile): True",
    ),
}


@pytest.mark.parametrize(("changes", "named"), CHANGES.values(), ids=CHANGES)
def test_of_shards_of_another_recipe_each_field_is_named(
    tmp_path: Path, shards: Path, settings: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(RecipeMismatchError) as error:
        opened(tmp_path, settings | changes)

    assert named in str(error.value) and "--accept-recipe" in str(error.value)
    stream, said = opened(tmp_path, settings | changes | {"cache.accept_recipe": True})
    assert named in "; ".join(stream.accepted) and named in said[-1]
    assert isinstance(stream.samples, ShardSet) and stream.samples.recipe.areas_px == (AREA_PX,)


@pytest.mark.parametrize("component", ["vae", "text_encoder", "tokenizer", "processor"])
def test_encoders_of_another_content_are_named_and_those_that_are_not_here_are_not_compared(
    tmp_path: Path, shards: Path, settings: dict[str, Any], tiny_edit: Path, component: str
) -> None:
    model = Path(shutil.copytree(tiny_edit, tmp_path / "model"))
    settings |= {"model.pretrained_model_name_or_path": str(model)}
    changed = (
        model
        / component
        / {"processor": "preprocessor_config.json", "tokenizer": "tokenizer_config.json"}.get(component, "config.json")
    )
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {"other": 1}))

    with pytest.raises(RecipeMismatchError) as error:
        opened(tmp_path, settings)
    keys = "model.vae, or model.pretrained" if component == "vae" else "model.pretrained"
    assert f"{component} ({keys}_model_name_or_path)" in str(error.value)

    shutil.rmtree(model / component)
    stream, said = opened(tmp_path, settings)
    assert (len(stream.samples.digests), stream.accepted, said) == (12, (), [])


def test_weights_that_are_here_in_part_are_not_compared(
    tmp_path: Path, shards: Path, settings: dict[str, Any], tiny_edit: Path
) -> None:
    model = Path(shutil.copytree(tiny_edit, tmp_path / "model"))
    (model / "vae" / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    opened(tmp_path, settings | {"model.pretrained_model_name_or_path": str(model)})


# Shards that do not hold what the source says today


def test_rows_encoded_live_are_not_measured_for_people_and_those_of_shards_are(
    tmp_path: Path, shards: Path, settings: dict[str, Any]
) -> None:
    assert all(entry.pair for entry in Shard(File.at(shards / "00000000-00000005.json")).index.samples)
    (shards / "00000000-00000005.json").unlink()

    for changes in ({}, {"cache.use_cache": False}):
        stream, _ = opened(tmp_path, settings | changes)
        live = stream.samples.fetch(0)
        assert live.pair is None and live.pictures is None


def test_a_changed_caption_is_encoded_live_and_its_old_sample_is_left_out(
    tmp_path: Path, photos: Path, shards: Path, settings: dict[str, Any], encoder
) -> None:
    rows = Path(shutil.copytree(photos, tmp_path / "rows"))
    caption = sorted(rows.rglob("*.txt"))[3]
    caption.write_text("make it snow")
    settings |= {"data.source": str(rows)}

    stream, said = opened(tmp_path, settings, str(shards))
    assert [line.partition(":")[0] for line in said] == [
        "1 of 12 samples are encoded live",
        "1 samples of the shards belong to no row of the current data.source",
    ]
    precompute(open_source(rows), encoder, tmp_path / "now", rows=(0, 12), shard_size=5)
    now, nothing = opened(tmp_path, settings, str(tmp_path / "now"))
    assert nothing == [] and all_facts(now) == all_facts(stream)

    trusted, said = opened(tmp_path, settings | {"cache.trust_published": True})
    assert said == [] and isinstance(trusted.samples, ShardSet)


def test_named_shards_of_other_rows_are_refused(tmp_path: Path, shards: Path, settings: dict[str, Any]) -> None:
    rows = tmp_path / "rows"
    shutil.copytree(settings["data.source"], rows)
    for caption in rows.rglob("*.txt"):
        caption.write_text(f"another {caption.stem}")

    with pytest.raises(UsageError, match="the shards hold no row") as error:
        opened(tmp_path, settings | {"data.source": str(rows)}, str(shards))
    assert "cache.trust_published" in str(error.value)


@pytest.mark.parametrize("gone", ["all of it", "its pictures"])
def test_where_the_source_is_not_the_shards_are_trained_on_as_they_are(
    tmp_path: Path, shards: Path, settings: dict[str, Any], gone: str
) -> None:
    rows = tmp_path / "rows"
    if gone == "its pictures":
        shutil.copytree(settings["data.source"], rows)
        for picture in (rows / "control_images").iterdir():
            picture.unlink()

    stream, said = opened(tmp_path, settings | {"data.source": str(rows)})
    assert len(said) == 1 and "as they are" in said[0]
    assert isinstance(stream.samples, ShardSet) and len(stream.samples) == 12


# Nothing to fall back on


@pytest.mark.parametrize("damage", ["missing", "empty", "index", "tar"])
def test_without_a_source_shards_that_cannot_be_read_are_an_error(
    tmp_path: Path, shards: Path, settings: dict[str, Any], damage: str
) -> None:
    spoil(shards, damage)
    with pytest.raises(QieError):
        opened(tmp_path, settings | {"data.source": None})


@pytest.mark.parametrize("name", ["gone", "00000099-00000100.tar", "{00000000-00000005,00000020-00000025}.tar"])
def test_named_shards_have_to_be_there_though_there_is_a_source(
    tmp_path: Path, shards: Path, settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(UsageError, match="no shards found"):
        opened(tmp_path, settings, str(shards / name))


# The writer of cache.write_through

_LEFT = """
import sys
import qie
from accelerate import Accelerator
from qie.config import load_config
config = load_config(sys.argv[1], sys.argv[2:])
pretrained = qie.open_pretrained(config.model.pretrained_model_name_or_path)
stream = qie.open_training_stream(config, pretrained, Accelerator(cpu=True))
print(len(next(stream.forever())))
"""


def test_the_writer_of_write_through_is_stopped_with_its_stream_or_with_the_interpreter(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings |= {"cache.write_through": True, "validation.rows": 0}
    stream, _ = opened(tmp_path, settings)
    assert len(next(stream.forever())) == 2
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "qie-write-through"]

    settings["cache.cache_dir"] = str(tmp_path / "others")
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-c", _LEFT, tmp_path / "config.yaml", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr[-2000:]

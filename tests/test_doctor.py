"""`qie doctor`: what is there, and what to mend, of a machine and of the places of a configuration."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from qie import doctor
from qie.cli import one_command
from qie.doctor import Finding, try_store
from qie.stores import LocalFolder, StoreError


@pytest.fixture
def config(tiny_edit: Path, photos: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"pretrained_model_name_or_path": str(tiny_edit)},
        "data": {"source": str(photos)},
        "cache": {"cache_dir": str(tmp_path / "shards")},
        "train": {"output_dir": str(tmp_path / "run")},
    }


def told(config: dict[str, Any], tmp_path: Path, code: int) -> dict[str, Finding]:
    """The findings, by what they are of."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(one_command.main, ["doctor", "--config", str(file), "--json"])
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert all(one.pop("ok") is (one["mend"] is None) for one in found)
    return {one["what"]: Finding(**one) for one in found}


def test_a_configuration_whose_model_rows_and_folders_are_there_needs_no_mending(config, tmp_path: Path) -> None:
    found = told(config, tmp_path, 0)
    assert {"libraries", "devices", "cache folder", "model", "source", "shards", "checkpoints"} <= found.keys()
    assert found["source"].found.startswith("12 rows; the first (target + controls): ")
    assert "all components are here" in found["model"].found
    assert not (tmp_path / "shards").exists(), "a check makes no folder"


def test_each_fault_is_a_line_that_says_what_to_mend_and_the_exit_code_is_1(
    config, tiny_edit: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_edit, tmp_path / "model")
    next((tmp_path / "model" / "transformer").glob("*.safetensors")).unlink()
    shutil.copytree(photos, tmp_path / "photos")
    for image in (tmp_path / "photos" / "control_images").iterdir():
        image.write_bytes(b"not an image")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "wandb" else object())
    config["model"]["pretrained_model_name_or_path"] = str(tmp_path / "model")
    config["data"]["source"] = str(tmp_path / "photos")
    config["cache"]["vae_encoder_device"] = "cuda:7"
    config["train"]["output_dir"] = str(tmp_path / "file" / "run")
    config["logging"] = {"report_to": ["wandb"]}
    found = told(config, tmp_path, 1)
    assert {name: one.mend for name, one in found.items() if one.mend is not None} == {
        "wandb": "pip install wandb",
        "cache.vae_encoder_device": "--set cache.vae_encoder_device=auto",
        "cache folder": "set XDG_CACHE_HOME to a folder on a local disk with room",
        "model": "download the whole model",
        "source": "mend these rows, or they are skipped",
        "checkpoints": "name another train.output_dir, or make room",
    }
    assert "lacks transformer" in found["model"].found and "control 1" in found["source"].found


def test_a_folder_that_lacks_room_for_the_shards_to_come_is_told(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**12, 0, 2 * 10**9))
    assert told(config, tmp_path, 0)["shards"].mend is None
    monkeypatch.setattr(doctor, "_bytes_to_come", lambda config: 3e9)
    assert told(config, tmp_path, 1)["shards"].found.endswith("2.0 GB free, about 3.0 GB to come")


def test_a_name_on_the_hub_that_cannot_be_asked_a_wrong_configuration_and_no_rows_are_told(
    config, tmp_path: Path
) -> None:
    config["model"]["pretrained_model_name_or_path"] = "some/model"
    config["data"]["source"] = str(tmp_path / "nowhere")
    found = told(config, tmp_path, 1)
    assert found["model"].mend == "unset HF_HUB_OFFLINE, or name a folder"
    assert found["source"].found.startswith("the source is neither a folder nor a file")
    config["modle"] = {}
    found = told(config, tmp_path, 1)
    assert "modle" in found["configuration"].found and "model" not in found


def test_a_store_is_tried_with_a_file_that_is_deleted_again(tmp_path: Path) -> None:
    class Refusing(LocalFolder):
        def write(self, name: str, content: bytes) -> None:
            raise StoreError("the store refuses", hint="ask its owner")

    class Torn(LocalFolder):
        def read(self, name: str, *_: object, **__: object) -> bytes:
            raise StoreError("the store is silent")

    assert try_store(LocalFolder(tmp_path)).mend is None
    refused = try_store(Refusing(tmp_path))
    assert refused.mend == "ask its owner" and "cannot be written: the store refuses" in refused.found
    assert "cannot be read: the store is silent" in try_store(Torn(tmp_path)).found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cuda", "driver", "mend"),
    [(None, True, "pytorch.org"), ("13.0", True, "nvidia-smi"), ("13.0", False, None), (None, False, None)],
)
def test_a_gpu_that_torch_does_not_see_is_told_by_its_likely_cause(
    cuda: str | None, driver: bool, mend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver else None)
    found = doctor._without_gpu(cuda)
    assert (found.mend is None) if mend is None else (mend in (found.mend or ""))


def test_a_gpu_is_told_with_its_free_memory_and_what_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "RTX 3090",
        "get_device_capability": (8, 6),
        "mem_get_info": (20 * 10**9, 24 * 10**9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    [found] = doctor._devices(None)
    assert str(found) == "ok    cuda:0         RTX 3090, 20.0 of 24.0 GB free, bf16 yes, fp8 no"


def test_libraries_that_are_missing_or_too_old_are_named_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["nothing-of-this-name>=2", "numpy>=999.1", "x; extra == 'y'"])
    found = {one.what: one.mend for one in doctor._libraries(None)}
    assert found["nothing-of-this-name"] == "pip install 'nothing-of-this-name>=2'"
    assert found["numpy"] == "pip install 'numpy>=999.1'" and "x" not in found


def test_an_error_that_nobody_expected_is_a_line_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of a\nlibrary")

    monkeypatch.setattr(doctor, "_cache_folder", fail)
    done = CliRunner().invoke(one_command.main, ["doctor"])
    assert done.exit_code == 1 and "mend  cache folder   ZeroDivisionError: of a library" in done.stdout
    assert "1 of " in done.stdout.splitlines()[-1]

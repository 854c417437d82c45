"""What configs/ holds is accepted, and trains: on the tiny model, with paths and sizes replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from qie.cli import precompute, train
from qie.config import load_config
from tests.conftest import AREA_PX, ROOT
from tests.training.ranks import FSDP2, launch_environment

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
NEEDS = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "fp8": "torchao"}


def name(path: Path) -> str:
    return path.stem


def invoke(command, *arguments: object) -> None:
    result = CliRunner().invoke(command.main, [*map(str, arguments), "--quiet"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


def test_they_are_found() -> None:
    newer = {"qwen_image_21_lora", "qwen_image_21_lora_24gb"}
    assert newer | {"demo", "edit_lora", "edit_plus_lora", "edit_full", "edit_lora_24gb", "small_model"} == {
        path.stem for path in CONFIGS
    }
    assert {"ddp", "fsdp2"} == {path.stem for path in ACCELERATE}


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_each_trains(path: Path, request: pytest.FixtureRequest, photos: Path, tmp_path: Path) -> None:
    config = load_config(path)
    tiny = next(
        (name for word, name in (("plus", "tiny_edit_plus"), ("21", "tiny_21")) if word in path.stem), "tiny_edit"
    )
    for package in (NEEDS.get(config.model.quantize or ""), config.optimizer.class_path.partition(".")[0]):
        if package:
            pytest.importorskip(package)
    settings = {
        "model.pretrained_model_name_or_path": request.getfixturevalue(tiny),
        "data.source": photos,
        "data.allow_tiny": "true",
        "data.area_px": AREA_PX,
        "data.text_area_px": AREA_PX // 2 if "plus" in path.stem else "null",
        "cache.cache_dir": tmp_path / "shards",
        "train.output_dir": tmp_path / "run",
        "train.max_steps": 2,
        "train.offload_blocks": min(config.train.offload_blocks, 1),
        "validation.rows": 1,
    }
    arguments = ["--config", path, *(word for item in settings.items() for word in ("--set", "=".join(map(str, item))))]
    invoke(precompute, *arguments, "--end-idx", 4)
    invoke(train, *arguments)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert (tmp_path / "run" / "checkpoint-000002").is_dir()


# accelerate launch


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_a_launcher_starts_as_many_processes_as_it_is_told_and_decides_nothing_that_qie_decides(path: Path) -> None:
    given = launch_environment(path)
    assert given["processes"] == "2" and launch_environment(path, "--num_processes", "8")["processes"] == "8"
    assert given["ACCELERATE_MIXED_PRECISION"] == "no"
    assert given["ACCELERATE_DYNAMO_BACKEND"].lower() == "no"
    assert given.get("FSDP_ACTIVATION_CHECKPOINTING", "false") == "false"


def test_fsdp_is_of_version_2_and_shards_by_the_blocks_that_the_model_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever model: tests/training/test_two_processes.py trains both kinds so."""
    from accelerate import FullyShardedDataParallelPlugin

    for key, value in launch_environment(FSDP2).items():
        if key.startswith(("FSDP", "ACCELERATE")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.transformer_cls_names_to_wrap is None
    assert not plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"

"""Every field of the configuration is one behaviour: the commands, run in all their ways, read each of them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from qie.cli import precompute, predict, train
from qie.config import Config
from qie.config.loading import section_in
from qie.config.schema import Section
from tests.conftest import AREA_PX, ROOT

QIE, CONFIG = str(ROOT / "qie"), str(ROOT / "qie" / "config")


def fields_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Class, name and path in the file of each field that is no section by itself."""
    for name, field in model.model_fields.items():
        inner = section_in(field.annotation)
        if inner:
            yield from fields_of(inner, f"{path}{name}.")
        if inner is not field.annotation:
            yield model.__name__, name, path + name


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Class and name of the fields that code of qie outside qie.config reads; pydantic's own reads do not count."""
    seen: set[tuple[str, str]] = set()
    plain = BaseModel.__getattribute__

    def reading(section: Section, name: str) -> object:
        file = sys._getframe(1).f_code.co_filename
        if file.startswith(QIE) and not file.startswith(CONFIG):
            seen.add((type(section).__name__, name))
        return plain(section, name)

    monkeypatch.setattr(Section, "__getattribute__", reading)
    return seen


def run(command, *arguments: object) -> None:
    result = CliRunner().invoke(command.main, [*map(str, arguments), "--quiet"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


@pytest.fixture
def config(tiny_edit: Path, photos: Path, tmp_path: Path) -> Path:
    """Small images and few steps."""
    tree = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 2}},
        "data": {"source": str(photos), "area_px": AREA_PX // 4, "allow_tiny": True},
        "cache": {"cache_dir": str(tmp_path / "shards")},
        "train": {"max_steps": 2, "mixed_precision": "no"},
        "validation": {"rows": 1, "sample_steps": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


# What has to be set for a field to matter: one run of qie-train each.
WAYS: dict[str, dict[str, str]] = {
    "cached": {"loss.kind": "huber", "train.checkpoint_every": "1", "train.keep_last": "1", "train.ema_decay": "0.5"},
    "live": {
        "cache.use_cache": "false",
        "data.source": "[{{source: {photos}, name: a}}]",
        "loss.timestep_sampling": "mode",
        "lr_scheduler.scheduler_type": "cosine_with_restarts",
    },
    "written": {"cache.use_cache": "false", "cache.write_through": "true", "cache.cache_dir": "{work}/written"},
    "continued": {
        "model.lora.continue_from": "{work}/cached/checkpoint-000002",
        "model.adapters": "[{{path: {work}/live/checkpoint-000002}}]",
        "lr_scheduler.scheduler_type": "polynomial",
        "validation.samples": "[{{images: [{image}], prompt: night}}]",
    },
    "scheduled": {
        "lr_scheduler.class_path": "torch.optim.lr_scheduler.ConstantLR",
        "cache.keep.latents": "cpu",
        "logging.report_to": "[tensorboard]",
        "cache.local_dir": "{work}/local",
        "model.lora.kind": "lokr",
        "cache.accept_recipe": "true",
        "data.background": "black",
    },
}


def test_every_field_is_read_by_a_command(
    reads: set[tuple[str, str]], config: Path, photos: Path, tmp_path: Path
) -> None:
    image = min((photos / "control_images").iterdir())
    run(precompute, "--config", config, "--end-idx", 4)
    for name, settings in WAYS.items():
        words = [f"{key}={value.format(photos=photos, work=tmp_path, image=image)}" for key, value in settings.items()]
        words.append(f"train.output_dir={tmp_path / name}")
        run(train, "--config", config, *(word for setting in words for word in ("--set", setting)))
    pairs = shutil.copytree(photos, tmp_path / "pairs")
    for target in list((pairs / "training_images").glob("*.png")):
        shutil.copy(pairs / "control_images" / target.name, target.with_stem(f"{target.stem}_rejected"))
    preferred = ("cache.use_cache=false", f"data.source={pairs}", "loss.kind=flow_dpo", "train.max_steps=1")
    words = [*preferred, f"train.output_dir={tmp_path / 'preferred'}"]
    run(train, "--config", config, *(word for setting in words for word in ("--set", setting)))
    followed = ("--follow", "--set", f"train.output_dir={tmp_path / 'followed'}")
    run(train, "--config", config, tmp_path / "written", *followed)
    asked = ("--prompt", "night", "--steps", 2, "--output", tmp_path / "generated.png")
    run(predict, "--config", config, "--image", image, *asked)
    reads.add(("DataConfig", "allow_tiny"))  # which decides what of the file is accepted, and nothing after that
    unread = [path for model, name, path in fields_of(Config) if (model, name) not in reads]
    assert not unread, f"no command reads {', '.join(unread)}"

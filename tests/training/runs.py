"""Runs of qie-train in this process, on a tiny model and a few photographs."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from qie.cli import train
from qie.data.sources import open_source
from qie.families import FAMILIES
from qie.precompute import precompute
from tests.conftest import AREA_PX, forget_accelerate

ROWS = 9
OF_ONE_SIZE = ("cat-sepia", "coffee-mirrored", "motorcycle-blurred", "rocket-high_contrast")
ADAPTER = "pytorch_lora_weights.safetensors"
TIMES = {"samples_per_s", "step_time_s", "data_wait_s", "peak_memory_bytes", "mfu", "time"}
"""What differs between two equal runs."""


def mixed_rows(photos: Path, folder: Path) -> Path:
    """Write a table of twelve rows and its pictures: four photographs, made of text alone, of one control, and of two.

    All are of one size, so that each number of controls makes a shape of four; their prompts are of several lengths.
    """
    shutil.copytree(photos, folder)
    rows = []
    for number, name in enumerate(OF_ONE_SIZE):
        prompt = (photos / "training_images" / f"{name}.txt").read_text()
        controls = [f"control_images/{one}.png" for one in (name, OF_ONE_SIZE[number - 1])]
        target = f"training_images/{name}.png"
        rows += [{"target": target, "control": controls[:count], "prompt": prompt + "!" * count} for count in range(3)]
    table = folder / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


@dataclass(frozen=True)
class Bench:
    """A configuration on disk; `train` runs it with changes."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, model: Path, photos: Path, encoder: Any, rows: int = ROWS) -> Bench:
        """With shards of so many photographs; two are kept out of training.

        Of a family that takes rows without controls, they are those of `mixed_rows`, drawn twice in a step.
        """
        family, draws = FAMILIES[encoder.recipe.family], 1
        if family.min_controls:
            precompute(open_source(photos), encoder, folder / "shards", rows=(0, rows))
        else:
            source, draws = open_source(mixed_rows(photos, folder / "rows"), text_to_image=True), 2
            assert precompute(source, encoder, folder / "shards", rows=(0, 12), shard_size=5).encoded == 12
        settings = {
            "model": {"pretrained_model_name_or_path": str(model), "lora": {"r": 4}},
            "data": {"area_px": AREA_PX, "text_area_px": encoder.recipe.text_area_px, "allow_tiny": True},
            "cache": {"cache_dir": str(folder / "shards")},
            "train": {"mixed_precision": "no", "gradient_checkpointing": False, "draws_per_sample": draws},
            "optimizer": {"init_args": {"lr": 0.01}},
            "lr_scheduler": {"warmup_steps": 0},
            "validation": {"rows": 2, "every": 2},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        return cls(folder)

    def words(self, output: Path, *arguments: object, **settings: object) -> list[str]:
        """Of the command line, see `train`."""
        settings = settings if "train__epochs" in settings else {"train__max_steps": 4} | settings
        words = ["--config", self.folder / "config.yaml", "--set", f"train.output_dir={output}", *arguments]
        for key, value in settings.items():
            words += ["--set", f"{key.replace('__', '.')}={json.dumps(value)}"]
        return [str(word) for word in words]

    def train(self, output: Path, *arguments: object, code: int | None = 0, **settings: object) -> Result:
        """`settings` are keys of the configuration with __ for the dot. Four steps, if they do not say.

        `code`: the expected exit code; None: any.
        """
        forget_accelerate()
        result = CliRunner().invoke(train.main, self.words(output, *arguments, **settings))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code in (None, result.exit_code), result.output
        assert "Traceback" not in result.output
        return result


def lines(output: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, without what differs between two equal runs."""
    text = (output / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in text]


def losses(output: Path) -> list[float | None]:
    """Of the steps."""
    return [line["loss"] for line in lines(output) if "loss" in line]


def validations(output: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["validation_loss"]) for line in lines(output) if "validation_loss" in line]


def checkpoint(output: Path, step: int) -> Path:
    return output / f"checkpoint-{step:06d}"


def names(output: Path) -> list[str]:
    """Of its checkpoints, and whatever is called like one."""
    return sorted(path.name for path in output.glob("checkpoint-*"))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

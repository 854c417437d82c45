"""Where measurements find models without weights, and samples: written once, for all processes and calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.state import AcceleratorState
from measuring import Row
from models import SIZES, Bench, Size, write_model, write_rows
from samples import RECIPE, RECIPE_21, made, made_newer, record_of

from qie.config import Config
from qie.data.opening import open_stream
from qie.pretrained import open_pretrained
from qie.shards.index import Entry
from qie.shards.writer import ShardWriter
from qie.training.datasheets import Datasheet, find_datasheet
from qie.training.memory import Setup, fill_memory, memory_to_fill, plan_memory
from qie.training.model.blocks import KeptActivations
from qie.training.processes import deterministic, open_accelerator
from qie.training.run import Run
from qie.types import Row as DataRow
from qie.types import Sample

from .table import NEWER, Option


@dataclass(frozen=True, eq=False)
class Scale:
    """How large everything is.

    Attributes:
        name: full or tiny.
        size: of the models and images.
        texts: by the name that options use, the tokens of each sample's prompt in a batch; texts_21 of Qwen-Image-2.1,
            which stores no tokens of images.
        tail: how many of them stand behind the image.
        warm_up, steps: of training, before the clock starts, two or more, and after.
        repeats: of short work, in a run.
        rows: that are encoded.
    """

    name: str
    size: Size
    texts: Mapping[str, tuple[int, ...]]
    tail: int
    warm_up: int
    steps: int
    repeats: int
    rows: int
    texts_21: Mapping[str, tuple[int, ...]]

    def blocks(self, family: str) -> int:
        return int((self.size.newer if family == NEWER else self.size.transformer)["num_layers"])


LENGTHS = 1398, 1391, 1404, 1388, 1411, 1395, 1402, 1385
_SMALL = SIZES["small"]
SCALES = {
    "full": Scale(
        "full",
        SIZES["full"],
        {"one": (1398,), "four": (1398, 1385, 1410, 1392), "other": LENGTHS},
        29,
        3,
        6,
        20,
        40,
        {"one": (89,), "four": (89, 76, 101, 83)},
    ),
    "tiny": Scale(
        "tiny",
        replace(
            _SMALL,
            side_px=64,
            transformer=_SMALL.transformer | {"num_layers": 2, "num_attention_heads": 2},
            newer=_SMALL.newer | {"num_layers": 2},
        ),
        {"one": (16,), "four": (16, 14, 19, 15), "other": (16, 14, 19, 15)},
        8,
        warm_up=2,
        steps=1,
        repeats=1,
        rows=3,
        texts_21={"one": (16,), "four": (16, 14, 19, 15)},
    ),
}
CONTROLS = {"edit": 1, "edit_plus": 3, NEWER: 1}
SAMPLES = 8
CHECKED_BLOCKS = 2


@dataclass(frozen=True)
class Found:
    """What a measurement gives: rows for the docs, and numbers for whoever looks closer."""

    rows: list[Row]
    values: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Place:
    """A folder to work in, and the scale of all that is measured there."""

    folder: Path
    scale: Scale

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    @property
    def datasheet(self) -> Datasheet | None:
        """Of the device, where its name is known."""
        return find_datasheet(torch.cuda.get_device_name(self.device)) if self.gpu else None

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def bench(self, option: Option, *, blocks: int | None = None) -> Bench:
        """A model of so many blocks, all by default, and samples for the option."""
        blocks = blocks or self.scale.blocks(option.family)
        made = self._at(f"{option.family} {blocks} {option.texts}")
        with _new(made.folder) as folder:
            if folder:
                shutil.copytree(self._model(option.family), folder / "model")
                config = folder / "model" / "transformer" / "config.json"
                described = json.loads(config.read_text(encoding="utf-8"))
                described |= {"num_layers": blocks} | ({"zero_cond_t": True} if option.family == "edit_plus" else {})
                config.write_text(json.dumps(described), encoding="utf-8")
                self._write_samples(folder / "shards", option)
        return made

    def rows(self) -> Bench:
        """A model, and rows to encode."""
        made = self._at("rows")
        with _new(made.folder) as folder:
            if folder:
                shutil.copytree(self._model("edit"), folder / "model")
                write_rows(replace(made, folder=folder), self.scale.rows)
        return made

    def new_folder(self, name: str) -> Path:
        """Without what a measurement before has left."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _at(self, name: str) -> Bench:
        return Bench(self.folder / name, self.scale.size, self.device, 0, None)

    def _model(self, family: str) -> Path:
        made = self._at(family)
        with _new(made.folder) as folder:
            if folder:
                write_model(replace(made, folder=folder), family)
        return made.model

    def _write_samples(self, folder: Path, option: Option) -> None:
        newer, size = option.family == NEWER, self.scale.size
        texts = (self.scale.texts_21 if newer else self.scale.texts)[option.texts]
        width, side, make = size.text["hidden_size"], size.side_px // 8, cast(Callable[..., Sample], made)
        if newer:
            width, side, make = size.newer["context_in_dim"], size.side_px // 16, made_newer
        tail, controls = self.scale.tail, CONTROLS[option.family]
        count = len(texts) if len(texts) > 1 else SAMPLES
        recipe = RECIPE_21 if newer else RECIPE
        with ShardWriter(folder, 0, count, recipe) as shard:
            for number in range(count):
                tokens = texts[number % len(texts)]
                sample = make(number, tokens, side=side, width=width, tail=tail, controls=controls)
                shard.add(Entry.of(sample, DataRow(number, str(number), b"", (), "")), record_of(sample, recipe))
            shard.publish()


@contextmanager
def _new(folder: Path) -> Iterator[Path | None]:
    """A folder that is there when it is complete; None where it is there already."""
    if folder.exists():
        yield None
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(folder)


def configured(bench: Bench, option: Option, **train: Any) -> Config:
    """A LoRA's configuration, with what is qie's default but for the option."""
    blocks = json.loads((bench.model / "transformer" / "config.json").read_text(encoding="utf-8"))["num_layers"]
    sections: dict[str, Any] = {
        "model": {"pretrained_model_name_or_path": str(bench.model)},
        "data": {"batch_size": 4 if option.texts == "four" else 1, "caption_dropout_rate": 0.0},
        "train": {"output_dir": str(bench.folder / "run"), **train},
        "validation": {"rows": 0},
    }
    for key, value in option.settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = blocks if value == "all" else value
    return Config.model_validate(sections)


@contextmanager
def opened_run(bench: Bench, option: Option) -> Iterator[tuple[Run, Setup]]:
    """A run as qie-train makes one, on the bench's samples, and what its memory depends on."""
    config = configured(bench, option)
    AcceleratorState._reset_state(True)  # of a run before
    accelerator = open_accelerator(config)
    stream = open_stream([bench.folder / "shards"], batch_size=config.data.batch_size)
    pretrained = open_pretrained(str(bench.model), components=("transformer", "scheduler"))
    setup = plan_memory(config, pretrained, stream, accelerator)
    if option.kept:
        setup = replace(setup, kept=KeptActivations(*(setup.architecture.blocks * share for share in option.kept)))
    elif config.train.gradient_checkpointing == "auto":
        setup = fill_memory(setup, memory_to_fill(config, stream, accelerator.device))
    with ExitStack() as stack:
        if config.train.deterministic:
            stack.enter_context(deterministic())
        run = Run(config, pretrained, stream, accelerator, kept=setup.kept)
        stack.callback(run.finish)
        stack.callback(run.batches.close)  # it holds a batch
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()  # weights were made there before they were quantised or offloaded
        yield run, setup

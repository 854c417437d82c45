"""A first configuration: what fits a model, rows and a GPU, as YAML whose comments say why. `qie init` writes it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from PIL import Image

from qie.config import SCHEMA_FILE, Config
from qie.data.sources import Guess, guess, open_source
from qie.errors import RowError, UsageError, shown
from qie.families import FAMILIES, Family
from qie.paths import local_path
from qie.pretrained import PretrainedModel, open_pretrained
from qie.training.memory import Setup, Tokens, estimate, half_as_large, offloaded_bytes, setup_of

ROWS = 32
"""Rows that are read, spread over all."""
RELEASED = {
    "Qwen/Qwen-Image-Edit": "edit",
    "Qwen/Qwen-Image-Edit-2509": "edit_plus",
    "Qwen/Qwen-Image-Edit-2511": "edit_plus",
    "Qwen/Qwen-Image-2.1": "qwen_image_21",
}
"""Models whose transformers have the sizes that diffusers' classes have by default: nothing is asked for them."""
MARGIN = 0.95
"""The part of a GPU's memory that the estimate may fill."""
SMALLER_PX = tuple(side * side for side in (896, 768, 640, 512, 384, 256))
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
ADAM, ADAM_8BIT = "torch.optim.AdamW", "bitsandbytes.optim.AdamW8bit"


@dataclass(frozen=True)
class Rows:
    """What was seen of the rows.

    Attributes:
        place: how they are laid out, and how many there are.
        areas_px: of the targets that were read.
        controls: the fewest and the most.
        words: of a prompt, in the middle.
        masks: how many of the rows that were read have one.
        unread: how many could not be read.
    """

    place: Guess
    areas_px: tuple[int, ...]
    controls: tuple[int, int]
    words: int
    masks: int
    unread: int

    @property
    def read(self) -> int:
        return len(self.areas_px)


@dataclass(frozen=True)
class BasePlan:
    """How a base is stored and trained so that it fits.

    Attributes:
        why: for the comment.
        quantize, offload_blocks, draws, optimizer: as in the configuration.
        halved: of the image areas, too.
    """

    why: str
    quantize: Any = None
    offload_blocks: int = 0
    draws: int = 1
    optimizer: str = ADAM
    halved: bool = False

    def of(self, setup: Setup) -> Setup:
        """The setup of a run that follows this plan."""
        found = replace(
            setup,
            quantize=self.quantize,
            offload_blocks=self.offload_blocks,
            draws=self.draws,
            optimizer_bytes=2.0 if self.optimizer == ADAM_8BIT else setup.optimizer_bytes,
        )
        return half_as_large(found) if self.halved else found


def plans(family: Family, blocks: int) -> Iterator[BasePlan]:
    """From what changes the base least to what takes least memory."""
    if family.interleaved:
        yield BasePlan("the base stays as it was released, in bfloat16, all of it on the GPU", draws=4)
        for part in (blocks * 5 // 8, blocks):
            told = (
                f"the base stays in bfloat16; {part} of its {blocks} blocks lie in host memory and are copied meanwhile"
            )
            yield BasePlan(told, offload_blocks=part, draws=4)
        yield BasePlan("the base is stored in 8 bits, half of it in host memory", "fp8", blocks // 2, 2)
    else:
        yield BasePlan("the base stays as it was released, in bfloat16, all of it on the GPU")
        yield BasePlan("the base is stored in 8 bits: in bfloat16 it would not fit", "fp8")
        yield BasePlan("the base is stored in 4 bits: in 8 it would not fit", "nf4", optimizer=ADAM_8BIT)
        yield BasePlan(
            "the base is stored in 8 bits, half of it in host memory", "fp8", blocks // 2, optimizer=ADAM_8BIT
        )
    yield BasePlan(
        f"the base is stored in 8 bits, all {blocks} blocks in host memory", "fp8", blocks, optimizer=ADAM_8BIT
    )
    small = "the base is stored in 8 bits, all blocks in host memory, and images are half as large"
    yield BasePlan(small, "fp8", blocks, optimizer=ADAM_8BIT, halved=True)


def sample_rows(place: str, family: Family) -> Rows:
    """Some rows of a place.

    Raises:
        SourceError: no rows are there, or they are laid out in no way that is known.
        UsageError: none of the rows can be read, or the family does not take their controls.
    """
    found = guess(place, text_to_image=family.min_controls == 0)
    rows = open_source(list(found.sources), text_to_image=family.min_controls == 0)
    numbers = sorted({index * len(rows) // min(ROWS, len(rows)) for index in range(min(ROWS, len(rows)))})
    areas, controls, words, masks, unread = [], [], [], 0, 0
    for number in numbers:
        try:
            row = rows.read(number)
            width, height = _size(row.target)
        except RowError:
            unread += 1
            continue
        areas.append(width * height)
        controls.append(len(row.controls))
        words.append(len(row.prompt.split()))
        masks += row.mask is not None
    if not areas:
        raise UsageError("none of the first rows can be read", where=place, hint="qie doctor --config FILE says why")
    most = family.max_controls
    if most is not None and max(controls) > most:
        raise UsageError(
            f"{family.title} takes {most} control, and rows have {max(controls)}",
            where=place,
            hint="take Qwen-Image-Edit-2511 or Qwen-Image-2.1",
        )
    return Rows(found, tuple(areas), (min(controls), max(controls)), round(median(words)), masks, unread)


def _size(content: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return image.size
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise RowError("the target is no image") from error


@contextmanager
def model_of(name: str) -> Iterator[PretrainedModel]:
    """The model, as far as memory depends on it; for a released one, without asking the Hub.

    Raises:
        ModelError: there is none, or it is of no family that qie knows.
    """
    if name not in RELEASED or local_path(name).is_dir():
        yield open_pretrained(name, components=("transformer",), weights=False)
        return
    known = FAMILIES[RELEASED[name]]
    with TemporaryDirectory() as folder:
        config = Path(folder, "transformer", "config.json")
        config.parent.mkdir()
        config.write_text(json.dumps({"_class_name": known.transformer}), encoding="utf-8")
        index = Path(folder, "model_index.json")
        index.write_text(json.dumps({"_class_name": known.pipeline}), encoding="utf-8")
        yield open_pretrained(folder, components=("transformer",))


def areas_for(rows: Rows, family: Family) -> list[int]:
    """The areas that the images need, the largest first: an image is not enlarged."""
    usual = [family.area_px, *(area for area in SMALLER_PX if area < family.area_px)]
    return sorted(
        {next((area for area in usual if area <= 1.05 * image), usual[-1]) for image in rows.areas_px}, reverse=True
    )


def largest_run(pretrained: PretrainedModel, rows: Rows) -> Setup:
    """What the memory of a run depends on, whose rows are all as large as the largest."""
    family, area = pretrained.family, areas_for(rows, pretrained.family)[0]
    config = Config.model_validate({"model": {"pretrained_model_name_or_path": "x", "lora": _lora()}})
    images = area // (family.latent_scale * family.patch) ** 2
    text = 60 + 2 * rows.words + int(family.text_tokens(rows.controls[1] * (family.text_area_px or area)))
    tokens = Tokens((1 + rows.controls[1]) * images, images, text, rows.controls[1])
    alone = SimpleNamespace(device=torch.device("cpu"), num_processes=1, distributed_type="NO")
    return replace(setup_of(config, pretrained, tokens, alone), accumulates=True)


def choose_plan(setup: Setup, family: Family, vram_gb: float) -> tuple[BasePlan, Setup]:
    """The first plan that fits, with the setup that follows it.

    Raises:
        UsageError: none does.
    """
    tried = [(plan, plan.of(setup)) for plan in plans(family, setup.architecture.blocks)]
    for plan, planned in tried:
        if estimate(planned).total <= MARGIN * vram_gb * 1e9:
            return plan, planned
    least = min(estimate(planned).total for _, planned in tried)
    raise UsageError(
        "no way that qie knows to train this model fits",
        expected=f"{least / MARGIN / 1e9:.0f} GB",
        found=f"{vram_gb:g} GB",
    )


def _lora() -> dict[str, Any]:
    return {"r": 16, "lora_alpha": 32, "target_modules": TARGETS}


def write_config(name: str, pretrained: PretrainedModel, rows: Rows, vram_gb: float, file: str) -> Iterator[str]:
    """The lines of a configuration.

    Raises:
        UsageError: nothing fits.
    """
    family, (plan, setup) = pretrained.family, choose_plan(largest_run(pretrained, rows), pretrained.family, vram_gb)
    count = rows.place.rows
    yield f"# yaml-language-server: $schema={SCHEMA_FILE}"
    yield f"# A LoRA for {family.title} on one GPU of {vram_gb:g} GB, from shards of {count:,} rows. qie init wrote it."
    yield f"#   qie precompute --config {_comment(file)}"
    yield f"#   qie train --config {_comment(file)}"
    if plan.quantize:
        yield "# Needs: pip install 'qie[quant]'"
    yield "model:"
    yield f"  pretrained_model_name_or_path: {_yaml(name)}"
    yield "  # On the attention of the image; more of r learns more, and takes more rows not to learn them by heart."
    yield f"  lora: {_yaml(_lora())}"
    yield f"  # About {estimate(setup).total / 1e9:.0f} GB with all blocks recomputed: {plan.why}."
    yield f"  quantize: {plan.quantize or 'null'}"
    yield from _data(rows, family, plan)
    yield "cache:"
    yield "  cache_dir: shards/   # a folder, or a URL such as s3://bucket/shards"
    yield from _train(plan, setup, count, 2 if family.interleaved else 4)
    held_out = min(16, count // 10)
    yield "validation:"
    yield "  every: 200"
    yield f"  rows: {held_out}   # {'never trained on' if held_out else 'too few rows'}"
    yield "  # Pictures at each validation, which qie watch shows: name images of yours, and what to do with them."
    yield "  # samples: [{images: [photo.png], prompt: make it night}]"
    trackers = ["tensorboard"] if find_spec("tensorboard") else []
    yield f"logging: {_yaml({'report_to': trackers})}   # metrics.jsonl and run.json are always written"


def _train(plan: BasePlan, setup: Setup, rows: int, batches: int) -> Iterator[str]:
    steps = min(4000, max(500, -(-10 * rows // 100) * 100))
    yield "train:"
    yield f"  max_steps: {steps}   # of {batches} batches: each row about {max(1, round(steps * batches / rows))} times"
    yield f"  gradient_accumulation_steps: {batches}"
    yield "  gradient_checkpointing: auto   # recomputes as little as the GPU's free memory allows"
    if plan.draws > 1:
        yield "  # Draws of a sample's noise share one pass through its text and controls."
        yield f"  draws_per_sample: {plan.draws}"
    if plan.offload_blocks:
        yield f"  offload_blocks: {plan.offload_blocks}   # {offloaded_bytes(setup) / 1e9:.1f} GB of host memory"
    yield "  output_dir: runs/edit"
    yield f"optimizer: {_yaml({'class_path': plan.optimizer, 'init_args': {'lr': 1e-4}})}"
    yield "lr_scheduler: {scheduler_type: cosine, warmup_steps: 100}"
    stratified = ", stratified_sigmas: true" if plan.draws > 1 else ""
    yield f"loss: {{timestep_sampling: logit_normal, shift: dynamic{stratified}}}"


def _data(rows: Rows, family: Family, plan: BasePlan) -> Iterator[str]:
    low, high = rows.controls
    controls = f"{low}" if low == high else f"{low} to {high}"
    yield "data:"
    yield f"  # {rows.place.title}; {rows.read} rows were read: controls {controls}, words in a prompt {rows.words}"
    for note in rows.place.notes:
        yield f"  # {_comment(note)}"
    if rows.unread:
        yield f"  # {rows.unread} rows could not be read: qie precompute --dry-run says why"
    for key, value in rows.place.settings().items():
        yield f"  {key}: {_yaml(value)}"
    areas = areas_for(rows, family)
    if plan.halved:
        areas = [max(area // 2, SMALLER_PX[-1]) for area in areas]
    if areas != [family.area_px]:
        yield "  # Each image takes the largest of these areas that does not enlarge it."
        yield f"  area_px: {_yaml(areas if len(areas) > 1 else areas[0])}"
    yield "  batch_size: 1"
    yield "  caption_dropout_rate: 0.1   # the null prompt now and then, for guidance"
    if rows.masks:
        yield "  # Rows have masks: loss.mask_foreground_weight says how much more their bright pixels count."


def _comment(text: str) -> str:
    """Text from files, on one line, without what YAML refuses."""
    return shown(" ".join(text.split()))


def _yaml(value: Any) -> str:
    """A value on one line; `${` would be looked up in the environment."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.strip().removesuffix("...").strip().replace("${", "$${")

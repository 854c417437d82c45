"""A dry run: what a run would do, what memory it would take, and how long it would take, before weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import Accelerator

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import QieError
from qie.pretrained import PretrainedModel
from qie.quantities import human_bytes, human_time
from qie.training.datasheets import Datasheet, find_datasheet, named_datasheet
from qie.training.memory import (
    Setup,
    Tokens,
    advice,
    estimate,
    fill_memory,
    free_to_fill,
    image_tokens,
    largest,
    memory_to_fill,
    offloaded_bytes,
    setup_of,
)
from qie.training.model.blocks import offloaded_blocks
from qie.training.model.trainable import check_given_adapters
from qie.training.roofline import step_time
from qie.training.run import require_null_prompts, require_one_draw, require_pairs

_PROMPT_TOKENS = 100
"""Of a prompt and its template, in a dry run without samples."""


@dataclass(frozen=True)
class Gpu:
    """A GPU to plan for.

    Attributes:
        name: as torch or a person names it.
        datasheet: its figures; None if it is not known.
        free_bytes: of its memory; 0 if it is not known.
        budget_bytes: of these, what train.gradient_checkpointing=auto may fill.
    """

    name: str
    datasheet: Datasheet | None
    free_bytes: float
    budget_bytes: float


@dataclass(frozen=True)
class Forecast:
    """What a run would do.

    Attributes:
        setup: everything that memory depends on, of the largest sample.
        mean: the same of the mean sample, on which time depends.
        samples: of training; None: not known yet.
        steps, batches: optimizer steps, and batches of each.
        gpu: it would run there; None: no GPU is here, and none was named.
    """

    setup: Setup
    mean: Setup
    samples: int | None
    steps: int
    batches: int
    gpu: Gpu | None

    def lines(self) -> Iterator[str]:
        """The forecast, as a person reads it."""
        yield from self._samples()
        yield from self._blocks()
        yield from self._memory()
        yield from self._time()

    def require_memory(self) -> None:
        """Raise QieError if the GPU has less memory than the run needs."""
        needed = estimate(self.setup).total
        if self.gpu and self.gpu.free_bytes and needed > self.gpu.free_bytes:
            raise QieError(
                "the run needs more memory than the GPU has",
                where=self.gpu.name,
                expected=f"{needed / 1e9:.1f} GB",
                found=f"{self.gpu.free_bytes / 1e9:.1f} GB",
                hint="; or ".join(advice(self.setup)[:4]) or "use a GPU with more memory",
            )

    def _samples(self) -> Iterator[str]:
        setup, every_step = self.setup, self.setup.batch_size * self.setup.processes * self.batches
        tokens = f"{setup.image_tokens:,} image and {setup.text_tokens:,} text tokens"
        draws = f" of {setup.draws} draws each" if setup.draws > 1 else ""
        if self.samples is None:
            yield f"samples     not encoded yet; assumed: {tokens} each"
        else:
            yield f"samples     {self.samples:,} of at most {tokens}"
        epochs = "" if not self.samples else f", {self.steps * every_step / self.samples:.1f} epochs"
        yield f"steps       {self.steps:,} of {every_step:,} samples{draws}{epochs}"

    def _blocks(self) -> Iterator[str]:
        setup, blocks = self.setup, self.setup.architecture.blocks
        again, keeping = len(setup.checkpointed), len(setup.keeping_attention)
        counts = {
            "kept": blocks - again,
            "recomputed but for attention": keeping,
            "recomputed": again - keeping,
        }
        parts = [f"{count} {what}" for what, count in counts.items() if count]
        if offloaded := len(offloaded_blocks(blocks, setup.offload_blocks)):
            parts.append(f"{offloaded} offloaded: {human_bytes(offloaded_bytes(setup))} of host memory")
        yield f"blocks      {blocks}: {', '.join(parts)}"

    def _memory(self) -> Iterator[str]:
        *parts, total = estimate(self.setup).lines()
        if self.gpu and self.gpu.free_bytes:
            total += f" of {self.gpu.free_bytes / 1e9:.1f} GB, {self.gpu.name}"
        yield from ["memory", *(f"  {line}" for line in [*parts, total])]

    def _time(self) -> Iterator[str]:
        if self.gpu is None:
            yield "time        not known: no GPU is here; --gpu NAME takes one that is not"
        elif self.gpu.datasheet is None:
            yield f"time        not known for {self.gpu.name}; --gpu NAME takes another"
        elif self.setup.value_bytes != 2:
            yield "time        known for bf16 only"
        else:
            found = step_time(self.mean, self.gpu.datasheet, self.batches)
            parts = {
                "products": found.products,
                "attention": found.attention,
                "pointwise": found.pointwise,
                "optimizer": found.optimizer,
                "copies of offloaded weights meanwhile": found.copies,
            }
            told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)
            yield f"a step      about {found.total:.2f} s, {found.mfu:.0%} MFU: {told}"
            yield f"the run     about {human_time(found.total * self.steps)}"


def forecast(
    config: Config,
    pretrained: PretrainedModel,
    stream: Stream | None,
    accelerator: Accelerator,
    *,
    gpu: str | None = None,
    vram_gb: float | None = None,
) -> Forecast:
    """What a run would do, on the GPU of this process or on another one.

    Args:
        config: of the run.
        pretrained: the base model; its weights need not be there.
        stream: this process's batches; None: no sample is encoded yet, so their sizes follow from the configuration.
        accelerator: device and processes.
        gpu, vram_gb: the name of another GPU, and its memory if that is not what the name says.

    Raises:
        UsageError: no such GPU is known.
        ConfigError: the adapter does not fit the transformer, FSDP cannot spread its weights, or the family has no
            several draws of a sample; or preferences are to be learnt, and a sample has no rejected target.
    """
    require_one_draw(pretrained.family, config.train.draws_per_sample)
    check_given_adapters(config, pretrained)
    if stream is not None:
        require_null_prompts(stream, config.data.caption_dropout_rate)
        require_pairs(config, stream)
    tokens = _assumed(config, pretrained) if stream is None else largest(stream, pretrained.family.patch)
    setup = setup_of(config, pretrained, tokens, accelerator)
    place = _gpu(config, stream, accelerator.device, gpu, vram_gb)
    if config.train.gradient_checkpointing == "auto" and place:
        setup = fill_memory(setup, place.budget_bytes)
    batches, steps, samples = config.train.gradient_accumulation_steps, config.train.max_steps, None
    mean = setup
    if stream is not None:
        samples = len(stream.samples.columns) - len(stream.held_out)
        image, target, text, controls = _mean(stream, pretrained.family.patch)
        mean = replace(setup, image_tokens=image, text_tokens=text, target_tokens=target, controls=controls)
        if config.train.epochs is not None:
            steps = -(-stream.count(config.train.epochs) // batches)
    return Forecast(setup, mean, samples, steps, batches, place)


def _mean(stream: Stream, patch: int) -> Tokens:
    columns = stream.samples.columns
    sizes = np.array([image_tokens(shape, patch) for shape in columns.shape_names])
    image, target, controls = columns.counts @ sizes / len(columns)
    return Tokens(round(image), round(target), round(float(columns.lengths.mean())), float(controls))


def _assumed(config: Config, pretrained: PretrainedModel) -> Tokens:
    """Those of a sample with one control, as large as the configuration allows."""
    data, family = config.data, pretrained.family
    area = data.area_px or family.area_px
    areas = [width * height for width, height in data.buckets_px] or (area if isinstance(area, list) else [area])
    token_px = (family.latent_scale * family.patch) ** 2
    text = _PROMPT_TOKENS + int(family.text_tokens(data.text_area_px or family.text_area_px or max(areas)))
    return Tokens(2 * max(areas) // token_px, max(areas) // token_px, text)


def _gpu(
    config: Config, stream: Stream | None, device: torch.device, name: str | None, vram_gb: float | None
) -> Gpu | None:
    """The GPU that is named, or has so much memory, or else the one that is here."""
    if name is None and vram_gb is None:
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device)
        free, whole = map(float, torch.cuda.mem_get_info(device))
        datasheet = find_datasheet(name)
        budget = free_to_fill(config, free, whole) if stream is None else memory_to_fill(config, stream, device)
    else:
        datasheet = None if name is None else named_datasheet(name)
        free = vram_gb * 1e9 if vram_gb else datasheet.memory_gb * 1e9 if datasheet else 0.0
        budget = free_to_fill(config, free, free)
    if datasheet and config.logging.peak_tflops:
        datasheet = replace(datasheet, tflops=config.logging.peak_tflops)
    return Gpu(name or "a GPU without a name", datasheet, free, budget)

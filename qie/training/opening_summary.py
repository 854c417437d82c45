"""What a run will do, in a few lines, before it reads weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from qie.config import Config
from qie.data.stream import Stream
from qie.pretrained import PretrainedModel
from qie.quantities import human_bytes, human_count, human_number
from qie.training.memory import Setup, estimate, image_tokens, offloaded_bytes, recomputation
from qie.training.model.adapter_file import KINDS
from qie.training.model.blocks import offloaded_blocks


def opening_lines(
    config: Config,
    pretrained: PretrainedModel,
    stream: Stream,
    accelerator: Accelerator,
    setup: Setup,
    steps: int,
    resume_from: Path | None,
) -> Iterator[tuple[str, str]]:
    """A word and a text each: the model, its samples, what is trained where, its memory, the steps, and where to.

    Args:
        config, pretrained, stream, accelerator: of the run.
        setup: what its memory depends on.
        steps: optimizer steps altogether.
        resume_from: the checkpoint that the run goes on from.
    """
    stored = f", its base in {config.model.quantize}" if config.model.quantize else ""
    yield "model", f"{config.model.pretrained_model_name_or_path} ({pretrained.family.name}){stored}"
    yield "samples", _samples(stream, pretrained)
    yield "training", _trained(config, accelerator, setup)
    if accelerator.device.type == "cuda":
        yield "memory", _memory(setup, accelerator.device)
    yield "steps", _steps(config, stream, setup, steps)
    begun = f" from {resume_from.name}" if resume_from else ""
    yield "output", f"{config.train.output_dir}{begun}; Ctrl-C stops and saves, --resume latest goes on"


def _samples(stream: Stream, pretrained: PretrainedModel) -> str:
    columns, patch = stream.samples.columns, pretrained.family.patch
    there = [shape for shape, count in zip(columns.shape_names, columns.counts, strict=True) if count]
    most = max(there, key=lambda shape: image_tokens(shape, patch), default=None)
    which = " of" if len(there) == 1 else f" in {len(there)} shapes, the largest"
    size = "" if most is None else f"{which} {most.in_pixels(pretrained.family.latent_scale)}"
    if not stream.plans.whole:
        return f"{len(columns):,} so far{size}; the others as they are written"
    held_out = len(stream.validation_batches())
    more = f"; {held_out} more for validation" if held_out else ""
    kept = f", {_preserved(stream):,} of them preserved" if stream.preserved else ""
    return f"{len(columns) - len(stream.held_out):,}{size}{kept}{more}"


def _preserved(stream: Stream) -> int:
    """Of the samples that are trained on."""
    return int(np.delete(stream.samples.columns.of_sources(stream.preserved), stream.held_out).sum())


def _trained(config: Config, accelerator: Accelerator, setup: Setup) -> str:
    lora, parameters, device = config.model.lora, setup.parameters, accelerator.device
    count, whole = human_number(parameters.trained), human_number(parameters.trained + parameters.frozen)
    kind = KINDS[lora.kind.upper()] if lora else ""
    what = f"{kind} of rank {lora.r}, {count} of {whole} parameters" if lora else f"all {count} parameters"
    dtype = "float32" if setup.value_bytes == 4 else "bfloat16"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    way = "FSDP" if setup.sharded else "DDP"
    return f"{what}, in {dtype} on {place}" + (f" × {setup.processes} ({way})" if setup.processes > 1 else "")


def _memory(setup: Setup, device: torch.device) -> str:
    free, blocks = torch.cuda.mem_get_info(device)[0], setup.architecture.blocks
    parts = [f"about {human_bytes(estimate(setup).total)} of the GPU's {human_bytes(free)} that are free"]
    if setup.checkpointed:
        parts.append(recomputation(setup))
    if offloaded := len(offloaded_blocks(blocks, setup.offload_blocks)):
        parts.append(f"{offloaded} offloaded, {human_bytes(offloaded_bytes(setup))} of host memory")
    return "; ".join(parts)


def _steps(config: Config, stream: Stream, setup: Setup, steps: int) -> str:
    section, samples = config.train, len(stream.samples.columns) - len(stream.held_out)
    every_step = setup.batch_size * setup.processes * section.gradient_accumulation_steps
    of = human_count(every_step, "sample") + (f" in {setup.draws} draws" if setup.draws > 1 else "")
    epochs = f", {steps * every_step / samples:.1f} epochs" if samples and stream.plans.whole else ""
    validated = f"validated {_every(config.validation.every, steps)}, " if stream.validation_batches() else ""
    return f"{steps:,} of {of}{epochs}; {validated}saved {_every(section.checkpoint_every, steps)}"


def _every(count: int, steps: int) -> str:
    return f"every {count:,}" if count < steps else "at the end"

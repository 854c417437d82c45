"""Whether a run will fit into the device's memory: told before anything is loaded, and when it did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import ConfigError
from qie.pretrained import PretrainedModel
from qie.training.flops import Architecture
from qie.training.memory import Parameters, Setup, advice, empty_transformer, estimate, optimizer_bytes, out_of_memory
from qie.training.model.load import train_everything
from qie.training.model.lora import add_lora


def plan_memory(config: Config, pretrained: PretrainedModel, stream: Stream, accelerator: Accelerator) -> Setup:
    """Everything that a run's memory depends on. Wrong LoRA targets are refused here, before weights are read.

    Raises:
        ConfigError: the adapter does not fit the transformer.
    """
    model, section = config.model, config.train
    sharded = accelerator.distributed_type == "FSDP"
    if sharded and (model.quantize in ("fp8", "int8") or section.offload_blocks):
        raise ConfigError(
            "weights that are spread over processes can neither be fp8 or int8 nor wait in host memory",
            where="model.quantize" if model.quantize else "train.offload_blocks",
            hint="set model.quantize to null or nf4 and train.offload_blocks to 0, or use configs/accelerate/ddp.yaml",
        )
    transformer = empty_transformer(pretrained)
    trained = getattr(torch, section.trained_dtype)
    if model.lora:
        add_lora(transformer, model.lora.model_copy(update={"continue_from": None}), section.seed, dtype=trained)
    else:
        train_everything(transformer, trained)
    columns = stream.samples.columns
    sizes = [(shape.target, *shape.controls) for shape in columns.shape_names]
    return Setup(
        Architecture.of(transformer.config),
        Parameters.of(transformer),
        image_tokens=max((sum(h * w // 4 for h, w in latents) for latents in sizes), default=0),
        text_tokens=int(columns.lengths.max(initial=0)),
        batch_size=config.data.batch_size,
        value_bytes=2 if section.mixed_precision == "bf16" else 4,
        quantize=model.quantize,
        trained_bytes=trained.itemsize,
        optimizer_bytes=optimizer_bytes(config.optimizer.class_path, trained.itemsize),
        ema=section.ema_decay is not None,
        checkpoint_every=int(section.gradient_checkpointing),
        offload_blocks=section.offload_blocks,
        processes=accelerator.num_processes,
        sharded=sharded,
    )


def tell_memory(setup: Setup, device: torch.device, say: Callable[[str], object]) -> None:
    """Say how much a run will take of a GPU; and what to change when that is more than is free."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    expected = estimate(setup)
    say(f"about {expected.total / 1e9:.1f} GB of the GPU's memory will be needed; {free / 1e9:.1f} GB are free")
    if expected.total > free:
        say("\n".join([*expected.lines(), "to need less:", *advice(setup)[:4]]))


@contextmanager
def explained_memory(setup: Setup) -> Iterator[None]:
    """Raise a QieError that says what to change, where torch says that memory is out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, setup) from error

"""The processes of a run, one or a group of torchrun or accelerate launch: how they start, and agree to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

from qie.config import Config
from qie.errors import UsageError
from qie.training.reporting.trackers import require_trackers

_START = "start several processes with torchrun or accelerate launch; for one, unset WORLD_SIZE and LOCAL_RANK"


def open_accelerator(config: Config) -> Accelerator:
    """Device, precision, processes and trackers; torchrun and accelerate launch tell of them by environment variables.

    Raises:
        ConfigError: a tracker is not installed.
        UsageError: the processes that were started do not find each other.
    """
    require_trackers(config.logging.report_to)
    sharding = None
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and config.train.mixed_precision == "bf16":
        # accelerate's own policy would add up gradients in bfloat16; DDP adds those of a LoRA in float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    try:
        accelerator = Accelerator(
            # Else, on a machine without a GPU, each process that torchrun starts would train alone.
            cpu=not torch.accelerator.is_available(),
            # The last block's text stream feeds nothing: adapters on it never get a gradient, for which DDP would wait.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
            mixed_precision=config.train.mixed_precision,
            fsdp_plugin=sharding,
            log_with=config.logging.report_to or None,
            project_dir=config.train.output_dir,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            "accelerate cannot set up this process", found=str(error).strip().partition("\n")[0], hint=_START
        ) from error
    started = os.environ.get("WORLD_SIZE", str(accelerator.num_processes))
    if started != str(accelerator.num_processes):
        raise UsageError(
            "processes that were started together would train separately",
            where="WORLD_SIZE",
            expected=f"{started} processes in one group",
            found=accelerator.num_processes,
            hint=_START,
        )
    return accelerator


@contextmanager
def stop_requested(accelerator: Accelerator) -> Iterator[Callable[[], bool]]:
    """A context in which SIGINT and SIGTERM ask the run to stop. Gives a function that says whether one was asked.

    The loop calls it between steps; it answers the same in all processes. A second signal interrupts at once.
    """
    asked = threading.Event()

    def on_signal(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    def agreed() -> bool:
        if accelerator.num_processes == 1:
            return asked.is_set()
        flag = torch.tensor(float(asked.is_set()), device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum") > 0)

    if threading.current_thread() is not threading.main_thread():
        yield agreed  # signals reach the main thread only
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield agreed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The processes of a run, one or a group of torchrun or accelerate launch: how they start, compute and stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch.distributed.fsdp import MixedPrecisionPolicy

from qie.config import Config
from qie.errors import ConfigError, QieError, UsageError
from qie.training.control import Asked
from qie.training.reporting.trackers import require_trackers

_START = "start several processes with torchrun or accelerate launch; for one, unset WORLD_SIZE and LOCAL_RANK"


PATIENCE = timedelta(hours=6)
"""How long a process waits for the others: while the main one writes 245 GB and hashes them, or, with --follow, while
one waits for a shard. torch's 10 minutes end such a run. When a process dies, its launcher ends the others at once."""


def open_accelerator(config: Config) -> Accelerator:
    """Device, precision, processes and trackers; torchrun and accelerate launch tell of them by environment variables.

    Raises:
        ConfigError: a tracker is not installed.
        UsageError: the processes that were started do not find each other.
    """
    require_trackers(config.logging.report_to)
    if config.train.deterministic:
        require_determinism(config)
    sharding = None
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and config.train.mixed_precision == "bf16":
        # accelerate's own policy would add up gradients in bfloat16; DDP adds those of a LoRA in float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    try:
        accelerator = Accelerator(
            # Else, on a machine without a GPU, each process that torchrun starts would train alone.
            cpu=not torch.accelerator.is_available(),
            kwargs_handlers=[
                # The last block's text stream feeds nothing: adapters on it never get a gradient, and DDP would wait.
                DistributedDataParallelKwargs(find_unused_parameters=True),
                InitProcessGroupKwargs(timeout=PATIENCE),
            ],
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


_WORKSPACES = ":4096:8", ":16:8"
_DETERMINISTIC_ATTENTION = None, "native", "_native_flash", "_native_efficient", "_native_math"


def require_determinism(config: Config) -> None:
    """Let cuBLAS have a workspace of its own for each stream, which it asks for once, when it starts.

    Raises:
        ConfigError: the attention backend promises nothing: it is another program, or cuDNN's.
        UsageError: the environment asks for another workspace.
    """
    backend = config.model.attention_backend
    if backend not in _DETERMINISTIC_ATTENTION:
        raise ConfigError(
            "the attention backend may compute other bits in an equal run",
            where="model.attention_backend",
            expected=f"null, {', '.join(filter(None, _DETERMINISTIC_ATTENTION))}, or train.deterministic: false",
            found=backend,
        )
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
    if workspace not in _WORKSPACES:
        raise UsageError(
            "cuBLAS may compute other bits in an equal run",
            where="CUBLAS_WORKSPACE_CONFIG",
            expected=f"{' or '.join(_WORKSPACES)}, or unset",
            found=workspace,
        )


@contextmanager
def deterministic() -> Iterator[None]:
    """A context in which torch takes kernels that give the same bits each time; after `require_determinism`.

    torch's attention then takes FlashAttention or the memory-efficient kernels, whose backward pass adds in one order,
    and leaves out cuDNN's.

    Raises:
        QieError: an operation has no such kernel; names it.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, torch.utils.deterministic.fill_uninitialized_memory = (  # type: ignore[attr-defined]
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        False,  # nothing here reads what it has not written
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise QieError(
            "an operation has no kernel that gives the same bits each time",
            where="train.deterministic",
            found=str(error).partition(".")[0],
            hint="set it to false",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


HOLD_S = 0.5
"""A run that holds looks again after so long, and its processes agree: none waits in a collective meanwhile."""


class Agreement:
    """What all processes of a run are asked to do: the same in each.

    A signal may reach any process; the files of `qie.training.control` are read by the main one.
    """

    def __init__(self, accelerator: Accelerator, look: Callable[[], Asked]) -> None:
        self._accelerator, self._look, self._signalled = accelerator, look, threading.Event()

    def on_signal(self, *_: object) -> None:
        """A second signal interrupts at once."""
        if self._signalled.is_set():
            raise KeyboardInterrupt
        self._signalled.set()

    def __call__(self) -> Asked:
        """Collective: every process calls it between two steps."""
        mine = self._look() if self._accelerator.is_main_process else Asked()
        mine = replace(mine, stop=mine.stop or self._signalled.is_set())
        if self._accelerator.num_processes == 1:
            return mine
        flags = torch.tensor(astuple(mine), dtype=torch.float32, device=self._accelerator.device)
        return Asked(*(flag > 0 for flag in self._accelerator.reduce(flags, "sum").tolist()))

    def wait(self) -> None:
        """Until it is time to ask again, or a signal comes."""
        self._signalled.wait(HOLD_S)


@contextmanager
def agreement(accelerator: Accelerator, look: Callable[[], Asked]) -> Iterator[Agreement]:
    """A context in which SIGINT and SIGTERM ask the run to stop after the current step, as the file `stop` does.

    Args:
        accelerator: of the processes that agree.
        look: what is asked by files; called in the main process.
    """
    agreed = Agreement(accelerator, look)
    if threading.current_thread() is not threading.main_thread():
        yield agreed  # signals reach the main thread only
        return
    before = {number: signal.signal(number, agreed.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield agreed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

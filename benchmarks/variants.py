"""Ways to take training steps, one model and optimizer each, and how they are measured."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from measuring import synchronize
from models import MOST_WARM_UP, Bench, release
from plain import plain_loop

from qie.config import Config
from qie.data.opening import open_stream
from qie.errors import QieError
from qie.pretrained import open_pretrained
from qie.training.run import Run


@dataclass(frozen=True)
class Variant:
    """One line: whose loop, and how."""

    loop: str
    live: bool = False
    checkpointing: bool = True
    compile: bool = False
    fp8: bool = False
    attention: str = "native"

    def __str__(self) -> str:
        words = {"no checkpointing": not self.checkpointing, "compile": self.compile, "fp8": self.fp8}
        words["cuDNN attention"] = self.attention == "_native_cudnn"
        return ", ".join([f"{self.loop} {'live' if self.live else 'cached'}", *(word for word in words if words[word])])

    @property
    def warm_up(self) -> int:
        """Steps before the clock starts. Live, rows that were encoded while the first steps compiled are used up."""
        return (5 if self.compile else 3) + (6 if self.live and self.loop == "qie" else 0)


PLAIN_LIVE, PLAIN_CACHED = Variant("plain", live=True), Variant("plain")
VARIANTS = [
    PLAIN_LIVE,
    PLAIN_CACHED,
    Variant("qie", live=True),
    Variant("qie", live=True, checkpointing=False, compile=True),
    Variant("qie"),
    Variant("qie", compile=True),
    Variant("qie", checkpointing=False),
    Variant("qie", checkpointing=False, compile=True),
    Variant("qie", checkpointing=False, compile=True, attention="_native_cudnn"),  # with a GPU alone
    Variant("qie", fp8=True),
    Variant("qie", checkpointing=False, compile=True, fp8=True),
]


@dataclass
class Measured:
    """All steps of a variant, and why it could not run, if so."""

    seconds: list[float] = field(default_factory=list)
    mfu: list[float | None] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str | None = None


def measure_all(variants: Sequence[Variant], bench: Bench, runs: int) -> dict[Variant, Measured]:
    """So often in turn; what failed once is left alone."""
    assert all(variant.warm_up <= MOST_WARM_UP for variant in variants)
    found = {variant: Measured() for variant in variants}
    for _ in range(runs):
        for variant, measured in found.items():
            if measured.failure is None:
                measure(variant, measured, bench)
                release(bench.device)
    return found


def measure(variant: Variant, measured: Measured, bench: Bench) -> None:
    """Build a variant, warm up, and add its steps to `measured`; one that fails costs the others nothing."""
    gpu = bench.device.type == "cuda"
    try:
        with plain_loop(bench, variant.live) if variant.loop == "plain" else qie_loop(variant, bench) as step:
            for _ in range(variant.warm_up):
                step()
            if gpu:  # models are made in float32: that peak is not a step's
                torch.cuda.reset_peak_memory_stats(bench.device)
            for _ in range(bench.steps):
                synchronize()
                started = time.perf_counter()
                mfu = step()
                synchronize()
                took = time.perf_counter() - started
                if variant.loop == "plain" and bench.peak:
                    mfu = bench.flops(False, plain=True).model / took / bench.peak
                measured.seconds.append(took)
                measured.mfu.append(mfu)
            if gpu:
                measured.peak_bytes = max(measured.peak_bytes, torch.cuda.max_memory_allocated(bench.device))
    except Exception as error:
        measured.failure = "out of memory"
        if not is_out_of_memory(error):
            measured.failure = f"failed: {' '.join(str(error).split())[:120]}"
            if not isinstance(error, QieError):
                traceback.print_exc()


def loop_of(variant: Variant, bench: Bench) -> AbstractContextManager[Callable[[], float | None]]:
    """Gives what takes a step."""
    return plain_loop(bench, variant.live) if variant.loop == "plain" else qie_loop(variant, bench)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is, or comes from, torch's error: qie explains it, the stream's thread and the compiler wrap it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def qie_loop(variant: Variant, bench: Bench) -> Iterator[Callable[[], float | None]]:
    """A run as qie-train makes one; gives what takes a step and tells its MFU."""
    config = Config.model_validate(
        {
            "model": {
                "pretrained_model_name_or_path": str(bench.model),
                "quantize": "fp8" if variant.fp8 else None,
                "attention_backend": variant.attention,
            },
            "data": {"caption_dropout_rate": 0.0},
            "train": {
                "gradient_checkpointing": variant.checkpointing,
                "compile": variant.compile,
                "output_dir": str(bench.folder / "run"),
            },
            "validation": {"rows": 0},
            "logging": {"peak_tflops": bench.peak and bench.peak / 1e12},
        }
    )
    encoder = bench.encoder() if variant.live else None
    stream = open_stream(bench.folder / "rows", encoder=encoder) if encoder else open_stream([bench.folder / "shards"])
    run = Run(config, open_pretrained(str(bench.model)), stream, bench.accelerator())
    try:
        yield lambda: run.training_step().mfu
    finally:
        run.batches.close()  # it holds a batch, and what encodes it
        run.finish()

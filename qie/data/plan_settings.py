"""The settings of a stream's plans, and which kind of plan they give."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from qie.data.plan import (
    PLAN_VERSION,
    Order,
    Plan,
    Tail,
    draw,
    drawn_of_shapes,
    no_batches,
    plan_epoch,
    variants_differ,
)
from qie.data.windows import WINDOWS_VERSION, WindowedPlan
from qie.errors import UsageError
from qie.shards.sample_table import Columns

AT_ONCE = 2**22
"""Samples of which a plan is made at once; of more it is made in windows."""


@dataclass(frozen=True)
class PlanSettings:
    """Everything except the samples that decides an epoch's batches.

    Attributes:
        global_batch_size: samples per batch over all processes.
        seed: decides every epoch's order.
        tail, order, block_size, similar_lengths: see `plan_epoch`.
        weights: how often an epoch draws each row of a source, by the source's name; once without.
        validation_rows: number of rows kept out, see `held_out`.
    """

    global_batch_size: int
    seed: int = 0
    tail: Tail = "pad"
    order: Order = "shuffle"
    block_size: int = 16
    similar_lengths: int = 64
    weights: Mapping[str, float] = field(default_factory=dict)
    validation_rows: int = 0

    def __post_init__(self) -> None:
        choices = {"tail": get_args(Tail), "order": get_args(Order)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"no such {name}", expected=" or ".join(allowed), found=getattr(self, name))
        for name, number in {"batch_size": self.global_batch_size, "block_size": self.block_size}.items():
            if number < 1:
                raise UsageError(f"{name} is too small", expected="at least 1", found=number)

    def plan(self, columns: Columns, epoch: int, leave_out: NDArray[np.int64]) -> Plan | WindowedPlan:
        """The batches of an epoch without some positions; see `plan_epoch` and, above `AT_ONCE`, `WindowedPlan`."""
        make = WindowedPlan if len(columns) > AT_ONCE else plan_epoch
        return make(
            columns,
            seed=self.seed,
            epoch=epoch,
            global_batch_size=self.global_batch_size,
            tail=self.tail,
            order=self.order,
            block_size=self.block_size,
            source_weights=self._weights(columns),
            leave_out=leave_out,
            similar_lengths=self.similar_lengths,
        )

    def count(self, columns: Columns, epochs: int, leave_out: NDArray[np.int64]) -> int:
        """How many batches the first `epochs` epochs have: counted, where planning them would take seconds each.

        By source weights, or where a row's variants have other shapes, one epoch may have more than another.

        Raises:
            UsageError: an epoch has none.
        """
        # Then every epoch draws as many samples of each shape, each time others or in another order.
        whole = all(weight == round(weight) for weight in self._weights(columns))
        if whole and not variants_differ(columns):
            return epochs and self._batches_of(columns, 0, leave_out) * epochs
        return sum(self._batches_of(columns, epoch, leave_out) for epoch in range(epochs))

    def _batches_of(self, columns: Columns, epoch: int, leave_out: NDArray[np.int64]) -> int:
        if len(columns) > AT_ONCE:
            return len(self.plan(columns, epoch, leave_out))
        weights = self._weights(columns)
        drawn, _ = draw(columns, self.seed, epoch, weights, leave_out, shuffled=self.order != "sequence")
        counts = drawn_of_shapes(columns, drawn)
        full, rest = np.divmod(counts, self.global_batch_size)
        batches = int(full.sum()) + (int(np.count_nonzero(rest)) if self.tail == "pad" else 0)
        if not batches:
            raise no_batches(columns, counts, self.global_batch_size)
        return batches

    def _weights(self, columns: Columns) -> list[float]:
        return [self.weights.get(name, 1.0) for name in columns.source_names]

    def identity(self, samples: int, ends: NDArray[np.int64] | None = None) -> dict[str, Any]:
        """The settings as a saved position of so many samples names them.

        Args:
            ends: of `Columns`, where they are known: the order of windows depends on how samples lie in shards.
        """
        windows = samples > AT_ONCE and self.order != "sequence"
        filled = None if ends is None else np.unique(ends[ends > 0])
        shards = {"shards": hashlib.sha256(filled.tobytes()).hexdigest()[:16]} if filled is not None and windows else {}
        found = {
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "tail": self.tail,
            "order": [self.order, self.block_size, self.similar_lengths],
            "weights": dict(self.weights),
            "validation_rows": self.validation_rows,
            "plan_version": WINDOWS_VERSION if windows else PLAN_VERSION,
        }
        return found | shards

"""The stream: the one iterable that training reads, whether its samples lie in shards or are encoded from rows."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from qie.data.plan import PLAN_VERSION, PlannedBatch, Tail, held_out, plan_epoch
from qie.data.sources import Source
from qie.errors import QieError, RowError, UsageError
from qie.recipe import Recipe, canonical_json
from qie.shards.index import Skipped
from qie.types import Batch, Row, Sample, Shape


class Samples(Protocol):
    """What a stream reads from: samples by position, their shapes and keys known beforehand."""

    @property
    def shapes(self) -> Sequence[Shape]: ...

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def recipe(self) -> Recipe: ...

    @property
    def skipped(self) -> Sequence[Skipped]:
        """Rows that are not among the samples, and why."""

    def load(self, position: int) -> Sample: ...


class RowEncoder(Protocol):
    """What turns rows into samples. `qie.encode.Encoder` is one; a stream is given it and never makes it."""

    @property
    def recipe(self) -> Recipe: ...

    def inspect(self, row: Row) -> tuple[str, Shape]:
        """Key and shape without encoding. Raises RowError when the row cannot be encoded."""

    def encode(self, row: Row) -> Sample:
        """The row's sample. Raises RowError when it has none."""

    def encode_together(self, rows: Sequence[Row]) -> list[Sample | RowError]:
        """Each row's sample, or why it has none."""


@dataclass(frozen=True)
class LiveSamples:
    """Rows of a source that are encoded each time they are asked for."""

    source: Source
    encoder: RowEncoder
    rows: tuple[int, ...]
    keys: tuple[str, ...]
    shapes: tuple[Shape, ...]
    skipped: tuple[Skipped, ...]

    @classmethod
    def scan(
        cls, source: Source, encoder: RowEncoder, progress: Callable[[int], object] = lambda done: None
    ) -> LiveSamples:
        """Read and decode every row once, in threads, so that unusable rows and all sizes are known before training."""
        rows, keys, shapes, skipped = [], [], [], []

        def inspect(index: int) -> tuple[str, Shape] | RowError:
            try:
                return encoder.inspect(source.read(index))
            except RowError as error:
                return error

        with ThreadPoolExecutor() as pool:
            for index, found in enumerate(pool.map(inspect, range(len(source)))):
                progress(index + 1)
                if isinstance(found, RowError):
                    skipped.append(Skipped(index, source.name(index), found.what))
                    continue
                rows.append(index)
                keys.append(found[0])
                shapes.append(found[1])
        return cls(source, encoder, tuple(rows), tuple(keys), tuple(shapes), tuple(skipped))

    @property
    def recipe(self) -> Recipe:
        return self.encoder.recipe

    def load(self, position: int) -> Sample:
        sample = self.encoder.encode(self.source.read(self.rows[position]))
        if sample.key != self.keys[position]:
            name = self.source.name(self.rows[position])
            raise QieError(
                "a row changed while it was trained on",
                where=name,
                hint="start again: keys and plan are of the old row",
            )
        return sample


@dataclass
class Stream:
    """Batches of `samples`, epoch after epoch, without end. Iterate it again to go on where it stands.

    Its whole state is (epoch, batches handed out in it). What is on its way in the background is not part of it.

    Attributes:
        samples: where they come from.
        batch_size: samples per batch of this process.
        seed: decides every epoch's order.
        tail: see `plan_epoch`.
        validation_rows: number of samples kept out, see `held_out`.
        rank, world_size: which slice of each global batch this process takes.
        prefetch: batches that are prepared ahead by a background thread.
    """

    samples: Samples
    batch_size: int
    seed: int = 0
    tail: Tail = "pad"
    validation_rows: int = 0
    rank: int = 0
    world_size: int = 1
    prefetch: int = 2
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.held_out = held_out(self.samples.keys, self.validation_rows)
        if len(self.held_out) == len(self.samples.keys):
            raise UsageError(
                "validation.rows leaves nothing to train on",
                expected=f"fewer than {len(set(self.samples.keys))} rows",
                found=self.validation_rows,
            )
        self.plan = self._plan()

    def __len__(self) -> int:
        """Batches of the current epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="qie-stream") as pool:
            ahead: deque[Future[Batch]] = deque()
            upcoming = self._iter_planned()
            try:
                while True:
                    while len(ahead) <= self.prefetch:
                        ahead.append(pool.submit(self.load, next(upcoming)))
                    batch = ahead.popleft().result()
                    self._advance()
                    yield batch
            finally:
                for future in ahead:
                    future.cancel()

    def load(self, planned: PlannedBatch) -> Batch:
        """The batch of a plan's entry."""
        return collate([self.samples.load(position) for position in planned.positions], planned)

    def validation_batches(self) -> list[PlannedBatch]:
        """The samples that are kept out, one per batch, in the order of their keys."""
        ordered = sorted(self.held_out, key=lambda position: (self.samples.keys[position], position))
        return [PlannedBatch((position,), (1.0,)) for position in ordered]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: two integers, and what they are only valid with."""
        return {"epoch": self.epoch, "position": self.position, "of": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with any number of processes of the same global batch size.

        Raises:
            UsageError: the state belongs to other samples, another seed or another batch size; names which.
        """
        mine, theirs = self._identity(), state["of"]
        differing = [name for name in mine if mine[name] != theirs.get(name)]
        if differing:
            raise UsageError(
                f"the saved position belongs to another stream: {', '.join(differing)} changed",
                expected={name: mine[name] for name in differing},
                found={name: theirs.get(name) for name in differing},
                hint="resume with the same data and settings, or start a new run from the saved weights",
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.plan = self._plan()

    def _iter_planned(self) -> Iterator[PlannedBatch]:
        """This process's batches from where the stream stands, without moving it."""
        epoch, start, plan = self.epoch, self.position, self.plan
        while True:
            yield from (batch.slice(self.rank, self.world_size) for batch in plan[start:])
            epoch, start = epoch + 1, 0
            plan = self._plan(epoch)

    def _advance(self) -> None:
        self.position += 1
        if self.position == len(self.plan):
            self.epoch, self.position = self.epoch + 1, 0
            self.plan = self._plan()

    def _plan(self, epoch: int | None = None) -> list[PlannedBatch]:
        return plan_epoch(
            self.samples.shapes,
            seed=self.seed,
            epoch=self.epoch if epoch is None else epoch,
            global_batch_size=self.batch_size * self.world_size,
            tail=self.tail,
            leave_out=self.held_out,
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": hashlib.sha256(canonical_json(list(self.samples.keys)).encode()).hexdigest()[:16],
            "seed": self.seed,
            "global_batch_size": self.batch_size * self.world_size,
            "tail": self.tail,
            "validation_rows": self.validation_rows,
            "plan_version": PLAN_VERSION,
        }


def collate(samples: Sequence[Sample], planned: PlannedBatch) -> Batch:
    """Samples of one shape as a batch."""
    prompt, prompt_mask = _pad([sample.prompt_embed for sample in samples])
    empty, empty_mask = _pad([sample.empty_prompt_embed for sample in samples])
    controls = zip(*(sample.control_latent for sample in samples), strict=True)
    return Batch(
        keys=tuple(sample.key for sample in samples),
        indices=planned.positions,
        weight=torch.tensor(planned.weights),
        pixel_latent=torch.stack([sample.pixel_latent for sample in samples]),
        control_latent=tuple(torch.stack(latents) for latents in controls),
        prompt_embed=prompt,
        prompt_embeds_mask=prompt_mask,
        empty_prompt_embed=empty,
        empty_prompt_embeds_mask=empty_mask,
        loss_mask=_loss_mask(samples),
    )


def _pad(embeds: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack [L_i, D] to [B, L, D] with zeros, and the mask of what is no padding; None when there is no padding."""
    lengths = torch.tensor([len(embed) for embed in embeds])
    longest = int(lengths.max())
    if int(lengths.min()) == longest:
        return torch.stack(embeds), None
    return torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True), torch.arange(longest) < lengths[:, None]


def _loss_mask(samples: Sequence[Sample]) -> torch.Tensor | None:
    if all(sample.loss_mask is None for sample in samples):
        return None
    height, width = samples[0].shape.target
    everything = torch.full((height, width), 255, dtype=torch.uint8)
    return torch.stack([everything if sample.loss_mask is None else sample.loss_mask for sample in samples])

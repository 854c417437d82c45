"""The stream: the one iterable that training reads, whether its samples lie in shards or are encoded from rows."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from qie.data.plan import PLAN_VERSION, PlannedBatch, Tail, held_out, other_versions, plan_epoch
from qie.data.samples import Samples
from qie.errors import UsageError
from qie.recipe import canonical_json
from qie.types import Batch, Sample


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
        rows, keys = self.samples.rows, self.samples.keys
        firsts = [position for position, row in enumerate(rows) if position == 0 or row != rows[position - 1]]
        chosen = {firsts[number] for number in held_out([keys[first] for first in firsts], self.validation_rows)}
        self._validation = sorted(chosen, key=lambda position: (keys[position], position))
        kept_out = {rows[position] for position in chosen}
        # A row of other content may have a version that equals one of them.
        seen = {key for key, row in zip(keys, rows, strict=True) if row in kept_out}
        self.held_out = frozenset(
            position for position, row in enumerate(rows) if row in kept_out or keys[position] in seen
        )
        if len(self.held_out) == len(keys):
            raise UsageError(
                "validation.rows leaves nothing to train on",
                expected=f"fewer than {len({keys[first] for first in firsts})} rows",
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
        """The rows that are kept out, each as it is (not its further versions), one per batch, by their keys."""
        return [PlannedBatch((position,), (1.0,)) for position in self._validation]

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
        epoch = self.epoch if epoch is None else epoch
        return plan_epoch(
            self.samples.shapes,
            seed=self.seed,
            epoch=epoch,
            global_batch_size=self.batch_size * self.world_size,
            tail=self.tail,
            leave_out=self.held_out | other_versions(self.samples.rows, seed=self.seed, epoch=epoch),
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

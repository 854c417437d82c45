"""Samples kept after their first use, in host memory or on a GPU: for datasets that fit, wholly or in part."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from qie.data.shared_tier import Gather, Part, Unshared, open_shared
from qie.quantities import human_bytes
from qie.shards.tensors import TENSORS, Kind
from qie.types import Sample

_FIELDS: dict[Kind, list[str]] = defaultdict(list)
for _tensor in TENSORS:
    _FIELDS[_tensor.kind].append(_tensor.field or _tensor.name)
_LARGE = {*_FIELDS["latent"], *_FIELDS["embedding"]}
_SMALL = [field.name for field in fields(Sample) if field.name not in _LARGE | set(_FIELDS["picture"])]


@dataclass(frozen=True)
class Keep:
    """Which tensors are kept, and where.

    Attributes:
        latents, embeds: the device; None for not at all.
        budget_bytes: of each device: host memory for all processes of a machine that share it, a GPU's for itself.
            Samples that come after it is spent are not kept.
    """

    latents: torch.device | None = None
    embeds: torch.device | None = None
    budget_bytes: int = 1 << 62


class Tier(Protocol):
    """Parts of samples by position."""

    @property
    def bytes(self) -> int:
        """Taken of its memory."""

    def get(self, position: int) -> Part | None:
        """The part of a sample; None where it is not kept."""

    def add(self, position: int, part: Part) -> Part | None:
        """Keep a part, and give it as it is kept; None if there is no room, or somebody else keeps it meanwhile."""


class DeviceTier:
    """Parts of samples on a device, for this process alone. Of a part, the large tensors count and move there."""

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self.bytes = 0
        self._device, self._budget_bytes = device, budget_bytes
        self._parts: dict[int, Part] = {}
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    def get(self, position: int) -> Part | None:
        return self._parts.get(position)

    def add(self, position: int, part: Part) -> Part | None:
        size = sum(_bytes(value) for name, value in part.items() if name in _LARGE)
        with self._lock:
            if position in self._taken or self.bytes + size > self._budget_bytes:
                return None
            self._taken.add(position)
            self.bytes += size
        host = torch.device("cpu")
        kept = {name: _copied(value, self._device if name in _LARGE else host) for name, value in part.items()}
        self._parts[position] = kept
        return kept


class KeptSamples:
    """The samples of a stream whose tensors are kept when they were first read, on each device in a tier of its own.

    Args:
        keep: what is kept.
        host: where the part for host memory is kept; by default for this process alone.
    """

    def __init__(self, keep: Keep, host: Tier | None = None) -> None:
        self.keep = keep
        self._tiers: list[tuple[Tier, list[str]]] = []
        for device in dict.fromkeys(filter(None, (keep.latents, keep.embeds))):
            names = _FIELDS["latent"] if keep.latents == device else []
            names = names + (_FIELDS["embedding"] if keep.embeds == device else [])
            shared = host if device.type == "cpu" else None
            self._tiers.append((shared or DeviceTier(device, keep.budget_bytes), names))
        self._all_large = sum(len(names) for _, names in self._tiers) == len(_LARGE)
        self._whole: dict[int, Sample] = {}

    @classmethod
    def of_machine(
        cls, keep: Keep, samples: int, gather: Gather, say: Callable[[str], object], *, first: bool
    ) -> KeptSamples:
        """Samples whose part for host memory is kept once for all processes of a machine. All call it together.

        Where they cannot share memory, each has its part of the budget.

        Args:
            keep: what is kept.
            samples: positions are below this.
            gather: exchanges values with all processes of the run.
            say: told when there is less memory than the budget, or none that can be shared.
            first: whether this process speaks for its machine.
        """
        if torch.device("cpu") not in (keep.latents, keep.embeds):
            return cls(keep)
        host: Any = open_shared(samples, keep.budget_bytes, gather, say)
        if isinstance(host, Unshared):
            each = keep.budget_bytes // host.processes
            if first:
                say(
                    f"the processes of this machine cannot share kept samples ({host.reason}): each keeps up to "
                    f"{human_bytes(each)} of cache.keep.budget_bytes for itself"
                )
            host = DeviceTier(torch.device("cpu"), each)
        return cls(keep, host)

    @property
    def bytes(self) -> int:
        """Kept on all devices; in host memory that is shared, by all processes."""
        return sum(tier.bytes for tier, _ in self._tiers)

    def fetch(self, position: int, read: Callable[[int], Sample]) -> Sample:
        """The sample as `read` gives it, byte for byte; `read` is not called again if all of the sample is kept."""
        whole = self._whole.get(position)
        if whole is not None:
            return whole
        parts = [tier.get(position) for tier, _ in self._tiers]
        if None not in parts and self._all_large:
            together = {name: value for part in parts if part for name, value in part.items()}
            return self._whole.setdefault(position, Sample(**together))  # nothing of it lies in a shard
        sample = read(position)
        changes: dict[str, Any] = {}
        for part, (tier, names) in zip(parts, self._tiers, strict=True):
            kept = part or tier.add(position, {name: getattr(sample, name) for name in [*_SMALL, *names]})
            changes |= {name: kept[name] for name in names} if kept else {}
        return replace(sample, **changes)

    def holds(self, position: int) -> bool:
        """Whether `fetch` would not read the sample."""
        if position in self._whole:
            return True
        return self._all_large and all(tier.get(position) is not None for tier, _ in self._tiers)


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(part, device) for part in value)
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _bytes(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_bytes, value))
    return 0 if value is None else int(value.nbytes)

"""Samples kept after their first use, in host memory or on a GPU: for datasets that fit, wholly or in part."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from qie.shards.tensors import TENSORS, Kind
from qie.types import Sample

_FIELDS: dict[Kind, list[str]] = defaultdict(list)
for _tensor in TENSORS:
    _FIELDS[_tensor.kind].append(_tensor.field or _tensor.name)


@dataclass(frozen=True)
class Keep:
    """Which tensors are kept, and where.

    Attributes:
        latents, embeds: the device; None for not at all.
        budget_bytes: the total. Samples that come after it is spent are not kept.
    """

    latents: torch.device | None = None
    embeds: torch.device | None = None
    budget_bytes: int = 1 << 62


class KeptSamples:
    """The samples of a stream whose tensors are kept when they were first read. `bytes` says how much that is."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.bytes = 0
        self._kept: dict[int, Sample | dict[str, Any]] = {}
        self._lock = threading.Lock()

    def fetch(self, position: int, read: Callable[[int], Sample]) -> Sample:
        """The sample as `read` gives it, byte for byte; `read` is not called again if all of the sample is kept."""
        kept = self._kept.get(position)
        if isinstance(kept, Sample):
            return kept
        sample = read(position)
        if kept is None:
            kept = self._moved(sample)
            with self._lock:
                size = sum(_bytes(value) for value in kept.values())
                if position in self._kept or self.bytes + size > self.keep.budget_bytes:
                    return sample
                self.bytes += size
                self._kept[position] = self._whole(sample, kept) or kept
        return replace(sample, **kept)

    def _moved(self, sample: Sample) -> dict[str, Any]:
        devices: dict[Kind, torch.device | None] = {"latent": self.keep.latents, "embedding": self.keep.embeds}
        return {
            name: _copied(getattr(sample, name), device)
            for kind, device in devices.items()
            if device is not None
            for name in _FIELDS[kind]
        }

    def _whole(self, sample: Sample, kept: dict[str, Any]) -> Sample | None:
        """The sample without anything that lies in a shard, if all large tensors are kept."""
        if len(kept) < len(_FIELDS["latent"]) + len(_FIELDS["embedding"]):
            return None
        masks = {name: mask.clone() for name in _FIELDS["mask"] if (mask := getattr(sample, name)) is not None}
        changes: dict[str, Any] = kept | masks | dict.fromkeys(_FIELDS["picture"])
        return replace(sample, **changes)


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(part, device) for part in value)
    return value.to(device, copy=True)


def _bytes(value: Any) -> int:
    return sum(map(_bytes, value)) if isinstance(value, tuple) else value.nbytes

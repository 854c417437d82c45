"""Statistics of latents, exact: FP16 has 65,536 values, so a count of each says all that there is to say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BINS = 60
WITHIN = 0.995
"""The histogram reaches so far that this part of the values is in it; how many are not is said beside it."""

_LIMITS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 50.0, 100.0, 1000.0, 10000.0, 65536.0)
_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
_FINITE = np.isfinite(_VALUES)


@dataclass(frozen=True)
class LatentStatistics:
    """Statistics of the targets' latents of some samples, as they are stored.

    Attributes:
        samples, values: how many.
        means, deviations: of each channel.
        limit: the histogram covers [-limit, limit].
        histogram: values in each of `BINS` bins of equal width.
        beyond: values outside of it.
    """

    samples: int
    values: int
    means: tuple[float, ...]
    deviations: tuple[float, ...]
    limit: float
    histogram: tuple[int, ...]
    beyond: int


class LatentCounts:
    """How often each FP16 value occurs in each channel, over all latents that were added."""

    def __init__(self) -> None:
        self._counts = np.zeros((0, 1 << 16), np.int64)
        self._samples = 0

    def add(self, latent: torch.Tensor) -> None:
        """Count a latent, [C, 1, H, W] FP16, all of it finite. One of another C than the first is another VAE's: it is
        left out."""
        bits = latent.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(len(latent), -1)
        if not self._samples:
            self._counts = np.zeros((len(latent), 1 << 16), np.int64)
        if len(latent) != len(self._counts):
            return
        for counts, channel in zip(self._counts, bits, strict=True):
            counts += np.bincount(channel, minlength=1 << 16)
        self._samples += 1

    def statistics(self) -> LatentStatistics | None:
        """The statistics of all latents; None without any."""
        if not self._samples:
            return None
        counts, values = self._counts[:, _FINITE], _VALUES[_FINITE]
        sizes = counts.sum(axis=1)
        means = counts @ values / sizes
        squares = [count @ (values - mean) ** 2 for count, mean in zip(counts, means, strict=True)]
        together = self._counts.sum(axis=0)
        limit = _limit(together)
        inside = np.abs(_VALUES) <= limit
        inside &= _FINITE
        histogram, _ = np.histogram(_VALUES[inside], BINS, (-limit, limit), weights=together[inside].astype(np.float64))
        return LatentStatistics(
            samples=self._samples,
            values=int(together.sum()),
            means=tuple(means.tolist()),
            deviations=tuple(np.sqrt(np.array(squares) / sizes).tolist()),
            limit=limit,
            histogram=tuple(map(int, histogram)),
            beyond=int(together[~inside].sum()),
        )


def _limit(counts: NDArray[np.int64]) -> float:
    """The smallest of `_LIMITS` that holds `WITHIN` of the values."""
    sizes = np.abs(_VALUES)
    return next(
        limit for limit in _LIMITS if counts[_FINITE & (sizes <= limit)].sum() >= WITHIN * counts[_FINITE].sum()
    )

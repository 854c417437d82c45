"""How a row's target lies on its control, measured on small pictures of what the VAE gets.

An edit should leave in place what it does not change. Where a dataset's targets are shifted by a few pixels or cropped
by a few per cent, as generated ones often are, a model learns to do that to every picture.

Each place of the picture (a tile) is searched for in the control by phase correlation (Kuglin and Hines, 1975), on
doubled angles of gradients, which colours, light and even a negative leave as they are. Places that an edit has
repainted answer at random, or not at all. If most of those that do answer agree on one shift and one scale, and few say
that nothing moved, then the picture has moved, whatever else the edit did; an object that moves alone is outvoted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from qie.encode.images import Size
from qie.types import Pair

LONG_PX, TILE_PX = 128, 32
"""Longer side of a small picture; side of a tile, of which every second half is one."""

MOVED = 0.008
"""Of the longer side, at the corner that moves farthest: 8 px of 1,024, one pixel of a latent."""

OTHER_PROPORTIONS = 0.03
"""More than rounding sides to multiples of 32 px does at 1024²."""

_REACH_PX = 11  # how far a tile is searched for: 9 % of the longer side
_LARGEST_ZOOM = 0.16
_CLEAR = 6.0  # a peak, in root mean squares of what surrounds it
_AGREE_PX = 1.0
_LEAST_TILES = 4
_AGREEING, _STILL = 0.5, 0.5  # least share of clear tiles that move together; most that do not move, in parts of it
_LOSSES = 4.0  # levels of 255
_ROUNDING = 2
_SHARPER = 1.45
_DETAIL_PX = 512
_LOWPASS = 0.18  # cycles per pixel: finer detail is what blur, noise and compression change

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Motion:
    """How the tiles of a small picture lie on another one.

    Attributes:
        still: share of clear tiles that did not move, and lie nearer to where they were than to what others agree on.
        agreement: share of clear tiles that move together, as follows.
        shift: of the centre, in sides of the picture (x, y).
        zoom: enlargement less 1.
        reach: how far the farthest corner moves, in longer sides.
    """

    still: float
    agreement: float
    shift: tuple[float, float]
    zoom: float
    reach: float

    @property
    def moved(self) -> bool:
        return self.agreement >= _AGREEING and self.still <= _STILL * self.agreement and self.reach >= MOVED


def compare_pair(target: Image.Image, controls: Sequence[Image.Image], proportions: Sequence[float]) -> Pair | None:
    """How a target lies on the control that it matches best; None without controls.

    Args:
        target, controls: as the VAE gets them, RGB.
        proportions: of each control, how much wider the target's file is for its height, as a factor.
    """
    if not controls:
        return None
    if len(controls) == 1 and abs(math.log(proportions[0])) > OTHER_PROPORTIONS:
        return Pair(control=1, proportions=round(proportions[0], 3))
    size = _small_size(target.size)
    small = _small(target, size)
    tiles = _Tiles.of(small)
    best: tuple[float, Pair] = (0.0, Pair(control=1 if len(controls) == 1 else None))
    for number, control in enumerate(controls, start=1):
        if control.size != target.size:
            control = control.resize(target.size, Image.Resampling.LANCZOS)
        other = _small(control, size)
        if _alike((small, other), target, control):
            return Pair(control=number, identical=True)
        motion = _motion(tiles, _Tiles.of(other), size)
        if motion is None:
            continue
        # A control on which the target lies as it should is the one that was edited.
        certainty = motion.agreement if motion.moved else 1 + motion.still
        if certainty > best[0] and (motion.moved or motion.still):
            best = certainty, _pair(number, motion, target.size)
    return best[1]


def _pair(number: int, motion: _Motion, size: Size) -> Pair:
    if not motion.moved:
        return Pair(control=number)
    x, y = (round(part * side) for part, side in zip(motion.shift, size, strict=True))
    return Pair(number, shift_px=(x, y), scale=round(1 + motion.zoom, 3), agreement=round(motion.agreement, 2))


def _small_size(size: Size) -> Size:
    scale = LONG_PX / max(size)
    return max(round(size[0] * scale), TILE_PX), max(round(size[1] * scale), TILE_PX)


def _small(image: Image.Image, size: Size) -> Floats:
    """[h, w, 3]."""
    return np.asarray(image.resize(size, Image.Resampling.BOX, reducing_gap=1.0), np.float32)


def _alike(small: tuple[Floats, Floats], target: Image.Image, control: Image.Image) -> bool:
    """Whether two pictures are the same but for losses of compression and of resizing, which stand at edges."""
    grey = small[1].mean(-1)
    edges = np.abs(np.diff(grey, axis=1, prepend=grey[:, :1])) + np.abs(np.diff(grey, axis=0, prepend=grey[:1]))
    differences = small[0] - small[1]
    brighter = differences.mean(-1)
    colour = np.abs(_halved(differences - brighter[..., None])).max(-1)  # of which files often keep half as much
    brighter = np.abs(brighter)
    if brighter.mean() > _LOSSES or (brighter > 3 * _LOSSES + edges).any():
        return False
    if colour.mean() > 0.5 * _LOSSES or (colour > 1.5 * _LOSSES + _halved(edges[..., None])[..., 0]).any():
        return False
    return _same_detail(target, control, same=bool(np.abs(differences).max() <= _ROUNDING))


def _halved(values: Floats) -> Floats:
    """[h, w, n] at half the size."""
    even = values[: len(values) // 2 * 2, : values.shape[1] // 2 * 2]
    return np.float32(0.25) * (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2])


def _same_detail(one: Image.Image, other: Image.Image, *, same: bool) -> bool:
    """Whether what small pictures do not show is the same: grain that was removed and a blurred picture are edits.

    Where there is no detail, compression changes as much as there is: then the small pictures have to be the `same`.
    """
    details = [_detail(image) for image in (one, other)]
    first, second, changed = (float(np.abs(image).mean()) for image in (*details, details[0] - details[1]))
    return (changed <= second or same) and first <= _SHARPER * second and second <= _SHARPER * first


def _detail(image: Image.Image) -> NDArray[np.int16]:
    """The Laplacian of its brightness; of a large picture at half its size, since losses are its finest detail."""
    step = max(round(math.sqrt(image.width * image.height) / _DETAIL_PX), 1)
    grey = np.asarray(image.convert("L").reduce(step)).astype(np.int16)
    return 4 * grey[1:-1, 1:-1] - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]


@dataclass(frozen=True, eq=False)
class _Tiles:
    """The tiles of a small picture.

    Attributes:
        spectra: [n, TILE_PX, TILE_PX].
        energies: [n] how much there is to see in each.
        centres: [n, 2] (x, y) from the middle of the picture, in pixels.
    """

    spectra: NDArray[np.complex64]
    energies: Floats
    centres: Floats

    @classmethod
    def of(cls, small: Floats) -> _Tiles:
        angles = _doubled_angles(small.mean(-1))
        height, width = angles.shape
        ys, xs = _starts(height), _starts(width)
        tiles = np.stack([angles[y : y + TILE_PX, x : x + TILE_PX].ravel() for y in ys for x in xs])
        tiles -= tiles.mean(1, keepdims=True)
        tiles *= _window().ravel()
        energies = np.square(tiles.view(np.float32)).sum(1)
        whole = torch.from_numpy(tiles).view(-1, TILE_PX, TILE_PX)
        spectra = torch.fft.fft2(whole).numpy()  # many times faster than numpy's
        half = TILE_PX / 2
        centres = [(x + half - width / 2, y + half - height / 2) for y in ys for x in xs]
        return cls(spectra, energies, np.array(centres, np.float32))


def _starts(side: int) -> NDArray[np.int64]:
    count = round((side - TILE_PX) / (TILE_PX / 2)) + 1
    return np.linspace(0, side - TILE_PX, count).round().astype(np.int64)


def _doubled_angles(grey: Floats) -> NDArray[np.complex64]:
    """Gradients as complex numbers of twice their angle: those of light on dark and of dark on light are equal."""
    gradient = np.zeros(grey.shape, np.complex64)
    gradient.real[:, 1:-1] = grey[:, 2:] - grey[:, :-2]
    gradient.imag[1:-1] = grey[2:] - grey[:-2]
    size = np.abs(gradient)
    gradient *= gradient
    gradient /= size * np.sqrt(size) + np.float32(1)
    return gradient


@cache
def _window() -> Floats:
    line = np.hanning(TILE_PX + 2)[1:-1]
    return np.outer(line, line).astype(np.float32)


@cache
def _lowpass() -> Floats:
    line = np.exp(-(np.fft.fftfreq(TILE_PX) ** 2) / (2 * _LOWPASS**2))
    return np.outer(line, line).astype(np.float32)


def _motion(target: _Tiles, control: _Tiles, size: Size) -> _Motion | None:
    """None where too few places of the pictures can be told."""
    offsets, clearness = _offsets(target, control)
    seen = [one.energies > 0.01 * one.energies.max() for one in (target, control)]
    clear = seen[0] & seen[1] & (clearness > _CLEAR)
    if clear.sum() < _LEAST_TILES:
        return None
    offsets, centres = offsets[clear], target.centres[clear]
    shift, zoom, together = _consensus(offsets, centres)
    if together.sum() < _LEAST_TILES:
        return None
    half = np.array(size, np.float32) / 2
    unmoved = np.abs(offsets).max(1) < np.abs(offsets - shift - zoom * centres).max(1)
    return _Motion(
        still=float((unmoved & (np.abs(offsets).max(1) < _AGREE_PX)).mean()),
        agreement=float(together.mean()),
        shift=(float(shift[0] / size[0]), float(shift[1] / size[1])),
        zoom=zoom,
        reach=float((np.abs(shift) + abs(zoom) * half).max() / LONG_PX),
    )


def _offsets(target: _Tiles, control: _Tiles) -> tuple[Floats, Floats]:
    """[n, 2] how far (x, y) each tile of the target lies from where it is in the control; and [n] how clearly."""
    cross = target.spectra * control.spectra.conj()
    power = np.abs(cross)
    power += 1e-3 * power.mean((1, 2), keepdims=True) + np.float32(1e-9)
    cross *= _lowpass() / power
    surface = np.fft.fftshift(torch.fft.ifft2(torch.from_numpy(cross)).numpy().real, axes=(1, 2))
    middle, tiles = TILE_PX // 2, np.arange(len(surface))
    near = slice(middle - _REACH_PX, middle + _REACH_PX + 1)
    places = surface[:, near, near].reshape(len(surface), -1).argmax(1)
    y, x = (place + middle - _REACH_PX for place in np.divmod(places, 2 * _REACH_PX + 1))
    peaks = surface[tiles, y, x]
    beside_x = _between(surface[tiles, y, x - 1], peaks, surface[tiles, y, x + 1])
    beside_y = _between(surface[tiles, y - 1, x], peaks, surface[tiles, y + 1, x])
    offsets = np.stack([x - middle + beside_x, y - middle + beside_y], axis=1).astype(np.float32)
    return offsets, peaks / (np.sqrt(np.square(surface).mean((1, 2))) + np.float32(1e-12))


def _between(left: Floats, peak: Floats, right: Floats) -> Floats:
    """Where the parabola through three neighbours has its peak."""
    curve = left - 2 * peak + right
    return np.where(curve < 0, np.clip((left - right) / np.where(curve < 0, 2 * curve, 1), -0.5, 0.5), 0)


def _consensus(offsets: Floats, centres: Floats) -> tuple[Floats, float, NDArray[np.bool_]]:
    """The shift and zoom on which most tiles agree, and which tiles do: each pair of tiles is asked, and each tile."""
    first, second = np.triu_indices(len(offsets), 1)
    apart = centres[first] - centres[second]
    square = np.square(apart).sum(1)
    zooms = (apart * (offsets[first] - offsets[second])).sum(1) / square
    told = (np.abs(zooms) < _LARGEST_ZOOM) & (square > (0.9 * TILE_PX) ** 2)
    zooms = np.concatenate([zooms[told], np.zeros(len(offsets), np.float32)])
    asked = np.concatenate([first[told], np.arange(len(offsets))])
    shifts = offsets[asked] - zooms[:, None] * centres[asked]
    left = [np.abs(offsets[:, k] - shifts[:, k, None] - zooms[:, None] * centres[:, k]) for k in (0, 1)]
    votes = np.maximum(*left) < _AGREE_PX
    together = votes[votes.sum(1).argmax()]
    shift, zoom = _fitted(offsets[together], centres[together])
    again = np.abs(offsets - shift - zoom * centres).max(1) < _AGREE_PX
    return (*_fitted(offsets[again], centres[again]), again) if again.sum() > 1 else (shift, zoom, together)


def _fitted(offsets: Floats, centres: Floats) -> tuple[Floats, float]:
    """The shift and the zoom of least squares."""
    middle, mean = centres.mean(0), offsets.mean(0)
    spread = float(np.square(centres - middle).sum())
    zoom = float(((centres - middle) * (offsets - mean)).sum()) / spread if spread else 0.0
    return mean - zoom * middle, zoom

"""A sample's small pictures, for people: controls, target and mask side by side in one JPEG, beside its record.

One member holds them all, so every sample of a tar has the same members, as loaders of WebDataset tars want it. Its
comment says which picture stands where.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qie.errors import ShardError

if TYPE_CHECKING:
    from PIL import Image

QUALITY = 85
STEP_PX = 8
"""Each picture begins at a multiple of it. A JPEG's blocks are as large, so none holds parts of two pictures."""
MOST_PX = 512
"""Longest side of a picture."""
MOST_PIXELS = 1 << 24
"""Of the whole JPEG: what says more is not decoded."""

Spot = tuple[str, int, int, int]
"""A picture's name, x, width and height."""


@dataclass(frozen=True, eq=False)
class SmallPictures:
    """The pictures of a sample, each as the VAE saw it, made small.

    Attributes:
        target: RGB.
        controls: RGB, in order. None where the shard has a picture of the target alone.
        mask: grey, as large as the target, white where the loss counts; None without a mask.
        rejected: RGB, the rejected target; None without one.
    """

    target: Image.Image
    controls: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    rejected: Image.Image | None = None


def encode_pictures(pictures: SmallPictures) -> bytes:
    """The JPEG: equal pictures give equal bytes with one release of the JPEG library."""
    import numpy as np
    from PIL import Image

    named = [("control", one) for one in pictures.controls] + [("target", pictures.target)]
    for name, picture in (("rejected", pictures.rejected), ("mask", pictures.mask)):
        named += [(name, picture)] if picture is not None else []
    height = max(one.height for _, one in named)
    places, parts, at = [], [], 0
    for name, one in named:
        places.append([name, at, one.width, one.height])
        # The edge goes on to the end of the last block: anything else would shine through.
        room = (0, height - one.height), (0, -one.width % STEP_PX), (0, 0)
        parts.append(np.pad(np.asarray(one.convert("RGB")), room, mode="edge"))
        at += parts[-1].shape[1]
    content = io.BytesIO()
    comment = json.dumps({"qie": places}, separators=(",", ":")).encode()
    whole = Image.fromarray(np.concatenate(parts, axis=1))
    whole.save(content, "JPEG", quality=QUALITY, subsampling=0, optimize=True, comment=comment)
    return content.getvalue()


def decode_pictures(jpeg: bytes, where: object) -> SmallPictures:
    """The pictures in a JPEG.

    Raises:
        ShardError: it is none that `encode_pictures` writes.
    """
    with _opened(jpeg, where) as (opened, places):
        whole = opened.convert("RGB")
    parts = [(name, whole.crop((x, 0, x + width, height))) for name, x, width, height in places]
    (target,) = (one for name, one in parts if name == "target")
    mask = next((one.convert("L") for name, one in parts if name == "mask"), None)
    rejected = next((one for name, one in parts if name == "rejected"), None)
    return SmallPictures(target, tuple(one for name, one in parts if name == "control"), mask, rejected)


def spots_of(jpeg: bytes, where: object) -> tuple[tuple[int, int], Sequence[Spot]]:
    """Width and height of a JPEG, and which picture stands where in it, without decoding it. Raises the same."""
    with _opened(jpeg, where) as (opened, places):
        return opened.size, places


@contextmanager
def _opened(jpeg: bytes, where: object) -> Iterator[tuple[Image.Image, Sequence[Spot]]]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(f"{opened.width}x{opened.height} pixels")
            yield opened, _places(json.loads(opened.info["comment"])["qie"], opened.size)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise ShardError("the pictures of a sample cannot be read", where=where, found=error) from error


def _places(places: Any, size: tuple[int, int]) -> Sequence[Spot]:
    """Which picture stands where: name, x, width, height. Raises ValueError for what leads outside of `size`."""
    found = [(str(name), int(x), int(width), int(height)) for name, x, width, height in places]
    names = [name for name, *_ in found]
    ends = [["target", *more] for more in ([], ["mask"], ["rejected"], ["rejected", "mask"])]
    if names not in [["control"] * (len(names) - len(end)) + end for end in ends]:
        raise ValueError(f"pictures of {names}")
    for name, x, width, height in found:
        if not (0 < width <= MOST_PX and 0 < height <= MOST_PX and 0 <= x <= size[0] - width and height <= size[1]):
            raise ValueError(f"{name} lies outside: {[x, width, height]}")
    return found

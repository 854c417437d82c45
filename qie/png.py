"""The bytes of a picture that is in memory: a PNG without compression, the same on every machine.

What compresses is another library here and there, of other releases, and gives other bytes: a row's key is their hash.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qie.errors import RowError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    ImageLike = bytes | str | os.PathLike[str] | Image.Image | NDArray[Any]
    """An image as Python has it: the bytes of a file, its path, a PIL image or an array."""

_GREY, _RGB, _GREY_ALPHA, _RGBA = 0, 2, 4, 6  # PNG's colour types
_BLOCK_BYTES = 0xFFFF  # the most that a stored block of deflate holds


def file_bytes(image: ImageLike, what: str) -> bytes:
    """The bytes of an image's file: of a path, those of the file; of pixels in memory, a PNG.

    Args:
        image: bytes, path, PIL image or array, see `qie.Row.of`.
        what: which image of the row this is, for messages.

    Raises:
        RowError: the file cannot be read, or the pixels are of a kind that no PNG of 8 bits holds without loss.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, os.PathLike)):
        return _read(os.fspath(image), what)
    import numpy as np
    from PIL import Image

    if isinstance(image, Image.Image):
        return _of_image(image, what)
    if isinstance(image, np.ndarray):
        return _of_array(image, what)
    raise RowError(
        f"{what} is no image",
        expected="the bytes of a file, a path, a PIL image or a NumPy array",
        found=f"{type(image).__module__}.{type(image).__qualname__}",
        hint="of a tensor of [C, H, W] in [0, 1]: (tensor * 255).round().byte().permute(1, 2, 0).numpy()"
        if type(image).__name__ == "Tensor"
        else None,
    )


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise RowError(
            f"{what} cannot be read",
            where=path,
            found=getattr(error, "strerror", None) or error,
            hint="fetch the file of a URL first; qie.open_source reads rows from stores" if "://" in path else None,
        ) from error


def _of_image(image: Image.Image, what: str) -> bytes:
    """As a viewer shows it: upright by its EXIF orientation, with its colour profile."""
    import numpy as np
    from PIL import ImageOps

    try:
        image.load()
    except Exception as error:  # Pillow's decoders raise whatever they meet
        raise RowError(
            f"{what} is damaged, or its file was closed: {error}", hint="give the path of its file"
        ) from error
    with suppress(SyntaxError, ValueError, TypeError, KeyError, struct.error):  # of an EXIF that is unreadable
        image = ImageOps.exif_transpose(image)
    seen_through = "transparency" in image.info or image.mode == "PA"
    if image.mode == "1":
        image = image.convert("L")
    elif image.mode == "L":
        image = image.convert("LA" if seen_through else "L")
    elif image.mode in ("P", "PA", "RGB"):
        image = image.convert("RGBA" if seen_through else "RGB")
    if image.mode not in ("L", "LA", "RGB", "RGBA"):
        raise RowError(
            f"{what} is of a mode that a PNG of 8 bits does not hold",
            expected="a PIL image of mode 1, L, LA, P, RGB or RGBA",
            found=image.mode,
            hint='convert it, as by image.convert("RGB"), or give the path of its file',
        )
    pixels = np.asarray(image)
    return _png(pixels.reshape(*pixels.shape[:2], -1), image.info.get("icc_profile"))


def _of_array(pixels: NDArray[Any], what: str) -> bytes:
    shown = pixels.astype("uint8") * 255 if pixels.dtype == bool else pixels
    shown = shown[..., None] if shown.ndim == 2 else shown
    if shown.dtype != "uint8" or shown.ndim != 3 or shown.shape[2] not in (1, 2, 3, 4) or 0 in shown.shape:
        hint = (
            "array.transpose(1, 2, 0) puts channels last" if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4) else None
        )
        if pixels.dtype.kind == "f":
            hint = 'of values in [0, 1]: (array * 255).round().astype("uint8")'
        raise RowError(
            f"{what} is an array of another kind",
            expected="uint8 or bool of shape [H, W] or [H, W, channels], with 1 to 4 of them",
            found=f"{pixels.dtype} of shape {list(pixels.shape)}",
            hint=hint,
        )
    return _png(shown)


def _png(pixels: NDArray[np.uint8], profile: bytes | None = None) -> bytes:
    """A PNG of [H, W, channels] pixels, by the W3C's recommendation; before each line a 0: it is not filtered."""
    import numpy as np

    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    kind = (_GREY, _GREY_ALPHA, _RGB, _RGBA)[channels - 1]
    parts = [_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))]
    if profile:
        parts.append(_chunk(b"iCCP", b"profile\0\0" + _stored(profile)))
    return b"".join([b"\x89PNG\r\n\x1a\n", *parts, _chunk(b"IDAT", _stored(lines.tobytes())), _chunk(b"IEND", b"")])


def _chunk(name: bytes, content: bytes) -> bytes:
    return b"".join(
        [struct.pack(">I", len(content)), name, content, struct.pack(">I", zlib.crc32(content, zlib.crc32(name)))]
    )


def _stored(content: bytes) -> bytes:
    """A zlib stream of stored blocks, RFC 1950 and RFC 1951."""
    return b"".join([b"\x78\x01", *_blocks(content), struct.pack(">I", zlib.adler32(content))])


def _blocks(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), _BLOCK_BYTES):
        block = content[start : start + _BLOCK_BYTES]
        last = start + _BLOCK_BYTES >= len(content)
        yield struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF)
        yield block

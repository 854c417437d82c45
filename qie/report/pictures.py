"""Small pictures that are part of the page itself."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import torch
from PIL import Image

PICTURE_PX = 192
"""Longest side; larger ones are made smaller, so that a hundred fit into a page."""

_QUALITY = 88


@dataclass(frozen=True)
class Picture:
    """A JPEG and its size in pixels."""

    width: int
    height: int
    jpeg: bytes

    @classmethod
    def of(cls, image: Image.Image) -> Picture:
        """An image, at most `PICTURE_PX` large."""
        small = image.convert("RGB")
        small.thumbnail((PICTURE_PX, PICTURE_PX), Image.Resampling.LANCZOS)
        content = io.BytesIO()
        small.save(content, "JPEG", quality=_QUALITY, subsampling=0, optimize=True)
        return cls(small.width, small.height, content.getvalue())

    @classmethod
    def of_thumbnail(cls, thumbnail: torch.Tensor) -> Picture:
        """A sample's thumbnail, [h, w, 3] uint8."""
        return cls.of(Image.fromarray(thumbnail.numpy()))

    @property
    def uri(self) -> str:
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode()}"

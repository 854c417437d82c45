"""The image formats that qie reads, and the endings of their files. Pillow knows more, and starts programs for some."""

from __future__ import annotations

IMAGE_FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
}
"""Pillow's name of each format, and how the names of its files end."""

IMAGE_SUFFIXES = tuple(suffix for suffixes in IMAGE_FORMATS.values() for suffix in suffixes)

"""Encoding: rows become samples. The only part of qie that loads the VAE and Qwen2.5-VL."""

from qie.encode.encoder import Encoder

__all__ = ["Encoder"]

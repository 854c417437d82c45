"""Encoding: rows become samples. The only part of qie that loads the VAE and Qwen2.5-VL."""

from qie.encode.encoder import Encoder
from qie.encode.options import EncoderOptions

__all__ = ["Encoder", "EncoderOptions"]

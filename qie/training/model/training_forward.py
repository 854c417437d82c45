"""The forward pass of a training step: what diffusers' transformer computes, in fewer operations, which fuse.

Nothing of it changes the result but for rounding:

- Rotary embeddings are real, and the adapters of layers that share an input share a product.
- Nothing is padded in the attention, and only short pieces of text have a mask.
- The last block computes nothing that the prediction of the target does not depend on.
"""

from __future__ import annotations

from typing import Any

from diffusers import QwenImageTransformer2DModel

from qie.training.model.dual_stream import use_dual_stream
from qie.training.model.single_stream import use_single_stream


def use_training_forward(transformer: Any) -> None:
    """Give a transformer a second forward pass, for `predict_target`; other calls of it stay diffusers' own.

    Modules, parameters and their names stay as they are. To be called once, before blocks are compiled. Adapters may
    be added, switched and scaled at any time.
    """
    use = use_dual_stream if isinstance(transformer, QwenImageTransformer2DModel) else use_single_stream
    use(transformer)

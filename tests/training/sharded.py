"""qie-train with FSDP2 on CPUs. accelerate shards over GPUs alone; beneath it, torch does over gloo, too."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from qie.cli.train import main
from qie.training.model.trainable import TrainableModel

_init, _prepare = AcceleratorState.__init__, TrainableModel.prepare


def init(self: AcceleratorState, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
    """What accelerate's own does for several GPUs."""
    _init(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
    if fsdp_plugin is not None:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin


def prepare(self: TrainableModel, *arguments: Any) -> Any:
    """A test of sharding is to fail where nothing is sharded."""
    prepared = _prepare(self, *arguments)
    assert self.sharded and type(self.model).__name__ == "FSDPQwenImageTransformer2DModel"
    return prepared


if __name__ == "__main__":
    AcceleratorState.__init__ = init
    TrainableModel.prepare = prepare
    main()

"""A GPU that is not there: fake CUDA tensors, which have a shape, a dtype and a device, and no values.

torch refuses an operation on tensors of two devices, real or fake. `FakeGpu` notes for what else the host would wait: a
value that it reads, and a copy that is not from or to page-locked memory.

Without gradients only: those need more than a build of torch for CPUs has.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

GPU = torch.device("cuda:0")
READS = {"__int__": int, "__index__": int, "__bool__": bool, "__float__": float, "item": lambda value: value}


class FakeGpu(TorchDispatchMode):
    """What operations there were, and for which the host waits. Tensors of the host stay real.

    Attributes:
        calls: how often each operation ran on the GPU.
        waits: those for which the host waits, in order, each with the function of qie that asked for it.
        to_host: bytes and dtype of each copy from the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.waits: list[str] = []
        self.to_host: list[tuple[int, torch.dtype]] = []
        self._pinned = WeakTensorKeyDictionary()

    def forget(self) -> None:
        """What happened so far."""
        self.calls.clear()
        self.waits.clear()
        self.to_host.clear()

    def moved(self, module: torch.nn.Module) -> torch.nn.Module:
        """A module of device meta, on the GPU."""
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, value in tensors.items():
                    if value is not None:
                        fake = torch.empty(value.shape, dtype=value.dtype, device=GPU)
                        tensors[name] = fake if tensors is part._buffers else torch.nn.Parameter(fake, False)
        return module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        pinned = kwargs.pop("pin_memory", False)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if GPU.type not in {torch.device(kwargs.get("device") or "cpu").type, *(one.device.type for one in tensors)}:
            if any(isinstance(one, FakeTensor) for one in tensors):
                return func(*args, **kwargs)
            with unset_fake_temporarily():
                found = func(*args, **kwargs)
            if pinned:
                self._pinned[found] = True
            return found
        self.calls[name] += 1
        if name == "_local_scalar_dense":
            self.wait("reads a value")
            return 0.0 if args[0].dtype.is_floating_point else 0
        if name in ("nonzero", "masked_select"):
            self.wait(name)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                found = args[0].zero_()  # of the host, and real
        elif name == "rms_norm":  # written in Python, for which there is a guard again
            found = torch.empty_like(args[0])
        else:
            found = func(*args, **kwargs)
        if name == "_to_copy":
            self._copied(args[0], found, args[0], kwargs.get("non_blocking", False))
        if name == "copy_":
            self._copied(args[1], found, args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return found

    def _copied(self, source: torch.Tensor, target: torch.Tensor, host: torch.Tensor, non_blocking: bool) -> None:
        if source.device == target.device or not source.numel():
            return
        if target.device.type == "cpu":
            self.to_host.append((target.nbytes, target.dtype))
        if not (non_blocking and host in self._pinned and source.dtype == target.dtype):
            self.wait(f"copies to {target.device.type}")

    def wait(self, what: str) -> None:
        """Note that the host waits, and for whom."""
        frame: Any = sys._getframe()
        while frame and not str(frame.f_globals.get("__name__")).startswith("qie."):
            frame = frame.f_back
        self.waits.append(f"{frame.f_code.co_name if frame else 'outside of qie'} {what}")


class _WithoutGuard(TorchFunctionMode):
    """Operations that torch begins with choosing the GPU, which a build for CPUs cannot: without that beginning."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.Tensor.to:
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args[1:], **kwargs)
            device, dtype = device or args[0].device, dtype or args[0].dtype
            if (device.type, dtype) == (args[0].device.type, args[0].dtype):
                return args[0]
            more = {} if layout is None else {"memory_format": layout}
            return torch.ops.aten._to_copy(args[0], device=device, dtype=dtype, non_blocking=non_blocking, **more)
        if name in READS and args[0].device.type == "cuda":
            value = torch.ops.aten._local_scalar_dense(args[0])
            return READS[name](value)
        if func is torch.Tensor.__deepcopy__ and args[0].device.type == "cuda":
            return args[0].clone()
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            made = torch.empty_like(torch.tensor(*args, **{**kwargs, "device": "cpu"}), device=GPU)
            if made.numel():
                self._gpu.wait("copies to cuda")
            return made
        if func is torch.Tensor.contiguous and args[0].device.type == "cuda":
            layout = kwargs.get("memory_format", torch.contiguous_format)
            return args[0] if args[0].is_contiguous(memory_format=layout) else args[0].clone(memory_format=layout)
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _indexed(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if func is torch.Tensor.__setitem__ and args[0].device.type == "cuda":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in index):
                self._gpu.wait("counts what a mask selects")
            return None
        return func(*args, **kwargs)


def _indexed(value: torch.Tensor, parts: tuple[Any, ...]) -> torch.Tensor:
    """`value[parts]`."""
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dim, indices = 0, [None] * value.dim()
    for part in parts:
        if part is Ellipsis:
            dim += value.dim() - taken
        elif part is None:
            value = value.unsqueeze(dim)
            indices.insert(dim, None)
            dim += 1
        elif isinstance(part, int):
            value = value.select(dim, part)
            indices.pop(dim)
            taken -= 1
        else:
            if isinstance(part, torch.Tensor):
                indices[dim] = part
            elif part != slice(None):
                value = torch.ops.aten.slice(value, dim, part.start, part.stop, part.step or 1)
            dim, taken = dim + 1, taken
    return value if all(index is None for index in indices) else torch.ops.aten.index(value, indices)


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """In this context, what is on the GPU is fake."""
    gpu = FakeGpu()

    def tolist(tensor: torch.Tensor) -> Any:
        gpu.wait("reads a value")
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()

    with (
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch("transformers.masking_utils.is_tracing", lambda _: False),
        FakeTensorMode(allow_non_fake_inputs=True),
        gpu,
        _WithoutGuard(gpu),
    ):
        yield gpu

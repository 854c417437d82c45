"""How the transformer's blocks run: activations recomputed or kept, weights offloaded to host memory, compiled."""

from __future__ import annotations

import math
import mmap
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qie.errors import ConfigError, QieError
from qie.training.model.adapted_linear import trace_doras
from qie.training.model.sharding import keep_from_ddp


def offloaded_blocks(blocks: int, offload_blocks: int) -> list[int]:
    """The numbers of the offloaded ones among `blocks` blocks: `offload_blocks` of them, spread evenly.

    Raises:
        ConfigError: there are fewer.
    """
    if offload_blocks > blocks:
        raise ConfigError(
            "the transformer has fewer blocks",
            where="train.offload_blocks",
            expected=f"at most {blocks}",
            found=offload_blocks,
        )
    return [number * blocks // offload_blocks for number in range(offload_blocks)]


@dataclass(frozen=True)
class KeptActivations:
    """What is kept in spite of activation checkpointing, where there is memory for it.

    It is always that of the last blocks, whose backward pass comes first: what they keep is freed before much else is
    recomputed.

    Attributes:
        blocks: so many blocks keep all activations; offloaded ones cannot.
        attention: so many of the others keep what attention gave them: of a block's values those that cost most to
            compute for each byte.
    """

    blocks: int = 0
    attention: int = 0


NOTHING_KEPT = KeptActivations()


def checkpointed_blocks(
    blocks: int, gradient_checkpointing: int, offload_blocks: int = 0, kept_blocks: int = 0
) -> list[int]:
    """The numbers of the checkpointed ones among `blocks` blocks: each n-th (0: none) but for the last `kept_blocks` of
    these, and the offloaded ones."""
    offloaded = offloaded_blocks(blocks, offload_blocks)
    chosen = set(range(0, blocks, gradient_checkpointing)) if gradient_checkpointing else set()
    others = sorted(chosen - set(offloaded))
    return sorted([*others[: max(len(others) - kept_blocks, 0)], *offloaded])


def blocks_keeping_attention(checkpointed: Sequence[int], attention: int, never: Collection[int] = ()) -> list[int]:
    """The numbers of the blocks that keep attention's outputs: the last ones that are not in `never`."""
    able = [number for number in checkpointed if number not in never]
    return able[max(len(able) - attention, 0) :]


def checkpoint_activations(
    transformer: QwenImageTransformer2DModel,
    gradient_checkpointing: int,
    offload_blocks: int = 0,
    device: torch.device | None = None,
    *,
    kept: KeptActivations = NOTHING_KEPT,
    compiled: bool = False,
) -> None:
    """Recompute the activations of some blocks in the backward pass instead of keeping them; offload weights.

    Numbers do not change by a bit. Those of offloaded blocks on a CPU may change in the last bits, since copies lie at
    other addresses. To be called once, after adapters were added and before the model is spread over processes. Which
    parameters are trained must not change later.

    Args:
        transformer: on any device. The offloaded weights leave it; the caller moves the rest to `device`.
        gradient_checkpointing: n checkpoints each n-th block; 0 only the offloaded ones.
        offload_blocks: this many blocks keep their frozen weight matrices in host memory, page-locked if `device` is a
            GPU, and have them on the device only while they are computed. Trained weights and vectors stay resident.
        device: the model computes there; None: it computes where it is.
        kept: what is kept in spite of that.
        compiled: `compile_blocks` will follow. Offloaded blocks then keep no attention outputs: see
            `_checkpoint_forward`.

    Raises:
        ConfigError: the transformer has fewer blocks, or their weights cannot be offloaded.
    """
    blocks = list(transformer.transformer_blocks)
    offloaded = offloaded_blocks(len(blocks), offload_blocks)
    checkpointed = checkpointed_blocks(len(blocks), gradient_checkpointing, offload_blocks, kept.blocks)
    keeping = blocks_keeping_attention(checkpointed, kept.attention, offloaded if compiled else ())
    if offloaded:
        _offload(transformer, [blocks[number] for number in offloaded], device or transformer.device)
    inside = [number for number in keeping if number not in offloaded]
    for number in inside:
        _checkpoint_forward(blocks[number])
    around = {blocks[number]: number in keeping for number in checkpointed if number not in inside}

    def run(block: nn.Module, *inputs: Any) -> Any:
        if block not in around:
            return block(*inputs)
        keep: dict[str, Any] = {"context_fn": _kept} if around[block] else {}
        return checkpoint(block, *inputs, use_reentrant=False, **keep)

    if checkpointed:
        # It also has diffusers pass a block its inputs by place: torch finds their device, and its state, only there.
        transformer.enable_gradient_checkpointing(gradient_checkpointing_func=run)


def _checkpoint_forward(block: nn.Module) -> None:
    """Recompute a block but for its attention, within its `forward`, so that torch.compile compiles that, too: from
    outside, nobody sees which operations a compiled block consists of.

    An offloaded block cannot do this: compiled, it would hold its weights from the forward pass to the backward pass.
    """
    forward = block.forward

    def checkpointed(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        contexts = _kept_when_compiled if torch.compiler.is_compiling() else _kept
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

    block.forward = checkpointed


class _AroundAttention(TorchFunctionMode):
    """Enters a mode of torch for the call of attention alone: it stops at each operation, which takes the host four
    times as long around a whole block."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _entered(self._mode) if _is_attention(function) else nullcontext():
            return function(*args, **(kwargs or {}))


@contextmanager
def _entered(mode: TorchDispatchMode) -> Iterator[None]:
    """Not by the mode's own `__enter__`, which forgets the calls that it has counted: a block may have several, one for
    each sample of a batch."""
    TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@cache
def _is_attention(function: object) -> bool:
    """By its name: each of torch's kernels, fused or varlen, is one operation. `math` is several, and none of them."""
    name = str(function)
    return re.search("attention|attn", name) is not None and "backward" not in name


def _keep_attention(_: object, operation: object, *__: object, **___: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(operation) else CheckpointPolicy.PREFER_RECOMPUTE


_kept_when_compiled = partial(create_selective_checkpoint_contexts, _keep_attention)


def _kept() -> tuple[_AroundAttention, _AroundAttention]:
    """The contexts of a forward pass that keeps attention's outputs, and of its recomputation."""
    keep, restore = _kept_when_compiled()
    return _AroundAttention(keep), _AroundAttention(restore)


def compile_blocks(transformer: QwenImageTransformer2DModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Run each block through torch.compile. To be called after adapters were added.

    A block's `forward` is compiled, not its call as `compile_repeated_blocks` of diffusers does: hooks on the call,
    such as those that fetch offloaded weights or those of FSDP, stay outside. Sizes are dynamic from the start: text
    lengths differ from batch to batch.
    """
    trace_doras(transformer)
    for block in transformer.transformer_blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=True, backend=backend)
        block.register_forward_pre_hook(_allow_versions)


def _allow_versions(*_: object) -> None:
    """All blocks share their versions: with and without gradients, into the block and in it, of one sample and of more,
    with a mask of the text and without. torch refuses to compile more than 8, unless the calling thread has set another
    limit; and autograd recomputes a GPU's blocks in threads of its own."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)


def _offload(transformer: QwenImageTransformer2DModel, blocks: Sequence[nn.Module], device: torch.device) -> None:
    weights = [_frozen_matrices(block, device) for block in blocks]
    if not all(weights):
        raise ConfigError(
            "a block has no frozen weights that could be offloaded to host memory",
            where="train.offload_blocks",
            hint="set it to 0, or train an adapter: model.lora",
        )
    _Offloader(blocks, weights, device)
    placeholders = {id(weight.placeholder) for some in weights for weight in some}
    keep_from_ddp(transformer, [name for name, value in transformer.named_parameters() if id(value) in placeholders])


@dataclass(frozen=True)
class _OffloadedWeight:
    """A parameter that is resident only while its block is computed.

    Attributes:
        module, name: where it belongs.
        placeholder: stands in its place otherwise: its shape in one element on the device. Whoever reads it gets NaN.
        host: its value, in host memory.
    """

    module: nn.Module
    name: str
    placeholder: nn.Parameter
    host: Tensor

    def put(self, value: nn.Parameter) -> None:
        """Not by `setattr`: while a library builds a model, in any thread, it has modules take no memory, all of them.
        Encoders are loaded beside training, when the first row comes that no shard holds."""
        self.module._parameters[self.name] = value


class _Fetched:
    """Weights that are on their way to the device, or have arrived.

    Args:
        values: the weights. Their memory belongs to the stream that computes.
        arrival: the event of their arrival; None: they have arrived.
        device: theirs.
    """

    def __init__(self, values: list[nn.Parameter], arrival: torch.cuda.Event | None, device: torch.device) -> None:
        self._values, self._arrival, self._device = values, arrival, device

    def taken(self) -> list[nn.Parameter]:
        """The weights, for work that is queued from now on."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(arrival)
        return self._values

    def __del__(self) -> None:
        """Let work that will get the memory wait for the copy, too: an exception drops what nobody has taken."""
        self.taken()


def _frozen_matrices(block: nn.Module, device: torch.device) -> list[_OffloadedWeight]:
    """Vectors are left out: they are a thousandth of the bytes, and as many copies."""
    matrices: list[Tensor] = []
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for path, parameter in list(block.named_parameters()):
        if parameter.requires_grad or parameter.ndim < 2:
            continue
        if type(parameter).__module__.startswith("bitsandbytes"):
            # Its layers hand their weights to the backward pass past torch's hooks for saved tensors, so that each
            # would stay on the device from the forward pass to the end of the backward pass.
            raise ConfigError(
                "4-bit weights cannot be offloaded to host memory",
                where="train.offload_blocks",
                found=f"{path} is {type(parameter).__name__}",
                hint="set it to 0, or model.quantize to fp8",
            )
        module, _, name = path.rpartition(".")
        nothing = torch.tensor(math.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
        placeholder = nn.Parameter(nothing, requires_grad=False)
        matrices.append(parameter)
        places.append((block.get_submodule(module), name, placeholder))
    hosts = _in_host_memory(matrices, pinned=device.type == "cuda")
    return [_OffloadedWeight(*place, host) for place, host in zip(places, hosts, strict=True)]


def _in_host_memory(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Copies that lie together, page-locked on demand: torch would round the memory of each up to a power of two."""
    parts = [part.detach() for tensor in tensors for part in _parts(tensor)]
    starts = list(accumulate((-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts), initial=0))
    if not parts:
        return []
    memory = torch.frombuffer(mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    if pinned:
        _lock_pages(memory)
    views = [
        memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
        for start, part in zip(starts, parts, strict=False)
    ]
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    rest = iter(views)
    return [_joined(tensor, [next(rest) for _ in _parts(tensor)]) for tensor in tensors]


_ALIGNMENT = 256  # bytes, as torch aligns what it allocates on a GPU


def _lock_pages(memory: Tensor) -> None:
    """Page-lock memory for as long as a tensor lies in it.

    Raises:
        QieError: the system does not lock so much.
    """
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise QieError(
            "host memory for offloaded weights cannot be page-locked",
            where="train.offload_blocks",
            found=f"{driver.cudaGetErrorString(error)}, for {memory.nbytes / 1e9:.1f} GB of one block",
            hint="offload fewer blocks, or give the process more memory",
        )
    # Memory that is given back while it is locked stays locked.
    weakref.finalize(memory.untyped_storage(), driver.cudaHostUnregister, memory.data_ptr()).atexit = False


class _Offloader:
    """Makes the weights of blocks resident while their block is computed, in the forward pass and in recomputation.

    Autograd holds the weights that a block's backward pass needs: for a checkpointed block, those that its
    recomputation saved. So a block's weights are evicted when it returns, in the forward pass and in the recomputation
    alike, and their memory is free when nobody needs it any more. Each fetch makes new parameters: autograd may have
    saved the previous parameter itself, not its content.

    diffusers' `enable_group_offload` is made for inference. It evicts weights after a module's forward, which the
    recomputation leaves early by an exception, so that they stay; it fetches ahead in the order of the forward pass;
    and it changes the content of a parameter, even of one that autograd saved.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], weights: list[list[_OffloadedWeight]], device: torch.device
    ) -> None:
        self._device, self._weights = device, weights
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ahead: dict[int, _Fetched] = {}
        self._last = -1
        for index, block in enumerate(blocks):
            self._evict(index)
            block.register_forward_pre_hook(partial(self._make_resident, index))
            # Recomputation ends by an exception as soon as it has computed all that is needed.
            block.register_forward_hook(partial(self._evict, index), always_call=True)

    def _make_resident(self, index: int, *_: object) -> None:
        fetched = self._ahead.pop(index) if index in self._ahead else self._fetch(index)
        for weight, value in zip(self._weights[index], fetched.taken(), strict=True):
            weight.put(value)
        following = self._following(index)
        if 0 <= following < len(self._weights) and following not in self._ahead:
            self._ahead[following] = self._fetch(following)

    def _evict(self, index: int, *_: object) -> None:
        for weight in self._weights[index]:
            weight.put(weight.placeholder)

    def _following(self, index: int) -> int:
        """A guess which offloaded block is computed next: a wrong one costs only time.

        In the forward pass numbers rise, in the backward pass they fall.
        """
        forward = not torch.is_grad_enabled() or index > self._last
        self._last = -1 if index == 0 and not forward else index
        return index + 1 if forward else index - 1

    def _fetch(self, index: int) -> _Fetched:
        """Copies on the device, perhaps not there yet.

        The memory belongs to the stream that computes, and the copy begins when the work queued there is done. So freed
        memory is used again in order, without waiting for the host and without events for each tensor.
        """
        host = [weight.host for weight in self._weights[index]]
        sources = [_parts(value) for value in host]
        # Inference mode may fetch weights ahead that training will use.
        with torch.inference_mode(False), torch.no_grad():
            copies = [[torch.empty_like(part, device=self._device) for part in parts] for parts in sources]
            arrival = None
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for parts, source in zip(copies, sources, strict=True):
                    _copy(parts, source)
                if self._stream is not None:
                    arrival = self._stream.record_event()
            joined = [_joined(value, parts) for value, parts in zip(host, copies, strict=True)]
            return _Fetched([nn.Parameter(value, requires_grad=False) for value in joined], arrival, self._device)


def _copy(values: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for value, source in zip(values, sources, strict=True):
        value.copy_(source, non_blocking=True)


def _parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a quantised one of torchao consists of; a plain one is its own part."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _joined(like: Any, parts: Sequence[Tensor]) -> Tensor:
    """A tensor like `like`, of other parts."""
    if not is_traceable_wrapper_subclass(like):
        return parts[0]
    names, context = like.__tensor_flatten__()
    found: Tensor = like.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, like.size(), like.stride())
    return found

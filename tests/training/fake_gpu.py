"""A GPU that is not there: training steps on fake CUDA tensors, which have a shape, a dtype, a device, and no values.

torch refuses an operation on tensors of two devices, real or fake. What else decides whether a step runs well on a GPU
is recorded here: dtypes of the residual stream, where the host waits for the device, FLOP, and bytes in use.

`measure` runs in a process of its own. There a library that is loaded before torch says that a device exists: a build
of torch for CPUs refuses to differentiate CUDA tensors. Autograd then starts a thread for the device, as for a GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from accelerate.state import AcceleratorState, PartialState
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from qie.config import Config
from qie.families import Family
from qie.pretrained import open_pretrained
from qie.training.flops import step_flops
from qie.training.memory import Setup, estimate, fill_memory, kept_bytes, plan_memory, recomputation
from qie.training.model.blocks import KeptActivations
from qie.training.processes import open_accelerator
from qie.training.run import PreparedBatch, Run
from qie.types import Batch

ROOT = Path(__file__).parents[2]
COMMON = {"attention_head_dim": 128, "in_channels": 64, "axes_dims_rope": [16, 56, 56]}
RELEASED = {
    "edit": COMMON | {"num_attention_heads": 24, "joint_attention_dim": 3584, "out_channels": 16},
    "qwen_image_21": COMMON | {"num_attention_heads": 32, "context_in_dim": 4096, "out_channels": 64},
}
"""The transformers of two families, but for the number of their blocks."""
GPU = torch.device("cuda:0")
BELIEF = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
namespace accelerator { std::optional<DeviceType> getAccelerator(bool) { return kCUDA; } }
}

namespace c10::impl {
struct Guard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream exchangeStream(Stream stream) const noexcept override { return getStream(stream.device()); }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
"""
"""What autograd asks a build of torch for CUDA about its device."""


def build_belief(folder: Path) -> Path:
    """BELIEF as a library to be loaded before torch."""
    torch_folder, source, library = Path(torch.__file__).parent, folder / "belief.cpp", folder / "belief.so"
    source.write_text(BELIEF)
    libraries = [f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    words = ["g++", "-std=c++20", "-fPIC", "-shared", f"-I{torch_folder}/include", source, "-o", library, *libraries]
    subprocess.run(words, check=True)
    return library


@dataclass(frozen=True)
class Case:
    """A step of a released model, but for the number of its blocks. `settings` are keys of the configuration, `kept`
    the blocks and the attention that are; the value "all" is the number of blocks. With a budget of memory, as
    train.gradient_checkpointing=auto has one, it decides what is kept."""

    settings: dict[str, Any] = field(default_factory=dict)
    blocks: int = 3
    controls: tuple[int, ...] = (1024,)
    size: int = 1024
    text_tokens: tuple[int, ...] = (1408,)
    zero_cond_t: bool = False
    kept: tuple[int | str, int | str] = (0, 0)
    budget_bytes: float = 0
    steps: int = 2
    family: str = "edit"
    preserved: bool = False


@dataclass
class Measured:
    """What was seen in the last of the steps.

    Attributes:
        blocks: how many the model had.
        stream: the dtypes of what enters and leaves blocks, and those of the prediction and of the loss.
        syncs: operations for which the host waits, in order, with the functions that asked for them.
        forward_flop, backward_flop: as torch counts; attention_flop: those of attention, forward and not again.
        kept, peak: bytes on the device after the forward pass, and at most.
        loaded: bytes on the device at most while the model was loaded.
        before: bytes on the device before the step: weights, optimizer, batch.
        estimated: qie's own numbers, by name.
        recomputed: what is computed again, in words.
    """

    blocks: int = 0
    stream: dict[str, list[str]] = field(default_factory=dict)
    syncs: list[str] = field(default_factory=list)
    forward_flop: int = 0
    backward_flop: int = 0
    attention_flop: int = 0
    loaded: int = 0
    before: int = 0
    kept: int = 0
    peak: int = 0
    estimated: dict[str, float] = field(default_factory=dict)
    recomputed: str = ""


def measured(cases: Sequence[Case], models: Mapping[str, Path], library: Path) -> list[Measured]:
    """Run `measure` on each case, in another process. `models` are folders by family; their transformer's config is
    overwritten."""
    folders = json.dumps({family: str(folder) for family, folder in models.items()})
    words = [sys.executable, "-m", __name__, folders, json.dumps([asdict(case) for case in cases])]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Measured(**found) for found in json.loads(done.stdout.splitlines()[-1])]


class Device(TorchDispatchMode):
    """Counts the bytes of storages on the device, and notes operations for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flop = self.attention_flop = 0
        self.syncs: list[str] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        fakes = [value for value in tensors if isinstance(value, FakeTensor)]
        if tensors and not fakes and (kwargs or {}).get("device") != GPU:
            with unset_fake_temporarily():  # random draws and host memory are real
                return func(*args, **(kwargs or {}))
        if name == "_local_scalar_dense":
            if args[0].device == GPU:
                self.sync(name)
            return 0.5 if args[0].dtype.is_floating_point else 1
        if name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            if args[0].device == GPU:
                self.sync(name)
            return args[0].clone()  # all of them count
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            # FlopCounterMode itself would keep what it has seen alive.
            flop = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=found)
            self.flop += flop
            self.attention_flop += flop if "attention" in name else 0
        if name in ("_to_copy", "copy_"):
            value, source, kwargs = found, args[-1] if name == "_to_copy" else args[1], kwargs or {}
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if waits and value.device != source.device:
                self.sync(f"{name} to {value.device.type}")
        elif name == "nonzero":
            self.sync(name)
        for value in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(value, torch.Tensor) and value.device == GPU:
                self._count(value.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._free, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def tensor(self, data: object, device: torch.device | None = None, **options: Any) -> torch.Tensor:
        """In the place of `torch.tensor`, whose copy a mode does not see."""
        if device is not None and torch.device(device) == GPU:
            self.sync("tensor")
        of_bools = {"dtype": torch.bool} if np.asarray(data).dtype == bool else {}
        return torch.empty(np.shape(data), device=device, **of_bools | options)

    def sync(self, what: str) -> None:
        frame, where = sys._getframe(), []
        while frame and len(where) < 2:
            package, _, _ = str(frame.f_globals.get("__name__")).partition(".")
            if package in ("qie", "diffusers", "accelerate", "peft"):
                where.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            frame = frame.f_back
        self.syncs.append(f"{what}: {' of '.join(where)}")


KERNELS = torch.library.Library("aten", "IMPL")
"""Where a build for CPUs has no kernel of a GPU, autograd makes many operations of one."""
KERNELS.impl("silu_backward", lambda gradient, value: torch.empty_like(value), "CUDA")


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask=None, is_causal=False, **_: object
):
    """torch's choice on a GPU: FlashAttention, or another fused kernel with a mask. A build for CPUs knows none."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=is_causal)[0]
    bias = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)[0]


@contextmanager
def fake_gpu() -> Iterator[Device]:
    """A context in which tensors are fake, on the GPU and elsewhere, and torch believes in the GPU."""
    original = torch.utils.swap_tensors

    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        """Of a module that moves: for a real parameter, torch changes the content instead."""
        if not isinstance(one, FakeTensor):
            return original(one, other)
        one.data, one.fake_device = other.data, other.fake_device
        return None

    with (
        mock.patch("torch.utils.swap_tensors", swap),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", attention),
        mock.patch("qie.training.model.single_stream.scaled_dot_product_attention", attention),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *_: True),
        mock.patch("torch.cuda.get_device_name", lambda *_: "NVIDIA H100 80GB HBM3"),
        mock.patch("torch.optim.optimizer._foreach_supported_types", [torch.nn.Parameter, torch.Tensor, FakeTensor]),
        mock.patch("torch.cuda.Stream", Stream),
        mock.patch("torch.cuda.current_stream", Stream),
        mock.patch("torch.cuda.stream", nullcontext),
        mock.patch("qie.training.model.blocks._lock_pages"),
        mock.patch("torch.cuda.max_memory_allocated", lambda *_: 0),
        FakeTensorMode(allow_non_fake_inputs=True),
        Device() as device,
        mock.patch("torch.tensor", device.tensor),
    ):
        yield device


def measure(case: Case, folder: Path) -> Measured:
    """Take the steps of a case, through qie's own code but for the reading of files."""
    described = json.loads((folder / "transformer/config.json").read_text())
    described |= RELEASED[case.family] | {"num_layers": case.blocks}
    described |= {"zero_cond_t": True} if case.zero_cond_t else {}
    (folder / "transformer/config.json").write_text(json.dumps(described))
    sections: dict[str, Any] = {"model": {"pretrained_model_name_or_path": str(folder), "lora": {"r": 16}}}
    sections["data"] = {"batch_size": len(case.text_tokens)}
    for key, value in case.settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = case.blocks if value == "all" else value
    config = Config.model_validate(sections)
    pretrained = open_pretrained(str(folder), components=("transformer", "scheduler"))
    AcceleratorState._reset_state(True)
    accelerator = open_accelerator(config)
    accelerator.state.device = PartialState().device = GPU

    kind = getattr(diffusers, pretrained.family.transformer)

    def read(folder: Path, torch_dtype: torch.dtype, **_: object) -> torch.nn.Module:
        return kind.from_config(described).to(torch_dtype)

    stream = SimpleNamespace(
        samples=SimpleNamespace(columns=columns(case, pretrained.family), paired=np.ones(1, bool)),
        epoch=0,
        state_dict=dict,
        forever=iter,
        plans=SimpleNamespace(whole=False),
    )
    kept = KeptActivations(*(case.blocks if value == "all" else int(value) for value in case.kept))
    setup = replace(plan_memory(config, pretrained, stream, accelerator), kept=kept)
    if case.preserved:  # all samples are, and not the share that sources give
        setup = replace(setup, base_passes=1)
    if case.budget_bytes:
        setup = fill_memory(setup, case.budget_bytes)
    with fake_gpu() as device, mock.patch.object(kind, "from_pretrained", read):
        run = Run(config, pretrained, stream, accelerator, kept=setup.kept)
        loaded = device.peak
        run.batches = prepared(case, run)
        for _ in range(case.steps):
            found = step(run, device)
        return replace(estimated(found, setup, case), loaded=loaded)


def columns(case: Case, family: Family) -> SimpleNamespace:
    target, *controls = ((size // family.latent_scale,) * 2 for size in (case.size, *case.controls))
    shape = SimpleNamespace(target=target, controls=controls)
    return SimpleNamespace(null_prompts=True, shape_names=[shape], lengths=np.array(case.text_tokens))


def prepared(case: Case, run: Run) -> Iterator[PreparedBatch]:
    """As `_prepare` in training/run.py, of samples that are never read."""
    longest, count, family = max(case.text_tokens), len(case.text_tokens), run.pretrained.family
    width = run.trainable.transformer.config["context_in_dim" if family.interleaved else "joint_attention_dim"]
    for number in itertools.count():
        sides = [size // family.latent_scale for size in (case.size, *case.controls)]
        latents = [torch.empty(count, family.latent_channels, 1, side, side).half() for side in sides]
        mask = None if min(case.text_tokens) == longest else torch.ones(count, longest, dtype=torch.bool)
        batch = Batch(
            keys=tuple(f"{row:064}" for row in range(count)),
            indices=tuple(range(count)),
            weight=torch.ones(count),
            pixel_latent=latents[0],
            control_latent=tuple(latents[1:]),
            prompt_embed=torch.empty(count, longest, width).half(),
            prompt_embeds_mask=mask,
            empty_tail=torch.empty(count, 7, width).half(),
            prompt_lengths=case.text_tokens,
            shared_prefixes=(longest - 40,) * count,
            empty_lengths=(longest - 33,) * count,
            empty_prompt_embeds_mask=None,
            image_slots=tuple(range(9, 9 + len(case.controls))) if family.interleaved else None,
            rejected_latent=latents[0].clone() if run.config.loss.of_pairs else None,
            preserved=(True,) * count if case.preserved else (),
        )
        with unset_fake_temporarily(), mock.patch("torch.empty", unpinned):
            draws = replace(run.objective.draw(batch, number), dropped_prompts=torch.arange(count) % 2 == 1)
        yield PreparedBatch(run.objective.moved(batch), draws, 0, {})


class Stream:
    """Of the device, where nothing takes time."""

    def __init__(self, *_: object) -> None:
        self.wait_stream = self.wait_event = self.record_event = self.synchronize = lambda *_: None


def unpinned(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """In the place of `torch.empty`, which refuses to lock pages without a GPU."""
    return torch.zeros(*size, **options)


def step(run: Run, device: Device) -> Measured:
    """Take a training step, and see what it does."""
    found = Measured(before=device.live)
    transformer, stream = run.trainable.transformer, found.stream

    def note(name: str, values: Any) -> None:
        for value in values if isinstance(values, (tuple, list)) else [values]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                stream.setdefault(name, [])
                if str(value.dtype) not in stream[name]:
                    stream[name].append(str(value.dtype))

    hooks = [
        block.register_forward_hook(lambda _, __, out: note("block", out)) for block in transformer.transformer_blocks
    ]
    hooks.append(transformer.register_forward_hook(lambda _, __, out: note("prediction", out)))
    backward = run.accelerator.backward

    def counted(loss: torch.Tensor) -> None:
        found.kept, found.forward_flop, found.attention_flop = device.live, device.flop, device.attention_flop
        note("loss", [loss])
        backward(loss)
        found.backward_flop = device.flop - found.forward_flop

    device.peak, device.flop, device.attention_flop = device.live, 0, 0
    device.syncs.clear()
    with mock.patch.object(run.accelerator, "backward", counted):
        run.training_step()
    found.peak, found.syncs = device.peak, list(device.syncs)
    for hook in hooks:
        hook.remove()
    return found


def estimated(found: Measured, setup: Setup, case: Case) -> Measured:
    """With qie's own numbers beside those that were counted."""
    flops = step_flops(
        setup.architecture,
        setup.image_tokens,
        setup.text_tokens,
        all_trained=setup.all_trained,
        target_tokens=setup.target_tokens,
        controls=setup.controls,
        draws=setup.noisy_targets,
        base_passes=setup.base_passes,
        checkpointed_blocks=len(setup.checkpointed),
        keeping_attention=len(setup.keeping_attention),
    )
    count, forward = setup.sequences, flops.forward + flops.of_base
    values = {name: float(value) for name, value in asdict(estimate(setup)).items()}
    values["kept"] = kept_bytes(setup)
    values["forward_passes"] = 1 + setup.base_passes
    values |= {"forward_flop": forward * count, "backward_flop": (flops.backward + flops.recomputed) * count}
    return replace(found, blocks=case.blocks, estimated=values, recomputed=recomputation(setup))


if __name__ == "__main__":
    folders = {family: Path(folder) for family, folder in json.loads(sys.argv[1]).items()}
    cases = [Case(**case) for case in json.loads(sys.argv[2])]
    taken = [asdict(measure(case, folders[case.family])) for case in cases]
    sys.stdout.write(json.dumps(taken) + "\n")

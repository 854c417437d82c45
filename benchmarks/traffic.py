"""The work between products in a block of the transformer: kernels, and the bytes that they move.

    python benchmarks/traffic.py [--heads 8] [--models edit 2511 2.1]

Counted, not timed: a middle block, one control, a LoRA of rank 16 on four targets, bfloat16. The unit is a number of
the block's width for each token, so that counts hold for any width. Operation by operation, each reads its inputs and
writes its outputs; views are left out, and so are products and attention. Compiled, they are those of the kernels that
inductor makes for a CPU, which fuses as for a GPU but for its loops. It takes eight minutes, in which it compiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import torch
from measuring import Results, Row, absolute, figure
from measuring import parser as common
from models import quiet
from peft import LoraConfig
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qie.training.model.dual_stream import predict_target
from qie.training.model.lora import round_adapters
from qie.training.model.single_stream import predict_targets
from qie.training.model.training_forward import use_training_forward

MODELS = ["edit", "2511", "2.1"]
HEAD_WIDTH, SIDE, TEXT, BLOCK = 128, 24, 192, 1
TEXT_21 = 12
"""Of a text that is stored without its images, as short beside them as in a sample of 1024²."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", "_flash", "linear")
MADE = ("empty", "detach", "_unsafe_view", "alias", "empty_like")


class Counted(NamedTuple):
    """Of a forward and of a backward pass: kernels, and bytes."""

    kernels: tuple[int, int]
    moved: tuple[int, int]

    @property
    def all_bytes(self) -> int:
        return sum(self.moved)


class Operations(TorchDispatchMode):
    """Counts operations as they are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.moved = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name.startswith(PRODUCTS) or name in MADE:
            return result
        inputs, outputs = (
            [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)] for tree in ((args, kwargs), result)
        )
        memory = [{one.untyped_storage()._cdata for one in some} for some in (outputs, inputs)]
        if not memory[0] <= memory[1] or name.endswith(
            "_"
        ):  # else it returned what it got: a cast that changes nothing
            self.kernels += 1
            # An expanded tensor is read once.
            self.moved += sum(one.untyped_storage().nbytes() if 0 in one.stride() else one.nbytes for one in inputs)
            self.moved += sum(one.nbytes for one in outputs)
        return result


def transformer_of(heads: int, *, blocks: int, own: bool, model: str) -> Any:
    """A transformer as a training step has it, with qie's forward pass or diffusers' own."""
    torch.manual_seed(0)
    sizes = {"num_layers": blocks, "num_attention_heads": heads}
    if model == "2.1":
        transformer = diffusers.QwenImage21Transformer2DModel(**sizes, context_in_dim=64)
    else:
        transformer = diffusers.QwenImageTransformer2DModel(
            **sizes, joint_attention_dim=64, zero_cond_t=model == "2511"
        )
    transformer.to(torch.bfloat16).requires_grad_(False).train()
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=targets, init_lora_weights=False))
    for name, weight in transformer.named_parameters():
        weight.data = weight.data.float() if "lora_" in name else weight.data
    round_adapters(transformer)
    if own:
        use_training_forward(transformer)
    return transformer


def tokens_of(model: str) -> int:
    return 2 * SIDE**2 + (TEXT_21 if model == "2.1" else TEXT)


def predicted(transformer: Any, *, own: bool, model: str) -> torch.Tensor:
    if model == "2.1":
        return predicted_21(transformer, own)
    tokens = torch.randn(1, 2 * SIDE**2, 64, dtype=torch.bfloat16)
    text = torch.randn(1, TEXT, 64, dtype=torch.bfloat16)
    timestep = torch.tensor([0.5], dtype=torch.bfloat16)
    return predict_target(transformer, tokens, timestep, text, [TEXT], [(1, SIDE, SIDE)] * 2)


def predicted_21(transformer: Any, own: bool) -> torch.Tensor:
    """With one draw; diffusers' forward pass takes the text with places for its image, 4 tokens of the image each."""
    target, control = (torch.randn(1, SIDE**2, 64, dtype=torch.bfloat16) for _ in range(2))
    timestep, grids, slot = torch.tensor([0.5], dtype=torch.bfloat16), [(1, SIDE, SIDE)] * 2, 9
    if own:
        text = torch.randn(1, TEXT_21, 64, dtype=torch.bfloat16)
        return predict_targets(transformer, target, timestep, [control], text, [TEXT_21], [slot], grids)
    places = torch.zeros(1, TEXT_21 + SIDE**2 // 2, dtype=torch.bool)
    places[0, slot : slot + SIDE**2 // 4] = places[0, -(SIDE**2) // 4 :] = True
    found = transformer(
        hidden_states=torch.cat([control, target], dim=1),
        encoder_hidden_states=torch.randn(1, TEXT_21 + SIDE**2 // 4, 64, dtype=torch.bfloat16),
        timestep=timestep,
        img_shapes=[grids],
        img_mask=places,
        return_dict=False,
    )[0]
    return found[:, -(SIDE**2) :]  # type: ignore[no-any-return]


def eager(heads: int, **kind: Any) -> Counted:
    """What one block more adds."""
    found = []
    for blocks in (3, 4):
        transformer, passes = transformer_of(heads, blocks=blocks, **kind), (Operations(), Operations())
        with passes[0]:
            prediction = predicted(transformer, **kind)
        with passes[1]:
            prediction.float().sum().backward()  # type: ignore[no-untyped-call]
        found.append([(one.kernels, one.moved) for one in passes])
    forward, backward = ((b[0] - a[0], b[1] - a[1]) for a, b in zip(*found, strict=True))
    return Counted((forward[0], backward[0]), (forward[1], backward[1]))


def compiled(heads: int, **kind: Any) -> Counted:
    """Of the kernels of a middle block, compiled as qie does."""
    transformer, graphs, compile_to_module = (
        transformer_of(heads, blocks=3, **kind),
        [],
        GraphLowering.compile_to_module,
    )

    def counts(graph: GraphLowering) -> Any:
        module = compile_to_module(graph)
        nodes = [one for one in graph.scheduler.nodes if not isinstance(one, _OTHERS)]
        sizes = [one.get_read_write_buffers_sizes() for one in nodes]
        graphs.append((len([size for size in sizes if size >= heads * HEAD_WIDTH * 64]), sum(sizes)))
        return module

    block = transformer.transformer_blocks[BLOCK]
    block.forward = torch.compile(block.forward, fullgraph=True)
    patched = mock.patch.object(GraphLowering, "compile_to_module", counts)
    with patched, inductor.patch(force_disable_caches=True):
        predicted(transformer, **kind).float().sum().backward()  # type: ignore[no-untyped-call]
    forward, backward = graphs
    return Counted((forward[0], backward[0]), (forward[1], backward[1]))


_OTHERS = ExternKernelSchedulerNode, NopKernelSchedulerNode


def row(key: str, what: str, ours: Counted, theirs: Counted, unit: int) -> Row:
    parts = []
    for name, count in (("", ours), ("peer ", theirs)):
        units = " + ".join(figure(size / unit) for size in count.moved)
        kernels = " + ".join(map(str, count.kernels))
        parts.append(f"{name}{units} numbers of the width for each token, {kernels} kernels")
    share = ours.all_bytes / theirs.all_bytes
    found = absolute(key, what, [share], "× the bytes", "diffusers, operation by operation", "; ".join(parts))
    return replace(found, runs=0)


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=1)
    made.add_argument("--heads", type=int, default=8, help="of 128, of the released 24 or 32 (%(default)s)")
    made.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    quiet()
    results = Results(__file__, options, arguments)
    for name in options.models:
        unit = options.heads * HEAD_WIDTH * tokens_of(name) * 2
        theirs = eager(options.heads, own=False, model=name)
        for how, count in (("qie", eager), ("qie, compiled", compiled)):
            ours = count(options.heads, own=True, model=name)
            results.add(row(f"{how} {name}", f"work between products in a block of {name}, {how}", ours, theirs, unit))
    results.save()


if __name__ == "__main__":
    main()

"""Blocks that are checkpointed, offloaded or compiled compute the same.

Bit for bit, since the same kernels run on the same numbers at equally aligned addresses; but for compiled ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights
from functorch.compile import make_boxed_func
from peft import LoraConfig
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from qie.errors import ConfigError, QieError
from qie.training.model import blocks as blocks_module
from qie.training.model.adapted_linear import trace_doras
from qie.training.model.blocks import (
    KeptActivations,
    blocks_keeping_attention,
    checkpoint_activations,
    checkpointed_blocks,
    compile_blocks,
    offloaded_blocks,
)
from qie.training.model.lora import without_trained
from tests.training.small import LORA_TARGETS, gradients, inputs, kinds, ready, small_transformer

CPU = torch.device("cpu")
MATRICES = 14  # of a block, frozen


def assert_bit_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_equal_but_for_rounding(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """As a graph computes, whose kernels may be others than those of the layers."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.std()))


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    found = gradients(small_transformer())
    assert all(value.abs().max() > 0 for value in found.values()), "a gradient that is zero would equal any"
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Make the CPU two devices: offloaded weights are NaN but while they are copied. Returns the copies made."""
    true: dict[int, torch.Tensor] = {}
    made: list[weakref.ref[torch.Tensor]] = []

    def copy(values: list[torch.Tensor], host: list[torch.Tensor]) -> None:
        for value, source in zip(values, host, strict=True):
            if id(source) not in true:
                true[id(source)] = source.clone()
                source.fill_(torch.nan)
            assert source.isnan().all(), "something wrote to host memory"
            value.copy_(true[id(source)])
            made.append(weakref.ref(value.untyped_storage()))

    monkeypatch.setattr(blocks_module, "_copy", copy)
    return made


def alive(made: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(copy() is not None for copy in made)


@pytest.mark.parametrize(
    ("every", "offload"), [(0, 0), (0, 1), (0, 6), (1, 0), (1, 3), (2, 2), (2, 6), (3, 1), (4, 3), (7, 0), (7, 2)]
)
def test_the_chosen_blocks_alone_are_recomputed_and_no_bit_of_a_gradient_changes(
    every: int, offload: int, expected, copies
) -> None:
    transformer, calls = small_transformer(), []
    for index, block in enumerate(transformer.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    checkpoint_activations(transformer, every, offload, CPU)
    for _ in range(2):  # what was fetched ahead in the first pass meets the second
        calls.clear()
        assert_bit_equal(gradients(transformer), expected)
        assert calls == [*range(6), *reversed(checkpointed_blocks(6, every, offload))]
    assert alive(copies) == 0
    assert len(copies) == 4 * offload * MATRICES, "forward and again, in two passes: each matrix once each"


class Operations(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.calls[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("every", "offload", "kept", "checkpointed", "attention"),
    [
        (1, 0, KeptActivations(0, 6), 6, 6),
        (1, 0, KeptActivations(0, 2), 6, 2),
        (1, 0, KeptActivations(2, 6), 4, 4),
        (1, 0, KeptActivations(2, 1), 4, 1),
        (1, 0, KeptActivations(9, 9), 0, 0),
        (2, 0, KeptActivations(1, 1), 2, 1),
        (1, 3, KeptActivations(2, 6), 4, 4),
        (0, 6, KeptActivations(6, 5), 6, 5),
    ],
)
def test_what_is_kept_is_not_computed_again_and_no_bit_of_a_gradient_changes(
    every: int, offload: int, kept: KeptActivations, checkpointed: int, attention: int, expected, copies
) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, every, offload, CPU, kept=kept)
    for _ in range(2):
        with Operations() as done:
            assert_bit_equal(gradients(transformer), expected)
        computed = [done.calls[name] for name in ("_scaled_dot_product_flash_attention_for_cpu", "gelu")]
        assert computed == [6 + checkpointed - attention, 2 * (6 + checkpointed)]
    assert alive(copies) == 0
    with torch.no_grad():
        assert torch.equal(transformer(**inputs())[0], expected["output"])


def test_gradients_of_all_weights_are_those_where_attention_is_kept() -> None:
    transformer = small_transformer(lora=False)
    checkpoint_activations(transformer, 1, kept=KeptActivations(1, 6))
    assert_bit_equal(gradients(transformer), gradients(small_transformer(lora=False)))


def test_gradients_of_all_weights_are_those_without_checkpointing() -> None:
    transformer = small_transformer(lora=False)
    checkpoint_activations(transformer, 2)
    assert_bit_equal(gradients(transformer), gradients(small_transformer(lora=False)))


def test_never_more_than_two_blocks_are_resident_and_three_while_one_is_recomputed(expected, copies) -> None:
    transformer, most = small_transformer(), []
    checkpoint_activations(transformer, 0, 6, CPU)
    for block in transformer.transformer_blocks:
        block.register_forward_hook(lambda *_: most.append(alive(copies)), always_call=True)
    with torch.no_grad():
        transformer(**inputs())
    assert max(most) <= 2 * MATRICES, "the block that runs and the next"
    # While a block runs again, autograd still holds what the block after it saved until that one's backward is through.
    assert_bit_equal(gradients(transformer), expected)
    assert max(most) <= 3 * MATRICES


def test_the_next_block_is_fetched_ahead_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, 0, 3, CPU)
    fetched: list[tuple[int, int]] = []
    running: list[int] = []
    offloader = blocks_module._Offloader
    fetch = offloader._fetch
    monkeypatch.setattr(
        offloader, "_fetch", lambda self, index: fetched.append((index, running[-1])) or fetch(self, index)
    )
    for index, block in enumerate(transformer.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, index=index: running.append(index), prepend=True)
    for _ in range(2):
        fetched.clear()
        gradients(transformer)
        # Offloaded blocks 0, 1, 2 are blocks 0, 2, 4. Who fetches what: only the first of each direction for itself.
        assert fetched == [(0, 0), (1, 0), (2, 2), (2, 4), (1, 4), (0, 2)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_between_steps_sees_and_disturbs_nothing(context, expected, copies) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, 1, 3, CPU)
    assert_bit_equal(gradients(transformer), expected)
    with context():
        assert torch.equal(transformer(**inputs())[0], expected["output"])
    assert_bit_equal(gradients(transformer), expected)
    assert alive(copies) == 0


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_a_block_that_fails_evicts_its_weights_and_training_goes_on(context, expected, copies) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, 1, 2, CPU)
    broken = transformer.transformer_blocks[0].img_mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), context():
        transformer(**inputs())
    assert alive(copies) <= MATRICES, "but for what was fetched ahead"
    broken.remove()
    assert_bit_equal(gradients(transformer), expected)
    assert alive(copies) == 0


def test_frozen_matrices_are_offloaded_to_placeholders_of_one_element_and_what_is_trained_stays() -> None:
    transformer = small_transformer()
    before = dict(transformer.named_parameters())
    checkpoint_activations(transformer, 1, 6, CPU)
    after = dict(transformer.named_parameters())
    assert {name: weight.shape for name, weight in after.items()} == {name: w.shape for name, w in before.items()}
    matrices = {name for name, w in before.items() if "blocks." in name and w.ndim > 1 and not w.requires_grad}
    assert len(matrices) == 6 * MATRICES
    assert {name for name, weight in after.items() if weight.untyped_storage().nbytes() <= 4} == matrices
    assert all(after[name] is before[name] for name in before.keys() - matrices)


def test_offloaded_weights_arrive_while_another_thread_builds_a_model() -> None:
    """All modules then register parameters without memory."""
    transformer = small_transformer(num_layers=2)
    checkpoint_activations(transformer, 0, 2, CPU)
    with init_empty_weights():
        found = gradients(transformer)
    assert_equal_but_for_rounding(found, gradients(small_transformer(num_layers=2)))


class Driver:
    """CUDA's functions for page-locked memory."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked = error, {}

    def cudaHostRegister(self, pointer: int, size: int, _: int) -> int:
        self.locked[pointer] = size
        return self.error

    def cudaHostUnregister(self, pointer: int) -> None:
        del self.locked[pointer]

    def cudaGetErrorString(self, _: int) -> str:
        return "out of memory"


def test_the_page_locked_memory_of_a_block_is_one_piece_of_its_size_and_is_unlocked_when_nobody_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    tensors = [torch.randn(5, 7), torch.randn(3).bfloat16(), torch.randn(2, 2).to(torch.float8_e4m3fn)]
    hosts = blocks_module._in_host_memory(tensors, pinned=True)
    assert [host.dtype for host in hosts] == [tensor.dtype for tensor in tensors]
    assert all(torch.equal(host.float(), tensor.float()) for host, tensor in zip(hosts, tensors, strict=True))
    start = hosts[0].data_ptr()
    assert [host.data_ptr() - start for host in hosts] == [0, 256, 512] and driver.locked == {start: 768}
    del hosts[0], hosts[0]
    assert driver.locked, "the last one lies in it"
    hosts.clear()
    assert not driver.locked


def test_memory_that_cannot_be_page_locked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(error=2))
    with pytest.raises(QieError, match=r"(?s)page-locked.*train\.offload_blocks.*out of memory"):
        blocks_module._in_host_memory([torch.zeros(1)], pinned=True)


@pytest.mark.parametrize("taken", [True, False])
def test_memory_of_weights_is_free_only_for_work_that_waits_for_their_copy(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, waited = torch.nn.Parameter(torch.zeros(2)), []
    alive = weakref.ref(value)
    stream = SimpleNamespace(wait_event=lambda event: waited.append((event, alive() is not None)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    fetched = blocks_module._Fetched([value], "arrival", CPU)
    del value
    if taken:
        fetched.taken()
    del fetched
    assert waited == [("arrival", True)] and alive() is None


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
def test_weights_of_torchao_are_offloaded() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantized():
        transformer = small_transformer(lora=False).requires_grad_(False)
        quantization.quantize_(transformer.transformer_blocks, quantization.Int8WeightOnlyConfig())
        torch.manual_seed(3)
        transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
        return transformer

    transformer = quantized()
    checkpoint_activations(transformer, 1, 3, CPU)
    assert_bit_equal(gradients(transformer), gradients(quantized()))
    assert transformer.transformer_blocks[0].img_mlp.net[2].weight.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("offload", "kind", "words"),
    [
        (7, "lora", r"(?s)fewer blocks.*train\.offload_blocks.*at most 6.*7"),
        (1, "all trained", r"(?s)train\.offload_blocks.*model\.lora"),
        (1, "nf4", r"(?s)4-bit.*train\.offload_blocks.*img_mlp.net.2.weight"),
    ],
)
def test_blocks_that_cannot_be_offloaded_are_refused(offload: int, kind: str, words: str) -> None:
    transformer = small_transformer(lora=kind != "all trained")
    if kind == "nf4":
        layer = pytest.importorskip("bitsandbytes").nn.Linear4bit(128, 32, quant_type="nf4")
        transformer.transformer_blocks[0].img_mlp.net[2] = layer.requires_grad_(False)
    with pytest.raises(ConfigError, match=words):
        checkpoint_activations(transformer, 1, offload, CPU)


def test_offloaded_blocks_are_spread_evenly() -> None:
    for offload in range(1, 61):
        chosen = offloaded_blocks(60, offload)
        assert len(set(chosen)) == offload and chosen[0] == 0 and chosen[-1] < 60
        gaps = [after - before for before, after in zip(chosen, [*chosen[1:], 60], strict=True)]
        assert max(gaps) - min(gaps) <= 1


def test_each_nth_block_is_checkpointed_and_each_offloaded_one() -> None:
    assert checkpointed_blocks(60, 0) == []
    assert checkpointed_blocks(60, 1) == list(range(60))
    assert checkpointed_blocks(7, 3) == checkpointed_blocks(7, 3, 1) == [0, 3, 6]
    assert checkpointed_blocks(7, 0, 2) == [0, 3]


def test_the_last_blocks_keep_what_may_be_kept() -> None:
    assert checkpointed_blocks(7, 1, kept_blocks=3) == [0, 1, 2, 3]
    assert checkpointed_blocks(7, 3, kept_blocks=1) == [0, 3]
    assert checkpointed_blocks(7, 1, 2, kept_blocks=5) == [0, 3] == checkpointed_blocks(7, 1, 2, kept_blocks=9)
    assert blocks_keeping_attention([0, 1, 3], 2) == [1, 3]
    assert blocks_keeping_attention([0, 1, 3], 2, never=[1]) == [0, 3]
    assert blocks_keeping_attention([0, 1, 3], 9) == [0, 1, 3]
    assert blocks_keeping_attention([0, 1, 3], 0) == []


class CountingBackend:
    """A backend of torch.compile that runs graphs as they are."""

    graphs = calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        self.graphs += 1

        def run(*values):
            self.calls += 1
            return graph(*values)

        return run


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it elsewhere
# A run needs more graphs than torch's limit of 8; as many take long to compile, so here the limit is 1.
@torch._dynamo.config.patch(recompile_limit=1)
def test_each_block_runs_compiled_and_few_graphs_serve_all_blocks_and_sizes(expected) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, 2, 3, CPU)
    backend = CountingBackend()
    compile_blocks(transformer, backend)
    assert_equal_but_for_rounding(gradients(transformer), expected)
    assert backend.calls == 6 + 3, "each block, and half of them again"
    graphs = backend.graphs
    for text_tokens in (9, 20):
        gradients(transformer, **inputs(text_tokens=text_tokens))
    assert 1 < graphs <= 3 and backend.graphs == graphs


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # torch's own, of LoHa
@pytest.mark.parametrize("kind", ["LoKr", "LoHa", "DoRA"])
def test_each_kind_of_adapter_is_compiled_whole_and_left_out_where_it_takes_no_part(kind: str) -> None:
    transformer = ready(
        small_transformer(False, num_layers=1), kinds(LORA_TARGETS)[kind], own=True, dtype=torch.float32
    )
    trace_doras(transformer)
    layer = transformer.transformer_blocks[0].attn.to_q
    compiled = torch.compile(layer.forward, fullgraph=True, backend="eager")
    tokens = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        expected = layer(tokens)
        assert (compiled(tokens) - expected).abs().max() < 1e-6
        with torch.no_grad(), without_trained(transformer):
            absent = layer(tokens)
            assert torch.equal(compiled(tokens), absent) and (absent - expected).abs().max() > 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_backward_pass_of_compiled_blocks_reads_no_evicted_weights(copies) -> None:
    """It saves parameters themselves, where layers that are not compiled save what they made of them."""
    transformer = small_transformer(num_layers=2)
    # Compiled as one with its recomputation, a block would hold its weights from the forward pass to the backward pass.
    checkpoint_activations(transformer, 0, 2, CPU, kept=KeptActivations(0, 2), compiled=True)
    compile_blocks(transformer, "aot_eager")
    held: list[int] = []
    transformer.register_forward_hook(lambda *_: held.append(alive(copies)))
    assert_equal_but_for_rounding(gradients(transformer), gradients(small_transformer(num_layers=2)))
    assert held == [0] and alive(copies) == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_block_computes_again_all_but_attention() -> None:
    graphs: dict[str, list[str]] = {}

    def noting(which: str):
        def note(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
            graphs[which] = [str(node.target) for node in graph.graph.nodes]
            return make_boxed_func(graph.forward)

        return note

    transformer = small_transformer(num_layers=1)
    checkpoint_activations(transformer, 1, kept=KeptActivations(0, 1), compiled=True)
    compile_blocks(transformer, aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward")))
    assert_equal_but_for_rounding(gradients(transformer), gradients(small_transformer(num_layers=1)))
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert [graphs[which].count(attention) for which in ("forward", "backward")] == [1, 0]
    # Only a forward pass has products with a bias.
    products = {which: names.count("aten.addmm.default") for which, names in graphs.items()}
    assert products["backward"] >= products["forward"] - 2 > 10


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_are_compiled_in_as_many_versions_where_another_thread_recomputes_them() -> None:
    """As autograd's threads do for a GPU: a limit set in the thread of the run does not hold in them."""
    some = [small_transformer(num_layers=1, num_attention_heads=heads) for heads in (1, 2)]
    for transformer in some:
        checkpoint_activations(transformer, 1)
        compile_blocks(transformer, "eager")
    loss = sum(transformer(**inputs())[0].sum() for transformer in some)
    torch._dynamo.reset()  # so that recomputation has to compile again, a version for each width

    def backward() -> None:
        torch._dynamo.config.recompile_limit = 1  # more versions than 8 take long to compile
        loss.backward()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(backward).result()
    assert all(weight.grad is not None for name, weight in some[0].named_parameters() if "lora_" in name)


def on_gpu() -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs().items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("every", "offload"), [(1, 0), (2, 3), (0, 6)])
def test_on_a_gpu_weights_come_and_go_and_change_no_bit(every: int, offload: int) -> None:
    expected = gradients(small_transformer().cuda(), **on_gpu())
    transformer = small_transformer()
    checkpoint_activations(transformer, every, offload, torch.device("cuda"))
    transformer.cuda()
    for _ in range(3):
        assert_bit_equal(gradients(transformer, **on_gpu()), expected)
    with torch.no_grad():
        assert torch.equal(transformer(**on_gpu())[0], expected["output"])


@pytest.mark.gpu
def test_on_a_gpu_offloading_frees_the_weights() -> None:
    def peak(offload: int) -> int:
        transformer = small_transformer(num_attention_heads=64, num_layers=12)
        checkpoint_activations(transformer, 1, offload, torch.device("cuda"))
        transformer.cuda()
        gradients(transformer, **on_gpu())
        torch.cuda.reset_peak_memory_stats()
        gradients(transformer, **on_gpu())
        return torch.cuda.max_memory_allocated()

    block = 36 * 1024**2 * 4  # float32 matrices of a block of width 1024
    assert peak(0) - peak(12) > 8 * block

"""Blocks that compute activations again, whose weights wait in host memory, or that are compiled, compute the same.

Bit for bit, since the same kernels run on the same numbers at equally aligned addresses; but for compiled ones.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from peft import LoraConfig

from qie.errors import ConfigError
from qie.training.model import blocks as blocks_module
from qie.training.model.blocks import checkpoint_activations, checkpointed_blocks, compile_blocks, offloaded_blocks
from tests.training.small import gradients, inputs, small_transformer

CPU = torch.device("cpu")


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
def device_copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Make the CPU two devices: what waits in host memory is NaN but while it is copied. Returns the copies made."""
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


@pytest.mark.parametrize("every", [1, 2, 3, 4, 6, 7])
def test_computing_activations_again_changes_no_bit_of_a_gradient(every: int, expected) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, every)
    assert_bit_equal(gradients(transformer), expected)


@pytest.mark.parametrize("every", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [1, 2, 3, 6])
def test_weights_that_wait_in_host_memory_change_no_bit_of_a_gradient(
    every: int, offload: int, expected, device_copies
) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, every, offload, CPU)
    for _ in range(2):  # what was fetched ahead in the first pass meets the second
        assert_bit_equal(gradients(transformer), expected)
    assert alive(device_copies) == 0
    assert len(device_copies) == 4 * offload * 14, "forward and again, in two passes: each matrix once each"


def test_gradients_of_all_weights_are_those_without_checkpointing() -> None:
    transformer = small_transformer(lora=False)
    checkpoint_activations(transformer, 2)
    assert_bit_equal(gradients(transformer), gradients(small_transformer(lora=False)))


@pytest.mark.parametrize(("every", "offload", "ran"), [(1, 0, 12), (2, 0, 9), (3, 0, 8), (0, 2, 8), (3, 3, 10)])
def test_just_the_chosen_blocks_run_again(every: int, offload: int, ran: int) -> None:
    transformer = small_transformer()
    calls = []
    for index, block in enumerate(transformer.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    checkpoint_activations(transformer, every, offload, CPU)
    gradients(transformer)
    assert len(calls) == ran
    again = checkpointed_blocks(6, every, offload)
    assert calls == [*range(6), *reversed(again)]


def test_never_more_than_two_blocks_have_their_weights_on_the_device(expected, device_copies) -> None:
    transformer = small_transformer()
    most = []
    checkpoint_activations(transformer, 0, 6, CPU)
    for block in transformer.transformer_blocks:
        block.register_forward_hook(lambda *_: most.append(alive(device_copies)), always_call=True)
    with torch.no_grad():
        transformer(**inputs())
    assert max(most) <= 2 * 14, "the block that runs and the next"
    assert_bit_equal(gradients(transformer), expected)
    # While a block runs again, autograd still holds what the block after it saved until that one's backward is through.
    assert max(most) <= 3 * 14
    assert alive(device_copies) == 0


def test_the_next_block_is_fetched_ahead_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, 0, 3, CPU)
    waited = []
    fetch = blocks_module._Waiting._fetch
    monkeypatch.setattr(
        blocks_module._Waiting, "_fetch", lambda self, index: waited.append((index, running[-1])) or fetch(self, index)
    )
    running: list[int] = []
    for index, block in enumerate(transformer.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, index=index: running.append(index), prepend=True)
    for _ in range(2):
        waited.clear()
        gradients(transformer)
        # Offloaded blocks 0, 1, 2 are blocks 0, 2, 4. Who fetches what: only the first of each direction for itself.
        assert waited == [(0, 0), (1, 0), (2, 2), (2, 4), (1, 4), (0, 2)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_between_steps_sees_and_disturbs_nothing(context, expected, device_copies) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, 1, 3, CPU)
    assert_bit_equal(gradients(transformer), expected)
    with context():
        assert torch.equal(transformer(**inputs())[0], expected["output"])
    assert_bit_equal(gradients(transformer), expected)
    assert alive(device_copies) == 0


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_a_block_that_fails_leaves_its_weights_behind_and_training_goes_on(context, expected, device_copies) -> None:
    transformer = small_transformer()
    checkpoint_activations(transformer, 1, 2, CPU)
    broken = transformer.transformer_blocks[0].img_mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), context():
        transformer(**inputs())
    assert alive(device_copies) <= 14, "but for what was fetched ahead"
    broken.remove()
    assert_bit_equal(gradients(transformer), expected)
    assert alive(device_copies) == 0


def test_what_waits_has_its_shape_in_one_element_and_what_is_trained_stays() -> None:
    transformer = small_transformer()
    shapes = {name: weight.shape for name, weight in transformer.named_parameters()}
    trained = {name: weight.data_ptr() for name, weight in transformer.named_parameters() if weight.requires_grad}
    checkpoint_activations(transformer, 1, 6, CPU)
    assert {name: weight.shape for name, weight in transformer.named_parameters()} == shapes
    waiting = {name for name, weight in transformer.named_parameters() if weight.untyped_storage().nbytes() <= 4}
    block = "transformer_blocks.3."
    adapted = ["to_q", "to_k", "to_v", "to_out.0"]
    others = ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    assert {name.removeprefix(block) for name in waiting if name.startswith(block)} == {
        *(f"attn.{name}.base_layer.weight" for name in adapted),
        *(f"attn.{name}.weight" for name in others),
        *(f"{side}_{name}.weight" for side in ("img", "txt") for name in ("mod.1", "mlp.net.0.proj", "mlp.net.2")),
    }
    assert {name: dict(transformer.named_parameters())[name].data_ptr() for name in trained} == trained


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
def test_weights_of_torchao_wait_in_host_memory() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantized():
        transformer = small_transformer(lora=False).requires_grad_(False)
        quantization.quantize_(transformer.transformer_blocks, quantization.Int8WeightOnlyConfig())
        torch.manual_seed(3)
        transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
        return transformer

    transformer = quantized()
    checkpoint_activations(transformer, 1, 3, CPU)
    assert transformer.transformer_blocks[0].img_mlp.net[2].weight.untyped_storage().nbytes() == 4
    assert_bit_equal(gradients(transformer), gradients(quantized()))
    assert transformer.transformer_blocks[0].img_mlp.net[2].weight.untyped_storage().nbytes() == 4


def test_more_blocks_than_there_are_cannot_wait() -> None:
    with pytest.raises(ConfigError, match=r"(?s)fewer blocks.*train\.offload_blocks.*at most 6.*7"):
        checkpoint_activations(small_transformer(), 1, 7, CPU)


def test_weights_that_are_all_trained_cannot_wait() -> None:
    with pytest.raises(ConfigError, match=r"(?s)train\.offload_blocks.*model\.lora"):
        checkpoint_activations(small_transformer(lora=False), 1, 1, CPU)


def test_four_bit_weights_cannot_wait() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    transformer = small_transformer()
    mlp = transformer.transformer_blocks[0].img_mlp.net
    mlp[2] = bitsandbytes.nn.Linear4bit(128, 32, quant_type="nf4").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"(?s)4-bit.*train\.offload_blocks.*img_mlp.net.2.weight"):
        checkpoint_activations(transformer, 1, 1, CPU)


@pytest.mark.parametrize("offload", range(1, 61))
def test_offloaded_blocks_are_spread_evenly(offload: int) -> None:
    chosen = offloaded_blocks(60, offload)
    assert len(set(chosen)) == offload and chosen[0] == 0 and chosen[-1] < 60
    gaps = [after - before for before, after in zip(chosen, [*chosen[1:], 60], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_without_checkpointing_nothing_is_computed_again() -> None:
    assert checkpointed_blocks(60, 0) == []
    assert checkpointed_blocks(60, 1) == list(range(60))
    assert checkpointed_blocks(7, 3) == [0, 3, 6]
    assert checkpointed_blocks(7, 3, 1) == [0, 3, 6]
    assert checkpointed_blocks(7, 0, 2) == [0, 3]


class CountingBackend:
    """A backend of torch.compile that runs graphs as they are."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_backward_pass_of_compiled_blocks_reads_no_weights_that_left(device_copies) -> None:
    """It saves parameters themselves, where layers that are not compiled save what they made of them."""
    transformer = small_transformer(num_layers=2)
    checkpoint_activations(transformer, 0, 2, CPU)
    compile_blocks(transformer, "aot_eager")
    assert_equal_but_for_rounding(gradients(transformer), gradients(small_transformer(num_layers=2)))
    assert alive(device_copies) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("every", "offload"), [(1, 0), (2, 3), (0, 6)])
def test_on_a_gpu_weights_come_and_go_and_change_no_bit(every: int, offload: int) -> None:
    device = torch.device("cuda")
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs().items()}
    expected = gradients(small_transformer().to(device), **given)
    transformer = small_transformer()
    checkpoint_activations(transformer, every, offload, device)
    transformer.to(device)
    for _ in range(3):
        assert_bit_equal(gradients(transformer, **given), expected)
    with torch.no_grad():
        assert torch.equal(transformer(**given)[0], expected["output"])


@pytest.mark.gpu
def test_on_a_gpu_offloading_frees_the_weights() -> None:
    def peak(offload: int) -> int:
        device = torch.device("cuda")
        transformer = small_transformer(num_attention_heads=64, num_layers=12)
        checkpoint_activations(transformer, 1, offload, device)
        transformer.to(device)
        given = inputs()
        given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        gradients(transformer, **given)
        torch.cuda.reset_peak_memory_stats()
        gradients(transformer, **given)
        return torch.cuda.max_memory_allocated()

    block = 36 * 1024**2 * 4  # float32 matrices of a block of width 1024
    assert peak(0) - peak(12) > 8 * block

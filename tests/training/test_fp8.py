"""Products in FP8: what is rounded, what is exact, what is kept, and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import cosine_similarity, linear

from qie.config import LoraConfig, LossConfig
from qie.encode import Encoder, EncoderOptions
from qie.errors import ConfigError
from qie.families import FAMILIES
from qie.pretrained import PretrainedModel, open_pretrained
from qie.training.model import quantize as quantize_module
from qie.training.model.blocks import checkpoint_activations
from qie.training.model.fp8 import FP8Linear, rounded
from qie.training.model.load import load_transformer
from qie.training.model.lora import add_lora
from qie.training.model.quantize import ScaledLinear, quantize_blocks
from qie.training.objective import Objective
from tests.conftest import AREA_PX, ROOT
from tests.training.adapters import one_batch, randomise, transformer_of
from tests.training.small import LORA_TARGETS, gradients, small_transformer

pytest.importorskip("torchao")
CPU = torch.device("cpu")
SMALL_MODEL = ROOT / "configs" / "small_model"
SIZES = (160, 640)
FUNCTION = "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"  # torch, while it compiles


@pytest.fixture(scope="module")
def plain() -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Linear(*SIZES).requires_grad_(False)


@pytest.fixture(scope="module")
def layer(plain: torch.nn.Linear) -> FP8Linear:
    made = torch.nn.Linear(*SIZES).requires_grad_(False)
    made.load_state_dict(plain.state_dict())
    return FP8Linear.of(quantize_module._layer_maker("fp8")(made))


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both_ways(
    layer: torch.nn.Module, tokens: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What it makes of tokens, and the gradient of the tokens."""
    tokens = tokens.clone().requires_grad_()
    product = layer(tokens)
    product.backward(gradient)
    return product.detach(), tokens.grad


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.double().norm())


def exact(tokens: torch.Tensor) -> torch.Tensor:
    """What `rounded` gives, as numbers."""
    values, scales = rounded(tokens)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    return values.double() * scales.double()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_a_product_is_that_of_the_rounded_numbers_in_both_directions(layer: FP8Linear, dtype, most: float) -> None:
    tokens, gradient = drawn(2, 9, SIZES[0]).to(dtype), drawn(2, 9, SIZES[1], seed=2).to(dtype)
    product, of_tokens = both_ways(layer, tokens, gradient)
    scales = layer.weight.scale.double()
    weight = layer.weight.qdata.double() * scales
    assert error(product, exact(tokens) @ weight.T + layer.bias.double()) <= most
    # The scale of an output is part of what comes back from it.
    scaled = exact(gradient.float() * layer.weight.scale.T) / scales.T
    assert error(of_tokens, scaled @ weight) <= most
    assert (product.dtype, of_tokens.dtype, product.shape) == (dtype, dtype, gradient.shape)


def test_rounding_takes_four_percent_of_random_numbers_in_both_directions(plain, layer: FP8Linear) -> None:
    """Weights and tokens round to 3 bits behind the first: 2.6 % each, and their errors do not add up."""
    tokens, gradient = drawn(64, SIZES[0]), drawn(64, SIZES[1], seed=2)
    expected = linear(tokens, plain.weight, plain.bias), gradient @ plain.weight
    for found, true in zip(both_ways(layer, tokens, gradient), expected, strict=True):
        assert 0.03 < error(found, true) < 0.042
        assert float(cosine_similarity(found.flatten(), true.flatten(), dim=0)) > 0.999


@pytest.mark.parametrize("size", [1e-30, 1.0, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_size_round_alike(size: float, dtype) -> None:
    rows = drawn(5, 64).to(dtype)
    rows = rows / rows.abs().max() * size
    assert rows.isfinite().all()
    assert error(exact(rows), rows.double()) < 0.03
    assert error(exact(rows).abs().amax(1), rows.double().abs().amax(1)) < 1e-6, "the largest are exact"


def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_own_row_only(layer: FP8Linear) -> None:
    tokens = drawn(5, SIZES[0])
    tokens[1], tokens[2, 3], tokens[3, 3] = 0, torch.nan, torch.inf
    product, of_tokens = both_ways(layer, tokens, drawn(5, SIZES[1]) * torch.tensor([[1.0], [1], [1], [1], [0]]))
    assert torch.equal(product[1], layer.bias) and not product[[2, 3]].isfinite().any()
    assert product[[0, 1, 4]].isfinite().all() and of_tokens.isfinite().all()
    assert not of_tokens[4].any() and not layer(torch.zeros(2, SIZES[0]))[0].sub(layer.bias).any()


def test_a_token_does_not_depend_on_its_neighbours(layer: FP8Linear) -> None:
    tokens = drawn(9, SIZES[0])
    loud = tokens.clone()
    loud[0] *= 1e4
    assert error(layer(loud)[1:], layer(tokens)[1:]) < 1e-6


def test_the_backward_pass_keeps_the_weight_alone_and_is_not_there_where_nobody_asks(layer: FP8Linear) -> None:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(drawn(9, SIZES[0]).bfloat16().requires_grad_())
    assert [tensor is layer.weight for tensor in kept] == [True]
    assert not layer(drawn(9, SIZES[0])).requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", FUNCTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_compile_takes_several_of_them_whole(layer: FP8Linear, dtype) -> None:
    layers = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(SIZES[1], SIZES[0], dtype=dtype), layer)
    layers.requires_grad_(False)
    tokens, gradient = drawn(2, 9, SIZES[0]).to(dtype), drawn(2, 9, SIZES[1], seed=2).to(dtype)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
    for found, expected in zip(both_ways(compiled, tokens, gradient), both_ways(layers, tokens, gradient), strict=True):
        assert error(found, expected.double()) <= (1e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.filterwarnings(FUNCTION, "ignore:Your compiler for AOTAutograd is returning a function that doesn't take")
def test_compiled_layers_keep_their_weights_alone_and_round_what_they_share_once() -> None:
    """torch.compile would make the copy that the backward pass needs of a weight in the forward pass, and keep it."""
    graphs: list[torch.fx.Graph] = []

    def compiler(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return module

    make = quantize_module._layer_maker("fp8")
    layers = [FP8Linear.of(make(torch.nn.Linear(*SIZES).requires_grad_(False))) for _ in range(3)]
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(lambda tokens: sum(one(tokens) for one in layers), fullgraph=True, backend=backend)
    both_ways(compiled, drawn(9, SIZES[0]), drawn(9, SIZES[1], seed=2))
    names = [[str(node.target) for node in graph.nodes] for graph in graphs]
    assert names[0].count("aten._scaled_mm.default") == 3
    assert names[0].count("aten.linalg_vector_norm.default") == 1
    outputs = [node.meta["val"] for node in graphs[0].find_nodes(op="output")[0].args[0]]
    weights = [value for value in outputs if {*SIZES} == {*getattr(value, "shape", ())}]
    assert [tuple(value.stride()) for value in weights] == [(SIZES[0], 1)] * 3, "as they are stored"


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_tokens_and_gradients_may_lie_in_memory_as_they_like(layer: FP8Linear, layout: str) -> None:
    """GPUs want rows of contiguous numbers."""
    tokens, gradient = drawn(SIZES[0], 9).T, drawn(SIZES[1], 9, seed=2).T
    if layout == "expanded":
        tokens, gradient = tokens[:1].expand(9, -1), gradient[:1].expand(9, -1)
    assert rounded(tokens)[0].is_contiguous()
    expected = both_ways(layer, tokens.contiguous(), gradient.contiguous())
    for found, other in zip(both_ways(layer, tokens, gradient), expected, strict=True):
        assert error(found, other.double()) <= 1e-6


# In the transformer


def on_fp8(*, fp8_compute: bool = True, **changes: int):
    """The transformer of `small_transformer`, its base in fp8."""
    transformer = small_transformer(lora=False, **changes).requires_grad_(False)
    quantize_blocks(transformer, "fp8", fp8_compute=fp8_compute)
    add_lora(transformer, LoraConfig(r=4), seed=1)
    return randomise(transformer).train()


def kinds(transformer: torch.nn.Module) -> dict[str, type]:
    return {
        name.replace(".base_layer", ""): type(module)
        for name, module in transformer.named_modules()
        if isinstance(module, FP8Linear | ScaledLinear)
    }


def test_the_first_block_modulation_and_the_output_of_the_image_mlp_restore_their_weights() -> None:
    computed = {name for name, kind in kinds(on_fp8()).items() if kind is FP8Linear}
    layers = [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")]
    layers += [f"attn.add_{name}_proj" for name in "qkv"]
    layers += ["img_mlp.net.0.proj", "txt_mlp.net.0.proj", "txt_mlp.net.2"]
    assert computed == {f"transformer_blocks.{block}.{name}" for block in range(1, 6) for name in layers}


def test_layers_whose_sizes_no_gpu_multiplies_in_fp8_restore_their_weights() -> None:
    found = kinds(on_fp8(num_attention_heads=1, attention_head_dim=24, axes_dims_rope=(8, 8, 8)))
    assert set(found.values()) == {ScaledLinear}, "widths of 24, 96 and 144"


def test_the_base_is_stored_in_the_same_bytes_as_without() -> None:
    weights, others = (on_fp8(fp8_compute=how).state_dict() for how in (True, False))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        for part in ("qdata", "scale") if hasattr(weight, "qdata") else ("data",):
            assert torch.equal(getattr(weight, part), getattr(others[name], part)), name


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return gradients(on_fp8())


@pytest.mark.parametrize(("every", "offload"), [(1, 0), (2, 3)])
def test_checkpointed_and_offloaded_blocks_change_no_bit(expected, every: int, offload: int) -> None:
    transformer = on_fp8()
    checkpoint_activations(transformer, every, offload, CPU)
    found = gradients(transformer)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_on_a_model_that_has_learnt_gradients_of_a_new_adapter_point_where_those_of_the_exact_base_do(
    photos: Path,
) -> None:
    options = EncoderOptions(areas_px=(AREA_PX,))
    encoder = Encoder.open(open_pretrained(str(SMALL_MODEL)), vae_device=CPU, text_device=CPU, options=options)
    batch = one_batch(photos, encoder, count=2)
    objective = Objective(LossConfig(shift="none"), 0.0, 0, {}, CPU, torch.float32)
    found = []
    for how in ({}, {"quantize": "fp8", "fp8_compute": True}):
        transformer = transformer_of(SMALL_MODEL, **how)
        add_lora(transformer, LoraConfig(target_modules=[*LORA_TARGETS, "net.0.proj", "net.2"]), seed=0)
        for step in range(4):
            objective.loss(transformer, batch, step).backward()
        found.append({name: weight.grad for name, weight in transformer.named_parameters() if weight.grad is not None})
    up = [name for name in found[0] if "lora_B" in name and found[0][name].any()]
    cosines = {name: float(cosine_similarity(*(one[name].flatten() for one in found), dim=0)) for name in up}
    assert len(up) > 20 and min(cosines.values()) >= 0.99, min(cosines.items(), key=lambda item: item[1])


# Refusals


def test_a_device_without_products_in_fp8_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch) -> None:
    def scaled_mm(*_: object, **__: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices\n with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    with pytest.raises(ConfigError) as caught:
        load_transformer(PretrainedModel(tmp_path, FAMILIES["edit"]), torch.float32, quantize="fp8", fp8_compute=True)
    words = ["train.fp8_compute", "8.9 or more", "cpu; torch._scaled_mm is only supported", "to false"]
    assert all(word in str(caught.value) for word in words)

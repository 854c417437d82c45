"""What training takes is estimated as autograd keeps it, and advice gains what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig

from qie.config import load_config
from qie.errors import ConfigError, ModelError, QieError
from qie.pretrained import open_pretrained
from qie.training.flops import Architecture
from qie.training.memory import (
    Parameters,
    Setup,
    advice,
    estimate,
    explained_memory,
    kept_bytes,
    optimizer_bytes,
    plan_memory,
    tell_memory,
)
from qie.training.model.blocks import checkpoint_activations
from qie.training.model.load import empty_transformer
from tests.conftest import ROOT
from tests.training.small import IMAGE_TOKENS, LORA_TARGETS, inputs, small_transformer

RELEASED = {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584}
TEXT_TOKENS = 60


@pytest.fixture(scope="module")
def released() -> tuple[Setup, Setup]:
    """The released model at 1024² with one control: an adapter of rank 16 in float32, and all weights in bfloat16."""
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(**RELEASED).requires_grad_(False)
        architecture = Architecture.of(transformer.config)
        transformer.add_adapter(LoraConfig(r=16, target_modules=LORA_TARGETS))
        adapter = Parameters.of(transformer)
        everything = Parameters.of(QwenImageTransformer2DModel(**RELEASED))
    return (
        Setup(architecture, adapter, 8192, 1408),
        Setup(architecture, everything, 8192, 1408, trained_bytes=2, optimizer_bytes=4),
    )


def gb(value: float) -> float:
    return value / 1e9


def test_the_released_model_with_an_adapter(released) -> None:
    setup, _ = released
    found = estimate(setup)
    assert gb(found.weights) == pytest.approx(40.9 + 4 * 0.0236, abs=0.1)
    assert setup.parameters.trained == 60 * 4 * 16 * 2 * 3072
    assert gb(found.gradients) == pytest.approx(0.0944, rel=0.01)
    assert gb(found.optimizer) == pytest.approx(0.189, rel=0.01)
    assert gb(found.activations) == pytest.approx(60 * 9600 * 3072 * 2 / 1e9 + 1.26, abs=0.1)
    assert 46 < gb(found.total) < 50
    # Without checkpointing more than an 80 GB GPU has.
    assert 110 < gb(estimate(replace(setup, gradient_checkpointing=0)).total) < 130


@pytest.mark.parametrize(("quantize", "weights"), [("fp8", 20.6), ("int8", 20.6), ("nf4", 10.7)])
def test_the_released_model_quantised(released, quantize, weights: float) -> None:
    setup, _ = released
    assert gb(estimate(replace(setup, quantize=quantize)).weights) == pytest.approx(weights, abs=0.1)


def test_the_released_model_with_all_weights_trained(released) -> None:
    _, setup = released
    found = estimate(setup)
    assert gb(found.weights) == pytest.approx(40.9, abs=0.1)
    assert gb(found.gradients) == pytest.approx(40.9, abs=0.1)
    assert gb(found.optimizer) == pytest.approx(81.7, abs=0.1)
    assert found.workspace > 30e9, "the optimizer works on all weights at once"
    shared = estimate(replace(setup, processes=8, sharded=True))
    assert gb(shared.weights + shared.gradients + shared.optimizer) == pytest.approx(163.5 / 8, abs=0.1)
    assert estimate(replace(setup, processes=8)).gradients == 2 * found.gradients


def test_blocks_that_wait_take_no_device_memory_but_for_three(released) -> None:
    setup, _ = released
    block = setup.parameters.matrices * 2 / 60
    now = estimate(setup).weights
    assert now - estimate(replace(setup, offload_blocks=60)).weights == pytest.approx(57 * block)
    assert now - estimate(replace(setup, offload_blocks=20)).weights == pytest.approx(17 * block)
    assert estimate(replace(setup, offload_blocks=1)).weights == now


def kept_by_autograd(transformer, dtype: torch.dtype) -> int:
    """Bytes that a forward pass of one sample keeps, as on a GPU: there, autocast takes LayerNorms to float32."""
    held = {weight.untyped_storage().data_ptr() for weight in transformer.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes(), value
        return value

    for module in transformer.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    given = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) else value
        for name, value in inputs(batch=1, text_tokens=TEXT_TOKENS).items()
    }
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
    ):
        transformer(**given)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"zero_cond_t": True}, {"lora": False}, {"lora": False, "zero_cond_t": True}], ids=str
)
def test_a_block_keeps_what_autograd_keeps(changes, dtype: torch.dtype) -> None:
    def measured(blocks: int) -> tuple[float, Setup]:
        transformer = small_transformer(num_layers=blocks, **changes)
        for name, weight in transformer.named_parameters():
            weight.data = weight.data if "lora_" in name else weight.data.to(dtype)
        parameters = Parameters.of(transformer)
        setup = Setup(Architecture.of(transformer.config), parameters, IMAGE_TOKENS, TEXT_TOKENS)
        return kept_by_autograd(transformer, dtype), replace(setup, value_bytes=dtype.itemsize)

    (less, _), (more, setup) = measured(2), measured(6)
    assert kept_bytes(setup) == pytest.approx((more - less) / 4, rel=0.1)


def test_a_checkpointed_block_keeps_its_inputs() -> None:
    def measured(blocks: int) -> int:
        transformer = small_transformer(num_layers=blocks)
        checkpoint_activations(transformer, 1)
        kept: dict[int, int] = {}

        def count(_, args):
            for value in args[:2]:
                kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            held.append(args)

        held: list[object] = []
        for block in transformer.transformer_blocks:
            block.register_forward_pre_hook(count)
        transformer(**inputs(batch=1, text_tokens=TEXT_TOKENS))
        return sum(kept.values())

    transformer = small_transformer(num_layers=6)
    setup = Setup(Architecture.of(transformer.config), Parameters.of(transformer), IMAGE_TOKENS, TEXT_TOKENS)
    setup = replace(setup, value_bytes=4)
    inner = kept_bytes(setup)
    assert estimate(setup).activations - inner == pytest.approx(measured(6))
    assert estimate(replace(setup, gradient_checkpointing=2)).activations == pytest.approx(measured(6) / 2 + 4 * inner)


def test_parameters_are_counted_without_loading(tiny_edit: Path) -> None:
    checkpoint = open_pretrained(str(tiny_edit), components=("transformer",))
    empty = empty_transformer(checkpoint)
    loaded = QwenImageTransformer2DModel.from_pretrained(tiny_edit / "transformer").requires_grad_(False)
    assert all(weight.is_meta for weight in empty.parameters())
    assert Parameters.of(empty) == Parameters.of(loaded)
    assert Parameters.of(empty).frozen == sum(weight.numel() for weight in loaded.parameters())
    targets = ["to_q", "add_k_proj", "to_add_out", "txt_mlp.net.2", "img_mlp.net.2", "img_mod.1"]
    for transformer in (empty, loaded):
        transformer.add_adapter(LoraConfig(r=4, target_modules=targets))
    assert Parameters.of(empty) == Parameters.of(loaded)
    width = Architecture.of(empty.config).width
    assert (Parameters.of(empty).image_inputs, Parameters.of(empty).text_inputs) == (5 * width, 6 * width)


def test_a_config_that_makes_no_transformer_is_explained(tiny_edit: Path, tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text((tiny_edit / "model_index.json").read_text())
    config = json.loads((tiny_edit / "transformer/config.json").read_text())
    (tmp_path / "transformer/config.json").write_text(json.dumps({**config, "num_layers": "two"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        empty_transformer(open_pretrained(str(tmp_path), components=("transformer",)))


@pytest.mark.parametrize(
    ("class_path", "trained", "expected"),
    [
        ("torch.optim.AdamW", 4, 8),
        ("torch.optim.AdamW", 2, 4),
        ("torch.optim.SGD", 4, 4),
        ("bitsandbytes.optim.AdamW8bit", 4, 2),
        ("bitsandbytes.optim.PagedAdamW8bit", 4, 2),
        ("bitsandbytes.optim.Lion8bit", 4, 1),
        ("prodigyopt.Prodigy", 4, 16),
        ("torch.optim.Adafactor", 4, 0),
        ("someone.Else", 4, 8),
    ],
)
def test_the_state_of_optimizers(class_path: str, trained: int, expected: float) -> None:
    assert optimizer_bytes(class_path, trained) == expected


@pytest.mark.parametrize("class_path", ["torch.optim.AdamW", "torch.optim.RMSprop", "prodigyopt.Prodigy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_optimizers_is_what_they_allocate(class_path: str, dtype: torch.dtype) -> None:
    module, _, name = class_path.rpartition(".")
    weight = torch.nn.Parameter(torch.randn(4096, dtype=dtype))
    optimizer = getattr(pytest.importorskip(module), name)([weight])
    weight.grad = torch.randn(4096, dtype=dtype)
    optimizer.step()
    state = sum(value.nbytes for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor))
    assert state / 4096 == pytest.approx(optimizer_bytes(class_path, dtype.itemsize), abs=0.01)


def gain(line: str) -> float:
    return float(line.split(": ")[-1].split(" GB")[0])


def test_advice_names_what_gains_most_first_and_nothing_in_use(released) -> None:
    setup = replace(released[0], gradient_checkpointing=0, batch_size=2)
    lines = advice(setup)
    gains = [gain(line) for line in lines]
    assert gains == sorted(gains, reverse=True) and min(gains) > 0
    assert lines[0].startswith("train.offload_blocks=60: ")  # its blocks are checkpointed
    fields = [line.split("=")[0].split(" ")[0] for line in lines]
    assert {"train.gradient_checkpointing", "data.batch_size", "data.area_px", "model.quantize"} <= set(fields)
    assert not any(line.startswith(("optimizer", "train.ema", "FSDP", "train.trained")) for line in lines)
    frugal = replace(setup, gradient_checkpointing=1, batch_size=1, offload_blocks=60, quantize="fp8")
    assert not any(line.startswith(("train.grad", "train.off", "model.", "data.batch")) for line in advice(frugal))


def test_advice_gains_what_it_says(released) -> None:
    setup = replace(released[0], gradient_checkpointing=0)
    line = next(line for line in advice(setup) if line.startswith("train.gradient_checkpointing=true"))
    difference = estimate(setup).total - estimate(replace(setup, gradient_checkpointing=1)).total
    assert line == f"train.gradient_checkpointing=true: {difference / 1e9:.1f} GB less"


def test_advice_for_all_weights_is_about_the_optimizer_and_an_adapter(released) -> None:
    setup = replace(released[1], trained_bytes=4, optimizer_bytes=8, ema=True, processes=2)
    lines = advice(setup)
    starts = [line.split("=")[0].split(":")[0] for line in lines]
    assert starts[:2] == ["model.lora", "FSDP, configs/accelerate/fsdp2.yaml"]
    assert {"train.trained_dtype", "optimizer.class_path", "train.ema_decay"} <= set(starts)
    assert not {"model.quantize", "train.offload_blocks"} & set(starts), "neither goes with trained weights"


def test_four_bit_weights_and_waiting_blocks_are_not_advised_together(released) -> None:
    setup, _ = released
    assert not any("offload" in line for line in advice(replace(setup, quantize="nf4")))
    assert not any("nf4" in line for line in advice(replace(setup, offload_blocks=10)))


@pytest.mark.parametrize("free", [80, 40])
def test_a_run_on_a_gpu_says_what_it_needs_and_what_is_free_and_what_to_change(
    released, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 10**9, 80 * 10**9))
    said: list[str] = []
    tell_memory(released[0], torch.device("cuda"), said.append)
    total = estimate(released[0]).total / 1e9
    assert said[0] == f"the run needs about {total:.1f} GB of the GPU's memory; {free:.1f} GB are free"
    parts = [*estimate(released[0]).lines(), "to need less:", *advice(released[0])[:4]]
    assert said[1:] == ([] if free > total else ["\n".join(parts)])
    tell_memory(released[0], torch.device("cpu"), pytest.fail)


@pytest.mark.parametrize("setting", ["model.quantize=fp8", "model.quantize=int8", "train.offload_blocks=1"])
def test_what_processes_cannot_share_is_refused(setting: str) -> None:
    config = load_config(ROOT / "configs" / "edit_lora.yaml", [setting])
    with pytest.raises(ConfigError, match="spread over processes") as caught:
        plan_memory(config, None, None, SimpleNamespace(distributed_type="FSDP", num_processes=2))
    assert caught.value.where == setting.partition("=")[0]


def test_running_out_of_memory_is_explained_with_what_to_do(released) -> None:
    setup = replace(released[0], gradient_checkpointing=0)
    with pytest.raises(QieError) as caught, explained_memory(setup):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee docs")
    error = caught.value
    assert error.exit_code == 1
    assert str(error).splitlines()[0] == "the device is out of memory"
    assert f"about {estimate(setup).total / 1e9:.1f} GB" in str(error.expected)
    assert error.found == "CUDA out of memory. Tried to allocate 2 GiB."
    assert all(line in str(error.hint) for line in advice(setup))


def test_an_estimate_reads_as_a_table(released) -> None:
    found = estimate(released[0])
    assert [line.split()[0] for line in found.lines()] == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "workspace",
        "total",
    ]
    assert found.lines()[0] == "weights      41.0 GB"
    assert str(found).splitlines() == found.lines()

"""The estimate of a training step's memory is what autograd keeps, and advice gains what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig

from qie.config import load_config
from qie.data.live import LiveSamples
from qie.errors import ConfigError, ModelError, QieError
from qie.families import FAMILIES
from qie.pretrained import open_pretrained
from qie.training.flops import Architecture
from qie.training.memory import (
    Parameters,
    Setup,
    advice,
    attention_bytes,
    estimate,
    explained_memory,
    fill_memory,
    kept_bytes,
    lacking_memory,
    memory_to_fill,
    optimizer_bytes,
    plan_memory,
    recomputation,
)
from qie.training.model.adapter_file import PART
from qie.training.model.blocks import NOTHING_KEPT, KeptActivations, checkpoint_activations
from qie.training.model.dual_stream import predict_target
from qie.training.model.load import empty_transformer
from qie.training.model.lora import round_adapters
from qie.training.model.training_forward import use_training_forward
from tests.conftest import ROOT
from tests.training.small import GRIDS, IMAGE_TOKENS, LOHA, LOKR, LORA_TARGETS, inputs, small_transformer

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


BLOCK = 36 * 3072**2 * 2e-9  # GB of its matrices, in bfloat16
# Of an adapter: what a step of the released model takes in GB, by part.
ADAPTER = [
    ({}, {"weights": 41.0, "gradients": 0, "optimizer": 0.189, "activations": 60 * 9600 * 3072 * 2e-9 + 0.994}),
    ({"gradient_checkpointing": 0}, {"activations": 59.6}),
    ({"quantize": "fp8"}, {"weights": 20.6}),
    ({"quantize": "int8"}, {"weights": 20.6}),
    ({"quantize": "nf4"}, {"weights": 10.7}),
    ({"ema": True}, {"optimizer": 0.283}),
    # When most is taken, one is computed, without its text's MLP, and the next is there already.
    ({"offload_blocks": 60}, {"weights": 40.957 - (58 + 8 / 36) * BLOCK}),
    ({"offload_blocks": 20}, {"weights": 40.957 - (18 + 8 / 36) * BLOCK}),
    ({"accumulates": True}, {"gradients": 0.094}),
    ({"offload_blocks": 1}, {"weights": 41.0}),
]
ALL_WEIGHTS = [
    (
        {},
        {"weights": 40.9, "gradients": 40.9, "optimizer": 81.7, "activations": 0, "workspace": 41.9},
    ),  # the optimizer's, at once
    ({"trained_bytes": 4}, {"gradients": 81.7, "workspace": 82.8}),
    # With an optimizer that takes one weight at a time, the backward pass takes most, with autocast's copies.
    ({"trained_bytes": 4, "optimizer_bytes": 2, "gradient_checkpointing": 0}, {"activations": 60 * 2.18 + 40.9}),
    ({"processes": 8}, {"weights": 40.9, "gradients": 2 * 40.9, "optimizer": 81.7}),
    (
        {"processes": 8, "sharded": True},
        {"weights": 40.9 / 8 + 2 * 40.9 / 60, "gradients": 40.9 / 8, "optimizer": 81.7 / 8},
    ),
]


@pytest.mark.parametrize(
    ("which", "changes", "expected"), [(0, *case) for case in ADAPTER] + [(1, *case) for case in ALL_WEIGHTS]
)
def test_the_released_model_takes(released, which: int, changes, expected: dict[str, float]) -> None:
    found = estimate(replace(released[which], **changes))
    assert {part: getattr(found, part) / 1e9 for part in expected} == pytest.approx(expected, rel=0.02)
    assert found.total == sum(getattr(found, line.split()[0]) for line in found.lines()[:-1])


def kept_by_autograd(transformer, dtype: torch.dtype) -> int:
    """Bytes that a forward pass of one sample keeps, as on a GPU: there, autocast takes LayerNorms to float32. Adapters
    are trained without it."""
    autocast = dtype == torch.bfloat16 and not hasattr(transformer, "peft_config")
    held = {weight.untyped_storage().data_ptr() for weight in transformer.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes(), value
        return value

    for module in transformer.modules():
        if isinstance(module, torch.nn.LayerNorm) and autocast:
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    use_training_forward(transformer)
    given = inputs(batch=1, text_tokens=TEXT_TOKENS)
    image, times, text = (given[name].to(dtype) for name in ("hidden_states", "timestep", "encoder_hidden_states"))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
    ):
        predict_target(transformer, image, times, text, [TEXT_TOKENS], GRIDS)
    return sum(size for size, _ in kept.values())


def setup_of(transformer, value_bytes: int) -> Setup:
    architecture, parameters = Architecture.of(transformer.config), Parameters.of(transformer)
    return Setup(architecture, parameters, IMAGE_TOKENS, TEXT_TOKENS, value_bytes=value_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"lora": False}, {"zero_cond_t": True}, {"lora": LOKR}, {"lora": LOHA}],
    ids=["lora", "all weights", "zero_cond_t", "lokr", "loha"],
)
def test_a_block_keeps_what_autograd_keeps(changes, dtype: torch.dtype) -> None:
    def measured(blocks: int) -> tuple[float, Setup]:
        transformer = small_transformer(num_layers=blocks, **changes)
        for name, weight in transformer.named_parameters():
            weight.data = weight.data if PART.search(name) else weight.data.to(dtype)
        if dtype == torch.bfloat16:
            round_adapters(transformer)
        return kept_by_autograd(transformer, dtype), setup_of(transformer, dtype.itemsize)

    (less, _), (more, setup) = measured(2), measured(6)
    assert kept_bytes(setup) == pytest.approx((more - less) / 4, rel=0.1)


def test_a_checkpointed_block_keeps_its_inputs() -> None:
    transformer = small_transformer(num_layers=6)
    setup = setup_of(transformer, 4)
    checkpoint_activations(transformer, 1)
    kept: dict[int, int] = {}
    held: list[object] = []

    def count(_, args):
        kept.update({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in args[:2]})
        held.append(args)

    for block in transformer.transformer_blocks:
        block.register_forward_pre_hook(count)
    transformer(**inputs(batch=1, text_tokens=TEXT_TOKENS))
    measured, inner = sum(kept.values()), kept_bytes(setup)
    assert estimate(setup).activations - inner == pytest.approx(measured)
    every_other = replace(setup, gradient_checkpointing=2)
    # The last block's are freed before another is recomputed.
    assert estimate(every_other).activations == pytest.approx(measured / 2 + 3 * inner)


def test_what_blocks_keep_is_counted_until_their_backward_pass(released) -> None:
    setup = released[0]
    block, attention, inputs = kept_bytes(setup), attention_bytes(setup), 9600 * 3072 * 2

    def activations(blocks: int, attention: int) -> float:
        return estimate(replace(setup, kept=KeptActivations(blocks, attention))).activations

    assert attention == 9600 * (3072 * 2 + 24 * 4)
    assert activations(0, 0) == 60 * inputs + block
    # The block that is recomputed keeps its attention already.
    assert activations(0, 60) == 60 * inputs + 59 * attention + block
    # Where the first block of all is recomputed, those that keep theirs are through.
    assert activations(1, 0) == 59 * inputs + block
    assert activations(3, 60) == 57 * inputs + 57 * attention + 3 * block
    assert activations(60, 60) == 60 * block
    # Of the last block, the controls and the text have keys and values alone: the block before it takes most.
    setup = replace(setup, target_tokens=4096)
    assert activations(0, 0) == 59 * inputs + block
    assert 59.6 * block < activations(60, 60) < 59.7 * block


@pytest.mark.parametrize("changes", [{}, {"quantize": "fp8"}, {"offload_blocks": 20, "compiled": True}], ids=str)
@pytest.mark.parametrize("gb", [10, 30, 49, 60, 72, 140])
def test_memory_is_filled_with_attention_first_and_not_beyond_the_budget(released, changes, gb: int) -> None:
    setup = replace(released[0], **changes)
    filled = fill_memory(setup, gb * 1e9)
    blocks, attention = len(filled.checkpointed), len(filled.keeping_attention)
    offloaded = 20 if changes.get("compiled") else 0
    assert replace(filled, kept=NOTHING_KEPT) == setup
    if estimate(setup).total > gb * 1e9:
        assert filled == setup
        return
    assert estimate(filled).total <= gb * 1e9
    more = (
        KeptActivations(filled.kept.blocks + 1, 60)
        if attention == blocks - offloaded
        else KeptActivations(0, attention + 1)
    )
    assert blocks == offloaded or estimate(replace(setup, kept=more)).total > gb * 1e9
    assert blocks == 60 or attention == blocks - offloaded
    assert filled.kept.attention == 60 or filled.kept.blocks == 0


def test_without_a_fused_kernel_whole_blocks_alone_are_kept(released) -> None:
    kept = fill_memory(replace(released[0], fused_attention=False), 60e9).kept
    assert kept.blocks > 0 and kept.attention == 0


def test_what_auto_may_fill_is_free_and_neither_reserved_nor_promised_to_others(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))

    def gb(*settings: str, samples: object = None, device: str = "cuda:0") -> float:
        config = load_config(ROOT / "configs" / "edit_lora.yaml", settings)
        return memory_to_fill(config, SimpleNamespace(samples=samples), torch.device(device)) / 1e9

    assert gb() == gb("cache.keep.latents=cpu") == 62
    assert gb("cache.keep.embeds=gpu") == 54
    assert gb("cache.write_through=true") == gb(device="cpu") == 0
    live = LiveSamples(*[None] * 4)
    monkeypatch.setattr(LiveSamples, "lacking", ())
    assert gb(samples=live) == 62
    monkeypatch.setattr(LiveSamples, "lacking", (3,))
    assert gb(samples=live) == 0


def test_parameters_are_counted_without_loading(tiny_edit: Path, tmp_path: Path) -> None:
    empty = empty_transformer(open_pretrained(str(tiny_edit), components=("transformer",)))
    loaded = QwenImageTransformer2DModel.from_pretrained(tiny_edit / "transformer").requires_grad_(False)
    assert all(weight.is_meta for weight in empty.parameters())
    assert Parameters.of(empty) == Parameters.of(loaded)
    assert Parameters.of(empty).frozen == sum(weight.numel() for weight in loaded.parameters())
    targets = ["to_q", "add_k_proj", "to_add_out", "txt_mlp.net.2", "img_mlp.net.2", "img_mod.1"]
    for transformer in (empty, loaded):
        transformer.add_adapter(LoraConfig(r=4, target_modules=targets))
    assert Parameters.of(empty) == Parameters.of(loaded)
    width = Architecture.of(empty.config).width
    assert (Parameters.of(empty).image_inputs, Parameters.of(empty).text_inputs) == (9 * width, 5 * width)
    assert (Parameters.of(empty).image_outputs, Parameters.of(empty).text_outputs) == (0, width)

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
        ("torch.optim.RMSprop", 4, 4),
        ("torch.optim.RMSprop", 2, 2),
        ("bitsandbytes.optim.AdamW8bit", 4, 2),
        ("bitsandbytes.optim.PagedAdamW8bit", 4, 2),
        ("bitsandbytes.optim.Lion8bit", 4, 1),
        ("prodigyopt.Prodigy", 4, 16),
        ("prodigyopt.Prodigy", 2, 8),
        ("torch.optim.Adafactor", 4, 0),
        ("someone.Else", 4, 8),
    ],
)
def test_the_state_of_optimizers_is_known_and_is_what_they_allocate(class_path: str, trained: int, expected) -> None:
    assert optimizer_bytes(class_path, trained) == expected
    module, _, name = class_path.rpartition(".")
    if name in ("AdamW", "RMSprop", "Prodigy"):
        weight = torch.nn.Parameter(torch.randn(4096, dtype=torch.float32 if trained == 4 else torch.bfloat16))
        optimizer = getattr(pytest.importorskip(module), name)([weight])
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        state = sum(value.nbytes for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor))
        assert state / 4096 == pytest.approx(expected, abs=0.01)


PLENTY = {"gradient_checkpointing": 0, "batch_size": 2}
FRUGAL = {"gradient_checkpointing": 1, "batch_size": 1, "offload_blocks": 60, "quantize": "fp8"}
WHOLE = {"trained_bytes": 4, "optimizer_bytes": 8, "ema": True, "processes": 2}


@pytest.mark.parametrize(
    ("which", "changes", "first", "named", "unnamed"),
    [
        (0, PLENTY, ["offload"], ["gradient_ch", "batch", "area", "quantize"], ["optimizer", "ema", "FSDP", "trained"]),
        (0, FRUGAL, [], [], ["gradient_ch", "offload", "model.", "batch"]),
        (0, {"quantize": "nf4"}, [], [], ["offload"]),  # neither goes with the other
        (0, {"offload_blocks": 10}, [], ["quantize=fp8"], ["nf4"]),
        # Neither fp8 nor offloading goes with trained weights.
        (1, WHOLE, ["model.lora", "FSDP"], ["trained_dtype", "optimizer", "ema"], ["quantize", "offload"]),
    ],
)
def test_advice_names_what_gains_most_first_and_nothing_in_use(released, which, changes, first, named, unnamed) -> None:
    setup = replace(released[which], **changes)
    lines = advice(setup)
    gains = [float(line.split(": ")[-1].split(" GB")[0]) for line in lines]
    assert gains == sorted(gains, reverse=True) and all(gain > 0 for gain in gains)
    assert all(word in line for word, line in zip(first, lines, strict=False))
    assert not [word for word in named if not any(word in line for line in lines)]
    assert not [word for word in unnamed if any(word in line for line in lines)]
    if which == 0 and changes == PLENTY:
        difference = estimate(setup).total - estimate(replace(setup, gradient_checkpointing=1)).total
        assert f"train.gradient_checkpointing=true: {difference / 1e9:.1f} GB less" in lines


@pytest.mark.parametrize("free", [80, 40])
def test_a_run_that_needs_more_memory_than_is_free_is_warned_of_with_what_to_change(
    released, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 10**9, 80 * 10**9))
    expected = estimate(released[0])
    told = list(lacking_memory(released[0], torch.device("cuda")))
    assert bool(told) == (free * 1e9 < expected.total)
    for line in told:
        assert line.startswith(
            f"warning: the run needs about {expected.total / 1e9:.1f} GB of the GPU's memory (weights"
        )
        assert line.endswith(f", and {free:.1f} GB are free; to need less: " + "; ".join(advice(released[0])[:4]))
    assert not list(lacking_memory(released[0], torch.device("cpu")))
    kept = replace(released[0], kept=KeptActivations(2, 60))
    assert recomputation(kept) == "58 of 60 blocks are recomputed, 58 of them without their attention"
    assert expected.lines()[0] == "weights      41.0 GB" and str(expected).splitlines() == expected.lines()
    assert expected.lines()[-1].startswith("total ")


PRETRAINED = SimpleNamespace(family=FAMILIES["edit"])
NO_COLUMNS = SimpleNamespace(shape_names=[], lengths=np.array([]))


@pytest.mark.parametrize("setting", ["model.quantize=fp8", "model.quantize=int8", "train.offload_blocks=1"])
def test_weights_that_processes_cannot_share_are_refused(setting: str) -> None:
    config = load_config(ROOT / "configs" / "edit_lora.yaml", [setting])
    with pytest.raises(ConfigError, match="sharded over processes") as caught:
        group = SimpleNamespace(distributed_type="FSDP", num_processes=2)
        plan_memory(config, PRETRAINED, SimpleNamespace(samples=SimpleNamespace(columns=NO_COLUMNS)), group)
    assert caught.value.where == setting.partition("=")[0]


def test_running_out_of_memory_is_explained_with_what_to_do(released) -> None:
    setup = replace(released[0], gradient_checkpointing=0)
    with pytest.raises(QieError, match="the device ran out of memory") as caught, explained_memory(setup):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee docs")
    assert caught.value.exit_code == 1
    assert f"about {estimate(setup).total / 1e9:.1f} GB" in str(caught.value.expected)
    assert caught.value.found == "CUDA out of memory. Tried to allocate 2 GiB."
    assert all(line in str(caught.value.hint) for line in advice(setup))

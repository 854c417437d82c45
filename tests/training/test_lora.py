"""Adapters: what they begin with, what is trained, and what is saved, loaded and refused."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qie.config import AdapterConfig, LoraConfig
from qie.errors import ConfigError, QieError
from qie.training.model.adapter_file import ADAPTER_FILE
from qie.training.model.lora import adapter_tensors, add_frozen_adapters, add_lora, load_adapter, save_adapter
from tests.training.adapters import call, one_batch, randomise, trained_adapter, transformer_of

KINDS = [
    # alpha is not r: an adapter without its alpha would be loaded at another strength.
    pytest.param({"r": 4, "lora_alpha": 10.0}, id="plain"),
    pytest.param({"r": 4, "lora_alpha": 10.0, "use_rslora": True}, id="rslora"),
    pytest.param({"r": 4, "lora_alpha": 10.0, "use_dora": True}, id="dora"),
    pytest.param({"r": 4, "lora_alpha": 10.0, "target_modules": r".*\.img_mlp\.net\.(0\.proj|2)"}, id="expression"),
]
QUANTIZED = [None, "fp8", "int8", "nf4"]


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    return one_batch(photos, encoder)


def pipeline(folder: Path) -> diffusers.QwenImageEditPipeline:
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    return diffusers.QwenImageEditPipeline(transformer=transformer_of(folder), **parts)


def weights(transformer) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def equal_but_for_rounding(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To 1e-5 of the spread. Weights that diffusers reads from a file lie at any address, copies at multiples of 64, on
    which the last bits of a product depend on some CPUs.
    """
    return bool((found - expected).abs().max() < 1e-5 * expected.std())


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_loads_the_adapter_and_computes_the_same(tiny_edit: Path, batch, tmp_path: Path, kind) -> None:
    trained = trained_adapter(tiny_edit, **kind)
    save_adapter(trained, tmp_path)
    pipe = pipeline(tiny_edit)
    plain = call(pipe.transformer, batch)
    pipe.load_lora_weights(tmp_path)

    expected = call(trained, batch)
    assert (expected - plain).abs().max() > 0.1, "the adapter does nothing"
    assert equal_but_for_rounding(call(pipe.transformer, batch), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_goes_back_into_a_run(tiny_edit: Path, batch, tmp_path: Path, kind) -> None:
    trained = trained_adapter(tiny_edit, **kind)
    save_adapter(trained, tmp_path)
    fresh = transformer_of(tiny_edit)
    add_lora(fresh, LoraConfig(**kind), seed=9)
    load_adapter(adapter_tensors(fresh), tmp_path)
    assert same(weights(fresh), weights(trained))
    # Both hold copies of the adapter, equally aligned, over a base of the same file.
    assert torch.equal(call(fresh.eval(), batch), call(trained, batch))


def test_equal_adapters_are_equal_files_and_other_values_can_be_saved(tiny_edit: Path, tmp_path: Path) -> None:
    trained = trained_adapter(tiny_edit, r=4, use_dora=True)
    state = adapter_tensors(trained)
    save_adapter(trained, tmp_path / "a")
    expected = (tmp_path / "a" / ADAPTER_FILE).read_bytes()
    for _ in range(8):  # an order that varies is the same half the time
        save_adapter(trained, tmp_path / "b", dict(reversed(state.items())))
        assert (tmp_path / "b" / ADAPTER_FILE).read_bytes() == expected
    save_adapter(trained, tmp_path / "c", {name: tensor + 1 for name, tensor in state.items()})
    saved = load_file(tmp_path / "c" / ADAPTER_FILE)
    assert all(torch.equal(saved[f"transformer.{name}"], tensor + 1) for name, tensor in state.items())
    assert sum("magnitude" in name for name in saved) == len(saved) // 3


@pytest.mark.parametrize("other", [{"r": 8}, {"r": 4, "target_modules": ["to_q"]}, {"r": 4, "use_dora": True}])
def test_another_adapter_is_refused_and_changes_nothing(tiny_edit: Path, tmp_path: Path, other) -> None:
    save_adapter(trained_adapter(tiny_edit, r=4), tmp_path)
    run = transformer_of(tiny_edit)
    add_lora(run, LoraConfig(**other), seed=0)
    before = adapter_tensors(run)
    with pytest.raises(QieError, match="other tensors") as caught:
        load_adapter(adapter_tensors(run), tmp_path)
    assert "transformer_blocks.0.attn" in str(caught.value) and "rank 4" in str(caught.value)
    assert same(adapter_tensors(run), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", QUANTIZED)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({}, id="gaussian"),
        pytest.param({"init_lora_weights": "kaiming"}, id="kaiming"),
        pytest.param({"use_dora": True}, id="dora"),
    ],
)
def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(tiny_edit: Path, batch, kind, quantize, dtype) -> None:
    inputs = batch.to(torch.device("cpu"), dtype)
    transformer = transformer_of(tiny_edit, dtype, quantize=quantize).eval()
    expected = call(transformer, inputs)
    add_lora(transformer, LoraConfig(r=4, **kind), seed=0)
    # The same products, plus zero; a magnitude over the length that it was made from is exactly 1.
    assert torch.equal(call(transformer, inputs), expected)
    trained = weights(transformer)
    assert trained and all(".lora_" in name for name in trained)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_an_orthogonal_start_changes_nothing_but_rounding_though_no_matrix_is_zero(
    tiny_edit: Path, batch, quantize
) -> None:
    transformer = transformer_of(tiny_edit, quantize=quantize).eval()
    expected = call(transformer, batch)
    add_lora(transformer, LoraConfig(r=4, init_lora_weights="orthogonal"), seed=0)
    assert all(weight.abs().max() > 0.01 for weight in weights(transformer).values())
    assert equal_but_for_rounding(call(transformer, batch), expected)


def test_an_orthogonal_start_of_an_odd_rank_is_refused(tiny_edit: Path) -> None:
    with pytest.raises(ConfigError, match="even rank"):
        add_lora(transformer_of(tiny_edit), LoraConfig(r=3, init_lora_weights="orthogonal"), seed=0)


@pytest.mark.parametrize("kind", ["gaussian", "kaiming", "orthogonal"])
def test_what_an_adapter_begins_with_follows_from_its_seed_alone(tiny_edit: Path, kind) -> None:
    def begun(seed: int, before: int) -> dict[str, torch.Tensor]:
        transformer = transformer_of(tiny_edit)
        torch.manual_seed(before)
        expected = torch.rand(3)
        torch.manual_seed(before)
        add_lora(transformer, LoraConfig(r=4, init_lora_weights=kind), seed)
        assert torch.equal(torch.rand(3), expected), "the process's own random numbers are others"
        return weights(transformer)

    assert same(begun(1, before=1), begun(1, before=2))
    assert not same(begun(1, before=1), begun(2, before=1))


def test_the_adapter_is_kept_in_the_dtype_asked_for(tiny_edit: Path) -> None:
    transformer = transformer_of(tiny_edit)
    add_lora(transformer, LoraConfig(r=4, use_dora=True), seed=0, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in weights(transformer).values()} == {torch.bfloat16}
    assert transformer.proj_out.weight.dtype == torch.float32


@pytest.mark.parametrize("targets", [["to_qq"], ["to_q", "nothing"], "no.*such", r".*img_mlp\.net.*", "(", "", []])
def test_a_target_that_names_no_linear_layer_is_refused_with_near_names(tiny_edit: Path, targets) -> None:
    with pytest.raises(ConfigError) as caught:
        add_lora(transformer_of(tiny_edit), LoraConfig(target_modules=targets), seed=0)
    assert "model.lora.target_modules" in str(caught.value)
    assert "to_q" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_from_another_adapter(tiny_edit: Path, tmp_path: Path, kind) -> None:
    first = trained_adapter(tiny_edit, **kind)
    save_adapter(first, tmp_path)
    for path in (tmp_path, tmp_path / ADAPTER_FILE):
        second = transformer_of(tiny_edit)
        add_lora(second, LoraConfig(**kind, continue_from=str(path)), seed=5)
        assert same(weights(second), weights(first))


@pytest.mark.parametrize("style", ["no prefix", "kohya"])
def test_a_run_continues_from_an_adapter_of_others(tiny_edit: Path, batch, tmp_path: Path, style) -> None:
    """Without metadata: alpha is the rank, or stands beside the weights."""
    first = trained_adapter(tiny_edit, r=4, lora_alpha=4.0 if style == "no prefix" else 10.0)
    state = adapter_tensors(first)
    if style == "kohya":
        names = {name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up") for name in state}
        state = {f"diffusion_model.{names[name]}": tensor for name, tensor in state.items()}
        alphas = {name.replace("lora_down.weight", "alpha") for name in state if "lora_down" in name}
        state |= {name: torch.tensor(10.0) for name in alphas}
    save_file(state, tmp_path / "lora.safetensors")
    second = transformer_of(tiny_edit)
    add_lora(second, LoraConfig(r=4, lora_alpha=4.0, continue_from=str(tmp_path / "lora.safetensors")), seed=5)
    assert equal_but_for_rounding(call(second.eval(), batch), call(first, batch))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"r": 8}, ["rank 4", "rank 8", "attn.to_k.lora_A.weight is [4, 32], not [8, 32]"]),
        ({"r": 4, "target_modules": ["to_q"]}, ["to_k.lora_A.weight is too many"]),
        ({"r": 4, "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "proj_out"]}, ["proj_out.lora_A.weight is"]),
        ({"r": 4, "lora_alpha": 8.0}, ["scaled by 2.5", "scaled by 2", "lora_alpha has to be 10"]),
        ({"r": 4, "lora_alpha": 10.0, "use_rslora": True}, ["scaled by 5", "lora_alpha has to be 5"]),
    ],
)
def test_an_adapter_that_is_not_the_one_described_is_not_continued(tiny_edit: Path, tmp_path: Path, section, words):
    save_adapter(trained_adapter(tiny_edit, r=4, lora_alpha=10.0), tmp_path)
    with pytest.raises(ConfigError) as caught:
        add_lora(transformer_of(tiny_edit), LoraConfig(**section, continue_from=str(tmp_path)), seed=0)
    assert all(word in str(caught.value) for word in ["model.lora.continue_from", ADAPTER_FILE, *words])


def write_nothing(path: Path) -> None:
    pass


def write_noise(path: Path) -> None:
    path.write_bytes(b"no safetensors")


def write_dora_of_others(path: Path) -> None:
    save_file({"diffusion_model.img_in.dora_scale": torch.ones(1)}, path)


@pytest.mark.parametrize("write", [write_nothing, write_noise, write_dora_of_others])
def test_what_is_no_readable_adapter_is_refused(tiny_edit: Path, tmp_path: Path, write) -> None:
    path = tmp_path / "lora.safetensors"
    write(path)
    with pytest.raises(ConfigError, match=r"model\.lora\.continue_from|cannot be read"):
        add_lora(transformer_of(tiny_edit), LoraConfig(continue_from=str(path)), seed=0)
    with pytest.raises(ConfigError, match=r"model\.adapters\.0\.path|cannot be read"):
        add_frozen_adapters(transformer_of(tiny_edit), [AdapterConfig(path=str(path))])


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # the pipeline's, which has several as well
@pytest.mark.parametrize("frozen_first", [True, False])
def test_frozen_adapters_take_part_at_their_scale_and_are_neither_trained_nor_saved(
    tiny_edit: Path, batch, tmp_path: Path, frozen_first
) -> None:
    adapters = []
    pipe = pipeline(tiny_edit)
    kinds = [{"r": 2, "lora_dropout": 0.5}, {"r": 3, "lora_alpha": 5.0, "target_modules": ["to_q", "img_mod.1"]}]
    for number, kind in enumerate(kinds):
        save_adapter(trained_adapter(tiny_edit, seed=number, **kind), tmp_path / str(number))
        adapters.append(AdapterConfig(path=str(tmp_path / str(number)), scale=0.5 - number))
        pipe.load_lora_weights(tmp_path / str(number), adapter_name=str(number))
    section = LoraConfig(r=4, lora_alpha=10.0)
    transformer = transformer_of(tiny_edit)
    if frozen_first:
        add_frozen_adapters(transformer, adapters)
    add_lora(transformer, section, seed=1)
    if not frozen_first:
        add_frozen_adapters(transformer, adapters)
    assert weights(transformer) and all(".default." in name for name in weights(transformer))

    pipe.set_adapters(["0", "1"], [0.5, -0.5])
    # In training, too: what was trained with dropout has none here.
    assert equal_but_for_rounding(call(transformer.train(), batch), call(pipe.transformer.eval(), batch))

    save_adapter(randomise(transformer), tmp_path / "trained")
    assert len(load_file(tmp_path / "trained" / ADAPTER_FILE)) == len(weights(transformer))
    pipe.load_lora_weights(tmp_path / "trained", adapter_name="trained")
    pipe.set_adapters(["0", "1", "trained"], [0.5, -0.5, 1.0])
    expected = call(pipe.transformer.eval(), batch)
    assert equal_but_for_rounding(call(transformer, batch), expected)


def test_a_frozen_adapter_of_another_model_is_refused(tiny_edit: Path, tmp_path: Path) -> None:
    names = ["transformer.somewhere.else.lora_A.weight", "transformer.somewhere.else.lora_B.weight"]
    save_file(dict(zip(names, (torch.ones(2, 32), torch.ones(32, 2)), strict=True)), tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError) as caught:
        add_frozen_adapters(transformer_of(tiny_edit), [AdapterConfig(path=str(tmp_path / "lora.safetensors"))])
    assert "somewhere.else" in str(caught.value) and "model.adapters.0.path" in str(caught.value)


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_the_libraries_say_nothing(tiny_edit: Path, tmp_path: Path, quantize, caplog, capfd) -> None:
    section = LoraConfig(r=4, use_dora=True)
    save_adapter(trained_adapter(tiny_edit, r=4, use_dora=True), tmp_path)
    # What they say when they are first imported is not this test's: it is done by now.
    transformer_of(tiny_edit, quantize=quantize)
    capfd.readouterr()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        transformer = transformer_of(tiny_edit, quantize=quantize)
        add_frozen_adapters(transformer, [AdapterConfig(path=str(tmp_path))])
        add_lora(transformer, section.model_copy(update={"continue_from": str(tmp_path)}), seed=0)
        save_adapter(transformer, tmp_path / "again")
        load_adapter(adapter_tensors(transformer), tmp_path / "again")
    assert caplog.text == "" and capfd.readouterr() == ("", "")
    with safe_open(tmp_path / "again" / ADAPTER_FILE, "pt") as opened:
        assert len(list(opened.keys())) == 3 * 8

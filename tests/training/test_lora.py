"""Adapters: how they begin, what is trained, and what is saved, loaded and refused."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from qie.config import AdapterConfig, LoraConfig
from qie.errors import ConfigError, QieError
from qie.training.model.adapter_file import ADAPTER_FILE
from qie.training.model.lora import adapter_tensors, add_frozen_adapters, add_lora, load_adapter, save_adapter
from tests.training.adapters import call, one_batch, randomise, trained_adapter, transformer_of

# alpha is not r: an adapter without its alpha would be loaded at another strength.
PLAIN = {"r": 4, "lora_alpha": 10.0}
KINDS = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(PLAIN | {"use_rslora": True}, id="rslora"),
    pytest.param(PLAIN | {"use_dora": True}, id="dora"),
    pytest.param(PLAIN | {"target_modules": r".*\.img_mlp\.net\.(0\.proj|2)"}, id="expression"),
]
QUANTIZED = [None, "fp8", "int8", "nf4"]


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    return one_batch(photos, encoder)


def pipeline(folder: Path) -> diffusers.QwenImageEditPipeline:
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    return diffusers.QwenImageEditPipeline(transformer=transformer_of(folder), **parts)


def with_lora(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **section):
    transformer = transformer_of(folder)
    add_lora(transformer, LoraConfig(**section), seed, dtype=dtype)
    return transformer


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
def test_a_saved_adapter_is_the_same_in_diffusers_in_its_run_and_in_one_that_continues_from_it(
    tiny_edit: Path, batch, tmp_path: Path, kind
) -> None:
    trained = trained_adapter(tiny_edit, **kind)
    expected = call(trained, batch)
    save_adapter(trained, tmp_path)

    resumed = with_lora(tiny_edit, seed=9, **kind)
    load_adapter(adapter_tensors(resumed), tmp_path)
    assert same(weights(resumed), weights(trained))
    # Both hold copies of the adapter, equally aligned, over a base of the same file.
    assert torch.equal(call(resumed.eval(), batch), expected)
    for path in (tmp_path, tmp_path / ADAPTER_FILE):
        assert same(weights(with_lora(tiny_edit, **kind, continue_from=str(path))), weights(trained))

    pipe = pipeline(tiny_edit)
    assert (expected - call(pipe.transformer, batch)).abs().max() > 0.1, "the adapter does nothing"
    pipe.load_lora_weights(tmp_path)
    assert equal_but_for_rounding(call(pipe.transformer, batch), expected)


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


OTHERS = [
    ({"r": 8}, ["rank 4", "attn.to_k.lora_A.weight is [4, 32], not [8, 32]"]),
    ({"r": 4, "target_modules": ["to_q"]}, ["rank 4", "transformer_blocks.0.attn.to_k.lora_A.weight is too many"]),
    ({"r": 4, "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "proj_out"]}, ["proj_out.lora_A.weight is mis"]),
    ({"r": 4, "use_dora": True}, ["lora_magnitude_vector", "is missing"]),
]
SCALED = [
    (PLAIN | {"lora_alpha": 8.0}, ["scaled by 2.5", "scaled by 2", "lora_alpha has to be 10"]),
    (PLAIN | {"use_rslora": True}, ["scaled by 5", "lora_alpha has to be 5"]),
]


@pytest.mark.parametrize(("section", "words"), [*OTHERS, *SCALED])
def test_an_adapter_of_other_tensors_or_scale_is_refused_and_changes_nothing(
    tiny_edit: Path, tmp_path: Path, section, words
) -> None:
    save_adapter(trained_adapter(tiny_edit, **PLAIN), tmp_path)
    with pytest.raises(ConfigError) as refused:
        with_lora(tiny_edit, **section, continue_from=str(tmp_path))
    assert all(word in str(refused.value) for word in ["model.lora.continue_from", ADAPTER_FILE, *words])
    if (section, words) in OTHERS:  # a resumed run has compared the scales
        run = adapter_tensors(with_lora(tiny_edit, **section))
        before = {name: tensor.clone() for name, tensor in run.items()}
        with pytest.raises(QieError, match="other tensors") as caught:
            load_adapter(run, tmp_path)
        assert all(word in str(caught.value) for word in words)
        assert same(run, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", QUANTIZED)
@pytest.mark.parametrize("kind", [{}, {"init_lora_weights": "kaiming"}, {"use_dora": True}], ids=str)
def test_a_new_adapter_changes_nothing_and_only_it_is_trained(tiny_edit: Path, batch, kind, quantize, dtype) -> None:
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
    with pytest.raises(ConfigError, match="even rank"):
        add_lora(transformer_of(tiny_edit), LoraConfig(r=3, init_lora_weights="orthogonal"), seed=0)


@pytest.mark.parametrize("kind", ["gaussian", "kaiming", "orthogonal"])
def test_the_first_weights_follow_from_the_seed_alone(tiny_edit: Path, kind) -> None:
    def first(seed: int, before: int) -> dict[str, torch.Tensor]:
        transformer = transformer_of(tiny_edit)
        torch.manual_seed(before)
        expected = torch.rand(3)
        torch.manual_seed(before)
        add_lora(transformer, LoraConfig(r=4, init_lora_weights=kind), seed)
        assert torch.equal(torch.rand(3), expected), "the process's own random numbers are others"
        return weights(transformer)

    assert same(first(1, before=1), first(1, before=2))
    assert not same(first(1, before=1), first(2, before=1))


def test_the_adapter_is_kept_in_the_dtype_asked_for(tiny_edit: Path) -> None:
    transformer = with_lora(tiny_edit, dtype=torch.bfloat16, r=4, use_dora=True)
    assert {parameter.dtype for parameter in weights(transformer).values()} == {torch.bfloat16}
    assert transformer.proj_out.weight.dtype == torch.float32


@pytest.mark.parametrize("targets", [["to_qq"], ["to_q", "nothing"], "no.*such", r".*img_mlp\.net.*", "(", "", []])
def test_a_target_that_names_no_linear_layer_is_refused_with_near_names(tiny_edit: Path, targets) -> None:
    with pytest.raises(ConfigError) as caught:
        with_lora(tiny_edit, target_modules=targets)
    assert "model.lora.target_modules" in str(caught.value) and "to_q" in str(caught.value)


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
    second = with_lora(tiny_edit, r=4, lora_alpha=4.0, continue_from=str(tmp_path / "lora.safetensors"))
    assert equal_but_for_rounding(call(second.eval(), batch), call(first, batch))


FAULTS = {
    "missing": (None, "no such adapter"),
    "noise": (b"no safetensors", "cannot be read"),
    "DoRA of others": ({"diffusion_model.img_in.dora_scale": torch.ones(1)}, "cannot be read"),
    "another model": (
        {
            f"transformer.somewhere.lora_{one}.weight": torch.ones(shape)
            for one, shape in (("A", (2, 32)), ("B", (32, 2)))
        },
        "somewhere",
    ),
    "half a layer": ("transformer_blocks.0.attn.to_q.lora_B.weight", "to_q.lora_B"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_no_adapter_of_the_model_is_refused_by_its_place(tiny_edit: Path, tmp_path: Path, fault) -> None:
    path, (content, words) = tmp_path / "lora.safetensors", FAULTS[fault]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        state = adapter_tensors(trained_adapter(tiny_edit, r=4))
        save_file({name: tensor for name, tensor in state.items() if name != content}, path)
    elif content:
        save_file(content, path)
    with pytest.raises(ConfigError, match=words) as continued:
        with_lora(tiny_edit, continue_from=str(path))
    with pytest.raises(ConfigError, match=words) as frozen:
        add_frozen_adapters(transformer_of(tiny_edit), [AdapterConfig(path=str(path))])
    assert "model.lora.continue_from" in str(continued.value) and "model.adapters.0.path" in str(frozen.value)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # the pipeline's, which has several as well
@pytest.mark.parametrize("frozen_first", [True, False])
def test_frozen_adapters_take_part_at_their_scale_and_are_neither_trained_nor_saved(
    tiny_edit: Path, batch, tmp_path: Path, frozen_first
) -> None:
    pipe, transformer, adapters = pipeline(tiny_edit), transformer_of(tiny_edit), []
    kinds = [{"r": 2, "lora_dropout": 0.5}, {"r": 3, "lora_alpha": 5.0, "target_modules": ["to_q", "img_mod.1"]}]
    for number, kind in enumerate(kinds):
        save_adapter(trained_adapter(tiny_edit, seed=number, **kind), tmp_path / str(number))
        adapters.append(AdapterConfig(path=str(tmp_path / str(number)), scale=0.5 - number))
        pipe.load_lora_weights(tmp_path / str(number), adapter_name=str(number))
    if frozen_first:
        add_frozen_adapters(transformer, adapters)
    add_lora(transformer, LoraConfig(**PLAIN), seed=1)
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
    assert equal_but_for_rounding(call(transformer, batch), call(pipe.transformer.eval(), batch))


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_the_libraries_say_nothing(tiny_edit: Path, tmp_path: Path, quantize, caplog, capfd) -> None:
    save_adapter(trained_adapter(tiny_edit, r=4, use_dora=True), tmp_path)
    # What they say when they are first imported is not this test's: it is done by now.
    transformer_of(tiny_edit, quantize=quantize)
    capfd.readouterr()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        transformer = transformer_of(tiny_edit, quantize=quantize)
        add_frozen_adapters(transformer, [AdapterConfig(path=str(tmp_path))])
        add_lora(transformer, LoraConfig(r=4, use_dora=True, continue_from=str(tmp_path)), seed=0)
        save_adapter(transformer, tmp_path / "again")
        load_adapter(adapter_tensors(transformer), tmp_path / "again")
    assert caplog.text == "" and capfd.readouterr() == ("", "")
    assert len(load_file(tmp_path / "again" / ADAPTER_FILE)) == 3 * 8

"""Adapters: how they begin, what is trained, and what is saved, loaded, exported, merged and refused."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from pathlib import Path

import diffusers
import pytest
import torch
from click.testing import CliRunner
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qie.cli import one_command
from qie.config import AdapterConfig, LoraConfig
from qie.errors import ConfigError, QieError, UsageError
from qie.pretrained import open_pretrained
from qie.training.model import adapter_file
from qie.training.model.adapter_file import ADAPTER_FILE, export_adapter, find_adapter
from qie.training.model.lora import (
    adapter_tensors,
    add_frozen_adapters,
    add_lora,
    load_adapter,
    merge_adapter,
    round_adapters,
    save_adapter,
    without_train_only,
)
from tests.training.adapters import call, one_batch, randomise, trained_adapter, transformer_of
from tests.training.small import WIDTH, small_transformer

# The linear layers of ComfyUI's model, `.weight` left off: comfyanonymous/ComfyUI comfy/ldm/qwen_image/model.py.
COMFYUI_BLOCK = [
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")),
    *("attn.to_out.0", "attn.to_add_out", "img_mod.1", "txt_mod.1"),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
]
COMFYUI_OTHER = [
    *("img_in", "txt_in", "proj_out", "norm_out.linear"),
    *(f"time_text_embed.timestep_embedder.linear_{n}" for n in (1, 2)),
]
EVERY_LAYER = ".*(" + "|".join(name.replace(".", r"\.") for name in COMFYUI_BLOCK + COMFYUI_OTHER) + ")"

# alpha is not r: an adapter without its alpha would be loaded at another strength.
PLAIN = {"r": 4, "lora_alpha": 10.0}
QUANTIZED = [None, "fp8", "int8", "nf4"]
MERGED = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    return one_batch(photos, encoder)


def pipeline(folder: Path, lora: Path | None = None) -> diffusers.QwenImageEditPipeline:
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    pipe = diffusers.QwenImageEditPipeline(transformer=transformer_of(folder), **parts)
    if lora:
        pipe.load_lora_weights(lora.parent, weight_name=lora.name)
    return pipe


def with_lora(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **section):
    transformer = transformer_of(folder)
    add_lora(transformer, LoraConfig(**section), seed, dtype=dtype)
    return transformer


def weights(transformer) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(model: Path, folder: Path, **kind) -> Path:
    """A checkpoint's folder with an adapter of some kind."""
    save_adapter(trained_adapter(model, **kind), folder / "checkpoint")
    return folder / "checkpoint"


def off(found: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor | float = 0.0) -> float:
    """The largest difference, against what the adapter changes. Weights that diffusers reads from a file lie at any
    address, copies at multiples of 64, on which the last bits of a product depend on some CPUs."""
    assert (expected - plain).abs().max() > 0.1, "the adapter does nothing"
    return float((found - expected).abs().max() / (expected - plain).abs().max())


def comfyui_weights(base: dict[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """ComfyUI's sum, comfy/weight_adapter/lora.py: weight + alpha / rank · up · down. Every tensor must be used."""
    left = load_file(file)
    merged = dict(base)
    for name in base:
        layer = f"diffusion_model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_up.weight" in left:
            up, down = left.pop(f"{layer}.lora_up.weight"), left.pop(f"{layer}.lora_down.weight")
            merged[name] = base[name] + left.pop(f"{layer}.alpha").item() / down.shape[0] * up @ down
    assert not left
    return merged


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(PLAIN | {"use_rslora": True}, id="rslora"),
        pytest.param(PLAIN | {"use_dora": True}, id="dora"),
        pytest.param(PLAIN | {"target_modules": EVERY_LAYER}, id="every layer"),
    ],
)
def test_a_saved_adapter_is_the_same_to_all_who_load_it(tiny_edit: Path, batch, tmp_path: Path, kind) -> None:
    """Its run, a run that continues from it, diffusers, ComfyUI, and whoever has it merged into the weights."""
    trained = trained_adapter(tiny_edit, **kind)
    expected, plain = call(trained, batch), call(transformer_of(tiny_edit), batch)
    save_adapter(trained, tmp_path)
    assert off(call(pipeline(tiny_edit, tmp_path / ADAPTER_FILE).transformer, batch), expected, plain) < 1e-5

    resumed = with_lora(tiny_edit, seed=9, **kind)
    load_adapter(adapter_tensors(resumed), tmp_path)
    assert same(weights(resumed), weights(trained))
    # Both hold copies of the adapter, equally aligned, over a base of the same file.
    assert torch.equal(call(resumed.eval(), batch), expected)
    for path in (tmp_path, tmp_path / ADAPTER_FILE):
        assert same(weights(with_lora(tiny_edit, **kind, continue_from=str(path))), weights(trained))

    assert_exported(tiny_edit, tmp_path, trained, batch)
    if kind.get("target_modules") == EVERY_LAYER:
        blocks = [f"transformer_blocks.{n}.{name}" for n in range(trained.config.num_layers) for name in COMFYUI_BLOCK]
        ends = ("lora_down.weight", "lora_up.weight", "alpha")
        names = {f"diffusion_model.{layer}.{end}" for layer in blocks + COMFYUI_OTHER for end in ends}
        assert load_file(tmp_path / "out.safetensors").keys() == names
    merge_adapter(open_pretrained(str(tiny_edit)), tmp_path, tmp_path / "merged")
    assert {weight.dtype for weight in load_file(tmp_path / "merged" / MERGED).values()} == {torch.float32}
    merged = QwenImageTransformer2DModel.from_pretrained(tmp_path / "merged")
    assert merged.config.num_layers == trained.config.num_layers
    assert off(call(merged, batch), expected, plain) < 1e-4

    merge_adapter(open_pretrained(str(tiny_edit)), tmp_path, tmp_path / "half", scale=0.5)
    trained.set_adapters(["default"], [0.5])
    half = QwenImageTransformer2DModel.from_pretrained(tmp_path / "half")
    assert off(call(half, batch), call(trained, batch), plain) < 1e-4


def test_layers_keep_ranks_and_alphas_of_their_own(tiny_edit: Path, batch, tmp_path: Path) -> None:
    transformer = transformer_of(tiny_edit)
    patterns = {"rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_k": 7.0, r"transformer_blocks\.1\.attn\.to_q": 1.0}}
    transformer.add_adapter(PeftConfig(**PLAIN, target_modules=["to_q", "to_k"], **patterns))
    save_adapter(randomise(transformer), tmp_path)
    assert_exported(tiny_edit, tmp_path, transformer, batch)


def test_an_adapter_is_not_merged_into_quantised_weights(tiny_edit: Path, tmp_path: Path) -> None:
    folder = saved(tiny_edit, tmp_path, r=2)
    shutil.copytree(tiny_edit, tmp_path / "model")
    place = tmp_path / "model" / "transformer"
    file = next(place.glob("*.safetensors"))
    save_file(
        {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}, file, {"format": "pt"}
    )
    with pytest.raises(UsageError, match=r"(?s)quantised weights.*float8_e4m3fn.*--dtype bfloat16"):
        merge_adapter(open_pretrained(str(tmp_path / "model")), folder, tmp_path / "merged")
    told = json.loads((place / "config.json").read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (place / "config.json").write_text(json.dumps(told))
    with pytest.raises(UsageError, match=r"(?s)quantised weights.*bitsandbytes.*as --model"):
        merge_adapter(open_pretrained(str(tmp_path / "model")), folder, tmp_path / "merged", torch.bfloat16)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_as_peft_saves_it_keeps_its_scale(tiny_edit: Path, batch, tmp_path: Path) -> None:
    config = PeftConfig(r=4, lora_alpha=10, target_modules=["to_q", "to_k"], rank_pattern={"to_k": 2})
    theirs = get_peft_model(transformer_of(tiny_edit), config)
    randomise(theirs).save_pretrained(tmp_path)
    assert_exported(tiny_edit, tmp_path, theirs, batch)
    told = tmp_path / "adapter_config.json"
    told.write_text(told.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    with pytest.raises(ConfigError, match="pissa: it belongs to changed weights of the base"):
        merge_adapter(open_pretrained(str(tiny_edit)), tmp_path, tmp_path / "merged")


def assert_exported(model: Path, folder: Path, trained, batch) -> None:
    """What is exported computes the same in diffusers, in ComfyUI but for DoRA, and read back from ComfyUI's file."""
    out, expected, plain = folder / "out.safetensors", call(trained, batch), call(transformer_of(model), batch)
    export_adapter(folder, out, "diffusers")
    assert off(call(pipeline(model, out).transformer, batch), expected, plain) < 1e-5
    if any("magnitude" in name for name in weights(trained)):
        out.unlink()
        with pytest.raises(UsageError, match="DoRA") as caught:
            export_adapter(folder, out, "comfyui")
        assert "merge" in caught.value.hint and not out.exists()
        return
    export_adapter(folder, out, "comfyui")
    export_adapter(out, folder / "back.safetensors", "diffusers")
    for file in (out, folder / "back.safetensors"):
        assert off(call(pipeline(model, file).transformer, batch), expected, plain) < 1e-5
    fused = transformer_of(model)
    fused.load_state_dict(comfyui_weights(fused.state_dict(), out))
    assert off(call(fused, batch), expected, plain) < 1e-5


def test_files_for_diffusers_name_what_each_of_its_releases_asks_for_and_nothing_that_an_older_peft_lacks(
    tiny_edit: Path, tmp_path: Path
) -> None:
    # Settings without which a file means something else are kept under the names that peft has.
    assert set(adapter_file._SCALE + adapter_file._LAYERS) <= set(PeftConfig().to_dict())
    folder = saved(tiny_edit, tmp_path, **PLAIN, use_rslora=True)
    export_adapter(folder, tmp_path / "out.safetensors", "diffusers")
    for path in (folder / ADAPTER_FILE, tmp_path / "out.safetensors"):
        with safe_open(path, framework="pt") as file:
            settings = json.loads(file.metadata()["lora_adapter_metadata"])
        # diffusers 0.35 to 0.39 look the two patterns up, whether or not there are any.
        expected = {"r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern"}
        assert settings.keys() == {f"transformer.{name}" for name in expected}
        assert settings["transformer.rank_pattern"] == settings["transformer.alpha_pattern"] == {}
        # A set's order differs from process to process.
        assert settings["transformer.target_modules"] == ["to_k", "to_out.0", "to_q", "to_v"]


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


@pytest.mark.parametrize("form", ["comfyui", "diffusers"])
def test_the_factors_have_the_dtype_that_is_asked_for_and_have_to_fit_into_it(
    tiny_edit: Path, tmp_path: Path, form
) -> None:
    folder = saved(tiny_edit, tmp_path, r=4, lora_alpha=10.1)  # of which neither half has the value
    out = tmp_path / "out.safetensors"
    for dtype in (None, torch.float16, torch.bfloat16):
        export_adapter(folder, out, form, dtype)
        tensors = load_file(out)
        assert {tensor.dtype for tensor in tensors.values() if tensor.ndim} == {dtype or torch.float32}
        alphas = {tensor.item() for tensor in tensors.values() if not tensor.ndim}
        assert alphas == ({torch.tensor(10.1).item()} if form == "comfyui" else set())
    tensors = load_file(folder / ADAPTER_FILE)
    next(iter(tensors.values()))[0, 0] = 1e6
    save_file(tensors, tmp_path / "large.safetensors")
    with pytest.raises(QieError, match="not finite"):
        export_adapter(tmp_path / "large.safetensors", out, form, torch.float16)
    export_adapter(tmp_path / "large.safetensors", out, form, torch.bfloat16)


OTHERS = [
    ({"r": 8}, ["rank 4", "attn.to_k.lora_A.weight is [4, 32], not [8, 32]"]),
    ({"r": 4, "target_modules": ["to_q"]}, ["rank 4", "transformer_blocks.0.attn.to_k.lora_A.weight is too many"]),
    ({"r": 4, "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "proj_out"]}, ["proj_out.lora_A.weight is mis"]),
    ({"r": 4, "use_dora": True}, ["lora_magnitude_vector", "is missing"]),
    ({"r": 4, "rank_pattern": {"to_k": 8}}, ["rank 4", "attn.to_k.lora_A.weight is [4, 32], not [8, 32]"]),
]
SCALED = [
    (PLAIN | {"lora_alpha": 8.0}, ["scaled by 2.5", "scaled by 2", "lora_alpha has to be 10"]),
    (PLAIN | {"use_rslora": True}, ["scaled by 5", "lora_alpha has to be 5"]),
    (PLAIN | {"alpha_pattern": {"to_k": 12.0}}, ["scaled by 2.5, and not by 3, at transformer_blocks.0.attn.to_k"]),
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
        with pytest.raises(QieError, match="different tensors") as caught:
            load_adapter(run, tmp_path)
        assert all(word in str(caught.value) for word in words)
        assert same(run, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "quantize"),
    [
        *((kind, None) for kind in ("gaussian", "kaiming", "orthogonal", "dora")),
        *(("gaussian", "fp8"), ("orthogonal", "int8"), ("dora", "nf4")),
    ],
)
def test_a_new_adapter_changes_nothing_and_only_it_is_trained(tiny_edit: Path, batch, kind, quantize, dtype) -> None:
    inputs = batch.to(torch.device("cpu"), dtype)
    transformer = transformer_of(tiny_edit, dtype, quantize=quantize).eval()
    expected = call(transformer, inputs)
    section = LoraConfig(r=4, use_dora=True) if kind == "dora" else LoraConfig(r=4, init_lora_weights=kind)
    add_lora(transformer, section, seed=0)
    trained = weights(transformer)
    assert trained and all(".lora_" in name for name in trained)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    if kind == "orthogonal":  # no matrix is zero, and the product is but for rounding
        assert all(weight.abs().max() > 0.01 for weight in trained.values())
        assert off(call(transformer, inputs), expected) < (1e-5 if dtype == torch.float32 else 2e-2)
        return
    # The same products, plus zero; a magnitude over the length that it was made from is exactly 1.
    assert torch.equal(call(transformer, inputs), expected)


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
    with pytest.raises(ConfigError, match=r"(?s)model\.lora\.target_modules.*to_q"):
        with_lora(tiny_edit, target_modules=targets)


def test_a_rounding_adapter_computes_the_bits_of_autocast_and_learns_in_its_own_dtype() -> None:
    found = []
    for rounds in (False, True):
        transformer = small_transformer()
        for name, weight in transformer.named_parameters():
            weight.data = weight.data if "lora_" in name else weight.data.bfloat16()
        if rounds:
            round_adapters(transformer)
        layer = transformer.transformer_blocks[0].attn.to_q
        value = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=not rounds):
            output = layer(value)
        output.float().square().sum().backward()
        found.append((output, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    assert [value.dtype for value in found[1]] == [torch.bfloat16, torch.float32, torch.float32]


def test_an_orthogonal_start_takes_ranks_of_layers_own_and_refuses_odd_ones(tiny_edit: Path) -> None:
    with pytest.raises(ConfigError, match="even rank"):
        with_lora(tiny_edit, r=3, init_lora_weights="orthogonal")
    made = with_lora(tiny_edit, r=4, init_lora_weights="orthogonal", rank_pattern={"to_k": 2}, target_modules=["to_k"])
    for layer in (block.attn.to_k for block in made.transformer_blocks):
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert len(down) == 2 and (up @ down).abs().max() < 1e-6 < min(up.abs().max(), down.abs().max())


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
    assert off(call(second.eval(), batch), call(first, batch)) < 1e-5


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
    assert off(call(transformer.train(), batch), call(pipe.transformer.eval(), batch)) < 1e-5

    save_adapter(randomise(transformer), tmp_path / "trained")
    assert len(load_file(tmp_path / "trained" / ADAPTER_FILE)) == len(weights(transformer))
    pipe.load_lora_weights(tmp_path / "trained", adapter_name="trained")
    pipe.set_adapters(["0", "1", "trained"], [0.5, -0.5, 1.0])
    assert off(call(transformer, batch), call(pipe.transformer.eval(), batch)) < 1e-5


@pytest.mark.parametrize("kind", [{"r": 2, "lora_alpha": 8.0}, {"r": 2, "use_dora": True}], ids=["LoRA", "DoRA"])
def test_an_adapter_of_training_alone_is_in_the_model_until_it_is_left_out_and_comes_back(
    tiny_edit: Path, batch, tmp_path: Path, kind
) -> None:
    def model(*adapters: AdapterConfig):
        transformer = transformer_of(tiny_edit)
        add_frozen_adapters(transformer, adapters)
        add_lora(transformer, LoraConfig(**PLAIN), seed=1)
        return randomise(transformer)

    for number in (0, 1):
        save_adapter(trained_adapter(tiny_edit, seed=number, **kind), tmp_path / str(number))
    style, assistant = (AdapterConfig(path=str(tmp_path / name), scale=0.5) for name in ("0", "1"))
    released, both = call(model(style), batch), call(model(style, assistant), batch)
    transformer = model(style, assistant.model_copy(update={"train_only": True}))
    trained = weights(transformer)
    assert torch.equal(call(transformer, batch), both)
    with pytest.raises(KeyError), without_train_only(transformer):
        assert torch.equal(call(transformer, batch), released) and not torch.equal(released, both)
        raise KeyError
    assert torch.equal(call(transformer, batch), both) and same(weights(transformer), trained)
    save_adapter(transformer, tmp_path / "saved")
    assert len(load_file(tmp_path / "saved" / ADAPTER_FILE)) == len(trained)


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


def test_the_adapter_is_found_in_a_checkpoint_a_run_or_a_file(tmp_path: Path) -> None:
    for step in (9, 1000, 20):
        (tmp_path / f"checkpoint-{step:06d}").mkdir()
        (tmp_path / f"checkpoint-{step:06d}" / ADAPTER_FILE).touch()
    latest = tmp_path / "checkpoint-001000" / ADAPTER_FILE
    assert find_adapter(tmp_path) == find_adapter(latest) == find_adapter(latest.parent) == latest
    for content in (b"", b"no safetensors"):
        latest.write_bytes(content)
        with pytest.raises(UsageError, match="cannot be read"):
            export_adapter(latest, tmp_path / "out.safetensors", "comfyui")
    latest.unlink()
    for nothing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="no adapter"):
            find_adapter(nothing)


@pytest.mark.parametrize("kind", [PLAIN, PLAIN | {"use_dora": True}], ids=["plain", "dora"])
def test_merging_in_bfloat16_loses_little_more_than_rounding(tiny_edit: Path, tmp_path: Path, kind) -> None:
    folder = saved(tiny_edit, tmp_path, **kind)
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        merge_adapter(open_pretrained(str(tiny_edit)), folder, tmp_path / str(dtype), dtype)
    exact, found = (load_file(tmp_path / str(dtype) / MERGED) for dtype in dtypes)
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    for name, weight in exact.items():
        if re.search(r"attn\.to_[qkv]\.weight", name):
            rounding = (weight.bfloat16().float() - weight).std()
            # Rounding the base and the factors is in it.
            assert (found[name].float() - weight).std() < 2.2 * rounding, name


def full_disk(transformer, target, **how):
    (Path(target) / "half").touch()
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("layer", r"(?s)does not fit.*blocks\.59"),
        ("shape", "(?s)does not fit.*size mismatch"),
        ("nan", r"(?s)not finite.*attn\.to_"),
        ("full disk", "(?s)cannot be written.*No space"),
        ("exists", "exists already"),
    ],
)
def test_a_merge_that_fails_says_why_and_leaves_nothing(
    tiny_edit: Path, tmp_path: Path, monkeypatch, fault: str, words: str
) -> None:
    folder = saved(tiny_edit, tmp_path, **PLAIN)
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / ADAPTER_FILE)
    if fault == "layer":
        tensors = {name.replace("blocks.1.", "blocks.59."): tensor for name, tensor in tensors.items()}
    if fault == "shape":
        tensors = {name: torch.cat([tensor, tensor], dim=1) for name, tensor in tensors.items()}
    if fault == "nan":
        next(iter(tensors.values()))[0, 0] = float("nan")
    if fault == "full disk":
        monkeypatch.setattr(QwenImageTransformer2DModel, "save_pretrained", full_disk)
    if fault == "exists":
        (tmp_path / "merged").mkdir()
    save_file(tensors, folder / ADAPTER_FILE, metadata)
    with pytest.raises(QieError, match=words):
        merge_adapter(open_pretrained(str(tiny_edit)), folder, tmp_path / "merged")
    left = {path.name for path in tmp_path.rglob("*")} - {ADAPTER_FILE}
    assert left == {"checkpoint"} | ({"merged"} if fault == "exists" else set())


@pytest.fixture
def export(monkeypatch):
    """`qie export`, whose exit code is `code`."""
    monkeypatch.setattr("qie.quiet_libraries.quiet_libraries", lambda: None)
    level = logging.getLogger("diffusers").level

    def run(*arguments: object, code: int = 0) -> str:
        done = CliRunner().invoke(one_command.main, ["export", *map(str, arguments)])
        assert done.exit_code == code, done.output
        return done.output

    yield run
    logging.getLogger("diffusers").setLevel(level)


def test_the_command_exports_and_merges_the_latest_checkpoint_of_a_run(export, tiny_edit: Path, tmp_path: Path) -> None:
    folder = saved(tiny_edit, tmp_path, **PLAIN)
    folder.rename(tmp_path / "checkpoint-000010")
    file = tmp_path / "out.safetensors"
    assert export(tmp_path, "--output", file, "--dtype", "bfloat16").splitlines()[0] == str(file)
    assert next(iter(load_file(file))).startswith("diffusion_model.")
    export(tmp_path, "--merge", "--model", tiny_edit, "--output", tmp_path / "merged")
    QwenImageTransformer2DModel.from_pretrained(tmp_path / "merged")


def test_the_command_tells_of_a_fault_by_a_message_and_its_exit_code(export, tmp_path: Path) -> None:
    assert export(tmp_path, "--output", tmp_path / "out.safetensors", code=2).startswith("error: no adapter found")
    for wrong in (["--merge"], ["--scale", "2"], ["--merge", "--model", "m", "--format", "comfyui"]):
        assert "--model" in export(tmp_path, "--output", tmp_path / "out", *wrong, code=2)

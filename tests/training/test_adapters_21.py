"""Adapters of Qwen-Image-2.1: in files of qie, diffusers, ComfyUI, ai-toolkit and musubi-tuner, and merged."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from qie.config import AdapterConfig, LoraConfig
from qie.errors import ConfigError, UsageError
from qie.pretrained import open_pretrained
from qie.training.model.adapter_file import ADAPTER_FILE, check_adapters, export_adapter
from qie.training.model.load import empty_transformer
from qie.training.model.lora import add_frozen_adapters, add_lora, merge_adapter, save_adapter
from tests.training.adapters import NoProcessor, randomise, trained_adapter, transformer_of

MLP = ["img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out"]
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
OTHERS = ["img_in", "in_layer", "out_layer", "modulation.1", "norm_out.linear", "proj_out", "linear_1", "linear_2"]
PLAIN = {"r": 4, "lora_alpha": 10.0}


def call(transformer) -> torch.Tensor:
    """Of two tokens of text, a control, more text and the target."""
    generator = torch.Generator().manual_seed(0)
    grids, slots = [(1, 2, 4), (1, 4, 4)], [2, 2 + 2]
    is_image = torch.zeros(1, slots[1] + 3 + 4, dtype=torch.bool)
    is_image[:, 2:4] = is_image[:, -4:] = True
    config = transformer.config
    with torch.no_grad():
        found: torch.Tensor = transformer.eval()(
            torch.randn(1, 8 + 16, config.in_channels, generator=generator),
            encoder_hidden_states=torch.randn(1, slots[1] + 3, config.context_in_dim, generator=generator),
            timestep=torch.tensor([0.5]),
            img_shapes=[grids],
            img_mask=is_image,
        ).sample
    return found


def pipeline(folder: Path, file: Path | None = None):
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder"))
    processor = NoProcessor()
    pipe = diffusers.QwenImage21Pipeline(transformer=transformer_of(folder), processor=processor, **parts)
    if file:
        pipe.load_lora_weights(file.parent, weight_name=file.name)
    return pipe


def off(found: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest difference, against what the adapter changes."""
    assert (expected - plain).abs().max() > 0.1, "the adapter does nothing"
    return float((found - expected).abs().max() / (expected - plain).abs().max())


def in_comfyui(transformer, file: Path) -> None:
    """ComfyUI's sum on its own layout, in which two layers of the MLP are one. Every tensor must be used."""
    left, weights = load_file(file), transformer.state_dict()
    joined = {name: ".img_mlp.gate_up".join(name.split(".img_mlp.gate_layer")) for name in weights}
    for name, theirs in joined.items():
        layer = f"diffusion_model.{theirs.removesuffix('.weight')}"
        if f"{layer}.lora_up.weight" not in left:
            continue
        up, down = left.pop(f"{layer}.lora_up.weight"), left.pop(f"{layer}.lora_down.weight")
        change = left.pop(f"{layer}.alpha").item() / down.shape[0] * up @ down
        parts = [name] if name == theirs else [name, name.replace("gate_layer", "proj")]
        for part, own in zip(parts, change.chunk(len(parts)), strict=True):
            weights[part] += own
    assert not left
    transformer.load_state_dict(weights)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({}, id="default targets"),
        pytest.param({"target_modules": ATTENTION + MLP + OTHERS}, id="every layer"),
        pytest.param({"target_modules": ["to_q", "img_mlp.proj"]}, id="half of the MLP"),
        pytest.param({"use_rslora": True, "target_modules": MLP}, id="rslora"),
        pytest.param({"use_dora": True}, id="dora"),
    ],
)
def test_an_adapter_of_2_1_is_the_same_to_all_who_load_it(tiny_21: Path, tmp_path: Path, kind) -> None:
    """Diffusers, a run that continues from it, ComfyUI, what is read back from its file, and merged weights."""
    trained, settings = trained_adapter(tiny_21, **PLAIN | kind), LoraConfig(**PLAIN | kind)
    expected, plain = call(trained), call(transformer_of(tiny_21))
    save_adapter(trained, tmp_path)
    assert off(call(pipeline(tiny_21, tmp_path / ADAPTER_FILE).transformer), expected, plain) < 1e-5

    continued = transformer_of(tiny_21)
    add_lora(continued, settings.model_copy(update={"continue_from": str(tmp_path)}), seed=3)
    assert torch.equal(call(continued), expected)
    merge_adapter(open_pretrained(str(tiny_21)), tmp_path, tmp_path / "merged")
    merged = diffusers.QwenImage21Transformer2DModel.from_pretrained(tmp_path / "merged")
    assert off(call(merged), expected, plain) < 1e-4

    file = tmp_path / "comfyui.safetensors"
    if settings.use_dora:
        with pytest.raises(UsageError, match="DoRA"):
            export_adapter(tmp_path, file, "comfyui")
        return
    export_adapter(tmp_path, file, "comfyui")
    fused, again = transformer_of(tiny_21), transformer_of(tiny_21)
    in_comfyui(fused, file)
    assert off(call(fused), expected, plain) < 1e-4
    add_frozen_adapters(again, [AdapterConfig(path=str(file))])
    assert off(call(again), expected, plain) < 1e-4
    if not any("mlp" in target for target in settings.target_modules):
        assert off(call(pipeline(tiny_21, file).transformer), expected, plain) < 1e-5


def of_ai_toolkit(layer: str, part: str) -> str:
    return f"diffusion_model.{layer}.{part}"


def of_musubi(layer: str, part: str) -> str:
    ends = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
    return f"lora_unet_{layer.replace('.', '_')}.{ends.get(part, part)}"


@pytest.mark.parametrize("name", [of_ai_toolkit, of_musubi])
def test_a_file_of_another_trainer_with_the_joined_layer_is_read(tiny_21: Path, tmp_path: Path, name) -> None:
    """ai-toolkit writes no alpha, musubi-tuner one for each layer, and dots as underscores."""
    generator, changed, tensors = torch.Generator().manual_seed(1), transformer_of(tiny_21), {}
    weights = changed.state_dict()
    factor = 2.0 if name is of_musubi else 1.0
    block = "transformer_blocks.1"
    for layer, parts in {
        f"{block}.attn.to_out.0": [f"{block}.attn.to_out.0"],
        f"{block}.img_mlp.gate_up": [f"{block}.img_mlp.gate_layer", f"{block}.img_mlp.proj"],
        f"{block}.img_mlp.out": [f"{block}.img_mlp.out"],
        "modulation.1": ["modulation.1"],
        "txt_in.in_layer": ["txt_in.in_layer"],
        "time_text_embed.timestep_embedder.linear_2": ["time_text_embed.timestep_embedder.linear_2"],
    }.items():
        rows, columns = weights[f"{parts[0]}.weight"].shape
        down = torch.randn(3, columns, generator=generator) * 0.3
        up = torch.randn(rows * len(parts), 3, generator=generator) * 0.3
        tensors |= {name(layer, "lora_A.weight"): down, name(layer, "lora_B.weight"): up}
        if name is of_musubi:
            tensors[name(layer, "alpha")] = torch.tensor(3 * factor)
        for part, change in zip(parts, (factor * up @ down).chunk(len(parts)), strict=True):
            weights[f"{part}.weight"] += change
    changed.load_state_dict(weights)
    save_file(tensors, tmp_path / "other.safetensors")
    adapters = [AdapterConfig(path=str(tmp_path / "other.safetensors"))]
    check_adapters(empty_transformer(open_pretrained(str(tiny_21))), adapters, "model.adapters")
    found = transformer_of(tiny_21)
    add_frozen_adapters(found, adapters)
    assert off(call(found), call(changed), call(transformer_of(tiny_21))) < 1e-5

    targets = rf"{block}\.(attn\.to_out\.0|img_mlp\.(gate_layer|proj|out))|modulation\.1|txt_in\.in_layer|.*linear_2"
    section = LoraConfig(r=3, lora_alpha=3.0, target_modules=targets, continue_from=adapters[0].path)
    continued = transformer_of(tiny_21)
    add_lora(continued, section, seed=0)
    assert off(call(continued), call(changed), call(transformer_of(tiny_21))) < 1e-5


def test_a_target_of_another_family_is_refused_with_what_this_one_has(tiny_21: Path) -> None:
    for target in ("add_q_proj", "img_mod.1", "net.2"):
        with pytest.raises(ConfigError, match="names no module") as caught:
            add_lora(transformer_of(tiny_21), LoraConfig(target_modules=["to_q", target]), seed=0)
        assert caught.value.found == target
        assert all(name in str(caught.value.expected) for name in ("to_q", "gate_layer", "modulation.1"))


def test_an_adapter_of_another_family_is_refused(tiny_21: Path, tiny_edit: Path, tmp_path: Path) -> None:
    save_adapter(trained_adapter(tiny_edit, r=2, target_modules=["to_q", "add_q_proj"]), tmp_path)
    adapters = [AdapterConfig(path=str(tmp_path))]
    with pytest.raises(UsageError, match="does not fit this model"):
        check_adapters(empty_transformer(open_pretrained(str(tiny_21))), adapters, "model.adapters")
    with pytest.raises(ConfigError, match="does not fit this model"):
        add_frozen_adapters(transformer_of(tiny_21), adapters)


def test_a_new_adapter_of_2_1_changes_nothing(tiny_21: Path) -> None:
    for kind in ({}, {"use_dora": True}, {"init_lora_weights": "orthogonal"}):
        transformer = transformer_of(tiny_21)
        expected = call(transformer)
        add_lora(transformer, LoraConfig(r=4, **kind), seed=1)
        torch.testing.assert_close(call(transformer), expected, rtol=0.0, atol=1e-4 if kind else 0.0)
        assert not torch.equal(call(randomise(transformer)), expected)

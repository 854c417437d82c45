"""LoKr and LoHa: the same to all who load them, trained as a LoRA is, and refused where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file

from qie.config import AdapterConfig, LoraConfig
from qie.config.schema import ModelConfig
from qie.errors import ConfigError, UsageError
from qie.pretrained import open_pretrained
from qie.training.model.adapter_file import check_adapters, export_adapter
from qie.training.model.kronecker import LoHaLinear, LoKrLinear
from qie.training.model.load import empty_transformer
from qie.training.model.lora import (
    adapter_tensors,
    add_frozen_adapters,
    add_lora,
    load_adapter,
    merge_adapter,
    round_adapters,
    save_adapter,
)
from tests.training.adapters import call, one_batch, randomise, trained_adapter, transformer_of

KINDS = {
    "lokr": {"kind": "lokr", "r": 2, "lora_alpha": 3.0},
    "lokr of whole factors": {"kind": "lokr", "r": 64, "lora_alpha": 20.0, "decompose_factor": 4},
    "lokr, both decomposed": {"kind": "lokr", "r": 1, "lora_alpha": 2.0, "decompose_both": True},
    "loha": {"kind": "loha", "r": 3, "lora_alpha": 5.0},
    "loha of several ranks": {
        "kind": "loha",
        "r": 3,
        "lora_alpha": 5.0,
        "rank_pattern": {"to_k": 2},
        "alpha_pattern": {r"transformer_blocks\.0\..*to_q": 7.0},
    },
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    return one_batch(photos, encoder)


def off(found: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest difference, against the largest value; `plain` is without the adapter."""
    assert (expected - plain).abs().max() > 0.01, "the adapter does nothing"
    return float((found - expected).abs().max() / expected.abs().max())


def comfyui_weights(base: dict[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """ComfyUI's sums, comfy/weight_adapter/lokr.py and loha.py. Every tensor must be used."""
    left, merged = load_file(file), dict(base)
    for name in base:
        layer = f"diffusion_model.{name.removesuffix('.weight')}."
        own = {part.removeprefix(layer): left.pop(part) for part in list(left) if part.startswith(layer)}
        if "hada_w1_a" in own:
            change = (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
            merged[name] = base[name] + own["alpha"] / len(own["hada_w1_b"]) * change
        elif own:
            rank, factors = None, []
            for factor in ("lokr_w1", "lokr_w2"):
                if factor not in own:
                    rank = len(own[f"{factor}_b"])
                    own[factor] = own[f"{factor}_a"] @ own[f"{factor}_b"]
                factors.append(own[factor])
            scale = 1.0 if rank is None else own["alpha"] / rank
            merged[name] = base[name] + scale * torch.kron(*factors)
    assert not left
    return merged


@every_kind
def test_a_saved_adapter_is_the_same_to_all_who_load_it(tiny_edit: Path, batch, tmp_path: Path, kind) -> None:
    """Its run, a run that continues from it, peft on diffusers' model, ComfyUI, and who has it merged."""
    trained, base = trained_adapter(tiny_edit, **kind), transformer_of(tiny_edit)
    expected, plain = call(trained, batch), call(base, batch)
    save_adapter(trained, tmp_path)

    resumed = transformer_of(tiny_edit)
    add_lora(resumed, LoraConfig(**kind), seed=9)
    load_adapter(adapter_tensors(resumed), tmp_path)
    assert torch.equal(call(resumed.eval(), batch), expected)
    continued = transformer_of(tiny_edit)
    add_lora(continued, LoraConfig(**kind, continue_from=str(tmp_path)), seed=9)
    assert torch.equal(call(continued.eval(), batch), expected)

    frozen = transformer_of(tiny_edit)
    add_frozen_adapters(frozen, [AdapterConfig(path=str(tmp_path), scale=0.5)])
    trained.set_adapters(["default"], [0.5])
    half = call(trained, batch)
    assert off(call(frozen.eval(), batch), half, plain) < 1e-5

    theirs = PeftModel.from_pretrained(transformer_of(tiny_edit), str(tmp_path)).eval()
    assert off(call(theirs, batch), expected, plain) < 1e-5
    export_adapter(tmp_path, tmp_path / "comfyui.safetensors", "comfyui")
    fused = transformer_of(tiny_edit)
    fused.load_state_dict(comfyui_weights(fused.state_dict(), tmp_path / "comfyui.safetensors"))
    assert off(call(fused, batch), expected, plain) < 1e-5
    for scale, whole in ((1.0, expected), (0.5, half)):
        merge_adapter(open_pretrained(str(tiny_edit)), tmp_path, tmp_path / str(scale), scale=scale)
        merged = QwenImageTransformer2DModel.from_pretrained(tmp_path / str(scale))
        assert off(call(merged, batch), whole, plain) < 1e-5


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_products_are_those_of_pefts_layers(tiny_edit: Path, kind, dtype) -> None:
    transformer = trained_adapter(tiny_edit, **kind).to(dtype)
    round_adapters(transformer)
    tokens = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name in ("to_q", "to_k"):
        layer = transformer.transformer_blocks[0].attn.get_submodule(name)
        assert type(layer) in (LoKrLinear, LoHaLinear)
        expected = tokens.double() @ layer.get_delta_weight("default").double().T
        found = layer._get_delta_activations("default", tokens).double()
        tolerance = 1e-5 if dtype == torch.float32 else 0.04
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "quantize"), [("lokr", None), ("loha", None), ("lokr", "fp8"), ("loha", "int8"), ("lokr", "nf4")]
)
def test_a_new_adapter_changes_nothing_and_only_it_is_trained(tiny_edit: Path, batch, kind, quantize, dtype) -> None:
    inputs = batch.to(torch.device("cpu"), dtype)
    transformer = transformer_of(tiny_edit, dtype, quantize=quantize).eval()
    expected = call(transformer, inputs)
    add_lora(transformer, LoraConfig(kind=kind, r=2), seed=0)
    round_adapters(transformer)
    trained = {name: weight for name, weight in transformer.named_parameters() if weight.requires_grad}
    assert trained and all(".lokr_" in name or ".hada_" in name for name in trained)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert torch.equal(call(transformer, inputs), expected)
    assert not torch.equal(call(randomise(transformer), inputs), expected)


def test_the_first_weights_follow_from_the_seed_alone(tiny_edit: Path) -> None:
    def first(seed: int, before: int) -> list[torch.Tensor]:
        torch.manual_seed(before)
        transformer = transformer_of(tiny_edit)
        add_lora(transformer, LoraConfig(kind="lokr", r=2), seed)
        return list(adapter_tensors(transformer).values())

    assert all(map(torch.equal, first(1, 1), first(1, 2)))
    assert not all(map(torch.equal, first(1, 1), first(2, 1)))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kind": "lokr", "use_dora": True}, "use_dora is of kind: lora, which is lokr here"),
        ({"kind": "loha", "lora_dropout": 0.1}, "lora_dropout is of kind: lora"),
        ({"kind": "loha", "decompose_factor": 4}, "decompose_factor is of kind: lokr, which is loha here"),
        ({"decompose_both": True}, "decompose_both is of kind: lokr, which is lora here"),
        ({"alpha_pattern": {"(": 4}}, "a regular expression: missing"),
        ({"kind": "locon"}, "'lora', 'lokr' or 'loha'"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(section, words) -> None:
    with pytest.raises(ValidationError, match=words):
        LoraConfig(**section)


def test_what_cannot_be_is_refused_by_name(tiny_edit: Path, tmp_path: Path) -> None:
    def refused(section: dict[str, object], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            add_lora(transformer_of(tiny_edit), LoraConfig(**section), seed=0)

    refused({"rank_pattern": {"to_qq": 4}}, r"(?s)of no layer.*rank_pattern.*to_qq")
    with pytest.raises(ValidationError, match="loha needs the shapes of the weights, which nf4 does not keep"):
        ModelConfig(pretrained_model_name_or_path="x", quantize="nf4", lora=LoraConfig(kind="loha"))
    refused({"kind": "lokr", "target_modules": ".*norm_q"}, "(?s)do not fit")
    save_adapter(trained_adapter(tiny_edit, kind="lokr", r=2), tmp_path / "lokr")
    both = transformer_of(tiny_edit)
    add_lora(both, LoraConfig(), seed=0)
    with pytest.raises(ConfigError, match=r"(?s)several kinds.*each a LoRA.*a LoKr"):
        add_frozen_adapters(both, [AdapterConfig(path=str(tmp_path / "lokr"))])
    save_adapter(trained_adapter(tiny_edit, kind="loha", r=2), tmp_path / "loha")
    adapters = [AdapterConfig(path=str(tmp_path / kind)) for kind in ("lokr", "loha")]
    empty = empty_transformer(open_pretrained(str(tiny_edit)))
    with pytest.raises(ConfigError, match=r"(?s)several kinds.*loha.*each a LoKr.*a LoHa"):
        check_adapters(empty, adapters, "--lora")
    with pytest.raises(ConfigError, match="needs the shapes of the weights, which nf4 does not keep"):
        check_adapters(empty, adapters[1:], "--lora", quantize="nf4")
    with pytest.raises(UsageError, match=r"(?s)diffusers has no file for a LoKr"):
        export_adapter(tmp_path / "lokr", tmp_path / "out.safetensors", "diffusers")
    (tmp_path / "lokr" / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"(?s)cannot be read.*adapter_config.json"):
        export_adapter(tmp_path / "lokr", tmp_path / "out.safetensors", "comfyui")

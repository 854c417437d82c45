"""Adapters for other programs: names, scales, and what they compute with them; and merged into the weights."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qie.errors import QieError, UsageError
from qie.pretrained import open_pretrained
from qie.training.model import adapter_file
from qie.training.model.adapter_file import ADAPTER_FILE, export_adapter, find_adapter
from qie.training.model.lora import merge_adapter, save_adapter
from tests.conftest import ROOT
from tests.training.adapters import call, one_batch, randomise, trained_adapter, transformer_of

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

PLAIN = {"r": 4, "lora_alpha": 10.0}
# Layers with ranks and alphas of their own, which only peft can make.
PATTERNS = {"rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_k": 7.0, r"transformer_blocks\.1\.attn\.to_q": 1.0}}
KINDS = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(PLAIN | {"use_rslora": True}, id="rslora"),
    pytest.param(PLAIN | {"target_modules": EVERY_LAYER}, id="every-layer"),
    pytest.param(PLAIN | {"target_modules": ["to_q", "to_k"], **PATTERNS}, id="patterns"),
]
DORA = pytest.param(PLAIN | {"use_dora": True}, id="dora")


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    return one_batch(photos, encoder)


@pytest.fixture
def saved(tiny_edit: Path, tmp_path: Path):
    """A checkpoint's folder with an adapter of some kind, and the transformer that has it."""

    def save(**kind):
        if "rank_pattern" in kind:
            trained = transformer_of(tiny_edit)
            trained.add_adapter(LoraConfig(**kind))
            randomise(trained)
        else:
            trained = trained_adapter(tiny_edit, **kind)
        save_adapter(trained, tmp_path / "checkpoint")
        return tmp_path / "checkpoint", trained

    return save


def loaded(model: Path, file: Path) -> QwenImageTransformer2DModel:
    """The transformer of diffusers' pipeline with the adapter of a file."""
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    pipe = diffusers.QwenImageEditPipeline(transformer=transformer_of(model), **parts)
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    return pipe.transformer


def off(found: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest difference, against what the adapter changes."""
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


@pytest.mark.parametrize("kind", [*KINDS, DORA])
def test_an_exported_adapter_computes_the_same_in_diffusers_in_comfyui_and_back_from_its_file(
    tiny_edit: Path, batch, saved, tmp_path: Path, kind
) -> None:
    folder, trained = saved(**kind)
    out, expected, plain = tmp_path / "out.safetensors", call(trained, batch), call(transformer_of(tiny_edit), batch)
    export_adapter(folder, out, "diffusers")
    assert off(call(loaded(tiny_edit, out), batch), expected, plain) < 1e-5
    if "use_dora" in kind:
        out.unlink()
        with pytest.raises(UsageError, match="DoRA") as caught:
            export_adapter(folder, out, "comfyui")
        assert "merge" in caught.value.hint and not out.exists()
        return
    export_adapter(folder, out, "comfyui")
    assert off(call(loaded(tiny_edit, out), batch), expected, plain) < 1e-5
    found = comfyui_weights(transformer_of(tiny_edit).state_dict(), out)
    export_adapter(out, tmp_path / "back.safetensors", "diffusers")
    assert off(call(loaded(tiny_edit, tmp_path / "back.safetensors"), batch), expected, plain) < 1e-5
    trained.fuse_lora()
    trained.unload_lora()
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_every_layer_is_exported_under_comfyui_s_name(saved, tmp_path: Path) -> None:
    folder, trained = saved(**PLAIN, target_modules=EVERY_LAYER)
    export_adapter(folder, tmp_path / "out.safetensors", "comfyui")
    blocks = [f"transformer_blocks.{n}.{name}" for n in range(trained.config.num_layers) for name in COMFYUI_BLOCK]
    ends = ("lora_down.weight", "lora_up.weight", "alpha")
    expected = {f"diffusion_model.{layer}.{end}" for layer in blocks + COMFYUI_OTHER for end in ends}
    assert load_file(tmp_path / "out.safetensors").keys() == expected


def test_files_for_diffusers_name_what_each_of_its_releases_asks_for_and_nothing_that_an_older_peft_lacks(
    saved, tmp_path: Path
) -> None:
    # Settings without which a file means something else are kept under the names that peft has.
    assert set(adapter_file._SCALE + adapter_file._LAYERS) <= set(LoraConfig().to_dict())
    folder, _ = saved(**PLAIN, use_rslora=True)
    export_adapter(folder, tmp_path / "out.safetensors", "diffusers")
    for path in (folder / ADAPTER_FILE, tmp_path / "out.safetensors"):
        with safe_open(path, framework="pt") as file:
            settings = json.loads(file.metadata()["lora_adapter_metadata"])
        # diffusers 0.35 to 0.39 look the two patterns up, whether or not there are any.
        expected = {"r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern"}
        assert settings.keys() == {f"transformer.{name}" for name in expected}
        assert settings["transformer.rank_pattern"] == settings["transformer.alpha_pattern"] == {}


@pytest.mark.parametrize("form", ["comfyui", "diffusers"])
def test_the_factors_have_the_dtype_that_is_asked_for_and_have_to_fit_into_it(saved, tmp_path: Path, form) -> None:
    folder, _ = saved(r=4, lora_alpha=10.1)  # of which neither half has the value
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


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("kind", [*KINDS, DORA])
def test_the_merged_transformer_predicts_what_base_and_adapter_do_at_the_strength_asked_for(
    tiny_edit: Path, batch, saved, tmp_path, kind, scale
) -> None:
    folder, trained = saved(**kind)
    if scale != 1:
        trained.set_adapters(list(trained.peft_config), [scale])
    merge_adapter(open_pretrained(str(tiny_edit)), folder, tmp_path / "merged", scale=scale)
    weights = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}, "not as they were stored"
    merged = QwenImageTransformer2DModel.from_pretrained(tmp_path / "merged")
    assert merged.config.num_layers == trained.config.num_layers
    assert off(call(merged, batch), call(trained, batch), call(transformer_of(tiny_edit), batch)) < 1e-4


@pytest.mark.parametrize("kind", [KINDS[0], DORA])
def test_merging_in_bfloat16_loses_little_more_than_rounding(tiny_edit: Path, saved, tmp_path: Path, kind) -> None:
    folder, _ = saved(**kind)
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        merge_adapter(open_pretrained(str(tiny_edit)), folder, tmp_path / str(dtype), dtype)
    exact, found = (load_file(tmp_path / str(dtype) / "diffusion_pytorch_model.safetensors") for dtype in dtypes)
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
    tiny_edit: Path, saved, tmp_path: Path, monkeypatch, fault: str, words: str
) -> None:
    folder, _ = saved(**PLAIN)
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
def tool(monkeypatch):
    """tools/export_adapter.py as a function of its arguments."""
    spec = importlib.util.spec_from_file_location("export_tool", ROOT / "tools" / "export_adapter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "quiet_libraries", lambda: None)
    level = logging.getLogger("diffusers").level

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["export_adapter.py", *map(str, arguments)])
        return module.main()

    yield run
    logging.getLogger("diffusers").setLevel(level)


def test_the_tool_exports_and_merges_the_latest_checkpoint_of_a_run(tool, tiny_edit: Path, saved, tmp_path) -> None:
    folder, _ = saved(**PLAIN)
    folder.rename(tmp_path / "checkpoint-000010")
    assert tool(tmp_path, "--output", tmp_path / "out.safetensors", "--dtype", "bfloat16") == 0
    assert next(iter(load_file(tmp_path / "out.safetensors"))).startswith("diffusion_model.")
    assert tool(tmp_path, "--merge", "--model", tiny_edit, "--output", tmp_path / "merged") == 0
    QwenImageTransformer2DModel.from_pretrained(tmp_path / "merged")


def test_the_tool_tells_of_a_fault_in_one_line_and_by_its_exit_code(tool, tmp_path: Path, capsys) -> None:
    assert tool(tmp_path, "--output", tmp_path / "out.safetensors") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no adapter found")
    for wrong in (["--merge"], ["--scale", "2"], ["--merge", "--model", "m", "--format", "comfyui"]):
        with pytest.raises(SystemExit, match="2"):
            tool(tmp_path, "--output", tmp_path / "out", *wrong)

"""A dry run tells what a run would do, on a GPU that need not be there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig

from qie.config import load_config
from qie.errors import ConfigError, QieError, UsageError
from qie.families import FAMILIES
from qie.pretrained import open_pretrained
from qie.shards.sample_table import Columns
from qie.training import memory
from qie.training.datasheets import DATASHEETS, Datasheet, named_datasheet
from qie.training.dry_run import Forecast, Gpu, forecast
from qie.training.flops import Architecture, step_flops
from qie.training.memory import Parameters, Setup, estimate, fill_memory
from qie.training.model.blocks import KeptActivations
from qie.training.roofline import step_time
from tests.conftest import ROOT
from tests.training.small import LORA_TARGETS

H100 = DATASHEETS["H100"]


@pytest.fixture(scope="module")
def released() -> Setup:
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(num_layers=60, joint_attention_dim=3584).requires_grad_(False)
        transformer.add_adapter(LoraConfig(r=16, target_modules=LORA_TARGETS))
    return Setup(Architecture.of(transformer.config), Parameters.of(transformer), 8192, 1408, 4096)


@pytest.fixture(scope="module")
def newer() -> Setup:
    """Qwen-Image-2.1 as it was released."""
    if not hasattr(diffusers, "QwenImage21Transformer2DModel"):
        pytest.skip("Qwen-Image-2.1 needs diffusers 0.42")
    with torch.device("meta"):
        transformer = diffusers.QwenImage21Transformer2DModel().requires_grad_(False)
        transformer.add_adapter(LoraConfig(r=16, target_modules=LORA_TARGETS))
    return Setup(Architecture.of(transformer.config), Parameters.of(transformer), 8192, 89, 4096)


@pytest.fixture
def told(released: Setup, monkeypatch: pytest.MonkeyPatch):
    """A function that forecasts a run of the released model."""
    monkeypatch.setattr(memory, "empty_transformer", lambda pretrained: None)
    monkeypatch.setattr(memory, "add_lora", lambda *arguments, **more: None)
    monkeypatch.setattr(memory.Architecture, "of", lambda config: released.architecture)
    monkeypatch.setattr(memory.Parameters, "of", lambda transformer: released.parameters)
    monkeypatch.setattr(memory, "empty_transformer", lambda pretrained: SimpleNamespace(config={}))

    def tell(*settings: str, stream=None, family: str = "edit", device: str = "cpu", **options) -> Forecast:
        config = load_config(ROOT / "configs" / "edit_lora.yaml", settings)
        accelerator = SimpleNamespace(device=torch.device(device), num_processes=1, distributed_type="NO")
        return forecast(config, SimpleNamespace(family=FAMILIES[family]), stream, accelerator, **options)

    return tell


def stream_of(*samples: tuple[int, int, int], held_out: int = 0) -> SimpleNamespace:
    """Of samples with so many target, control and text tokens."""
    shapes = [SimpleNamespace(target=(2, 2 * target), controls=[(2, 2 * one)]) for target, one, _ in samples]
    numbers = np.arange(len(samples))
    columns = Columns(numbers, tuple(shapes), numbers, np.array([text for *_, text in samples]), numbers, numbers + 1)
    return SimpleNamespace(samples=SimpleNamespace(columns=columns), held_out=numbers[:held_out])


def tokens_of(setup: Setup) -> tuple[int, int | None, int]:
    return setup.image_tokens, setup.target_tokens, setup.text_tokens


def test_an_h100_needs_the_seconds_of_the_time_model(released: Setup) -> None:
    """Products at 680 TFLOP/s, attention at 600 and 480, other bytes at 2.7 TB/s."""
    found = step_time(released, H100)
    assert found.total == pytest.approx(1.55, rel=0.03)
    assert found.total == found.products + found.attention + found.pointwise + found.optimizer
    flops = step_flops(released.architecture, 8192, 1408, all_trained=False, target_tokens=4096)
    assert found.mfu == pytest.approx(flops.model / found.total / 989e12)
    assert step_time(replace(released, compiled=True), H100).total == pytest.approx(1.25, rel=0.03)
    fewer = [step_time(replace(released, kept=KeptActivations(*kept)), H100) for kept in ((0, 60), (60, 0))]
    assert found.total > fewer[0].total > fewer[1].total
    assert fewer[0].products == found.products and fewer[0].pointwise == found.pointwise
    assert found.attention - fewer[0].attention == pytest.approx(67.3e12 / (989e12 * 0.61), rel=0.01)
    restored = step_time(replace(released, quantize="fp8"), H100).pointwise - found.pointwise
    assert restored == pytest.approx(0.43, abs=0.03)
    in_fp8 = step_time(replace(released, quantize="fp8", fp8_compute=True), H100)
    assert in_fp8.products / found.products == pytest.approx(0.78, abs=0.01)
    assert in_fp8.pointwise - found.pointwise == pytest.approx(restored * 16 / 36)


def test_a_step_of_several_batches_and_samples_takes_as_many_times_as_long(released: Setup) -> None:
    one, three = step_time(released, H100), step_time(replace(released, batch_size=3), H100, batches=2)
    for part in ("products", "attention", "pointwise"):
        assert getattr(three, part) == pytest.approx(6 * getattr(one, part))
    assert three.optimizer == one.optimizer


def test_a_step_of_pairs_takes_twice_the_samples_and_the_base_s_pass_through_them(released: Setup) -> None:
    pairs, two = replace(released, targets=2, base_passes=1), replace(released, batch_size=2)
    found, expected = step_time(pairs, H100), step_time(two, H100)
    flops = step_flops(released.architecture, 8192, 1408, all_trained=False, target_tokens=4096)
    assert found.attention - expected.attention == pytest.approx(2 * flops.attention / (989e12 * 0.61))
    more = found.products - expected.products
    assert more == pytest.approx(2 * (flops.forward - flops.attention) / (989e12 * 0.69))
    assert memory.estimate(pairs) == memory.estimate(two)


def test_pairs_of_a_single_stream_share_text_and_controls_as_draws_do(newer: Setup) -> None:
    pairs, draws = replace(newer, targets=2), replace(newer, draws=2)
    assert memory.estimate(pairs) == memory.estimate(draws)
    assert step_time(pairs, H100) == step_time(draws, H100)


def test_copies_of_offloaded_weights_take_time_only_where_they_take_longer_than_the_rest(released: Setup) -> None:
    setup = replace(released, offload_blocks=30)
    found = step_time(setup, H100)
    assert found.total == step_time(released, H100).total and 0 < found.copies < found.total
    slow = step_time(setup, replace(H100, link_gb_s=5.0))
    block = 36 * 3072**2 * 2
    assert slow.total == slow.copies + slow.optimizer == pytest.approx(2 * 30 * block / 4.0e9, rel=0.01)


def test_a_gpu_has_its_name_with_and_without_its_maker_and_perhaps_its_memory() -> None:
    rtx = DATASHEETS["GeForce RTX 4090"]
    assert {named_datasheet(name) for name in ("4090", "rtx 4090", "NVIDIA GeForce RTX 4090", "GeForce RTX 4090")} == {
        rtx
    }
    assert named_datasheet("A100").memory_gb == 80 and named_datasheet("A100-SXM4-40GB").memory_gb == 40
    assert named_datasheet("MI300X").memory_gb == 192
    with pytest.raises(UsageError, match=r"(?s)no GPU.*--gpu.*RTX 5090.*RTX 9090.*--vram"):
        named_datasheet("RTX 9090")


def test_a_dry_run_fills_the_memory_of_the_gpu_that_is_named(told, released: Setup) -> None:
    found = told(gpu="H100")
    setup = replace(released, text_tokens=1437, accumulates=True)
    assert found.setup == fill_memory(setup, 72e9) and found.setup.kept.blocks > 0
    assert found.gpu == Gpu("H100", H100, 80e9, 72e9)
    assert told(gpu="H100", vram_gb=60.0).setup == fill_memory(setup, 54e9)
    assert told(vram_gb=60.0).setup == fill_memory(setup, 54e9)
    assert (
        told(gpu="H100").setup != setup == told().setup == told("train.gradient_checkpointing=true", gpu="H100").setup
    )
    assert told("cache.keep.latents=gpu", gpu="H100").gpu.budget_bytes == 64e9
    assert told("logging.peak_tflops=500", gpu="H100").gpu.datasheet.tflops == 500


def test_a_dry_run_takes_the_gpu_that_is_here(told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (130 * 10**9, 150 * 10**9))
    assert told(device="cuda").gpu == Gpu("NVIDIA H200", DATASHEETS["H200"], 130e9, 115e9)
    assert told(device="cuda", gpu="L4").gpu == Gpu("L4", DATASHEETS["L4"], 24e9, 24e9 * 0.9)


def test_memory_is_that_of_the_largest_sample_and_time_that_of_the_mean(told, released: Setup) -> None:
    stream = stream_of((4096, 4096, 1400), (1024, 1024, 400), (1024, 2048, 600), held_out=1)
    found = told(stream=stream, gpu="H100")
    assert tokens_of(found.setup) == (8192, 4096, 1400)
    assert tokens_of(found.mean) == (round((8192 + 2048 + 3072) / 3), 2048, 800)
    assert found.samples == 2
    seconds = step_time(found.mean, H100, 4)
    assert f"a step      about {seconds.total:.2f} s, {seconds.mfu:.0%} MFU" in "\n".join(found.lines())


@pytest.mark.parametrize(
    ("family", "settings", "tokens"),
    [
        ("edit", [], (8192, 1437)),
        ("edit_plus", [], (8192, 288)),
        ("edit", ["data.area_px=[262144, 589824]"], (4608, 852)),
        ("edit_plus", ["data.buckets_px=[[512, 1024]]"], (4096, 288)),
        ("edit", ["data.text_area_px=262144"], (8192, 434)),
        ("qwen_image_21", [], (8192, 100)),  # its stored text has no tokens of images
    ],
)
def test_without_samples_their_sizes_follow_from_the_configuration(told, family: str, settings, tokens) -> None:
    found = told(*settings, family=family)
    image, text = tokens
    assert tokens_of(found.setup) == (image, image // 2, text)
    assert found.samples is None


def test_a_forecast_counts_the_base_s_passes_for_pairs_and_as_often_as_preserved_rows_are_drawn(told) -> None:
    sources = "data.source=[{source: a, weight: 3}, {source: b, preserve: true}]"
    setups = [told(one).setup for one in ("loss.kind=flow_dpo", sources, "data.source=a")]
    assert [(one.base_passes, one.targets) for one in setups] == [(1, 2), (0.25, 1), (0, 1)]


def test_a_forecast_reads_like_this(released: Setup) -> None:
    setup = replace(released, quantize="fp8", offload_blocks=20, kept=KeptActivations(10, 5), batch_size=2)
    gpu = Gpu("H100", H100, 80e9, 72e9)
    lines = list(Forecast(setup, setup, 1200, 3000, 4, gpu).lines())
    assert lines[:3] == [
        "samples     1,200 of at most 8,192 image and 1,408 text tokens",
        "steps       3,000 of 8 samples, 20.0 epochs",
        "blocks      60: 10 kept, 5 recomputed but for attention, 45 recomputed, 20 offloaded: 6.8 GB of host memory",
    ]
    parts = [f"  {line}" for line in estimate(setup).lines()]
    assert lines[3:-2] == ["memory", *parts[:-1], f"{parts[-1]} of 80.0 GB, H100"]
    assert "meanwhile" in lines[-2] and lines[-1].startswith("the run     about ") and lines[-1].endswith(" min")


def test_where_nothing_is_known_of_a_gpu_its_time_is_not_told(released: Setup) -> None:
    nameless = Gpu("a GPU", None, 50e9, 45e9)
    for gpu, word in ((None, "no GPU is here"), (nameless, "not known for a GPU")):
        *_, last = Forecast(released, released, None, 10, 1, gpu).lines()
        assert last.startswith("time ") and word in last
    in_float32 = replace(released, value_bytes=4)
    *_, last = Forecast(in_float32, in_float32, None, 10, 1, Gpu("H100", H100, 80e9, 0)).lines()
    assert "bf16 only" in last


def test_a_run_that_does_not_fit_is_refused_with_what_to_change(released: Setup) -> None:
    small = Datasheet(100.0, 24, 1000, 31.5)
    with pytest.raises(QieError, match=r"(?s)more memory.*L4.*47\.\d GB.*24\.0 GB.*offload_blocks") as caught:
        Forecast(released, released, None, 10, 1, Gpu("L4", small, 24e9, 0.0)).require_memory()
    assert caught.value.exit_code == 1
    Forecast(released, released, None, 10, 1, Gpu("H100", H100, 80e9, 0.0)).require_memory()
    Forecast(released, released, None, 10, 1, None).require_memory()


def test_more_offloaded_blocks_than_there_are_are_refused(released: Setup) -> None:
    with pytest.raises(ConfigError, match=r"(?s)fewer blocks.*at most 60.*61"):
        estimate(replace(released, offload_blocks=61))


def test_more_draws_than_memory_has_room_for_are_refused_with_fewer(newer: Setup) -> None:
    small = Gpu("RTX 4090", DATASHEETS["GeForce RTX 4090"], 24e9, 0.0)
    Forecast(newer, newer, None, 10, 1, small).require_memory()
    many = replace(newer, draws=4, batch_size=2)
    with pytest.raises(QieError, match=r"(?s)more memory.*37\.\d GB.*train\.draws_per_sample=1: 13\.\d GB less"):
        Forecast(many, many, None, 10, 1, small).require_memory()
    lines = list(Forecast(many, many, None, 10, 1, small).lines())
    assert lines[:3] == [
        "samples     not encoded yet; assumed: 8,192 image and 89 text tokens each",
        "steps       10 of 2 samples of 4 draws each",
        "blocks      32: 32 recomputed",
    ]


def test_a_token_of_qwen_image_21_is_a_latent_pixel_and_rows_have_any_number_of_controls(told) -> None:
    stream = stream_of((1024, 1024, 89), (1024, 1024, 80))
    stream.samples.columns.shape_names[1].controls.clear()
    found = told(stream=stream, family="qwen_image_21")
    assert (*tokens_of(found.setup), found.setup.controls) == (2 * 4096, 4096, 89, 1)
    assert (*tokens_of(found.mean), found.mean.controls) == (3 * 2048, 4096, 84, 0.5)


def test_a_draw_more_takes_less_time_than_a_sample_more(newer: Setup) -> None:
    one, four = (step_time(replace(newer, draws=draws), H100) for draws in (1, 4))
    assert 0.6 < (four.total - four.optimizer) / (4 * (one.total - one.optimizer)) < 0.7
    assert four.mfu == pytest.approx(one.mfu, rel=0.05)


@pytest.mark.parametrize(("weights", "ending"), [(True, "*"), (False, "*.json")])
def test_of_a_model_on_the_hub_a_dry_run_downloads_configurations_alone(
    tiny_edit, monkeypatch: pytest.MonkeyPatch, weights: bool, ending: str
) -> None:
    asked: list[list[str]] = []
    download = lambda name, allow_patterns: asked.append(allow_patterns) or tiny_edit  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    open_pretrained("someone/model", components=("transformer",), weights=weights)
    assert asked == [["model_index.json", f"transformer/{ending}"]]

"""The small model's making: what its VAE and its transformer compute at their start, and all steps on a small scale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from qie.cli import precompute, train
from qie.training.objective import velocity
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def tools() -> Any:
    """The two tools, imported as a script of that folder imports them."""
    folder = str(Path(__file__).parents[2] / "tools")
    sys.path.insert(0, folder)
    try:
        import small_vae
        import train_small_model
    finally:
        sys.path.remove(folder)
    return small_vae, train_small_model


@pytest.fixture(scope="module")
def vae(tools: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A still VAE fitted to smooth random images, its components, and the images."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(8, 3, 16, 16, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=64, mode="bicubic").clamp(-1, 1)
    images += torch.randn(images.shape, generator=generator) * 0.05
    torch.manual_seed(0)
    still = tools[0].still_vae()
    components = tools[0].fit_encoder(still, images)
    tools[0].start_decoder(still, 0)
    return still, components, images


def test_the_encoder_computes_the_principal_components_of_blocks(tools: Any, vae: Any) -> None:
    still, components, images = vae
    with torch.no_grad():
        found = tools[0].encode(still, images)
    expected = torch.nn.functional.conv2d(images, components, stride=8)
    assert (found - expected).std() < 0.1 * expected.std()
    assert expected.std((0, 2, 3)).allclose(torch.full((16,), tools[0].LATENT_STD), rtol=0.02)


def test_the_video_vae_computes_on_a_frame_what_the_still_one_computes(tools: Any, vae: Any) -> None:
    still, _, images = vae
    video = tools[0].to_video(still.state_dict())
    with torch.no_grad():
        latents = tools[0].encode(still, images[:2])
        assert video.encode(images[:2, :, None]).latent_dist.mode()[:, :, 0].allclose(latents, atol=1e-4)
        decoded = tools[0].decode(still, latents).clamp(-1, 1)
        assert video.decode(latents[:, :, None]).sample[:, :, 0].allclose(decoded, atol=1e-4)


def test_at_its_start_the_transformer_copies_the_control(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import QwenImageTransformer2DModel

    tool = tools[1]
    monkeypatch.setattr(tool, "LAYERS", 2)
    model = QwenImageTransformer2DModel(
        in_channels=tool.TOKEN,
        out_channels=16,
        num_layers=2,
        num_attention_heads=tool.HEADS,
        attention_head_dim=tool.HEAD_WIDTH,
        joint_attention_dim=tool.TEXT_WIDTH,
        axes_dims_rope=tool.AXES,
    )
    tool.start_transformer(model, 0)
    generator = torch.Generator().manual_seed(0)
    control, noise = (torch.randn(2, 16, 1, 16, 16, generator=generator) for _ in range(2))
    prompt = torch.randn(2, 7, tool.TEXT_WIDTH, generator=generator)

    class Batch:
        control_latent, image_slots = (control,), None

        def __len__(self) -> int:
            return 2

    with torch.no_grad():
        found = velocity(model, noise, torch.ones(2), Batch(), prompt, (7, 7))  # type: ignore[arg-type]
    assert (found - (noise - control)).square().mean() < 0.3  # of 2, were it to give zeros


def test_all_steps_make_a_model_from_photographs_and_measure_it_and_none_is_done_twice(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few small pictures, and a step or two of each training. qie's commands run in this process, to be quick."""
    tool = tools[1]
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "photographs").mkdir()
    for number in range(16):
        levels = torch.randint(0, 256, (10, 10, 3), generator=generator, dtype=torch.uint8).numpy()
        Image.fromarray(levels).resize((160, 160)).save(tmp_path / "photographs" / f"{number:02d}.jpg")
    (tmp_path / "photographs.done").touch()
    monkeypatch.setattr(tool, "VAE_STEPS", 1)
    monkeypatch.setattr(tool, "SIDE_PX", 64)
    monkeypatch.setattr(tool, "ROWS", 16)
    monkeypatch.setattr(tool, "SMALL", tool.Stage(32, 16, 2, 1e-3))
    monkeypatch.setattr(tool, "LARGE", tool.Stage(64, 8, 1, 1e-3))
    monkeypatch.setattr(tool, "EDITS", {name: tool.EDITS[name] for name in ("darker", "brighter")})
    monkeypatch.setattr(tool, "TRIALS", 2)
    ran = []

    def run(command: list[str], check: bool) -> None:
        ran.append(command[2].rpartition(".")[2])
        small = ["--set", "data.batch_size=4", "--set", "validation.rows=4", "--set", "train.ema_decay=0.5"]
        main = {"precompute": precompute.main, "train": train.main}[ran[-1]]
        result = CliRunner().invoke(main, [*command[3:], *small], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    monkeypatch.setattr(subprocess, "run", run)
    assert tool.main([str(tmp_path)]) == 0
    assert ran == ["precompute", "train"] * 2
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert set(measured) == {"darker", "brighter", "told apart"} and measured["told apart"]["of"] == 2
    assert {file.dtype for file in _weights(tmp_path / "small")} == {torch.float16}
    assert (tmp_path / "edits.jpg").exists() and (tmp_path / "curves.png").exists()
    capsys.readouterr()
    assert tool.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "" and len(ran) == 4


def test_the_model_in_the_repository_is_what_the_tool_builds_but_for_its_training(tools: Any) -> None:
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    folder = ROOT / "configs" / "small_model"
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert size < 12e6
    shape = AutoencoderKLQwenImage.load_config(folder / "vae")
    assert {name: shape[name] for name in tools[0].SHAPE} == tools[0].SHAPE
    transformer = QwenImageTransformer2DModel.load_config(folder / "transformer")
    assert (transformer["num_layers"], transformer["num_attention_heads"]) == (tools[1].LAYERS, tools[1].HEADS)


def _weights(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return [tensor for file in folder.rglob("*.safetensors") for tensor in load_file(file).values()]

"""The small model's start: what its VAE and its transformer compute before they are trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qie.training.objective import velocity


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
        control_latent = (control,)

        def __len__(self) -> int:
            return 2

    with torch.no_grad():
        found = velocity(model, noise, torch.ones(2), Batch(), prompt, None)  # type: ignore[arg-type]
    assert (found - (noise - control)).square().mean() < 0.3  # of 2, were it to give zeros

"""model.vae: another VAE of the same latent space, wherever the model's VAE is used; one of another is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qie.config import Config
from qie.data.sources import open_source
from qie.encode.another_vae import same_encoder
from qie.encode.options import EncoderOptions, config_key, known_fields
from qie.errors import ModelError
from qie.from_config import open_encoder, open_predictor
from qie.html_report.decoding import VaeDecoder
from qie.inference import load_vae
from qie.pretrained import ENCODERS, open_pretrained
from tests.conftest import AREA_PX


@pytest.fixture(scope="module")
def another(tiny_edit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's VAE with other weights."""
    folder = tmp_path_factory.mktemp("vae") / "another"
    shutil.copytree(tiny_edit / "vae", folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file({name: value * 1.25 for name, value in load_file(file).items()}, file, {"format": "pt"})
    return folder


def config(model: Path, vae: Path | None) -> Config:
    return Config.model_validate(
        {
            "model": {"pretrained_model_name_or_path": str(model), "vae": vae and str(vae)},
            "data": {"area_px": AREA_PX, "allow_tiny": True},
            "cache": {"vae_encoder_device": "cpu", "text_encoder_device": "cpu"},
            "predict": {"devices": {"vae": "cpu", "text_encoder": "cpu", "transformer": "cpu"}},
        }
    )


def test_latents_are_the_other_vaes_and_their_recipe_differs_in_it_alone(
    tiny_edit: Path, another: Path, photos: Path, encoder
) -> None:
    found = open_encoder(config(tiny_edit, another))
    assert [line.split(":")[0] for line in encoder.recipe.explain(found.recipe)] == ["vae"]
    assert "model.vae" in config_key("vae")
    row = open_source(photos).read(0)
    own, other = encoder.encode(row), found.encode(row)
    assert own.key != other.key
    assert not torch.equal(own.pixel_latent, other.pixel_latent)
    assert torch.equal(own.prompt_embed, other.prompt_embed)


def test_a_copy_of_the_models_own_vae_wherever_it_lies_keeps_recipe_and_keys(
    tiny_edit: Path, encoder, tmp_path: Path
) -> None:
    shutil.copytree(tiny_edit / "vae", tmp_path / "vae")
    for place in (tmp_path / "vae", tmp_path):
        assert open_encoder(config(tiny_edit, place)).recipe == encoder.recipe


def test_a_vae_that_only_decodes_otherwise_keeps_recipe_and_keys_in_any_precision(
    tiny_edit: Path, photos: Path, encoder, tmp_path: Path
) -> None:
    """As decoders that are repaired afterwards do: nothing has to be encoded again."""
    shutil.copytree(tiny_edit / "vae", tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    changed = {
        name: value * 2 if "decoder" in name else value.double() if "encoder" in name else value
        for name, value in load_file(file).items()
    }
    save_file(changed, file, {"format": "pt"})
    found, row = open_encoder(config(tiny_edit, tmp_path)), open_source(photos).read(0)
    assert found.recipe == encoder.recipe
    assert torch.equal(found.encode(row).pixel_latent, encoder.encode(row).pixel_latent)
    trained = open_pretrained(str(tiny_edit), components=("transformer", "scheduler"), vae=str(tmp_path))
    assert known_fields(trained, EncoderOptions(areas_px=(AREA_PX,)))["vae"] == encoder.recipe.vae
    picture = open_predictor(config(tiny_edit, tmp_path)).pipeline.vae
    assert torch.equal(picture.decoder.conv_in.weight, changed["decoder.conv_in.weight"])
    settings = json.loads((tmp_path / "vae" / "config.json").read_text()) | {"num_res_blocks": 5}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(settings))
    assert not same_encoder(tmp_path / "vae", tiny_edit / "vae")


def test_training_knows_the_vae_that_its_shards_should_be_made_with(tiny_edit: Path, another: Path, encoder) -> None:
    trained = open_pretrained(str(tiny_edit), components=("transformer", "scheduler"), vae=str(another))
    expected = known_fields(trained, EncoderOptions(areas_px=(AREA_PX,)))["vae"]
    assert expected == open_encoder(config(tiny_edit, another)).recipe.vae != encoder.recipe.vae


def test_pictures_and_pages_are_decoded_by_it(tiny_edit: Path, another: Path, encoder) -> None:
    expected = load_file(another / "diffusion_pytorch_model.safetensors")
    for vae in (
        open_predictor(config(tiny_edit, another)).pipeline.vae,
        load_vae(open_pretrained(str(tiny_edit), vae=str(another)), torch.float32),
    ):
        assert all(torch.equal(value, expected[name]) for name, value in vae.state_dict().items())
    decoder = VaeDecoder(str(another))
    assert decoder.content == open_encoder(config(tiny_edit, another)).recipe.vae != encoder.recipe.vae
    assert decoder(torch.zeros(16, 1, 4, 6)).size == (48, 32)


MISFITS = {
    "class": ({"_class_name": "AutoencoderKL"}, ("the vae has an unexpected class", "found:    AutoencoderKL")),
    "channels": ({"z_dim": 8}, ("expected: z_dim: 16", "found:    8")),
    "scale": ({"temperal_downsample": [True]}, ("temperal_downsample", "found:    [true]")),
    "pictures": ({"input_channels": 4}, ("expected: input_channels: 3", "found:    4")),
    "mean": ({"latents_mean": [0.5] * 16}, ("expected: latents_mean: [", "found:    [0.5, 0.5,")),
    "deviation": ({"latents_std": None}, ("expected: latents_std: [", "found:    null")),
}


@pytest.mark.parametrize(("changes", "words"), MISFITS.values(), ids=MISFITS.keys())
def test_a_vae_of_another_latent_space_is_refused_in_one_error(
    tiny_edit: Path, another: Path, tmp_path: Path, changes: dict, words: tuple[str, ...]
) -> None:
    shutil.copytree(another, tmp_path / "vae")
    settings = json.loads((another / "config.json").read_text()) | changes
    (tmp_path / "vae" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError) as caught:
        open_pretrained(str(tiny_edit), components=("transformer", "scheduler"), vae=str(tmp_path))
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert str(tmp_path / "vae" / "config.json") in text


def test_a_folder_without_a_vae_is_refused(tiny_edit: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"(?s)holds no VAE.*weights\.bin.*correct model\.vae") as caught:
        open_pretrained(str(tiny_edit), vae=str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_of_the_hub_the_vae_alone_is_downloaded_and_the_models_own(
    tiny_edit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}
    download = lambda name, allow_patterns: asked.update({name: allow_patterns}) or tiny_edit  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    open_pretrained("someone/model", components=ENCODERS, vae="someone/vae")
    assert asked["someone/vae"] == ["config.json", "diffusion_pytorch_model*", "vae/*"]
    assert "vae/*" in asked["someone/model"], "which the other one is compared with"

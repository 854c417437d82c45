"""qie-predict and sample images for Qwen-Image-2.1: with images and without, with adapters, with opacity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from qie.config import AdapterConfig, load_config
from qie.encode.images import on_background
from qie.errors import ModelError, QieError
from qie.families import FAMILIES
from qie.from_config import open_predictor, open_samples
from qie.inference import predictor as inference
from qie.inference.pipelines import _NoProcessor, make_pipeline
from qie.pretrained import open_pretrained
from qie.training.model.adapter_file import ADAPTER_FILE
from qie.training.model.blocks import KeptActivations, checkpoint_activations, compile_blocks
from qie.training.model.load import save_transformer
from qie.training.model.lora import add_frozen_adapters, save_adapter
from qie.training.model.training_forward import use_training_forward
from tests.predict.commands import run_predict, write_config
from tests.training.adapters import randomise, trained_adapter, transformer_of

CPU = torch.device("cpu")
PROMPT = "make it night"


@pytest.fixture(scope="module")
def images(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two photographs, the second one transparent towards its top."""
    one, other = sorted((photos / "control_images").glob("*.png"))[:2]
    clear = Image.open(other).convert("RGB")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    place = tmp_path_factory.mktemp("images") / "clear.png"
    clear.save(place)
    return [one, place]


@pytest.fixture(scope="module")
def lora(tiny_21: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    save_adapter(trained_adapter(tiny_21, r=4, lora_alpha=10.0), folder)
    return folder


@pytest.fixture
def made(tiny_21: Path, tmp_path: Path):
    """Run qie-predict in a folder with a configuration; see that it ends with `code`."""
    write_config(tmp_path / "config.yaml", tiny_21)

    def run(*arguments: object, code: int = 0, output: str | None = "out.png", prompt: str | None = PROMPT):
        asked = [] if output is None else ["--output", tmp_path / output]
        asked += [] if prompt is None else ["--prompt", prompt]
        result = run_predict("--config", tmp_path / "config.yaml", *asked, *arguments, code=code)
        return opened(tmp_path / (output or "a.png")) if code == 0 else result.stderr

    return run


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
    return image


def told(image: Image.Image) -> dict:
    return json.loads(image.text["qie"])


def test_text_alone_makes_a_square_of_the_area_at_the_family_s_own_steps_and_guidance(made) -> None:
    image = made()
    assert image.size == (128, 128) and image.mode == "RGB"
    assert (told(image)["steps"], told(image)["cfg"], told(image)["images"]) == (40, 1.0, [])


def test_the_noise_levels_of_the_model_are_its_steps_unless_steps_are_asked_for(
    made, tiny_21: Path, tmp_path: Path
) -> None:
    folder = model_with(tiny_21, tmp_path, [1.0, 0.7, 0.4, 0.1])
    model = ("--set", f"model.pretrained_model_name_or_path={folder}")
    own, asked = made(*model), made(*model, "--steps", 4, output="asked.png")
    assert told(own)["steps"] == told(asked)["steps"] == 4
    assert told(own)["sample_sigmas"] == [1.0, 0.7, 0.4, 0.1] and "sample_sigmas" not in told(asked)
    assert own.tobytes() != asked.tobytes()


def model_with(model: Path, folder: Path, sigmas: object) -> Path:
    place = folder / "model"
    place.mkdir()
    for part in model.iterdir():
        (place / part.name).symlink_to(part)
    (place / "model_index.json").unlink()
    index = json.loads((model / "model_index.json").read_text())
    (place / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": sigmas}))
    return place


@pytest.mark.parametrize("sigmas", ["quick", [], [1.0, 0], [1.5], [True], {"a": 1}])
def test_noise_levels_that_are_none_are_refused(sigmas: object, tiny_21: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sample_sigmas are no noise levels"):
        _ = open_pretrained(str(model_with(tiny_21, tmp_path, sigmas)), components=()).sample_sigmas


def test_opacity_is_written_where_it_is_asked_for_and_else_the_image_is_on_white(made, images) -> None:
    two = ("--image", images[0], "--image", images[1], "--steps", 2)
    clear, plain = made(*two, "--alpha", output="clear.png"), made(*two)
    assert clear.mode == "RGBA" and np.asarray(clear)[..., 3].std() > 5
    assert plain.mode == "RGB" and on_background(clear, "#ffffff").tobytes() == plain.tobytes()
    assert told(clear)["alpha"] is True and "alpha" not in told(plain)
    opaque = made("--image", images[0], "--image", on_white(images[1]), "--steps", 2, output="opaque.png")
    assert opaque.tobytes() != plain.tobytes(), "the model sees how opaque an image is"


def on_white(path: Path) -> Path:
    on_background(Image.open(path), "#ffffff").save(path.with_name("opaque.png"))
    return path.with_name("opaque.png")


def test_a_batch_makes_what_its_lines_give_alone(made, images, tmp_path: Path) -> None:
    lines = [
        {"prompt": PROMPT, "output": "a.png"},
        {"images": [str(path) for path in images], "prompt": PROMPT, "seed": 4, "output": "b.png"},
    ]
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, lines)))
    how = ("--steps", 2, "--cfg", 2, "--negative-prompt", "dull")
    made("--batch", tmp_path / "batch.jsonl", *how, prompt=None, output=None)
    alone = made(*how, output="alone.png"), made(*how, "--image", images[0], "--image", images[1], "--seed", 4)
    assert [opened(tmp_path / name).tobytes() for name in ("a.png", "b.png")] == [one.tobytes() for one in alone]


def test_adapters_and_all_weights_of_a_run_make_what_diffusers_makes_with_them(
    made, images, lora, tiny_21: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer = transformer_of(tiny_21)
    for parameter in transformer.transformer_blocks[0].attn.parameters():
        parameter.requires_grad_(True)
    randomise(transformer, spread=0.1)
    save_transformer(transformer, tmp_path / "tuned" / "transformer", transformer.state_dict())
    conditions, embed = [], inference.embed_conditions
    monkeypatch.setattr(inference, "embed_conditions", lambda *args: conditions.append(embed(*args)) or conditions[-1])
    how = ("--image", images[0], "--steps", 2)
    plain = made(*how, output="plain.png")
    both = made(*how, "--lora", f"{lora}:0.6", "--transformer", tmp_path / "tuned")
    assert plain.tobytes() != both.tobytes()
    loaded = diffusers.QwenImage21Transformer2DModel.from_pretrained(tmp_path / "tuned", subfolder="transformer")
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder"))
    theirs = diffusers.QwenImage21Pipeline(**parts, processor=_NoProcessor(), transformer=loaded)
    theirs.load_lora_weights(lora, weight_name=ADAPTER_FILE, adapter_name="it")
    theirs.set_adapters(["it"], [0.6])
    loaded.eval()
    vae = diffusers.AutoencoderKLQwenImage21.from_pretrained(tiny_21 / "vae")
    pipeline = make_pipeline(open_pretrained(str(tiny_21)), vae, loaded)
    given = replace(conditions[0], images=(opened(images[0]).convert("RGBA"),))
    expected = inference.generate(pipeline, given, steps=2, cfg=1.0, seed=0)
    assert both.tobytes() == expected.tobytes()


def test_sample_images_are_those_of_qie_predict_with_the_adapter_also_on_a_quantised_base(
    made, images, lora, tiny_21: Path, tmp_path: Path
) -> None:
    samples = [{"images": [str(images[0])], "prompt": PROMPT, "seed": 4}, {"prompt": PROMPT}]
    model = {"pretrained_model_name_or_path": str(tiny_21), "quantize": "fp8"}
    write_config(tmp_path / "config.yaml", tiny_21, model=model, validation={"samples": samples, "sample_steps": 2})
    transformer = transformer_of(tiny_21, quantize="fp8")
    add_frozen_adapters(transformer, [AdapterConfig(path=str(lora))])
    edited, alone = open_samples(load_config(str(tmp_path / "config.yaml"), ()), CPU)(transformer)
    how = ("--lora", lora, "--steps", 2)
    assert made(*how, "--image", images[0], "--seed", 4).tobytes() == edited.tobytes()
    assert made(*how).tobytes() == alone.tobytes() and alone.size == (128, 128)


def test_a_transformer_in_training_makes_them_as_one_that_is_not_recomputed_offloaded_or_compiled(
    images, lora, tiny_21: Path, tmp_path: Path
) -> None:
    """And nothing is compiled for pictures: the training step has its own forward."""
    samples = [{"images": [str(path) for path in images], "prompt": PROMPT}, {"prompt": PROMPT}]
    write_config(tmp_path / "config.yaml", tiny_21, validation={"samples": samples, "sample_steps": 2})
    make = open_samples(load_config(str(tmp_path / "config.yaml"), ()), CPU)
    found, compiled = [], []
    for in_training in (False, True):
        transformer = transformer_of(tiny_21)
        add_frozen_adapters(transformer, [AdapterConfig(path=str(lora))])
        if in_training:
            use_training_forward(transformer.train())
            kept = KeptActivations(attention=1)
            checkpoint_activations(transformer, 1, 1, CPU, kept=kept, compiled=True)
            compile_blocks(transformer, lambda graph, _: compiled.append(graph) or graph.forward)
        found.append([image.tobytes() for image in make(transformer)])
        assert transformer.training == in_training
    assert found[0] == found[1] and compiled == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--size", "64x48"), ["both multiples of 32", "--size 64x64"]),
        (("--alpha", "--output", "out.jpg"), ["this format has no transparency", "out.jpg"]),
        (("--transformer", "."), ["no transformer in this folder"]),
    ],
)
def test_what_cannot_be_made_is_one_error(made, words: tuple[str, ...], expected: list[str]) -> None:
    message = made(*words, code=2)
    assert all(part in message for part in expected)


def test_a_prompt_has_the_room_that_controls_leave_among_the_positions(
    made, images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here 40, of which a control of 8×8 latents takes 8, and the target's one."""
    monkeypatch.setitem(FAMILIES, "qwen_image_21", replace(FAMILIES["qwen_image_21"], positions=40))
    monkeypatch.setattr(inference, "load_transformer", None)
    long = ("--prompt", " ".join(["word"] * 25), "--image", images[0])
    message = made(*long, prompt=None, code=2)
    assert "the prompt is too long" in message and "at most 31 tokens\n" in message


def test_a_negative_prompt_that_changes_nothing_is_told(made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.inference.requests.embed_requests", _stop)
    told = "warning: a negative prompt changes nothing without guidance"
    assert told in made("--negative-prompt", "dull", code=1)
    assert told not in made("--negative-prompt", "dull", "--cfg", 1, code=1) + made(code=1)


def _stop(*_: object) -> None:
    raise QieError("stopped")


def test_what_edit_cannot_make_names_who_can(made, tiny_edit: Path, lora) -> None:
    edit = ("--set", f"model.pretrained_model_name_or_path={tiny_edit}")
    assert "Qwen-Image-2.1 also makes images from text alone" in made(*edit, code=2)
    assert "expected: a model of family qwen_image_21" in made(*edit, "--alpha", code=2)


def test_controls_have_the_sizes_that_the_recipe_gives_them_with_areas_buckets_and_crops(
    made, images, tiny_21: Path, tmp_path: Path
) -> None:
    """Each its own, also where two of equal proportions differ in area: slots and latents are for one size alone."""
    opened(images[0]).resize((80, 80)).save(tmp_path / "small.png")
    controls = ("--image", images[0], "--image", tmp_path / "small.png", "--steps", 2)
    areas = made(*controls, "--set", "data.area_px=[4096, 16384]", output="areas.png")
    buckets = ("--set", "data.area_px=null", "--set", "data.buckets_px=[[96, 160], [128, 96]]")
    assert areas.size == (64, 64), "that of the last one"
    assert made(*controls, *buckets, output="buckets.png").size == (128, 96)
    assert made("--steps", 2, *buckets).size in ((96, 160), (128, 96))


def test_components_on_several_devices_make_what_they_make_on_one(images, tiny_21: Path, tmp_path: Path) -> None:
    """A hook takes the transformer's inputs to it and its outputs back, and leaves its cache of keys and values."""
    write_config(tmp_path / "config.yaml", tiny_21)
    config = load_config(str(tmp_path / "config.yaml"), ())
    predictors = [open_predictor(config) for _ in range(2)]
    predictors[1]._transformer_device = torch.device("cpu:0")  # the same place by another name
    modes: list[str] = []
    for predictor in predictors:
        predictor.pipeline.transformer.register_forward_pre_hook(
            lambda _, __, given: modes.append(given["kv_cache_mode"]), with_kwargs=True
        )
    one, other = (predictor.generate([opened(images[0])], PROMPT, steps=3) for predictor in predictors)
    assert one.tobytes() == other.tobytes() and modes == ["extract", "cached", "cached"] * 2
    hooked = [hasattr(predictor.pipeline.transformer, "_hf_hook") for predictor in predictors]
    assert hooked == [False, True] and predictors[1].pipeline.text_encoder is None


def test_the_pipeline_works_where_its_vae_is(tiny_21: Path, tmp_path: Path) -> None:
    write_config(tmp_path / "config.yaml", tiny_21)
    predictor = open_predictor(load_config(str(tmp_path / "config.yaml"), ()))
    predictor._vae_device = torch.device("meta")
    assert predictor.pipeline._execution_device.type == "meta"

"""Sample images while training: the model's as qie-predict would sampler them, at no cost to the run."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from PIL import Image
from transformers import Qwen2_5_VLModel

from qie.cli import predict
from qie.config import AdapterConfig, Config, LoraConfig, load_config
from qie.errors import UsageError
from qie.from_config import open_predictor, open_samples
from qie.pretrained import PretrainedModel, open_pretrained
from qie.training.model.load import load_transformer
from qie.training.model.lora import add_frozen_adapters, add_lora, save_adapter
from tests.conftest import AREA_PX

CPU = torch.device("cpu")
PROMPTS = ("make it night", "turn it to stone")


@pytest.fixture(scope="module")
def controls(photos: Path) -> list[Path]:
    return sorted((photos / "control_images").glob("*.png"))[:2]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples") / "config.yaml"


@pytest.fixture(scope="module")
def config(config_file: Path, tiny_edit: Path, controls: list[Path]) -> Config:
    return write_config(
        config_file,
        tiny_edit,
        [
            {"images": [str(path)], "prompt": prompt, "seed": seed}
            for seed, (path, prompt) in enumerate(zip(controls, PROMPTS, strict=True))
        ],
    )


@pytest.fixture(scope="module")
def pretrained(tiny_edit: Path) -> PretrainedModel:
    return open_pretrained(str(tiny_edit), components=("transformer", "scheduler"))


def write_config(path: Path, model: Path, samples: list[dict], **sections: dict) -> Config:
    content = {
        "model": {"pretrained_model_name_or_path": str(model)},
        "data": {"area_px": AREA_PX, "allow_tiny": True},
        "train": {"mixed_precision": "no"},
        "validation": {"samples": samples, "sample_steps": 2, "sample_cfg": 3.0},
        "predict": {"devices": {"vae": "cpu", "text_encoder": "cpu", "transformer": "cpu"}},
    }
    path.write_text(yaml.safe_dump(content | sections))
    return load_config(str(path), ())


def adapted(pretrained: PretrainedModel, dtype: torch.dtype = torch.float32, dropout: float = 0.0):
    """A transformer in training, whose adapter does something: B matrices start at zero."""
    transformer = load_transformer(pretrained, dtype)
    add_lora(transformer, LoraConfig(r=4, lora_alpha=10.0, lora_dropout=dropout), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return transformer.train()


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(np.float64)


def bits(images: list[Image.Image]) -> list[bytes]:
    return [image.tobytes() for image in images]


def text_encoders() -> int:
    gc.collect()
    return sum(type(thing) is Qwen2_5_VLModel for thing in gc.get_objects())


def test_a_sample_is_what_qie_predict_generates_with_the_adapter(
    config, config_file: Path, pretrained, controls, tmp_path: Path
) -> None:
    transformer = adapted(pretrained)
    samples = open_samples(config, CPU)(transformer)
    save_adapter(transformer, tmp_path)
    for seed, (sample, control, prompt) in enumerate(zip(samples, controls, PROMPTS, strict=True)):
        request = ["--image", control, "--prompt", prompt, "--seed", seed, "--steps", 2, "--cfg", 3.0]
        places = ["--config", config_file, "--output", tmp_path / "out.png", "--lora", tmp_path]
        result = CliRunner().invoke(predict.main, [str(word) for word in (*places, *request)])
        assert result.exit_code == 0, result.output
        assert bits([sample]) == bits([Image.open(tmp_path / "out.png")])
        assert pixels(sample).std() > 5
    assert samples[0].size != (1024, 1024)
    plain = open_samples(config, CPU)(load_transformer(pretrained, torch.float32))
    assert bits(plain) != bits(samples), "the adapter has no effect"


def test_adapters_of_the_configuration_are_part_of_what_qie_predict_generates(
    config, config_file: Path, pretrained, tmp_path: Path
) -> None:
    save_adapter(adapted(pretrained), tmp_path)
    frozen = [AdapterConfig(path=str(tmp_path), scale=0.5)]
    changed = config.model_copy(update={"model": config.model.model_copy(update={"adapters": frozen})})
    transformer = load_transformer(pretrained, torch.float32)
    add_frozen_adapters(transformer, frozen)
    add_lora(transformer, LoraConfig(r=2), seed=5)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.1)
    (tmp_path / "trained").mkdir()
    save_adapter(transformer, tmp_path / "trained")
    sample, settings = config.validation.samples[0], {"steps": 2, "cfg": 3.0}
    images = [Image.open(sample.images[0]).convert("RGB")]
    images_made = [
        open_predictor(part, lora).generate(images, sample.prompt, seed=sample.seed, **settings)
        for part, lora in ((changed, tmp_path / "trained"), (changed, None), (config, tmp_path / "trained"))
    ]
    assert bits(images_made[:1]) == bits(open_samples(config, CPU)(transformer)[:1])
    assert len(set(bits(images_made))) == 3
    # One of training alone is not, and need not be there any more.
    passed = [AdapterConfig(path=str(tmp_path / "gone"), scale=0.5, train_only=True)]
    changed = config.model_copy(update={"model": config.model.model_copy(update={"adapters": passed})})
    image = open_predictor(changed, tmp_path / "trained").generate(images, sample.prompt, seed=sample.seed, **settings)
    assert bits([image]) == bits(images_made[2:])


def test_generating_uses_no_dropout_and_leaves_the_transformer_as_it_was(config, pretrained) -> None:
    sampler = open_samples(config, CPU)
    transformer = adapted(pretrained, dropout=0.5)
    transformer.enable_gradient_checkpointing()
    transformer.transformer_blocks[0].eval()  # a part that someone keeps out of training
    modes = {name: module.training for name, module in transformer.named_modules()}
    before = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    states = torch.get_rng_state(), vars(transformer).get("forward"), torch.is_grad_enabled()

    samples = sampler(transformer)

    assert bits(sampler(transformer)) == bits(samples)
    assert bits(samples) == bits(sampler(adapted(pretrained).eval()))
    assert {name: module.training for name, module in transformer.named_modules()} == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in transformer.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (vars(transformer).get("forward"), torch.is_grad_enabled()) == states[1:]
    assert transformer.gradient_checkpointing
    assert all(parameter.grad is None for parameter in transformer.parameters())


def test_a_transformer_is_left_as_it_was_when_generating_fails(config, pretrained, monkeypatch) -> None:
    sampler, transformer = open_samples(config, CPU), adapted(pretrained)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(transformer, "forward", fail)
    with pytest.raises(Exception, match="out of memory while generating"):
        sampler(transformer)
    assert transformer.training and transformer.forward is fail


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["bf16 base", "float32 weights"])
def test_mixed_precision_gives_nearly_the_same(config, pretrained, weights: torch.dtype) -> None:
    kinds = torch.float32, torch.bfloat16
    one, other = (torch.randn(64, dtype=kind, generator=torch.Generator().manual_seed(0)) for kind in kinds)
    if not torch.allclose(one, other.float(), atol=0.1):
        pytest.skip(f"torch {torch.__version__} draws other noise in bfloat16")
    exact = open_samples(config, CPU)(adapted(pretrained))
    mixed = config.model_copy(update={"train": config.train.model_copy(update={"mixed_precision": "bf16"})})
    images = open_samples(mixed, CPU)(adapted(pretrained, weights))
    for image, one, other in zip(images, exact, reversed(exact), strict=True):
        assert image.size == one.size
        rounding = np.abs(pixels(image) - pixels(one)).mean()
        assert 0 < rounding < 4
        assert rounding < np.abs(pixels(other.resize(one.size)) - pixels(one)).mean() / 4


def test_no_text_encoder_stays_in_memory(config, pretrained, controls) -> None:
    before = text_encoders()
    sampler = open_samples(config, CPU)
    assert text_encoders() == before
    predictor = open_predictor(config, None)
    image = Image.open(controls[0]).convert("RGB")
    kept = predictor.generate([image], PROMPTS[0], steps=2)
    assert text_encoders() == before + 1
    freed = predictor.generate([image], PROMPTS[0], steps=2, keep_encoder=False)
    assert text_encoders() == before
    assert bits([kept]) == bits([freed])
    assert sampler(load_transformer(pretrained, torch.float32))


def test_qie_predict_frees_the_text_encoder_before_it_loads_the_transformer(
    config, config_file: Path, controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_beside = []

    def load(*arguments, **how):
        loaded_beside.append(text_encoders())
        return load_transformer(*arguments, **how)

    monkeypatch.setattr("qie.inference.predictor.load_transformer", load)
    before = text_encoders()
    places = ["--config", config_file, "--output", tmp_path / "out.png"]
    request = ["--image", controls[0], "--prompt", PROMPTS[0], "--steps", 2]
    assert CliRunner().invoke(predict.main, [str(word) for word in (*places, *request)]).exit_code == 0
    assert loaded_beside == [before]


def test_the_pipeline_works_where_its_vae_is(config) -> None:
    """Left to itself, diffusers takes the transformer's device, and hands the VAE tensors from there."""
    predictor = open_predictor(config, None)
    predictor._vae_device = torch.device("meta")
    assert predictor.pipeline._execution_device.type == "meta"


def test_an_edit_plus_model_takes_several_images(tiny_edit_plus: Path, controls, tmp_path: Path) -> None:
    samples = [
        {"images": [str(path) for path in controls[:count]], "prompt": PROMPTS[0], "negative_prompt": negative}
        for count, negative in ((1, " "), (2, " "), (2, "blurred"))
    ]
    config = write_config(tmp_path / "config.yaml", tiny_edit_plus, samples)
    pretrained = open_pretrained(str(tiny_edit_plus), components=("transformer", "scheduler"))
    images = open_samples(config, CPU)(load_transformer(pretrained, torch.float32))
    assert len(set(bits(images))) == 3


def test_without_samples_nothing_is_opened(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.pretrained.open_pretrained", None)
    none = config.model_copy(update={"validation": config.validation.model_copy(update={"samples": []})})
    assert open_samples(none, CPU) is None


@pytest.mark.parametrize(
    ("wrong", "where", "what"),
    [
        ({"images": ["nowhere.png"]}, "validation.samples.1.images: nowhere.png", "No such file"),
        ({"images": [__file__]}, f"validation.samples.1.images: {__file__}", "not an image"),
        ({"images": "twice"}, "validation.samples.1.images", "too many images for the model"),
        ({"images": []}, "validation.samples.1.images", "the model edits images, and was given none"),
        ({"prompt": " "}, "validation.samples.1.prompt", "the prompt is empty"),
        ({"negative_prompt": "<|im_end|>"}, "validation.samples.1.negative_prompt", "special token"),
    ],
)
def test_a_sample_that_cannot_be_generated_is_named_before_anything_is_loaded(
    config, controls, monkeypatch: pytest.MonkeyPatch, wrong: dict, where: str, what: str
) -> None:
    monkeypatch.setattr("qie.from_config.inference_encoder", None)
    good = config.validation.samples[0]
    if wrong.get("images") == "twice":
        wrong = {"images": [str(path) for path in controls]}
    samples = [good, good.model_copy(update=wrong)]
    bad = config.model_copy(update={"validation": config.validation.model_copy(update={"samples": samples})})
    with pytest.raises(UsageError) as caught:
        open_samples(bad, CPU)
    assert caught.value.where == where and what in caught.value.what


def test_a_prompt_that_is_too_long_for_the_transformer_is_refused(config, config_file: Path, tmp_path: Path) -> None:
    """Not by a traceback out of its rotary positions, neither before the run nor in qie-predict."""
    prompt = "word and " * 1000
    sample = config.validation.samples[0].model_copy(update={"prompt": prompt})
    long = config.model_copy(update={"validation": config.validation.model_copy(update={"samples": [sample]})})
    with pytest.raises(UsageError, match="the prompt is too long") as caught:
        open_samples(long, CPU)
    assert caught.value.where == "validation.samples.0"
    places = ["--config", config_file, "--image", sample.images[0], "--output", tmp_path / "out.png"]
    result = CliRunner().invoke(predict.main, [str(word) for word in (*places, "--prompt", prompt)])
    assert result.exit_code == 2 and "the prompt is too long" in result.stderr


def test_transparent_parts_have_the_colour_that_they_have_in_training(config, pretrained, tmp_path: Path) -> None:
    clear = tmp_path / "clear.png"
    Image.new("RGBA", (96, 64), (0, 0, 0, 0)).save(clear)
    images_made = []
    for background in ("#ffffff", "#00ff00"):
        sample = config.validation.samples[0].model_copy(update={"images": [str(clear)]})
        changed = config.model_copy(
            update={
                "data": config.data.model_copy(update={"background": background}),
                "validation": config.validation.model_copy(update={"samples": [sample]}),
            }
        )
        images_made += open_samples(changed, CPU)(load_transformer(pretrained, torch.float32))
    assert images_made[0].tobytes() != images_made[1].tobytes()

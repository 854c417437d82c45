"""qie-predict on a tiny model: every way to ask gives what diffusers' pipeline gives, and bad input is named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

from qie.cli import predict
from qie.config import AdapterConfig, load_config
from qie.errors import QieError, RowError
from qie.families import FAMILIES
from qie.from_config import open_samples
from qie.inference import predictor as inference
from qie.inference import requests
from qie.inference.predictor import Conditions, Predictor
from qie.pretrained import PretrainedModel, open_pretrained
from qie.training.model.adapter_file import ADAPTER_FILE
from qie.training.model.load import save_transformer
from qie.training.model.lora import add_frozen_adapters, save_adapter
from tests.conftest import AREA_PX
from tests.predict.commands import run_predict, write_config
from tests.training.adapters import randomise, trained_adapter, transformer_of

QUICK = ("--steps", 2, "--cfg", 1)
PROMPT = "make it night"


@pytest.fixture(scope="module")
def images(photos: Path) -> list[Path]:
    return sorted((photos / "control_images").glob("*.png"))[:2]


@pytest.fixture(scope="module")
def loras(tiny_edit: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of qie, and one of them in a file as others write it, its alpha beside the weights."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("first", "second")):
        trained = trained_adapter(tiny_edit, seed, r=4, lora_alpha=10.0, lora_dropout=0.5 * seed)
        save_adapter(trained, folder / name)
    state = load_file(folder / "first" / ADAPTER_FILE)
    names = {name: name.removeprefix("transformer.") for name in state}
    kohya = {n.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): state[name] for name, n in names.items()}
    alphas = {n.replace("lora_down.weight", "alpha"): torch.tensor(10.0) for n in kohya if "lora_down" in n}
    others = {f"diffusion_model.{name}": tensor.contiguous() for name, tensor in (kohya | alphas).items()}
    save_file(others, folder / "comfyui.safetensors")
    return {"first": folder / "first", "second": folder / "second", "comfyui": folder / "comfyui.safetensors"}


@pytest.fixture
def edit(tiny_edit: Path, images: list[Path], tmp_path: Path):
    """Run qie-predict in a folder with a configuration; with `code`, see that it ends so."""
    write_config(tmp_path / "config.yaml", tiny_edit)

    def run(*arguments: object, code: int = 0, single: bool = True, output: str = "out.png"):
        asked = ("--image", images[0], "--prompt", PROMPT, "--output", tmp_path / output) if single else ()
        return run_predict("--config", tmp_path / "config.yaml", *asked, *QUICK, *arguments, code=code)

    return run


def pixels(path: Path) -> bytes:
    return Image.open(path).tobytes()


def write_batch(folder: Path, *lines: dict) -> Path:
    (folder / "batch.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder / "batch.jsonl"


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # diffusers' own, of two adapters
@pytest.mark.parametrize("family", ["edit", "edit_plus"])
def test_guidance_a_size_and_scaled_loras_generate_what_diffusers_generates_with_them(
    family: str, loras, images, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch
) -> None:
    """Bit for bit, by the command; diffusers loads the adapters itself. Only its area is made smaller, to be quick."""
    folder = request.getfixturevalue(f"tiny_{family}")
    controls = images[: 1 if family == "edit" else 2]
    write_config(tmp_path / "config.yaml", folder)
    conditions = []
    embed = inference.embed_conditions
    monkeypatch.setattr(inference, "embed_conditions", lambda *args: conditions.append(embed(*args)) or conditions[-1])
    words = ["--config", tmp_path / "config.yaml", "--prompt", PROMPT, "--negative-prompt", "dull", "--output"]
    words += [tmp_path / "out.png", "--size", "96x144", "--cfg", 3, "--steps", 2, "--seed", 7]
    words += [word for control in controls for word in ("--image", control)]
    words += ["--lora", f"{loras['first']}:0.6", "--lora", f"{loras['second']}:-0.4"]
    result = CliRunner().invoke(predict.main, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output

    parts = dict.fromkeys(("text_encoder", "tokenizer", "processor"))
    kind = open_pretrained(str(folder)).family.pipeline
    pipe = getattr(diffusers, kind)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=diffusers.AutoencoderKLQwenImage.from_pretrained(folder / "vae"),
        transformer=transformer_of(folder),
        **parts,
    )
    for name in ("first", "second"):
        pipe.load_lora_weights(loras[name], weight_name=ADAPTER_FILE, adapter_name=name)
    pipe.set_adapters(["first", "second"], [0.6, -0.4])
    pipe.transformer.eval()
    module = sys.modules[type(pipe).__module__]
    original = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: original(AREA_PX, ratio))
    (scene,) = conditions
    opened = [Image.open(control).convert("RGB") for control in controls]
    embeds = {"prompt_embeds": scene.prompt[None], "negative_prompt_embeds": scene.negative[None]}
    masks = {f"{name}_mask": torch.ones(embed.shape[:2], dtype=torch.long) for name, embed in embeds.items()}
    expected = pipe(
        image=opened if family == "edit_plus" else opened[0],
        **embeds,
        **masks,
        true_cfg_scale=3.0,
        num_inference_steps=2,
        width=96,
        height=144,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    image_made = Image.open(tmp_path / "out.png")
    assert image_made.size == (96, 144)
    assert image_made.tobytes() == expected.tobytes()


def test_each_of_several_images_is_the_one_of_its_seed(edit, tmp_path: Path) -> None:
    result = edit("--num-images", 3, "--seed", 5)
    names = ["out-0.png", "out-1.png", "out-2.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == names
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == [str(tmp_path / name) for name in names]
    assert len({pixels(tmp_path / name) for name in names}) == 3
    edit("--seed", 6)
    assert pixels(tmp_path / "out.png") == pixels(tmp_path / "out-1.png")


def test_a_png_tells_how_it_was_generated(edit, loras, images, tiny_edit: Path, tmp_path: Path) -> None:
    edit("--lora", f"{loras['first']}:0.5", "--size", "64x48", "--num-images", 2, "--set", "model.quantize=int8")
    settings = json.loads(Image.open(tmp_path / "out-1.png").text["qie"])
    assert settings == {
        "prompt": PROMPT,
        "negative_prompt": " ",
        "images": [str(images[0])],
        "seed": 1,
        "size": [64, 48],
        "steps": 2,
        "cfg": 1.0,
        "model": str(tiny_edit),
        "quantize": "int8",
        "loras": [{"path": str(loras["first"]), "scale": 0.5}],
    }


def test_the_file_of_another_program_generates_as_the_checkpoint_that_it_was_made_from(edit, loras, tmp_path) -> None:
    edit()
    edit("--lora", loras["first"], output="qie.png")
    edit("--lora", loras["comfyui"], output="comfyui.png")
    plain, ours, theirs = (Image.open(tmp_path / f"{name}.png") for name in ("out", "qie", "comfyui"))
    difference = [abs(a - b) for a, b in zip(ours.tobytes(), theirs.tobytes(), strict=True)]
    assert max(difference) <= 1, "alpha is folded into the weights, which rounds otherwise"
    assert plain.tobytes() != ours.tobytes()


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_a_quantised_base_generates_as_it_did_while_the_adapter_was_trained(
    edit, tiny_edit: Path, loras, images, tmp_path: Path, kind: str
) -> None:
    sample = {"images": [str(images[0])], "prompt": PROMPT, "seed": 4}
    validation = {"samples": [sample], "sample_steps": 2, "sample_cfg": 1.0}
    model = {"pretrained_model_name_or_path": str(tiny_edit), "quantize": kind}
    write_config(tmp_path / "config.yaml", tiny_edit, model=model, validation=validation)
    transformer = transformer_of(tiny_edit, quantize=kind)
    add_frozen_adapters(transformer, [AdapterConfig(path=str(loras["first"]))])
    (expected,) = open_samples(load_config(str(tmp_path / "config.yaml"), ()), torch.device("cpu"))(transformer)
    edit("--seed", 4, "--lora", loras["first"])
    edit("--seed", 4, "--lora", loras["first"], "--set", "model.quantize=null", output="released.png")
    assert pixels(tmp_path / "out.png") == expected.tobytes() != pixels(tmp_path / "released.png")


def test_all_weights_of_a_run_take_the_place_of_the_base(edit, tiny_edit: Path, loras, tmp_path: Path) -> None:
    transformer = transformer_of(tiny_edit)
    for parameter in transformer.transformer_blocks[0].attn.parameters():
        parameter.requires_grad_(True)
    randomise(transformer, spread=0.1)
    save_transformer(transformer, tmp_path / "checkpoint" / "transformer", transformer.state_dict())
    edit()
    edit("--transformer", tmp_path / "checkpoint", output="tuned.png")
    edit("--transformer", tmp_path / "checkpoint" / "transformer", output="inside.png")
    edit("--transformer", tmp_path / "checkpoint", "--lora", loras["first"], output="both.png")
    plain, tuned, inside, both = (pixels(tmp_path / f"{name}.png") for name in ("out", "tuned", "inside", "both"))
    assert tuned == inside and len({plain, tuned, both}) == 3
    assert json.loads(Image.open(tmp_path / "tuned.png").text["qie"])["transformer"] == str(tmp_path / "checkpoint")


def test_a_transformer_that_is_none_or_another_models_is_refused(edit, tiny_edit: Path, loras, tmp_path: Path) -> None:
    assert "give it as --lora" in edit("--transformer", loras["first"], code=2).stderr
    assert "no transformer in this folder" in edit("--transformer", tmp_path, code=2).stderr
    shutil.copy(tiny_edit / "transformer" / "config.json", tmp_path)
    told = edit("--transformer", tmp_path, code=2).stderr
    assert f"put its files into {tmp_path / 'transformer'}" in told, "as qie export --merge may have written it"
    config = json.loads((tiny_edit / "transformer" / "config.json").read_text())
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config | {"joint_attention_dim": 3584}))
    message = edit("--transformer", tmp_path, code=2).stderr
    assert "another model" in message and "found:    3584" in message


def test_a_batch_generates_what_its_lines_give_alone_and_loads_each_model_once(
    edit, images, tmp_path: Path, monkeypatch
) -> None:
    lines = [
        {"image": str(images[0]), "prompt": PROMPT, "output": "one.png"},
        {"images": [str(images[1])], "prompt": "turn it to stone", "seed": 4, "output": "two.png"},
    ]
    events = []
    for name in ("load_transformer", "free", "embed_conditions"):
        original = getattr(inference, name)

        def wrapped(*given, name=name, original=original, **how):
            events.append(name)
            return original(*given, **how)

        monkeypatch.setattr(inference, name, wrapped)
    result = edit("--batch", write_batch(tmp_path, *lines), "--seed", 2, single=False)
    assert events == ["embed_conditions", "embed_conditions", "free", "load_transformer"]
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == [
        str(tmp_path / "one.png"),
        str(tmp_path / "two.png"),
    ]
    edit("--seed", 2)
    assert pixels(tmp_path / "one.png") == pixels(tmp_path / "out.png")
    stone = ("--image", images[1], "--prompt", "turn it to stone", "--seed", 4, "--output", tmp_path / "alone.png")
    edit(*stone, single=False)
    assert pixels(tmp_path / "two.png") == pixels(tmp_path / "alone.png")


def test_images_stay_when_a_later_line_fails(edit, images, tmp_path: Path, monkeypatch) -> None:
    lines = [{"image": str(images[0]), "prompt": PROMPT, "output": f"{name}.png"} for name in "abc"]
    save = requests.save_image

    def fail(image, path, settings):
        if path.name == "b.png":
            raise QieError("the disk is full")
        save(image, path, settings)

    monkeypatch.setattr(requests, "save_image", fail)
    batch = write_batch(tmp_path, *lines)
    result = edit("--batch", batch, single=False, code=1)
    assert f"{batch}, line 2" in result.stderr and "the disk is full" in result.stderr
    assert [path.name for path in tmp_path.glob("*.png")] == ["a.png"]


def test_a_line_that_cannot_be_embedded_is_named_before_the_transformer_is_loaded(
    edit, images, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(inference, "load_transformer", None)
    lines = [{"image": str(images[0]), "prompt": PROMPT, "output": "a.png"}]
    lines += [lines[0] | {"prompt": "word and " * 1000, "output": "b.png"}]
    batch = write_batch(tmp_path, *lines)
    message = edit("--batch", batch, single=False, code=2).stderr
    assert f"{batch}, line 2" in message and "the prompt is too long" in message
    lines[1] = {"images": [str(path) for path in images], "prompt": PROMPT, "output": "b.png"}
    message = edit("--batch", write_batch(tmp_path, *lines), single=False, code=2).stderr
    assert f"{batch}, line 2" in message and "too many images for the model" in message


def test_an_interrupted_run_leaves_no_half_file_and_the_former_one(edit, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "out.png").write_bytes(b"former")

    def interrupt(image, file, **_):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupt)
    edit(code=130)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "out.png"]
    assert (tmp_path / "out.png").read_bytes() == b"former"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name, t: (name.replace("blocks.0", "blocks.59"), t), ["the model has no layer transformer_blocks.59."]),
        (lambda name, t: (name, t.repeat(1, 2) if "lora_A" in name else t), ["lora_A.weight is [4, 64]", "has 32"]),
        (lambda name, t: (name, t[:8].clone() if "lora_B" in name else t), ["lora_B.weight is [8, 4]", "has 32"]),
    ],
)
def test_a_lora_of_another_model_is_refused_by_layer_and_shape_before_weights_are_read(
    edit, loras, tmp_path: Path, monkeypatch, change, words
) -> None:
    monkeypatch.setattr(inference, "load_transformer", None)
    monkeypatch.setattr(inference, "embed_conditions", None)
    changed = dict(change(*entry) for entry in load_file(loras["first"] / ADAPTER_FILE).items())
    save_file(changed, tmp_path / "other.safetensors")
    message = edit("--lora", tmp_path / "other.safetensors", code=2).stderr
    assert all(word in message for word in ["does not fit this model", str(tmp_path / "other.safetensors"), *words])


def test_the_same_lora_twice_is_refused_however_it_is_named(edit, loras, tmp_path: Path) -> None:
    first = loras["first"]
    for again in (f"{first}:0.5", first / ADAPTER_FILE, first / ".." / "first"):
        assert "the same LoRA is given twice" in edit("--lora", first, "--lora", again, code=2).stderr
    adapters = f"model.adapters=[{{path: {first}}}]"
    assert "the same LoRA is given twice" in edit("--lora", first, "--set", adapters, code=2).stderr


def test_options_that_contradict_or_lack_each_other_are_refused(edit, tmp_path: Path) -> None:
    batch = write_batch(tmp_path, {"image": "a.png", "prompt": "x", "output": "b.png"})
    assert "--image, --prompt, --output" in edit("--batch", batch, code=2).stderr
    assert "Missing option --output" in edit("--prompt", "x", single=False, code=2).stderr
    lacking = ("--prompt", "x", "--output", tmp_path / "out.png")
    assert "was given none" in edit(*lacking, single=False, code=2).stderr
    assert "makes no transparent images" in edit("--alpha", code=2).stderr
    assert "multiples of 16" in edit("--size", "100x100", code=2).stderr


def test_paint_is_generate_and_warns(monkeypatch) -> None:
    monkeypatch.setattr(Predictor, "generate", lambda self, *given, **settings: (given, settings))
    cpu = torch.device("cpu")
    predictor = Predictor(None, None, vae_device=cpu, transformer_device=cpu, dtype=torch.float32)
    with pytest.warns(DeprecationWarning, match=r"Predictor\.generate"):
        assert predictor.paint([], PROMPT, steps=3) == (([], PROMPT), {"steps": 3})


def test_a_prompt_that_fits_but_for_the_size_is_refused(monkeypatch) -> None:
    """The transformer's text positions begin behind half the larger side: 4096 − 8192 / 32 are left."""
    cpu = torch.device("cpu")
    edit = PretrainedModel(Path(), FAMILIES["edit"])
    predictor = Predictor(edit, None, vae_device=cpu, transformer_device=cpu, dtype=torch.float32)
    for length, negative in ((3841, None), (5, 3841), (3840, 3840)):
        texts = [None if count is None else torch.zeros(count, 8) for count in (length, negative)]
        monkeypatch.setattr(inference, "embed_conditions", lambda *_, texts=texts: Conditions((), AREA_PX, *texts))
        predictor.embed([], PROMPT, None)
        if 3841 not in (length, negative):
            assert predictor.embed([], PROMPT, None, (8192, 16)).prompt is texts[0]
            continue
        with pytest.raises(RowError, match="the prompt is too long"):
            predictor.embed([], PROMPT, None, (16, 8192))

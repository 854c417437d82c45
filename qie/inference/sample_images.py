"""Sample images of a training run: fixed images and prompts, generated with the model as it is.

The text encoder is freed before the transformer is loaded. The VAE is offloaded to the CPU, and resident on the
training device only while images are generated.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image

from qie.config import Config
from qie.encode import Encoder
from qie.errors import RowError, UsageError
from qie.families import Family
from qie.inference.pipelines import make_pipeline
from qie.inference.predictor import Conditions, embed_conditions, free, generate, load_vae
from qie.inference.requests import Sampling, check_controls, check_prompts, read_images, save_image
from qie.pretrained import PretrainedModel
from qie.stores import LocalFolder

INPUTS = "inputs"
INPUT_PX = 768
"""The longer side of a control beside sample images."""


class SampleImages:
    """Generates `validation.samples`, in their order, with a transformer on `device`.

    The images are a function of the transformer's weights alone, on any number of processes. The transformer and the
    global random state stay as they were: a run with samples equals the run without. The settings of an image are in
    its `info` under the name qie, and its controls, as images, under `qie controls`.

    Args:
        config: of the run.
        pretrained: the base model, with scheduler and vae.
        samples: the embedded `validation.samples`.
        device: of the transformer.
    """

    def __init__(
        self, config: Config, pretrained: PretrainedModel, samples: Sequence[Conditions], device: torch.device
    ) -> None:
        self._section, self._pretrained, self._samples, self._device = config.validation, pretrained, samples, device
        self._sampling = sampling_of(config, pretrained)
        self._dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
        self._vae = load_vae(pretrained, self._dtype)

    def __call__(self, transformer: QwenImageTransformer2DModel) -> list[Image.Image]:
        images = []
        # With a KV cache a block has as many forms as pictures have layouts: to compile them takes longer than they do.
        eager = torch.compiler.set_stance("force_eager") if self._pretrained.family.interleaved else nullcontext()
        with _in_inference(transformer, self._device, self._dtype), _resident(self._vae, self._device), eager:
            pipeline = make_pipeline(self._pretrained, self._vae, transformer)
            for sample, conditions in zip(self._section.samples, self._samples, strict=True):
                image = generate(pipeline, conditions, seed=sample.seed, **self._sampling.settings)
                image.info["qie"] = json.dumps(sample.model_dump() | self._sampling.told, ensure_ascii=False)
                image.info["qie controls"] = conditions.images
                images.append(image)
        return images


def sampling_of(config: Config, pretrained: PretrainedModel) -> Sampling:
    """How `validation.samples` are generated."""
    return Sampling.of(pretrained, steps=config.validation.sample_steps, cfg=config.validation.sample_cfg)


def read_samples(config: Config, family: Family) -> list[list[Image.Image]]:
    """The controls of each of `validation.samples`. Checks its prompts, too.

    Raises:
        UsageError: an image or a prompt cannot be used; names its configuration key.
    """
    controls, behind = [], None if family.alpha else config.data.background
    for number, sample in enumerate(config.validation.samples):
        key = f"validation.samples.{number}"
        controls.append(read_images(sample.images, behind, f"{key}.images"))
        check_controls(family, len(sample.images), f"{key}.images")
        check_prompts(sample.prompt, sample.negative_prompt, f"{key}.{{}}", "negative_prompt")
    return controls


def embed_samples(config: Config, controls: Sequence[Sequence[Image.Image]], encoder: Encoder) -> list[Conditions]:
    """Each of `validation.samples`, embedded, in host memory. Frees the encoder.

    Raises:
        UsageError: a prompt is too long; names its configuration key.
    """
    conditions, guided = [], sampling_of(config, encoder.pretrained).cfg > 1
    for number, (sample, images) in enumerate(zip(config.validation.samples, controls, strict=True)):
        negative = sample.negative_prompt if guided else None
        try:
            conditions.append(embed_conditions(encoder, images, sample.prompt, negative))
        except RowError as error:
            where = f"validation.samples.{number}"
            raise UsageError(error.what, where=where, expected=error.expected, found=error.found) from error
    free(encoder)
    return conditions


def save_samples(images: Sequence[Image.Image], output_dir: Path, step: int) -> list[Path]:
    """Write the sample images of `step` to `output_dir/samples/step-000200-0.png` and so on.

    Each file carries its settings and the step, as those of qie-predict do, and names its `inputs`: its controls,
    made small, are in `samples/inputs`, by their content, since who looks at a run need not have the images themselves.
    """
    folder = output_dir / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"step-{step:06d}-{number}.png" for number in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        inputs = [_save_input(control, folder) for control in image.info.get("qie controls", ())]
        save_image(image, path, json.loads(image.info["qie"]) | {"step": step, "inputs": inputs})
    return paths


def _save_input(control: Image.Image, folder: Path) -> str:
    """Write a control, made small, if it is not there; gives its name in the folder."""
    content = f"{control.mode} {control.size} ".encode() + control.tobytes()
    kind = "PNG" if control.mode == "RGBA" else "JPEG"
    name = f"{hashlib.sha256(content).hexdigest()[:16]}{'.png' if kind == 'PNG' else '.jpg'}"
    inputs = LocalFolder(folder / INPUTS)
    if inputs.size(name) is None:
        small, written = control.copy(), io.BytesIO()
        small.thumbnail((INPUT_PX, INPUT_PX), Image.Resampling.LANCZOS)
        small.save(written, kind, **({} if kind == "PNG" else {"quality": 90}))
        inputs.write(name, written.getvalue())
    return f"{INPUTS}/{name}"


@contextmanager
def _in_inference(transformer: QwenImageTransformer2DModel, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """A transformer in training, used as after it: without dropout, computing in `dtype` whatever its weights are."""
    training = {module: module.training for module in transformer.modules()}
    autocast = torch.autocast(device.type, dtype, enabled=transformer.dtype != dtype)
    transformer.eval()
    try:
        with mock.patch.object(transformer, "forward", autocast(transformer.forward)):
            yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


@contextmanager
def _resident(vae: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """The VAE on the training device, and on the CPU again afterwards."""
    vae.to(device)
    try:
        yield
    finally:
        vae.to("cpu")

"""Sample images: what the model that is being trained makes of fixed images and prompts.

The text encoder is gone before the transformer is loaded. The VAE waits on the CPU, and is on the training device only
while images are painted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    import torch
    from diffusers import QwenImageTransformer2DModel
    from PIL import Image

    from qie.config import Config
    from qie.encode.scene import Scene
    from qie.pretrained import PretrainedModel

    Paint = Callable[[QwenImageTransformer2DModel], list[Image.Image]]


def open_samples(config: Config, device: torch.device) -> Paint | None:
    """What paints `validation.samples`, in their order, with a transformer on `device`; None when there are none.

    What it paints is a function of the transformer's weights alone, on any number of processes. It leaves the
    transformer as it was, and the global random state, too: a run with samples is the run without. The settings of an
    image are in its `info` under the name qie.

    Args:
        config: the run's.
        device: this process's, where it trains. `predict.devices.text_encoder` says where prompts are embedded; auto is
            this device, too.

    Raises:
        UsageError: an image or a prompt cannot be used; names its configuration key.
        ModelError: the model lacks an encoder.
    """
    if not config.validation.samples:
        return None
    import torch

    from qie.inference import load_vae, make_pipeline, paint_scene
    from qie.pretrained import ENCODERS, open_pretrained

    model = config.model
    pretrained = open_pretrained(model.pretrained_model_name_or_path, model.family, (*ENCODERS, "scheduler"))
    scenes = _embed(config, pretrained, device)
    dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
    vae = load_vae(pretrained, dtype)
    steps, cfg = config.validation.sample_steps, config.validation.sample_cfg

    def paint(transformer: QwenImageTransformer2DModel) -> list[Image.Image]:
        images = []
        with _at_rest(transformer, device, dtype), _visiting(vae, device):
            pipeline = make_pipeline(pretrained, vae, transformer)
            for sample, scene in zip(config.validation.samples, scenes, strict=True):
                image = paint_scene(pipeline, scene, steps=steps, cfg=cfg, seed=sample.seed)
                image.info["qie"] = json.dumps(sample.model_dump() | {"steps": steps, "cfg": cfg}, ensure_ascii=False)
                images.append(image)
        return images

    return paint


def save_samples(images: Sequence[Image.Image], output_dir: Path, step: int) -> list[Path]:
    """Write what was painted after `step` steps to `output_dir/samples/step-000200-0.png` and so on.

    Each file carries its settings and the step, as those of qie-predict do.
    """
    from qie.cli.assemble import save_image

    folder = output_dir / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"step-{step:06d}-{number}.png" for number in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        save_image(image, path, json.loads(image.info["qie"]) | {"step": step})
    return paths


def _embed(config: Config, pretrained: PretrainedModel, device: torch.device) -> list[Scene]:
    """Every sample, embedded, in host memory. The encoder that did it is gone."""
    from qie.cli.assemble import check_prompts, read_images
    from qie.devices import resolve_device
    from qie.encode.scene import check_controls, embed_scene
    from qie.errors import RowError, UsageError
    from qie.inference import free
    from qie.opening import inference_encoder

    controls = []
    for number, sample in enumerate(config.validation.samples):
        key = f"validation.samples.{number}"
        controls.append(read_images(sample.images, config.data.background, f"{key}.images"))
        check_controls(pretrained.family.name, len(sample.images), f"{key}.images")
        check_prompts(sample.prompt, sample.negative_prompt, f"{key}.{{}}", "negative_prompt")
    named = config.predict.devices.text_encoder
    text_device = device if named == "auto" else resolve_device(named, "predict.devices.text_encoder")
    encoder = inference_encoder(config, pretrained, device, text_device)
    scenes = []
    for number, (sample, images) in enumerate(zip(config.validation.samples, controls, strict=True)):
        negative = sample.negative_prompt if config.validation.sample_cfg > 1 else None
        try:
            scenes.append(embed_scene(encoder, images, sample.prompt, negative))
        except RowError as error:
            where = f"validation.samples.{number}"
            raise UsageError(error.what, where=where, expected=error.expected, found=error.found) from error
    free(encoder)
    return scenes


@contextmanager
def _at_rest(transformer: QwenImageTransformer2DModel, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """A transformer in training, used as after it: without dropout, computing in `dtype` whatever its weights are."""
    import torch

    training = {module: module.training for module in transformer.modules()}
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    transformer.eval()
    try:
        with mock.patch.object(transformer, "forward", autocast(transformer.forward)):
            yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


@contextmanager
def _visiting(vae: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """The VAE on the training device, and back on the CPU when the images are painted."""
    vae.to(device)
    try:
        yield
    finally:
        vae.to("cpu")

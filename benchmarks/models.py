"""The models and data of a training step's benchmarks: random weights in small and in the released shapes."""

from __future__ import annotations

import gc
import io
import json
import logging
import runpy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from measuring import ROOT
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from qie.data.opening import open_stream
from qie.data.sources import open_source
from qie.encode import Encoder, EncoderOptions
from qie.precompute import Settings, precompute
from qie.pretrained import open_pretrained, read_json
from qie.stores import open_folder
from qie.training.flops import Architecture, Flops, step_flops

# In words of the template: those are whole tokens of the little tokenizer, too.
PROMPT = (
    "Modify the background of the image, then alter the texture and the shape of the key objects, while the color, "
    "size and features meet the original image and the text should alter where appropriate."
)
TOKENS = {"in_channels": 64, "out_channels": 16, "patch_size": 2}
TOKENS_21 = {"in_channels": 64, "out_channels": 64, "patch_size": 1, "mlp_ratio": 3}
NEWER = "QwenImage21Transformer2DModel"
"""A class that diffusers has from 0.42 on."""
ROPE = {"rope_type": "default", "rope_theta": 1e6}
MOST_WARM_UP = 11
"""Steps that a loop takes before the clock starts."""
MAKE_TINY = ROOT / "tools" / "make_tiny_model.py"


@dataclass(frozen=True)
class Size:
    """Of images, and of the models by their configurations; `newer` is the transformer of Qwen-Image-2.1."""

    side_px: int
    transformer: dict[str, Any]
    newer: dict[str, Any]
    vae: dict[str, Any]
    text: dict[str, Any]
    vision: dict[str, Any]


SIZES = {
    "small": Size(
        128,
        TOKENS | {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 32, "axes_dims_rope": [8, 12, 12]},
        TOKENS_21
        | {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": [8, 12, 12]}
        | {"context_in_dim": 64},
        {"base_dim": 8, "z_dim": 16},
        {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPE | {"mrope_section": [2, 2, 4]}},
        {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "fullatt_block_indexes": [1]},
    ),
    "full": Size(
        1024,
        TOKENS
        | {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]},
        TOKENS_21
        | {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
        | {"context_in_dim": 4096},
        {},
        {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4}
        | {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    ),
}


@dataclass(frozen=True)
class Bench:
    """What all variants share. `folder` holds the model's configurations, the rows and their shards."""

    folder: Path
    size: Size
    device: torch.device
    steps: int
    peak: float | None

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> int:
        """So many that none comes twice, with those that are encoded ahead: encoders keep what the last ones gave."""
        return self.steps + MOST_WARM_UP + 10

    @property
    def architecture(self) -> Architecture:
        return Architecture.of(json.loads((self.model / "transformer" / "config.json").read_text()))

    def accelerator(self) -> Accelerator:
        return Accelerator(mixed_precision="bf16", cpu=self.device.type == "cpu")

    def encoder(self) -> Encoder:
        options = EncoderOptions(areas_px=(self.size.side_px**2,))
        pretrained = open_pretrained(str(self.model))
        return Encoder.open(pretrained, vae_device=self.device, text_device=self.device, options=options)

    def flops(self, checkpointing: bool, *, plain: bool = False) -> Flops:
        """Of a step, as `qie.training.reporting.metrics` counts them. A plain loop computes the last block of all
        tokens, as diffusers does."""
        lengths = open_stream([self.folder / "shards"]).samples.columns.lengths
        blocks = self.architecture.blocks if checkpointing else 0
        target = (self.size.side_px // 16) ** 2
        return step_flops(
            self.architecture,
            2 * target,
            int(lengths.max()),
            all_trained=False,
            checkpointed_blocks=blocks,
            target_tokens=None if plain else target,
        )


@contextmanager
def random_weights(device: torch.device, transformer_on: torch.device | None = None) -> Iterator[None]:
    """Within, `from_pretrained` of all models reads the configuration alone, and makes the weights on `device`.

    They are made in bfloat16 whatever is asked for, 41 GB for the released transformer; in float32 the same values.
    `transformer_on` is where it goes then, if not to stay: to the CPU, as from_pretrained has it.
    """

    def seeded(make: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        def made(folder: Path, **named: Any) -> torch.nn.Module:
            wanted, usual = named.get("torch_dtype") or named["dtype"], torch.get_default_dtype()
            torch.manual_seed(0)
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = make(folder)
            finally:
                torch.set_default_dtype(usual)
            # What a model keeps in float32 by itself stays so, as from_pretrained leaves it.
            return model if wanted == torch.bfloat16 else model.to(wanted)

        return made

    def transformer(folder: Path) -> torch.nn.Module:
        config = read_json(folder / "config.json")
        with device:
            made: torch.nn.Module = getattr(diffusers, config["_class_name"]).from_config(config)
        return made.to(transformer_on or device)

    def vae(folder: Path) -> AutoencoderKLQwenImage:
        # In host memory, as from_pretrained has it: qie probes it there.
        return AutoencoderKLQwenImage.from_config(read_json(folder / "config.json"))

    def text_encoder(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
        with device:
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder))

    with ExitStack() as patches:
        for model, make in (
            (QwenImageTransformer2DModel, transformer),
            *([(getattr(diffusers, NEWER), transformer)] if hasattr(diffusers, NEWER) else []),
            (AutoencoderKLQwenImage, vae),
            (Qwen2_5_VLForConditionalGeneration, text_encoder),
        ):
            patches.enter_context(mock.patch.object(model, "from_pretrained", seeded(make)))
        yield


def write_model(bench: Bench, family: str = "edit") -> None:
    """Write configurations, tokenizer and processor; no weights. Of Qwen-Image-2.1 the transformer alone is as large as
    it has to be."""
    with redirect_stdout(io.StringIO()):
        made = runpy.run_path(str(MAKE_TINY))["main"]([str(bench.model), "--family", family])
    assert made == 0, f"{bench.model} is not empty"
    for weights in bench.model.glob("*/*.safetensors*"):
        weights.unlink()
    if family == "qwen_image_21":
        write_config(bench.model / "transformer", bench.size.newer)
        return
    size, width = bench.size, bench.size.text["hidden_size"]
    write_config(bench.model / "vae", size.vae)
    write_config(bench.model / "transformer", size.transformer | {"joint_attention_dim": width})
    folder = bench.model / "text_encoder"
    ids = {name: value for name, value in read_json(folder / "config.json").items() if name.endswith("_token_id")}
    no_ends = {"bos_token_id": None, "eos_token_id": None}
    vision = size.vision | {"out_hidden_size": width}
    Qwen2_5_VLConfig(text_config=size.text | no_ends, vision_config=vision, **ids).save_pretrained(folder)
    config = read_json(folder / "config.json") | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))


def prepare(bench: Bench) -> None:
    """Write configurations, rows and shards."""
    write_model(bench)
    write_rows(bench, bench.rows)
    encoder, source = bench.encoder(), open_source(bench.folder / "rows")
    shards = open_folder(bench.folder / "shards")
    precompute(source, encoder, shards, rows=(0, len(source)), settings=Settings(on_error="stop"))
    encoder.release()
    del encoder
    release(bench.device)


def release(device: torch.device) -> None:
    """Free a variant's model; say so where something still holds it, for then the next one's peak is too high."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if (left := torch.cuda.memory_allocated(device)) > 1e9:
            print(f"(the variant before still holds {left / 1e9:.1f} GB)")


def write_config(folder: Path, values: dict[str, Any]) -> None:
    config = {"_class_name": read_json(folder / "config.json")["_class_name"]} | values
    (folder / "config.json").write_text(json.dumps(config))


def write_rows(bench: Bench, rows: int) -> None:
    """Pictures of coloured clouds, no two alike."""
    side, drawn = bench.size.side_px, np.random.default_rng(0)
    for number in range(rows):
        for folder in ("training_images", "control_images"):
            (bench.folder / "rows" / folder).mkdir(parents=True, exist_ok=True)
            clouds = Image.fromarray(drawn.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8))
            clouds.resize((side, side), Image.Resampling.BICUBIC).save(
                bench.folder / "rows" / folder / f"{number:03d}.jpg", quality=95
            )
        (bench.folder / "rows" / "training_images" / f"{number:03d}.txt").write_text(PROMPT)


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()

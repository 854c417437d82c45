"""A training step of qie beside a plain loop of diffusers, peft and accelerate, in one run: time, memory, MFU.

    python benchmarks/train_step.py [--size small|full] [--steps 10] [--rounds 1] [--only cached]

A LoRA of rank 16, one control, batches of one row, a prompt of 34 words. Models have random weights and nothing is
downloaded. `full` has the released models' shapes at 1024² and is meant for one GPU of 140 GB; `--only` takes some of
qie's lines. `small`, what is taken without a GPU, goes the same way through the code; its numbers say nothing of a GPU.

The plain loop is what a careful user writes: gradient checkpointing, autocast, a float32 adapter and loss. "plain live"
encodes target, control and prompt before each step with the pipeline's own methods, of images that are decoded,
resized and cut into patches before the clock starts; "plain cached" is given all tensors on the device. qie runs as
qie-train does: live, it decodes and encodes rows of a folder while it trains; cached, it reads them from shards.

Each line is a model and an optimizer of its own: the median of its steps and their range, the most memory that the
steps took, MFU (model FLOPs against the GPU's peak), how much of the time is the floor (all FLOPs that the step does,
recomputed ones included, at the GPU's peak), and ratios of medians to both plain loops with the range of paired steps.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import diffusers
import numpy as np
import peft
import torch
import transformers
from accelerate import Accelerator
from diffusers import AutoencoderKLQwenImage, QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qie.config import Config
from qie.data import open_stream
from qie.data.sources import open_source
from qie.encode import Encoder, EncoderOptions
from qie.errors import QieError
from qie.precompute import Settings, precompute
from qie.pretrained import open_checkpoint, read_json
from qie.stores import open_folder
from qie.training.flops import Architecture, Flops, peak_flops, step_flops
from qie.training.run import Run

# In words of the template: those are whole tokens of the little tokenizer, too.
PROMPT = (
    "Modify the background of the image, then alter the texture and the shape of the key objects, while the color, "
    "size and features meet the original image and the text should alter where appropriate."
)
TOKENS = {"in_channels": 64, "out_channels": 16, "patch_size": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
MAKE_TINY = Path(__file__).parent.parent / "tools" / "make_tiny_model.py"


@dataclass(frozen=True)
class Size:
    """Of images, and of the models by their configurations."""

    side_px: int
    transformer: dict[str, Any]
    vae: dict[str, Any]
    text: dict[str, Any]
    vision: dict[str, Any]


SIZES = {
    "small": Size(
        128,
        TOKENS | {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 32, "axes_dims_rope": [8, 12, 12]},
        {"base_dim": 8, "z_dim": 16},
        {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPE | {"mrope_section": [2, 2, 4]}},
        {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "fullatt_block_indexes": [1]},
    ),
    "full": Size(
        1024,
        TOKENS
        | {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]},
        {},
        {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4}
        | {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    ),
}


@dataclass(frozen=True)
class Variant:
    """One line: whose loop, and how."""

    loop: str
    live: bool = False
    checkpointing: bool = True
    compile: bool = False
    fp8: bool = False
    attention: str = "native"

    def __str__(self) -> str:
        words = {"no checkpointing": not self.checkpointing, "compile": self.compile, "fp8": self.fp8}
        words["cuDNN attention"] = self.attention == "_native_cudnn"
        return ", ".join([f"{self.loop} {'live' if self.live else 'cached'}", *(word for word in words if words[word])])

    @property
    def warm_up(self) -> int:
        """Steps before the clock starts. Live, rows that were encoded while the first steps compiled are used up."""
        return (5 if self.compile else 3) + (6 if self.live and self.loop == "qie" else 0)


PLAIN_LIVE, PLAIN_CACHED = Variant("plain", live=True), Variant("plain")
VARIANTS = [
    PLAIN_LIVE,
    PLAIN_CACHED,
    Variant("qie", live=True),
    Variant("qie", live=True, checkpointing=False, compile=True),
    Variant("qie"),
    Variant("qie", compile=True),
    Variant("qie", checkpointing=False),
    Variant("qie", checkpointing=False, compile=True),
    Variant("qie", checkpointing=False, compile=True, attention="_native_cudnn"),  # with a GPU alone
    Variant("qie", fp8=True),
    Variant("qie", checkpointing=False, compile=True, fp8=True),
]


@dataclass
class Measured:
    """All steps of a variant, and why it could not run, if so."""

    seconds: list[float] = field(default_factory=list)
    mfu: list[float | None] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str | None = None


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
        return self.steps + max(variant.warm_up for variant in VARIANTS) + 10

    @property
    def architecture(self) -> Architecture:
        return Architecture.of(json.loads((self.model / "transformer" / "config.json").read_text()))

    def accelerator(self) -> Accelerator:
        return Accelerator(mixed_precision="bf16", cpu=self.device.type == "cpu")

    def encoder(self) -> Encoder:
        options = EncoderOptions(areas_px=(self.size.side_px**2,))
        checkpoint = open_checkpoint(str(self.model))
        return Encoder.open(checkpoint, vae_device=self.device, text_device=self.device, options=options)

    def flops(self, checkpointing: bool) -> Flops:
        """Of a step, as `qie.training.metrics` counts them."""
        lengths = open_stream([self.folder / "shards"]).samples.columns.lengths
        blocks = self.architecture.blocks if checkpointing else 0
        tokens = 2 * (self.size.side_px // 16) ** 2
        return step_flops(self.architecture, tokens, int(lengths.max()), all_trained=False, checkpointed_blocks=blocks)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="a training step beside a plain loop's")
    parser.add_argument("--size", choices=SIZES, default="full" if gpu else "small")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each variant in a round")
    parser.add_argument("--rounds", type=int, default=1, help="how often all variants take their turn")
    parser.add_argument("--only", default="", help="of qie's variants those whose name contains this")
    parser.add_argument("--peak-tflops", type=float, help="of the device in bfloat16; known for common GPUs")
    options = parser.parse_args()
    device = torch.device("cuda:0" if gpu else "cpu")
    quiet()
    peak = options.peak_tflops and options.peak_tflops * 1e12
    if peak is None and gpu:
        peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16)
    with tempfile.TemporaryDirectory() as name, random_weights(device):
        bench = Bench(Path(name), SIZES[options.size], device, options.steps, peak)
        prepare(bench)
        describe(bench, options.size)
        chosen = [variant for variant in VARIANTS if variant.loop == "plain" or options.only in str(variant)]
        results = {variant: Measured() for variant in chosen if gpu or variant.attention == "native"}
        for turn in range(1, options.rounds + 1):
            print(f"\nround {turn} of {options.rounds}; steps of all rounds so far\n{HEADER}", flush=True)
            for variant, measured in results.items():
                if measured.failure is None:
                    measure(variant, measured, bench)
                    release(device)
                print(line(variant, results, bench), flush=True)


def describe(bench: Bench, size: str) -> None:
    gpu = bench.device.type == "cuda"
    name = torch.cuda.get_device_name(bench.device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    versions = [f"{library.__name__} {library.__version__}" for library in (torch, diffusers, peft, accelerate)]
    print(f"{name}; {', '.join(versions)}; load {os.getloadavg()[0]:.1f}")
    model, again = bench.flops(False), bench.flops(True).recomputed
    print(f"{size}: {bench.size.side_px}², {model.model / 1e12:.3g} TFLOP a step, {again / 1e12:.3g} recomputed")
    if bench.peak:
        floors = [1e3 * flops / bench.peak for flops in (model.model, model.model + again)]
        print(f"floors at {bench.peak / 1e12:.3g} TFLOP/s: {floors[0]:.1f} ms, checkpointed {floors[1]:.1f} ms")


HEADER = f"{'':<46}{'ms a step':>24}{'peak GB':>9}{'MFU':>7}{'floor':>7}{'× plain live':>20}{'× plain cached':>20}"


def line(variant: Variant, results: dict[Variant, Measured], bench: Bench) -> str:
    measured = results[variant]
    if measured.failure:
        return f"{variant!s:<46}{measured.failure}"
    median, flops = statistics.median(measured.seconds), bench.flops(variant.checkpointing)
    mfus = [value for value in measured.mfu if value is not None]
    mfu = f"{100 * statistics.median(mfus):.1f} %" if mfus else "-"
    floor = f"{100 * (flops.model + flops.recomputed) / bench.peak / median:.1f} %" if bench.peak else "-"
    peak = f"{measured.peak_bytes / 1e9:.1f}" if measured.peak_bytes else "-"
    took = f"{1e3 * median:.1f} ({1e3 * min(measured.seconds):.1f}–{1e3 * max(measured.seconds):.1f})"
    ratios = "".join(f"{ratio(results[peer], measured):>20}" for peer in (PLAIN_LIVE, PLAIN_CACHED))
    return f"{variant!s:<46}{took:>24}{peak:>9}{mfu:>7}{floor:>7}{ratios}"


def ratio(peer: Measured, measured: Measured) -> str:
    """How many times faster than the peer: of the medians, and the range of pairs of steps."""
    if peer.failure or not peer.seconds:
        return "-"
    pairs = [theirs / own for theirs, own in zip(peer.seconds, measured.seconds, strict=False)]
    of_medians = statistics.median(peer.seconds) / statistics.median(measured.seconds)
    return f"{of_medians:.2f} ({min(pairs):.2f}–{max(pairs):.2f})"


def measure(variant: Variant, measured: Measured, bench: Bench) -> None:
    """Build a variant, warm up, and add its steps to `measured`; one that fails costs the others nothing."""
    gpu = bench.device.type == "cuda"
    try:
        with (plain_loop if variant.loop == "plain" else qie_loop)(variant, bench) as step:
            for _ in range(variant.warm_up):
                step()
            if gpu:  # models are made in float32: that peak is not a step's
                torch.cuda.reset_peak_memory_stats(bench.device)
            for _ in range(bench.steps):
                synchronize(bench.device)
                started = time.perf_counter()
                mfu = step()
                synchronize(bench.device)
                took = time.perf_counter() - started
                if variant.loop == "plain" and bench.peak:
                    mfu = bench.flops(False).model / took / bench.peak
                measured.seconds.append(took)
                measured.mfu.append(mfu)
            if gpu:
                measured.peak_bytes = max(measured.peak_bytes, torch.cuda.max_memory_allocated(bench.device))
    except Exception as error:
        measured.failure = "out of memory"
        if not is_out_of_memory(error):
            measured.failure = f"failed: {' '.join(str(error).split())[:120]}"
            if not isinstance(error, QieError):
                traceback.print_exc()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is, or comes from, torch's error: qie explains it, the feed's thread and the compiler wrap it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Let go of a variant's model; say so where something still holds it, for then the next one's peak is too high."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if (left := torch.cuda.memory_allocated(device)) > 1e9:
            print(f"(the variant before still holds {left / 1e9:.1f} GB)")


@contextmanager
def qie_loop(variant: Variant, bench: Bench) -> Iterator[Callable[[], float | None]]:
    """A run as qie-train makes one; gives what takes a step and tells its MFU."""
    config = Config.model_validate(
        {
            "model": {
                "pretrained_model_name_or_path": str(bench.model),
                "quantize": "fp8" if variant.fp8 else None,
                "attention_backend": variant.attention,
            },
            "data": {"caption_dropout_rate": 0.0},
            "train": {
                "gradient_checkpointing": variant.checkpointing,
                "compile": variant.compile,
                "output_dir": str(bench.folder / "run"),
            },
            "validation": {"rows": 0},
            "logging": {"peak_tflops": bench.peak and bench.peak / 1e12},
        }
    )
    encoder = bench.encoder() if variant.live else None
    stream = open_stream(bench.folder / "rows", encoder=encoder) if encoder else open_stream([bench.folder / "shards"])
    run = Run(config, open_checkpoint(str(bench.model)), stream, bench.accelerator(), None)
    try:
        with run.feed:
            yield lambda: run.take_step().mfu
    finally:
        run.feed._thread.join()  # it holds a batch, and what encodes it
        run.finish()


@contextmanager
def plain_loop(variant: Variant, bench: Bench) -> Iterator[Callable[[], None]]:
    """The training script of diffusers in short: as fast as it gets without changing how it works."""
    accelerator, pipe = bench.accelerator(), QwenImageEditPipeline
    transformer = QwenImageTransformer2DModel.from_pretrained(bench.model / "transformer", torch_dtype=torch.bfloat16)
    transformer.requires_grad_(False)
    transformer.to(accelerator.device)
    transformer.set_attention_backend("native")  # the default, unless a variant before set another
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(peft.LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian", target_modules=targets))
    transformer.enable_gradient_checkpointing()
    cast_training_params(transformer, dtype=torch.float32)
    weights = [weight for weight in transformer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    model, optimizer = accelerator.prepare(transformer.train(), optimizer)
    inputs = encoded(bench) if variant.live else ready(bench)

    def step() -> None:
        target, control, prompt, mask = next(inputs)
        _, channels, _, height, width = target.shape
        sigma = compute_density_for_timestep_sampling("logit_normal", 1, 0.0, 1.0).to(target)
        noise = torch.randn_like(target)
        parts = ((1 - sigma) * target + sigma * noise, control, noise - target)
        noisy, beside, wanted = (pipe._pack_latents(part, 1, channels, height, width) for part in parts)
        predicted = model(
            hidden_states=torch.cat([noisy, beside], dim=1),
            timestep=sigma,
            encoder_hidden_states=prompt,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, height // 2, width // 2)] * 2],
            return_dict=False,
        )[0][:, : noisy.shape[1]]
        accelerator.backward(torch.nn.functional.mse_loss(predicted.float(), wanted.float()))
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield step
    accelerator.free_memory()


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def ready(bench: Bench) -> Iterator[Inputs]:
    """Target, control, prompt and its mask: those of the shards, on the device."""
    batches = [batch.to(bench.device, torch.bfloat16) for batch in open_stream([bench.folder / "shards"])]
    inputs = [(one.pixel_latent, one.control_latent[0], one.prompt_embed, one.prompt_embeds_mask) for one in batches]
    return itertools.cycle(inputs)


def encoded(bench: Bench) -> Iterator[Inputs]:
    """The same, made by diffusers' pipeline when they are asked for."""
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32  # as qie's encoder
    vae = AutoencoderKLQwenImage.from_pretrained(bench.model / "vae", torch_dtype=dtype)
    text = Qwen2_5_VLForConditionalGeneration.from_pretrained(bench.model / "text_encoder", dtype=dtype)
    rows = open_source(bench.folder / "rows")
    images = [
        [Image.open(io.BytesIO(file)).convert("RGB") for file in (row.target, *row.controls)]
        for row in map(rows.read, range(len(rows)))
    ]
    processor = Processed(bench.model, [control for _, control in images])
    pipe = QwenImageEditPipeline(None, vae.eval(), text.eval(), None, processor, None).to(bench.device)
    pixels = [[pipe.image_processor.preprocess(image).unsqueeze(2) for image in pair] for pair in images]

    @torch.no_grad()
    def encode(number: int) -> Inputs:
        prompt, mask = pipe.encode_prompt(PROMPT, image=number, device=bench.device)
        moved = (image.to(bench.device, dtype) for image in pixels[number])
        target, control = (pipe._encode_vae_image(image, generator=None) for image in moved)
        return target.bfloat16(), control.bfloat16(), prompt.bfloat16(), mask

    return map(encode, itertools.cycle(range(len(rows))))


class Processed:
    """Stands for Qwen2VLProcessor, which needs torchvision: it cut all controls up beforehand. An image is a number."""

    def __init__(self, model: Path, images: list[Image.Image]) -> None:
        processor = Qwen2VLImageProcessorPil.from_pretrained(model / "processor")
        self._tokenizer = AutoTokenizer.from_pretrained(model / "tokenizer")
        self._patches = [processor(images=[image], return_tensors="pt") for image in images]
        self._merged = processor.merge_size**2

    def __call__(self, text: list[str], images: int, **_: object) -> BatchFeature:
        patches, pad = self._patches[images], "<|image_pad|>"
        pads = int(patches["image_grid_thw"].prod()) // self._merged
        tokens = self._tokenizer([one.replace(pad, pad * pads) for one in text], return_tensors="pt")
        return BatchFeature({**tokens, **patches})


@contextmanager
def random_weights(device: torch.device) -> Iterator[None]:
    """Within, `from_pretrained` of all models reads the configuration alone, and makes the weights on `device`."""

    def seeded(make: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        def made(*arguments: Any, **named: Any) -> torch.nn.Module:
            torch.manual_seed(0)
            return make(*arguments, **named)

        return made

    def transformer(folder: Path, torch_dtype: torch.dtype, **_: object) -> QwenImageTransformer2DModel:
        with device:
            return QwenImageTransformer2DModel.from_config(read_json(folder / "config.json")).to(torch_dtype)

    def vae(folder: Path, torch_dtype: torch.dtype, **_: object) -> AutoencoderKLQwenImage:
        # In host memory, as from_pretrained has it: qie probes it there.
        return AutoencoderKLQwenImage.from_config(read_json(folder / "config.json")).to(torch_dtype)

    def text_encoder(folder: Path, dtype: torch.dtype, **_: object) -> Qwen2_5_VLForConditionalGeneration:
        with device:
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder)).to(dtype)

    with ExitStack() as patches:
        for model, make in (
            (QwenImageTransformer2DModel, transformer),
            (AutoencoderKLQwenImage, vae),
            (Qwen2_5_VLForConditionalGeneration, text_encoder),
        ):
            patches.enter_context(mock.patch.object(model, "from_pretrained", seeded(make)))
        yield


def prepare(bench: Bench) -> None:
    """Write configurations, rows and shards."""
    subprocess.run([sys.executable, MAKE_TINY, bench.model], check=True, capture_output=True)
    for weights in bench.model.glob("*/*.safetensors"):
        weights.unlink()
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
    write_rows(bench)
    encoder, source = bench.encoder(), open_source(bench.folder / "rows")
    shards = open_folder(bench.folder / "shards")
    precompute(source, encoder, shards, rows=(0, len(source)), settings=Settings(on_error="stop"))
    encoder.release()
    del encoder
    release(bench.device)


def write_config(folder: Path, values: dict[str, Any]) -> None:
    config = {"_class_name": read_json(folder / "config.json")["_class_name"]} | values
    (folder / "config.json").write_text(json.dumps(config))


def write_rows(bench: Bench) -> None:
    """Pictures of coloured clouds, no two alike."""
    side, drawn = bench.size.side_px, np.random.default_rng(0)
    for number in range(bench.rows):
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


if __name__ == "__main__":
    main()

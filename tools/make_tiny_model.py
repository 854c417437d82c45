"""Write a tiny random Qwen-Image-Edit model: the real layout and classes, a few MB, nothing downloaded.

    python tools/make_tiny_model.py OUT [--family edit|edit_plus|qwen_image_21] [--seed N]

The code that loads the released model loads this one. The families differ in their files, so that all layouts are
covered: `edit` has one file per component and a hub-style `preprocessor_config.json`, `edit_plus` has sharded weights
and the newer `processor_config.json`, `qwen_image_21` has its tokenizer beside the image processor. The bytes depend
only on the family, the seed and the versions of the libraries.
"""

# ruff: noqa: E402 - what libraries say while they are imported is silenced before that

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qie.families import FAMILIES
from qie.quiet_libraries import quiet_imports

quiet_imports()
import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

MARK = "_make_tiny_model"  # diffusers skips the entries of model_index.json that begin with an underscore
COMPONENTS = {
    "processor": ["transformers", "Qwen2VLProcessor"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
COMPONENTS_21 = {
    "processor": ["transformers", "Qwen3VLProcessor"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage21"],
}
# What Qwen3-VL's own template makes of messages of text.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}{{ part.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
# After <|endoftext|>, in the order of the released tokenizer.
SPECIAL_TOKENS = [f"{what}_{end}" for what in ("im", "object_ref", "box", "quad", "vision") for end in ("start", "end")]
SPECIAL_TOKENS += ["vision_pad", "image_pad", "video_pad"]
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
IMAGE_PROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "merge_size": 2,
    "patch_size": 14,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "temporal_patch_size": 2,
}
IMAGE_PROCESSOR_21 = IMAGE_PROCESSOR | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
MIN_PIXELS, MAX_PIXELS = 3136, 12845056
HIDDEN = 32  # width of the text encoder, and so of the text that the transformer takes
SHARD_BYTES = 200_000  # edit_plus: both models are larger than this


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save(model: Any, folder: Path, sharded: bool) -> None:
    """Save a model, in several files where asked to."""
    model.save_pretrained(folder, **({"max_shard_size": SHARD_BYTES} if sharded else {}))
    if sharded and len(list(folder.glob("*.safetensors"))) < 2:
        raise RuntimeError(f"{folder.name} fits one shard: lower SHARD_BYTES")


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Draw every weight such that a layer's output is about as large as its input.

    The libraries' own initialisation (0.02 for most) lets the signal of so narrow a model fade to nothing. Norms
    stay at one; biases are small, yet not zero, so that losing one shows.
    """
    stream = zlib.crc32(f"{type(model).__name__} {seed}".encode())  # no two models share their noise
    generator = torch.Generator().manual_seed(stream)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(noise * 0.1)
        elif name.endswith("gamma") or weight.ndim == 1:  # the VAE's norms have four axes
            weight.fill_(1.0)
        elif "embed_tokens" in name:  # looked up, not multiplied: there is no sum to keep in bounds
            weight.copy_(noise)
        else:
            # Of a still image a causal 3x3x3 kernel sees one frame in three, the others being padding.
            fan_in = weight[0].numel() / (3 if weight.shape[2:] == (3, 3, 3) else 1)
            weight.copy_(noise / fan_in**0.5)


@torch.no_grad()
def amplify(model: Any, pattern: str, gain: float) -> None:
    """Scale the parameters whose name ends with the pattern."""
    chosen = [weight for name, weight in model.named_parameters() if re.search(f"{pattern}$", name)]
    if not chosen:
        raise RuntimeError(f"no parameter of {type(model).__name__} matches {pattern}")
    for weight in chosen:
        weight.mul_(gain)


def save_vae(folder: Path, seed: int) -> None:
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16)
    randomise(vae, seed)
    amplify(vae, r"encoder\.conv_out\.weight", 5.0)  # latents as wide as the released VAE's, whose std is about 2
    amplify(vae, r"decoder\.conv_out\.weight", 0.5)  # pixels are clamped to [-1, 1]
    with torch.no_grad():  # a narrow posterior, as a trained one's: log variance near -6
        vae.quant_conv.weight[16:].mul_(0.1)
        vae.quant_conv.bias[16:].sub_(6.0)
    vae.save_pretrained(folder)


def save_vae_21(folder: Path, seed: int) -> None:
    vae = diffusers.AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4, dim_mult=[1, 2, 4, 4, 4], num_res_blocks=1)
    randomise(vae, seed)
    amplify(vae, r"encoder\.conv_out\.weight", 7.0)  # the released VAE's std is about 3.7
    amplify(vae, r"decoder\.conv_out\.weight", 0.5)
    with torch.no_grad():
        vae.quant_conv.weight[64:].mul_(0.1)
        vae.quant_conv.bias[64:].sub_(6.0)
    vae.save_pretrained(folder)


def token_ids(tokenizer: Any) -> dict[str, int]:
    """The special tokens that a text encoder's configuration names."""
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"{name}_token_id": name for name in ("vision_start", "vision_end")}
    return {field: int(tokenizer.convert_tokens_to_ids(f"<|{name}|>")) for field, name in names.items()}


def save_text_encoder_21(folder: Path, tokenizer: Any, seed: int) -> None:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 3,  # of which the first two are given what the vision tower saw on its way
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": int(tokenizer.convert_tokens_to_ids("<|im_end|>")),
    }
    vision = {
        "depth": 3,
        "hidden_size": HIDDEN,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, dtype="float32", **token_ids(tokenizer))
    model = transformers.Qwen3VLForConditionalGeneration(config)
    randomise(model, seed)
    amplify(model, r"self_attn\.[qk]_proj\.weight", 2.0)
    model.save_pretrained(folder)


def save_text_encoder(folder: Path, tokenizer: Any, seed: int, sharded: bool, width: int = HIDDEN) -> None:
    """Save a random text encoder; `width`, of its hidden states, is a multiple of 16."""

    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [width // 16, width // 16, width // 8],
        },
        "bos_token_id": None,
        "eos_token_id": int(tokenizer.convert_tokens_to_ids("<|im_end|>")),
    }
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "out_hidden_size": width,
        "intermediate_size": 64,
        "num_heads": 2,
        "fullatt_block_indexes": [1],  # one layer of each kind: windowed, then full
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, dtype="float32", **token_ids(tokenizer)
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    randomise(model, seed)
    amplify(model, r"self_attn\.[qk]_proj\.weight", 2.0)  # decided attention: a uniform one blurs what it reads
    save(model, folder, sharded)


def save_transformer(folder: Path, family: str, seed: int) -> None:
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=family == "edit_plus",  # as from the release 2511 on
    )
    randomise(model, seed)
    # Text and source images reach the target by attention alone: let it be decided, not uniform, and its gates open.
    amplify(model, r"norm_(added_)?[qk]\.weight", 2.0)
    amplify(model, r"(img|txt)_mod\.1\.weight", 2.0)
    save(model, folder, sharded=family == "edit_plus")


def save_transformer_21(folder: Path, seed: int) -> None:
    model = diffusers.QwenImage21Transformer2DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        context_in_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    )
    randomise(model, seed)
    amplify(model, r"norm_[qk]\.weight", 2.0)
    amplify(model, r"^modulation\.1\.weight", 2.0)
    model.save_pretrained(folder)


def make_tokenizer(family: str, prompts: Sequence[str] = ()) -> Any:
    """A byte-level BPE of the pipeline's own template and `prompts`, in which every word of theirs is one token.

    That holds for the released tokenizer too, so the 64 leading tokens that the pipeline drops are the same text.
    """
    values = FAMILIES[family]
    image = values.image_text.format(number=1, pads="") if values.max_controls == 1 else ""
    template = values.before_images + image + values.after_prompt
    trainer = BpeTrainer(
        vocab_size=10_000,  # out of reach: training ends when no pair is left to merge
        initial_alphabet=sorted(ByteLevel.alphabet()),  # all 256 bytes, hence any text at all
        show_progress=False,
    )
    bpe = transformers.Qwen2Tokenizer().backend_tokenizer  # for its pre-tokenization
    bpe.train_from_iterator([*re.split(r"<\|\w+\|>", template), *prompts], trainer)
    learnt = json.loads(bpe.to_str())["model"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        extra_special_tokens=[f"<|{name}|>" for name in SPECIAL_TOKENS],
    )
    count = values.dropped_tokens or len(tokenizer(values.dropped).input_ids)
    dropped = tokenizer.decode(tokenizer(template).input_ids[:count])
    if dropped != values.dropped:
        raise RuntimeError(f"the tokens that the pipeline drops are not the system prompt: {dropped}")
    return tokenizer


def save_processor(folder: Path, tokenizer: Any, family: str, max_pixels: int = MAX_PIXELS) -> None:
    if family == "qwen_image_21":
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    components = COMPONENTS_21 if family == "qwen_image_21" else COMPONENTS
    owner = {"processor_class": components["processor"][1]}
    config = folder / "tokenizer_config.json"
    write_json(config, json.loads(config.read_text(encoding="utf-8")) | owner)
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    if family == "qwen_image_21":
        size = {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels}}
        write_json(folder / "preprocessor_config.json", IMAGE_PROCESSOR_21 | kind | size | owner)
        video = IMAGE_PROCESSOR_21 | size | {"video_processor_type": "Qwen3VLVideoProcessor"}
        write_json(folder / "video_preprocessor_config.json", video | owner)
        return
    if family == "edit":
        limits = {"min_pixels": MIN_PIXELS, "max_pixels": max_pixels}
        write_json(folder / "preprocessor_config.json", IMAGE_PROCESSOR | kind | limits | owner)
        return
    common = IMAGE_PROCESSOR | {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels}}
    video = common | {"video_processor_type": "Qwen2VLVideoProcessor"}
    write_json(folder / "processor_config.json", {"image_processor": common | kind, "video_processor": video} | owner)


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def build(folder: Path, family: str, seed: int) -> None:
    """Write the whole model into the empty folder."""
    tokenizer = make_tokenizer(family)
    save_processor(folder / "processor", tokenizer, family)
    if family == "qwen_image_21":
        components, scheduler = COMPONENTS_21, SCHEDULER | {"max_image_seq_len": 4096, "max_shift": 1.15}
        save_text_encoder_21(folder / "text_encoder", tokenizer, seed)
        save_transformer_21(folder / "transformer", seed)
        save_vae_21(folder / "vae", seed)
    else:
        components, scheduler = COMPONENTS, SCHEDULER
        tokenizer.save_pretrained(folder / "tokenizer")
        save_text_encoder(folder / "text_encoder", tokenizer, seed, sharded=family == "edit_plus")
        save_transformer(folder / "transformer", family, seed)
        save_vae(folder / "vae", seed)
    diffusers.FlowMatchEulerDiscreteScheduler(**scheduler).save_pretrained(folder / "scheduler")
    mark = {"family": family, "seed": seed, "files": files_of(folder)}
    index = {"_class_name": FAMILIES[family].pipeline, "_diffusers_version": diffusers.__version__, MARK: mark}
    write_json(folder / "model_index.json", index | components)


def refusal(out: Path) -> str | None:
    """Why OUT must be left alone, or None if it is free or holds nothing but a model of this tool's."""
    if not out.exists():
        return None
    if not out.is_dir():
        return f"{out} is not a folder"
    found = files_of(out)
    if not found and not any(out.iterdir()):
        return None
    try:
        ours = set(json.loads((out / "model_index.json").read_text(encoding="utf-8"))[MARK]["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return f"{out} is not empty and was not written by this tool"
    foreign = [name for name in found if name not in ours | {"model_index.json"}]
    return f"{out} also holds {foreign[0]}, which this tool did not write" if foreign else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen-Image-Edit model.")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="edit", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**63:
        parser.error("--seed is from 0 to 2**63 - 1")
    out = options.out.resolve()
    if reason := refusal(out):
        print(f"refusing to write: {reason}", file=sys.stderr)
        return 2
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    out.parent.mkdir(parents=True, exist_ok=True)
    # A sibling, for a rename does not cross file systems; a folder inside it, for mkdtemp's own is private (0700).
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        build(new, options.family, options.seed)
        size = sum((new / name).stat().st_size for name in files_of(new)) / 1e6
        if out.exists():
            out.rename(Path(scratch, "old"))
        new.rename(out)
    print(f"wrote a tiny {options.family} model ({size:.1f} MB, seed {options.seed}) to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

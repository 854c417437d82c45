"""The measurements as data, most valuable first. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

SECTIONS = {
    0: "what the GPU can do",
    1: "gradients of two blocks compared with float32",
    2: "a training step of the released model's shapes",
    3: "encoding rows of 1024²",
    4: "cached compared with live batches",
    5: "exactness",
    6: "small cards",
}


@dataclass(frozen=True)
class Option:
    """A way to train.

    Attributes:
        settings: keys of the configuration; the value "all" is the number of blocks.
        texts: "one" sample a batch, always of one length; "other", each of another; "four" of unequal lengths a batch.
        family: edit, qwen_image_21, or edit_plus with three controls, which are modulated at t = 0.
        limit: of the gradients' error, in errors of the plain loop; where the base is rounded, a share of the gradient.
        needs: "cuda" where a CPU has no such kernel.
        kept: the shares of blocks, and of attention's outputs, that are kept; None leaves it to the configuration.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    texts: str = "one"
    family: str = "edit"
    limit: float = 1.5
    needs: str = ""
    kept: tuple[int, int] | None = None

    @property
    def rounded(self) -> bool:
        """Whether the base is not the one that float32 computes with."""
        return "model.quantize" in self.settings


CHECKPOINTING, COMPILE = "train.gradient_checkpointing", "train.compile"
FP8, COMPILED = {"model.quantize": "fp8"}, {COMPILE: True}
PRODUCTS = FP8 | {"train.fp8_compute": True}
OPTIONS = {
    "default": Option(),
    "all blocks checkpointed": Option({CHECKPOINTING: True}),
    "compiled": Option(COMPILED),
    "compiled, all blocks checkpointed": Option(COMPILED | {CHECKPOINTING: True}),
    "fp8 products, compiled": Option(PRODUCTS | COMPILED, limit=0.15),
    "fp8 products": Option(PRODUCTS, limit=0.15),
    "fp8 weights": Option(FP8, limit=0.1),
    "fp8 weights, compiled": Option(FP8 | COMPILED, limit=0.1),
    "all attention kept": Option(kept=(0, 1)),
    "all attention kept, compiled": Option(COMPILED, kept=(0, 1)),
    "nothing recomputed": Option({CHECKPOINTING: False}),
    "every second block checkpointed": Option({CHECKPOINTING: 2}),
    "int8 weights": Option({"model.quantize": "int8"}, limit=0.1),
    "nf4 weights": Option({"model.quantize": "nf4"}, limit=0.4),
    "deterministic": Option({"train.deterministic": True}),
    "cuDNN attention": Option({"model.attention_backend": "_native_cudnn"}, needs="cuda"),
    "FlashAttention": Option({"model.attention_backend": "_native_flash"}),
    "offloaded": Option({"train.offload_blocks": "all"}),
    "fp8 weights, offloaded": Option(FP8 | {"train.offload_blocks": "all"}, limit=0.1),
    "fp8 products, offloaded": Option(PRODUCTS | {"train.offload_blocks": "all"}, limit=0.15),
    "four unequal texts": Option(texts="four"),
    "four unequal texts, compiled": Option(COMPILED, texts="four"),
    "another text length each step": Option(texts="other"),
    "another text length each step, compiled": Option(COMPILED, texts="other"),
    "three controls": Option(family="edit_plus"),
    "three controls, compiled": Option(COMPILED, family="edit_plus"),
}
NEWER, PER_SAMPLE = "qwen_image_21", "train.draws_per_sample"
DRAWS = {PER_SAMPLE: 4}
PLAIN = {"step plain": "edit", "step plain 2.1": NEWER}
"""Steps of the plain loop, and the family of each."""
if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 42):  # which has its classes
    OPTIONS |= {
        "2.1": Option(family=NEWER),
        "2.1, compiled": Option(COMPILED, family=NEWER),
        "2.1, four draws": Option(DRAWS, family=NEWER),
        "2.1, four draws, compiled": Option(DRAWS | COMPILED, family=NEWER),
        "2.1, four samples": Option(texts="four", family=NEWER),
        "2.1, four draws, offloaded": Option(DRAWS | {"train.offload_blocks": "all"}, family=NEWER),
    }


@dataclass(frozen=True)
class Measurement:
    """A line of the file.

    Attributes:
        name: of the line.
        section: of SECTIONS.
        work: the module here, and its function.
        arguments: of the function, after the place to work in.
        limit_s: it is ended then. It does not begin in less than half of it.
        alone: it changes its process: no other is measured there.
        needs: see Option.
    """

    name: str
    section: int
    work: str
    arguments: tuple[Any, ...] = ()
    limit_s: float = 60
    alone: bool = False
    needs: str = ""


def _ceilings() -> list[Measurement]:
    names = ["copy", "products bf16", "products fp8"]
    found = [Measurement(name, 0, f"ceilings.{name.replace(' ', '_')}", limit_s=40) for name in names]
    for backend, masked in (
        ("native", False),
        ("flash", False),
        ("cudnn", False),
        ("efficient", False),
        ("native", True),
        ("cudnn", True),
        ("efficient", True),
    ):
        name = f"attention {backend}{', masked' if masked else ''}"
        needs = "cuda" if backend in ("cudnn", "efficient") else ""
        found.append(Measurement(name, 0, "ceilings.attention", (backend, masked), 40, needs=needs))
    return [*found, Measurement("attention varlen", 0, "ceilings.varlen", limit_s=40, needs="cuda")]


def _checks() -> list[Measurement]:
    found = [
        Measurement(f"check plain {kind}", 1, "check.plain", (kind,)) for kind in ("one", "four", "three controls")
    ]
    for name, option in OPTIONS.items():
        limit_s = 120 if COMPILE in option.settings else 60
        alone = "train.deterministic" in option.settings
        found.append(Measurement(f"check {name}", 1, "check.option", (name,), limit_s, alone, option.needs))
    return found


def _steps() -> list[Measurement]:
    families = {option.family for option in OPTIONS.values()}
    plain = {name: family for name, family in PLAIN.items() if family in families}
    found = [Measurement(name, 2, "step.plain", (name, family), 120) for name, family in plain.items()]
    for name, option in OPTIONS.items():
        slow = COMPILE in option.settings or option.texts == "four"
        alone = "train.deterministic" in option.settings
        section = 6 if "offloaded" in name else 2
        found.append(
            Measurement(f"step {name}", section, "step.option", (name,), 180 if slow else 120, alone, option.needs)
        )
    return found


def _encoding() -> list[Measurement]:
    return [
        Measurement("encode rows", 3, "encoding.ours", limit_s=150),
        Measurement("encode rows plain", 3, "encoding.plain", limit_s=150),
        Measurement("encode vae", 3, "encoding.vae", limit_s=60, needs="cuda"),
        Measurement("encode prompt", 3, "encoding.prompt", limit_s=90, needs="cuda"),
        Measurement("encode vision", 3, "encoding.vision", limit_s=60, needs="cuda"),
        Measurement("cached and live", 4, "encoding.cached_and_live", limit_s=120),
    ]


def _exactness() -> list[Measurement]:
    return [
        Measurement("resume deterministic", 5, "exact.resumed", (True,), 120, alone=True),
        Measurement("resume", 5, "exact.resumed", (False,), 120),
        Measurement("batch of four", 5, "exact.together", limit_s=60),
    ]


SMALL_CARD = ("nf4 weights", "fp8 products, offloaded", "fp8 weights, offloaded", "offloaded")


def _small_cards() -> list[Measurement]:
    return [
        Measurement(f"step of 24 GB, {name}", 6, "step.small_card", (name, 24), 240, alone=True) for name in SMALL_CARD
    ]


FIRST = (
    "machine",
    "copy",
    "products bf16",
    "products fp8",
    "attention native",
    "step plain",
    "step default",
    "step compiled",
    "step fp8 products, compiled",
    "encode rows",
    "encode rows plain",
)
"""Before all others, in this order."""


def _all() -> dict[str, Measurement]:
    found = [Measurement("machine", 0, "step.machine"), *_ceilings(), *_checks(), *_steps(), *_encoding()]
    found += [*_exactness(), *_small_cards()]
    found.sort(key=lambda one: (FIRST.index(one.name) if one.name in FIRST else len(FIRST), one.section))
    named = {one.name: one for one in found}
    assert len(named) == len(found), "two measurements have one name"
    return named


MEASUREMENTS = _all()

"""A training step of the released model does on a GPU what the documentation says: on a GPU that is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest

from tests.training.fake_gpu import Case, Measured, build_belief, measured

PLUS = {"controls": (1024, 1024, 1024), "zero_cond_t": True}
FOUR = {"text_tokens": (1400, 1408, 1390, 1408)}
WHOLE = {"train.gradient_checkpointing": False}
OTHERS = ["to_q", "img_mlp.net.2", "txt_mlp.net.0.proj", "to_add_out", "img_mod.1"]
FP8 = {"model.quantize": "fp8"}
PRODUCTS = FP8 | {"train.fp8_compute": True}
ALL = {"model.lora": None}
PAIRS = {"loss.kind": "flow_dpo"}
CASES = {
    "edit": Case(),
    "edit, nothing recomputed": Case(WHOLE),
    "edit, offloaded": Case({"train.offload_blocks": "all"}),
    "edit, attention kept": Case(kept=(0, "all")),
    "edit, attention and two blocks kept": Case(kept=(2, "all"), blocks=4),
    "edit, offloaded, attention kept": Case({"train.offload_blocks": "all"}, kept=(0, "all")),
    "edit, fp8, four samples, attention kept": Case(FP8, **FOUR, kept=(0, "all")),
    "all weights, attention and a block kept": Case(ALL, blocks=4, kept=(1, "all")),
    "edit, pairs": Case(PAIRS),
    "edit, preserved": Case(preserved=True),
    "edit, four samples": Case(**FOUR),
    "edit, four samples, nothing recomputed": Case(WHOLE, **FOUR),
    "edit_plus": Case(**PLUS),
    "edit_plus, four samples": Case(**PLUS, **FOUR),
    "edit, fp8": Case(FP8),
    "edit, fp8, nothing recomputed": Case(FP8 | WHOLE),
    "edit, fp8, offloaded": Case(FP8 | {"train.offload_blocks": "all"}, blocks=4),
    "edit, fp8 products": Case(PRODUCTS),
    "edit, fp8 products, nothing recomputed": Case(PRODUCTS | WHOLE),
    "edit_plus, int8, four samples": Case({"model.quantize": "int8"}, **PLUS, **FOUR),
    "DoRA, nothing recomputed": Case(WHOLE | {"model.lora": {"use_dora": True}}),
    "dropout, nothing recomputed": Case(WHOLE | {"model.lora": {"lora_dropout": 0.1}}),
    "other targets, nothing recomputed": Case(WHOLE | {"model.lora": {"r": 16, "target_modules": OTHERS}}),
    # From four blocks on, the optimizer's step takes most, as with sixty.
    "all weights": Case(ALL, blocks=4),
    "all weights, nothing recomputed": Case(ALL | WHOLE, blocks=4),
    "all weights in bfloat16": Case(ALL | {"train.trained_dtype": "bfloat16"}, blocks=4),
}
if hasattr(diffusers, "QwenImage21Transformer2DModel"):
    NEWER = {"family": "qwen_image_21", "text_tokens": (89,)}
    DRAWS = {"train.draws_per_sample": 4}
    CASES |= {
        "2.1": Case(**NEWER),
        "2.1, four draws, nothing recomputed": Case(DRAWS | WHOLE, **NEWER),
        "2.1, fp8, four draws, attention kept": Case(FP8 | DRAWS, **NEWER, kept=(0, "all")),
        "2.1, three controls, four draws, offloaded": Case(
            DRAWS | {"train.offload_blocks": "all"}, **NEWER, controls=(1024, 1024, 1024), blocks=4
        ),
    }
pytestmark = pytest.mark.timeout(2000)  # the first test waits for all steps, which take minutes where others compute
CONTEXT = 1 << 30  # of CUDA, which no tensor takes
LOSS = ["_to_copy to cpu: sharding.whole of run._clip", "_to_copy to cpu: run.training_step"]


@pytest.fixture(scope="module")
def steps(
    tiny_edit: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Measured, Measured]]:
    """Of each case the step, and the step with one block more."""
    if shutil.which("g++") is None:
        pytest.skip("a build of torch for CPUs needs a C++ compiler to believe in a GPU")
    folder = tmp_path_factory.mktemp("gpu")
    cases = [replace(case, blocks=case.blocks + more) for case in CASES.values() for more in (0, 1)]
    models = {}
    for family in {case.family for case in cases}:
        tiny = tiny_edit if family == "edit" else request.getfixturevalue("tiny_21")
        models[family] = Path(shutil.copytree(tiny, folder / family))
    found = measured(cases, models, build_belief(folder))
    return dict(zip(CASES, zip(found[::2], found[1::2], strict=True), strict=True))


def released(name: str, pair: tuple[Measured, Measured], number: Callable[[Measured], float]) -> float:
    """A number of the released model: each further block adds as much as the last one here."""
    fewer, more = map(number, pair)
    blocks = 60 if CASES[name].family == "edit" else 32
    return fewer + (blocks - pair[0].blocks) * (more - fewer)


def test_the_host_waits_for_the_device_only_to_read_the_loss_and_the_norm_of_its_gradient(steps) -> None:
    for name, pair in steps.items():
        assert [found.syncs for found in pair] == [LOSS, LOSS], name


def test_blocks_hand_on_bfloat16_and_the_loss_is_float32(steps) -> None:
    for name, pair in steps.items():
        prediction = "float32" if "all weights" in name else "bfloat16"
        expected = {"block": ["torch.bfloat16"], "prediction": [f"torch.{prediction}"], "loss": ["torch.float32"]}
        assert [found.stream for found in pair] == [expected, expected], name


def test_a_step_computes_what_qie_counts(steps) -> None:
    """But for the scores, which fused attention computes again in its backward pass: one more of its two products."""

    def counted(found: Measured) -> float:
        return found.backward_flop - found.attention_flop / found.estimated["forward_passes"] / 2

    for part, count in (("forward_flop", lambda found: found.forward_flop), ("backward_flop", counted)):
        told = {name: released(name, pair, lambda found: found.estimated[part]) for name, pair in steps.items()}  # noqa: B023
        assert told == pytest.approx({name: released(name, pair, count) for name, pair in steps.items()}, rel=0.01)


def test_a_step_takes_as_much_memory_as_qie_estimates(steps) -> None:
    def told(found: Measured) -> float:
        parts = ("weights", "gradients", "optimizer", "activations", "workspace")
        return sum(found.estimated[part] for part in parts) - CONTEXT

    taken = {name: released(name, pair, lambda found: found.peak) for name, pair in steps.items()}
    assert {name: released(name, pair, told) for name, pair in steps.items()} == pytest.approx(taken, rel=0.03)


def test_a_model_is_loaded_without_taking_more_than_it_will_and_some_copies_of_a_layer(steps) -> None:
    largest = 18 * 3072**2  # weights of a modulation, in float32 and again as it is rounded
    for name, pair in steps.items():
        assert all(found.loaded <= found.before + 3 * 4 * largest for found in pair), name

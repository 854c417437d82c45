"""Flow-DPO: its loss and gradient are those of a plain implementation, and what cannot be is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from diffusers.models.attention_dispatch import attention_backend
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import logsigmoid
from torch.utils.flop_counter import FlopCounterMode

from qie.config import Config, LoraConfig, LossConfig
from qie.data.batch import collate
from qie.data.opening import open_stream
from qie.data.plan import PlannedBatch
from qie.data.sources import open_source
from qie.errors import ConfigError, QieError, UsageError
from qie.precompute import precompute
from qie.pretrained import open_pretrained
from qie.shards.excluded import EXCLUDED_NAME
from qie.training.loop import train
from qie.training.model.lora import add_lora, without_trained
from qie.training.model.training_forward import use_training_forward
from qie.training.objective import NoiseDraws, Objective, velocity
from qie.training.reporting.metrics import METRICS_FILE, Preference, Speed, read_metrics
from qie.training.run import require_pairs
from qie.types import Row
from tests.builders import make_sample, write_shard
from tests.test_rejected import blurred
from tests.training.adapters import assert_gradients, base_and_adapted, randomise, taken_gradients, transformer_of

MODEL = ("transformer", "scheduler")
SHIFT = {"base_shift": 0.5, "max_shift": 0.9, "base_tokens": 256, "max_tokens": 8192}


class ListSource:
    """Rows that are there already."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        return self._rows[index].name

    def read(self, index: int) -> Row:
        return self._rows[index]


def objective(family: str, **section) -> Objective:
    loss = LossConfig(kind="flow_dpo", **section)
    patch = 1 if family == "qwen_image_21" else 2
    return Objective(loss, 0.0, 7, SHIFT, torch.device("cpu"), torch.float32, patch=patch)


@pytest.fixture(scope="module")
def batch(photos: Path, family_encoder):
    """Two pairs of one shape."""
    source = open_source(photos)
    rows = [source.read(index) for index in range(12)]
    samples = [family_encoder.encode(replace(row, rejected=blurred(row.target))) for row in rows]
    alike = [sample for sample in samples if sample.shape == samples[0].shape][:2]
    return collate(alike, PlannedBatch((0, 1), (1.5, 0.5)))


@pytest.mark.parametrize("supervised", [0.0, 3.0])
def test_loss_and_gradient_are_those_of_a_plain_implementation(
    tiny_model: Path, family: str, batch, supervised: float
) -> None:
    base, model = base_and_adapted(tiny_model)
    made = objective(family, beta=2.0, supervised_weight=supervised)
    draws = made.draw(batch, 5)
    found = made.losses(model, batch, draws)
    found.mean.backward()
    gradients = taken_gradients(model)

    sigmas, moved = found.sigmas, made.moved(batch)

    def error(transformer, latent: torch.Tensor) -> torch.Tensor:
        at = sigmas[:, None, None, None, None]
        noisy = (1 - at) * latent + at * draws.noise
        predicted = velocity(transformer, noisy, sigmas, moved, moved.prompt_embed, moved.prompt_lengths)
        return ((predicted - (draws.noise - latent)) ** 2).flatten(1).mean(1)

    target, rejected = moved.pixel_latent, moved.rejected_latent
    with torch.no_grad():
        of_base = error(base, target), error(base, rejected)
    mine = error(model, target), error(model, rejected)
    margin = -1.0 * ((mine[0] - of_base[0]) - (mine[1] - of_base[1]))
    expected = -logsigmoid(margin) + supervised * mine[0]
    (expected * moved.weight).mean().backward()
    assert (found.loss - expected).abs().max() < 1e-5
    assert (found.rewards.margin - margin).abs().max() < 1e-4 and margin.abs().min() > 1e-4
    assert_gradients(model, gradients)


def test_the_reference_is_the_model_without_the_trained_adapter_alone(tiny_model: Path, family: str, batch) -> None:
    model = transformer_of(tiny_model)
    add_lora(model, LoraConfig(r=2), seed=0)
    use_training_forward(model)
    made = objective(family)
    # Before the first step nothing is preferred: log 2, whatever the pair.
    assert torch.allclose(made.losses(model, batch, made.draw(batch, 0)).loss, torch.tensor(2.0).log())
    randomise(model)
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer.active_adapters for layer in layers]
    with without_trained(model):
        assert layers and not any(layer.active_adapters for layer in layers)
    assert [layer.active_adapters for layer in layers] == before


def test_a_step_costs_what_torch_counts_with_the_passes_of_the_base(tiny_model: Path, family: str, batch) -> None:
    model = transformer_of(tiny_model)
    add_lora(model, LoraConfig(r=1, target_modules=["to_q"]), seed=0)
    use_training_forward(model)
    made = objective(family)
    # As if an embedding before the first block were trained, too: else there is less to go back through.
    moved, names = made.moved(batch), ("pixel_latent", "rejected_latent", "prompt_embed")
    given = replace(moved, **{name: getattr(moved, name).clone().requires_grad_(True) for name in names})
    controls = tuple(one.clone().requires_grad_(True) for one in given.control_latent)
    given = replace(given, control_latent=controls, prompt_lengths=(max(batch.prompt_lengths),) * 2)  # padding counts
    with attention_backend("_native_math"), FlopCounterMode(display=False) as counted:
        made.losses(model, given, made.draw(given, 0)).mean.backward()
    speed = Speed.of(model.config, torch.device("cpu"), torch.float32, None, False, targets=2)
    assert speed.flops(given, base_passes=1) == pytest.approx(counted.get_total_flops(), rel=0.05)
    assert speed.flops(given) < 0.8 * counted.get_total_flops()


def test_a_batch_without_rejected_targets_is_refused_by_its_samples(tiny_edit: Path, batch) -> None:
    model = transformer_of(tiny_edit)
    kept = torch.zeros(2, dtype=torch.bool)
    draws = NoiseDraws(torch.zeros_like(batch.pixel_latent).float(), torch.full((2,), 0.5), kept, kept)
    with pytest.raises(UsageError, match=f"(?s)pairs alone.*{batch.keys[0][:12]}"):
        objective("edit").losses(model, replace(batch, rejected_latent=None), draws)


def test_accuracy_counts_a_tie_as_a_half_and_rewards_are_told_of_both_targets() -> None:
    levels, target = torch.tensor([0.1, 0.1, 0.9, 0.9]), torch.tensor([1.0, 0.0, 3.0, -1.0])
    found = Preference.of(levels, target, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert (found.margin, found.accuracy) == (0.25, 0.625)
    assert found.margin_by_level == (0.5, None, None, 0.0)
    assert (found.target_reward, found.rejected_reward) == (0.75, 0.5)
    assert found.target_reward_by_level == (0.5, None, None, 1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": {"lora": None}}, "needs model.lora"),
        ({"model": {"lora": {"continue_from": "a"}}}, "in model.adapters instead"),
        ({"train": {"draws_per_sample": 2}}, "draws_per_sample has to be 1"),
        ({"loss": {"weighting": "cosmap"}}, "weighting has to be none"),
        ({"model": {"lora": {"lora_dropout": 0.1}}}, "lora_dropout has to be 0"),
    ],
)
def test_what_cannot_be_combined_with_it_is_refused_by_name(settings, words: str) -> None:
    tree = {"model": {"pretrained_model_name_or_path": "x"}, "loss": {"kind": "flow_dpo"}}
    for section, values in settings.items():
        tree[section] = {**tree.get(section, {}), **values}
    with pytest.raises(ValueError, match=words):
        Config.model_validate(tree)


def test_a_run_learns_from_pairs_tells_what_it_prefers_and_refuses_rows_without_one(
    photos: Path, tiny_edit: Path, encoder, tmp_path: Path
) -> None:
    source = open_source(photos)
    pairs = [replace(row, rejected=blurred(row.target)) for row in (source.read(index) for index in range(6))]
    precompute(ListSource(pairs), encoder, tmp_path / "pairs", rows=(0, 6))
    precompute(source, encoder, tmp_path / "rows", rows=(0, 4))
    tree = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 2}},
        "train": {"max_steps": 2, "mixed_precision": "no", "output_dir": str(tmp_path / "run")},
        "validation": {"rows": 2},
    }
    pretrained = open_pretrained(str(tiny_edit), components=MODEL)

    def run(shards: Path, resume: str | None = None, kind: str = "flow_dpo"):
        stream, config = open_stream(shards, validation_rows=2), Config.model_validate(tree | {"loss": {"kind": kind}})
        return train(config, pretrained, stream, Accelerator(cpu=True), resume=resume)

    run(tmp_path / "pairs")
    lines = read_metrics(tmp_path / "run" / METRICS_FILE)
    (first, *_), steps = (
        [line for line in lines if "validation_loss" in line],
        [line for line in lines if "preference_margin" in line],
    )
    assert first["validation_preference_accuracy"] == 0.5 and first["validation_preference_margin"] == 0
    assert [line["step"] for line in steps] == [1, 2] and len(steps[0]["preference_margin_by_level"]) == 4
    with pytest.raises(ConfigError, match=r"(?s)loss\.kind.*4 of 4 samples have none: of rows 0, 1, 2, 3"):
        run(tmp_path / "rows", resume="latest")
    with pytest.raises(QieError, match=r"(?s)loss\.kind changed.*flow_dpo"):
        run(tmp_path / "pairs", resume="latest", kind="mse")


def test_rows_without_a_rejected_target_are_named_and_may_be_excluded(tmp_path: Path) -> None:
    samples = [make_sample(row, paired=row != 1) for row in range(3)]
    write_shard(tmp_path, samples)
    tree = {"model": {"pretrained_model_name_or_path": "x"}, "loss": {"kind": "flow_dpo"}}
    config = Config.model_validate(tree)
    with pytest.raises(ConfigError, match=r"(?s)1 of 3 samples have none: of rows 1\n.*exclude them with qie-stats"):
        require_pairs(config, open_stream(tmp_path))
    growing = SimpleNamespace(samples=open_stream(tmp_path).samples, is_excluded=lambda position: False)
    with pytest.raises(ConfigError, match="of rows 1\n"):
        require_pairs(config, growing)
    (tmp_path / EXCLUDED_NAME).write_text(f"{samples[1].key}\n")
    require_pairs(config, open_stream(tmp_path))

"""Preserved sources: the base's own predictions are learnt of them, beside the targets of the other sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from qie.config import Config, LoraConfig, LossConfig
from qie.data.batch import collate
from qie.data.opening import open_stream
from qie.data.plan import PlannedBatch
from qie.data.sources import open_source
from qie.data.sources.mixture import Reworded
from qie.data.stream import Stream
from qie.errors import ConfigError, RowError, UsageError
from qie.from_config import open_rows
from qie.precompute import precompute
from qie.pretrained import open_pretrained
from qie.training.loop import train, unvalidated
from qie.training.model.lora import add_lora
from qie.training.model.training_forward import use_training_forward
from qie.training.objective import Objective, velocity
from qie.training.reporting.metrics import METRICS_FILE, read_metrics
from qie.types import Row
from tests.training.adapters import assert_gradients, base_and_adapted, taken_gradients, transformer_of
from tests.training.test_preference import ListSource

SHIFT = {"base_shift": 0.5, "max_shift": 0.9, "base_tokens": 256, "max_tokens": 8192}


def objective(family: str, draws: int = 1, *, together: bool = False) -> Objective:
    patch, device = (1 if family == "qwen_image_21" else 2), torch.device("cpu")
    return Objective(
        LossConfig(), 0.0, 7, SHIFT, device, torch.float32, patch=patch, draws_per_sample=draws, together=together
    )


@pytest.fixture(scope="module")
def batch(photos: Path, family_encoder):
    """Two samples of one shape, of which the second is preserved."""
    source = open_source(photos)
    samples = [family_encoder.encode(source.read(index)) for index in range(12)]
    alike = [sample for sample in samples if sample.shape == samples[0].shape][:2]
    return collate(alike, PlannedBatch((0, 1), (1.5, 0.5)), (False, True))


def test_a_preserved_sample_learns_what_the_model_predicts_without_its_adapter(
    tiny_model: Path, family: str, batch
) -> None:
    base, model = base_and_adapted(tiny_model)
    k = 2 if family == "qwen_image_21" else 1
    made = objective(family, k)
    draws = made.draw(batch, 5)
    found = made.losses(model, batch, draws)
    found.mean.backward()
    gradients = taken_gradients(model)

    moved, at = made.moved(batch), found.sigmas[:, None, None, None, None]
    latent = moved.pixel_latent.repeat_interleave(k, 0)
    given = (1 - at) * latent + at * draws.noise, found.sigmas, moved, moved.prompt_embed, moved.prompt_lengths
    with torch.no_grad():
        of_base = velocity(base, *given)
    target = torch.cat([(draws.noise - latent)[:k], of_base[k:]])
    expected = ((velocity(model, *given) - target) ** 2).flatten(1).mean(1)
    (expected * found.weight).mean().backward()
    assert found.preserved.tolist() == [False] * k + [True] * k and expected.detach().min() > 1e-4
    assert (found.loss - expected).abs().max() < 1e-6
    assert_gradients(model, gradients)


def test_before_the_first_step_nothing_is_to_be_learnt_of_a_preserved_sample(
    tiny_model: Path, family: str, batch
) -> None:
    model = transformer_of(tiny_model)
    add_lora(model, LoraConfig(r=2), seed=0)
    use_training_forward(model)
    made = objective(family)
    draws = made.draw(batch, 0)
    found, plain = (made.losses(model, one, draws).loss for one in (batch, replace(batch, preserved=())))
    assert found[1] == 0 and plain[1] > 0 and found[0] == plain[0]


@pytest.mark.parametrize(("together", "passes"), [(False, 1), (True, 2)])
def test_the_base_is_asked_only_where_a_sample_is_preserved_unless_processes_compute_together(
    tiny_edit: Path, photos: Path, encoder, together: bool, passes: int
) -> None:
    sample = encoder.encode(open_source(photos).read(0))
    model, asked = transformer_of(tiny_edit), []
    add_lora(model, LoraConfig(r=2), seed=0)
    use_training_forward(model)
    model.register_forward_hook(lambda *_: asked.append(torch.is_grad_enabled()))
    made, plan = objective("edit", together=together), PlannedBatch((0,), (1.0,))
    for preserved, expected in (((False,), passes), ((True,), 2), ((), 1)):
        asked.clear()
        batch = collate([sample], plan, preserved)
        made.losses(model, batch, made.draw(batch, 0))
        assert asked == [False, True][2 - expected :], preserved


def config_of(photos: Path, pretrained: Path, folder: Path, **sections) -> Config:
    sources = [
        {"source": str(photos), "name": "dog"},
        {"source": str(photos), "name": "class", "preserve": True, "replace": {"the": "sks", "Make": "Turn"}},
    ]
    tree = {
        "model": {"pretrained_model_name_or_path": str(pretrained), "lora": {"r": 2}},
        "data": {"source": sources},
        "train": {"max_steps": 4, "mixed_precision": "no", "output_dir": str(folder / "run")},
        "validation": {"rows": 8},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return Config.model_validate(tree)


def test_a_source_with_other_words_has_other_prompts_and_equal_images(photos: Path) -> None:
    words = {"source": str(photos), "replace": {"a": "o", "o": "u"}}
    plain, other = open_source(photos), open_source([words])
    prompts = [plain.read(index).prompt for index in range(len(plain))]
    rows = [other.read(index) for index in range(len(other))]
    assert [row.prompt for row in rows] == [prompt.replace("a", "o").replace("o", "u") for prompt in prompts]
    assert [row.target for row in rows] == [plain.read(index).target for index in range(len(plain))]
    assert [other.name(index) for index in range(12)] == [plain.name(index) for index in range(12)]


@pytest.fixture(scope="module")
def shards(photos: Path, tiny_edit: Path, encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of `config_of`: the photographs, and the same with other prompts."""
    folder = tmp_path_factory.mktemp("preserved")
    precompute(open_rows(config_of(photos, tiny_edit, folder)), encoder, folder / "shards", rows=(0, 24))
    return folder / "shards"


def run(config: Config, stream: Stream, **how) -> None:
    pretrained = open_pretrained(config.model.pretrained_model_name_or_path, components=("transformer", "scheduler"))
    train(config, pretrained, stream, Accelerator(cpu=True), **how)


def test_a_preserved_source_has_only_captions_whose_words_are_replaced(photos: Path) -> None:
    rows = [
        Row(0, "a", b"", (), "a dog", more_prompts=("a sks dog", "sks dogs")),
        Row(1, "b", b"", (), "a cat"),
    ]
    source = Reworded(ListSource(rows), {"sks dog": "dog"}, required=True)
    assert (source.read(0).prompt, source.read(0).more_prompts) == ("a dog", ("dogs",))
    with pytest.raises(RowError, match=r"(?s)none of the words to replace.*sks dog"):
        source.read(1)
    part = {"source": str(photos), "replace": {"sks dog": "dog"}}
    assert open_source([part]).read(0).prompt == open_source(photos).read(0).prompt
    with pytest.raises(RowError, match="none of the words to replace"):
        open_source([part | {"preserve": True}]).read(0)


def test_a_run_tells_the_loss_of_preserved_samples_apart(
    photos: Path, tiny_edit: Path, shards: Path, tmp_path: Path
) -> None:
    run(
        config_of(photos, tiny_edit, tmp_path),
        open_stream(shards, batch_size=2, validation_rows=8, preserved={"class"}),
    )
    lines = read_metrics(tmp_path / "run" / METRICS_FILE)
    first, *_ = (line for line in lines if "validation_loss" in line)
    assert first["validation_preserved_loss"] == 0 and first["validation_loss"] > 0.1
    assert any("preserved_loss" in line for line in lines if "lr" in line)


def test_a_validation_of_preserved_rows_alone_is_told_at_the_start(shards: Path) -> None:
    plain = open_stream(shards, validation_rows=1)
    columns = plain.samples.columns
    name = columns.source_names[columns.sources[plain.held_out[0]]]
    told, silent = (
        list(unvalidated(open_stream(shards, validation_rows=1, preserved={one})))
        for one in (name, *{"dog", "class"} - {name})
    )
    assert len(told) == 1 and "raise validation.rows" in told[0] and not silent


def test_a_stream_that_preserves_other_sources_than_there_are_is_refused(
    photos: Path, tiny_edit: Path, shards: Path, tmp_path: Path
) -> None:
    config = config_of(photos, tiny_edit, tmp_path)
    with pytest.raises(ConfigError, match="the stream preserves no source"):
        run(config, open_stream(shards))
    with pytest.raises(ConfigError, match="loss_fn learns targets"):
        run(config, open_stream(shards, preserved={"class"}), loss_fn=lambda prediction, *_: prediction.mean())
    with pytest.raises(UsageError, match="'cat', which is to be preserved"):
        open_stream(shards, preserved={"cat"})
    with pytest.raises(UsageError, match="all samples are of preserved sources"):
        open_stream(shards, preserved={"dog", "class"})


def test_a_sample_is_not_both_learnt_and_preserved(photos: Path, encoder, tmp_path: Path) -> None:
    twice = [{"source": str(photos), "name": name} for name in ("dog", "class")]
    precompute(open_source(twice), encoder, tmp_path, rows=(0, 24))
    with pytest.raises(UsageError, match=r"(?s)12 samples.*row 0 of 'dog'.*replace"):
        open_stream(tmp_path, preserved={"class"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": {"lora": None}}, "preserve compares .* needs model.lora"),
        ({"model": {"lora": {"continue_from": "a"}}}, "in model.adapters instead"),
        ({"loss": {"kind": "flow_dpo"}}, "flow_dpo learns from pairs alone"),
        ({"data": {"source": [{"source": "a", "preserve": True}]}}, "all sources are preserved"),
    ],
)
def test_what_cannot_be_combined_with_it_is_refused_by_name(settings, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(tmp_path, tmp_path, tmp_path, **settings)

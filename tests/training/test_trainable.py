"""The model in training: what it saves, it loads; what is evaluated are the averages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qie.config import Config
from qie.errors import ConfigError, QieError
from qie.pretrained import open_pretrained
from qie.training.checkpoint import identity
from qie.training.model.lora import save_adapter
from qie.training.model.sharding import require_own_blocks
from qie.training.model.trainable import TrainableModel
from qie.training.processes import open_accelerator
from tests.training.adapters import trained_adapter
from tests.training.small import small_transformer


@pytest.fixture(params=[{"r": 2, "lora_dropout": 0.5}, None], ids=["LoRA", "all weights"])
def build(tiny_edit: Path, request: pytest.FixtureRequest):
    """A model that is ready to be trained."""
    model = {"pretrained_model_name_or_path": str(tiny_edit), "lora": request.param}
    config = Config.model_validate({"model": model, "train": {"mixed_precision": "no", "ema_decay": 0.5}})
    pretrained = open_pretrained(str(tiny_edit), components=("transformer",))

    def built(weights: Path | None = None) -> TrainableModel:
        trainable = TrainableModel(pretrained, config, torch.float32, torch.device("cpu"), weights=weights)
        trainable.prepare(open_accelerator(config), torch.optim.SGD(trainable.parameters.values(), lr=0.1))
        return trainable

    return built


@torch.no_grad()
def train(trainable: TrainableModel, change: float) -> None:
    for weight in trainable.parameters.values():
        weight += change


def test_what_is_saved_is_loaded_with_its_averages_whatever_the_model_began_with(build, tmp_path: Path) -> None:
    first = build()
    train(first, 1.0)
    first.update_average(1)
    tensors = first.tensors(wanted=True)
    assert tensors.keys() == {"trained", "ema"}
    assert first.tensors(wanted=False) == {"trained": {}, "ema": {}}
    first.save(tmp_path, tensors)
    for weights in (None, tmp_path):
        other = build(weights)
        other.load(tmp_path)
        found = other.tensors(wanted=True)
        for group, expected in tensors.items():
            assert found[group].keys() == expected.keys()
            assert all(torch.equal(found[group][name], value) for name, value in expected.items()), (weights, group)


def test_averages_follow_fast_at_first_and_then_by_the_decay_and_are_what_is_evaluated(build) -> None:
    trainable = build()
    [name, *_] = trainable.parameters
    weight = trainable.parameters[name]
    expected = weight.detach().clone()
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (100, 0.5)):
        train(trainable, 1.0)
        trainable.update_average(step)
        expected = decay * expected + (1 - decay) * weight.detach()
    trained = weight.detach().clone()
    with trainable.evaluating() as transformer:
        torch.testing.assert_close(weight.detach(), expected)
        assert not torch.equal(weight, trained) and not transformer.training
    assert torch.equal(weight, trained) and transformer.training


def test_losses_have_the_adapters_of_training_alone_and_released_images_do_not(tiny_edit: Path, tmp_path: Path) -> None:
    save_adapter(trained_adapter(tiny_edit, r=2), tmp_path)
    model = {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 2}}
    plain, helped = (
        TrainableModel(
            open_pretrained(str(tiny_edit), components=("transformer",)),
            Config.model_validate({"model": model | {"adapters": adapters}, "train": {"mixed_precision": "no"}}),
            torch.float32,
            torch.device("cpu"),
        )
        for adapters in ([], [{"path": str(tmp_path), "train_only": True}])
    )

    def read(transformer) -> torch.Tensor:
        layer = transformer.transformer_blocks[0].attn.to_q
        return layer(torch.linspace(-1, 1, layer.in_features))

    assert not torch.equal(read(helped.model), read(plain.model))
    with plain.evaluating() as model:
        expected = read(model)
    with helped.evaluating() as model:
        assert not torch.equal(read(model), expected)
    with helped.evaluating(as_released=True) as model:
        assert torch.equal(read(model), expected)
    assert helped.parameters.keys() == plain.parameters.keys()


def test_a_run_with_adapters_resumes_from_a_checkpoint_of_before_train_only_was_there(tiny_edit: Path) -> None:
    model = {"pretrained_model_name_or_path": str(tiny_edit), "adapters": [{"path": "a"}]}
    mine = identity(Config.model_validate({"model": model}), open_pretrained(str(tiny_edit)))
    assert mine["model.adapters"] == [{"path": "a", "scale": 1.0}]


def test_a_configuration_of_accelerate_that_names_blocks_of_another_family_is_refused() -> None:
    transformer = small_transformer(num_layers=1)
    require_own_blocks(transformer, None)
    require_own_blocks(transformer, ["QwenImageTransformerBlock"])
    with pytest.raises(ConfigError, match="no layer of the class that it is to be sharded by") as caught:
        require_own_blocks(transformer, ["QwenImage21TransformerBlock"])
    assert (caught.value.expected, caught.value.found) == ("QwenImageTransformerBlock", "QwenImage21TransformerBlock")


def test_a_weight_that_is_not_finite_is_named_instead_of_given(build) -> None:
    trainable = build()
    [name, *_] = trainable.parameters
    trainable.parameters[name].data.view(-1)[0] = torch.inf
    with pytest.raises(QieError, match="are not finite") as caught:
        trainable.tensors(wanted=True)
    assert str(caught.value.where) == name.replace(".default", "")

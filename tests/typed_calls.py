"""What mypy and pyright see of calls of `qie`: real types, not Any. `make lint` checks this file; nothing runs it.

`npx pyright --pythonpath .venv/bin/python tests/typed_calls.py` checks it with pyright.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import torch
from PIL import Image

import qie
from qie.data.webdataset_pipeline import SampleDataset
from qie.precompute import Report, precompute
from qie.training.loop import Outcome
from qie.types import Facts


def configuration() -> qie.Config:
    config = qie.load_config(Path("my.yaml"), ["train.seed=1"])
    assert_type(config, qie.Config)
    assert_type(config.train.seed, int)
    assert_type(qie.load_config({"model": {"pretrained_model_name_or_path": Path("m")}}), qie.Config)
    assert_type(qie.__version__, str)
    return config


def rows(config: qie.Config) -> None:
    source, encoder = qie.open_rows(config), qie.open_encoder(config)
    assert_type(source, qie.Source)
    assert_type(source.read(0), qie.Row)
    assert_type(qie.Row.of(target="a.png", controls=[Path("b.png"), b"", Image.new("L", (1, 1))], prompt=""), qie.Row)
    assert_type(qie.open_source("photos/"), qie.Source)
    assert_type(encoder, qie.Encoder)
    assert_type(encoder.recipe, qie.Recipe)
    assert_type(encoder.encode(source.read(0)), qie.Sample)
    assert_type(encoder.inspect(source.read(0)), Facts)
    assert_type(qie.open_stream(source, encoder=encoder), qie.Stream)
    assert_type(precompute(source, encoder, "shards/", rows=(0, len(source))), Report)


def batches() -> None:
    shards = qie.ShardSet.open(["shards/"])
    assert_type(shards, qie.ShardSet)
    assert_type(shards.load(0).pixel_latent, torch.Tensor)
    stream = qie.open_stream("shards/", batch_size=4)
    assert_type(stream, qie.Stream)
    assert_type(iter(stream), Iterator[qie.Batch])
    assert_type(stream.state_dict(), dict[str, Any])
    assert_type(qie.webdataset("shards/"), SampleDataset)
    assert_type(qie.Summary.of("shards/"), qie.Summary)
    for batch in stream:
        assert_type(batch.prompt_embed, torch.Tensor)
        assert_type(batch.prompts, tuple[str, ...])


def training(config: qie.Config) -> None:
    pretrained, accelerator = qie.open_pretrained("some/model"), qie.open_accelerator(config)
    assert_type(pretrained, qie.PretrainedModel)
    stream = qie.open_training_stream(config, pretrained, accelerator, "shards/")
    assert_type(stream, qie.Stream)
    assert_type(qie.train(config, pretrained, stream, accelerator), Outcome)
    told = qie.Listener(step=lambda metrics: assert_type(metrics.loss, float))
    qie.train(config, pretrained, stream, accelerator, loss_fn=absolute, callbacks=[told])


def absolute(prediction: torch.Tensor, target: torch.Tensor, batch: qie.Batch, sigmas: torch.Tensor) -> torch.Tensor:
    return (prediction - target).abs().flatten(1).mean(1)


def objective(model: torch.nn.Module, batch: qie.Batch, sigmas: torch.Tensor) -> None:
    prompt = (batch.prompt_embed, batch.prompt_lengths)
    predicted = qie.velocity(model, batch.pixel_latent, sigmas, batch, *prompt)
    assert_type(predicted, torch.Tensor)
    tokens = qie.pack(predicted)
    assert_type(tokens, torch.Tensor)
    assert_type(qie.unpack(tokens, 64, 64), torch.Tensor)


def inference(config: qie.Config) -> None:
    predictor = qie.open_predictor(config, lora="checkpoint/")
    assert_type(predictor, qie.Predictor)
    assert_type(predictor.generate([Image.open("in.png")], "make it night"), Image.Image)

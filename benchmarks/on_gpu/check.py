"""Gradients of a model of two blocks in its full width: every option compared with diffusers and peft in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import diffusers
import torch
from accelerate.state import AcceleratorState
from measuring import Row, absolute
from models import Bench

from qie.config import Config
from qie.data.opening import open_stream
from qie.pretrained import open_pretrained
from qie.training.model.load import load_shift
from qie.training.model.lora import add_lora
from qie.training.model.training_forward import use_training_forward
from qie.training.objective import Objective

from .bench import CHECKED_BLOCKS, Found, Place, configured, opened_run
from .table import OPTIONS, PER_SAMPLE, Option

Gradients = dict[str, torch.Tensor]
KINDS = {"one": "default", "four": "four unequal texts", "three controls": "three controls"}
"""An option with samples of each kind."""


def plain(place: Place, kind: str) -> Found:
    """The error of diffusers and peft in bfloat16: what an option is measured by."""
    option = OPTIONS[KINDS[kind]]
    bench = place.bench(option, blocks=CHECKED_BLOCKS)
    exact = reference(place, option.texts, option.family, 1)
    found = of_plain(bench, configured(bench, option), torch.bfloat16, list(exact))
    error = difference(mean(found), mean(exact))
    what = f"error of the gradients, diffusers and peft in bfloat16, {kind}"
    return Found([share(f"check plain {kind}", what, error)], {})


def option(place: Place, name: str) -> Found:
    """Its error, beside that of the plain loop; raises where it is beyond the limit."""
    chosen = OPTIONS[name]
    bench = place.bench(chosen, blocks=CHECKED_BLOCKS)
    with opened_run(bench, chosen) as (run, _):
        randomize(run.trainable.parameters)
        prepared = next(run.batches)
        losses = run.objective.losses(run.trainable.model, prepared.batch, prepared.draws).loss
        run.accelerator.backward(losses.mean())
        gradients = {
            key: weight.grad.float().cpu()
            for key, weight in run.trainable.parameters.items()
            if weight.grad is not None
        }
        keys, loss = prepared.batch.keys, float(losses.mean())
    exact = reference(place, chosen.texts, chosen.family, chosen.settings.get(PER_SAMPLE, 1))
    exact = {key: exact[key] for key in keys}
    rounded = of_plain(bench, configured(bench, chosen), torch.bfloat16, list(keys))
    error, usual = (difference(one, mean(exact)) for one in (gradients, mean(rounded)))
    limit = chosen.limit * (1 if chosen.rounded else usual)
    angle = min(cosine(gradients[key], value) for key, value in mean(exact).items())
    detail = f"plain loop {100 * usual:.3g} %; limit {100 * limit:.3g} %; least cosine of a matrix {angle:.5f}"
    values = {"error": error, "plain": usual, "limit": limit, "cosine": angle, "loss": loss}
    if not error <= limit:
        raise AssertionError(f"gradients are {100 * error:.3g} % from those in float32; {detail}")
    return Found([share(f"check {name}", f"error of the gradients, {name}", error, detail)], values)


@cache
def reference(place: Place, texts: str, family: str, draws: int) -> dict[str, Gradients]:
    """Of each sample by its key, in float32."""
    option = Option({PER_SAMPLE: draws}, texts=texts, family=family)
    bench = place.bench(option, blocks=CHECKED_BLOCKS)
    return of_plain(bench, configured(bench, option), torch.float32)


def of_plain(bench: Bench, config: Config, dtype: torch.dtype, keys: Sequence[str] = ()) -> dict[str, Gradients]:
    """Gradients of diffusers' transformer with peft's adapter, one sample at a time; qie only draws the noise. Of
    Qwen-Image-2.1 qie's own forward pass, the only one that takes text alone."""
    AcceleratorState._reset_state(True)
    pretrained = open_pretrained(str(bench.model), components=("transformer", "scheduler"))
    kind = getattr(diffusers, pretrained.family.transformer)
    transformer = kind.from_pretrained(bench.model / "transformer", torch_dtype=dtype)
    transformer.requires_grad_(False)
    assert config.model.lora
    add_lora(transformer, config.model.lora, config.train.seed)
    transformer.to(bench.device).train()
    transformer.set_attention_backend("native")
    weights = {name: weight for name, weight in transformer.named_parameters() if weight.requires_grad}
    randomize(weights)
    if pretrained.family.interleaved:
        use_training_forward(transformer)
    shift, draws = load_shift(pretrained), config.train.draws_per_sample
    patch = pretrained.family.patch
    objective = Objective(
        config.loss, 0.0, config.train.seed, shift, bench.device, dtype, patch=patch, draws_per_sample=draws
    )
    found = {}
    for batch in open_stream([bench.folder / "shards"]):
        if keys and batch.keys[0] not in keys:
            continue
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = objective.losses(transformer, batch, objective.draw(batch, 0)).loss
        losses.mean().backward()  # type: ignore[no-untyped-call]
        found[batch.keys[0]] = {
            name: weight.grad.float().cpu() for name, weight in weights.items() if weight.grad is not None
        }
        transformer.zero_grad()
    return found


def randomize(weights: Mapping[str, torch.nn.Parameter]) -> None:
    """An adapter's second matrix begins as zeros, and then the first has no gradient."""
    generator = torch.Generator().manual_seed(0)
    for name in sorted(weights):
        if "lora_B" in name:
            values = 0.02 * torch.randn(weights[name].shape, generator=generator)
            weights[name].data.copy_(values)


def share(key: str, what: str, error: float, detail: str = "") -> Row:
    return absolute(key, what, [100 * error], " %", "float32", detail)


def mean(samples: Mapping[str, Gradients]) -> Gradients:
    names = next(iter(samples.values()))
    return {name: torch.stack([one[name] for one in samples.values()]).mean(0) for name in names}


def difference(one: Gradients, exact: Gradients) -> float:
    """The length of the difference, as a share of the exact gradient's."""
    assert one.keys() == exact.keys(), sorted(one.keys() ^ exact.keys())[:3]
    apart = torch.stack([(one[name] - exact[name]).square().sum() for name in exact]).sum()
    return float((apart / torch.stack([value.square().sum() for value in exact.values()]).sum()).sqrt())


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0))

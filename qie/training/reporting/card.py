"""The report of a run: `run.json` for programs, and `README.md`, a model card for the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub import ModelCardData

from qie.config import Config
from qie.data.plan_settings import AT_ONCE
from qie.data.stream import Stream
from qie.errors import QieError
from qie.families import FAMILIES
from qie.paths import local_path
from qie.pretrained import PretrainedModel
from qie.stores import LocalFolder
from qie.training.model.adapter_file import ADAPTER_FILE, KINDS
from qie.training.reporting.metrics import METRICS_FILE, read_metrics

RUN_FILE = "run.json"
CARD_FILE = "README.md"

_PACKAGES = ("qie", "torch", "diffusers", "peft", "transformers", "accelerate")
_SECRET = re.compile(r"token(?!iz)|key|secret|password", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SIGNATURE = re.compile(r"(://[^\s?]*\?)[^\s?=]+=\S+")
_HIDDEN = "***"
# A README.md without it is someone's own, and stays.
_MARK = "<!-- Written by qie-train, and written again at each of its checkpoints as long as this line is in it. -->"

_FOR_COMFYUI = {
    True: " ComfyUI ignores the scale in this file; `qie export` writes a file for ComfyUI.",
    False: " `qie export` writes a file for ComfyUI.",
}
"""Of a LoRA, and of another adapter."""


@dataclass(frozen=True)
class RunReport:
    """The state of a run so far.

    Attributes:
        base_model: hub name or folder of the model that was trained.
        family: name in `qie.families.FAMILIES`.
        config: the configuration, see `public_config`.
        recipe: how rows were encoded, see `qie.recipe.Recipe.to_dict`.
        recipe_digest: its hash.
        data_digest: of the samples that were trained on, see `data_digest`.
        samples: their number.
        versions: of the libraries, see `library_versions`.
        devices: name of each process's device.
        world_size: number of processes.
        started, finished: ISO 8601; `finished` is None while the run goes on.
        steps: optimizer steps done.
        final_loss: training loss of the last of them.
        validation_losses: (step, loss), in their order.
        validation_accuracies: of pairs, the same: (step, part whose target is preferred).
        checkpoints: their folders' names, in their order.
        peak_memory_bytes: the maximum that one device held; None where that is not known.
        samples_per_s: of all processes, waiting for data included.
        accepted: the differences between the recipe and the configuration's, which the run's owner accepted.
        most_controls: of a row; 0 where all rows are text alone.
    """

    base_model: str
    family: str
    config: dict[str, Any]
    recipe: dict[str, Any]
    recipe_digest: str
    data_digest: str
    samples: int
    versions: dict[str, str]
    devices: tuple[str, ...]
    world_size: int
    started: str
    finished: str | None
    steps: int
    final_loss: float | None
    validation_losses: tuple[tuple[int, float], ...]
    checkpoints: tuple[str, ...]
    peak_memory_bytes: int | None
    samples_per_s: float | None
    accepted: tuple[str, ...] = ()
    most_controls: int = 1
    validation_accuracies: tuple[tuple[int, float], ...] = ()


class Reporter:
    """Makes the reports of a run. Every process makes a reporter, since each names its device.

    Args:
        resumed: the run started when its first report says.
    """

    def __init__(
        self, config: Config, pretrained: PretrainedModel, stream: Stream, accelerator: Accelerator, *, resumed: bool
    ) -> None:
        self._config, self._pretrained, self._stream = config, pretrained, stream
        self._devices: Sequence[str] = gather_object([_device_name(accelerator.device)])
        self._samples = len(stream.samples.columns) - len(stream.held_out)
        self._digest = data_digest(stream) if accelerator.is_main_process else ""
        self._output_dir = Path(config.train.output_dir)
        self._started = _started(self._output_dir) if resumed else _now()

    def report(self, step: int, *, ended: bool) -> RunReport:
        """The run after `step` steps, by its metrics.jsonl. The caller fills in the checkpoints."""
        path = self._output_dir / METRICS_FILE
        lines = read_metrics(path) if path.is_file() else []
        steps = [line for line in lines if "loss" in line]
        took_s = sum(line["step_time_s"] for line in steps)
        recipe = self._stream.samples.recipe
        return RunReport(
            base_model=self._config.model.pretrained_model_name_or_path,
            family=self._pretrained.family.name,
            config=public_config(self._config),
            recipe=recipe.to_dict(),
            recipe_digest=recipe.digest,
            data_digest=self._digest,
            samples=self._samples,
            versions=library_versions(),
            devices=tuple(self._devices),
            world_size=len(self._devices),
            started=self._started,
            finished=_now() if ended else None,
            steps=step,
            final_loss=steps[-1]["loss"] if steps else None,
            validation_losses=_of_validations(lines, "loss"),
            validation_accuracies=_of_validations(lines, "preference_accuracy"),
            checkpoints=(),
            peak_memory_bytes=max((line["peak_memory_bytes"] for line in steps), default=None),
            samples_per_s=sum(line["samples"] for line in steps) / took_s if took_s else None,
            accepted=self._stream.accepted,
            most_controls=max((len(shape.controls) for shape in self._stream.samples.columns.shape_names), default=0),
        )


def _of_validations(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    """A number of each validation that has it, with its step."""
    found = ((line["step"], line.get(f"validation_{name}")) for line in lines)
    return tuple((step, value) for step, value in found if value is not None)


def _started(output_dir: Path) -> str:
    try:
        return read_run(output_dir).started
    except QieError:
        return _now()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def public_config(config: Config) -> dict[str, Any]:
    """A configuration as plain values for everyone: without secrets. `load_config` reads it again."""
    tree = config.model_dump(mode="json")
    if config.train.epochs is not None:
        del tree["train"]["max_steps"]  # a default, which excludes epochs when it is read
    return {name: _public(section) for name, section in tree.items()}


def data_digest(stream: Stream) -> str:
    """A hash of the samples that are trained on.

    SHA-256 over their keys in ascending order, not in the stream's. Of more than `AT_ONCE` samples, to sort them would
    take a minute and gigabytes: over the SHA-256 of all keys in the stream's order and the keys that are held out.
    """
    samples, held_out = stream.samples, stream.held_out
    if len(samples.columns) > AT_ONCE:
        return hashlib.sha256(bytes.fromhex(samples.digest) + samples.digests[held_out].tobytes()).hexdigest()
    trained = np.ascontiguousarray(np.delete(samples.digests, held_out, axis=0))
    return hashlib.sha256(np.sort(trained.view("V32"), axis=0).tobytes()).hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of Python, qie and the libraries that change a result; those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def write_run(folder: Path, report: RunReport) -> None:
    """Write `run.json` of a run, whole or not at all."""
    content = json.dumps(_public(asdict(report)), indent=1, ensure_ascii=False, allow_nan=False)
    LocalFolder(folder).write(RUN_FILE, f"{content}\n".encode())


def read_run(folder: Path) -> RunReport:
    """The report that `write_run` has written.

    Raises:
        QieError: there is no run.json, or it is another program's.
    """
    try:
        values = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        # Which earlier versions did not write.
        values = {"accepted": (), "most_controls": 1, "validation_accuracies": ()} | values
        values = {field.name: values[field.name] for field in fields(RunReport)}
        for name in ("validation_losses", "validation_accuracies"):
            values[name] = tuple((int(step), value) for step, value in values[name])
        return RunReport(**values | {name: tuple(values[name]) for name in ("devices", "checkpoints", "accepted")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QieError("the run's report cannot be read", where=folder / RUN_FILE, found=repr(error)) from error


def write_card(folder: Path, report: RunReport, license: str | None = None) -> None:
    """Write the model card of a folder that holds the run's weights. A README.md of another author stays as it is.

    `license` is its identifier on the hub, where it is known.
    """
    path = folder / CARD_FILE
    if path.is_file() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    on_hub = not local_path(report.base_model).is_dir()
    LocalFolder(folder).write(CARD_FILE, card_text(report, on_hub=on_hub, license=license).encode())


def card_text(report: RunReport, *, on_hub: bool, license: str | None = None) -> str:
    """The model card: a YAML front matter, then Markdown. `on_hub`: `base_model` is a name there, to be linked to."""
    lora = (report.config.get("model") or {}).get("lora")
    adapter, kind = lora is not None, (lora or {}).get("kind") or "lora"
    edits, family = report.most_controls > 0, FAMILIES[report.family]
    front = ModelCardData(
        base_model=report.base_model if on_hub else None,
        base_model_relation=("adapter" if adapter else "finetune") if on_hub else None,
        library_name="diffusers",
        license=license,
        pipeline_tag="image-to-image" if edits else "text-to-image",
        tags=[
            *(["image-editing"] if edits else []),
            *([family.hub_tag, "qie"]),
            *([kind, "peft"] if adapter else []),
        ],
    )
    title = f"{KINDS[kind.upper()] + ' of' if adapter else 'Fine-tuned'} {_code(report.base_model)}"
    rows = "\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in _facts(report).items())
    config = yaml.safe_dump(_public(report.config), sort_keys=False, allow_unicode=True, width=120)
    config = config.replace("${", "$${")  # else `load_config` would read a reference to the environment
    return f"""---
{front.to_yaml()}
---

{_MARK}

# {title}

Load it with diffusers. `"."` is the folder of this page; to load it from the Hub, write the name of the repository:

{_block("python", _snippet(report, kind if adapter else None))}

{_usage(report)}{_FOR_COMFYUI[kind == "lora"] if adapter else ""}

| | |
|---|---|
{rows}

## Configuration

{_block("yaml", config)}
"""


def _snippet(report: RunReport, kind: str | None) -> str:
    """Of an adapter of some kind, or of a transformer of which all was trained."""
    pipeline, transformer = FAMILIES[report.family].pipeline, FAMILIES[report.family].transformer
    base, dtype = json.dumps(report.base_model, ensure_ascii=False), "torch_dtype=torch.bfloat16"
    if kind in ("lokr", "loha"):
        return f"""import torch
from diffusers import {pipeline}
from peft import PeftModel

pipe = {pipeline}.from_pretrained({base}, {dtype})
pipe.transformer = PeftModel.from_pretrained(pipe.transformer, ".").merge_and_unload()
"""
    if kind:
        return f"""import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained({base}, {dtype})
pipe.load_lora_weights(".", weight_name="{ADAPTER_FILE}")
"""
    return f"""import torch
from diffusers import {pipeline}, {transformer}

transformer = {transformer}.from_pretrained(".", subfolder="transformer", {dtype})
pipe = {pipeline}.from_pretrained({base}, transformer=transformer, {dtype})
"""


def _usage(report: RunReport) -> str:
    """What the snippet's pipeline is called with. Each takes the guidance by default that its model is meant for."""
    family = FAMILIES[report.family]
    if family.min_controls:
        return "`pipe(image=…, prompt=…).images[0]` is then the edited image."
    edited = ", and `pipe(prompt=…, image=[…]).images[0]` an edited one" if report.most_controls else ""
    return (
        f"`pipe(prompt=…).images[0]` is then an image{edited}. The model is meant to be sampled without guidance, as "
        f"it is by default; it needs diffusers {family.diffusers} or newer."
    )


def _facts(report: RunReport) -> dict[str, str]:
    """The table's rows: the known values."""
    losses, accuracies = (
        dict([*found[:1], *found[-1:]]).items() for found in (report.validation_losses, report.validation_accuracies)
    )
    model = report.config.get("model") or {}
    known = {
        "adapters to load beside it": _adapters(model, train_only=False),
        "adapters of training alone": _adapters(model, train_only=True),
        "VAE": _code(model["vae"]) if model.get("vae") else "",
        "trained on": _preference(report.config.get("loss") or {}),
        "steps": report.steps,
        "training loss, last step": _number(report.final_loss, ".4f"),
        "validation loss": " → ".join(f"{loss:.4f} at step {step}" for step, loss in losses),
        "held-out pairs whose target is preferred": " → ".join(f"{part:.0%} at step {at}" for at, part in accuracies),
        "samples": report.samples,
        "data": _code(report.data_digest),
        "recipe": _code(report.recipe_digest),
        "recipe, differences from the configuration's": "; ".join(report.accepted),
        "devices": ", ".join(f"{count} × {_code(name)}" for name, count in Counter(report.devices).items()),
        "peak memory, bytes": _number(report.peak_memory_bytes, ",d"),
        "samples per second": _number(report.samples_per_s, ".2f"),
        "time": f"{report.started} to {report.finished}" if report.finished else f"since {report.started}",
        "versions": ", ".join(f"{name} {number}" for name, number in report.versions.items()),
    }
    return {name: str(value) for name, value in known.items() if value not in (None, "")}


def _preference(loss: Mapping[str, Any]) -> str:
    """What a run learnt that had pairs of targets; nothing of another."""
    if loss.get("kind") != "flow_dpo":
        return ""
    beside = f", with {loss['supervised_weight']:g} × the error of the preferred" if loss["supervised_weight"] else ""
    return f"pairs of a preferred and a rejected target, by Flow-DPO with β = {loss['beta']:g}{beside}"


def _adapters(model: Mapping[str, Any], *, train_only: bool) -> str:
    """The frozen adapters of one kind, with their scales."""
    adapters = [one for one in model.get("adapters") or [] if bool(one.get("train_only")) is train_only]
    return ", ".join(f"{one['scale']:g} × {_code(one['path'])}" for one in adapters)


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _public(value: Any, name: str = "") -> Any:
    """Plain values for JSON and YAML: secrets are hidden, numbers that neither can hold are None."""
    if _SECRET.search(name) and value is not None and not isinstance(value, bool):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {str(key): _public(child, str(key)) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_public(child) for child in value]
    if isinstance(value, str):
        return _SIGNATURE.sub(rf"\g<1>{_HIDDEN}", _USER.sub(_HIDDEN, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _code(text: str) -> str:
    """Text as inline code, whatever is in it."""
    text = " ".join(text.split())
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _block(language: str, text: str) -> str:
    """Text as a block of code, whatever is in it."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)

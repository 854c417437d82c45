"""The report of a run as it goes: what `run.json` and the model card say, from its metrics and its data."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from qie.config import Config
from qie.data.stream import Stream
from qie.errors import QieError
from qie.pretrained import PretrainedModel
from qie.training.checkpoint import checkpoints
from qie.training.telling.card import RunReport, data_digest, library_versions, public_config, read_run
from qie.training.telling.metrics import METRICS_FILE, read_metrics


class Reporter:
    """Makes reports of a run. Every process makes one, since each names its device.

    Args:
        resumed: the run goes on: it started when its first report says.
    """

    def __init__(
        self, config: Config, pretrained: PretrainedModel, stream: Stream, accelerator: Accelerator, *, resumed: bool
    ) -> None:
        self._config, self._pretrained, self._stream = config, pretrained, stream
        self._devices: Sequence[str] = gather_object([_device_name(accelerator.device)])
        trained = (
            stream.samples.digests[~stream.held_out] if accelerator.is_main_process else stream.samples.digests[:0]
        )
        self._samples, self._digest = len(trained), data_digest(trained)
        self._output_dir = Path(config.train.output_dir)
        self._started = _started(self._output_dir) if resumed else _now()

    def report(self, step: int, *, ended: bool) -> RunReport:
        """The run after `step` steps, with the checkpoints that are there."""
        lines = read_metrics(self._output_dir / METRICS_FILE)
        steps = [line for line in lines if "loss" in line]
        took = sum(line["step_time_s"] for line in steps)
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
            validation_losses=tuple(
                (line["step"], line["validation_loss"]) for line in lines if line.get("validation_loss") is not None
            ),
            checkpoints=tuple(folder.name for folder in checkpoints(self._output_dir)),
            peak_memory_bytes=max((line["peak_memory_bytes"] for line in steps), default=None),
            samples_per_s=sum(line["samples"] for line in steps) / took if took else None,
            accepted=self._stream.accepted,
        )


def _started(output_dir: Path) -> str:
    try:
        return read_run(output_dir).started
    except QieError:
        return _now()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)

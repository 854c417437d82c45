"""The pages of the places that a person names: folders of runs, and shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qie.errors import UsageError
from qie.paths import local_path
from qie.watch.live_page import LivePage
from qie.watch.run_reader import is_run
from qie.watch.training_page import training_page


def open_pages(places: Sequence[str]) -> list[LivePage]:
    """A page for all runs together.

    Raises:
        UsageError: a place is neither a run's folder nor one of shards.
    """
    return [training_page([_run(place) for place in places])]


def _run(place: str) -> Path:
    folder = local_path(place)
    if not folder.is_dir():
        raise UsageError("no such folder", where=place, expected="train.output_dir of a run")
    if not is_run(folder):
        raise UsageError(
            "the folder holds no run", where=place, expected="metrics.jsonl, run.json, state.json or a checkpoint"
        )
    return folder

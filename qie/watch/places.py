"""The pages of the places that a person names: folders of runs, and shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qie.errors import UsageError
from qie.paths import local_path
from qie.stores import scheme_of
from qie.watch.live_page import LivePage
from qie.watch.run_reader import is_run
from qie.watch.training_page import training_page

if TYPE_CHECKING:
    from qie.data.sources import Source


def open_pages(places: Sequence[str], source: Source | None = None) -> list[LivePage]:
    """A page for all runs together, and one for all folders of shards, with pictures of rows of their `source`.

    Raises:
        UsageError: a place is neither a run's folder nor one of shards.
        StoreError: a store cannot be reached.
    """
    runs = [place for place in places if scheme_of(place) is None and is_run(_folder(place))]
    shards = [place for place in places if place not in runs]
    pages = [training_page([_folder(place) for place in runs])] if runs else []
    if not shards:
        return pages
    from qie.watch.precompute_page import precompute_page  # with the libraries of shards, which a run's page needs not
    from qie.watch.precompute_reader import is_precompute

    for place in shards:
        if not is_precompute(place):
            raise UsageError(
                "the folder holds neither a run nor shards",
                where=place,
                expected="a run's metrics.jsonl, run.json, state.json or checkpoint; or shards, or the folder progress",
                hint="start the run first",
            )
    return [*pages, precompute_page(shards, source)]


def run_folder(place: str) -> Path:
    """The folder of a run. Raises UsageError when it is none."""
    folder = _folder(place)
    if not is_run(folder):
        raise UsageError(
            "the folder holds no run", where=place, expected="metrics.jsonl, run.json, state.json or a checkpoint"
        )
    return folder


def _folder(place: str) -> Path:
    folder = local_path(place)
    if not folder.is_dir():
        raise UsageError(
            "no such folder",
            where=place,
            expected="train.output_dir of a run, or the folder that shards are written to",
        )
    return folder

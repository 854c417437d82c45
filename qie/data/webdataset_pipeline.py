"""Shards as a pipeline of the library webdataset, for who lives there. Its own reader would give raw members.

No URL is opened by webdataset, which would start programs for some: shards are read as everywhere in qie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from webdataset.compat import check_empty
from webdataset.handlers import reraise_exception

from qie.errors import QieError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.discovery import find_indexes
from qie.shards.excluded import excluded_keys
from qie.shards.index import read_index
from qie.shards.shard_set import ShardSet, Verify, open_by_index
from qie.stores import REMOTE_SCHEMES, File, is_glob, scheme_of, spelled_out
from qie.types import Sample

Splitter = Callable[[Iterator[Any]], Iterator[Any]]


class SampleDataset(wds.WebDataset):  # type: ignore[misc]  # webdataset has no types for mypy
    """A `webdataset.WebDataset` that yields samples instead of members; `qie.webdataset` makes one."""

    def __init__(self, *stages: object) -> None:
        wds.DataPipeline.__init__(self, *stages)


def webdataset(
    urls: str | Path | Iterable[str | Path],
    *,
    shardshuffle: int | bool = False,
    detshuffle: bool = False,
    resampled: bool = False,
    nodesplitter: Splitter | None = wds.single_node_only,
    workersplitter: Splitter | None = wds.split_by_worker,
    handler: Callable[[Exception], bool] = reraise_exception,
    seed: int | None = None,
    empty_check: bool = True,
    verify: Verify = "always",
    cache: ShardCache | None = None,
) -> SampleDataset:
    """A `webdataset.WebDataset` over shards, to be shuffled, composed, batched and loaded by `webdataset.WebLoader`.

    A sample is a dictionary of `__key__`, `__url__`, `prompt`, and the tensors that `qie.Sample` describes:
    `pixel_latent`, `control_latent` (a tuple), `prompt_embed`, `prompt_embeds_mask`, `empty_prompt_embed` (joined),
    `empty_prompt_embeds_mask` and `loss_mask` (all foreground for a row without one); of Qwen-Image-2.1 also
    `image_slots`, and of a row with a rejected target `rejected_latent`. Samples on an exclude list are left out. Sizes
    differ: to stack latents, batch samples of one size.

    Order and position are webdataset's; `qie.open_stream` gives those that resume exactly.

    Args:
        urls: folders, tars, globs or brace patterns of shards, paths or URLs. Tars of URLs that are spelled out are
            looked at when they are read. What has to be listed in a store is listed now, and worker processes then need
            the start method "spawn" or "forkserver".
        shardshuffle, detshuffle, resampled, nodesplitter, workersplitter, seed, empty_check: as of WebDataset.
        handler: as of WebDataset; it gets the QieError of a shard or sample that is damaged.
        verify: when a record is checked against its hash, see `ShardSet`. A pipeline opens shards anew in each epoch,
            so "first" checks as often as "always".
        cache: keeps remote shards on the local disk; without one, each sample is a request.

    Raises:
        UsageError: nothing was found.
        StoreError: a store cannot be reached.
    """
    tars = _tars([urls] if isinstance(urls, (str, Path)) else urls)
    drawn = {"seed": seed or 0, "deterministic": seed is not None}
    stages: list[object] = [wds.ResampledShards(tars, **drawn) if resampled else wds.SimpleShardList(tars)]
    stages += [splitter for splitter in (nodesplitter, workersplitter) if splitter is not None]
    if shardshuffle and not resampled:
        count = 100 if shardshuffle is True else shardshuffle
        stages.append(wds.detshuffle(count, seed=seed or 0) if detshuffle else wds.shuffle(count, seed=seed))
    stages.append(_SampleReader(handler, verify, cache, _recipe_of(tars[0])))
    if empty_check:
        stages.append(check_empty)
    return SampleDataset(*stages)


def _tars(places: Iterable[str | Path]) -> list[str]:
    """Paths and URLs of tars, in order."""
    found: list[str] = []
    for place in places:
        for name in spelled_out(str(place)):
            # No request for what is spelled out: workers that are forked afterwards could make none.
            if scheme_of(name) in REMOTE_SCHEMES and name.endswith(".tar") and not is_glob(name):
                found.append(name)
            else:
                found += [str(index.with_suffix(".tar")) for index in find_indexes(name)]
    return list(dict.fromkeys(found))


def _recipe_of(tar: str) -> Recipe | None:
    """The recipe of a tar on this disk; None of one that lies elsewhere."""
    file = File.at(tar).with_suffix(".json")
    return None if file.path is None else read_index(file).recipe


@dataclass
class _SampleReader:
    """The stage from shards to samples. It is copied into worker processes before it has opened anything.

    Attributes:
        handler: see `webdataset`.
        verify, cache: see `webdataset`.
        recipe: of all shards; None for that of the first one which this process opens.
    """

    handler: Callable[[Exception], bool]
    verify: Verify
    cache: ShardCache | None
    recipe: Recipe | None

    def __call__(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        lists: dict[str, frozenset[bytes]] = {}
        for shard in source:
            for found in self._read(shard["url"], lists):
                if not isinstance(found, QieError):
                    yield found
                elif not self.handler(found):
                    return

    def _read(self, url: str, lists: dict[str, frozenset[bytes]]) -> Iterator[dict[str, Any] | QieError]:
        """The samples of a shard that are not excluded, or what is wrong with one, or with the shard.

        `lists` gets the excluded keys of the shard's folder.
        """
        folder = File.at(url).folder
        try:
            samples = self._opened(url)
            if folder.url not in lists:
                lists[folder.url] = excluded_keys([folder])
        except QieError as error:
            yield error
            return
        if samples is None:
            return
        for position in range(len(samples)):
            if bytes(samples.digests[position]) in lists[folder.url]:
                continue
            try:
                sample = samples.fetch(position)
            except QieError as error:
                yield error
            else:
                yield {"__key__": sample.key, "__url__": url, **_values(sample)}

    def _opened(self, url: str) -> ShardSet | None:
        """The samples of a shard; None where all its rows were skipped."""
        part = open_by_index(File.at(url).with_suffix(".json"), self.cache)
        self.recipe = self.recipe or part.recipe
        self.recipe.require_equal(part.recipe, url, "read shards of one recipe at a time")
        return ShardSet([part], self.verify) if len(part.table) else None


def _values(sample: Sample) -> dict[str, Any]:
    """What a dictionary of a sample holds: the same for all samples of a recipe, as batches of webdataset want.

    But for rejected targets, which some rows of a source may lack: nothing can stand for one.
    """
    everything = torch.full(sample.shape.target, 255, dtype=torch.uint8)
    rare = {"image_slots": sample.image_slots, "rejected_latent": sample.rejected_latent}
    return {
        "prompt": sample.prompt,
        "pixel_latent": sample.pixel_latent,
        "control_latent": sample.control_latent,
        "prompt_embed": sample.prompt_embed,
        "prompt_embeds_mask": sample.prompt_embeds_mask,
        "empty_prompt_embed": sample.empty_prompt_embed,
        "empty_prompt_embeds_mask": sample.empty_prompt_embeds_mask,
        "loss_mask": everything if sample.loss_mask is None else sample.loss_mask,
        **{name: value for name, value in rare.items() if value is not None},
    }

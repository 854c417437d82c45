"""The chooser of streams by a configuration, for qie-train, `qie.legacy` and `qie.open_training_stream`.

Encoders are imported only to encode rows: training on shards loads none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from qie.config import Config, required
from qie.data.announcements import Announcements
from qie.data.follow import GrowingPlans, GrowingSamples
from qie.data.kept_samples import Keep, KeptSamples
from qie.data.live import LiveSamples, RowEncoder, RowFacts, look_at_rows
from qie.data.plan_settings import PlanSettings
from qie.data.sources import Source
from qie.data.stream import FixedPlans, Plans, Samples, Stream
from qie.errors import QieError, RecipeMismatchError, ShardError, SourceError, UsageError
from qie.families import FAMILIES
from qie.file_hashes import bytes_to_hash
from qie.from_config import LaterEncoder, open_encoder, open_rows, source_specs, variants
from qie.paths import local_path
from qie.pretrained import PretrainedModel, content_files
from qie.quantities import human_bytes
from qie.recipe import Recipe, brief
from qie.shards.cache import ShardCache
from qie.shards.discovery import find_indexes, gaps
from qie.shards.grid import SHARD_ROWS, missing_rows
from qie.shards.index import parse_stem
from qie.shards.shard_set import ShardSet, open_named, open_shards
from qie.stages import quick_turns
from qie.stores import File, LocalFolder, StoreError, open_folder

if TYPE_CHECKING:
    from accelerate import Accelerator

StreamKind = Literal["shards", "live", "write_through", "follow"]

NEEDED = "SHARDS, cache.cache_dir, or a source of rows"
TOLD_BYTES = 10**9
"""Who hashes more than this is told: it takes seconds, or minutes from a slow disk."""


def _nothing(*_: object) -> None:
    """For a caller who does not listen."""


@dataclass(frozen=True)
class Telling:
    """Functions that inform the caller, in the main process.

    Attributes:
        looking: how many rows of data.source were looked at, and how many there are.
        waiting: a line: which shard is waited for.
        say: a line that a person should read: rows that are encoded live or left out, and why; a gap; another recipe.
    """

    looking: Callable[[int, int], object] = _nothing
    waiting: Callable[[str], object] = _nothing
    say: Callable[[str], object] = warnings.warn


@dataclass(frozen=True)
class Choice:
    """The choice of a stream.

    Attributes:
        kind: `shards`, and rows encoded live for what they lack; `live` rows alone; `write_through`, live rows that
            become shards; `follow`, shards that another process writes.
        places: of the shards.
        named: the caller named them, not the configuration.
    """

    kind: StreamKind
    places: tuple[str, ...] = ()
    named: bool = False


def choose(config: Config, shards: Sequence[str] = (), *, follow: bool = False) -> Choice:
    """The choice that a configuration makes by itself, without looking at any file.

    Shards that are named come first, then those of cache.index, then cache.write_through, then cache.cache_dir unless
    cache.use_cache is false, then live rows.

    Raises:
        UsageError: the choice does not fit --follow, or train.epochs.
    """
    cache = config.cache
    configured = (cache.cache_dir,) if cache.cache_dir and cache.use_cache and not cache.write_through else ()
    if cache.index:
        configured = (str(File.at(cache.index).folder),)
    places = tuple(shards) or configured
    encoded: StreamKind = "write_through" if cache.write_through else "live"
    kind: StreamKind = "follow" if follow else "shards" if places else encoded
    if cache.index and (follow or cache.write_through):
        raise UsageError(
            "a compacted index tells of shards that are all there",
            where="--index, or cache.index",
            found="--follow" if follow else "cache.write_through",
        )
    if follow and len(places) != 1:
        raise UsageError("--follow needs one folder of shards", expected="that of qie-precompute", found=list(places))
    if config.train.epochs and kind in ("follow", "write_through"):
        raise UsageError(
            "the length of an epoch is unknown until all shards are written",
            where="train.epochs",
            hint="set train.max_steps instead",
        )
    return Choice(kind, places, bool(shards) or cache.index is not None)


def chosen_indexes(choice: Choice, *, or_none: bool) -> list[File]:
    """The indexes of the shards of a choice; with `or_none`, those of the configuration need not be there."""
    if or_none and not choice.named:
        folder = open_folder(choice.places[0])
        if isinstance(folder, LocalFolder) and not folder.root.exists():
            return []
    return find_indexes(choice.places, or_none=or_none)


def open_training_stream(
    config: Config,
    pretrained: PretrainedModel,
    accelerator: Accelerator,
    *shards: str,
    follow: bool = False,
    telling: Telling | None = None,
) -> Stream:
    """This process's batches, by the rules of qie-train: see `choose`. Close it, or use it as a context manager.

    The recipe of shards is compared with the configuration's. If data.source can be opened, training takes its rows:
    their samples come from the shards, by content, and rows that the shards lack are encoded live. The batches equal,
    bit for bit, those of shards that hold all of them.

    Args:
        pretrained: the model that is trained.
        accelerator: decides which part of each batch is this process's.
        shards: folders, globs or brace patterns; none for those of the configuration.
        follow: the shards are still being written.
        telling: whom to tell; by default lines are warnings.

    Raises:
        ConfigError: neither shards nor rows are named.
        RecipeMismatchError: the shards have another recipe than the configuration, and cache.accept_recipe is not set.
        ShardError: shards are damaged, and without data.source nothing can take their place.
    """
    choice = choose(config, shards, follow=follow)
    told = telling or Telling()
    telling = told if accelerator.is_main_process else Telling(say=_nothing)
    opening = _Opening(config, pretrained, accelerator, choice, telling, told.say)
    ways: dict[StreamKind, Callable[[], Stream]] = {
        "shards": opening.shards,
        "live": opening.live,
        "write_through": opening.write_through,
        "follow": opening.follow,
    }
    return ways[choice.kind]()


@dataclass(frozen=True)
class _Opening:
    """The four ways to a stream. `warn` tells, in any process, of what only it finds."""

    config: Config
    pretrained: PretrainedModel
    accelerator: Accelerator
    choice: Choice
    telling: Telling
    warn: Callable[[str], object]

    @property
    def where(self) -> str:
        return ", ".join(self.choice.places)

    @property
    def _kept_in(self) -> ShardCache | None:
        cache = self.config.cache
        return None if cache.local_dir is None else ShardCache(local_path(cache.local_dir), cache.local_bytes)

    def live(self) -> Stream:
        source, encoder = open_rows(self.config, NEEDED), open_encoder(self.config, only_tensors=True)
        known = self._looked_at(source, encoder, None)
        self._tell_skipped(known, ())
        return self._stream(LiveSamples(source, encoder, variants(self.config), known))

    def shards(self) -> Stream:
        source, why = self._source()
        lost: list[tuple[File, ShardError]] = []
        stored, shard_rows = self._named() if self.config.cache.index else self._listed(source, why, lost)
        if why is not None:
            self.telling.say(f"data.source cannot be opened here ({why.what}): the shards are trained on as they are")
        accepted = self._compared(stored.recipe) if stored else ()
        if source is None or (stored and (accepted or self.config.cache.trust_published)):
            assert stored is not None
            for _, error in lost:
                raise error
            return self._stream(stored, accepted)
        return self._mixed(source, stored, shard_rows, lost)

    def _listed(
        self, source: Source | None, why: QieError | None, lost: list[tuple[File, ShardError]]
    ) -> tuple[ShardSet | None, int]:
        """The shards that are there and how many rows the largest is of; with a source, those that can be read."""
        indexes = chosen_indexes(self.choice, or_none=source is not None or why is not None)
        if why is not None and not indexes:
            raise why
        for folder, start, stop in gaps(indexes):
            self.telling.say(f"rows [{start}, {stop}) are missing: no shard in {folder} covers them")
        rows = [rows for index in indexes if (rows := parse_stem(index.stem))]
        largest = max((stop - start for start, stop in rows), default=SHARD_ROWS)
        return self._stored(indexes, None if source is None else lost), largest

    def _named(self) -> tuple[ShardSet, int]:
        """The same of a compacted index, which is taken at its word."""
        index = self.config.cache.index
        assert index is not None
        part = open_named(index, self.choice.places, self._kept_in)
        for start, stop in missing_rows(part.rows):
            self.telling.say(f"rows [{start}, {stop}) are missing: no shard of {index} covers them")
        return ShardSet([part], self.config.cache.verify), int(np.diff(part.rows, axis=1).max(initial=1))

    def follow(self) -> Stream:
        rows = len(
            open_rows(self.config, "the source that qie-precompute encodes, to know how many rows there will be")
        )
        samples = GrowingSamples(
            open_folder(self.choice.places[0]), rows, **self._growing(), announcements=self._announcements()
        )
        return self._following(samples)

    def _announcements(self) -> Announcements | None:
        """By which the first process tells the others of shards, through the server that the processes met at."""
        if self.accelerator.num_processes == 1:
            return None
        from accelerate.utils import gather_object
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        name = gather_object([token_hex()])[0]  # a run may follow several times
        return Announcements(PrefixStore(f"qie-{name}", _get_default_store()), first=self.accelerator.is_main_process)

    def write_through(self) -> Stream:
        """Rows are encoded and written in the background; the first epoch trains on them as they come."""
        if self.accelerator.num_processes > 1:
            raise UsageError(
                "cache.write_through works with one process only",
                hint="with several, run qie-precompute alongside and train with --follow",
            )
        quick_turns()
        place = required(self.config.cache.cache_dir, "cache.cache_dir", "where cache.write_through writes")
        from qie.precompute import Settings
        from qie.precompute.background import BackgroundWriter

        rows, settings = open_rows(self.config, NEEDED), Settings(variants=variants(self.config))
        writer = BackgroundWriter(rows, open_encoder(self.config), place, settings)
        writer.start()
        samples = GrowingSamples(
            open_folder(place),
            len(writer.source),
            **self._growing(),
            poll_s=0.2,
            alive=writer.alive,
            current=lambda: writer.rows,
            stop=writer.stop,
        )
        return self._following(samples)

    def _source(self) -> tuple[Source | None, QieError | None]:
        """The rows of data.source; or None, and why they cannot be opened if the configuration names any."""
        if not self.config.data.source:
            return None, None
        try:
            return open_rows(self.config), None
        except (SourceError, StoreError) as error:
            return None, error

    def _stored(self, indexes: Sequence[File], lost: list[tuple[File, ShardError]] | None) -> ShardSet | None:
        """The shards; with `lost`, to which the damaged ones are added, those that can be read, or None."""
        cache, kept_in = self.config.cache, self._kept_in
        if lost is None:
            return ShardSet(open_shards(indexes, kept_in), cache.verify)
        parts = list(open_shards(indexes, kept_in, lambda index, error: lost.append((index, error))))
        return ShardSet(parts, cache.verify) if any(len(part.table) for part in parts) else None

    def _mixed(
        self,
        source: Source,
        stored: ShardSet | None,
        shard_rows: int,
        lost: Sequence[tuple[File, ShardError]],
    ) -> Stream:
        """The rows of a source, out of shards as far as these hold them."""
        encoder: RowEncoder = (
            LaterEncoder(self.config, stored.recipe) if stored else open_encoder(self.config, only_tensors=True)
        )
        known = self._looked_at(source, encoder, stored)
        if stored and not known.facts:
            reason = known.skipped[0].reason if known.skipped else "it has no rows"
            self.telling.say(
                f"no row of data.source can be read here ({reason}): the shards are trained on as they are"
            )
            return self._stream(stored)
        samples = LiveSamples(source, encoder, variants(self.config), known, stored, shard_rows, self.warn)
        self._tell_skipped(known, [(gone.row, gone.variant) for gone in stored.skipped] if stored else ())
        self._tell_mixed(samples, lost)
        return self._stream(samples)

    def _tell_skipped(self, known: RowFacts, before: Sequence[tuple[int, int]]) -> None:
        """Of the rows that are in no batch those that the shards did not leave out already."""
        for row in known.skipped:
            if (row.row, row.variant) not in before:
                self.telling.say(f"skipped row {row.row} ({row.name}): {row.reason}")

    def _tell_mixed(self, samples: LiveSamples, lost: Sequence[tuple[File, ShardError]]) -> None:
        """One line on rows that are encoded live, and why; one on samples of the shards that no row has."""
        total, lacking, stored = len(samples.known.facts), samples.lacking, samples.stored
        there = set() if stored is None else {bytes(key) for key in stored.digests}
        others = len(there - {bytes(key) for key in samples.digests})
        if stored is not None and others == len(there) and self.choice.named:
            raise UsageError(
                "the shards hold no row of the current data.source",
                where=self.where,
                found=f"{len(stored)} samples of other rows",
                hint="run qie-precompute again if the rows have changed; or name the shards of this source, or train "
                "on these as they are: --set cache.trust_published=true",
            )
        if lacking:
            found = "there are no shards" if stored is None and not lost else f"the shards in {self.where} lack them"
            faults = "; ".join(f"{index}: {error.what}" for index, error in lost[:3])
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            why = f"{found}, {len(lost)} of which cannot be read ({faults}{more})" if lost else found
            self.telling.say(f"{len(lacking)} of {total} samples are encoded live: {why}")
        if others:
            self.telling.say(f"{others} samples of the shards belong to no row of the current data.source: left out")

    def _looked_at(self, source: Source, encoder: RowEncoder, stored: ShardSet | None) -> RowFacts:
        """What is known of the rows; each process looks at its share of them."""
        rank, world, total = self.accelerator.process_index, self.accelerator.num_processes, len(source)

        def progress(done: int) -> object:
            return self.telling.looking(min(done * world, total), total)

        share = slice(rank, None, world)
        if world == 1:
            return look_at_rows(source, encoder, variants(self.config), progress, stored)
        try:
            mine: RowFacts | QieError = look_at_rows(source, encoder, variants(self.config), progress, stored, share)
        except QieError as error:  # the others wait for this process: all raise it
            mine = error
        from accelerate.utils import gather_object

        shares: list[RowFacts | QieError] = gather_object([mine])
        for part in shares:
            if isinstance(part, QieError):
                raise part
        return RowFacts.merged([part for part in shares if isinstance(part, RowFacts)])

    def _compared(self, found: Recipe) -> tuple[str, ...]:
        """How the recipe of shards differs from the configuration's, which its owner accepts.

        Raises:
            RecipeMismatchError: it differs, and cache.accept_recipe is not set; or the transformer could not read such
                samples.
        """
        from qie.encode.options import config_key

        expected = self._expected()
        if FAMILIES[found.family].interleaved != FAMILIES[expected["family"]].interleaved:
            raise RecipeMismatchError(
                "the shards are for another model family, whose samples this one cannot read",
                where=self.where,
                expected=expected["family"],
                found=found.family,
                hint="train the model that they were encoded for, or precompute again into another folder",
            )
        differing = tuple(
            f"{name} ({config_key(name)}): {brief(value)} by the configuration, "
            f"{brief(getattr(found, name))} in the shards"
            for name, value in expected.items()
            if getattr(found, name) != value
        )
        if not differing:
            return ()
        if self.config.cache.accept_recipe:
            self.telling.say(f"the shards have another recipe, which is accepted: {'; '.join(differing)}")
            return differing
        raise RecipeMismatchError(
            "the shards are for another model family"
            if found.family != expected["family"]
            else "the shards have another recipe than the configuration",
            where=self.where,
            expected="what qie-precompute would write with this configuration",
            found="; ".join(differing),
            hint="correct the configuration, or precompute again into another folder; to train on these shards as they "
            "are: --accept-recipe",
        )

    def _expected(self) -> dict[str, Any]:
        """What the recipe should be, as far as this machine can know it. One process of a machine hashes, the others
        remember."""
        from qie.encode.options import HASHED, EncoderOptions, known_fields

        first = self.accelerator.is_local_main_process
        if not first:
            self.accelerator.wait_for_everyone()
        try:
            folders = [self.pretrained.component(name) for name in HASHED if self.pretrained.holds(name)]
            size = bytes_to_hash([file for folder in folders for file in content_files(folder)])
            if first and size > TOLD_BYTES:
                self.telling.say(
                    f"comparing the encoders in {self.pretrained.folder} with the shards': {human_bytes(size)} are "
                    "hashed once and remembered"
                )
            return known_fields(self.pretrained, EncoderOptions.of(self.config))
        finally:
            if first:
                self.accelerator.wait_for_everyone()

    def _growing(self) -> dict[str, Any]:
        cache = self.config.cache
        return {
            "verify": cache.verify,
            "cache": self._kept_in,
            "timeout_s": cache.follow_timeout_s,
            "say": self.telling.waiting,
        }

    def _following(self, samples: GrowingSamples) -> Stream:
        try:
            plans = GrowingPlans(samples, self._plan_settings())
            accepted, threads = self._compared(samples.recipe), self.config.data.reader_threads
            # More variants than the configuration says may be there: what is beyond is not kept.
            kept = self._kept(samples.rows * self.config.cache.variants)
            return self._mine(samples, plans, accepted, threads, kept)
        except BaseException:
            samples.close()
            raise

    def _stream(self, samples: Samples, accepted: tuple[str, ...] = ()) -> Stream:
        threads = self.config.data.reader_threads
        if isinstance(samples, LiveSamples) and samples.lacking:
            quick_turns()  # encoders work beside the training step
            threads = max(threads, len(samples.encoder.stages))
        plans = FixedPlans(samples, self._plan_settings())
        return self._mine(samples, plans, accepted, threads, self._kept(len(samples.digests)))

    def _kept(self, samples: int) -> KeptSamples | None:
        """What keeps samples in memory: with several processes, those of a machine share it."""
        keep, accelerator = keep_of(self.config, self.accelerator.device), self.accelerator
        if keep is None:
            return None
        if accelerator.num_processes == 1:
            return KeptSamples(keep)
        from accelerate.utils import gather_object

        first = accelerator.is_local_main_process
        return KeptSamples.of_machine(keep, samples, lambda mine: gather_object([mine]), self.warn, first=first)

    def _plan_settings(self) -> PlanSettings:
        data = self.config.data
        return PlanSettings(
            data.batch_size * self.accelerator.num_processes,
            self.config.train.seed,
            data.tail,
            data.order,
            data.block_size,
            data.similar_lengths,
            {spec.title: spec.weight for spec in source_specs(self.config)},
            self.config.validation.rows,
        )

    def _mine(
        self, samples: Samples, plans: Plans, accepted: tuple[str, ...], threads: int, kept: KeptSamples | None = None
    ) -> Stream:
        """This process's part of the batches."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        preserved = frozenset(spec.title for spec in source_specs(self.config) if spec.preserve)
        return Stream(
            samples,
            plans,
            rank,
            world_size,
            self.config.data.prefetch,
            threads,
            accepted=accepted,
            kept=kept,
            excluded=self._excluded(samples),
            preserved=preserved,
        )

    def _excluded(self, samples: Samples) -> frozenset[bytes]:
        """The keys that are left out: in all processes those that the first has read. A list may change meanwhile."""
        excluded = samples.excluded
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            excluded = gather_object([excluded])[0]
        if excluded:
            self.telling.say(f"the exclude list beside the shards leaves out {len(excluded)} keys")
        return excluded


def keep_of(config: Config, gpu: torch.device) -> Keep | None:
    """What of the samples stays in memory; None for nothing."""
    keep = config.cache.keep
    devices = {"none": None, "cpu": torch.device("cpu"), "gpu": gpu}
    if keep.latents == keep.embeds == "none":
        return None
    return Keep(devices[keep.latents], devices[keep.embeds], keep.budget_bytes)

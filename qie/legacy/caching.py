"""The part of `QwenImageEditTrainer` that fills the cache."""

from __future__ import annotations

from typing import Any

from qie.config import required
from qie.data.sources import Source
from qie.errors import UsageError
from qie.legacy.cache import check_cache_exists
from qie.legacy.painting import PaintingTrainer, ignored
from qie.opening import open_rows, versions
from qie.precompute import Report, Settings, precompute
from qie.types import Row


class CachingTrainer(PaintingTrainer):
    """Encodes the rows of a configuration into its cache_dir."""

    @property
    def use_cache(self) -> bool:
        """Now: `config.cache.use_cache`."""
        return self.config.cache.use_cache

    @property
    def cache_exist(self) -> bool:
        """Now: `qie-stats DIR`."""
        return self.config.cache.cache_dir is not None and check_cache_exists(self.config.cache.cache_dir)

    def cache(self, train_dataloader: Source | None = None) -> Report:
        """Encode all rows that are not in `cache.cache_dir` yet. Now: `qie-precompute`, or `qie.precompute.precompute`.

        Args:
            train_dataloader: rows; None for those of `data.source`. DataLoaders of other datasets are refused.
        """
        rows = self._rows(train_dataloader)
        return self._precompute(rows, (0, len(rows)))

    cache_embeddings = cache

    def cache_step(
        self, data: Row | int, vae_encoder_device: str | None = None, text_encoder_device: str | None = None
    ) -> Report:
        """Encode one row of `data.source` into a shard of its own. Now: `qie-precompute --start-idx N --end-idx N+1`.

        Args:
            data: a row of the source, or its number.
            vae_encoder_device, text_encoder_device: ignored. Now: `cache.vae_encoder_device` and the other.
        """
        if vae_encoder_device is not None or text_encoder_device is not None:
            ignored("a device", "cache.vae_encoder_device and cache.text_encoder_device in the configuration")
        if not isinstance(data, (Row, int)):
            raise UsageError("this is no row", expected="a qie.Row, or its number", found=type(data).__name__)
        number = data.index if isinstance(data, Row) else data
        return self._precompute(self._rows(None), (number, number + 1))

    def _rows(self, given: Any) -> Source:
        if given is not None and not all(hasattr(given, name) for name in ("read", "name", "part", "__len__")):
            raise no_loader(given, "a source: qie.open_source, or nothing")
        return given or open_rows(self.config)

    def _precompute(self, rows: Source, wanted: tuple[int, int]) -> Report:
        output = required(self.config.cache.cache_dir, "cache.cache_dir", "where shards go")
        settings = Settings(versions=versions(self.config))
        return precompute(rows, self.encoder, output, rows=wanted, settings=settings)


def no_loader(given: object, expected: str) -> UsageError:
    """What is wrong with a DataLoader where `expected` is taken."""
    hint = "section data of the configuration says how rows are dealt into batches"
    return UsageError(
        "loaders of other libraries are not taken", expected=expected, found=type(given).__name__, hint=hint
    )

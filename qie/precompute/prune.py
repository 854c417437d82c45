"""Shards brought into agreement with a source that lost rows: the files of a fresh run, from records that are there.

The shards are first linked into a folder of their own, a second name for each file, so that no record is gone when its
shard is replaced. Then those that a fresh run would not write are deleted, and a run takes the records from the links.
A run that is killed leaves the links; the next one completes them and goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qie.errors import UsageError
from qie.paths import open_locked, sync_folder
from qie.recipe import Recipe
from qie.shards.discovery import published
from qie.shards.grid import Range, shard_ranges
from qie.shards.index import shard_stem
from qie.shards.reader import Shard
from qie.stores import Folder, LocalFolder

LINKS = ".prune"
"""The folder of links, in that of the shards."""
_LOCK = "lock"


@contextmanager
def pruned(output: Folder, recipe: Recipe, rows: Range, shard_size: int, source_rows: int) -> Iterator[tuple[str, ...]]:
    """Delete the shards that a fresh run of all rows would not write; gives where their records are until the end.

    The links are deleted when what is done in this context is done, not when it fails.

    Raises:
        UsageError: `rows` are not all, the output is in a store or on a disk without links, or another run prunes it.
        RecipeMismatchError: the shards are of another recipe. Nothing was done.
    """
    if rows != (0, source_rows):
        raise UsageError("--prune is for all rows of the source", expected=f"rows [0, {source_rows})", found=rows)
    if not isinstance(output, LocalFolder):
        raise UsageError(
            "shards in a store cannot be pruned",
            where=output,
            hint=f"write to another folder, where nothing is encoded again: --output NEW --reuse {output}",
        )
    there = published(output)
    links = output.root / LINKS
    if not there and not links.exists():
        yield ()
        return
    first = Shard.published(there[0]) if there else None
    if first:
        recipe.require_equal(first.index.recipe, there[0], "prune with the configuration that wrote these shards")
    with _linked(output, links, [index.stem for index in there]):
        linked = {path.stem for path in links.glob("*.json")}
        for stem in sorted(linked - {shard_stem(*shard) for shard in shard_ranges(*rows, shard_size, ())}):
            output.delete(f"{stem}.json")
            output.delete(f"{stem}.tar")
        yield (str(links),) if linked else ()
    shutil.rmtree(links, ignore_errors=True)


def require_pruned(output: Folder) -> None:
    """Raise UsageError when a run that prunes was killed: another one would not find the records that it kept."""
    if isinstance(output, LocalFolder) and (output.root / LINKS).exists():
        raise UsageError(
            "a run with --prune did not end",
            where=output.root / LINKS,
            hint="run it again with --prune, or delete this folder; records that only it has are then encoded again",
        )


@contextmanager
def _linked(output: LocalFolder, links: Path, stems: list[str]) -> Iterator[None]:
    """All files of some shards have a second name in `links`, which this process locks."""
    fresh = not links.exists()
    try:
        links.mkdir(exist_ok=True)
        lock = open_locked(links / _LOCK, wait=False)
    except BlockingIOError as error:
        raise UsageError("another run prunes these shards", where=output, hint="wait until it has ended") from error
    except OSError as error:
        raise _refused(output, error) from error
    with lock:
        try:
            for stem in stems:
                _link(output.root, links, stem)
            sync_folder(links)
            sync_folder(output.root)
        except OSError as error:
            if fresh:
                shutil.rmtree(links, ignore_errors=True)
            raise _refused(output, error) from error
        yield


def _link(root: Path, links: Path, stem: str) -> None:
    """Link a shard, unless a killed run did: its replacement may have the name by now."""
    names = (f"{stem}.tar", f"{stem}.json")  # who finds the index finds the tar
    if all((links / name).exists() for name in names):
        return
    for name in names:
        with suppress(FileNotFoundError):
            (links / name).unlink()
    for name in names:
        os.link(root / name, links / name)


def _refused(output: LocalFolder, error: OSError) -> UsageError:
    return UsageError(
        "shards cannot be pruned here: their files cannot have second names",
        where=output,
        found=error.strerror or error,
        hint=f"write to another folder, where nothing is encoded again: --output NEW --reuse {output}",
    )

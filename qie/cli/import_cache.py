"""qie import: the cache of another program in, shards out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from qie.cli.common import command, quiet_option
from qie.cli.progress import Progress
from qie.cli.terminal import echo, tell_next, warn

if TYPE_CHECKING:
    from qie.shards.index import Entry, Skipped


def _grids(_: click.Context, __: click.Parameter, given: tuple[str, ...] | str | None) -> tuple[tuple[int, int], ...]:
    """`832x576` in pixels, as height and width in tokens; of each that is given."""
    from qie.precompute.pt_cache import PATCH_PX

    found = []
    for text in (given,) if isinstance(given, str) else given or ():
        match = re.fullmatch(r"(\d+)[x×](\d+)", text)
        if not match or min(int(match[1]), int(match[2])) < PATCH_PX:
            raise click.BadParameter(f"{text!r} is not a size in pixels, such as 832x576.")
        found.append((int(match[2]) // PATCH_PX, int(match[1]) // PATCH_PX))
    return tuple(found)


@command
@click.argument("cache")
@click.option("--output", required=True, metavar="DIR|URL", help="Where to write shards.")
@click.option(
    "--family",
    required=True,
    type=click.Choice(["edit", "edit_plus"]),
    help="Family of the model that the cache was made for.",
)
@click.option("--model", default="an unknown model", metavar="NAME", help="The model that the cache was made with.")
@click.option("--size", callback=_grids, metavar="WxH", help="Size of all targets, in pixels.")
@click.option(
    "--control-size",
    "control_sizes",
    callback=_grids,
    multiple=True,
    metavar="WxH",
    help="Size of each control, in pixels; repeatable.",
)
@click.option("--dataset", metavar="PATH", help="The old dataset_path, for a cache without metadata.")
@click.option("--shard-size", default=64, show_default=True, type=click.IntRange(1, 10**6), help="Rows per shard.")
@quiet_option
def main(
    cache: str,
    output: str,
    family: str,
    model: str,
    size: tuple[tuple[int, int], ...],
    control_sizes: tuple[tuple[int, int], ...],
    dataset: str | None,
    shard_size: int,
    quiet: bool,
) -> None:
    """Turn CACHE, a cache directory of qwen-image-finetune (github.com/TsienDragon/qwen-image-finetune), into shards.

    Rows are found by the cache's metadata. The first releases wrote none, and named a file by a hash of its image's
    path and time and of the prompt: --dataset, the old dataset_path exactly as it was configured, finds those files as
    long as the images are in their old place, untouched. Without --dataset, files of one name belong together, and a
    row whose files have different names is refused, since nothing relates them.

    Nothing in a file is executed: it is read as tensors, or refused. A row with a file that is missing, damaged, or not
    finite is refused, too. A refused row is listed, counted, and recorded in the shards as a skipped row with its
    reason; the other rows are imported.

    Latents are packed, 2×2 to a token, so their sizes are needed: from `img_shapes` if the cache has it, else in pixels
    from --size (targets) and --control-size (once for each control, in order). A row that does not fit is refused.

    A cache does not record the images, prompts and weights that it was made from (its embeddings are even found by the
    prompt alone, whatever the control was). The recipe of these shards therefore says only that they are imported; it
    keeps --model. A sample's key is the SHA-256 of its tensors under that recipe. qie-train accepts the shards with
    --accept-recipe; qie-precompute never uses one of their records for a row. The texts of prompts are lost, except
    with --dataset; masks were never cached. The first releases cached no null prompt. Such rows are imported without
    one: qie-train accepts them with data.caption_dropout_rate: 0, and refuses them otherwise.

    The exit code is 0 if every row is imported, 1 if rows were refused, 2 if nothing could be done.
    """
    from qie.errors import UsageError
    from qie.paths import local_path
    from qie.precompute import pt_cache
    from qie.stores import open_folder

    if bool(size) != bool(control_sizes):
        raise UsageError("--size and --control-size go together")
    folder = local_path(cache)
    rows = pt_cache.named_by_images(folder, dataset) if dataset else pt_cache.cached_rows(folder)
    reader = pt_cache.CacheReader(pt_cache.imported_recipe(family, model), (*size, *control_sizes))
    refused, bare = _counted(pt_cache.write_cached(open_folder(output), rows, reader, shard_size), len(rows), quiet)
    if unused := pt_cache.unused_files(folder, rows):
        warn(f"{unused} files belong to no row")
    if bare:
        warn(f"no null prompt in {bare} of {len(rows)} rows: train with data.caption_dropout_rate: 0")
    echo(f"{len(rows) - refused} of {len(rows)} rows imported, {refused} refused; recipe {reader.recipe.digest}")
    if refused < len(rows):
        dropout = ["--set", "data.caption_dropout_rate=0"] if bare else []
        words = ["qie", "train", "--config", "my.yaml", *dropout, "--accept-recipe", output]
        tell_next(*words, rest="# my.yaml names the model; qie init writes one", quiet=quiet)
    sys.exit(int(refused > 0))


def _counted(written: Iterator[Skipped | Entry], rows: int, quiet: bool) -> tuple[int, int]:
    """How many rows were refused, which are told as they come, and how many were imported without a null prompt."""
    from qie.shards.index import Skipped

    refused = bare = 0
    with Progress("importing", rows, "rows", quiet=quiet) as progress:
        for done, one in enumerate(written, start=1):
            progress.at(done)
            if isinstance(one, Skipped):
                refused += 1
                echo(f"refused {one.name}: {one.reason}", err=True)
            else:
                bare += one.empty_tokens == 0
    return refused, bare

"""What qie-stats --plan says of an epoch is what the plan of that epoch is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from qie.cli import stats
from qie.data.plan import plan_epoch
from qie.errors import RecipeMismatchError, UsageError
from qie.shards.discovery import find_indexes
from qie.shards.shard_set import ShardSet
from qie.stats import EpochPlan, preview_epoch
from tests.builders import RECIPE, RECIPE_21, make_sample, make_sample_21, write_shard


@pytest.fixture(params=["edit_plus", "qwen_image_21"])
def shards(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Seven samples of one shape and three of another, of all lengths from 9 to 18.

    Of Qwen-Image-2.1, the seven have no control, and the three have two.
    """
    folder = tmp_path / "shards"
    if request.param == "edit_plus":
        first = [make_sample(n, tokens=9 + n) for n in range(7)]
        others = [make_sample(n, target=(6, 8), tokens=9 + n) for n in range(7, 10)]
    else:
        first = [make_sample_21(n, controls=(), tokens=9 + n) for n in range(7)]
        others = [make_sample_21(n, controls=((4, 6), (2, 2)), tokens=9 + n) for n in range(7, 10)]
    recipe = RECIPE if request.param == "edit_plus" else RECIPE_21
    write_shard(folder, first, recipe=recipe)
    write_shard(folder, others, start=7, recipe=recipe)
    return folder


def plans(shards: Path, batch_size: int, world: int) -> list[EpochPlan]:
    return preview_epoch(find_indexes([shards]), batch_size=batch_size, world=world)


def test_steps_and_what_a_last_batch_lacks_follow_from_the_shapes(shards: Path) -> None:
    pad, drop = plans(shards, batch_size=2, world=2)

    assert (pad.tail, pad.samples, pad.steps, pad.fillers, pad.dropped) == ("pad", 10, 3, 2, 0)
    assert (drop.tail, drop.samples, drop.steps, drop.fillers, drop.dropped) == ("drop", 10, 1, 0, 6)


@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (2, 2), (3, 1), (1, 3), (4, 2)])
def test_padding_is_that_of_each_process_batch(shards: Path, batch_size: int, world: int) -> None:
    samples = ShardSet.open([shards])
    lengths = samples.table.tokens.tolist()
    plan = plan_epoch(samples.columns, seed=0, epoch=0, global_batch_size=batch_size * world)
    slices = [batch.slice(rank, world).positions for batch in plan for rank in range(world)]
    tokens = sum(batch_size * max(lengths[at] for at in part) for part in slices)
    padding = tokens - sum(lengths[at] for part in slices for at in part)

    found, _ = plans(shards, batch_size, world)

    assert (found.tokens, found.padding_tokens) == (tokens, padding)
    assert found.padding == padding / tokens
    assert batch_size > 1 or not padding


def test_bytes_of_a_step_are_those_of_its_records(shards: Path) -> None:
    indexes = [json.loads(path.read_text()) for path in shards.glob("*.json")]
    sizes = [member["size"] for index in indexes for member in index["files"].values()]

    found, _ = plans(shards, batch_size=1, world=1)

    assert found.bytes_per_step * found.steps == pytest.approx(sum(sizes))
    assert found.largest_step_bytes == max(sizes)


def test_batches_larger_than_any_shape_make_no_steps_where_tails_are_dropped(shards: Path) -> None:
    pad, drop = plans(shards, batch_size=8, world=1)

    assert (pad.steps, pad.fillers) == (2, 6)
    assert (drop.steps, drop.dropped, drop.padding) == (0, 10, 0)


def test_a_plan_needs_no_tar_but_its_size(shards: Path) -> None:
    before = plans(shards, batch_size=2, world=1)
    for tar in shards.glob("*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))

    assert plans(shards, batch_size=2, world=1) == before


def test_a_mixture_of_recipes_has_no_plan(shards: Path) -> None:
    recipe = replace(ShardSet.open(shards).recipe, multiple_px=16)
    write_shard(shards, [(make_sample_21 if recipe.prompt_dtype else make_sample)(20)], start=20, recipe=recipe)

    with pytest.raises(RecipeMismatchError, match="multiple_px"):
        plans(shards, batch_size=1, world=1)


def test_the_command_prints_the_plan_as_lines_and_as_json(shards: Path) -> None:
    arguments = [str(shards), "--plan", "--batch-size", "2", "--world", "2"]
    lines = CliRunner().invoke(stats.main, arguments).stdout
    values = json.loads(CliRunner().invoke(stats.main, [*arguments, "--json"]).stdout)

    assert values == [plan.to_dict() for plan in plans(shards, 2, 2)]
    assert "tail pad: 3 steps over 10 samples, 2 places padded with weight 0" in lines
    assert "tail drop: 1 steps over 10 samples, 6 samples dropped" in lines


@pytest.mark.parametrize(("batch_size", "world"), [(10**18, 1), (1, 10**12), (10**9, 10**9), (256, 257)])
def test_a_batch_that_no_plan_can_hold_is_refused_at_once(shards: Path, batch_size: int, world: int) -> None:
    options = ["--plan", "--batch-size", str(batch_size), "--world", str(world)]
    result = CliRunner().invoke(stats.main, [str(shards), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the global batch is too large" in result.stderr and str(batch_size * world) in result.stderr
    with pytest.raises(UsageError, match="too large"):
        plan_epoch(ShardSet.open(shards).columns, seed=0, epoch=0, global_batch_size=batch_size * world)

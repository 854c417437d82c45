"""Benchmarks: the pages say what the data says, the runner knows each script, and small runs give well-formed rows."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import re
import shlex
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = sorted(file.name for file in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in file.read_text("utf-8"))
COMMAND = re.compile(r"python benchmarks/(\w+\.py)([^`\n|#]*)")
COMMANDS = sorted({match.groups() for page in PAGES for match in COMMAND.finditer(page.read_text("utf-8"))})


@pytest.fixture(scope="module", autouse=True)
def scripts_are_importable():
    """As when one of them is run: its folder comes first."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def script(name: str) -> ModuleType:
    return importlib.import_module(name.removesuffix(".py"))


def test_the_runner_knows_each_script_and_its_options() -> None:
    known = script("run.py").SCRIPTS
    assert set(SCRIPTS) - {"run.py"} == set(known["cpu"]) | set(known["gpu"])
    for kind in known.values():
        for name, words in kind.items():
            script(name).parser().parse_args(words.split())


def test_the_pages_of_benchmarks_and_scaling_and_the_chart_say_what_the_data_says() -> None:
    tables, run = script("tables.py"), script("run.py")
    for page, text in tables.compared(tables.load(), run.SCRIPTS).items():
        assert page.read_text("utf-8") == text, f"{page.name}: run python benchmarks/run.py --none"
    assert tables.SCALING.read_text("utf-8") == tables.scaling_page(tables.load()), (
        "run python benchmarks/run.py --none"
    )


def test_stored_rows_are_well_formed_and_those_that_are_headlines_are_there() -> None:
    tables = script("tables.py")
    data = tables.load()
    for runs in data.values():
        for name, run in runs.items():
            rows = tables.rows_of(run)
            assert_well_formed(rows)
            assert len({row.key for row in rows}) == len(rows)
            assert run["command"].startswith(f"python benchmarks/{name}") and run["date"] and run["versions"]["torch"]
    for name, key, _ in tables.HEADLINES:
        assert key in {row.key for row in tables.rows_of(data["cpu"][name])}, f"{name}: {key}"


def assert_well_formed(rows) -> None:
    assert rows
    for row in rows:
        assert row.low <= row.value <= row.high and row.runs >= 0 and row.what and row.unit, row
        assert row.command.startswith("python benchmarks/"), row


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[f"{name}{words}" for name, words in COMMANDS])
def test_commands_of_the_docs_parse(name: str, words: str) -> None:
    script(name).parser().parse_args(shlex.split(words.replace("*", "")))


# Small runs


def test_plan(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    script("plan.py").main(
        ["--samples", "500", "--shapes", "3", "--windows", "2000", "--runs", "2", "--json", str(file)]
    )
    rows = rows_in(file)
    assert len(rows) == 15 and all("--json" not in row.command for row in rows)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its files to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = script("read.py")
    monkeypatch.setattr(read, "starting", lambda folder, runs: [])  # processes that import torch
    threads = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=threading.Thread)  # processes would import it, too
    monkeypatch.setattr(read.multiprocessing, "get_context", lambda kind: threads)
    monkeypatch.setattr(read, "STEP_S", 0.0)
    file = tmp_path / "rows.json"
    read.main(["--samples", "4", "--mb", "0.4", "--runs", "1", "--workers", "0", "--json", str(file)])
    keys = {row.key for row in rows_in(file)}
    assert {"webdataset shuffled", "torch.load in order joined", "check always, default", "check first, 1"} <= keys
    assert {
        f"{peer}, {ours}"
        for peer in ("safetensors files in a DataLoader", "webdataset's WebLoader", "webdataset, torch's threads: 1")
        for ours in ("reader threads: 1", "reader threads: default", "processes: 4")
    } <= keys


def test_loop(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    script("loop.py").main(["--steps", "1", "--runs", "1", "--tokens", "40", "--json", str(file)])
    assert {row.key for row in rows_in(file)} == {"outside", "waiting", "bare"}


def test_encoders_compare_windows_and_patches_in_their_true_width_with_transformers() -> None:
    torch = importlib.import_module("torch")
    with torch.inference_mode():
        rows = script("encoders.py").compare_vision(torch.device("cpu"), torch.float32, 1, patches=10)
    assert_well_formed([replace(row, command="python benchmarks/encoders.py") for row in rows])
    assert [row.key for row in rows] == ["windows", "patches"]
    assert "4 windows in 3 calls" in rows[0].what and "differs by 0.0e+00" in rows[0].detail


def test_traffic_counts_less_between_products_in_a_block_of_qie_s_forward_pass_than_in_diffusers_own() -> None:
    traffic = script("traffic.py")
    theirs, ours = (traffic.eager(1, own=own, model="edit") for own in (False, True))
    assert all(mine < yours for mine, yours in zip(ours.moved, theirs.moved, strict=True))
    assert_well_formed(
        [replace(traffic.row("qie edit", "work", ours, theirs, 1), command="python benchmarks/traffic.py")]
    )


def test_draws_over_one_prefix_save_flops_at_full_size() -> None:
    """Of a forward pass, attention included, 0.645 and 0.468 are what the architecture allows."""
    pytest.importorskip("diffusers", minversion="0.42")
    draws = script("draws.py")
    for controls, forward, step in ((1, 0.65, 0.655), (3, 0.47, 0.477)):
        for most, (shared, own, theirs) in zip((forward, step), draws.flops(controls, 4), strict=True):
            assert shared / theirs < most and shared < own < theirs
    draws.steps(1, draws.transformer_of(draws.SMALL), 1, 1, 2)


def test_adapters(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    script("adapters.py").main(["--width", "32", "--tokens", "4", "--rank", "2", "--runs", "1", "--json", str(file)])
    assert len(rows_in(file)) == 5


def test_store(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--latency-ms", "1", "--megabytes-per-s", "2000", "--steps", "2", "--runs", "1", "--tokens", "30"]
    script("store.py").main([*words, "--processes", "1", "--json", str(file)])
    rows = {row.key: row.value for row in rows_in(file)}
    assert list(rows)[:3] == ["at once", "in turn", "blocks 1"] and "blocks 1 before fetched" in rows
    assert 1 < rows["blocks 1 fetched"] < 1.05


def test_quality(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--steps", "1", "--photographs", "1", "--side", "64", "--runs", "1", "--only", "bf16", "EMA"]
    script("quality.py").main([*words, "--json", str(file), "--pictures", str(tmp_path / "edits.png")])
    rows = {row.key: row for row in rows_in(file)}
    assert list(rows) == ["float32", "bf16", "EMA", "new bf16", "taught bf16"]
    assert 0.9 < rows["new bf16"].low < rows["new bf16"].high <= 1.001 and "0 below" in rows["new bf16"].detail
    with Image.open(tmp_path / "edits.png") as pictures:
        assert pictures.size == (5 * 128, 128 + 2 * 16)


def test_preservation(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--steps", "1", "--photographs", "1", "--side", "64", "--runs", "1", "--json", str(file)]
    script("preservation.py").main([*words, "--pictures", str(tmp_path / "pictures.png")])
    assert [row.key for row in rows_in(file)][:4] == [
        f"{what} {how}" for what in ("subject", "class") for how in ("without", "with")
    ]
    with Image.open(tmp_path / "pictures.png") as pictures:
        assert pictures.size == (7 * 128, 128 + 2 * 16)


def test_preferences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preferences, file = script("preferences.py"), tmp_path / "rows.json"
    monkeypatch.setattr(preferences, "KNOWN", ["darker", "low_contrast"])
    monkeypatch.setattr(preferences, "SQUARES", {"pairs": 2, "plain": 2, "kept": 2})
    monkeypatch.setattr(preferences.demo, "TRAINED", ("brick.png", "grass.png"))
    monkeypatch.setattr(preferences.demo, "HELD_OUT", {"cat": "chelsea.png"})
    words = ["--steps", "1", "--photographs", "1", "--others", "1", "--side", "64", "--runs", "1"]
    preferences.main([*words, "--json", str(file), "--pictures", str(tmp_path / "pairs.png")])
    rows = {row.key: row for row in rows_in(file)}
    kinds = ("accuracy", "margin", "sharpness", "psnr", "others")
    assert list(rows) == [*(f"{kind} 2000" for kind in kinds), "bytes", "step"]
    assert rows["accuracy 2000"].value > 50 and rows["margin 2000"].value > 0
    with Image.open(tmp_path / "pairs.png") as pictures:
        assert pictures.size == (4 * 192, 192 + 2 * 16)


def test_a_sample_of_text_alone_takes_at_most_1_9_mb_where_one_with_images_takes_18() -> None:
    """Of Qwen-Image-2.1, 1024², one control, 80 tokens."""
    ours, whole = script("work.py").text_alone_bytes()
    assert ours <= 1.9e6 and whole > 18e6


def test_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = script("scaling.py")
    monkeypatch.setattr(scaling, "opened", lambda place, *more: scaling.open_once(place, not more))  # in this process
    point, rows = scaling.measured(tmp_path, 150, scaling.parser().parse_args(["--runs", "2"]))
    assert point["samples"] == 192 and point["index_bytes"] > 192 * 64
    assert [row.key for row in rows] == ["open 150", "compare 150", "read 150", "own 150"]
    without_shards = scaling.mapped(
        tmp_path / "mapped", scaling.parser().parse_args(["--runs", "1", "--mapped", "100"])
    )
    assert "batch_s" not in without_shards and without_shards["samples"] == 128
    assert "192" in str(script("paper.py").measured([point, without_shards]))
    assert scaling.followed(tmp_path / "followed", 5).key == "follow 5"


def test_what_is_simulated_waits_when_a_store_or_encoders_are_slower_than_steps() -> None:
    """As arithmetic says: a store that carries four fifths of what steps ask for is waited for a fifth of the time."""
    simulate = script("simulate.py")
    step = simulate.training(1024, checkpointing=True)
    asked_s = 16 * simulate.SAMPLE_BYTES / ((step.model + step.recomputed) / simulate.PEAK)

    def found(order: str = "shuffle", load: float = 0.1, **more: float):
        run = simulate.Run("", 16 * 512, 16, order, steps=512, store_gbit=asked_s / load / 125e6, **more)
        return simulate.simulated(run, 0.02, 10 * asked_s)

    plenty, scarce = found(), found(load=1.25)
    assert plenty.waiting == 0 and plenty.fetched == scarce.fetched == 1
    assert scarce.waiting == pytest.approx(0.2, abs=0.01)
    share = simulate.encoding(1024).ours / (step.model + step.recomputed)
    slow = found("sequence", encoders=1)
    assert slow.waiting == pytest.approx(max(0, 1 - 1 / (16 * share)), abs=0.02)


def test_simulated_machines_with_local_copies_fetch_each_shard_once_each() -> None:
    simulate = script("simulate.py")

    def fetched(gpus: int, order: str, room: float) -> float:
        run = simulate.Run("", 64 * 64, gpus, order, room=room, steps=64 * 64 // gpus)
        return simulate.simulated(run, 0.02, 1e12).fetched

    assert fetched(8, "blocks", 0.5) == fetched(8, "shuffle", 1) == 1
    assert fetched(16, "blocks", 0.5) == 2
    assert 20 < fetched(8, "shuffle", 0.1) < 64


def test_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = script("pipeline.py")
    monkeypatch.setattr(pipeline, "SLEEP_S", 0.001)
    stages = [pipeline.Stage(name, pipeline._sleep) for name in ("vae", "text")]
    rows = [*pipeline.overlap("artificial", "two", stages, lambda: [1, 2, 3], 1), *pipeline.engine(tmp_path, 20, 1)]
    assert [row.key for row in rows] == ["overlap artificial", "ideal artificial", "engine", "engine memory"]


def test_the_guides_say_what_encoding_and_its_samples_take() -> None:
    work, samples = script("work.py"), script("samples.py")
    guide = " ".join((ROOT / "docs" / "guides" / "24gb.md").read_text("utf-8").split())
    qwen, (vae, _) = work._qwen(), work._vaes()
    numbers = [sum(weight.numel() for weight in model.parameters()) for model in (qwen, vae)]
    assert f"about {2 * sum(numbers) / 1e9:.0f} GB of it: {numbers[0] / 1e9:.1f} B parameters of Qwen2.5-VL" in guide
    assert f"Qwen2.5-VL {2 * numbers[0] / 1e9:.0f} GB." in guide
    one, two = (
        (controls + 1) * 2 * 16 * 128 * 128 + 2 * samples.WIDTH * (tokens + samples.NULL)
        for controls, tokens in ((1, 300), (2, 500))
    )
    assert f"About {one / 1e6:.1f} MB of disk for each row of 1024² with one control, {two / 1e6:.1f} MB" in guide


def rows_in(file: Path):
    rows = [script("measuring.py").Row(**row) for row in json.loads(file.read_text("utf-8"))["rows"]]
    assert_well_formed(rows)
    return rows

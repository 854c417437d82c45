"""The options of qie-precompute that say where it runs and what it writes down, with real encoders."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from qie import from_config
from qie.cli import precompute, stats
from qie.config import Config
from qie.precompute.progress import read_progress
from qie.stores import LocalFolder
from tests.conftest import AREA_PX, ROOT


@pytest.fixture(scope="module")
def config(tiny_edit: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and beside it the shards that one process writes."""
    folder = tmp_path_factory.mktemp("work")
    values = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit)},
        "data": {"source": str(photos), "area_px": AREA_PX, "allow_tiny": True},
        "cache": {"cache_dir": str(folder / "shards"), "vae_encoder_device": "cpu", "text_encoder_device": "cpu"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    run(folder / "config.yaml", "--shard-size", 3)
    return folder / "config.yaml"


def run(config: Path, *arguments: object, code: int = 0):
    everything = ["--config", config, *arguments]
    result = CliRunner().invoke(precompute.main, [str(argument) for argument in everything])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def files(folder: Path) -> dict[str, bytes]:
    """Without what the workers told in the folder `progress`."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_two_workers_write_the_same_files_and_each_tells_of_its_part(config: Path, tmp_path: Path) -> None:
    arguments = ["--devices", "cpu,cpu", "--shard-size", 3, "--output", tmp_path / "out"]
    result = run(config, *arguments, "--log", tmp_path / "log")
    assert files(tmp_path / "out") == files(config.parent / "shards")
    assert result.stdout.startswith("12 rows: 12 samples encoded, 0 reused, 0 skipped; 4 shards written")
    line = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (line["rows"], line["encoded"], line["stages"]["text"]["items"]) == (12, 12, 12)
    told = read_progress(LocalFolder(tmp_path / "out"))  # of a worker that got no shard there may be none
    assert {one.run.id for one in told} == {told[0].run.id} and {one.state for one in told} == {"finished"}
    assert {one.task for one in told} <= {"qie-worker-0", "qie-worker-1"} and sum(one.rows for one in told) == 12


def test_the_log_is_json_lines_with_stages_and_the_bottleneck(config: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    result = run(config, "--output", tmp_path / "out", "--log", log, "--end-idx", 5, "--shard-size", 2)
    before = log.read_text()
    again = run(config, "--output", tmp_path / "out", "--log", log, "--end-idx", 5, "--shard-size", 2)
    opened, _, ended = result.stderr.rstrip().rpartition("\n")
    assert ": 12 rows, of which this run takes [0, 5)" in opened and f"{tmp_path / 'out'}: about 2" in opened
    assert ended.startswith("next: qie precompute --config ") and ended.endswith(" --shard-size 2 --start-idx 5")
    assert f"{tmp_path / 'out'}: 5 of 5 rows are there, " in again.stderr
    assert log.read_text().startswith(before), "a log is appended to"
    first, second = (json.loads(text.splitlines()[-1]) for text in (before, log.read_text()))
    assert (first["rows"], first["encoded"], first["shards_written"]) == (5, 5, 3)
    assert list(first["stages"]) == ["read", "merge", "prepare", "vae", "text", "record", "write", "publish"]
    assert first["bottleneck"] in first["stages"]
    busiest = max(first["stages"].values(), key=lambda stage: stage["busy"])
    assert first["stages"][first["bottleneck"]] == busiest
    assert f"bottleneck: {first['bottleneck']}" in result.stdout
    assert (second["encoded"], second["reused"], second["shards_kept"]) == (0, 5, 3)
    assert all((line["rows_total"], line["remaining_s"]) == (5, 0) for line in (first, second))
    assert first["bytes_written"] > 0 == second["bytes_written"]
    assert first["stages"]["vae"]["items"] == 5 and first["stages"]["vae"]["items_per_busy_s"] > 0
    assert second["stages"]["vae"]["items"] == 0, "what is kept is not counted as work"
    assert all("time" in line and line["seconds"] >= 0 for line in (first, second))


LOG = "missing/log"
REFUSED = {
    **{
        f"devices beside {more[0]}": (["--devices", "cpu,cpu", *more], "--devices cannot be combined with")
        for more in (["--vae-device", "cpu"], ["--text-device", "cpu"], ["--engine", "ray"])
    },
    **{
        f"devices {devices}": (["--devices", devices], "--devices cannot be parsed")
        for devices in ("cpu+", "+cpu", "cpu,", ",", "+")
    },
    **{f"devices {devices}": (["--devices", devices], "") for devices in ("gpu", "cpu+tpu", "cpu,cuda:99")},
    "a log that cannot be written": (["--log", LOG], LOG),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    config: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    assert words in run(config, *arguments, "--output", tmp_path / "out", code=2).stderr
    assert not (tmp_path / "out").exists()


def test_records_of_older_shards_are_reused(config: Path, tmp_path: Path) -> None:
    result = run(config, "--reuse", config.parent / "shards", "--output", tmp_path / "out", "--shard-size", 5)
    assert result.stdout.startswith("12 rows: 0 samples encoded, 12 reused")
    assert result.stderr.endswith(f"\nnext: qie train --config {config} {tmp_path / 'out'}\n")


def test_a_dry_run_writes_nothing_and_finds_what_the_workers_would_find(config: Path, tmp_path: Path) -> None:
    """On a machine with a GPU, `auto` would be another recipe than that of workers on the CPU."""
    settings = ["--set", "cache.vae_encoder_device=cuda:99", "--set", "cache.text_encoder_device=cuda:99"]
    result = run(config, *settings, "--devices", "cpu", "--dry-run")
    assert "0 to encode, 12 to reuse" in result.stdout
    result = run(config, "--output", tmp_path / "out", "--dry-run")
    assert "12 samples can be encoded, 0 cannot" in result.stdout and "12 to encode" in result.stdout
    assert not (tmp_path / "out").exists()


def test_opacity_that_the_family_has_no_place_for_is_told_at_the_end_and_in_the_index(
    config: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    names = [path.name for path in sorted((photos / "training_images").glob("*.png"))[:3]]
    for part, name in (("training_images", names[0]), ("training_images", names[1]), ("control_images", names[1])):
        with Image.open(tmp_path / "photos" / part / name) as image:
            image.putalpha(Image.linear_gradient("L").resize(image.size))
            image.save(tmp_path / "photos" / part / name)
    with Image.open(tmp_path / "photos" / "training_images" / names[2]) as image:
        image.putalpha(255)
        image.save(tmp_path / "photos" / "training_images" / names[2])
    arguments = ["--set", f"data.source={tmp_path / 'photos'}", "--set", "data.background='#204060'", "--end-idx", 3]
    result = run(config, *arguments, "--output", tmp_path / "out", "--devices", "cpu,cpu", "--shard-size", 1)
    why = "has transparent parts: the model gets them as #204060 (data.background)"
    lines = [line for line in result.stdout.splitlines() if line.startswith("note: ")]
    assert lines == [f"note: 2 × the target {why}", f"note: 1 × control 1 {why}"]
    told = CliRunner().invoke(stats.main, [str(tmp_path / "out")]).stdout
    assert all(line in told for line in lines)


def test_parts_write_what_one_run_writes_and_one_without_rows_says_so(config: Path, tmp_path: Path) -> None:
    for part in (3, 5, 1, 4, 2):  # of four shards
        result = run(config, "--part", f"{part}/5", "--output", tmp_path / "out", "--shard-size", 3)
        assert (part == 1) == ("part 1/5 holds no rows" in result.stdout)
    assert files(tmp_path / "out") == files(config.parent / "shards")


# What a worker does when it starts, then what the command does.
ENCODING = """
import atexit, sys
from qie.config import load_config
from qie.from_config import open_worker
open_worker(load_config(sys.argv[2]))[1].stages
from qie.cli.precompute import run
sys.argv[0] = "qie-precompute"
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
run()
"""


def test_the_command_and_its_workers_import_nothing_of_training(config: Path, tmp_path: Path) -> None:
    arguments = ["--config", config, "--output", tmp_path, "--quiet", "--end-idx", "1"]
    done = subprocess.run([sys.executable, "-c", ENCODING, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.splitlines()[-1].split())
    assert "diffusers.models.autoencoders.autoencoder_kl_qwenimage" in imported
    assert not {name for name in imported if name.split(".")[0] in ("peft", "bitsandbytes")}
    assert not {name for name in imported if name.startswith("qie.training")}


def test_a_disk_without_room_for_what_is_to_come_is_said_to_have_only_so_much(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, word in ((1, ", "), (10**18, ", only ")):
        monkeypatch.setattr("qie.precompute.overview.expected_bytes", lambda *_, size=size: size)
        told = run(config, "--output", tmp_path / "out", "--dry-run", "--end-idx", 1).stderr
        assert re.search(rf"to come{word}[0-9.]+ .?B free", told)


def test_worker_processes_silence_what_libraries_print_while_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open_rows", "open_encoder", "quick_turns", "spare_imports", "quiet_libraries"):
        monkeypatch.setattr(from_config, name, lambda *_, **__: None)
    library = logging.getLogger("torchao")
    monkeypatch.setattr(library, "level", logging.NOTSET)
    from_config.open_worker(Config.model_construct())
    assert library.level == logging.ERROR

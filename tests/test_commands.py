"""The four commands, one after the other, as a user types them, in one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from qie.cli import precompute, predict, stats, train
from qie.shards.index import read_index
from tests.conftest import AREA_PX, ROOT


def run(command, *arguments: object, code: int = 0):
    result = CliRunner().invoke(command.main, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def work(tiny_edit: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, and shards of all photographs."""
    folder = tmp_path_factory.mktemp("work")
    config = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 8, "lora_alpha": 8}},
        "data": {"source": str(photos), "area_px": AREA_PX, "allow_tiny": True},
        "cache": {"cache_dir": str(folder / "shards"), "vae_encoder_device": "cpu", "text_encoder_device": "cpu"},
        "train": {"max_steps": 6, "mixed_precision": "no", "output_dir": str(folder / "run")},
        "validation": {"rows": 2, "every": 3},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run(precompute, "--config", folder / "config.yaml", "--end-idx", 7, "--shard-size", 4)
    run(precompute, "--config", folder / "config.yaml", "--start-idx", 7, "--shard-size", 4)
    return folder


def test_precompute_says_what_it_did_and_a_second_run_does_nothing(work: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (work / "shards").iterdir() if path.is_file()}
    result = run(precompute, "--config", work / "config.yaml", "--shard-size", 4)
    assert result.stdout.startswith("12 rows: 0 samples encoded, 12 reused, 0 skipped; 0 shards written")
    assert {path.name: path.stat().st_mtime_ns for path in (work / "shards").iterdir() if path.is_file()} == before


def test_precompute_counts_skipped_rows_in_summary_and_exit_code(work: Path, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "rows")
    min((tmp_path / "rows" / "control_images").glob("*.png")).unlink()
    arguments = ["--config", work / "config.yaml", "--source", tmp_path / "rows", "--output", tmp_path / "shards"]
    result = run(precompute, *arguments, "--end-idx", 2, code=1)
    assert "2 rows: 1 sample encoded, 0 reused, 1 skipped" in result.stdout
    assert "no control image" in result.stderr and "next: qie" in result.stderr
    arguments += ["--output", tmp_path / "none", "--end-idx", 1]
    assert "next: " not in run(precompute, *arguments, code=1).stderr, "there is nothing to train on"


def test_stats_prints_the_same_summary_as_a_table_and_as_json(work: Path) -> None:
    values = json.loads(run(stats, work / "shards", "--json").stdout)
    table = run(stats, work / "shards", "--verify").stdout
    assert (values["rows"], values["samples"], values["faults"]) == (12, 12, [])
    assert values["ranges"] == [[0, 12]]
    assert "samples   12" in table and "verified" in table
    assert sum(values["tensor_bytes"].values()) < values["bytes"] / values["samples"]


def test_whoever_reads_the_output_may_leave(work: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "qie.cli.stats", work / "shards"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_stats_counts_the_images_of_which_only_the_first_frame_was_used(
    work: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "rows")
    control = sorted((tmp_path / "rows" / "control_images").glob("*.png"))[0]
    frame = Image.open(control).convert("RGB").resize((64, 64))
    frame.save(control.with_suffix(".gif"), save_all=True, append_images=[frame.rotate(90)])
    control.unlink()
    arguments = ["--config", work / "config.yaml", "--source", tmp_path / "rows", "--output", tmp_path / "shards"]
    run(precompute, *arguments, "--end-idx", 2)
    assert "note: 1 × control 1 has several frames: the first is used" in run(stats, tmp_path / "shards").stdout


def test_stats_finds_a_flipped_bit_with_verify_alone_and_still_summarises_the_rest(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work / "shards", tmp_path / "shards")
    compacted = tmp_path / "shards" / "index.safetensors"
    said = run(stats, tmp_path / "shards", "--compact").stdout
    assert said.startswith(f"compacted: {compacted}, 4 shards, 12 samples, ") and len(said.splitlines()) == 1
    compacted.unlink()
    victim = sorted((tmp_path / "shards").glob("*.tar"))[0]
    content = bytearray(victim.read_bytes())
    record = min(read_index(victim.with_suffix(".json")).files.values(), key=lambda member: member.offset)
    content[record.offset + record.size // 2] ^= 4
    victim.write_bytes(content)
    assert run(stats, tmp_path / "shards").exit_code == 0
    result = run(stats, tmp_path / "shards", "--verify", "--compact", code=1)
    assert "samples   12" in result.stdout
    assert not compacted.exists(), "what is damaged is not compacted"
    assert "fault: a record is damaged" in result.stderr and str(victim) in result.stderr


def metrics(output: Path, name: str) -> list[tuple[int, float | None]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def test_train_resume_then_predict_with_the_adapter(work: Path, photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = ["--config", work / "config.yaml", "--set", f"train.output_dir={output}"]
    assert "done after 6 steps" in run(train, *arguments, work / "shards").stdout
    assert [step for step, _ in metrics(output, "loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in metrics(output, "validation_loss")] == [0, 3, 6]
    assert "already holds a run" in run(train, *arguments, work / "shards", code=2).stderr
    run(train, *arguments, work / "shards", "--resume", "latest", "--set", "train.max_steps=8")

    image = next((photos / "control_images").glob("*.png"))
    request = ["--config", work / "config.yaml", "--image", image, "--prompt", "make it night", "--steps", 2]
    run(predict, *request, "--output", tmp_path / "plain.png")
    for name in ("tuned", "again"):
        run(predict, *request, "--output", tmp_path / f"{name}.png", "--lora", output / "checkpoint-000008")
    plain, tuned, same = (Image.open(tmp_path / f"{name}.png") for name in ("plain", "tuned", "again"))
    assert plain.size == tuned.size and plain.tobytes() != tuned.tobytes() == same.tobytes()
    assert json.loads(plain.text["qie"])["prompt"] == "make it night"


def test_training_that_writes_its_shards_follows_them_as_it_would_a_writer_beside_it(
    work: Path, tmp_path: Path
) -> None:
    config = ["--config", work / "config.yaml", "--set", "validation.rows=0", "--set", "train.max_steps=16"]
    written = [*config, "--set", f"cache.cache_dir={tmp_path / 'shards'}", "--set", "cache.write_through=true"]
    run(train, *written, "--set", "cache.use_cache=false", "--set", f"train.output_dir={tmp_path / 'through'}")
    run(train, *config, tmp_path / "shards", "--follow", "--set", f"train.output_dir={tmp_path / 'follow'}")
    assert metrics(tmp_path / "through", "loss") == metrics(tmp_path / "follow", "loss")
    samples = json.loads(run(stats, tmp_path / "shards", "--json").stdout)
    assert samples["samples"] == 12, "all rows were written, not only those that training took"


def test_following_needs_one_folder_and_a_source(work: Path, tmp_path: Path) -> None:
    arguments = ["--config", work / "config.yaml", "--set", f"train.output_dir={tmp_path / 'run'}", "--follow"]
    assert "one folder" in run(train, *arguments, work / "shards", work / "shards", code=2).stderr
    assert "data.source is not set" in run(train, *arguments, work / "shards", "--set", "data.source=", code=2).stderr


CHILD = """
import sys
import PIL.Image

def refuse(*arguments, **named):
    raise AssertionError("an image was opened")

PIL.Image.open = refuse
sys.argv[0] = "qie-train"
from qie.cli.train import main
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
loaded = {"qie.encode.encoder", "qie.encode.text", "qie.encode.vae", "qie.inference"} & set(sys.modules)
assert not loaded, loaded
"""


def test_training_on_shards_opens_no_image_and_loads_no_encoder(work: Path, tiny_edit: Path, tmp_path: Path) -> None:
    """Neither could it: the photographs are elsewhere, and the model holds a transformer and a scheduler alone."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(tiny_edit / "model_index.json", model)
    for component in ("transformer", "scheduler"):
        shutil.copytree(tiny_edit / component, model / component)
    overrides = {
        "model.pretrained_model_name_or_path": model,
        "data.source": tmp_path / "gone",
        "train.output_dir": tmp_path / "run",
        "train.max_steps": 2,
    }
    settings = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    arguments = [sys.executable, "-c", CHILD, work / "shards", "--config", work / "config.yaml", *settings]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "done after 2 steps" in done.stdout


def test_a_dry_run_tells_what_a_run_would_do_and_reads_no_weights(work: Path, tiny_edit: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_edit, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = ["--config", work / "config.yaml", "--dry-run", "--set", f"train.output_dir={tmp_path / 'run'}"]
    config += ["--set", f"model.pretrained_model_name_or_path={model}", "--set", "train.mixed_precision=bf16"]
    here = ["--set", "data.source="]
    told = run(train, *config, *here, work / "shards", "--gpu", "RTX 4090").stdout
    assert "samples     10 of at most " in told and "steps       6 of 1 samples, 0.6 epochs" in told
    assert "blocks      2: 2 kept" in told and "of 24.0 GB, RTX 4090" in told and "the run     about 0." in told
    assert not (tmp_path / "run").exists()
    assert "samples     10 of" in run(train, *config, *here).stdout, "those of cache.cache_dir"
    told = run(train, *config, "--set", f"cache.cache_dir={tmp_path / 'shards'}").stdout
    assert "samples     not encoded yet" in told and "no GPU is here" in told
    assert "not encoded yet" in run(train, *config, "--set", "cache.use_cache=false").stdout


def test_a_dry_run_for_a_gpu_that_is_too_small_or_unknown_is_refused(work: Path) -> None:
    config = ["--config", work / "config.yaml"]
    refused = run(train, *config, "--dry-run", "--vram", "0.5", work / "shards", "--set", "data.source=", code=1)
    assert "total " in refused.stdout and "needs more memory than the GPU has" in refused.stderr
    assert "no GPU of this name" in run(train, *config, "--dry-run", "--gpu", "Voodoo 2", code=2).stderr
    assert "'--vram'" in run(train, *config, "--dry-run", "--vram", "-3", code=2).stderr
    assert "belong to a dry run" in run(train, *config, "--gpu", "H100", code=2).stderr


def test_shards_of_another_recipe_are_trained_on_when_that_is_accepted_and_run_json_says_so(
    work: Path, tmp_path: Path
) -> None:
    changed = ["--set", "data.text_area_px=4096", "--set", f"train.output_dir={tmp_path}", "--set", "train.max_steps=1"]
    assert "text_area_px" in run(train, "--config", work / "config.yaml", *changed, code=2).stderr
    assert not (tmp_path / "run.json").exists()
    run(train, "--config", work / "config.yaml", *changed, "--accept-recipe")
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["accepted"] == ["text_area_px (data.text_area_px): 4096 by the configuration, None in the shards"]


def test_the_validation_loss_falls_clearly(work: Path, tmp_path: Path) -> None:
    targets = "[to_q, to_k, to_v, to_out.0, net.0.proj, net.2]"
    arguments = [f"train.output_dir={tmp_path}", "train.max_steps=120", "optimizer.init_args={lr: 5e-3}"]
    arguments += [f"model.lora.target_modules={targets}", "validation.every=120", "lr_scheduler.warmup_steps=5"]
    arguments.append("train.gradient_checkpointing=false")
    run(train, "--config", work / "config.yaml", *(word for item in arguments for word in ("--set", item)))
    (_, before), (_, after) = metrics(tmp_path, "validation_loss")
    assert after < 0.85 * before

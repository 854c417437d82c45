"""`qie init`: a configuration that fits a model, rows and a GPU."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from PIL import Image

from qie import first_config
from qie.cli import one_command
from qie.config import SCHEMA_FILE, Config, load_config
from qie.errors import UsageError
from qie.families import FAMILIES
from qie.first_config import areas_for, choose_plan, largest_run, model_of, plans, sample_rows
from qie.from_config import open_rows
from qie.precompute import precompute
from qie.training.memory import estimate
from tests.sources import test_layouts as layouts
from tests.sources.tables import write_tar
from tests.stubs import StubEncoder

KINDS = ["csv", "jsonl", "parquet", "dataset", "tar", "folder"]
COUNT = 3


def answer(command: str, *arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(one_command.main, [command, *map(str, arguments)], prog_name="qie")
    assert done.exit_code == code, done.output
    return done.output


def picture(colour: str, size: tuple[int, int] = (48, 32)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def pairs(place: Path, size: tuple[int, int] = (48, 32), count: int = COUNT, controls: int = 1) -> Path:
    """A folder of rows in qie's own names."""
    for folder in ("training_images", "control_images"):
        (place / folder).mkdir(parents=True)
    for number in range(count):
        (place / "training_images" / f"{number}.png").write_bytes(picture("teal", size))
        (place / "training_images" / f"{number}.txt").write_text("make it teal")
        for control in range(controls):
            name = f"{number}.png" if not control else f"{number}_control_{control}.png"
            (place / "control_images" / name).write_bytes(picture("navy"))
    return place


def laid_out(kind: str, root: Path) -> Path:
    """The same rows as a source of any kind."""
    place = pairs(root / "photos")
    if kind == "folder":
        return place
    files = [
        (f"photos/training_images/{n}.png", f"photos/control_images/{n}.png", "make it teal") for n in range(COUNT)
    ]
    rows = [dict(zip(("path_target", "path_control", "prompt"), row, strict=True)) for row in files]
    file = root / f"rows.{kind}"
    if kind == "csv":
        file.write_text("\n".join([",".join(rows[0]), *map(",".join, files)]))
    elif kind == "jsonl":
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "dataset":
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(root / "rows")
        datasets.enable_progress_bars()
        shutil.move(place, root / "rows")
        return root / "rows"
    else:
        parts = {"target.png": picture("teal"), "control.png": picture("navy"), "txt": b"make it teal"}
        write_tar(file, [(f"{number}.{end}", content) for number in range(COUNT) for end, content in parts.items()])
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_for_a_source_of_any_kind_loads_and_opens_its_rows(
    kind: str, tiny_edit: Path, tmp_path: Path
) -> None:
    place, file = laid_out(kind, tmp_path), tmp_path / "new.yaml"
    told = answer("init", "--model", tiny_edit, "--source", place, "--vram", 24, "--output", file)
    assert told.splitlines()[-1] == f"next: qie precompute --config {file} --dry-run"
    rows = open_rows(load_config(file))
    assert len(rows) == COUNT and len(rows.read(0).controls) == 1 and rows.read(0).prompt == "make it teal"
    assert file.read_text().startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_what_is_written_for_data_as_people_have_it_encodes_every_row_without_an_edit(
    layout: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "target", lambda number: picture("teal", (48, 32 + number)))
    monkeypatch.setattr(layouts, "control", lambda number: picture("navy", (48, 32 + number)))
    model = request.getfixturevalue("tiny_21" if layout == "kohya" else "tiny_edit")
    place, file = layouts.LAYOUTS[layout][0](tmp_path / "in"), tmp_path / "new.yaml"
    answer("init", "--model", model, "--source", place, "--vram", 24, "--output", file)
    report = precompute(open_rows(load_config(file)), StubEncoder(), tmp_path / "out", rows=(0, COUNT))
    assert (report.encoded, report.skipped) == (COUNT, [])


def test_what_is_written_for_each_family_passes_a_dry_run(tiny_model: Path, family: str, tmp_path: Path) -> None:
    place, file = pairs(tmp_path / "photos", (1100, 1000)), tmp_path / "new.yaml"
    answer("init", "--model", tiny_model, "--source", place, "--vram", 24, "--output", file)
    config = load_config(file)
    assert config.data.area_px is None and (config.train.draws_per_sample > 1) is (family == "qwen_image_21")
    told = answer("train", "--config", file, "--dry-run", "--vram", 24, "--quiet")
    assert "steps       500 of " in told


def test_a_file_is_overwritten_only_with_force_and_what_is_wrong_is_told_before_one_is_written(
    tiny_edit: Path, tmp_path: Path
) -> None:
    place, file = pairs(tmp_path / "photos"), tmp_path / "new.yaml"
    file.write_text("mine")
    words = ["--model", tiny_edit, "--source", place, "--output", file]
    assert "the file exists already" in answer("init", *words, code=2) and file.read_text() == "mine"
    answer("init", *words, "--force")
    assert Config.model_validate(load_config(file).model_dump())
    several, other = pairs(tmp_path / "several", controls=2), tmp_path / "other.yaml"
    words = ["--output", other, "--model", tiny_edit, "--source"]
    assert "takes 1 control, and rows have 2" in answer("init", *words, several, code=2)
    assert "nowhere" in answer("init", *words, tmp_path / "nowhere", code=2)
    assert "fits" in answer("init", *words, place, "--vram", 0.5, code=2)
    for image in (place / "training_images").glob("*.png"):
        image.write_bytes(b"")
    assert "none of the first rows can be read" in answer("init", *words, place, code=2)
    assert not other.exists()


RELEASED_PLANS = {
    "Qwen/Qwen-Image-Edit-2511": {96: (None, 0), 40: ("fp8", 0), 24: ("nf4", 0), 12: ("fp8", 60)},
    "Qwen/Qwen-Image-2.1": {80: (None, 0), 24: (None, 20), 16: (None, 32)},
}


@pytest.mark.parametrize("name", RELEASED_PLANS)
def test_a_released_model_is_stored_as_its_gpu_allows_and_nothing_is_asked_for_its_sizes(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if first_config.RELEASED[name] == "qwen_image_21":
        request.getfixturevalue("tiny_21")  # skipped where diffusers is older
    with model_of(name) as pretrained:
        rows = sample_rows(str(pairs(tmp_path / "photos", (1100, 1000))), pretrained.family)
        run = largest_run(pretrained, rows)
        for vram, (quantize, offloaded) in RELEASED_PLANS[name].items():
            plan, setup = choose_plan(run, pretrained.family, vram)
            assert (plan.quantize, plan.offload_blocks) == (quantize, offloaded), vram
            assert estimate(setup).total < vram * 1e9
        with pytest.raises(UsageError, match="no way that qie knows"):
            choose_plan(run, pretrained.family, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_take_less_and_less_of_the_gpu(family: str) -> None:
    found = list(plans(FAMILIES[family], 32))
    assert found[0].quantize is None and found[0].offload_blocks == 0
    assert found[-1].halved and found[-1].offload_blocks == 32
    assert len({plan.why for plan in found}) == len(found)


def test_areas_are_those_of_the_images_and_enlarge_none(tmp_path: Path) -> None:
    edit = FAMILIES["edit"]
    place = pairs(tmp_path / "photos", (520, 520))
    (place / "training_images" / "0.png").write_bytes(picture("teal", (2000, 1000)))
    rows = sample_rows(str(place), edit)
    assert areas_for(rows, edit) == [1024 * 1024, 512 * 512]
    assert rows.controls == (1, 1) and rows.words == 3 and rows.place.rows == COUNT


def test_names_of_files_neither_end_a_comment_nor_are_looked_up_in_the_environment(
    tiny_edit: Path, tmp_path: Path
) -> None:
    place, file = pairs(tmp_path / "a: [${HOME} #x\u202e"), tmp_path / "ne\u202ew.yaml"
    answer("init", "--model", tiny_edit, "--source", place, "--output", file)
    assert load_config(file).data.source == str(place)
    assert not re.search("[\u202e]", file.read_text().partition("model:")[0])

"""benchmarks/gpu.py at tiny size on a CPU, every branch; and what becomes of measurements that die or hang."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.conftest import ROOT

FOLDER = str(ROOT / "benchmarks")
WORKER = f"""
import os, signal, sys
sys.path.insert(0, {FOLDER!r})
from on_gpu.process import serve

def measured(name):
    if name == "dies":
        print("killed by the driver", flush=True)
        os._exit(3)
    if name == "hangs":
        signal.pause()
    return {{"rows": [], "process": os.getpid(), "spent": name == "spends"}}

serve(int(sys.argv[1]), measured)
"""


@pytest.fixture(scope="module", autouse=True)
def scripts_are_importable():
    sys.path.insert(0, FOLDER)
    yield
    sys.path.remove(FOLDER)


def apart(names: list[str], folder: Path, code: str = WORKER, minutes: float = 60) -> dict:
    from on_gpu.process import apart

    wanted = [
        SimpleNamespace(name=name, limit_s=1 if name == "hangs" else 300, alone=name == "alone") for name in names
    ]
    command, deadline = [sys.executable, "-c", code], time.monotonic() + 60 * minutes
    return {one.name: line for one, line in apart(command, wanted, deadline, folder / "printed.txt")}


def test_a_measurement_that_dies_or_hangs_loses_its_own_line_and_the_next_gets_another_process(tmp_path: Path) -> None:
    lines = apart(["one", "two", "dies", "three", "hangs", "spends", "four", "alone"], tmp_path)
    assert "ended with 3: killed by the driver" in lines["dies"]["error"]
    assert lines["hangs"]["error"] == "took longer than 1 s"
    processes = [lines[name]["process"] for name in ("one", "two", "three", "spends", "four", "alone")]
    assert processes[0] == processes[1] and len(set(processes)) == 5


def test_what_has_no_time_left_has_no_line_and_a_process_that_does_not_start_ends_all(tmp_path: Path) -> None:
    assert apart(["one"], tmp_path, minutes=0) == {"one": None}
    with pytest.raises(RuntimeError, match="does not start: ImportError: no such library"):  # its last line
        apart(["one"], tmp_path, "raise ImportError('no such library')")


def test_each_measurement_runs_at_tiny_size_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu
    import torch
    from on_gpu import table

    monkeypatch.setattr(torch, "compile", lambda work, **_: work)  # compiling takes minutes
    # Options with torch.compile are here the same as without; steps of options are those of their checks.
    compiled = [name for name, option in table.OPTIONS.items() if table.COMPILE in option.settings]
    same = [f"{what} {name}" for what in ("check", "step") for name in compiled if name != "compiled"]
    steps = ("default", "four unequal texts", "offloaded", "2.1, four draws")
    same += [f"step {name}" for name in table.OPTIONS if name not in steps]
    same += [f"step of 24 GB, {name}" for name in table.SMALL_CARD[1:]]
    wanted = [name for name in gpu.MEASUREMENTS if name not in same]
    file = tmp_path / "lines.json"
    words = ["--size", "tiny", "--in-process", "--work", str(tmp_path / "work"), "--out", str(file), "--only", *wanted]
    assert gpu.main(words) == 0
    lines = {line["name"]: line for line in gpu.read(file)}
    assert list(lines) == wanted
    errors = {name: line["error"] for name, line in lines.items() if "error" in line}
    kernels = {name for name in wanted if gpu.MEASUREMENTS[name].needs == "cuda"}
    assert {name for name, error in errors.items() if error.endswith("it needs a GPU")} == kernels
    assert errors.keys() == kernels, errors


def test_random_weights_are_made_in_bfloat16_and_are_the_same_in_float32(tiny_edit: Path) -> None:
    import torch
    from models import QwenImageTransformer2DModel, random_weights

    folder, dtypes = tiny_edit / "transformer", (torch.bfloat16, torch.float32)
    with random_weights(torch.device("cpu")):
        made = [QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=dtype) for dtype in dtypes]
    assert torch.get_default_dtype() == torch.float32
    half, full = (dict(model.named_parameters()) for model in made)
    assert {weight.dtype for weight in half.values()} == {torch.bfloat16}
    assert all(torch.equal(weight.float(), full[name]) for name, weight in half.items())
    assert max(float(weight.std()) for weight in full.values()) > 0.01


class Event:
    """Of a GPU whose steps take 1.5 s each."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def elapsed_time(self, other: Event) -> float:
        return 1500.0 * (other.at - self.at)


def test_a_step_on_a_gpu_is_told_with_its_memory_waits_and_share_of_the_peak(tmp_path: Path) -> None:
    import torch
    from on_gpu import step
    from on_gpu.bench import SCALES, Place

    place = Place(tmp_path, SCALES["tiny"])
    place.__dict__["device"] = torch.device("cuda:0")
    bytes_of = {"memory_reserved": 60e9, "max_memory_reserved": 62e9, "max_memory_allocated": 50e9}
    with (
        mock.patch.multiple(
            "torch.cuda",
            Event=Event,
            mem_get_info=lambda *_: (19e9, 80e9),
            get_device_name=lambda *_: "NVIDIA H100 80GB HBM3",
            set_sync_debug_mode=mock.DEFAULT,
            reset_peak_memory_stats=mock.DEFAULT,
            synchronize=mock.DEFAULT,
            **{name: mock.Mock(return_value=value) for name, value in bytes_of.items()},
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        values = step.timed(lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1), place)
        values |= {"estimate_bytes": 52e9, "model_flop": 989e12 * 0.6, "dry_run_s": 1.234}
        row = step.row("step", "qie", values, step.told(values, place))
    assert row.value == 1.5 and row.runs == 3 and values["waits"] == 1
    memory = "51.0 GB with CUDA's context, 62.0 GB reserved, estimated 52.0 GB"
    assert row.detail.startswith(f"{memory}, --dry-run says 1.23 s, MFU 40.0 %, 1 waits of the host, first step ")


def test_a_smaller_card_is_a_part_of_the_gpu_and_checkpointing_fills_that_part(tmp_path: Path) -> None:
    import torch
    from measuring import absolute
    from on_gpu import step
    from on_gpu.bench import SCALES, Found, Place

    place, seen = Place(tmp_path, SCALES["tiny"]), []
    place.__dict__["device"] = torch.device("cuda:0")

    def option(place, name):
        seen.append(torch.cuda.mem_get_info())
        return Found([absolute(f"step {name}", "a training step", [1.0], " s")], {})

    with (
        mock.patch.multiple(
            "torch.cuda",
            get_device_properties=lambda *_: SimpleNamespace(total_memory=46 << 30),
            set_per_process_memory_fraction=mock.DEFAULT,
            memory_reserved=lambda *_: 1 << 30,
            empty_cache=mock.DEFAULT,
        ) as calls,
        mock.patch.object(step, "option", option),
        mock.patch.object(step, "random_weights"),
        mock.patch.object(step.QwenImageTransformer2DModel, "from_pretrained"),
        mock.patch.object(Place, "bench"),
    ):
        (row,) = step.small_card(place, "nf4 weights", 24).rows
    assert calls["set_per_process_memory_fraction"].call_args.args[0] == 0.5 and seen == [(22 << 30, 24 << 30)]
    assert row.what == "a training step, in 23 of 24 GiB" and row.key == "step 24 nf4 weights"


def test_a_call_goes_on_where_the_last_one_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu

    file, asked = tmp_path / "lines.json", []

    def in_workers(wanted, options):
        asked.append([one.name for one in wanted])
        yield wanted[0], {"rows": [], "took_s": 1.0, "spent": False}
        yield wanted[1], None

    with mock.patch.object(gpu, "in_workers", in_workers):
        words = ["--out", str(file), "--work", str(tmp_path), "--only", "machine", "copy", "products*"]
        gpu.main(words)
        with file.open("a") as out:
            out.write('{"name": "copy", "sec')  # the machine was taken away
        gpu.main([*words, "--skip-done"])
    assert asked == [["machine", "copy", "products bf16", "products fp8"], ["copy", "products bf16", "products fp8"]]
    assert "no time for 1: copy\ngo on with --skip-done" in capsys.readouterr().out
    assert [line["name"] for line in gpu.read(file)] == ["machine", "copy"]
    assert "spent" not in json.loads(file.read_text().splitlines()[0])


MACHINE = {"gpu": "NVIDIA H100", "cuda": "13.0", "cpu": "CPU", "cores": 16, "memory_gb": 128, "threads": 8, "load": 0.1}


def line(name: str, *rows, **more) -> dict:
    found = {"name": name, "at": "2026-12-01T10:00:00+00:00", "took_s": 20.0, "rows": [vars(row) for row in rows]}
    return found | more


def finished(**machine) -> list[dict]:
    """Lines of a GPU that was taken away, with a step that was measured twice."""
    from measuring import absolute

    values = {"machine": MACHINE, "versions": {"torch": "2.11"}, "size": "full"} | machine
    return [
        line("machine", values=values),
        line("step plain", absolute("step plain", "a training step, plain", [2.0, 1.9, 2.1], " s")),
        line("step default", rows=[], error="out of memory"),
        line("step default", absolute("step default", "a training step, qie", [1.0, 0.9, 1.1], " s", detail="40 GB")),
        line("step compiled", rows=[], error="Error: a | b"),
        line("step plain 2.1", absolute("step plain 2.1", "a training step, plain, 2.1", [1.0], " s")),
        line("step 2.1, four draws", absolute("step 2.1, four draws", "a training step, four draws", [2.0], " s")),
        line("encode rows", absolute("encode", "encoding by qie-precompute", [12.0], " rows/s")),
        line("encode rows plain", absolute("encode plain", "encoding by diffusers", [4.0], " rows/s")),
    ]


def test_a_finished_file_becomes_rows_of_the_docs_and_what_was_not_measured_is_told(tmp_path: Path) -> None:
    import gpu

    file, written = tmp_path / "lines.json", []
    file.write_text("".join(json.dumps(one) + "\n" for one in finished()))
    with mock.patch("run.write", lambda data, place: written.append(data)):
        assert gpu.main(["--take", str(file)]) == 0
    from on_gpu.table import OPTIONS
    from run import SCRIPTS
    from tables import INDEX, PAGE, README, compared

    pages = compared(written[0], SCRIPTS)
    page = pages[PAGE]
    assert (
        "| a training step, qie | a plain loop of diffusers and peft, all blocks checkpointed | **2.00× as fast** |"
        in page
    )
    if "2.1" in OPTIONS:
        expected = (
            "| a training step, four draws | 4 steps of a plain loop of diffusers and peft, all blocks checkpointed |"
        )
        assert f"{expected} **2.00× as fast** |" in page
    assert "| 1.73 to 2.33 | 3 | 1.00 s, peer 2.00 s; 40 GB |" in page
    assert "| step compiled | – | not measured |  |  | Error: a / b |" in page
    assert "| check default | – | not measured |  |  | no time |" in page and "| machine |" not in page
    assert "- NVIDIA H100 (CUDA 13.0), CPU" in page
    expected = "On one NVIDIA H100, with random weights, a training step of the released shapes is **2.00× as fast** as"
    assert expected in pages[README] and "encoded **3.00× as fast** as by diffusers'" in pages[README]
    assert all("On a GPU (NVIDIA H100) it has run" in pages[place] for place in (README, INDEX))


@pytest.mark.parametrize("machine", [{"size": "tiny"}, {"machine": {"cpu": "CPU"}}])
def test_what_was_not_measured_on_a_gpu_is_not_taken(
    machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    file = tmp_path / "lines.json"
    file.write_text("".join(json.dumps(one) + "\n" for one in finished(**machine)))
    assert gpu.main(["--take", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_dry_run_takes_each_option_at_full_size_to_the_fake_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """What the fake GPU finds is tested in training/test_fake_cuda.py."""
    import gpu

    from tests.training import fake_gpu

    cases = []

    def measured(some, model, library):
        cases.extend(some)
        parts = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), 0.0) | {
            "workspace": 3e9 + (1 << 30)
        }
        return [fake_gpu.Measured(peak=int(2e9), estimated=parts, recomputed="9 of 60 blocks are recomputed")]

    with mock.patch.object(fake_gpu, "measured", measured), mock.patch.object(fake_gpu, "build_belief"):
        assert gpu.main(["--fake", "60"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("default: 2.0 GB of tensors, estimated 3.0; 9 of 60 blocks are recomputed; 0 TFLOP")
    assert len(told) == len(cases) >= 12 and all(case.blocks == 60 and case.size == 1024 for case in cases)
    assert {case.text_tokens for case in cases if case.family == "edit"} == {(1398,), (1398, 1385, 1410, 1392)}
    assert any(case.budget_bytes for case in cases) and any(len(case.controls) == 3 for case in cases)

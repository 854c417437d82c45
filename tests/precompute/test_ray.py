"""On a Ray cluster of two nodes: what one process writes, although workers and a node die. In a process of its own, for
Ray leaves traces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qie.errors import UsageError
from qie.precompute import precompute
from qie.precompute.ray import require_a_slot, slots_of
from tests.conftest import ROOT
from tests.precompute import openers
from tests.stubs import StubEncoder

pytest.importorskip("ray")

ROWS, SHARD_SIZE, TIMEOUT_S = 60, 4, 300

# Prints a line of JSON for each scenario. All on one cluster, for to start one takes longer than all of them.
SCRIPT = """
import json, logging, sys, time, warnings
from functools import partial
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from qie.precompute import Settings
from qie.precompute.ray import gpus_of, precompute_on_ray
from qie.stores import open_folder
from tests.precompute import openers

work, session = Path(sys.argv[1]), sys.argv[2]
head = dict(num_cpus=0, num_gpus=0, include_dashboard=False, temp_dir=session,
            _system_config={"health_check_period_ms": 1000})  # dead after five refused; a slow one has as long as ever
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(2):
    cluster.add_node(num_cpus=1, num_gpus=0)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)

def say(name, **values):
    print(json.dumps({"name": name} | values), flush=True)

def run(name, opener, gpus=0, rows=ROWS, follow=lambda rows: None, **settings):
    seen, started, warned = [], time.monotonic(), []
    warnings.showwarning = lambda message, *_: warned.append(str(message))

    def progress(report):
        seen.append(report.rows)
        follow(report.rows)

    try:
        report = precompute_on_ray(
            opener, open_folder(work / name), rows=(0, rows), gpus=gpus, shard_size=SHARD_SIZE,
            settings=Settings(**settings), progress=progress,
        )
    except Exception as error:
        say(name, error=type(error).__name__, base=[kind.__name__ for kind in type(error).__mro__], text=str(error))
    else:
        wall = time.monotonic() - started
        workers = {stage: load.workers for stage, load in report.loads.items()}
        skipped_rows = [gone.row for gone in report.skipped]
        say(name, seen=seen, wall=wall, workers=workers, skipped_rows=skipped_rows, warned=warned, **report.to_dict())

run("plain", partial(openers.plain, ROWS))
run("plain", partial(openers.plain, ROWS))
run("dying", partial(openers.dying, ROWS, 30, str(work / "once"), str(work / "notes")))
run("refusing", partial(openers.refusing, ROWS, 33), on_error="stop")
run("gpus", partial(openers.plain, ROWS), gpus=1)
run("slow", partial(openers.slow, 32), rows=32)
say("counts", found=[gpus_of("auto", "auto"), gpus_of("cpu", "cpu"), gpus_of("cuda:0", "cuda:0"),
                     gpus_of("cuda:0", "cuda:1"), gpus_of("cpu", "cuda:0")])

nodes = [cluster.add_node(num_cpus=1, num_gpus=1)]

def change(rows):
    if len(nodes) == 1:
        nodes.append(cluster.add_node(num_cpus=1, num_gpus=1))
    elif nodes[0]:  # the other one has done a task
        cluster.remove_node(nodes[0], allow_graceful=False)
        nodes[0] = None

run("changing", partial(openers.first_waiting, ROWS, str(work / "opened")), gpus=1, follow=change)
gone = time.monotonic() + 60  # the head learns of a dead node from its silence
while (left := sum(node["Alive"] for node in ray.nodes())) > 4 and time.monotonic() < gone:
    time.sleep(0.1)
say("left", nodes=left)

ray.shutdown()
cluster.shutdown()
""".replace("ROWS", str(ROWS)).replace("SHARD_SIZE", str(SHARD_SIZE))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def processes_of(session: str) -> list[int]:
    """Processes that name this cluster's folder on their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if session.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [process for process in found if process != os.getpid()]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict]]]:
    """What the scenarios said, and the folder that they wrote to."""
    work = tmp_path_factory.mktemp("ray")
    session = tempfile.mkdtemp(prefix="qr", dir="/tmp")  # short: sockets lie there
    (Path(session) / "ray").mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_TMPDIR": session,  # else the cluster's address lies where every other cluster of the machine puts its own
    }
    environment.pop("RAY_ADDRESS", None)
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, work, session],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        try:
            out, err = child.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate(timeout=30)
            pytest.fail(f"it did not end within {TIMEOUT_S} s\n{out}\n{err}")
        assert child.returncode == 0, f"{out}\n{err}"
        yield work, [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        left = processes_of(session)
        assert left == [], "processes of Ray are left"
    finally:
        for process in processes_of(session):
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(session, ignore_errors=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    precompute(openers.rows(ROWS), StubEncoder(), folder, rows=(0, ROWS), shard_size=SHARD_SIZE)
    return files(folder)


def of(told: tuple[Path, list[dict]], name: str) -> list[dict]:
    return [one for one in told[1] if one["name"] == name]


def test_tasks_write_the_files_that_one_process_writes(told, whole: dict[str, bytes]) -> None:
    first, second = of(told, "plain")
    assert "error" not in first, first
    assert files(told[0] / "plain") == whole
    assert (first["rows"], first["encoded"], first["skipped"], first["shards_written"]) == (60, 58, 2, 15)
    assert first["seen"] == sorted(first["seen"]) and first["seen"][-1] == 60
    assert first["skipped_rows"] == [7, 20], "in their order"
    assert (second["encoded"], second["reused"], second["skipped"], second["shards_kept"]) == (0, 58, 2, 15)


def test_a_task_whose_worker_was_killed_is_tried_again_and_goes_on_where_it_was(told, whole: dict[str, bytes]) -> None:
    (report,) = of(told, "dying")
    assert "error" not in report, report
    assert (told[0] / "once").exists(), "no worker was killed"
    assert files(told[0] / "dying") == whole
    assert (report["rows"], report["skipped"]) == (60, 2)
    assert report["encoded"] + report["reused"] == 58
    assert report["warned"] == ["a worker of the Ray cluster died: its shards from row 28 to 32 go to another"]


def test_a_node_that_joins_late_gets_work_and_the_tasks_of_one_that_dies(told, whole: dict[str, bytes]) -> None:
    (report,), (left,) = of(told, "changing"), of(told, "left")
    assert "error" not in report, report
    assert left["nodes"] == 4, "the first node with a GPU is still there"
    assert files(told[0] / "changing") == whole
    assert (report["rows"], report["encoded"] + report["reused"], report["skipped"]) == (60, 58, 2)
    assert "a worker of the Ray cluster died: its shards from row 4 to 8 go to another" in report["warned"]


def test_each_worker_opens_its_encoder_once_for_all_its_tasks(told) -> None:
    opened = (told[0] / "opened").read_text().split()
    assert len(opened) == len(set(opened)) == 2


def test_an_error_of_a_task_arrives_as_it_is(told) -> None:
    (failure,) = of(told, "refusing")
    assert failure["error"] == "RowError", failure
    assert "row 33 (row33)" in failure["text"] and "it is not wanted" in failure["text"]


def test_a_task_that_no_node_can_run_is_an_error_of_usage(told) -> None:
    (failure,) = of(told, "gpus")
    assert failure["error"] == "UsageError", failure
    assert "no node of the Ray cluster has enough GPUs for one task" in failure["text"]
    assert "1 × (0 GPUs, 0 CPUs), 2 × (0 GPUs, 1 CPUs)" in failure["text"]
    assert not (told[0] / "gpus").exists()


def node(alive: bool = True, **resources: float) -> dict:
    return {"Alive": alive, "Resources": resources}


def test_nodes_of_one_gpu_cannot_run_a_task_of_two() -> None:
    with pytest.raises(UsageError, match="no node of the Ray cluster has enough GPUs") as refused:
        require_a_slot([node(CPU=1.0, GPU=1.0)] * 2, 2)
    assert "2 × (1 GPUs, 1 CPUs)" in str(refused.value) and "name one device for both" in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "slots"), [(0, 14), (1, 6), (2, 3)], ids=["on CPUs", "of one GPU", "of two GPUs of one node"]
)
def test_slots_are_those_of_each_living_node(gpus: int, slots: int) -> None:
    nodes = [node(), node(CPU=8.0, GPU=1.0), node(CPU=2.0, GPU=4.0), node(CPU=4.0, GPU=3.0)]
    assert slots_of([*nodes, node(alive=False, CPU=8.0, GPU=8.0)], gpus) == slots


def test_rates_are_of_the_time_that_passed_in_the_slots_of_the_cluster(told) -> None:
    """Not of the longest task's: several follow each other in each of two slots, in which a sample takes 0.05 s."""
    (report,) = of(told, "slow")
    assert 32 * 0.05 / 2 <= report["seconds"] <= report["wall"]
    assert report["rows_per_s"] == pytest.approx(32 / report["seconds"], rel=0.01)
    assert report["workers"]["encode"] == 2
    assert report["stages"]["encode"]["items_per_busy_s"] <= 2 / 0.05 and report["stages"]["encode"]["busy"] <= 1


def test_a_task_takes_as_many_gpus_as_its_devices_name(told) -> None:
    assert of(told, "counts")[0]["found"] == [0, 0, 1, 2, 1]

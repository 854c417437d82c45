"""On a Ray cluster of three raylets, two of them with a GPU that is none: what one process writes, whatever dies. In
processes of their own, for Ray leaves traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from qie.errors import UsageError
from qie.precompute import Report, precompute
from qie.precompute.ray import _Hand, _require_reachable, _Workers, gpus_of, places_of, require_a_place
from qie.stages import Load
from tests.conftest import ROOT
from tests.precompute import openers
from tests.stubs import StubEncoder

pytest.importorskip("ray")

ROWS, SHARD_SIZE, TIMEOUT_S = 240, 4, 300

# A run that is ended from outside.
DRIVER = """
import sys
from functools import partial
from qie.cli.common import explained
from qie.precompute.ray import precompute_on_ray
from qie.stores import open_folder
from tests.precompute import openers

@explained
def main():
    precompute_on_ray(partial(openers.waiting_at, ROWS, int(sys.argv[2])), open_folder(sys.argv[1]), rows=(0, ROWS),
                      devices=("cuda:0", "auto"), shard_size=SHARD_SIZE)

main()
""".replace("ROWS", str(ROWS)).replace("SHARD_SIZE", str(SHARD_SIZE))

# Prints a line of JSON for each scenario. All on one cluster, for to start one takes longer than all of them.
SCRIPT = """
import json, os, signal, subprocess, sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
import qie.precompute.ray
from qie.precompute import Settings
from qie.precompute.ray import precompute_on_ray
from qie.stores import open_folder
from tests.precompute import openers

qie.precompute.ray.REMIND_S, qie.precompute.ray.LOOK_S, qie.precompute.ray.REPORT_EVERY_S = 0, 0.2, 0.1
work, session, driver = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
# Refused five times, a node is dead; a slow one has as long as ever.
head = dict(num_cpus=0, num_gpus=0, include_dashboard=False, temp_dir=session,
            _system_config={"health_check_period_ms": 500, "health_check_initial_delay_ms": 500})
cluster = Cluster(initialize_head=True, head_node_args=head)
os.environ["RAY_ADDRESS"] = cluster.address

def say(name, **values):
    print(json.dumps({"name": name} | values), flush=True)

# Nodes come and go in the main thread only, for Ray handles signals.
calls = SimpleQueue()

def node_call(work, **arguments):
    done = Future()
    calls.put((work, arguments, done))
    return done.result()

def run(*arguments, **named):
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(encode, *arguments, **named)
        ended.add_done_callback(lambda _: calls.put(None))
        while call := calls.get():
            work, arguments, done = call
            done.set_result(work(**arguments))
        ended.result()

def encode(name, opener, folder=None, follow=lambda rows: None, hear=lambda line: None, **settings):
    seen, said = [], []

    def progress(report):
        seen.append(report.rows)
        follow(report.rows)

    def tell(line):
        said.append(line)
        hear(line)

    try:
        report = precompute_on_ray(
            opener, open_folder(work / (folder or name)), rows=(0, ROWS), devices=("cuda:0", "cuda:0"),
            shard_size=SHARD_SIZE, settings=Settings(**settings), progress=progress, say=tell,
        )
    except Exception as error:
        say(name, said=said, error=type(error).__name__, text=str(error))
    else:
        skipped_rows = [gone.row for gone in report.skipped]
        say(name, seen=seen, said=said, skipped_rows=skipped_rows, **report.to_dict())

# From no GPU to one and two, of which the first dies.
notes, nodes = work / "notes", []
notes.mkdir()

def demands():
    asked = get_cluster_resource_state(GcsClient(cluster.address)).pending_resource_requests
    return [(dict(one.request.resources_bundle), one.count) for one in asked]

def hear(line):
    if line.startswith("waiting"):
        if hear.waited == 1:
            openers.until(lambda: sum(count for _, count in demands()) == 7)
            say("demands", found=demands())
            nodes.append(node_call(cluster.add_node, num_cpus=1, num_gpus=1))
            qie.precompute.ray.REMIND_S = 60
        hear.waited += 1
    elif "died" in line:
        (notes / "told").touch()
hear.waited = 0

def follow(rows):
    if len(nodes) == 1 and rows >= 42:
        nodes.append(node_call(cluster.add_node, num_cpus=1, num_gpus=1))
        say("joined", left=ROWS - rows)
    if len(nodes) == 2 and nodes[0] and sum(done()) >= 100:
        say("killing", first=done()[0], late=done()[1])
        node_call(cluster.remove_node, node=nodes[0], allow_graceful=False)
        nodes[0] = None

def done():
    return [openers.size(notes / "first"), openers.size(notes / "late")]

run("elastic", partial(openers.elastic, ROWS, str(notes)), follow=follow, hear=hear)

# Drivers that are ended.
def published():
    return len(list((work / "stopped").glob("*.json")))

for row, end in ((30, signal.SIGINT), (46, signal.SIGTERM), (62, signal.SIGKILL)):
    child = subprocess.Popen([sys.executable, "-c", driver, work / "stopped", str(row)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
    openers.until(lambda: published() == row // SHARD_SIZE or child.poll() is not None)
    child.send_signal(end)
    out, err = child.communicate()
    say("stopped", code=child.returncode, out=out, err=err, left=published())
cluster.add_node(num_cpus=1, num_gpus=1)
run("going on", partial(openers.dying, ROWS, 150, str(work / "once"), str(work / "encoded")), folder="stopped")
run("refusing", partial(openers.refusing, ROWS, 33), on_error="stop")
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
        "RAY_AUTH_MODE": "disabled",  # whether or not there is a token in the home of whoever runs this
        "RAY_TMPDIR": session,  # else the cluster's address lies where every other cluster of the machine puts its own
    }
    environment.pop("RAY_ADDRESS", None)
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, work, session, DRIVER],
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
        yield work, [json.loads(line) for line in out.splitlines()]  # and not a line of Ray's, although a node died
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


def test_a_run_from_no_gpu_says_what_it_waits_for_and_asks_ray_for_it(told) -> None:
    (report,), (demands,) = of(told, "elastic"), of(told, "demands")
    assert "error" not in report, report
    first, second, died = report["said"]
    assert first == second, "it says so again"
    assert "died" in died
    assert first.startswith(
        "waiting for a node with 1 GPU and 1 CPU: asked for 7 × (1 GPU and 1 CPU); "
        "the Ray cluster has 1 × (0 GPUs and 0 CPUs); "
    )
    assert demands["found"] == [[{"CPU": 1.0, "GPU": 1.0}, 7]]


def test_a_node_that_joins_late_does_a_fifth_of_what_is_left_and_more(told) -> None:
    (joined,), (killing,) = of(told, "joined"), of(told, "killing")
    assert killing["late"] >= joined["left"] / 5


def test_the_rows_of_a_dead_node_go_on_elsewhere_as_one_line_says(told, whole: dict[str, bytes]) -> None:
    (report,) = of(told, "elastic")
    assert files(told[0] / "elastic") == whole
    assert (report["rows"], report["encoded"] + report["reused"], report["skipped"]) == (ROWS, ROWS - 2, 2)
    assert report["skipped_rows"] == [7, 20]
    line = report["said"][-1]
    assert re.fullmatch(
        r"node [\d.]+ \([0-9a-f]{8}\) of the Ray cluster died: its rows \d+ to \d+.* go on elsewhere", line
    )


def test_progress_moves_within_a_shard(told) -> None:
    """The second node is added at row 42, at which the first waits for it."""
    assert 42 in of(told, "elastic")[0]["seen"]


def test_each_worker_opens_its_encoder_once_for_all_its_shards(told) -> None:
    assert (told[0] / "notes" / "opened").read_text().split() == ["first", "late"]


def test_ctrl_c_ends_a_run_with_130_and_a_line(told) -> None:
    interrupted, _, _ = of(told, "stopped")
    assert interrupted["code"] == 130, interrupted
    assert interrupted["err"] == "interrupted: published shards stay; run the same command again to continue\n"
    assert (interrupted["out"], interrupted["left"]) == ("", 7)


def test_sigterm_ends_a_run_without_a_word(told) -> None:
    _, ended, _ = of(told, "stopped")
    assert (ended["code"], ended["out"], ended["err"], ended["left"]) == (143, "", "", 11), ended


def test_a_run_whose_drivers_and_a_worker_were_killed_goes_on_where_it_was(told, whole: dict[str, bytes]) -> None:
    (_, _, killed), (report,) = of(told, "stopped"), of(told, "going on")
    assert (killed["code"], killed["left"]) == (-signal.SIGKILL, 15)
    assert "error" not in report, report
    assert (told[0] / "once").exists(), "no worker was killed"
    assert files(told[0] / "stopped") == whole
    assert (report["rows"], report["encoded"] + report["reused"], report["skipped"]) == (ROWS, ROWS - 2, 2)
    assert report["shards_kept"] >= 15
    (line,) = report["said"]
    assert re.fullmatch(
        r"a worker on node [\d.]+ \(\w{8}\) of the Ray cluster died: its rows \d+ to \d+.* go on elsewhere", line
    )


def test_an_error_of_a_worker_arrives_as_it_is(told) -> None:
    (failure,) = of(told, "refusing")
    assert failure["error"] == "RowError", failure
    assert "row 33 (row33)" in failure["text"] and "it is not wanted" in failure["text"]


def test_an_address_where_nothing_answers_is_an_error_of_usage() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(UsageError, match="the Ray cluster cannot be reached"):
            _require_reachable(f"127.0.0.1:{silent.getsockname()[1]}")
    for address in ("", "auto", "local", "ray://head:10001"):
        _require_reachable(address)


def node(alive: bool = True, **resources: float) -> dict:
    return {"Alive": alive, "Resources": resources}


def test_a_machine_alone_that_cannot_hold_a_worker_is_an_error_of_usage() -> None:
    with pytest.raises(UsageError, match="this machine has not enough GPUs") as refused:
        require_a_place([node(CPU=1.0, GPU=1.0)], 2)
    assert "2 GPUs and 1 CPU" in str(refused.value) and "1 × (1 GPU and 1 CPU)" in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "places"), [(0, 14), (1, 6), (2, 3)], ids=["on CPUs", "of one GPU", "of two GPUs of one node"]
)
def test_places_are_those_of_each_living_node(gpus: int, places: int) -> None:
    nodes = [node(), node(CPU=8.0, GPU=1.0), node(CPU=2.0, GPU=4.0), node(CPU=4.0, GPU=3.0)]
    assert places_of([*nodes, node(alive=False, CPU=8.0, GPU=8.0)], gpus) == places


def test_a_worker_takes_as_many_gpus_as_its_devices_name() -> None:
    pairs = [("auto", "auto"), ("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cpu", "cuda:0")]
    assert [gpus_of(pair, [node(CPU=8.0)]) for pair in pairs] == [0, 0, 1, 2, 1]
    assert [gpus_of(pair, [node(CPU=8.0, GPU=2.0)]) for pair in pairs] == [1, 0, 1, 2, 1]


def test_the_load_of_a_stage_is_that_of_the_workers_that_were_there_at_once() -> None:
    """Three workers in two places, for one took the place of another."""
    workers = _Workers(mock.Mock(), lambda: openers.plain(1), 0, lambda line: None)
    workers.most, workers._stages = 2, {"encode": 1}
    workers.hands = [_Hand(None, report=Report(rows=8, loads={"encode": Load(8, 4.0)})) for _ in range(3)]
    report = workers._report()
    assert (report.rows, report.loads["encode"]) == (24, Load(24, 12.0, workers=2))

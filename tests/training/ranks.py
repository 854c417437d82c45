"""Ranks of qie-train as processes that torchrun or accelerate launch might have started. Run as a script, it forks
them: imports take longer than the steps of a test.

A line that it reads is JSON: the ranks' environment, the words of the command line, and a file for what they say on
stderr. It prints their wait statuses. accelerate shards over GPUs alone; beneath it, torch does over gloo, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

FSDP2 = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
LIMIT_S = 300
"""Far above what a run takes: a hang is to end as a failure."""


def launch_environment(config: Path, *options: str) -> dict[str, str]:
    """The environment that accelerate launch gives to each process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    command = ["--config_file", str(config), *options, "-m", "qie.cli.train", "--config", "my.yaml", "shards/"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert (arguments.training_script, arguments.training_script_args[:1]) == ("qie.cli.train", ["--config"])
    assert arguments.use_fsdp or arguments.multi_gpu
    return prepare_multi_gpu_env(arguments) | {"processes": str(arguments.nproc_per_node)}


class Ranks:
    """Starts runs of two ranks; see `train`."""

    def __enter__(self) -> Ranks:
        command = [sys.executable, "-m", "tests.training.ranks"]
        self._warden = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._warden.communicate(timeout=200)

    def train(self, words: list[str], log: Path, *, sharded: bool, control: Path | None = None) -> None:
        """Run qie-train in both ranks, which have to end well. While it holds, `control` asks for a checkpoint."""
        from torch.distributed import TCPStore

        assert self._warden.stdin and self._warden.stdout
        # Where the ranks meet: at a port that is taken already, as with torchrun.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"HELD_BY": str(control)} if control else {}
        if sharded:
            given = launch_environment(FSDP2)
            environment |= {name: value for name, value in given.items() if name.startswith(("FSDP", "ACCELERATE"))}
        self._warden.stdin.write(json.dumps([environment, words, str(log)]) + "\n")
        self._warden.stdin.flush()
        statuses = json.loads(self._warden.stdout.readline())
        assert statuses == [0, 0], f"{statuses}: {log.read_text()[-3000:]}"


def _shard_on_cpus() -> None:
    """accelerate does what it does for several GPUs, and where nothing is sharded, the run fails."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from qie.training.model.trainable import TrainableModel

    plain_init, plain_prepare = AcceleratorState.__init__, TrainableModel.prepare

    def init(self: AcceleratorState, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        plain_init(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    def prepare(self: TrainableModel, *arguments: Any) -> Any:
        prepared = plain_prepare(self, *arguments)
        assert self.sharded and type(self.model).__name__.startswith("FSDPQwenImage")
        return prepared

    AcceleratorState.__init__ = init
    TrainableModel.prepare = prepare


def _ask_while_held(control: Path) -> None:
    """While the run holds, at once: ask for a checkpoint; look again; and let it go on, once there is one."""
    from qie.training.processes import Agreement

    waits: list[Agreement] = []

    def wait(agreed: Agreement) -> None:
        waits.append(agreed)
        if agreed._accelerator.is_main_process and len(waits) == 1:
            (control / "checkpoint").touch()
        if agreed._accelerator.is_main_process and len(waits) == 3:
            assert [path.name for path in control.parent.glob("checkpoint-*")] == ["checkpoint-000000"]
            (control / "pause").unlink()

    Agreement.wait = wait  # type: ignore[method-assign]


def _run(rank: int, environment: dict[str, str], words: list[str], log: str) -> None:
    """In a process of its own, which it ends."""
    signal.alarm(LIMIT_S)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    code: object = 1
    try:
        from qie.cli.train import main

        if "FSDP_VERSION" in environment:
            _shard_on_cpus()
        if "HELD_BY" in environment:
            _ask_while_held(Path(environment["HELD_BY"]))
        main(words)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    import accelerate  # noqa: F401 - once, not in each rank
    import diffusers  # noqa: F401

    import qie.from_config
    import qie.training.loop  # noqa: F401

    for line in sys.stdin:
        environment, words, log = json.loads(line)
        children = []
        for rank in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                _run(rank, environment, words, log)
        sys.stdout.write(json.dumps([os.waitpid(child, 0)[1] for child in children]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""What is shown on a terminal: bars that fit it, colours and folded lines there alone."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from tqdm.utils import disp_len

from qie.cli.bar import bar_format, pace_of
from qie.cli.terminal import folded
from tests.conftest import ROOT

SHOWN = """
from qie.cli.progress import Progress
from qie.cli.terminal import echo, tell_next, tell_summary, warn

tell_summary([("model", "a small one")], quiet=False)
with Progress("training", 400, "steps", quiet=False, every_s=0.0) as progress:
    for done in range(1, 401):
        progress.at(done, "loss 0.6421", "waiting 2 %", "写真{0}.png")
        if done == 200:
            warn("half of it is done, and this line is longer than the terminal is wide: it is folded")
            echo("a result\\x1b[31m")
tell_next("qie", "train", "--config", "my file.yaml", rest="--set train.max_steps=1000 --set seed=5")
"""


def on_terminal(columns: int, **variables: str) -> str:
    """What SHOWN writes on a terminal of so many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | variables
    with subprocess.Popen(
        [sys.executable, "-c", SHOWN], cwd=ROOT, env=environment, stdin=follower, stdout=follower, stderr=follower
    ) as child:
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # the child has closed its side
                break
            if not part:
                break
            shown += part
    os.close(leader)
    assert child.returncode == 0, shown
    return shown.decode()


@pytest.mark.parametrize(("columns", "variables"), [(40, {"NO_COLOR": "1"}), (80, {})])
def test_no_line_or_bar_on_a_terminal_is_wider_than_it_and_only_a_command_is_left_whole(
    columns: int, variables: dict[str, str]
) -> None:
    raw = on_terminal(columns, **variables)
    *drawn, last = [text for text in re.split(r"[\r\n]+", re.sub(r"\x1b\[\d*[mAK]", "", raw)) if text.strip()]
    assert max(disp_len(text) for text in drawn) < columns
    assert last == "next: qie train --config 'my file.yaml' --set train.max_steps=1000 --set seed=5"
    assert any(re.match(r"training 200/400.*left" + ", loss 0.6421" * (columns > 40), text) for text in drawn), drawn
    assert "a result\\x1b[31m" in drawn
    coloured = ["\x1b[35mwarning:\x1b[0m half" in raw, "\x1b[36mnext:\x1b[0m qie" in raw, "\x1b[3" in raw]
    assert coloured == [not variables] * 3


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    dumb = on_terminal(80, TERM="dumb")
    assert "\x1b" not in dumb and "\r" not in dumb.replace("\r\n", "") and "training: 400/400 steps, " in dumb


def test_a_bar_gives_up_first_what_matters_least() -> None:
    def at(columns: int) -> str:
        notes = ["loss 0.6421", "waiting 2 %"]
        return bar_format("training", 120, 400, "steps", pace_of(4.1, 280, "steps"), notes, columns)

    assert at(90) == "training 120/400 steps |{bar}| 4.1/s, 1 min 8 s left, loss 0.6421, waiting 2 %"
    assert at(79) == "training 120/400 steps, 4.1/s, 1 min 8 s left, loss 0.6421, waiting 2 %"
    assert at(60) == "training 120/400 steps, 4.1/s, 1 min 8 s left, loss 0.6421"
    assert at(53) == "training 120/400, 4.1/s, 1 min 8 s left, loss 0.6421"
    assert at(46) == "training 120/400, 1 min 8 s left, loss 0.6421"
    assert at(34) == "training 120/400, 1 min 8 s left"
    assert at(20) == "training 120/400"


def test_a_rate_below_one_is_told_as_seconds_a_unit() -> None:
    assert pace_of(0.4, 2, "rows") == ["2.5 s a row", "5 s left"]
    assert pace_of(0.0, 2, "rows") == []


def test_a_folded_line_goes_on_where_its_text_begins_and_no_word_is_broken() -> None:
    error = "  to do:    install torch for CUDA: https://pytorch.org/get-started/locally"
    assert folded(error, 40) == (
        "  to do:    install torch for CUDA:\n            https://pytorch.org/get-started/locally"
    )
    assert folded("step 20: validation loss 0.7156, and more", 24) == "step 20: validation loss\n  0.7156, and more"
    assert (
        folded("ok    devices        no GPU: the CPU computes", 60) == "ok    devices        no GPU: the CPU computes"
    )
    assert folded("ok    devices        no GPU: the CPU computes, slowly, for a long time", 64).splitlines()[1] == (
        " " * 21 + "long time"
    )

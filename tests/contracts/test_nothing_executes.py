"""Law 8: no pickle, no `pipe:`, no shell, no remote code. A shard from a stranger can at worst be refused."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from qie.cli import stats
from qie.errors import QieError, ShardError, UsageError, shown
from qie.families import FAMILIES
from qie.inference.requests import save_image
from qie.paths import open_own
from qie.pretrained import open_pretrained
from qie.shards.cache import ShardCache
from qie.shards.discovery import find_indexes, published
from qie.shards.index import Skipped, read_index
from qie.shards.reader import Shard
from qie.shards.record import decode, encode
from qie.shards.shard_set import ShardSet
from qie.shards.writer import ShardWriter
from qie.stores import File, LocalFolder
from qie.training import checkpoint
from tests.builders import RECIPE, make_entry, make_sample
from tests.conftest import ROOT

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "subprocess", "joblib", "pty"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.save",
    "np.load",
}
OLDER_CACHES = ("pt_cache.py", "torch.load", "True")
"""`qie import` reads the `.pt` files of other tools by torch's own restricted reader, which makes tensors alone."""
FORBIDDEN_ARGUMENTS = {"shell", "trust_remote_code", "weights_only", "allow_pickle"}
PRINTING = {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}


def test_no_module_of_qie_can_run_what_it_reads() -> None:
    for path in (ROOT / "qie").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not FORBIDDEN_MODULES & {name.name.partition(".")[0] for name in node.names}, where
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in FORBIDDEN_MODULES, where
            if isinstance(node, ast.Call):
                given = {argument.arg: ast.unparse(argument.value) for argument in node.keywords}
                called = ast.unparse(node.func)
                if (path.name, called, given.get("weights_only")) == OLDER_CACHES:
                    continue
                assert called not in FORBIDDEN_CALLS, where
                refused = given.pop("trust_remote_code", None) == "False"
                assert not FORBIDDEN_ARGUMENTS & given.keys(), where
                assert refused or not re.match(r"Auto[A-Z]\w+\.from_", ast.unparse(node.func)), where


def test_all_that_is_printed_goes_through_one_module() -> None:
    calls = {
        path.name
        for path in (ROOT / "qie").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTING
    }
    assert calls == {"terminal.py"}


STEERING = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e\r\nverified: every shard matches its index"


def test_what_an_index_says_steers_no_terminal_and_looks_like_no_line_of_ours(tmp_path: Path) -> None:
    sample = make_sample(0)
    with ShardWriter(tmp_path / "shards", 0, 2, RECIPE) as shard:
        shard.add(make_entry(sample, 0, STEERING), encode(sample, RECIPE.digest))
        shard.skip(Skipped(1, STEERING, STEERING))
        shard.publish()
    for options in ([], ["--json"], ["--plan"]):
        result = CliRunner().invoke(stats.main, [str(tmp_path / "shards"), *options])
        assert {char for char in result.output if shown(char) != char} == set()
        assert not any(line.startswith("verified") for line in result.output.splitlines())
    error = str(QieError(STEERING, where=STEERING, found=STEERING))
    assert shown(error) == error and not any(line.startswith("verified") for line in error.splitlines())


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("{tokenizer}/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["ours.Tokenizer", None]}}),
        ("{tokenizer}/config.json", {"auto_map": {"AutoTokenizer": "ours.Tokenizer"}}),
        ("processor/preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "ours.Processor"}}),
        ("text_encoder/config.json", {"auto_map": {"AutoModel": "ours.Model"}}),
        ("text_encoder/config.json", {"text_config": {"_attn_implementation": "owner/kernel"}}),
    ],
)
def test_a_checkpoint_that_brings_code_is_refused_and_nobody_is_asked(
    tiny_model: Path, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, values: dict[str, object]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    shutil.copytree(tiny_model, tmp_path / "model")
    path = tmp_path / "model" / file.format(tokenizer=FAMILIES[family].tokenizer_folder)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | values | {"tokenizer_class": "Ours"}))
    (path.parent / "ours.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UsageError, match="asks for code") as caught:
        open_pretrained(str(tmp_path / "model"))
    assert caught.value.where == path
    assert not (tmp_path / "ran").exists()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_in_place_of_a_record_is_refused_and_does_nothing(tmp_path: Path) -> None:
    content = bytearray(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(ShardError):
        decode(memoryview(content), "record")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_in_place_of_a_checkpoints_files_is_refused_and_does_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-000001"
    folder.mkdir()
    for name in ("state.json", "optimizer.safetensors", "pytorch_lora_weights.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(QieError):
        checkpoint.load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["pipe:touch {}", "PIPE:touch {}", "pipe:touch {}; cat x.tar"])
def test_a_pipe_is_refused_and_runs_nothing(tmp_path: Path, place: str) -> None:
    with pytest.raises(UsageError, match="shell"):
        find_indexes([place.format(tmp_path / "ran")])
    assert not (tmp_path / "ran").exists()


OPENERS: list[Callable[[str], object]] = [
    read_index,
    Shard,
    published,
    lambda place: ShardSet.open([place]),
    lambda place: ShardWriter(place, 0, 1, RECIPE),
]


@pytest.mark.parametrize("open_place", OPENERS, ids=["read_index", "Shard", "published", "ShardSet", "ShardWriter"])
@pytest.mark.parametrize("place", ["pipe:touch {}", "Pipe:touch {}", "pipe:touch {}; cat /00000000-00000001.json"])
def test_whoever_opens_shards_refuses_a_pipe(tmp_path: Path, open_place: Callable[[str], object], place: str) -> None:
    with pytest.raises(UsageError, match="shell"):
        open_place(place.format(tmp_path / "ran"))
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_in_place_of_an_index_is_refused_and_does_nothing(tmp_path: Path) -> None:
    index = tmp_path / "00000000-00000001.json"
    index.write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(ShardError):
        Shard(index)
    assert not (tmp_path / "ran").exists()


def test_a_member_name_cannot_leave_the_shard(tmp_path: Path) -> None:
    """Nothing is ever extracted: names are looked up in the index, and those that are no keys are refused."""
    index = tmp_path / "00000000-00000001.json"
    index.write_text(
        '{"format_version":1,"start":0,"stop":1,"filesize":1,"sha256":"","recipe":{"digest":"x"},"files":{"../x":{}}}'
    )
    with pytest.raises(ShardError):
        read_index(index)


NAME = "00000000-00000004"
CONTENT = hashlib.sha256(b"content").hexdigest()


def _shard(folder: Path) -> None:
    with ShardWriter(folder, 0, 4, RECIPE) as writer:
        writer.publish()


def _copy(folder: Path) -> None:
    (folder / "elsewhere").write_bytes(b"content")
    ShardCache(folder, 100).fetch(File(LocalFolder(folder), "elsewhere"), len(b"content"), CONTENT)


def _hashes(folder: Path) -> None:
    with open_own(folder / "hashes.json.1.partial") as file:
        file.truncate(0)


TEMPORARY: dict[str, Callable[[Path], object]] = {
    f"{NAME}.tar.partial": _shard,
    f"{NAME}.json.partial": _shard,
    "index.safetensors.partial": lambda folder: LocalFolder(folder).write("index.safetensors", b""),
    "card.md.partial": lambda folder: LocalFolder(folder).create("card.md", b""),
    f"{CONTENT}.lock": _copy,
    "hashes.json.1.partial": _hashes,
    ".picture.png.partial": lambda folder: save_image(Image.new("RGB", (8, 8)), folder / "picture.png", {}),
}


@pytest.mark.parametrize("planted", ["link", "link to nowhere", "pipe"])
@pytest.mark.parametrize("name", TEMPORARY)
def test_a_temporary_name_that_somebody_planted_is_refused(tmp_path: Path, name: str, planted: str) -> None:
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    if planted == "link":
        victim.write_bytes(b"mine")
    if planted == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(victim)
    with pytest.raises(QieError, match="a temporary file cannot be written") as caught:
        TEMPORARY[name](folder)
    assert str(folder / name) in str(caught.value)
    assert (victim.read_bytes() == b"mine") if planted == "link" else not victim.exists()


@pytest.mark.parametrize("name", TEMPORARY)
def test_a_file_that_also_has_another_name_is_left_to_it(tmp_path: Path, name: str) -> None:
    """As a run leaves it that was killed between linking a file to its name and unlinking the temporary one."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"mine")
    (folder / name).hardlink_to(victim)
    TEMPORARY[name](folder)
    assert victim.read_bytes() == b"mine"


def test_every_file_with_a_temporary_name_is_opened_by_one_function() -> None:
    for path in (ROOT / "qie").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                written = {"open", "write_text", "write_bytes", "save"} & {node.func.attr}
                assert not (written and ast.unparse(node.func.value).endswith(("partial", "lock"))), path

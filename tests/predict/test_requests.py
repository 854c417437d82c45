"""Requests of qie-predict: lines of a batch, sizes, adapters with scales; and which of them are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from qie.cli.predict import parse_lora, parse_size
from qie.errors import QieError, UsageError
from qie.families import FAMILIES
from qie.inference.requests import Request, Sampling, check_requests, numbered_paths, read_batch
from qie.training.model.adapter_file import ADAPTER_FILE

EDIT, SAMPLING = FAMILIES["edit"], Sampling(steps=2, cfg=1.0, background="#ffffff")


@pytest.fixture
def batch(tmp_path: Path):
    """Write lines to a file beside `a.png` and `b.png`, and read them."""
    (tmp_path / "sub").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (32, 32), "teal").save(tmp_path / f"{name}.png")

    def read(*lines: object, count: int = 1) -> list[Request]:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / "batch.jsonl").write_text(text)
        return read_batch(tmp_path / "batch.jsonl", negative_prompt="dull", seed=3, count=count)

    return read


GOOD = {"image": "a.png", "prompt": "make it night", "output": "out.png"}


def test_a_line_is_as_the_options_where_it_says_nothing_else(batch, tmp_path: Path) -> None:
    several = {"images": ["a.png", "b.png"], "prompt": "x", "negative_prompt": "", "seed": 9, "output": "two.png"}
    first, second = batch(GOOD, "", several)
    place = tmp_path / "batch.jsonl"
    assert first == Request(
        (str(tmp_path / "a.png"),), "make it night", "dull", 3, (tmp_path / "out.png",), f"{place}, line 1"
    )
    assert (second.negative_prompt, second.seed, second.where) == ("", 9, f"{place}, line 3")
    assert second.images == (str(tmp_path / "a.png"), str(tmp_path / "b.png"))


def test_paths_that_are_absolute_stay(batch, tmp_path: Path) -> None:
    (request,) = batch(GOOD | {"image": "/elsewhere/a.png", "output": "/elsewhere/out.png"})
    assert (request.images, request.outputs) == (("/elsewhere/a.png",), (Path("/elsewhere/out.png"),))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD | {"promt": "x"}, ["unknown key 'promt'", "one of image, images, prompt", "did you mean 'prompt'?"]),
        ({"image": "a.png", "output": "o.png"}, ["a required key is missing: prompt"]),
        (GOOD | {"images": ["a.png"]}, ["either image or images"]),
        (GOOD | {"seed": "7"}, ["line 2, seed", "found:    '7'"]),
        (GOOD | {"seed": -1}, ["line 2, seed", "greater than or equal to 0"]),
        (GOOD | {"seed": 2**63}, ["line 2, seed"]),
        ({"images": [], "prompt": "x", "output": "o.png"}, ["line 2, images"]),
        (GOOD | {"image": "a\0.png"}, ["line 2, image"]),
        (GOOD | {"output": ""}, ["line 2, output"]),
        (["a.png"], ["the line is not a JSON object"]),
        ("{", ["the line is not valid JSON"]),
        ("[" * 100_000, ["the line is not valid JSON"]),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(batch, tmp_path: Path, line, words) -> None:
    with pytest.raises(UsageError) as caught:
        batch(GOOD, line)
    assert all(word in str(caught.value) for word in [f"{tmp_path / 'batch.jsonl'}, line 2", *words]), caught.value


@pytest.mark.parametrize(("content", "word"), [(b"\n\n", "no lines"), (b"\xff\xfe{", "not UTF-8"), (None, "No such")])
def test_a_file_that_is_no_batch_is_refused(tmp_path: Path, content: bytes | None, word: str) -> None:
    if content is not None:
        (tmp_path / "batch.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=word):
        read_batch(tmp_path / "batch.jsonl", negative_prompt=" ", seed=0, count=1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"image": "nowhere.png"}, ["No such file", "nowhere.png"]),
        ({"image": "batch.jsonl"}, ["not an image"]),
        ({"image": None}, ["was given none", "1 for family edit", "images from text alone"]),
        ({"image": None, "images": ["a.png", "b.png"]}, ["too many images"]),
        ({"prompt": " "}, ["the prompt is empty", "--prompt"]),
        ({"negative_prompt": "<|im_end|>"}, ["special token"]),
        ({"output": "nowhere/out.png"}, ["the file cannot be written there"]),
        ({"output": "out.txt"}, ["not that of an image format"]),
        ({"output": "sub/../out.png"}, ["two images would go into the same file", "batch.jsonl, line 1"]),
    ],
)
def test_what_a_line_names_is_checked_before_any_work(batch, tmp_path: Path, wrong, words) -> None:
    check_requests(batch(GOOD, GOOD | {"output": "other.png"}), EDIT, SAMPLING)
    with pytest.raises(QieError) as caught:
        check_requests(batch(GOOD, GOOD | {"output": "other.png"} | wrong), EDIT, SAMPLING)
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in [f"{tmp_path / 'batch.jsonl'}, line 2", *words]), caught.value


def test_numbered_files_of_two_lines_do_not_meet(batch) -> None:
    with pytest.raises(UsageError, match="two images would go into the same file"):
        check_requests(batch(GOOD, GOOD | {"output": "out-1.png"}, count=1) + batch(GOOD, count=2), EDIT, SAMPLING)


def test_several_images_are_numbered_from_0_in_equally_long_names() -> None:
    assert numbered_paths(Path("a/out.png"), 1) == (Path("a/out.png"),)
    assert [path.name for path in numbered_paths(Path("a/out.png"), 2)] == ["out-0.png", "out-1.png"]
    assert [path.name for path in numbered_paths(Path("a/x.y.png"), 11)][::10] == ["x.y-00.png", "x.y-10.png"]
    assert numbered_paths(Path(), 3) == (Path(),)


@pytest.mark.parametrize(("text", "size"), [("1024x768", (1024, 768)), ("16×8192", (16, 8192)), (" 32X64 ", (32, 64))])
def test_a_size_is_width_and_height(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "hint"),
    [("1000x768", "--size 992x768"), ("0x16", "such as"), ("8208x16", "--size 8192x16"), ("7x7", "--size 16x16")]
    + [(text, "such as --size 1024x768") for text in ("", "1024", "1024x", "-16x16", "16.0x16", "a", "²x16")],
)
def test_an_impossible_size_is_refused_with_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert hint in str(caught.value) and "multiples of 16" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("lora", "lora", 1.0),
        ("lora:0.5", "lora", 0.5),
        ("lora:-1", "lora", -1.0),
        ("x.safetensors:2", "x.safetensors", 2.0),
        ("with:3", "with:3", 1.0),
        ("with:3:0.25", "with:3", 0.25),
        ("run", "run/checkpoint-000020", 1.0),
        ("run:0.5", "run/checkpoint-000020", 0.5),
    ],
)
def test_a_lora_is_a_path_or_a_run_and_maybe_a_scale(
    tmp_path: Path, monkeypatch, text: str, path: str, scale: float
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("lora", "with:3", "run/checkpoint-000003", "run/checkpoint-000020"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / ADAPTER_FILE).touch()
    (tmp_path / "x.safetensors").touch()
    adapter = parse_lora(text)
    assert (adapter.path, adapter.scale) == (path, scale)


def test_a_checkpoint_of_all_weights_is_no_lora_and_the_right_option_is_named(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    for place in (tmp_path, tmp_path / "transformer"):
        with pytest.raises(UsageError, match="--transformer"):
            parse_lora(str(place))

"""What is kept because it may come again: by its key, within its budget, with the same result as computed anew."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qie.data.sources import open_source
from qie.encode import Encoder
from qie.encode.encoder import Memo
from qie.shards.record import encode
from qie.types import Augment, Row

TIMEOUT_S = 20


class Counting:
    """Makes bytes of a length, and notes each time."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, name: str, size: int = 1):
        def compute() -> bytes:
            self.made.append(name)
            return bytes(size)

        return compute


def test_a_result_is_computed_once() -> None:
    memo, compute = Memo(100, len), Counting()
    results = [memo.get("a", compute("a")) for _ in range(3)]
    assert compute.made == ["a"]
    assert results[0] is results[1] is results[2]


def test_what_was_not_asked_for_longest_goes_first() -> None:
    memo, compute = Memo(3, len), Counting()
    for name in "abcada":
        memo.get(name, compute(name))
    assert compute.made == ["a", "b", "c", "d"]
    memo.get("b", compute("b again"))
    assert compute.made[-1] == "b again", "b was the oldest when d came"
    memo.get("a", compute("a again"))
    memo.get("d", compute("d again"))
    assert compute.made[-1] == "b again"


def test_the_budget_is_of_bytes_and_is_kept_to_exactly() -> None:
    memo, compute = Memo(100, len), Counting()
    for name, size in (("a", 40), ("b", 60), ("a", 40), ("b", 60)):
        memo.get(name, compute(name, size))
    assert compute.made == ["a", "b"]
    memo.get("c", compute("c", 1))
    memo.get("b", compute("b", 60))
    assert compute.made == ["a", "b", "c"]
    memo.get("a", compute("a", 40))
    memo.get("c", compute("c", 1))
    assert compute.made == ["a", "b", "c", "a", "c"]


def test_a_result_larger_than_the_budget_is_given_and_not_kept() -> None:
    memo, compute = Memo(10, len), Counting()
    assert len(memo.get("a", compute("a", 11))) == 11
    assert len(memo.get("a", compute("a", 11))) == 11
    assert compute.made == ["a", "a"]
    memo.get("b", compute("b", 10))
    memo.get("b", compute("b", 10))
    assert compute.made == ["a", "a", "b"]


def test_an_error_is_not_kept() -> None:
    memo, compute = Memo(10, len), Counting()

    def fail() -> bytes:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            memo.get("a", fail)
    assert memo.get("a", compute("a")) == b"\0"


def test_two_threads_that_ask_at_once_get_equal_results_and_the_bytes_are_counted_once() -> None:
    memo, compute = Memo(10, len), Counting()
    meeting = threading.Barrier(2, timeout=TIMEOUT_S)

    def slow() -> bytes:
        meeting.wait()
        return compute("a", 6)()

    results: list[bytes] = []
    both = [threading.Thread(target=lambda: results.append(memo.get("a", slow))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(TIMEOUT_S)
    assert results == [bytes(6)] * 2
    memo.get("b", compute("b", 4))
    memo.get("a", compute("a", 6))
    memo.get("b", compute("b", 4))
    assert compute.made == ["a", "a", "b"], "both fit: 6 + 4 bytes"


def test_a_thread_does_not_wait_for_what_another_computes() -> None:
    memo, compute = Memo(10, len), Counting()
    inside, release = threading.Event(), threading.Event()

    def slow() -> bytes:
        inside.set()
        assert release.wait(TIMEOUT_S)
        return b"slow"

    thread = threading.Thread(target=lambda: memo.get("slow", slow))
    thread.start()
    assert inside.wait(TIMEOUT_S)
    assert memo.get("quick", compute("quick")) == b"\0"
    release.set()
    thread.join(TIMEOUT_S)
    assert memo.get("slow", compute("slow")) == b"slow"


def fresh(encoder: Encoder) -> Encoder:
    """An encoder that remembers nothing, with the weights of another."""
    cpu = torch.device("cpu")
    other = Encoder(encoder.pretrained, encoder.recipe, cpu, cpu)
    other.__dict__.update(vae=encoder.vae, text=encoder.text)
    return other


@pytest.fixture
def rows(photos: Path) -> tuple[Row, Row]:
    source = open_source(photos)
    return source.read(0), source.read(1)


@pytest.fixture
def encoded(encoder, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many images the VAE and the vision tower were given."""
    counts = {"vae": 0, "vision": 0}
    vae, text = encoder.vae, encoder.text
    encode_together, features = vae.encode_together, text.vision_features

    def counted_vae(images):
        counts["vae"] += len(images)
        return encode_together(images)

    def counted_vision(patches):
        counts["vision"] += 1
        return features(patches)

    monkeypatch.setattr(vae, "encode_together", counted_vae)
    monkeypatch.setattr(text, "vision_features", counted_vision)
    return counts


def test_a_control_that_comes_again_after_other_rows_is_encoded_once(
    encoder, rows: tuple[Row, Row], encoded: dict[str, int]
) -> None:
    one, other = rows
    again = replace(one, index=2, target=other.target, prompt="another prompt")
    third = replace(one, index=3, target=other.controls[0])
    remembering = fresh(encoder)
    before = dict(encoded)
    remembered = [remembering.encode(row) for row in (one, other, again, third)]
    assert encoded["vae"] - before["vae"] == 4, "four different images in eight places"
    assert encoded["vision"] - before["vision"] == 2
    alone = [fresh(encoder).encode(row) for row in (one, other, again, third)]
    digest = encoder.recipe.digest
    assert [encode(sample, digest) for sample in remembered] == [encode(sample, digest) for sample in alone]


def test_variants_of_a_picture_are_not_taken_for_each_other(encoder, rows: tuple[Row, Row]) -> None:
    one, _ = rows
    variants = [
        one,
        replace(one, augment=Augment(flip=True)),
        replace(one, augment=Augment(box=(0.0, 0.0, 0.5, 0.5))),
        replace(one, augment=Augment(box=(0.5, 0.5, 1.0, 1.0))),
    ]
    remembering, digest = fresh(encoder), encoder.recipe.digest
    for _ in range(2):
        for row in variants:
            mine, alone = remembering.encode(row), fresh(encoder).encode(row)
            assert encode(mine, digest) == encode(alone, digest)
    latents = [remembering.encode(row).pixel_latent for row in variants]
    for position, latent in enumerate(latents):
        for later in latents[position + 1 :]:
            assert latent.shape != later.shape or not torch.equal(latent, later)

"""Results that are kept because an image may come again: by key, within a budget, equal to results computed again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qie.data.sources import open_source
from qie.encode import Encoder
from qie.encode.encoder import Memo
from qie.shards.record import encode
from qie.types import Augment, Row

TIMEOUT_S = 100


BUDGET = 10


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(st.lists(st.integers(0, 7), max_size=40), st.lists(st.integers(0, 12), min_size=8))
def test_a_memo_is_a_list_of_results_that_fit_the_budget_least_recently_asked_for_first_out(asked, sizes) -> None:
    """A result is computed once while it is kept; one that is larger than the budget is given and not kept."""
    memo, kept = Memo[bytes](BUDGET, len), list[int]()
    for key in asked:
        made: list[int] = []
        assert memo.get(key, lambda: made.append(1) or bytes(sizes[key])) == bytes(sizes[key])  # noqa: B023
        assert bool(made) == (key not in kept)
        kept = [one for one in kept if one != key] + [key]
        while sum(sizes[one] for one in kept) > BUDGET:
            kept.pop(0)


def test_an_error_is_not_kept() -> None:
    memo = Memo[bytes](BUDGET, len)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            memo.get("a", lambda: bytes(1 // 0))
    assert memo.get("a", lambda: b"a") == b"a"


def test_two_threads_that_ask_at_once_get_equal_results_and_the_bytes_are_counted_once() -> None:
    memo, meeting = Memo[bytes](BUDGET, len), threading.Barrier(2, timeout=TIMEOUT_S)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(memo.get, "a", lambda: (meeting.wait() and b"") or bytes(6)) for _ in range(2)]
        assert [one.result(TIMEOUT_S) for one in both] == [bytes(6)] * 2
    memo.get("b", lambda: bytes(4))
    for name, size in (("a", 6), ("b", 4)):
        assert memo.get(name, lambda: pytest.fail("computed again")) == bytes(size), "both fit: 6 + 4 bytes"


def test_a_thread_does_not_wait_for_what_another_computes() -> None:
    memo, inside, release = Memo[bytes](BUDGET, len), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(memo.get, "slow", lambda: inside.set() or (release.wait(TIMEOUT_S) and b"slow"))
        assert inside.wait(TIMEOUT_S)
        assert memo.get("quick", lambda: b"quick") == b"quick"
        release.set()
        assert slow.result(TIMEOUT_S) == memo.get("slow", lambda: b"again") == b"slow"


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

"""Sample <-> bytes: exact both ways, and no bytes whatsoever make decoding fail in any way but by ShardError."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from safetensors.torch import save

from qie.errors import ShardError
from qie.shards.record import decode, encode
from qie.shards.tensors import TENSORS, tensor_bytes
from qie.types import Sample
from tests.builders import RECIPE, assert_same, join_record, make_sample, same_bits, split_record

Header = dict[str, Any]
Change = Callable[[Header, Header], object]
"""Of a record's header and of its metadata."""

CONTROLS = [((4, 6),), ((2, 3), (4, 6)), ((8, 2), (1, 1), (4, 6))]


def decoded(record: bytes) -> Sample:
    return decode(memoryview(bytearray(record)), "the test")


def refused(record: bytes) -> str:
    """What decoding these bytes is refused with."""
    with pytest.raises(ShardError) as error:
        decoded(record)
    assert error.value.where == "the test"
    return error.value.what


def changed(change: Change, **sample: Any) -> bytes:
    """A record after a change to its header and metadata, the tensors' bytes left as they are."""
    header, about, body = split_record(encode(make_sample(**sample), RECIPE.digest))
    change(header, about)
    return join_record(header, about, body)


def raw(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


# What is written is what is read


@pytest.mark.parametrize(("controls", "masked", "prefix"), [*product(CONTROLS, [False, True], [0, 1, 5, 7])])
def test_a_sample_survives_its_record_bit_by_bit_which_is_what_safetensors_saves(
    controls: tuple[tuple[int, int], ...], masked: bool, prefix: int
) -> None:
    """The tail of a null prompt that is all prefix is a tensor of no bytes."""
    sample = make_sample(3, controls=controls, masked=masked, shared_prefix=prefix, clipped=7, prompt="naïve 日本")
    stored = {
        "pixel_latent": sample.pixel_latent,
        "control_latent": sample.control_latent[0],
        "prompt_embed": sample.prompt_embed,
        "prompt_embeds_mask": sample.prompt_embeds_mask,
        "empty_prompt_embed": sample.empty_prompt_embed[prefix:].clone(),
        "empty_prompt_embeds_mask": sample.empty_prompt_embeds_mask,
    }
    if len(controls) > 1:
        stored["control_latent"] = torch.cat([latent.flatten() for latent in sample.control_latent])
    if sample.loss_mask is not None:
        stored["loss_mask"] = sample.loss_mask

    record = encode(sample, RECIPE.digest)

    header, _, body = split_record(record)
    spans = {name: end - begin for name, (begin, end) in ((name, one["data_offsets"]) for name, one in header.items())}
    metadata = json.loads(record[8 : 8 + int.from_bytes(record[:8], "little")])["__metadata__"]
    assert type(record) is bytes and record == save(stored, metadata)
    assert tensor_bytes(sample) == spans and sum(spans.values()) == len(body)
    assert_same(decoded(record), sample)
    assert same_bits(decoded(record).empty_prompt_embed, sample.empty_prompt_embed)


def test_tensors_that_are_views_of_larger_ones_are_stored_alone() -> None:
    sample = make_sample(7, target=(4, 4))
    wide = torch.cat([sample.pixel_latent, sample.pixel_latent], dim=-1)
    view = replace(sample, pixel_latent=wide[..., :4], prompt_embed=sample.prompt_embed.t().contiguous().t())

    assert encode(view, RECIPE.digest) == encode(sample, RECIPE.digest)


def test_the_metadata_is_one_canonical_string() -> None:
    sample = make_sample(8, controls=((2, 3), (4, 6)), clipped=3, prompt='naïve "日本"\n')

    record = encode(sample, RECIPE.digest)

    header = json.loads(record[8 : 8 + int.from_bytes(record[:8], "little")])
    assert header["__metadata__"] == {
        "qie": '{"clipped":3,"control_shapes":[[16,1,2,3],[16,1,4,6]],"format_version":1,'
        f'"key":"{sample.key}","prompt":"naïve \\"日本\\"\\n","recipe":"{RECIPE.digest}","shared_prefix":5}}'
    }


@pytest.mark.parametrize("prompt", ['"},', '}"},"x":{', '\\"},{', '\\\\"},', "{"])
def test_a_prompt_that_looks_like_the_end_of_the_metadata_is_a_prompt(prompt: str) -> None:
    sample = make_sample(3, prompt=prompt)
    assert_same(decoded(encode(sample, RECIPE.digest)), sample)


def test_the_tensors_of_a_record_begin_at_a_multiple_of_eight() -> None:
    """Torch and numpy read them where they lie; whatever the length of the prompt."""
    for length in range(9):
        record = encode(make_sample(16, prompt="x" * length), RECIPE.digest)
        assert (8 + int.from_bytes(record[:8], "little")) % 8 == 0


def test_decoded_tensors_lie_in_the_record() -> None:
    buffer = bytearray(encode(make_sample(11, controls=((2, 3), (4, 6)), masked=True), RECIPE.digest))
    begin = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()

    sample = decode(memoryview(buffer), "the test")

    views = (sample.pixel_latent, *sample.control_latent, sample.prompt_embed, sample.loss_mask)
    assert all(begin < view.data_ptr() < begin + len(buffer) for view in views)
    at = sample.pixel_latent.data_ptr() - begin
    buffer[at : at + 2] = b"\x00\x3c"  # 1.0 as a half float
    assert sample.pixel_latent.view(-1)[0] == 1


# What is no record

NO_RECORDS = {
    **{
        f"{length} bytes": (b"\0" * length, "the record is shorter than its header's length field") for length in (0, 7)
    },
    "long header": (raw(b"{}", length=3), "the header is longer than the record"),
    "endless header": (raw(b"{}", length=2**64 - 1), "the header is longer than the record"),
    "empty": (raw(b""), "the header is not JSON"),
    "half": (raw(b'{"pixel_latent":'), "the header is not JSON"),
    "no UTF-8": (raw(b'{"\xff\xfe":1}'), "the header is not JSON"),
    "nested": (raw(b"[" * 200_000), "the header is not JSON"),
    **{str(text): (raw(text), "the header is not a JSON object") for text in (b"[]", b"null", b"7", b'"qie"')},
    **{
        f"metadata {str(one)[:20]}": (
            raw(json.dumps({"__metadata__": one} if one != "none" else {}).encode()),
            "the record was not written by qie",
        )
        for one in (
            *("none", None, [], "qie", {}, {"format": "pt"}, {"qie": 1}, {"qie": None}),
            *({"qie": text} for text in ("{", "[]", "{}", "[" * 200_000)),
        )
    },
    "another writer": (save({"weight": torch.ones(2)}, {"format": "pt"}), "the record was not written by qie"),
    "a tail": (encode(make_sample(), RECIPE.digest) + bytes(8), "the record has bytes after its tensors"),
}


@pytest.mark.parametrize(("record", "what"), NO_RECORDS.values(), ids=NO_RECORDS)
def test_bytes_that_are_no_record_are_refused(record: bytes, what: str) -> None:
    assert refused(record) == what


# Records that do not fit themselves: after safetensors' own tests, one for each malformed header (tensor.rs)


def about(**values: object) -> Change:
    return lambda header, about: about.update(values)


def tensor(name: str, **values: object) -> Change:
    return lambda header, about: header.setdefault(name, {}).update(values)


def without(name: str, *field: str) -> Change:
    return lambda header, about: (header[name] if field else header).pop(*field or (name,))


ABOUT = {"key": "", "prompt": "", "control_shapes": [], "shared_prefix": 0, "clipped": 0}
TENSOR = {
    "dtype": ["F32", "F17", 16, []],
    "shape": [None, 768, ["many"], [[16], 1], [float("inf")], [float("nan")], [-16, 1, -4, 6], [2**64, 2**64 + 768]],
    "data_offsets": [None, 0, [0], [0, 1, 2], ["0", "768"], [None, None], [0.0, 768.0], [[0], [768]], [-768, 0]],
}
TYPES = [
    *(
        ("pixel_latent", "F16", [16, 4, 6]),
        ("pixel_latent", "BOOL", [16, 2, 4, 6]),
        ("pixel_latent", "U8", [16, 2, 4, 6]),
    ),
    *(("control_latent", "U8", [16, 2, 4, 6]), ("prompt_embed", "F16", [72]), ("prompt_embed", "U8", [9, 16])),
    *(
        ("prompt_embeds_mask", "U8", [9]),
        ("prompt_embeds_mask", "BOOL", [3, 3]),
        ("empty_prompt_embed", "F16", [1, 2, 8]),
    ),
    *(("empty_prompt_embeds_mask", "U8", [7]), ("loss_mask", "BOOL", [4, 6]), ("loss_mask", "U8", [24])),
]
SHAPES = [
    *(("prompt_embeds_mask", [8]), ("empty_prompt_embeds_mask", [6]), ("loss_mask", [4, 5]), ("loss_mask", [2, 6])),
    *(("empty_prompt_embed", [4, 4]), ("pixel_latent", [8, 2, 4, 6]), ("loss_mask", [6, 4])),
]


def shrunk(name: str, shape: list[int]) -> Change:
    def shrink(header: Header, about: Header) -> None:
        begin, _ = header[name]["data_offsets"]
        size = 2 if header[name]["dtype"] == "F16" else 1
        header[name].update(shape=shape, data_offsets=[begin, begin + size * prod(shape)])

    return shrink


MISFITS: list[tuple[Change, str]] = [
    (about(format_version=2), "the record is of another format version"),
    *((lambda header, about, name=name: about.pop(name), f"the record's {name} is missing or wrong") for name in ABOUT),
    *((about(**{name: one}), f"the record's {name} is missing or wrong") for name in ABOUT for one in (None, 1.5, {})),
    *((about(shared_prefix=one), "the record's shared_prefix is missing or wrong") for one in (-1, 2**64, "3", 3.0)),
    *((about(clipped=one), "the record's clipped is missing or wrong") for one in (-1, "0")),
    *((without(one.name), "a tensor is missing from the record") for one in TENSORS if one.there is None),
    *((without("pixel_latent", one), "the header's entry for pixel_latent is malformed") for one in TENSOR),
    *(
        (tensor("pixel_latent", **{name: one}), "the header's entry for pixel_latent is malformed")
        for name, values in TENSOR.items()
        for one in values
    ),
    *(
        (
            lambda header, about, one=one: header.update(pixel_latent=one),
            "the header's entry for pixel_latent is malformed",
        )
        for one in (None, 1, "F16", [], ["F16", [1], [0, 2]])
    ),
    *(
        (tensor("pixel_latent", data_offsets=one), "pixel_latent lies outside the record")
        for one in ([0, 10**6], [768, 0], [10**6, 10**6])
    ),
    *(
        (tensor("pixel_latent", shape=one), "pixel_latent has a size that its shape does not give")
        for one in ([16, 1, 4, 5], [], [0], [2**32, 2**32, 1, 1])
    ),
    (tensor("pixel_latent", shape=[0, 2**61, 2, 1], data_offsets=[0, 0]), "pixel_latent is empty"),
    (
        tensor("pixel_latent", shape=[0, 2**64, 1, 1], data_offsets=[0, 0]),
        "the header's entry for pixel_latent is malformed",
    ),
    (tensor("prompt_embeds_mask", shape=[0], data_offsets=[0, 0]), "prompt_embeds_mask is empty"),
    *((tensor(name, dtype=dtype, shape=shape), f"{name} has another type or rank") for name, dtype, shape in TYPES),
    *((shrunk(name, shape), f"{name} has another shape than the sample's sizes give it") for name, shape in SHAPES),
    (
        tensor("depth", dtype="U8", shape=[1], data_offsets=[0, 1]),
        "the record has a tensor that the format does not know",
    ),
    *((about(shared_prefix=one), "shared_prefix is longer than the prompt") for one in (10, 2**60)),
    *(
        (about(control_shapes=one), "control_latent does not fit control_shapes")
        for one in (
            *([], [[16, 1, 4, 5]], [[16, 1, 4, 6]] * 2, [[16, 1, 4, 6], [0, 1, 2**60, 1]]),
            *([[8, 2, 4, 6]], [[8, 1, 4, 12]], [[16, 2, 4, 3]]),
        )
    ),
    *(
        (about(control_shapes=one), "the record's control_shapes")
        for one in (
            *([[16, 1, -4, -6]], [[384]], [[]], [384], [None], ["16"], [{"16": 1}], [[16, 1, 4, "6"]]),
            *([[16.0, 1, 4, 6]], [[16, 1, 4, 6], [0, 1, 2**64, 1]]),
        )
    ),
    *(
        (
            lambda header, about, by=by: header["prompt_embeds_mask"].update(
                data_offsets=[at + by for at in header["prompt_embeds_mask"]["data_offsets"]]
            ),
            "the record has gaps or overlaps between tensors",
        )
        for by in (-9, -1)
    ),
]


@pytest.mark.parametrize(("change", "what"), MISFITS, ids=[f"{n}" for n in range(len(MISFITS))])
def test_a_record_that_does_not_fit_itself_is_refused_by_what_is_wrong(change: Change, what: str) -> None:
    assert refused(changed(change, masked=True)).startswith(what)


# And any other damage


def test_a_flipped_bit_gives_a_sample_or_a_shard_error_and_a_cut_record_the_latter() -> None:
    dice = random.Random(0)
    record = encode(make_sample(13, controls=((2, 3), (4, 6)), masked=True, paired=True), RECIPE.digest)
    header_bits = 8 * (8 + int.from_bytes(record[:8], "little"))

    def outcome(damaged: bytearray) -> type:
        try:
            return type(decode(memoryview(damaged), "the test"))
        except ShardError:
            return ShardError

    outcomes = set()
    for trial in range(300):
        damaged = bytearray(record)
        bit = dice.randrange(8 * len(record) if trial % 5 == 0 else header_bits)
        damaged[bit // 8] ^= 1 << bit % 8
        outcomes.add(outcome(damaged))
    assert outcomes == {Sample, ShardError}
    cuts = {*dice.sample(range(len(record)), 300), len(record) - 1}
    assert {outcome(bytearray(record[:cut])) for cut in cuts} == {ShardError}

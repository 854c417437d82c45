"""Sample <-> bytes: exact both ways, and no bytes whatsoever make decoding fail in any way but by ShardError."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from qie.errors import ShardError
from qie.shards.record import decode, encode
from qie.shards.tensors import tensor_bytes
from qie.types import Sample
from tests.builders import RECIPE, ROOT, assert_same, join_record, make_sample, same_bits, split_record

Header = dict[str, Any]


def decoded(record: bytes) -> Sample:
    return decode(memoryview(bytearray(record)), "the test")


def refused(record: bytes) -> str:
    """What decoding these bytes is refused with."""
    with pytest.raises(ShardError) as error:
        decoded(record)
    assert error.value.where == "the test"
    return error.value.what


def changed(change: Callable[[Header, Header], object], sample: Sample | None = None) -> bytes:
    """A record after a change to its header and metadata, the tensors' bytes left as they are."""
    header, about, body = split_record(encode(sample or make_sample(), RECIPE.digest))
    change(header, about)
    return join_record(header, about, body)


def raw(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


# What is written is what is read


@pytest.mark.parametrize("masked", [False, True], ids=["without mask", "with mask"])
@pytest.mark.parametrize(
    "controls", [((4, 6),), ((2, 3), (4, 6)), ((8, 2), (1, 1), (4, 6))], ids=["one", "two", "three controls"]
)
def test_a_sample_survives_its_record_bit_by_bit(controls: tuple[tuple[int, int], ...], masked: bool) -> None:
    sample = make_sample(3, controls=controls, masked=masked, clipped=7)

    assert_same(decoded(encode(sample, RECIPE.digest)), sample)


@pytest.mark.parametrize("shared_prefix", [0, 1, 6, 7])
def test_the_shared_prefix_is_joined_bit_by_bit(shared_prefix: int) -> None:
    sample = make_sample(4, shared_prefix=shared_prefix)

    assert same_bits(decoded(encode(sample, RECIPE.digest)).empty_prompt_embed, sample.empty_prompt_embed)


def test_of_the_null_prompt_only_the_tail_is_stored() -> None:
    sample = make_sample(5, tokens=9, empty_tokens=7, shared_prefix=5)

    stored = load(encode(sample, RECIPE.digest))

    assert same_bits(stored["empty_prompt_embed"], sample.empty_prompt_embed[5:])
    assert same_bits(stored["prompt_embed"], sample.prompt_embed)
    assert len(stored["empty_prompt_embeds_mask"]) == 7


def test_one_control_keeps_its_shape_in_the_record() -> None:
    sample = make_sample(6)

    assert same_bits(load(encode(sample, RECIPE.digest))["control_latent"], sample.control_latent[0])


def test_several_controls_are_stored_flat_one_behind_the_other() -> None:
    sample = make_sample(6, controls=((2, 3), (4, 6)))

    flat = load(encode(sample, RECIPE.digest))["control_latent"]

    assert same_bits(flat, torch.cat([latent.reshape(-1) for latent in sample.control_latent]))


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


@pytest.mark.parametrize("shared_prefix", [0, 5, 7], ids=lambda prefix: f"prefix {prefix}")
@pytest.mark.parametrize("masked", [False, True], ids=["without mask", "with mask"])
@pytest.mark.parametrize("controls", [((4, 6),), ((2, 3), (4, 6))], ids=["one control", "two controls"])
def test_a_record_is_what_safetensors_saves_byte_by_byte(
    controls: tuple[tuple[int, int], ...], masked: bool, shared_prefix: int
) -> None:
    """The tail of a null prompt that is all prefix is a tensor of no bytes."""
    sample = make_sample(15, controls=controls, masked=masked, shared_prefix=shared_prefix, prompt="naïve 日本")
    stored = {
        "pixel_latent": sample.pixel_latent,
        "control_latent": sample.control_latent[0],
        "prompt_embed": sample.prompt_embed,
        "prompt_embeds_mask": sample.prompt_embeds_mask,
        "empty_prompt_embed": sample.empty_prompt_embed[shared_prefix:].clone(),
        "empty_prompt_embeds_mask": sample.empty_prompt_embeds_mask,
    }
    if len(controls) > 1:
        stored["control_latent"] = torch.cat([latent.flatten() for latent in sample.control_latent])
    if sample.loss_mask is not None:
        stored["loss_mask"] = sample.loss_mask

    record = encode(sample, RECIPE.digest)

    header = json.loads(record[8 : 8 + int.from_bytes(record[:8], "little")])
    assert record == save(stored, header["__metadata__"])
    assert type(record) is bytes


def test_the_tensors_of_a_record_begin_at_a_multiple_of_eight() -> None:
    """Torch and numpy read them where they lie; whatever the length of the prompt."""
    for length in range(9):
        record = encode(make_sample(16, prompt="x" * length), RECIPE.digest)

        assert (8 + int.from_bytes(record[:8], "little")) % 8 == 0


@pytest.mark.parametrize("masked", [False, True])
def test_tensor_bytes_are_those_of_the_record(masked: bool) -> None:
    sample = make_sample(9, controls=((2, 3), (4, 6)), masked=masked)

    header, _, body = split_record(encode(sample, RECIPE.digest))

    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    assert tensor_bytes(sample) == {name: end - begin for name, (begin, end) in spans.items()}
    assert sum(tensor_bytes(sample).values()) == len(body)


def test_equal_samples_are_equal_bytes_in_every_process() -> None:
    code = (
        "import hashlib\n"
        "from qie.shards.record import encode\n"
        "from tests.builders import RECIPE, ROOT, make_sample\n"
        "sample = make_sample(10, controls=((2, 3), (4, 6)), masked=True)\n"
        "print(hashlib.sha256(encode(sample, RECIPE.digest)).hexdigest())"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        for seed in ("0", "1")
    ]

    digests = [child.communicate()[0] for child in children]

    assert [child.returncode for child in children] == [0, 0]
    assert len(digests[0].strip()) == 64
    assert digests[0] == digests[1]


def test_decoding_copies_no_latent() -> None:
    record = encode(make_sample(11, controls=((2, 3), (4, 6)), masked=True), RECIPE.digest)
    buffer = bytearray(record)
    begin = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()

    sample = decode(memoryview(buffer), "the test")

    views = (sample.pixel_latent, *sample.control_latent, sample.prompt_embed, sample.loss_mask)
    assert all(begin < view.data_ptr() < begin + len(buffer) for view in views)


def test_a_change_to_the_buffer_is_seen_in_the_latent() -> None:
    record = encode(make_sample(12), RECIPE.digest)
    header, _, body = split_record(record)
    buffer = bytearray(record)
    sample = decode(memoryview(buffer), "the test")

    at = len(record) - len(body) + header["pixel_latent"]["data_offsets"][0]
    buffer[at : at + 2] = b"\x00\x3c"  # 1.0 as a half float

    assert sample.pixel_latent.view(-1)[0] == 1


# One test for each malformed header, after safetensors' own (tensor.rs)


def test_a_record_shorter_than_the_length_field_is_refused() -> None:
    for length in range(8):
        assert refused(b"\x00" * length) == "the record is shorter than its header's length field"


def test_a_header_longer_than_the_record_is_refused() -> None:
    assert refused(raw(b"{}", length=3)) == "the header is longer than the record"


def test_a_header_longer_than_any_memory_is_refused() -> None:
    assert refused(raw(b"{}", length=2**64 - 1)) == "the header is longer than the record"


def test_an_empty_header_is_refused() -> None:
    assert refused(raw(b"")) == "the header is no JSON"


def test_a_header_that_is_no_json_is_refused() -> None:
    assert refused(raw(b'{"pixel_latent":')) == "the header is no JSON"


def test_a_header_that_is_no_utf8_is_refused() -> None:
    assert refused(raw(b'{"\xff\xfe":1}')) == "the header is no JSON"


def test_a_header_that_is_nested_without_end_is_refused() -> None:
    assert refused(raw(b"[" * 200_000)) == "the header is no JSON"


@pytest.mark.parametrize("header", [b"[]", b"null", b"7", b'"qie"'])
def test_a_header_that_is_no_object_is_refused(header: bytes) -> None:
    assert refused(raw(header)) == "the header is no JSON object"


def test_a_record_without_metadata_is_refused() -> None:
    assert refused(raw(b"{}")) == "the record was not written by qie"


@pytest.mark.parametrize(
    "metadata",
    [None, [], "qie", {}, {"format": "pt"}, {"qie": 1}, {"qie": None}, {"qie": "{"}, {"qie": "[]"}, {"qie": "{}"}],
    ids=json.dumps,
)
def test_metadata_of_something_else_than_qie_is_refused(metadata: object) -> None:
    assert refused(raw(json.dumps({"__metadata__": metadata}).encode())) == "the record was not written by qie"


def test_metadata_that_is_nested_without_end_is_refused() -> None:
    header = json.dumps({"__metadata__": {"qie": "[" * 200_000}}).encode()

    assert refused(raw(header)) == "the record was not written by qie"


def test_a_record_of_another_format_version_is_refused() -> None:
    record = changed(lambda header, about: about.update(format_version=2))

    assert refused(record) == "the record is of another format version"


@pytest.mark.parametrize("name", ["key", "prompt", "control_shapes", "shared_prefix", "clipped"])
def test_a_missing_field_of_the_metadata_is_refused(name: str) -> None:
    assert refused(changed(lambda header, about: about.pop(name))) == f"the record's {name} is missing or wrong"


@pytest.mark.parametrize("name", ["key", "prompt", "control_shapes", "shared_prefix", "clipped"])
@pytest.mark.parametrize("value", [None, 1.5, {}])
def test_a_field_of_the_metadata_of_another_type_is_refused(name: str, value: object) -> None:
    record = changed(lambda header, about: about.update({name: value}))

    assert refused(record) == f"the record's {name} is missing or wrong"


@pytest.mark.parametrize("name", ["pixel_latent", "control_latent", "prompt_embed", "prompt_embeds_mask"])
def test_a_missing_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(ShardError, match="a tensor is missing from the record") as error:
        decoded(changed(lambda header, about: header.pop(name)))
    assert error.value.expected == name


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_a_missing_field_of_a_tensor_is_refused(field: str) -> None:
    record = changed(lambda header, about: header["pixel_latent"].pop(field))

    assert refused(record) == "the header's entry for pixel_latent is malformed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "F32"),
        ("dtype", "F17"),
        ("dtype", 16),
        ("dtype", []),
        ("shape", None),
        ("shape", 768),
        ("shape", ["many"]),
        ("shape", [[16], 1]),
        ("shape", [float("inf")]),
        ("shape", [float("nan")]),
        ("data_offsets", None),
        ("data_offsets", 0),
        ("data_offsets", [0]),
        ("data_offsets", [0, 1, 2]),
        ("data_offsets", ["0", "768"]),
        ("data_offsets", [None, None]),
        ("data_offsets", [0.0, 768.0]),
        ("data_offsets", [[0], [768]]),
    ],
)
def test_a_field_of_a_tensor_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    record = changed(lambda header, about: header["pixel_latent"].update({field: value}))

    assert refused(record) == "the header's entry for pixel_latent is malformed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("shared_prefix", value) for value in (-1, 2**64, "3", 3.0, None)),
        *(("clipped", value) for value in (-1, "0")),
        *(("control_shapes", [value]) for value in ([16, 1, -4, -6], [384], [], 384, None, "16", {"16": 1})),
        ("control_shapes", [[16, 1, 4, "6"]]),
        ("control_shapes", [[16.0, 1, 4, 6]]),
        ("control_shapes", [[16, 1, 4, 6], [0, 1, 2**64, 1]]),
    ],
    ids=str,
)
def test_a_value_of_the_metadata_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    record = changed(lambda header, about: about.update({name: value}))

    assert refused(record).startswith(f"the record's {name}")


@pytest.mark.parametrize("field", ["shape", "data_offsets"])
@pytest.mark.parametrize("value", [[-16, 1, -4, 6], [-768, 0], [2**64, 2**64 + 768]], ids=str)
def test_a_number_of_an_entry_that_is_beyond_all_bounds_is_refused(field: str, value: list[int]) -> None:
    record = changed(lambda header, about: header["pixel_latent"].update({field: value}))

    assert refused(record) == "the header's entry for pixel_latent is malformed"


@pytest.mark.parametrize("entry", [None, 1, "F16", [], ["F16", [1], [0, 2]]])
def test_an_entry_that_is_no_object_is_refused(entry: object) -> None:
    record = changed(lambda header, about: header.update(pixel_latent=entry))

    assert refused(record) == "the header's entry for pixel_latent is malformed"


@pytest.mark.parametrize("offsets", [[0, 10**6], [768, 0], [10**6, 10**6]])
def test_offsets_out_of_the_record_are_refused(offsets: list[int]) -> None:
    record = changed(lambda header, about: header["pixel_latent"].update(data_offsets=offsets))

    assert refused(record) == "pixel_latent lies outside the record"


def test_a_record_that_lacks_its_last_byte_is_refused() -> None:
    header, about, body = split_record(encode(make_sample(), RECIPE.digest))
    last = max(header, key=lambda name: header[name]["data_offsets"])

    assert refused(join_record(header, about, body[:-1])) == f"{last} lies outside the record"


@pytest.mark.parametrize(
    "shape",
    [[16, 1, 4, 5], [], [0], [2**32, 2**32, 1, 1]],
    ids=str,
)
def test_a_shape_of_another_size_than_the_offsets_is_refused(shape: list[int]) -> None:
    record = changed(lambda header, about: header["pixel_latent"].update(shape=shape))

    assert refused(record) == "pixel_latent has a size that its shape does not give"


@pytest.mark.parametrize("shape", [[0, 2**62, 2, 1], [0, 2**64, 1, 1]], ids=str)
def test_an_empty_latent_of_impossible_extent_is_refused(shape: list[int]) -> None:
    record = changed(lambda header, about: header["pixel_latent"].update(shape=shape, data_offsets=[0, 0]))

    assert "pixel_latent" in refused(record)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("pixel_latent", "F16", [16, 4, 6]),
        ("pixel_latent", "BOOL", [16, 2, 4, 6]),
        ("pixel_latent", "U8", [16, 2, 4, 6]),
        ("control_latent", "U8", [16, 2, 4, 6]),
        ("prompt_embed", "F16", [72]),
        ("prompt_embed", "U8", [9, 16]),
        ("prompt_embeds_mask", "U8", [9]),
        ("prompt_embeds_mask", "BOOL", [3, 3]),
        ("empty_prompt_embed", "F16", [1, 2, 8]),
        ("empty_prompt_embeds_mask", "U8", [7]),
        ("loss_mask", "BOOL", [4, 6]),
        ("loss_mask", "U8", [24]),
    ],
)
def test_a_tensor_of_another_type_or_rank_is_refused(name: str, dtype: str, shape: list[int]) -> None:
    record = changed(lambda header, about: header[name].update(dtype=dtype, shape=shape), make_sample(masked=True))

    assert refused(record) == f"{name} has another type or rank"


@pytest.mark.parametrize("prefix", [10, 2**60])
def test_a_shared_prefix_longer_than_the_prompt_is_refused(prefix: int) -> None:
    record = changed(lambda header, about: about.update(shared_prefix=prefix))

    assert refused(record) == "shared_prefix is longer than the prompt"


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [[16, 1, 4, 5]],
        [[16, 1, 4, 6], [16, 1, 4, 6]],
        [[16, 1, 4, 6], [0, 1, 2**60, 1]],
    ],
    ids=str,
)
def test_control_shapes_that_do_not_fit_are_refused(shapes: list[object]) -> None:
    record = changed(lambda header, about: about.update(control_shapes=shapes))

    assert refused(record) == "control_latent does not fit control_shapes"


def test_a_null_prompt_of_another_width_than_the_prompt_is_refused() -> None:
    record = changed(lambda header, about: header["empty_prompt_embed"].update(shape=[4, 4]))

    assert "empty_prompt_embed" in refused(record)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("prompt_embeds_mask", [8]),
        ("prompt_embeds_mask", [0]),
        ("empty_prompt_embeds_mask", [6]),
        ("loss_mask", [4, 5]),
        ("loss_mask", [2, 6]),
    ],
)
def test_a_mask_of_another_size_than_what_it_masks_is_refused(name: str, shape: list[int]) -> None:
    def shrink(header: Header, about: Header) -> None:
        begin, _ = header[name]["data_offsets"]
        header[name].update(shape=shape, data_offsets=[begin, begin + prod(shape)])

    assert name in refused(changed(shrink, make_sample(masked=True)))


def tensor_of(name: str, begin: int, end: int) -> Header:
    return {name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}}


@pytest.mark.parametrize("moved", [-9, -1, 1])
def test_tensors_that_leave_gaps_or_overlap_are_refused(moved: int) -> None:
    header, about, body = split_record(encode(make_sample(tokens=9, empty_tokens=9), RECIPE.digest))
    header["prompt_embeds_mask"]["data_offsets"] = [at + moved for at in header["prompt_embeds_mask"]["data_offsets"]]

    assert refused(join_record(header, about, body + b"!")) == "the record has gaps or overlaps between tensors"


def test_bytes_after_the_tensors_are_refused() -> None:
    assert refused(encode(make_sample(), RECIPE.digest) + bytes(8)) == "the record has bytes after its tensors"


def test_a_tensor_that_the_format_does_not_know_is_refused() -> None:
    header, about, body = split_record(encode(make_sample(), RECIPE.digest))
    record = join_record(header | tensor_of("depth", len(body), len(body) + 4), about, body + b"deep")

    assert refused(record) == "the record has a tensor that the format does not know"


# And any other damage


def test_a_record_of_another_writer_is_refused() -> None:
    assert refused(save({"weight": torch.ones(2)}, {"format": "pt"})) == "the record was not written by qie"


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_gives_a_sample_or_a_shard_error(seed: int) -> None:
    dice = random.Random(seed)
    record = encode(make_sample(13, controls=((2, 3), (4, 6)), masked=True), RECIPE.digest)
    header_bits = 8 * (8 + int.from_bytes(record[:8], "little"))

    outcomes = set()
    for trial in range(50):
        damaged = bytearray(record)
        bit = dice.randrange(8 * len(record) if trial % 5 == 0 else header_bits)
        damaged[bit // 8] ^= 1 << bit % 8
        outcomes.add(_outcome(damaged))

    assert outcomes == {Sample, ShardError}


def test_a_record_cut_anywhere_is_refused() -> None:
    dice = random.Random(1)
    record = encode(make_sample(14, controls=((2, 3), (4, 6)), masked=True), RECIPE.digest)

    cuts = {*dice.sample(range(len(record)), 300), len(record) - 1}

    assert {_outcome(bytearray(record[:cut])) for cut in cuts} == {ShardError}


def _outcome(damaged: bytearray) -> type:
    try:
        return type(decode(memoryview(damaged), "the test"))
    except ShardError:
        return ShardError

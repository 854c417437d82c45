"""The encoders' speed-ups change nothing: time axis, shared prefix, neighbours, batches, remembered hashes."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm
from PIL import Image

import qie.file_hashes
from qie.data.sources import open_source
from qie.encode import Encoder
from qie.encode import vae as vae_module
from qie.encode.images import to_pixels
from qie.encode.text import PromptEncoder
from qie.encode.vae import VaeEncoder, _FrameNorm
from qie.errors import ModelError, RowError
from qie.file_hashes import file_hashes
from qie.precompute import precompute
from qie.pretrained import content_hash, open_pretrained
from qie.shards.record import encode
from qie.shards.tensors import tensor_bytes, to_storage
from qie.types import Row, Sample
from tests.stubs import RECIPE, StubEncoder, StubSource

CPU = torch.device("cpu")


def photo(photos: Path, number: int = 0) -> Image.Image:
    path = sorted((photos / "control_images").glob("*.png"))[number]
    return Image.open(path).convert("RGB").resize((160, 96))


def with_recipe(encoder: Encoder, **fields: object) -> Encoder:
    return Encoder(encoder.pretrained, replace(encoder.recipe, **fields), CPU, CPU)


# The VAE


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 1.0)], ids=str)
def test_the_fast_vae_is_the_vae_to_rounding(tiny_edit: Path, photos: Path, dtype: torch.dtype, error: float) -> None:
    """Against the same in float64: it is as near to that as the VAE itself is."""
    whole, double = (
        AutoencoderKLQwenImage.from_pretrained(tiny_edit / "vae", torch_dtype=kind).eval()
        for kind in (dtype, torch.float64)
    )
    fast = VaeEncoder(tiny_edit / "vae", CPU, dtype)
    for number in (0, 4):
        image = to_pixels(photo(photos, number))
        pixels = image.unsqueeze(2)
        with torch.no_grad():
            own = (whole.encode(pixels.to(dtype)).latent_dist.mode() - fast._mean) / fast._std
            exact = (double.encode(pixels.double()).latent_dist.mode() - fast._mean) / fast._std
        found = fast.encode(image)
        assert exact.std() > 0.3
        assert (found - exact[0]).abs().max() <= 2 * (own - exact).abs().max() < error
    assert not any(isinstance(module, torch.nn.Conv3d) for module in fast._moments.modules())


def test_a_vae_that_needs_its_time_axis_is_encoded_whole_and_says_so(
    tiny_edit: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = to_pixels(photo(photos))
    expected = VaeEncoder(tiny_edit / "vae", CPU, torch.float32).encode(image)
    # As if a future VAE weighed its first frame otherwise: the last slice alone would not do.
    monkeypatch.setattr(vae_module._FrameConv, "forward", lambda self, video: 0.5 * video[:, : self.out_channels])
    with pytest.warns(UserWarning, match="full, slower path"):
        slow = VaeEncoder(tiny_edit / "vae", CPU, torch.float32)
    assert (slow.encode(image) - expected).abs().max() <= 3e-5
    assert not any("decoder" in name for name, _ in slow._moments.named_parameters())


def test_images_of_equal_size_encoded_together_are_what_each_is_alone(tiny_edit: Path, photos: Path) -> None:
    vae = VaeEncoder(tiny_edit / "vae", CPU, torch.float32)
    pictures = [photo(photos, 0), photo(photos, 5), photo(photos, 5).resize((96, 160))]
    images = [to_pixels(picture) for picture in pictures]
    alone = [vae.encode(image) for image in images]
    together = vae.encode_together(images)
    assert [latent.shape for latent in together] == [latent.shape for latent in alone]
    assert max(float((one - other).abs().max()) for one, other in zip(alone, together, strict=True)) <= 3e-5
    assert (alone[0] - alone[1]).abs().max() > 0.5


@pytest.mark.parametrize("channels", [96, 384])
def test_the_norm_of_a_gpu_is_that_of_a_cpu_in_float32_and_nearer_to_exact_in_bfloat16(channels: int) -> None:
    torch.manual_seed(0)
    own = QwenImageRMS_norm(channels, images=False).requires_grad_(False)
    own.gamma.data.normal_()
    features = torch.randn(1, channels, 1, 40, 40) * torch.rand(1, 1, 1, 40, 40)
    ours = _FrameNorm(own)
    assert torch.equal(ours.in_one_kernel(features.movedim(1, -1)).movedim(-1, 1), ours(features))
    half, ours, own = features.bfloat16(), _FrameNorm(own.bfloat16()), own.bfloat16()
    exact = copy.deepcopy(ours).double().in_one_kernel(half.double().movedim(1, -1)).movedim(-1, 1)
    released, cpu, gpu = (
        float((found - exact).square().mean().sqrt() / exact.std())
        for found in (own(half), ours(half), ours.in_one_kernel(half.movedim(1, -1)).movedim(-1, 1))
    )
    assert gpu < 0.75 * cpu and cpu < 0.85 * released < 0.003


# Prompts


def embeds(encoder: PromptEncoder, rows: list[tuple[list[Image.Image], str]]):
    return encoder.encode(
        [encoder.vision_features(encoder.patches(images)) for images, _ in rows], [prompt for _, prompt in rows]
    )


def test_a_continued_prompt_is_the_whole_pass_to_rounding(encoder_plus: Encoder, photos: Path) -> None:
    rows = [([photo(photos, 0), photo(photos, 5)], "make it night, please")]
    (whole,) = embeds(encoder_plus.text, rows)
    (shared,) = embeds(PromptEncoder(encoder_plus.pretrained, CPU, torch.float32, share_prefix=True), rows)
    assert whole.shared_prefix == shared.shared_prefix
    for name in ("prompt", "null"):
        one, other = getattr(whole, name), getattr(shared, name)
        assert one.shape == other.shape
        assert (one - other).abs().max() < 5e-6 * one.std()


def test_prompts_of_different_images_and_lengths_encoded_together_are_what_each_is_alone(
    encoder: Encoder, photos: Path
) -> None:
    """The stated tolerance of batches in float32: 1e-5 of the deviation."""
    rows = [
        ([photo(photos, 0)], "short"),
        ([photo(photos, 5).resize((96, 96))], "a much longer instruction, with many more words in it than the others"),
        ([photo(photos, 3).resize((96, 192))], "把咖啡变成茶 ☕"),
    ]
    alone = [embeds(encoder.text, [row])[0] for row in rows]
    together = embeds(encoder.text, rows)
    assert len({len(one.prompt) for one in alone}) == 3
    for one, other in zip(alone, together, strict=True):
        for name in ("prompt", "null"):
            assert (getattr(one, name) - getattr(other, name)).abs().max() < 1e-5 * getattr(one, name).std()


def test_the_length_of_an_embedding_is_known_before_it_is_computed(encoder_plus: Encoder, photos: Path) -> None:
    images = [photo(photos, 0), photo(photos, 3).resize((96, 192))]
    for prompt in ("make it night", "把咖啡变成茶 ☕ — naïve façade"):
        (found,) = embeds(encoder_plus.text, [(images, prompt)])
        assert encoder_plus.text.count_tokens([image.size for image in images], prompt) == len(found.prompt)
    fresh = with_recipe(encoder_plus)
    assert fresh.inspect(open_source(photos).read(0)).tokens > 0
    assert "vae" not in fresh.__dict__ and "_model" not in fresh.text.__dict__, "weights were read"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        *((f"{word} " * count, "the prompt is too long") for word, count in (("word", 5000), ("wörd", 20_000))),
        *((prompt, "the prompt is empty") for prompt in ("", "   \n")),
        *((prompt, "the prompt") for prompt in ("a <|image_pad|> b", "<|im_end|>")),
    ],
    ids=lambda text: text[:20],
)
def test_a_prompt_that_cannot_stand_in_the_template_or_is_too_long_is_refused_before_it_is_encoded(
    encoder: Encoder, photos: Path, prompt: str, words: str
) -> None:
    for ask in (encoder.inspect, encoder.encode):
        with pytest.raises(RowError, match=words):
            ask(replace(open_source(photos).read(0), prompt=prompt))


# Rows


@pytest.mark.parametrize(("family", "count"), [("edit", 0), ("edit", 2), ("edit_plus", 0)])
def test_a_number_of_controls_that_the_family_does_not_take_is_refused_by_name(
    family: str, count: int, photos: Path, request: pytest.FixtureRequest
) -> None:
    encoder = request.getfixturevalue("encoder" if family == "edit" else "encoder_plus")
    row = open_source(photos).read(0)
    with pytest.raises(RowError) as caught:
        encoder.encode(replace(row, controls=row.controls * count))
    assert f"{count} control images for a model of family {family}" in str(caught.value)
    assert caught.value.hint


def test_with_share_prefix_a_row_does_not_depend_on_its_neighbours_either(encoder: Encoder, photos: Path) -> None:
    row = open_source(photos).read(0)
    variants = [replace(row, prompt=prompt) for prompt in ("make it night", "rain")]
    alone = [encode(with_recipe(encoder, share_prefix=True).encode(variant), "") for variant in variants]
    sharing = with_recipe(encoder, share_prefix=True)
    assert [encode(sharing.encode(variant), "") for variant in reversed(variants)] == alone[::-1]


def close(one: Sample, other: Sample) -> bool:
    pairs = [(one.pixel_latent, other.pixel_latent), (one.prompt_embed, other.prompt_embed)]
    pairs += [
        (one.empty_prompt_embed, other.empty_prompt_embed),
        *zip(one.control_latent, other.control_latent, strict=True),
    ]
    # A last bit before rounding may be a step of FP16 after it.
    return all(bool(torch.isclose(a.float(), b.float(), rtol=2e-3, atol=1e-5).all()) for a, b in pairs)


def test_rows_encoded_together_are_what_each_is_alone_to_fp16(encoder: Encoder, photos: Path) -> None:
    source = open_source(photos)
    rows = [source.read(index) for index in (0, 1, 6)]
    broken = replace(rows[0], index=9, target=b"")
    batched = with_recipe(encoder, batch_size=4).encode_together([rows[0], broken, *rows[1:]])
    assert isinstance(batched[1], RowError)
    samples = [sample for sample in batched if isinstance(sample, Sample)]
    assert all(close(encoder.encode(row), sample) for row, sample in zip(rows, samples, strict=True))
    assert not close(
        samples[0], samples[0].__class__(**{**samples[0].__dict__, "prompt_embed": -samples[0].prompt_embed})
    )


def test_out_of_memory_halves_the_batch_once_and_goes_on(
    encoder: Encoder, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(photos)
    rows = [source.read(index) for index in range(4)]
    small = with_recipe(encoder, batch_size=4)
    sizes = []

    def limited(self: Encoder, part, whole=Encoder._encode_images):
        sizes.append(len(part))
        if len(part) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, part)

    monkeypatch.setattr(Encoder, "_encode_images", limited)
    with pytest.warns(UserWarning, match="continuing with 2 rows at a time") as caught:
        results = small.encode_together(rows)
    assert sizes == [4, 2, 2] and len(caught) == 1
    assert [sample.key for sample in results] == [small.recipe.key(row) for row in rows]
    with warnings.catch_warnings():
        small.encode_together(rows[:3])
    assert sizes == [4, 2, 2, 2, 1]


def test_a_batch_size_is_part_of_the_recipe_and_of_no_other_samples_key(tmp_path: Path) -> None:
    batched = StubEncoder(replace(RECIPE, batch_size=3))
    precompute(StubSource.of(4), batched, tmp_path, rows=(0, 4), shard_size=4)
    assert batched.recipe.digest != RECIPE.digest
    assert json.loads((tmp_path / "00000000-00000004.json").read_text())["recipe"]["batch_size"] == 3


# Storage


def test_storage_clips_and_counts_finite_overflow_and_keeps_bfloat16_exactly() -> None:
    values = torch.tensor([1.0, 65504.0, 65505.0, 70000.0, -1e30, 0.1])
    found = to_storage(values, "x")
    stored, clipped = found.values, found.clipped
    assert stored.tolist() == [1.0, 65504.0, 65504.0, 65504.0, -65504.0, pytest.approx(0.1, rel=1e-3)]
    assert clipped == 3 and stored.dtype == torch.float16
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(to_storage(exact, "x").values.float(), exact.float())
    overflow = to_storage(torch.tensor([1e30], dtype=torch.bfloat16), "x")
    assert overflow.values.item() == 65504.0 and overflow.clipped == 1


def test_storage_rounds_every_bfloat16_and_many_float32_as_numpy_does() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0))
    for values in (every, bits.to(torch.int32).view(torch.float32)):
        finite = values[torch.isfinite(values)]
        exact = finite.double().numpy()
        found = to_storage(finite, "x")
        expected = exact.astype(np.float32).clip(-65504, 65504).astype(np.float16)
        assert np.array_equal(found.values.numpy().view(np.uint16), expected.view(np.uint16))
        assert found.clipped == (abs(exact) > 65504).sum() > 1000


@pytest.mark.gpu
def test_storage_of_a_gpu_is_that_of_a_cpu_in_page_locked_memory() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    values = every[torch.isfinite(every)]
    expected, found = to_storage(values, "x"), to_storage(values.to("cuda:0"), "x")
    assert torch.equal(found.values.view(torch.int16), expected.values.view(torch.int16))
    assert found.clipped == expected.clipped and found.values.is_pinned()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_storage_refuses_nan_and_infinity_by_the_tensors_name(bad: float) -> None:
    with pytest.raises(RowError, match="the target's latent contains NaN or infinity"):
        to_storage(torch.tensor([0.0, bad]), "the target's latent")


def test_an_edit_sample_takes_little_more_than_half_of_six_full_tensors() -> None:
    """At 1024²: 37·37 image tokens of width 3584, a prompt of 25 tokens, five tokens of template after it."""
    before, prompt, null = 37 * 37 + 2, 25, 1 + 5

    def half(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float16)

    sample = Sample(
        key="0" * 64,
        prompt="p",
        pixel_latent=half(16, 1, 128, 128),
        control_latent=(half(16, 1, 128, 128),),
        prompt_embed=half(before + prompt, 3584),
        prompt_embeds_mask=torch.ones(before + prompt, dtype=torch.bool),
        empty_tail=half(null, 3584),
        empty_prompt_embeds_mask=torch.ones(before + null, dtype=torch.bool),
        shared_prefix=before,
    )
    six = [sample.pixel_latent, *sample.control_latent, sample.prompt_embed, sample.empty_prompt_embed]
    full = sum(tensor.nbytes for tensor in six) + len(sample.prompt_embeds_mask) + len(sample.empty_prompt_embeds_mask)
    assert sum(tensor_bytes(sample).values()) <= len(encode(sample, "0" * 16)) <= 0.55 * full


# Hashes


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qie" / "hashes.json"


def settled(path: Path, content: bytes, seconds_ago: int = 60) -> Path:
    path.write_bytes(content)
    then = path.stat().st_mtime - seconds_ago
    os.utime(path, (then, then))
    return path


def test_a_hash_is_remembered_and_a_second_start_reads_nothing(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settled(tmp_path / "weights", b"weights")
    first = file_hashes([path])
    monkeypatch.setattr(qie.file_hashes, "_hash", lambda path: pytest.fail("hashed again"))
    assert file_hashes([path]) == first


@pytest.mark.parametrize("change", ["content", "mtime", "path", "renamed over it", "written within it"])
def test_a_file_that_is_not_the_one_it_was_is_hashed_again(memory: Path, tmp_path: Path, change: str) -> None:
    path = settled(tmp_path / "weights", b"weights")
    file_hashes([path])
    before = path.stat()
    if change == "content":
        settled(path, b"heights!")
    elif change == "mtime":
        settled(path, b"heights", seconds_ago=30)
    elif change == "renamed over it":  # of equal size and time, as `rsync -t` does
        (tmp_path / "new").write_bytes(b"heights")
        os.utime(tmp_path / "new", ns=(before.st_mtime_ns, before.st_mtime_ns))
        (tmp_path / "new").rename(path)
    elif change == "written within it":
        path.write_bytes(b"heights")
        os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    else:
        path = settled(tmp_path / "others", b"heights")
    assert file_hashes([path])[path] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_was_changed_just_now_is_not_remembered(memory: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    file_hashes([path])
    assert not memory.exists()


def test_hashes_that_are_remembered_at_once_are_all_remembered(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two components of a model are hashed by two threads, or models by two processes."""
    paths = [settled(tmp_path / f"weights {number}", b"weights") for number in range(8)]
    together, recall = threading.Barrier(len(paths)), qie.file_hashes._recall
    waited = threading.local()

    def recalled_together() -> dict[str, str]:
        known = recall()
        if not hasattr(waited, "once"):  # all know what is remembered before the first adds to it
            waited.once = True
            together.wait()
        return known

    monkeypatch.setattr(qie.file_hashes, "_recall", recalled_together)
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(file_hashes, [[path] for path in paths]))
    assert {name.partition("|")[0] for name in recall()} == {str(path) for path in paths}


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{", b"[" * 100_000, b'{"a": 1}'])
def test_a_damaged_memory_is_forgotten(memory: Path, tmp_path: Path, content: bytes) -> None:
    memory.parent.mkdir(parents=True)
    memory.write_bytes(content)
    path = settled(tmp_path / "weights", b"weights")
    assert file_hashes([path])
    assert json.loads(memory.read_text())


def test_where_a_checkpoint_lies_and_who_wrote_its_config_do_not_count(tmp_path: Path) -> None:
    for name, note in (("a", "1.0"), ("b", "2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"width": 8, "_diffusers_version": note}))
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(json.dumps({"width": 9}))
    assert content_hash(tmp_path / "a") != content_hash(tmp_path / "b")


# Checkpoints


def cut_tokenizer(model: Path) -> None:
    path = model / "tokenizer" / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["merges"] = values["model"]["merges"][:50]
    path.write_text(json.dumps(values))


def zero_patch(model: Path) -> None:
    path = model / "processor" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 0}))


@pytest.mark.parametrize(
    ("change", "words"),
    [(cut_tokenizer, "another length"), (zero_patch, "the processor cannot be loaded")],
    ids=["a tokenizer of another model", "a size of nothing in a processor"],
)
def test_what_does_not_fit_the_model_is_refused_when_it_is_opened(
    tiny_edit: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    model = Path(shutil.copytree(tiny_edit, tmp_path / "model"))
    change(model)
    with pytest.raises(ModelError, match=words):
        PromptEncoder(open_pretrained(str(model)), CPU, torch.float32)


@pytest.mark.parametrize("typed", ["cafe\u0301", "  caf\u00e9 ", "caf\u00e9\r\n"])
def test_a_prompt_is_the_same_whichever_way_it_was_typed_in_a_row_and_to_generate_with(
    encoder: Encoder, photos: Path, typed: str
) -> None:
    row: Row = open_source(photos).read(0)
    one, other = (replace(row, prompt=prompt) for prompt in ("caf\u00e9", typed))
    assert encode(encoder.encode(one), "") == encode(encoder.encode(other), "")
    image = Image.new("RGB", (128, 96), "teal")
    assert torch.equal(encoder.embed([image], typed), encoder.embed([image], "caf\u00e9"))

"""The names of earlier programs do what they did, by qie's modules."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import qie
from qie.config import Config, load_config
from qie.config.earlier_programs import moved
from qie.data.sources import open_source
from qie.errors import ConfigError, RowError, ShardError, UsageError
from qie.legacy import (
    CacheConfig,
    CacheType,
    EmbeddingCacheManager,
    ImageDataset,
    QwenImageEditTrainer,
    check_cache_exists,
    load_config_from_yaml,
    loader,
)
from qie.legacy.embedding_cache import CACHE_TYPES
from qie.legacy.names import INSTEAD
from qie.legacy.trainer import SETTINGS, STATE
from qie.precompute import precompute
from qie.shards.discovery import published
from tests.builders import make_sample, same_bits, write_shard
from tests.conftest import AREA_PX, ROOT, forget_accelerate

HASH = "ab" * 16


@pytest.fixture
def manager(tmp_path: Path) -> EmbeddingCacheManager:
    return EmbeddingCacheManager(tmp_path)


def test_a_sample_of_the_shards_is_found_by_its_key_also_when_it_is_written_later(
    manager: EmbeddingCacheManager, tmp_path: Path
) -> None:
    sample = make_sample(1)
    write_shard(tmp_path, [make_sample(0)])
    assert not manager.cache_exists("pixel_latent", sample.key)
    write_shard(tmp_path, [sample], start=1)
    for kind in CACHE_TYPES:
        expected = sample.control_latent[0] if kind == "control_latent" else getattr(sample, kind)
        assert manager.cache_exists(kind, sample.key)
        assert same_bits(manager.load_cache(kind, sample.key), expected)
    assert manager.load_cache("pixel_latent", "0" * 64) is None and not manager.cache_exists("pixel_latent", "0" * 64)
    assert manager.get_cache_stats() == dict.fromkeys(CACHE_TYPES, 2)


def test_single_tensors_come_back_in_fp16_and_masks_as_they_were_and_disturb_no_shards(
    manager: EmbeddingCacheManager, tmp_path: Path
) -> None:
    latent, mask = torch.tensor([[1.5, 1e9]], requires_grad=True), torch.tensor([True, False])
    manager.save_cache("pixel_latent", HASH, latent)
    manager.save_cache("prompt_embeds_mask", HASH, mask)
    assert same_bits(manager.load_cache("pixel_latent", HASH), torch.tensor([[1.5, 65504.0]]).half())
    assert same_bits(manager.load_cache("prompt_embeds_mask", HASH), mask)
    assert manager.get_cache_stats() == dict.fromkeys(CACHE_TYPES, 0) | {"pixel_latent": 1, "prompt_embeds_mask": 1}
    write_shard(tmp_path, [make_sample(0)])
    assert len(qie.ShardSet.open([tmp_path])) == 1


def test_what_no_cache_can_hold_is_refused_and_a_damaged_tensor_named(
    manager: EmbeddingCacheManager, tmp_path: Path
) -> None:
    with pytest.raises(RowError, match="NaN"):
        manager.save_cache("pixel_latent", HASH, torch.tensor([float("nan")]))
    with pytest.raises(UsageError, match="kind of tensor"):
        manager.save_cache("pixel_latents", HASH, torch.ones(1))
    with pytest.raises(UsageError, match="not a hash"):
        manager.load_cache("pixel_latent", "../../secret")
    write_shard(tmp_path, [sample := make_sample(0, controls=((2, 2), (4, 4)))])
    with pytest.raises(UsageError, match="several controls"):
        manager.load_cache("control_latent", sample.key)
    manager.save_cache("pixel_latent", HASH, torch.ones(1))
    (tmp_path / "pixel_latent" / f"{HASH}.safetensors").write_bytes(b"no tensor")
    with pytest.raises(ShardError, match=f"(?s)damaged.*{HASH}"):
        manager.load_cache("pixel_latent", HASH)


def test_one_kind_of_single_tensors_is_cleared_alone_and_shards_with_all_else_of_theirs(
    manager: EmbeddingCacheManager, tmp_path: Path
) -> None:
    for kind in CACHE_TYPES:
        manager.save_cache(kind, HASH, torch.ones(1))
    manager.clear_cache("prompt_embed")
    assert [kind for kind in CACHE_TYPES if not manager.cache_exists(kind, HASH)] == ["prompt_embed"]
    sample = make_sample(0)
    write_shard(tmp_path, [sample])
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="together"):
        manager.clear_cache("pixel_latent")
    assert manager.cache_exists("pixel_latent", HASH) and manager.cache_exists("pixel_latent", sample.key)
    manager.clear_cache()
    assert not manager.cache_exists("pixel_latent", HASH) and not manager.cache_exists("pixel_latent", sample.key)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mine.txt"]


def test_a_cache_exists_when_there_is_a_shard_or_single_tensors_to_train_on(tmp_path: Path) -> None:
    assert not check_cache_exists(tmp_path / "nowhere")
    write_shard(tmp_path / "shards", [make_sample(0)])
    assert check_cache_exists(tmp_path / "shards")
    manager = EmbeddingCacheManager(tmp_path / "single")
    for kind in CACHE_TYPES[:4]:
        assert not check_cache_exists(tmp_path / "single")
        manager.save_cache(kind, HASH, torch.ones(1))
    assert check_cache_exists(tmp_path / "single")


def test_hashes_are_of_content(manager: EmbeddingCacheManager, tmp_path: Path) -> None:
    one, copy, other = (tmp_path / name for name in ("one.png", "copy.png", "other.png"))
    for path, content in ((one, b"a"), (copy, b"a"), (other, b"b")):
        path.write_bytes(content)
    image, prompt = manager.get_file_hash_for_image, manager.get_file_hash_for_prompt
    assert image(one) == image(copy) != image(other)
    assert prompt(one, "é") == prompt(copy, "e\u0301") != prompt(other, "é")
    assert prompt(one, "é") not in (prompt(one, "e"), image(one))
    with pytest.raises(UsageError, match="cannot be read"):
        image(tmp_path / "none.png")


def test_key_extractors_say_what_a_value_is_known_by(tmp_path: Path) -> None:
    def size(image: Image.Image) -> tuple[int, int]:
        return image.size

    manager = EmbeddingCacheManager(tmp_path, CacheConfig(key_extractors={"vae": size}))
    small, equal, large = (Image.new("RGB", size) for size in ((2, 2), (2, 2), (2, 3)))
    assert manager.get_key("vae", small) == manager.get_key("vae", equal) != manager.get_key("vae", large)
    assert manager.get_key("text_encoder", "a") != manager.get_key("text_encoder", "b")
    assert manager.get_key("text_encoder", "1") != manager.get_key("text_encoder", 1)
    manager.save_cache("pixel_latent", manager.get_key("vae", small), torch.ones(1))
    assert manager.cache_exists("pixel_latent", manager.get_key("vae", equal))
    with pytest.raises(UsageError, match="text, bytes"):
        manager.get_key("text_encoder", small)
    for name in ("key_extractors", "key_extractor"):  # Quaterion's documents write both
        everything = CacheConfig(**{name: lambda value: "same"})
        assert everything.key("vae", 1) == everything.key("vae", 2)
        with pytest.warns(DeprecationWarning, match="key_extractors is ignored"):
            everything.applied(minimal())


def minimal(**sections: object) -> Config:
    return Config.model_validate({"model": {"pretrained_model_name_or_path": "m"}, **sections})


def test_quaterions_settings_become_sections_of_the_configuration() -> None:
    settings = CacheConfig(CacheType.CPU, batch_size=4, num_workers=3, save_dir="shards")
    found = settings.applied(minimal(train={"epochs": 2}, cache={"keep": {"budget_bytes": 7}}))
    expected = {"use_cache": True, "cache_dir": "shards", "encode_batch_size": 4}
    keep = {"latents": "cpu", "embeds": "cpu", "budget_bytes": 7}
    assert found == minimal(train={"epochs": 2}, cache=expected | {"keep": keep}, data={"reader_threads": 3})


def test_an_encoder_may_have_its_own_type_and_none_at_all_uses_no_cache() -> None:
    keep = CacheConfig(CacheType.NONE, mapping={"vae": CacheType.CPU}).applied(minimal()).cache.keep
    assert (keep.latents, keep.embeds) == ("cpu", "none")
    assert CacheConfig(CacheType.NONE).applied(minimal()).cache.use_cache is False


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, kind in ((True, CacheType.GPU), (False, CacheType.CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert set(CacheConfig().types().values()) == {kind}
    with pytest.raises(ConfigError, match="no GPU"):
        CacheConfig(CacheType.GPU).types()


def test_a_trainable_encoder_cannot_be_cached() -> None:
    encoder = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"(?s)a trainable encoder.*vae"):
        CacheConfig(CacheType.CPU).applied(minimal(), {"vae": encoder})
    CacheConfig(CacheType.CPU, {"vae": CacheType.NONE}).applied(minimal(), {"vae": encoder})
    CacheConfig(CacheType.CPU).applied(minimal(), {"vae": encoder.requires_grad_(False)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mapping": {"text_encodr": CacheType.CPU}}, "(?s)no such encoder.*text_encoder"),
        ({"mapping": {"image_encoder": CacheType.CPU}}, "(?s)no such encoder.*vae, which encodes images"),
        ({"mapping": {"vae": "disk"}}, "no such type"),
        ({"key_extractor": str, "key_extractors": str}, "one setting"),
        ({"cache_type": None}, "cache_type or mapping"),
        ({"cache_type": CacheType.CPU, "batch_size": 0}, "(?s)refused.*encode_batch_size"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**settings).applied(minimal())


def write_config(folder: Path, tiny_edit: Path, photos: Path) -> Path:
    settings = {
        "model": {"pretrained_model_name_or_path": str(tiny_edit), "lora": {"r": 2}},
        "data": {"source": str(photos), "area_px": AREA_PX, "allow_tiny": True},
        "cache": {"cache_dir": str(folder / "shards")},
        "train": {"max_steps": 2, "mixed_precision": "no", "output_dir": str(folder / "run")},
        "optimizer": {"init_args": {"lr": 0.01}},
        "lr_scheduler": {"warmup_steps": 0},
        "validation": {"rows": 0},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(settings))
    return folder / "my.yaml"


def with_shards(config: Path, made: Path) -> Path:
    """The same configuration, with shards, which are trained on as they are."""
    shutil.copytree(made, config.parent / "shards")
    settings = yaml.safe_load(config.read_text())
    settings["cache"]["trust_published"] = True
    config.write_text(yaml.safe_dump(settings))
    return config


@pytest.fixture
def config(tmp_path: Path, tiny_edit: Path, photos: Path) -> Path:
    return write_config(tmp_path, tiny_edit, photos)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, photos: Path, encoder) -> Path:
    """Shards of four photographs."""
    folder = tmp_path_factory.mktemp("made") / "shards"
    precompute(open_source(photos), encoder, folder, rows=(0, 4))
    return folder


@pytest.fixture
def cached(config: Path, made: Path) -> Path:
    return with_shards(config, made)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, tiny_edit: Path, photos: Path, made: Path) -> QwenImageEditTrainer:
    """A trainer after `fit`, with the configuration of `cached`."""
    trainer = QwenImageEditTrainer(
        with_shards(write_config(tmp_path_factory.mktemp("fitted"), tiny_edit, photos), made)
    )
    trainer.fit()
    forget_accelerate()
    return trainer


def elsewhere(cached: Path, *settings: str) -> QwenImageEditTrainer:
    """A trainer with an output folder of its own."""
    return QwenImageEditTrainer(load_config(cached, [f"train.output_dir={cached.parent / 'own'}", *settings]))


def adapter(folder: Path) -> dict[str, list[float]]:
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def test_the_trainer_caches_the_rows_as_qie_precompute_does(config: Path, made: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    assert not trainer.cache_exist
    report = trainer.cache_step(2)
    assert (report.encoded, trainer.cache_exist) == (1, True)
    rows = open_source(load_config(config).data.source)
    assert trainer.cache_step(rows.read(2)).encoded == 0
    with pytest.raises(UsageError, match="not in data"):
        trainer.cache_step(replace(rows.read(2), prompt="another"))
    with pytest.warns(DeprecationWarning, match="cache.vae_encoder_device"):
        trainer.cache_step(2, "cuda:0")
    trainer.cache_embeddings()
    found, expected = (qie.ShardSet.open([folder]).keys for folder in (config.parent / "shards", made))
    assert set(expected) <= set(found) and len(found) == len(rows)


def test_the_examples_of_the_documents_run(config: Path, photos: Path) -> None:
    """docs/trainer-architecture.md, docs/cache-system.md and src/main.py of qwen-image-finetune, but for their paths.
    Their loader says of what; the configuration names neither rows nor a cache."""
    folder = config.parent / "few"
    for part in ("training_images", "control_images"):
        (folder / part).mkdir(parents=True)
        for path in sorted((photos / part).iterdir())[:4]:
            shutil.copy(path, folder / part)
    tree = yaml.safe_load(config.read_text())
    del tree["data"]["source"], tree["cache"]
    config.write_text(yaml.safe_dump(tree))
    cache = config.parent / "cache"
    trainer = QwenImageEditTrainer(load_config_from_yaml(config))
    init_args = {"dataset_path": str(folder), "cache_dir": str(cache), "use_cache": True, "cache_drop_rate": 0.1}
    train_dataloader = loader("src.data.dataset.ImageDataset", init_args, batch_size=2, shuffle=True)
    assert [item["cached"] for item in map(train_dataloader.dataset.__getitem__, range(1))] == [False]
    trainer.cache(train_dataloader)
    trainer.fit(train_dataloader)
    assert (trainer.batch_size, trainer.config.data.caption_dropout_rate, trainer.cache_dir) == (2, 0.1, str(cache))
    assert trainer.outcome.step == 2

    dataset = ImageDataset(init_args)
    sample = dataset[0]
    assert sample["cached"] and sample["image"].shape[0] == 3 and sample["image"].dtype == np.uint8
    shards = qie.ShardSet.open([cache])
    expected = shards.load(shards.keys.index(sample["file_hashes"]["image_hash"]))
    assert same_bits(sample["pixel_latent"], expected.pixel_latent) and sample["prompt"] == expected.prompt
    batch = next(iter(loader(str(folder), cache_dir=str(cache))))
    assert all(batch["cached"]) and set(CACHE_TYPES) < batch.keys()
    assert loader(str(folder), cache_dir=str(cache)).dataset.get_cache_stats() == dict.fromkeys(
        CACHE_TYPES, len(dataset)
    )
    assert trainer.cache_step(sample).encoded == 0

    again = QwenImageEditTrainer(load_config(config, [f"train.output_dir={config.parent / 'own'}"]))
    batches = again.accelerator_prepare(train_dataloader)
    again.set_lora()
    assert float(again._training_step_cached(next(iter(batches))).detach()) > 0


def test_a_loader_of_what_no_cache_holds_is_refused(tmp_path: Path, photos: Path) -> None:
    with pytest.raises(UsageError, match="custom dataset classes are not imported"):
        loader("os.system", {"dataset_path": str(photos)})
    with pytest.raises(UsageError, match="ImageDataset has no image_size") as caught:
        loader(str(photos), image_size=[832, 576])
    assert moved("image_size") in str(caught.value)
    with pytest.raises(UsageError, match="ImageDataset has no cache_dri"):
        ImageDataset({"dataset_path": str(photos), "cache_dri": "x"})
    with pytest.warns(DeprecationWarning, match=r"data\.reader_threads"):
        loader(str(photos), num_workers=2)
    assert ImageDataset({"dataset_path": str(photos)}).get_cache_stats() is None


def test_fit_is_qie_train_and_its_adapter_is_saved(fitted: QwenImageEditTrainer, tmp_path: Path) -> None:
    assert (fitted.outcome.step, fitted.global_step) == (2, 2)
    fitted.save_lora(tmp_path / "lora")
    assert adapter(tmp_path / "lora") == adapter(fitted.outcome.checkpoint)


def test_without_a_cache_rows_are_encoded_live_and_written_through_as_qie_train_does(
    config: Path, tmp_path: Path
) -> None:
    live = ["cache.use_cache=false", "train.max_steps=1", "validation.rows=0"]
    trainer = QwenImageEditTrainer(load_config(config, live))
    assert trainer.fit().step == 1 and not trainer.cache_exist
    through = ["cache.write_through=true", f"cache.cache_dir={tmp_path / 'through'}"]
    assert elsewhere(config, *live, *through).fit().step == 1
    assert list((tmp_path / "through").glob("*.tar"))


def loop(trainer: QwenImageEditTrainer, steps: int) -> None:
    """The first steps of training, as a program with its own loop takes them."""
    for batch in trainer.stream:
        trainer.accelerator.backward(trainer.training_step(batch))
        torch.nn.utils.clip_grad_norm_([p for p in trainer.transformer.parameters() if p.requires_grad], 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
        trainer.global_step += 1
        if trainer.global_step == steps:
            break


def test_a_loop_of_ones_own_takes_the_steps_of_fit(cached: Path, fitted: QwenImageEditTrainer) -> None:
    trainer = elsewhere(cached)
    trainer.load_model()
    trainer.setup_accelerator()
    trainer.set_lora()
    trainer.configure_optimizers()
    trainer.set_model_devices("train")
    loop(trainer, 2)
    trainer.save_lora(cached.parent / "lora")
    saved = trainer.save_checkpoint(global_step=2)
    assert saved.name == "checkpoint-000002"
    assert adapter(cached.parent / "lora") == adapter(saved) == adapter(fitted.outcome.checkpoint)


def test_a_checkpoint_of_ones_own_loop_is_gone_on_from_exactly(cached: Path, fitted: QwenImageEditTrainer) -> None:
    trainer = elsewhere(cached)
    trainer.set_lora()
    trainer.configure_optimizers()
    loop(trainer, 1)
    with pytest.warns(DeprecationWarning, match="epoch is ignored"):
        trainer.save_checkpoint(0)
    resumed = elsewhere(cached).fit(resume="latest")
    assert resumed.step == 2 and adapter(resumed.checkpoint) == adapter(fitted.outcome.checkpoint)


def test_what_is_loaded_is_trained_on_and_generated_with(cached: Path, fitted: QwenImageEditTrainer) -> None:
    saved, trainer = fitted.outcome.checkpoint, elsewhere(cached)
    image = Image.open(_picture(cached.parent))
    plain = trainer.predict(image, "make it night", num_inference_steps=2)
    with pytest.warns(DeprecationWarning, match="model.adapters"):
        trainer.load_lora(saved, "default")
    generated = trainer.predict(image, "make it night", num_inference_steps=2)
    assert generated.dtype == np.uint8 and generated.shape[-1] == 3 and not np.array_equal(plain, generated)
    expected = qie.open_predictor(load_config(cached), saved).generate([image], "make it night", steps=2, cfg=4.0)
    assert np.array_equal(generated, np.asarray(expected))
    trainer.set_lora()
    trainer.save_lora(cached.parent / "lora")
    assert adapter(cached.parent / "lora") == adapter(saved)
    with pytest.raises(UsageError, match="already loaded"):
        trainer.load_lora(saved)


def _picture(folder: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    return folder / "picture.png"


def test_several_prompts_give_several_images_and_a_negative_prompt_guides(config: Path) -> None:
    trainer, image = QwenImageEditTrainer(config), Image.open(_picture(config.parent))
    one, other = trainer.predict([image, image], ["make it night", "add snow"], num_inference_steps=2)
    guided = trainer.predict(image, "add snow", "blur", num_inference_steps=2, true_cfg_scale=4.0)
    assert not np.array_equal(one, other) and not np.array_equal(other, guided)
    plain = trainer.predict(image, "add snow", None, num_inference_steps=2)
    assert not np.array_equal(other, plain), "an empty negative prompt guides, as the documents have it"
    refusals = [
        ("its own image", [image], ["make it night", "add snow"], {}),
        *((r"image", odd, "add snow", {}) for odd in (np.zeros((4, 4)), torch.ones(1), "nowhere.png", 3)),
        ("not a prompt", image, 3, {}),
        ("each negative prompt", image, "add snow", {"negative_prompt": ["blur", "noise"]}),
        ("no tensors", image, "add snow", {"prompt_embeds": torch.ones(1)}),
    ]
    for words, given, prompt, more in refusals:
        with pytest.raises(UsageError, match=words):
            trainer.predict(prompt_image=given, prompt=prompt, **more)
    with pytest.warns(DeprecationWarning, match="cache.compute_dtype"):
        trainer.predict(image, "add snow", num_inference_steps=2, weight_dtype=torch.bfloat16)


def test_images_are_given_as_arrays_and_paths_and_the_result_is_both_images_and_array(config: Path) -> None:
    path, trainer = _picture(config.parent), QwenImageEditTrainer(config)
    array = np.asarray(Image.open(path))
    results = [
        trainer.predict(prompt_image=image, prompt="add snow", num_inference_steps=2, true_cfg_scale=1.0)
        for image in (array, path, str(path), Image.open(path).convert("RGBA"), [array])
    ]
    results[0][0].save(config.parent / "output.png")
    saved = np.asarray(Image.open(config.parent / "output.png"))
    assert saved.shape == results[0].shape and all(np.array_equal(saved, result) for result in results)
    assert same_bits(*(trainer.encode_prompt("add snow", image)[0] for image in (array, path)))
    assert trainer.encode_prompt_image_embedding("add snow", array)[1].all()


def test_prompts_are_embedded_and_padded(config: Path) -> None:
    trainer, image = QwenImageEditTrainer(config), Image.open(_picture(config.parent))
    embeds, mask = trainer.encode_prompt(["add snow", "make it night, and then some more"], [image, image])
    alone, whole = trainer.encode_prompt("add snow", image)
    assert bool(whole.all()) and mask.sum(1).tolist() == [alone.shape[1], embeds.shape[1]]
    assert torch.equal(embeds[0, : alone.shape[1]], alone[0]) and not embeds[0, alone.shape[1] :].any()


def test_latents_are_decoded_as_the_pipeline_does(cached: Path) -> None:
    trainer, shards = QwenImageEditTrainer(cached), qie.ShardSet.open([cached.parent / "shards"])
    one = shards.load(0).pixel_latent.clone()
    pipeline = qie.open_predictor(load_config(cached)).pipeline
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std)
    )
    for latents in (one[None], torch.stack([one, one.flip(-1)])):
        with torch.inference_mode():
            decoded = pipeline.vae.decode(latents.float() * std + mean, return_dict=False)[0][:, :, 0]
        expected = np.stack([np.asarray(image) for image in pipeline.image_processor.postprocess(decoded)])
        found = trainer.decode_vae_latent(latents)
        assert found.shape == (len(latents), *(8 * side for side in one.shape[-2:]), 3)
        assert np.array_equal(found, expected) and found.std() > 0
    assert np.array_equal(trainer.decode_vae_latent(one), trainer.decode_vae_latent(one[None])[0])
    with pytest.raises(UsageError, match="not latents"):
        trainer.decode_vae_latent(one[0])


def test_merged_in_memory_the_model_predicts_as_with_its_adapter_and_merged_into_a_folder_it_is_a_transformer(
    cached: Path, fitted: QwenImageEditTrainer
) -> None:
    fitted.merge_lora(cached.parent / "merged")
    assert (cached.parent / "merged" / "config.json").is_file()
    trainer = elsewhere(cached)
    trainer.load_lora(fitted.outcome.checkpoint / "pytorch_lora_weights.safetensors")
    trainer.set_lora()
    batch = next(iter(trainer.stream))
    with torch.no_grad():
        before = trainer.training_step(batch)
        weight = trainer.transformer.transformer_blocks[0].attn.to_q.base_layer.weight
        base = weight.clone()
        trainer.merge_lora()
        trainer._run.batches_done = 0  # for the same noise
        after = trainer.training_step(batch)
    assert torch.allclose(before, after, rtol=1e-5) and not torch.equal(base, weight)


def test_a_model_is_quantised_in_place(cached: Path) -> None:
    pytest.importorskip("torchao")
    from qie.training.model.load import load_transformer
    from qie.training.model.quantize import is_quantized

    trainer = QwenImageEditTrainer(cached)
    transformer = load_transformer(trainer.pretrained, torch.float32)
    assert is_quantized(trainer.quantize_model(transformer, "meta"))
    assert {weight.device.type for weight in transformer.parameters()} == {"meta"}, "all of it, not only its blocks"
    trainer.quantize = True
    trainer.set_lora()
    assert is_quantized(trainer.transformer) and trainer.quantize == "fp8"
    with pytest.raises(UsageError, match="before set_lora"):
        trainer.quantize = False


def test_what_has_no_meaning_any_more_is_said_to_have_none(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    loader = torch.utils.data.DataLoader([1])
    for call in (trainer.fit, trainer.cache):
        with pytest.raises(UsageError, match="loaders of other libraries"):
            call(loader)
    with pytest.raises(UsageError, match="not a batch"):
        trainer.training_step({"image": 1})
    with pytest.raises(UsageError, match="call set_lora first") as caught:
        trainer.configure_optimizers()
    assert "for training" in caught.value.what
    with pytest.raises(UsageError, match="no such mode"):
        trainer.set_model_devices("trian")
    with pytest.raises(UsageError, match="not a row"):
        trainer.cache_step({"image": 1})
    with pytest.raises(UsageError, match="not a qie configuration"):
        QwenImageEditTrainer({"model": {}})
    with pytest.warns(DeprecationWarning, match="text_encoder_device"):
        trainer.load_model("cuda:1")
    assert not published(config.parent / "shards")


def test_attributes_are_the_configurations_and_no_others_can_be_set(config: Path) -> None:
    trainer = QwenImageEditTrainer(config)
    assert (trainer.use_cache, trainer.batch_size, trainer.quantize) == (True, 1, None)
    assert trainer.weight_dtype == torch.float32 and trainer.cache_dir == str(config.parent / "shards")
    assert trainer.vae_scale_factor == 8 and trainer.vae_z_dim == len(trainer.vae_latent_mean) == 16
    assert len(trainer.vae_latent_std) == 16 and trainer.scheduler.config.num_train_timesteps == 1000
    trainer.weight_dtype, trainer.batch_size, trainer.use_cache = torch.bfloat16, 2, False
    found = trainer.config
    assert (found.train.mixed_precision, found.data.batch_size, found.cache.use_cache) == ("bf16", 2, False)
    with pytest.raises(ConfigError, match="a value is refused"):
        trainer.batch_size = 0
    with pytest.raises(UsageError, match="vae cannot be set"):
        trainer.vae = torch.nn.Identity()
    with pytest.raises(UsageError, match="QwenImageEditTrainer has no batch_sise"):
        trainer.batch_sise = 2
    assert not hasattr(trainer, "batch_sise")


def test_each_name_without_a_face_answers_with_what_the_migration_page_says(config: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines() if line.startswith("| ")]
    for name, sentence in INSTEAD.items():
        said = {right for left, right in rows if re.search(rf"(?<![\w]){name}(?!\w)", left)}
        assert sentence in said, name
    trainer, manager = QwenImageEditTrainer(config), EmbeddingCacheManager(tmp_path)
    askings = {
        "text_encoder": lambda: trainer.text_encoder,
        "prepare_latents": lambda: trainer.prepare_latents(torch.ones(1)),
        "save_cache_embedding": lambda: manager.save_cache_embedding({}, {}, {}),
        "EmbeddingCacheHook": lambda: importlib.import_module("qie.legacy").EmbeddingCacheHook,
    }
    for name, asking in askings.items():
        with pytest.raises(UsageError, match=f"has no {name}") as caught:
            asking()
        assert f"now: {INSTEAD[name]}" in str(caught.value)
    for asking in (lambda: trainer.prompt_image_dropout_rate, lambda: setattr(trainer, "prompt_image_dropout_rate", 0)):
        with pytest.raises(UsageError, match="has no prompt_image_dropout_rate") as caught:
            asking()
        assert "nearest are data.caption_dropout_rate and data.control_dropout_rate" in str(caught.value)


def test_each_name_with_a_face_is_on_the_migration_page() -> None:
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    left = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    own = {"pretrained", "config", "encoder", "outcome", "stream", "key_of", "get_key"}  # what only qie has
    faces = {name for face in (QwenImageEditTrainer, EmbeddingCacheManager) for name in dir(face) if name[0] != "_"}
    names = (faces | {*SETTINGS, *STATE}) - own
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", left)) == []


def test_a_vae_that_is_unfrozen_cannot_be_trained_with_its_cache(cached: Path) -> None:
    trainer = QwenImageEditTrainer(cached)
    trainer.vae.requires_grad_(True)
    for begin in (trainer.set_lora, trainer.fit):
        with pytest.raises(ConfigError, match="a trainable encoder"):
            begin()


def test_the_keys_and_names_that_the_migration_page_gives_are_there() -> None:
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    now = [code for _, right in rows for code in re.findall(r"`(\w+(?:\.\w+)+)", right) if code.split(".")[0] != "qie"]
    keys = [code.split(".") for code in now if code.split(".")[0] in Config.model_fields]
    assert len(keys) > 20
    for key in keys:
        section = Config
        for name in key:
            assert name in section.model_fields, ".".join(key)
            if name == "init_args":  # whatever the class takes
                break
            found = section.model_fields[name].annotation
            parts = [found, *get_args(found)]
            section = next(
                (part for part in parts if isinstance(part, type) and hasattr(part, "model_fields")), section
            )
    for name in re.findall(r"`((?:qie\.)[\w.]+)", text):
        assert pkgutil.resolve_name(name), name

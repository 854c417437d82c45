"""The model card and run.json: what is told of a run, and what is not."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml

from qie.config import load_config
from qie.errors import QieError
from qie.training.model.lora import save_adapter
from qie.training.reporting.card import (
    CARD_FILE,
    RUN_FILE,
    card_text,
    data_digest,
    public_config,
    read_run,
    write_card,
    write_run,
)
from tests.training.adapters import NoProcessor, trained_adapter, transformer_of
from tests.training.reports import config, report


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def block(card: str, language: str) -> str:
    """The content of a fenced block, as Markdown ends it: at the first line that is its fence, or longer."""
    [(_, content)] = re.findall(rf"^(`{{3,}}){language}\n(.*?)^\1`*$", card, re.MULTILINE | re.DOTALL)
    return content


def test_the_front_matter_is_what_the_hub_reads() -> None:
    front = front_matter(card_text(report(), on_hub=True))
    assert front["base_model"] == "Qwen/Qwen-Image-Edit"
    assert front["base_model_relation"] == "adapter"
    assert front["library_name"] == "diffusers"
    assert front["pipeline_tag"] == "image-to-image"
    assert "lora" in front["tags"]
    assert "license" not in front
    assert front_matter(card_text(report(), on_hub=True, license="apache-2.0"))["license"] == "apache-2.0"


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch):
    """What the code of the card in tmp_path loads, run there."""

    def load(pipeline: type, processor: object = None) -> object:
        original = pipeline.from_pretrained
        # Its processor of videos needs torchvision, which is not installed.
        absent = {"processor": processor, "text_encoder": None} | ({} if processor else {"tokenizer": None})
        monkeypatch.setattr(pipeline, "from_pretrained", lambda path, **how: original(path, **how, **absent))
        monkeypatch.chdir(tmp_path)
        found: dict = {}
        exec(block((tmp_path / CARD_FILE).read_text(), "python"), found)
        return found["pipe"].transformer

    return load


# The new name, `dtype`, is not understood by older releases, and a reader of a card may have any.
renamed = pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")


@renamed
def test_the_card_s_code_loads_the_adapter(tiny_edit: Path, tmp_path: Path, loaded) -> None:
    trained = trained_adapter(tiny_edit, r=4, lora_alpha=10.0)
    save_adapter(trained, tmp_path)
    write_card(tmp_path, report(base_model=str(tiny_edit)))
    found = loaded(diffusers.QwenImageEditPipeline)
    weights = {name.replace("default_0", "default"): weight for name, weight in found.named_parameters()}
    assert weights.keys() == dict(trained.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight.bfloat16()) for name, weight in trained.named_parameters())


@renamed
@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_the_card_s_code_merges_an_adapter_that_is_no_lora(tiny_edit: Path, tmp_path: Path, loaded, kind: str) -> None:
    trained = trained_adapter(tiny_edit, kind=kind, r=2)
    save_adapter(trained, tmp_path)
    full = config(model={"pretrained_model_name_or_path": str(tiny_edit), "lora": {"kind": kind, "r": 2}})
    write_card(tmp_path, report(full, base_model=str(tiny_edit)))
    found = dict(loaded(diffusers.QwenImageEditPipeline).named_parameters())
    assert found.keys() == dict(transformer_of(tiny_edit).named_parameters()).keys()
    layer = trained.transformer_blocks[0].attn.to_q
    merged = layer.base_layer.weight + layer.get_delta_weight("default")
    assert (found["transformer_blocks.0.attn.to_q.weight"] - merged).abs().max() < 0.02 * merged.abs().max()
    assert kind in front_matter((tmp_path / CARD_FILE).read_text())["tags"]


@renamed
def test_the_card_s_code_loads_a_transformer_of_which_all_was_trained(tiny_edit_plus: Path, tmp_path, loaded) -> None:
    trained = transformer_of(tiny_edit_plus)
    torch.nn.init.ones_(trained.img_in.weight)
    trained.save_pretrained(tmp_path / "transformer")
    full = config(model={"pretrained_model_name_or_path": str(tiny_edit_plus), "lora": None})
    write_card(tmp_path, report(full, base_model=str(tiny_edit_plus), family="edit_plus"))
    assert (loaded(diffusers.QwenImageEditPlusPipeline).img_in.weight == 1).all()
    assert "lora" not in front_matter((tmp_path / CARD_FILE).read_text())["tags"]


@renamed
@pytest.mark.parametrize("adapter", [True, False])
def test_the_card_s_code_loads_what_was_trained_of_qwen_image_21(
    tiny_21: Path, tmp_path, loaded, adapter: bool
) -> None:
    trained = trained_adapter(tiny_21, r=4) if adapter else transformer_of(tiny_21)
    if adapter:
        save_adapter(trained, tmp_path)
    else:
        torch.nn.init.ones_(trained.img_in.weight)
        trained.save_pretrained(tmp_path / "transformer")
    model = {"pretrained_model_name_or_path": str(tiny_21)} | ({} if adapter else {"lora": None})
    write_card(tmp_path, report(config(model=model), base_model=str(tiny_21), family="qwen_image_21"))
    found = loaded(diffusers.QwenImage21Pipeline, NoProcessor())
    weights = {name.replace("default_0", "default"): weight for name, weight in found.named_parameters()}
    assert weights.keys() == dict(trained.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight.bfloat16()) for name, weight in trained.named_parameters())


def test_the_card_tells_whether_the_model_was_taught_to_edit_and_how_it_is_called() -> None:
    for controls, tag, usage in (
        (0, "text-to-image", "`pipe(prompt=…).images[0]` is then an image. "),
        (2, "image-to-image", "an image, and `pipe(prompt=…, image=[…]).images[0]` an edited one. "),
    ):
        told = card_text(report(family="qwen_image_21", most_controls=controls), on_hub=True)
        assert front_matter(told)["pipeline_tag"] == tag and usage in told
        assert ("image-editing" in front_matter(told)["tags"]) == bool(controls)
        assert "qwen-image-2.1" in front_matter(told)["tags"] and "without guidance" in told
    assert "`pipe(image=…, prompt=…)" in card_text(report(), on_hub=True)
    if pipeline := getattr(diffusers, "QwenImage21Pipeline", None):
        called = inspect.signature(pipeline.__call__).parameters
        assert {"prompt", "image"} <= called.keys() and called["true_cfg_scale"].default == 1.0


@pytest.mark.parametrize("settings", [{}, {"train": {"epochs": 3}}, {"train": {"max_steps": 7}}])
def test_the_card_s_configuration_can_be_run_again(tmp_path: Path, settings) -> None:
    prompt = "say `hi`\n```yaml\nmodel: other\n```\n| ${HOME} $${x} | ---\n# no title"
    samples = [{"images": ["in.png"], "prompt": prompt}]
    original = config(**settings, validation={"samples": samples}, optimizer={"init_args": {"lr": 1e-5}})
    (tmp_path / "again.yaml").write_text(block(card_text(report(original), on_hub=True), "yaml"))
    again = load_config(tmp_path / "again.yaml")
    assert again.model_dump() == original.model_dump()


def test_names_cannot_break_out_of_the_card() -> None:
    odd = 'a`b``"c" | d\n# e'
    card = card_text(report(base_model=odd, devices=(odd,)), on_hub=True)
    assert front_matter(card)["base_model"] == odd
    assert [line for line in card.splitlines() if line.startswith("#")] == [
        '# LoRA of ``` a`b``"c" | d # e ```',
        "## Configuration",
    ]
    assert '| devices | 1 × ``` a`b``"c" \\| d # e ``` |' in card.splitlines()
    compile(block(card, "python"), "card", "exec")


def test_a_local_folder_is_not_told_to_the_hub_as_base_model_and_a_readme_of_another_author_stays(
    tmp_path: Path,
) -> None:
    card = tmp_path / CARD_FILE
    (tmp_path / "a" / "model").mkdir(parents=True)
    for base, told in ((str(tmp_path / "a" / "model"), False), ("Qwen/Qwen-Image-Edit", True)):
        write_card(tmp_path, report(base_model=base, steps=1 + told))
        assert (
            "base_model" in front_matter(card.read_text())
        ) == told and f"| steps | {1 + told} |" in card.read_text()
    card.write_text("mine")
    write_card(tmp_path, report())
    assert card.read_text() == "mine"


def test_the_card_tells_which_adapters_and_which_vae_the_model_had_in_training() -> None:
    adapters = [{"path": "style.safetensors", "scale": 0.5}, {"path": "fast.safetensors", "train_only": True}]
    model = {"pretrained_model_name_or_path": "m", "adapters": adapters, "vae": "someone/vae"}
    told = card_text(report(config(model=model)), on_hub=True)
    assert "| adapters to load beside it | 0.5 × `style.safetensors` |" in told
    assert "| adapters of training alone | 1 × `fast.safetensors` |" in told
    assert "| VAE | `someone/vae` |" in told
    assert not re.search(r"^\| (adapters|VAE)", card_text(report(), on_hub=True), re.MULTILINE)


def test_the_card_tells_that_preferences_were_learnt_and_how_many_held_out_pairs_are_right() -> None:
    accuracies = ((0, 0.5), (200, 0.75), (400, 0.875))
    loss = {"kind": "flow_dpo", "beta": 500, "supervised_weight": 0.5}
    told = card_text(report(config(loss=loss), validation_accuracies=accuracies), on_hub=True)
    assert "by Flow-DPO with β = 500, with 0.5 × the error of the preferred |" in told
    assert "| held-out pairs whose target is preferred | 50% at step 0 → 88% at step 400 |" in told
    assert not re.search("Flow-DPO|held-out", card_text(report(), on_hub=True))


def test_the_card_tells_losses_and_leaves_out_what_is_not_known() -> None:
    card = card_text(report(), on_hub=True)
    assert "1.5000 at step 0 → 0.2500 at step 400" in card
    assert "0.0625" in card
    bare = report(final_loss=None, validation_losses=(), peak_memory_bytes=None, samples_per_s=None)
    names = {line.split(" | ")[0].strip("| ") for line in card_text(bare, on_hub=True).splitlines() if line[:1] == "|"}
    assert not names & {"training loss, last step", "validation loss", "peak memory, bytes", "samples per second"}
    assert "steps" in names


def test_run_json_round_trips_but_for_a_loss_that_is_no_number(tmp_path: Path) -> None:
    told = [
        report(validation_accuracies=((0, 0.5),)),
        report(final_loss=None, finished="2026-11-20T11:00:00+00:00", validation_losses=()),
    ]
    for given, found in [*zip(told, told, strict=True), (report(final_loss=float("nan")), report(final_loss=None))]:
        write_run(tmp_path, given)
        assert read_run(tmp_path) == found


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": 1}'])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(QieError, match="report cannot be read"):
        read_run(tmp_path)


def test_secrets_are_in_neither_file(tmp_path: Path) -> None:
    secret = "s3cr3t"
    arguments = {
        "lr": 1e-4,
        "api_key": secret,
        "authToken": secret,
        "nested": [{"PASSWORD": secret, "secrets": {"a": [secret], "b": 1}}],
    }
    settings = config(
        optimizer={"init_args": arguments},
        data={"source": f"https://user:{secret}@host/rows.csv?sig={secret}&x=1"},
        cache={"cache_dir": f"https://host/shards?X-Amz-Signature={secret}"},
    )
    # Also of a configuration that did not go through public_config.
    for tree in (public_config(settings), settings.model_dump(mode="json")):
        told = replace(report(), config=tree)
        write_run(tmp_path, told)
        write_card(tmp_path, told)
        for file in (RUN_FILE, CARD_FILE):
            text = (tmp_path / file).read_text()
            assert secret not in text
            assert "host/rows.csv" in text
        assert read_run(tmp_path).config["optimizer"]["init_args"]["lr"] == 1e-4


def test_the_configuration_s_own_values_are_no_secrets() -> None:
    tree = public_config(config(data={"source": "s3://bucket/rows-00?.tar"}))
    assert tree == config(data={"source": "s3://bucket/rows-00?.tar"}).model_dump(mode="json")
    assert "***" not in json.dumps(asdict(report()))


def test_the_data_digest_is_sha256_of_the_keys_in_ascending_order() -> None:
    keys = np.random.default_rng(0).integers(0, 256, (50, 32), dtype=np.uint8)
    keys[:10, :24] = 0  # only their ends differ
    for given in (keys, keys[np.random.default_rng(1).permutation(50)], keys[:1]):
        for out in ([], [0]):
            expected = hashlib.sha256(b"".join(sorted(bytes(key) for key in np.delete(given, out, axis=0)))).hexdigest()
            assert data_digest(stream_of(given, out)) == expected


def test_of_millions_of_samples_the_data_digest_follows_from_that_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.training.reporting.card.AT_ONCE", 49)
    keys = np.random.default_rng(0).integers(0, 256, (50, 32), dtype=np.uint8)
    digests = [data_digest(stream_of(given, out)) for given in (keys, keys[::-1]) for out in ([], [0], [1])]
    assert len(set(digests)) == 6 and data_digest(stream_of(keys, [])) == digests[0]


def stream_of(keys: np.ndarray, held_out: list[int]) -> Any:
    digest = hashlib.sha256(keys.tobytes()).hexdigest()
    return SimpleNamespace(
        samples=SimpleNamespace(columns=keys, digests=keys, digest=digest), held_out=np.array(held_out, np.int64)
    )

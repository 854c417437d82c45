"""A report of a run that nobody took."""

from __future__ import annotations

import json

from qie.config import Config
from qie.recipe import Recipe
from qie.training.reporting.card import RunReport, library_versions, public_config

RECIPE = Recipe(
    family="edit",
    **{name: name[0] * 64 for name in ("vae", "text_encoder", "tokenizer", "processor", "template", "resampling")},
    areas_px=(1024 * 1024,),
    text_area_px=None,
    vae_dtype="bfloat16",
    text_dtype="bfloat16",
)


def config(**sections) -> Config:
    return Config.model_validate({"model": {"pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit"}, **sections})


def report(settings: Config | None = None, **values) -> RunReport:
    tree = public_config(settings or config())
    known = {
        "base_model": "Qwen/Qwen-Image-Edit",
        "family": "edit",
        "config": tree,
        "recipe": json.loads(json.dumps(RECIPE.to_dict())),
        "recipe_digest": RECIPE.digest,
        "data_digest": "d" * 64,
        "samples": 1200,
        "versions": library_versions(),
        "devices": ("NVIDIA H200", "NVIDIA H200"),
        "world_size": 2,
        "started": "2026-11-20T10:00:00+00:00",
        "finished": None,
        "steps": 500,
        "final_loss": 0.0625,
        "validation_losses": ((0, 1.5), (200, 0.75), (400, 0.25)),
        "checkpoints": ("checkpoint-000500",),
        "peak_memory_bytes": 41_000_000_000,
        "samples_per_s": 1.25,
    }
    return RunReport(**known | values)

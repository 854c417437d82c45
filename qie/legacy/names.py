"""Names of the earlier programs that have no counterpart here, and what replaced them, as docs/migration.md lists them.

Names of configuration keys are in `qie.config.earlier_programs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from qie.config.earlier_programs import moved
from qie.errors import GoneError, UsageError

INSTEAD = {
    "text_encoder": "`encoder.embed(images, prompt)` of `qie.open_encoder(config)`",
    "tokenizer": "`encoder.embed(images, prompt)` of `qie.open_encoder(config)`",
    "processor": "`encoder.embed(images, prompt)` of `qie.open_encoder(config)`",
    "encode_image_embedding": "`encoder.vae.encode(pixels)`, or `encoder.encode(row)`",
    "_encode_vae_image": "`encoder.vae.encode(pixels)`, or `encoder.encode(row)`",
    "prepare_latents": "`encoder.encode(row)` to train, `predictor.generate(images, prompt)` to generate",
    "_get_qwen_prompt_embeds": "`encode_prompt(prompt, image)`",
    "_compute_loss": "`training_step(batch)`",
    "EmbeddingCacheHook": "`qie.precompute.precompute`, or `qie-precompute`",
    "save_cache_embedding": "`qie.precompute.precompute`, or `qie-precompute`",
    "get_hash": "`encoder.recipe.key(row)`",
}
"""A name -> what takes its place, in the words of docs/migration.md."""


def missing(name: str, owner: str, error: type[UsageError] = GoneError) -> UsageError:
    """The error for a name that `owner` does not have, with its replacement, if there is one."""
    now = f"now: {INSTEAD[name]}" if name in INSTEAD else moved(name)
    return error(f"{owner} has no {name}", hint=f"{now}; see docs/migration.md" if now else "see docs/migration.md")


def ignored(argument: str, now: str) -> None:
    """Warn that an argument of the caller's caller has no meaning any more."""
    warnings.warn(f"{argument} is ignored; now: {now}", DeprecationWarning, stacklevel=3)


def by_keys(arguments: Mapping[str, Any], known: Mapping[str, str], owner: str) -> dict[str, Any]:
    """Values by the configuration's keys, which are in `known` by the arguments' names.

    Raises:
        UsageError: an argument is not known; says what took its place.
    """
    for name in arguments:
        if name not in known:
            raise missing(name, owner, UsageError)
    return {known[name]: value for name, value in arguments.items()}

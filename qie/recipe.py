"""The recipe: everything that decides how a row becomes tensors, its digest, and the content keys that follow from it.

A recipe is a value. Two runs with equal recipes give equal tensors (on equal hardware and threads); a run with any
other recipe gives other keys, so a stale sample is never found, and need not be refused.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from qie.errors import RecipeMismatchError
from qie.families import FAMILIES
from qie.types import Row, Shape

ENCODING_VERSION = 1
"""Raised whenever qie itself would compute other tensors from the same inputs."""

LATER = ("thumbnail_px", "prompt_dtype")
"""Fields that recipes did not have at first; see `Recipe.to_dict`."""

STORED_AS = {"share_prefix": "continued"}
"""Fields that format version 1 stores, and hashes, under another name than the configuration's."""


@dataclass(frozen=True)
class Recipe:
    """Everything but the row itself that changes a sample's tensors.

    Attributes:
        family: name in `qie.families.FAMILIES`.
        vae, text_encoder, tokenizer, processor: content hashes of the components, 64 hex characters each.
        areas_px: image areas for the VAE; see `qie.encode.images`.
        buckets_px: fixed sizes (width, height) instead of areas; empty for none.
        text_area_px: image area for Qwen2.5-VL; None for the VAE's image.
        multiple_px: sizes by area are rounded to this multiple.
        vae_dtype, text_dtype: precision of the computation, such as "bfloat16".
        template: hash of the text around images and prompt, and of the null prompt.
        resampling: hash of what the image library makes of a test picture: its releases resize differently.
        share_prefix, batch_size, compiled: ways of computing that change last bits; see the configuration's `cache`.
        background: colour that transparent images are laid on.
        storage_dtype: precision of what is stored.
        prompt_dtype: precision of stored embeddings; None for `storage_dtype`.
        thumbnail_px: of shards of an earlier qie, longest side of the picture of the target in each record; else None.
        encoding_version: see `ENCODING_VERSION`.
    """

    family: str
    vae: str
    text_encoder: str
    tokenizer: str
    processor: str
    areas_px: tuple[int, ...]
    text_area_px: int | None
    vae_dtype: str
    text_dtype: str
    template: str
    resampling: str
    buckets_px: tuple[tuple[int, int], ...] = ()
    multiple_px: int = 32
    background: str = "#ffffff"
    share_prefix: bool = False
    batch_size: int = 1
    compiled: bool = False
    storage_dtype: str = "float16"
    encoding_version: int = ENCODING_VERSION
    thumbnail_px: int | None = None
    prompt_dtype: str | None = None

    @cached_property
    def full_digest(self) -> str:
        return json_hash(self.to_dict())

    @property
    def digest(self) -> str:
        """The short hash that people see: 16 hex characters."""
        return self.full_digest[:16]

    @property
    def latent_scale(self) -> int:
        """Image pixels per latent pixel, in each direction."""
        return FAMILIES[self.family].latent_scale

    def key(self, row: Row) -> str:
        """The content key of `row`: 64 hex characters.

        SHA-256 over the recipe, then the normalised prompt, target, rejected target, mask and each control, every part
        as its own SHA-256 under its name, so that two different rows never give the same bytes.
        """
        lines = [self.full_digest, f"prompt {_sha256(normal_prompt(row.prompt).encode())}", f"target {row.target_hash}"]
        if row.rejected_hash is not None:
            lines.append(f"rejected {row.rejected_hash}")
        if row.mask is not None:
            lines.append(f"mask {_sha256(row.mask)}")
        lines += [f"control {digest}" for digest in row.control_hashes]
        if row.augment is not None:
            lines.append(f"augment {row.augment}")
        return _sha256("\n".join(lines).encode())

    def explain(self, other: Recipe) -> list[str]:
        """One line for every field in which `other` differs; empty when the recipes are equal."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [f"{name}: {brief(mine)} here, {brief(theirs)} there" for name, mine, theirs in pairs if mine != theirs]

    def require_equal(self, other: Recipe, where: object, hint: str) -> None:
        """Raise RecipeMismatchError, naming the differing fields, unless `other` is this recipe."""
        if self == other:
            return
        raise RecipeMismatchError(
            f"the shards have another recipe: {'; '.join(self.explain(other))}",
            where=where,
            expected=f"recipe {self.digest}",
            found=f"recipe {other.digest}",
            hint=hint,
        )

    def thumbnail_size(self, shape: Shape) -> tuple[int, int] | None:
        """Height and width in pixels of the thumbnail of a sample of this shape; None where the recipe has none.

        The target's proportions, its longest side `thumbnail_px` or, if that is smaller, its own. The other side is
        rounded to the nearest pixel, halves up, and is at least 1.
        """
        if self.thumbnail_px is None:
            return None
        longest = max(*shape.target, 1)  # an index may say anything
        px = min(self.thumbnail_px, self.latent_scale * longest)
        height, width = (max((2 * side * px + longest) // (2 * longest), 1) for side in shape.target)
        return height, width

    def to_dict(self) -> dict[str, Any]:
        """Its fields, as they are hashed and stored.

        A field of `LATER` that is None is left out: a recipe that says nothing new keeps its digest, and its samples
        their keys, of before there was such a field.
        """
        found = {name: value for name, value in asdict(self).items() if value is not None or name not in LATER}
        return {STORED_AS.get(name, name): value for name, value in found.items()}


def choose_area(image: tuple[int, int], areas_px: Sequence[int]) -> int:
    """The largest area that does not exceed the image's, or the smallest of all."""
    within = [area for area in areas_px if area <= image[0] * image[1]]
    return max(within) if within else min(areas_px)


def normal_prompt(prompt: str) -> str:
    """The prompt as it is hashed and encoded, for training and for inference.

    Unicode NFC, without the blanks and line ends around it, so that equal text is equal bytes. The released pipelines
    encode those blanks; a file or a cell of a table has them by accident.
    """
    return unicodedata.normalize("NFC", prompt).strip()


def canonical_json(value: object) -> str:
    """JSON with one spelling per value: sorted keys, no spaces, characters as they are. Dataclasses are objects."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=vars)


def json_hash(value: object) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def brief(value: object) -> str:
    """A recipe's value for a message; of a hash, its beginning."""
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text

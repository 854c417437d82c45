"""A pretrained model in the diffusers layout: its place, its family, the content of its components.

Nothing here imports torch: a recipe can be known, and a wrong model refused, before anything heavy is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qie.errors import ModelError, QieError, UsageError, one_line
from qie.families import FAMILIES, Family
from qie.file_hashes import file_hashes
from qie.paths import local_path
from qie.recipe import json_hash

ENCODERS = ("vae", "text_encoder", "tokenizer", "processor")
_CONFIG_FILES = {
    "tokenizer": ("tokenizer_config.json",),
    "processor": ("preprocessor_config.json", "processor_config.json"),
    "scheduler": ("scheduler_config.json",),
}
_VAE_CONFIG = "config.json"
_LATENT_SPACE = (
    "z_dim",
    "temperal_downsample",
    "scale_factor_spatial",
    "patch_size",
    "input_channels",
    "in_channels",
    "latents_mean",
    "latents_std",
)
"""Settings of a VAE that its latents' channels, scale and normalisation follow from."""
_NOT_CONTENT = {"_name_or_path", "_diffusers_version", "transformers_version"}


@dataclass(frozen=True)
class PretrainedModel:
    """A local folder that holds a model of the Qwen-Image family, and which family of models it is of.

    Attributes:
        vae: the folder of another VAE that takes the place of the model's own.
    """

    folder: Path
    family: Family
    vae: Path | None = None

    @property
    def sample_sigmas(self) -> tuple[float, ...] | None:
        """The noise levels that the model is meant to be sampled at, before the scheduler shifts them; None where it
        does not say.

        Raises:
            ModelError: what it says are no noise levels.
        """
        index = self.folder / "model_index.json"
        found = read_json(index).get("sample_sigmas")
        if found is None:
            return None
        if not isinstance(found, list) or not found or not all(_is_noise_level(level) for level in found):
            raise ModelError(
                "the model's sample_sigmas are no noise levels",
                where=index,
                expected="a list of numbers above 0, none above 1",
                found=str(found)[:100],
                hint="download it again, or give --steps",
            )
        return tuple(float(level) for level in found)

    def holds(self, name: str) -> bool:
        """Whether a component is there, with all its weights: of a download that was cut short it may not be."""
        folder = self._folder(name)
        if name not in self.family.component_classes:
            needed = {"tokenizer": ("tokenizer.json", "vocab.json")}.get(name, _CONFIG_FILES[name])
            return any((folder / file).is_file() for file in needed)
        listed = [read_json(index).get("weight_map") or {} for index in folder.glob("*.safetensors.index.json")]
        weights = {folder / str(file) for files in listed for file in files.values()} or set(
            folder.glob("*.safetensors")
        )
        return (folder / "config.json").is_file() and bool(weights) and all(path.is_file() for path in weights)

    def component(self, name: str) -> Path:
        """Folder of a component, known to be there, of the right class, and to ask for no code of its own.

        Raises:
            ModelError: it is missing, its config names another class, or one of its files asks for code.
        """
        folder = self._folder(name)
        configs = [folder / file for file in _CONFIG_FILES.get(name, ("config.json",))]
        config = next((path for path in configs if path.is_file()), None)
        if config is None:
            raise ModelError(
                f"the model has no usable {name}",
                where=folder,
                expected=" or ".join(path.name for path in configs),
                found=_listing(folder),
                hint="download the whole model, or correct model.pretrained_model_name_or_path",
            )
        expected = self.family.component_classes.get(name)
        found = _class_name(read_json(config))
        if expected and found != expected:
            raise ModelError(f"the {name} has an unexpected class", where=config, expected=expected, found=found)
        for path in sorted(folder.glob("*config.json")):
            for wanted in _foreign_code(read_json(path)):
                raise ModelError(
                    f"the {name} asks for code that is not part of an installed package",
                    where=path,
                    expected="weights and settings alone: qie runs no code of a model",
                    found=wanted,
                    hint="take the model as it was released, or remove this from the file",
                )
        return folder

    def _folder(self, name: str) -> Path:
        if name == "vae" and self.vae is not None:
            return self.vae
        return self.folder / (self.family.tokenizer_folder if name == "tokenizer" else name)


ONE_LOAD = threading.RLock()
"""diffusers and transformers replace functions of torch for the whole process while they build a model, and put back
what they found: of two builds at once, one would leave the other's functions in place for good."""


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Turn whatever a library raises while it loads a component from `folder` into a ModelError; one load at a time."""
    try:
        with ONE_LOAD:
            yield
    except (QieError, MemoryError):
        raise
    except Exception as error:  # of the libraries, in whose code foreign numbers end up: ZeroDivisionError, ImportError
        raise ModelError(
            f"the {folder.name} cannot be loaded",
            where=folder,
            found=f"{type(error).__name__}: {one_line(error, 300)}",
            hint="download it again, or correct model.pretrained_model_name_or_path",
        ) from error


def open_pretrained(
    name_or_path: str,
    family: str = "auto",
    components: tuple[str, ...] = ENCODERS,
    *,
    vae: str | None = None,
    weights: bool = True,
) -> PretrainedModel:
    """The pretrained model in a folder, or on the Hugging Face Hub, with `components` checked and present.

    Args:
        name_or_path: the model.
        family: of the model; auto reads it.
        components: those that have to be there. Of a model on the Hub, only they are downloaded.
        vae: folder or hub name of another VAE, or of a model that has it, instead of the model's own.
        weights: download weights, too, and not only what configures them.

    Raises:
        ModelError: there is none, a component is missing or foreign, or `family` or `vae` does not fit it.
    """
    folder = local_path(name_or_path)
    if not folder.is_dir():
        # Another VAE is compared with the model's own.
        names = dict.fromkeys([*components, *(["vae"] if vae else [])])
        patterns = ["model_index.json", *(f"{name}/{'*' if weights else '*.json'}" for name in names)]
        folder = _download(name_or_path, patterns, "model.pretrained_model_name_or_path")
    index = folder / "model_index.json"
    if not index.is_file():
        raise ModelError(
            "the folder holds no diffusers model",
            where=folder,
            expected="model_index.json",
            found=_listing(folder),
            hint="model.pretrained_model_name_or_path is the folder that holds vae/, text_encoder/ and transformer/",
        )
    pretrained = PretrainedModel(folder, _family(read_json(index).get("_class_name"), family, index))
    _require_diffusers(pretrained.family)
    if vae is not None:
        pretrained = _with_vae(pretrained, find_vae(vae, weights=weights))
    for component in components:
        pretrained.component(component)
    return pretrained


def find_cached(name: str) -> Path | None:
    """The folder of a model on the Hub, as far as it has been downloaded; None if it has not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(name, allow_patterns=["model_index.json"], local_files_only=True))
    except (HFValidationError, OSError):  # among these: not in the cache
        return None
    return folder if (folder / "model_index.json").is_file() else None


def find_vae(place: str, *, weights: bool = True) -> Path:
    """The folder of a VAE: `place` itself, the `vae` of the model that is there, or either of them on the Hub.

    Raises:
        ModelError: there is none.
    """
    folder = local_path(place)
    if not folder.is_dir():
        kind = "" if weights else ".json"
        # A pattern's star takes slashes, too: one that begins with it would fetch a whole model.
        patterns = [_VAE_CONFIG, f"diffusion_pytorch_model*{kind}", f"vae/*{kind}"]
        folder = _download(place, patterns, "model.vae")
    for found in (folder / "vae", folder):
        if (found / _VAE_CONFIG).is_file():
            return found
    raise ModelError(
        "the folder holds no VAE in the diffusers layout",
        where=folder,
        expected=f"{_VAE_CONFIG} and weights, here or in vae/",
        found=_listing(folder),
        hint="correct model.vae",
    )


def open_vae(place: str) -> PretrainedModel:
    """A VAE alone, found as `find_vae` finds it, as a model that has no other component.

    Raises:
        ModelError: there is none, or it is of no family that qie knows.
    """
    folder = find_vae(place)
    kind = _class_name(read_json(folder / _VAE_CONFIG))
    family = next((family for family in FAMILIES.values() if family.vae == kind), None)
    if family is None:
        raise ModelError(
            "qie does not know VAEs of this class",
            where=folder,
            expected=" or ".join(sorted({family.vae for family in FAMILIES.values()})),
            found=kind,
        )
    _require_diffusers(family)
    return PretrainedModel(folder, family, vae=folder)


def _with_vae(model: PretrainedModel, vae: Path) -> PretrainedModel:
    """The model with another VAE. Raises ModelError unless it has the latent space of the model's own."""
    changed = replace(model, vae=vae)
    changed.component("vae")
    found, own = read_json(vae / _VAE_CONFIG), model.folder / "vae" / _VAE_CONFIG
    expected = read_json(own) if own.is_file() else {"z_dim": model.family.latent_channels}
    for name in _LATENT_SPACE:
        if name in expected and found.get(name) != expected[name]:
            raise ModelError(
                "the VAE has another latent space than the model's",
                where=vae / _VAE_CONFIG,
                expected=f"{name}: {_short(expected[name])}",
                found=_short(found.get(name)),
                hint="correct model.vae: a transformer works in the latent space that it was trained in",
            )
    return changed


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def content_files(folder: Path) -> list[Path]:
    """The files that a component's `content_hash` is made of."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".txt", ".jinja"))


def content_hash(folder: Path) -> str:
    """SHA-256 over a component's configuration and weight files, by name; where it lies does not count."""
    files = content_files(folder)
    hashes = file_hashes(files)
    for path in files:
        if path.name == "config.json":
            config = {name: value for name, value in read_json(path).items() if name not in _NOT_CONTENT}
            hashes[path] = json_hash(config)
    lines = "".join(f"{path.name} {hashes[path]}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def processor_hash(pretrained: PretrainedModel) -> str:
    """SHA-256 of what the image processor is built from, whichever of its two layouts holds it."""
    folder = pretrained.component("processor")
    newer = folder / "processor_config.json"
    if newer.is_file() and "image_processor" in (config := read_json(newer)):
        return json_hash(config["image_processor"])
    return json_hash(read_json(folder / "preprocessor_config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a pretrained model. Raises ModelError when the file holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError("a file of the model cannot be read", where=path, found=error) from error
    if not isinstance(value, dict):
        raise ModelError("a file of the model is not a JSON object", where=path, found=type(value).__name__)
    return value


def _family(pipeline: str | None, wanted: str, index: Path) -> Family:
    found = next((family for family in FAMILIES.values() if family.pipeline == pipeline), None)
    if found is None:
        raise ModelError(
            "qie does not support this family of models",
            where=index,
            expected=" or ".join(family.pipeline for family in FAMILIES.values()),
            found=pipeline,
        )
    if wanted not in ("auto", found.name):
        raise ModelError(
            "model.family does not fit the model",
            where=index,
            expected=wanted,
            found=f"{found.name} ({pipeline})",
            hint="set model.family to auto",
        )
    return found


def _require_diffusers(family: Family) -> None:
    """Raise UsageError when the diffusers that is installed does not have the family's classes."""
    found, needed = version("diffusers"), family.diffusers
    if _release(found) < _release(needed):
        raise UsageError(
            f"{family.title} needs diffusers >= {needed}",
            expected=f"diffusers {needed} or newer",
            found=f"diffusers {found}",
            hint=f"pip install -U 'diffusers>={needed}'",
        )


def _release(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 0 and 42 of 0.42.0.dev0."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _is_noise_level(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def _foreign_code(value: Any) -> Iterator[str]:
    """Where transformers would take code from a file or a repository: classes, and kernels of attention."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, child in value.items() if isinstance(value, dict) else ():
        if (key == "auto_map" and child) or (str(key).endswith("_implementation") and "/" in str(child)):
            yield f"{key}: {child}"
        yield from _foreign_code(child)


def _class_name(config: dict[str, Any]) -> str | None:
    name = config.get("_class_name") or next(iter(config.get("architectures") or []), None)
    return str(name) if name else None


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "an empty folder"


def _download(name: str, patterns: list[str], key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            "no such model",
            where=name,
            expected="a folder in the diffusers layout, or the name of a model on the Hugging Face hub",
            found=str(error).splitlines()[0],
            hint=f"correct {key}",
        ) from error

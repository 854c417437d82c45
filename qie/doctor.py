"""What `qie doctor` checks: whether this machine, and the places of a configuration, have what qie needs."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qie.config import Config
from qie.errors import QieError, RowError, one_line
from qie.paths import cache_folder, local_path
from qie.pretrained import ENCODERS, PretrainedModel, find_cached, open_pretrained
from qie.quantities import human_bytes
from qie.stores import Folder, open_folder, scheme_of

ROWS = 3
"""Rows that are read of a source."""
LITTLE_BYTES = 10**9
"""Free space below which a folder is called full, whatever goes there."""
EXTRAS = {
    "bitsandbytes": "quant",
    "torchao": "quant",
    "datasets": "datasets",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "uvicorn": "watch",
}
QUANTIZERS = {"fp8": "torchao", "int8": "bitsandbytes", "nf4": "bitsandbytes"}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        what: was checked.
        found: there.
        mend: what to do about it; None: nothing.
    """

    what: str
    found: str
    mend: str | None = None

    def __str__(self) -> str:
        head = f"{'ok' if self.mend is None else 'mend':<5} {self.what:<14} {self.found}"
        return head if self.mend is None else f"{head}; to do: {self.mend}"

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.mend is None} | asdict(self)


def examine(config: Config | None = None) -> Iterator[Finding]:
    """All checks: of the machine and, with a configuration, of its model, rows and places. None of them raises."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("libraries", lambda: _libraries(config)),
        ("devices", lambda: _devices(config)),
        ("cache folder", _cache_folder),
    ]
    if config is not None:
        checks += [
            ("model", lambda: _model(config)),
            ("source", lambda: _source(config)),
            ("shards", lambda: _shards(config)),
            ("run", lambda: _run(config)),
        ]
    for what, check in checks:
        yield from _explained(what, check)


def _explained(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check's findings; an error becomes one."""
    try:
        yield from check()
    except QieError as error:
        facts = [str(fact) for fact in (error.where, error.found) if fact is not None]
        yield Finding(what, f"{error.what}: {', '.join(facts)}" if facts else error.what, _advice(error))
    except Exception as error:  # of a library, or of the system: a doctor does not fall ill
        yield Finding(what, f"{type(error).__name__}: {one_line(error, 300)}", "see the message")


def _advice(error: QieError) -> str:
    return error.hint or (f"expected {error.expected}" if error.expected is not None else "see the message")


# The machine


def _libraries(config: Config | None) -> Iterator[Finding]:
    try:
        needed = requires("qie") or []
    except PackageNotFoundError:
        yield Finding("qie", "not installed: its requirements are not known", "pip install . in the repository")
        return
    for text in needed:
        if "extra ==" not in text and (lack := _lack(text)):
            yield lack
    yield Finding(
        "libraries",
        f"python {sys.version.split()[0]}, qie {version('qie')}, torch {version('torch')}, "
        f"diffusers {version('diffusers')}, transformers {version('transformers')}",
    )
    wanted = set(_wanted(config)) if config else set()
    for name in sorted(wanted):
        if find_spec(name) is None:
            extra = f"'qie[{EXTRAS[name]}]'" if name in EXTRAS else name
            yield Finding(name, "not installed, and the configuration needs it", f"pip install {extra}")
    absent = sorted({extra for name, extra in EXTRAS.items() if find_spec(name) is None and name not in wanted})
    if absent:
        yield Finding("extras", f"not installed: {', '.join(absent)}; pip install 'qie[{','.join(absent)}]' adds them")


def _lack(requirement: str) -> Finding | None:
    """What is wrong with a library that qie cannot do without."""
    match = re.match(r"([\w.-]+)[^>=]*(?:>=\s*([\d.]+))?", requirement)
    assert match, requirement
    name, least = match[1], match[2] or "0"
    line = f"pip install '{name}>={least}'"
    try:
        found = distribution(name).version
    except PackageNotFoundError:
        return Finding(name, "not installed", line)
    return Finding(name, f"{found}, older than {least}", line) if _numbers(found) < _numbers(least) else None


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)[:3]]


def _wanted(config: Config) -> Iterator[str]:
    """Modules that a configuration needs beside those that qie always has."""
    if config.model.quantize:
        yield QUANTIZERS[config.model.quantize]
    yield config.optimizer.class_path.partition(".")[0]
    yield from config.logging.report_to
    source = config.data.source
    for place in [part.source for part in source] if isinstance(source, list) else [source]:
        if place and place.startswith("hf://datasets/"):
            yield "datasets"


def _devices(config: Config | None) -> Iterator[Finding]:
    import torch

    from qie.devices import resolve_device

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield _without_gpu(torch.version.cuda)
    for number in range(count):
        name, (major, minor) = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        free, whole = torch.cuda.mem_get_info(number)
        able = f"bf16 {'yes' if major >= 8 else 'slow'}, fp8 {'yes' if (major, minor) >= (8, 9) else 'no'}"
        yield Finding(f"cuda:{number}", f"{name}, {free / 1e9:.1f} of {whole / 1e9:.1f} GB free, {able}")
    if config is None:
        return
    named = {
        "cache.vae_encoder_device": config.cache.vae_encoder_device,
        "cache.text_encoder_device": config.cache.text_encoder_device,
        "predict.devices.vae": config.predict.devices.vae,
        "predict.devices.text_encoder": config.predict.devices.text_encoder,
        "predict.devices.transformer": config.predict.devices.transformer,
    }
    for key, device in named.items():
        yield from _explained(key, partial(_device, key, device))
    if config.train.fp8_compute:
        from qie.training.model.fp8 import require_fp8_products

        require_fp8_products(resolve_device("auto", "train.fp8_compute"))


def _device(key: str, name: str) -> Iterator[Finding]:
    from qie.devices import resolve_device

    resolve_device(name, key)
    yield from ()


def _without_gpu(cuda: str | None) -> Finding:
    there = shutil.which("nvidia-smi") is not None
    if there and cuda is None:
        return Finding(
            "devices",
            "a GPU's driver is here, but this torch is built without CUDA",
            "install torch for CUDA: https://pytorch.org/get-started/locally",
        )
    if there:
        return Finding(
            "devices",
            f"torch is built for CUDA {cuda}, and finds no GPU",
            "run nvidia-smi: the driver may be older than this CUDA needs, or CUDA_VISIBLE_DEVICES hide it",
        )
    return Finding("devices", "no GPU: the CPU computes, which suits small models")


def _cache_folder() -> Iterator[Finding]:
    folder = cache_folder()
    yield _room("cache folder", folder, LITTLE_BYTES, "set XDG_CACHE_HOME to a folder on a local disk with room")


def _room(what: str, folder: Path, needed: float, mend: str) -> Finding:
    """Whether a folder can be written to, and has so many bytes free. It need not be there yet."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(what, f"{folder} cannot be written: {there} is {'closed' if there.is_dir() else 'a file'}", mend)
    free = shutil.disk_usage(there).free
    told = f"{folder}, {human_bytes(free)} free"
    needs = needed > LITTLE_BYTES and f", about {human_bytes(needed)} to come"
    return Finding(what, told + (needs or ""), mend if free < needed else None)


# The places of a configuration


def _model(config: Config) -> Iterator[Finding]:
    model = config.model
    name, names = model.pretrained_model_name_or_path, (*ENCODERS, "transformer")
    folder = local_path(name)
    if not folder.is_dir():
        cached = find_cached(name)
        if cached is None:
            yield _on_hub(name)
            return
        folder = cached
    pretrained = open_pretrained(str(folder), model.family, (), vae=model.vae)
    lacking = [one for one in names if not pretrained.holds(one)]
    if lacking and not local_path(name).is_dir():
        found = _on_hub(name)
        yield Finding("model", f"{name}: {', '.join(lacking)} not downloaded yet; {found.found}", found.mend)
    elif lacking:
        yield Finding("model", f"{folder} lacks {', '.join(lacking)}", "download the whole model")
    else:
        yield _whole(pretrained, names, name)


def _whole(pretrained: PretrainedModel, names: tuple[str, ...], name: str) -> Finding:
    for component in (*names, "scheduler"):
        pretrained.component(component)  # which names a foreign class, or code
    return Finding("model", f"{name}: {pretrained.family.title}, all components are here")


def _on_hub(name: str) -> Finding:
    """Whether a model can be downloaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi().auth_check(name)
    except GatedRepoError:
        mend = f"accept its terms at https://huggingface.co/{name}, then run hf auth login"
        return Finding("model", f"{name} is gated on the Hub", mend)
    except (RepositoryNotFoundError, HFValidationError):
        return Finding(
            "model", f"{name} is neither a folder nor a model on the Hub", "correct model.pretrained_model_name_or_path"
        )
    except OfflineModeIsEnabled:
        return Finding(
            "model", f"{name} is not downloaded, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, or name a folder"
        )
    except Exception as error:  # of the connection; which class it is depends on the Hub library's release
        return Finding(
            "model",
            f"{name} is not downloaded, and the Hub cannot be reached: {type(error).__name__}",
            "connect to the network, or name a folder",
        )
    return Finding("model", f"{name} can be downloaded from the Hub")


def _source(config: Config) -> Iterator[Finding]:
    from qie.encode.images import decode_layers
    from qie.from_config import open_rows

    if config.data.source is None:
        yield Finding("source", "data.source is not set: qie-train needs shards alone")
        return
    rows, told, faults = open_rows(config), [], []
    for index in range(min(ROWS, len(rows))):
        try:
            row = rows.read(index)
            images = {"the target": row.target} | {f"control {n}": one for n, one in enumerate(row.controls, 1)}
            sizes = [decode_layers(content, what).rgb.size for what, content in images.items()]
            told.append(" + ".join(f"{width}×{height}" for width, height in sizes))
        except RowError as error:
            faults.append(f"row {index} ({rows.name(index)}): {error.what}")
    if not len(rows):
        yield Finding("source", f"{config.data.source} has no rows", "correct data.source")
    elif faults:
        yield Finding("source", f"{len(rows)} rows; {'; '.join(faults)}", "mend these rows, or they are skipped")
    else:
        yield Finding("source", f"{len(rows)} rows; the first (target + controls): {', '.join(told)}")


def _shards(config: Config) -> Iterator[Finding]:
    place = config.cache.cache_dir
    if place is None:
        yield Finding("shards", "cache.cache_dir is not set: rows are encoded live")
        return
    if scheme_of(place) is None:
        mend = "name another cache.cache_dir, or make room"
        yield _room("shards", local_path(place), max(_bytes_to_come(config), LITTLE_BYTES), mend)
        return
    yield try_store(open_folder(place))
    if config.cache.local_dir:
        yield _room(
            "local shards", local_path(config.cache.local_dir), config.cache.local_bytes, "lower cache.local_bytes"
        )


def try_store(folder: Folder) -> Finding:
    """Whether a folder of shards can be listed, written and read: with a small file, which is deleted again."""
    name, content = f".qie-doctor-{secrets.token_hex(8)}", b"qie doctor"
    doing = "listed"
    try:
        count = len(folder.names())
        doing = "written"
        folder.write(name, content)
        try:
            doing = "read"
            same = folder.read(name) == content
        finally:
            folder.delete(name)
    except QieError as error:
        mend = _advice(error) if error.hint or error.expected else "check the credentials: docs/guides/s3.md"
        return Finding("shards", f"{folder.url} cannot be {doing}: {error.what}", mend)
    if not same:
        return Finding("shards", f"{folder.url} gives other bytes than were written", "do not keep shards there")
    return Finding("shards", f"{folder.url} can be listed, written and read; {count} names")


def _bytes_to_come(config: Config) -> float:
    """About the size of all shards; 0 if it cannot be known."""
    from qie.from_config import open_model, open_rows
    from qie.precompute.overview import expected_bytes

    try:
        rows = open_rows(config)
        return expected_bytes(config, open_model(config, ()), rows, len(rows))
    except QieError:
        return 0.0  # which other checks tell


def _run(config: Config) -> Iterator[Finding]:
    folder = local_path(config.train.output_dir)
    yield _room("checkpoints", folder, LITTLE_BYTES, "name another train.output_dir, or make room")

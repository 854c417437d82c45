"""Other ways to store samples and to read them back: the peers of `read.py`."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import webdataset
from safetensors.torch import load, load_file
from samples import TAIL
from torch.utils.data import DataLoader, Dataset

from qie.types import Sample

Tensors = dict[str, torch.Tensor]
Pass = Callable[[bool], Iterable[Tensors]]
"""All samples once, as stored, in order or shuffled."""

LOOSE = "qwen-image-finetune's .pt files"


def write_peers(folder: Path, number: int, sample: Sample, record: bytes) -> None:
    """One sample in the files of all peers that read files."""
    for name in ("safetensors", "pt", "loose"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "safetensors" / f"{number}.safetensors").write_bytes(record)
    torch.save(load(record), folder / "pt" / f"{number}.pt")
    for name, tensor in loose(sample).items():
        (folder / "loose" / name).mkdir(exist_ok=True)
        torch.save(tensor, folder / "loose" / name / f"{number}.pt")


def loose(sample: Sample) -> Tensors:
    """What qwen-image-finetune's EmbeddingCacheManager keeps of a sample, a file each: both embeddings whole."""
    return {
        "pixel_latent": sample.pixel_latent,
        "control_latent": sample.control_latent[0],
        "prompt_embed": sample.prompt_embed,
        "prompt_embeds_mask": sample.prompt_embeds_mask,
        "empty_prompt_embed": sample.empty_prompt_embed,
        "empty_prompt_embeds_mask": sample.empty_prompt_embeds_mask,
    }


def peers(folder: Path, buffer: int) -> dict[str, Pass]:
    """A way to read for each peer that is installed. webdataset shuffles in a buffer of so many samples."""
    tars = [str(path) for path in sorted((folder / "shards").glob("*.tar"))]

    def from_webdataset(shuffled: bool) -> Iterator[Tensors]:
        dataset = webdataset.WebDataset(tars, shardshuffle=len(tars) if shuffled else False)
        for sample in dataset.shuffle(buffer) if shuffled else dataset:
            yield load(sample["safetensors"])

    def from_files(kind: str, read: Callable[[Path], Tensors]) -> Pass:
        files = sorted((folder / kind).iterdir(), key=lambda file: int(file.stem))
        return lambda shuffled: map(read, random.sample(files, len(files)) if shuffled else files)

    def from_loose(file: Path) -> Tensors:
        # As that project's load_cache does, which trusts its files: weights_only=False.
        names = sorted(path.name for path in (folder / "loose").iterdir())
        return {
            name: torch.load(folder / "loose" / name / file.name, map_location="cpu", weights_only=False)
            for name in names
        }

    return {
        "webdataset": from_webdataset,
        "safetensors files": from_files("safetensors", load_file),
        "torch.load": from_files("pt", lambda file: torch.load(file, weights_only=True)),
        LOOSE: from_files("pt", from_loose),
    }


class Files(Dataset[Tensors]):
    """A safetensors file for each sample."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.iterdir(), key=lambda file: int(file.stem))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Tensors:
        tensors: Tensors = load_file(self.files[number])
        return tensors


def loaders(folder: Path, buffer: int, workers: int) -> dict[str, Callable[[], Iterable[Tensors]]]:
    """Shuffled batches of one by the loaders that peers advise. The workers make them, and stay from pass to pass."""
    tars = [str(path) for path in sorted((folder / "shards").glob("*.tar"))]
    files, shards = Files(folder / "safetensors"), webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(buffer)
    with_workers: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    found = {
        "safetensors files in a DataLoader": DataLoader(files, shuffle=True, **with_workers),
        "webdataset's WebLoader": webdataset.WebLoader(shards.map(_decoded), batch_size=None, **with_workers),
    }
    return {name: loader.__iter__ for name, loader in found.items()}


def optional_loaders(folder: Path, workers: int) -> dict[str, Callable[[], Iterable[Tensors]]]:
    """The same of the peers that need not be installed, of those that are."""
    found: dict[str, Callable[[], Iterable[Tensors]]] = {}
    for module, name, opened in (("streaming", "MDS", from_mds), ("litdata", "litdata", from_litdata)):
        if importlib.util.find_spec(module):
            found[name] = opened(folder, workers)
        else:
            print(f"{name}: not installed, left out")
    return found


def _decoded(sample: dict[str, bytes]) -> Tensors:
    return batch(load(sample["safetensors"]))


def _decoded_record(samples: Sequence[dict[str, bytes]]) -> Tensors:
    (sample,) = samples
    return batch(load(sample["record"]))


def from_mds(folder: Path, workers: int) -> Callable[[], Iterable[Tensors]]:
    """A DataLoader of MDS, as its documentation advises."""
    if importlib.util.find_spec("torchvision") is None:
        # Only its data sets of pictures import torchvision, but `import streaming` imports them, too.
        spec = importlib.util.find_spec("streaming")
        assert spec is not None
        package = types.ModuleType("streaming")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["streaming"] = package
    mds: Any = importlib.import_module("streaming.base")
    with mds.MDSWriter(out=str(folder / "mds"), columns={"record": "bytes"}) as writer:
        for file in sorted((folder / "safetensors").iterdir()):
            writer.write({"record": file.read_bytes()})
    dataset = mds.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=1)
    return DataLoader(
        dataset,
        batch_size=1,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=_decoded_record,
        multiprocessing_context="fork" if workers else None,  # litdata makes another the default
    ).__iter__


def from_litdata(folder: Path, workers: int) -> Callable[[], Iterable[Tensors]]:
    """litdata's own loader."""
    litdata: Any = importlib.import_module("litdata")
    litdata.optimize(
        fn=_record,
        inputs=[str(file) for file in sorted((folder / "safetensors").iterdir())],
        output_dir=str(folder / "litdata"),
        chunk_bytes="256MB",
        num_workers=1,
        verbose=False,
    )
    loader = litdata.StreamingDataLoader(
        litdata.StreamingDataset(str(folder / "litdata"), shuffle=True),
        batch_size=1,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=_decoded_record,
    )
    return lambda: iter(loader)


def _record(file: str) -> dict[str, bytes]:
    return {"record": Path(file).read_bytes()}


def batch(tensors: Tensors) -> Tensors:
    """Each tensor copied once, into a batch of one."""
    return {name: torch.stack([tensor]) for name, tensor in tensors.items()}


def joined_batch(tensors: Tensors) -> Tensors:
    """The same with the null prompt's whole embedding, copied once, too."""
    shared = tensors["prompt_embed"][: len(tensors["prompt_embed"]) - TAIL]
    rest = {name: tensor for name, tensor in tensors.items() if name != "empty_prompt_embed"}
    return batch(rest) | {"empty_prompt_embed": torch.cat([shared, tensors["empty_prompt_embed"]])[None]}

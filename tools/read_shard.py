"""Read and check a shard with Python's standard library alone. This script knows nothing but docs/format.md.

    python tools/read_shard.py SHARD.tar          check the shard and list its rows
    python tools/read_shard.py SHARD.tar KEY      check one record and print it; KEY may be a unique prefix

Exit status: 0 for a sound shard, 1 for one with faults (one line for each, on stderr), 2 for wrong usage.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import struct
import sys
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, TextIO

Json = dict[str, Any]
# Name in a header -> letter for struct, size in bytes.
DTYPES = {"F16": ("e", 2), "BF16": ("H", 2), "U8": ("B", 1), "BOOL": ("B", 1)}
SAMPLE = {"row", "name", "key", "shape", "tokens", "empty_tokens", "tensor_bytes", "clipped", "notes"}
SKIPPED = {"row", "name", "reason", "key"}
LATER = {"source": "", "variant": 0}  # fields of both that an index may lack, and what they are then


class Faults(list[str]):
    """All that was found wrong, one line each."""

    def expect(self, what: str, found: object, due: object) -> None:
        if found != due:
            self.append(f"{what}: {found!r:.300} where {due!r:.300} is due")

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Whatever damaged content makes Python raise is a fault of that content."""
        try:
            yield
        except KeyError as error:
            self.append(f"{what}: {error} is missing")
        except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            self.append(f"{what}: {error}")
        except (struct.error, tarfile.TarError) as error:
            self.append(f"{what}: cut short or damaged, {error}")


def say(line: str, stream: TextIO | None = None) -> None:
    """Print one line; what a terminal would obey instead of show is escaped, as a shard may hold anything."""
    print("".join(char if char.isprintable() else repr(char)[1:-1] for char in line), file=stream)


def variant_of(entry: Json) -> tuple[int, int]:
    """The number of a row, and of its variant."""
    return int(entry["row"]), int(entry.get("variant", 0))


def label(entry: Json) -> str:
    """A row's number; that of its variant as well, unless it is the first."""
    row, variant = variant_of(entry)
    return f"{row}.{variant}" if variant else f"{row}"


def rows(index: Json) -> list[Json]:
    return sorted(index["samples"] + index["skipped"], key=variant_of)


def canonical_hash(value: Json) -> str:
    """SHA-256 of the value's canonical JSON."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_index(index: Json, stem: str, faults: Faults) -> None:
    """What the index says about itself."""
    if index["format_version"] != 1:
        raise ValueError(f"format version {index['format_version']}, this script knows 1")
    start, stop, recipe = index["start"], index["stop"], dict(index["recipe"])
    if re.fullmatch(r"\d{8,}-\d{8,}", stem):  # of a shard that somebody renamed, the name says nothing
        faults.expect("index: range, by its name", f"{start:08d}-{stop:08d}", stem)
    if "this_sha256" in index:
        rest = {name: value for name, value in index.items() if name != "this_sha256"}
        faults.expect("index: its own sha256", index["this_sha256"], canonical_hash(rest))
    digest = recipe.pop("digest")
    faults.expect("index: thumbnail_px of the recipe", type(recipe.get("thumbnail_px", 0)), int)
    faults.expect("index: digest of the recipe", digest, canonical_hash(recipe)[:16])
    for part, fields in ("samples", SAMPLE), ("skipped", SKIPPED):
        numbers = [variant_of(entry) for entry in index[part]]
        faults.expect(f"index: order of rows and variants in {part}", numbers, sorted(numbers))
        for entry in index[part]:
            faults.expect(f"index: fields of row {label(entry)}", sorted(fields & entry.keys()), sorted(fields))
            inputs = entry.get("inputs", {})
            faults.expect(f"index: inputs of row {label(entry)}", {type(one) for one in inputs.values()} - {str}, set())
            kinds = [type({**LATER, **entry}[name]) for name in ("row", "variant", "source", "name")]
            faults.expect(f"index: types in row {label(entry)}", kinds, [int, int, str, str])
    found = [variant_of(entry) for entry in rows(index)]
    variants = Counter(row for row, _ in found)
    if len(variants) != stop - start or any(not start <= row < stop for row in variants):
        faults.append(f"index: its rows are not each of [{start}, {stop})")
    elif found != [(row, variant) for row in sorted(variants) for variant in range(variants[row])]:
        faults.append("index: the variants of its rows are not numbered from 0, each once")
    names = {f"{sample['key']}.safetensors" for sample in index["samples"]}
    faults.expect("index: names of files, by samples", sorted(index["files"]), sorted(names))
    pictures = {f"{sample['key']}.jpg" for sample in index["samples"]}
    faults.expect("index: pictures without a sample", sorted(set(index.get("pictures", {})) - pictures), [])
    bad = [name for name in names if not re.fullmatch(r"[0-9a-f]{64}\.safetensors", name)]
    faults.expect("index: names that hold no key", bad, [])


def check_tar(index: Json, path: Path, tar: memoryview, faults: Faults) -> None:
    """The tar as a file, and its members, against the index."""
    faults.expect("tar: size", len(tar), index["filesize"])
    faults.expect("tar: size modulo 10240", len(tar) % 10240, 0)
    faults.expect("tar: sha256", hashlib.sha256(tar).hexdigest(), index["sha256"])
    with tarfile.open(path, "r:") as opened:
        members = {member.name: member for member in opened}
    places = {name: (member.offset_data, member.size) for name, member in members.items()}
    files = index["files"] | index.get("pictures", {})
    faults.expect("tar: names of members", sorted(members), sorted(files))
    for name, file in files.items():
        faults.expect(f"tar: place of {name}", places.get(name), (file["offset"], file["size"]))
    for name, m in members.items():
        header = m.type, m.mode, m.mtime, m.uid, m.gid, m.uname, m.gname, m.offset_data - m.offset
        faults.expect(f"tar: header of {name}", header, (tarfile.REGTYPE, 0o644, 0, 0, 0, "", "", 512))


def payload(index: Json, key: str, tar: memoryview) -> memoryview:
    """The bytes of one record, after a look at where the index puts them, and at their hash."""
    place = index["files"][f"{key}.safetensors"]
    if not 512 <= place["offset"] <= place["offset"] + place["size"] <= len(tar):
        raise ValueError(f"offset {place['offset']} and size {place['size']} lead outside the tar")
    record = tar[place["offset"] : place["offset"] + place["size"]]
    if hashlib.sha256(record).hexdigest() != place["sha256"]:
        raise ValueError("the record's sha256 differs from the index")
    return record


def size_of(tensor: Json) -> int:
    if not all(isinstance(extent, int) and extent >= 0 for extent in tensor["shape"]):
        raise ValueError(f"not a shape: {tensor['shape']}")
    if tensor["dtype"] not in DTYPES:
        raise ValueError(f"not a dtype: {tensor['dtype']!r}")
    return prod(tensor["shape"]) * DTYPES[tensor["dtype"]][1]


def parse(record: memoryview) -> tuple[Json, dict[str, Json], memoryview]:
    """qie's metadata, the header of each tensor, and the bytes that those point into without gap or overlap."""
    (length,) = struct.unpack_from("<Q", record)
    if length > len(record) - 8:
        raise ValueError("the header is longer than the record")
    header, data, end = json.loads(bytes(record[8 : 8 + length])), record[8 + length :], 0
    meta = json.loads(header.pop("__metadata__")["qie"])
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        due = [end, end + size_of(tensor)]
        if tensor["data_offsets"] != due:
            raise ValueError(f"{name} has data_offsets {tensor['data_offsets']} instead of {due}")
        end = due[1]
    if end != len(data):
        raise ValueError(f"the record's tensors end at {end}, its bytes at {len(data)}")
    return meta, header, data


def check_record(index: Json, sample: Json, meta: Json, tensors: dict[str, Json], faults: Faults) -> None:
    """A record against the index: metadata, dtypes, shapes and sizes."""
    row, target = f"row {label(sample)}", sample["shape"]["target"]
    text_alone = "prompt_dtype" in index["recipe"]
    channels, scale, embedding = (64, 16, "BF16") if text_alone else (16, 8, "F16")
    controls = [[channels, 1, *size] for size in sample["shape"]["controls"]]
    prefix, length, empty = meta["shared_prefix"], sample["tokens"], sample["empty_tokens"]
    width = tensors["prompt_embed"]["shape"][1]
    about = {"format_version": 1, "key": sample["key"], "recipe": index["recipe"]["digest"]}
    about |= {"prompt": unicodedata.normalize("NFC", meta["prompt"]), "control_shapes": controls}
    about |= {"shared_prefix": max(0, min(prefix, length, empty)), "clipped": sample["clipped"]}
    for name in sorted(about):
        faults.expect(f"{row}: {name}", meta.get(name), about[name])
    slots = meta.get("image_slots", [])
    fitting = len(slots) == len(controls) and all(0 <= slot <= prefix for slot in slots) and slots == sorted(slots)
    faults.expect(f"{row}: image_slots", fitting if text_alone else "image_slots" in meta, text_alone)
    due = {
        "pixel_latent": ("F16", [channels, 1, *target]),
        "prompt_embed": (embedding, [length, width]),
        "prompt_embeds_mask": ("BOOL", [length]),
        "empty_prompt_embed": (embedding, [empty - prefix, width]),
        "empty_prompt_embeds_mask": ("BOOL", [empty]),
    }
    if controls or not text_alone:
        due["control_latent"] = ("F16", controls[0] if len(controls) == 1 else [sum(map(prod, controls))])
    if "rejected_latent" in tensors:
        due["rejected_latent"] = due["pixel_latent"]
    if "loss_mask" in tensors:
        due["loss_mask"] = ("U8", target)
    if thumbnail_px := index["recipe"].get("thumbnail_px"):
        longest = max(target)
        px = min(thumbnail_px, scale * longest)
        due["thumbnail"] = ("U8", [*(max((2 * side * px + longest) // (2 * longest), 1) for side in target), 3])
    found = {name: (tensor["dtype"], tensor["shape"]) for name, tensor in tensors.items()}
    for name in sorted({*due, *found}):
        faults.expect(f"{row}: {name}", found.get(name), due.get(name))
    sizes = {name: size_of(tensor) for name, tensor in tensors.items()}
    faults.expect(f"{row}: tensor_bytes", sample["tensor_bytes"], sizes)


def show(name: str, dtype: str, shape: list[int], data: bytes) -> None:
    """One line about one tensor, decoded a piece at a time."""
    letter, size = DTYPES[dtype]
    low, high, total = float("inf"), float("-inf"), 0.0
    for at in range(0, len(data), 1 << 17):
        piece = data[at : at + (1 << 17)]
        values = struct.unpack(f"<{len(piece) // size}{letter}", piece)
        if dtype == "BF16":  # the first half of a float32
            wide = struct.pack(f"<{len(values)}I", *(value << 16 for value in values))
            values = struct.unpack(f"<{len(values)}f", wide)
        low, high, total = min(low, *values), max(high, *values), total + sum(values)
    mean = total * size / len(data) if data else float("nan")
    say(f"{name:26}{dtype:6}{shape!s:20} min {low:.6g}  mean {mean:.6g}  max {high:.6g}")


def show_record(meta: Json, tensors: dict[str, Json], data: memoryview) -> None:
    """Prompt and tensors of a sound record: each control by itself, the null prompt's embedding joined."""
    say(f"key {meta['key']}")
    say(f"recipe {meta['recipe']}")
    say(f"prompt {meta['prompt']!r}")
    content = {name: bytes(data[slice(*tensor["data_offsets"])]) for name, tensor in tensors.items()}
    for name, tensor in sorted(tensors.items()):
        dtype, shape = tensor["dtype"], tensor["shape"]
        if name == "control_latent":
            begin = 0
            for number, control in enumerate(meta["control_shapes"]):
                show(f"{name}[{number}]", dtype, control, content[name][begin : begin + 2 * prod(control)])
                begin += 2 * prod(control)
        elif name == "empty_prompt_embed":
            shared = content["prompt_embed"][: 2 * shape[1] * meta["shared_prefix"]]
            show(name, dtype, [meta["shared_prefix"] + shape[0], shape[1]], shared + content[name])
        else:
            show(name, dtype, shape, content[name])


def show_index(index: Json) -> None:
    counts = f"{len(index['samples'])} samples in {len(index['files'])} records, {len(index['skipped'])} skipped"
    say(f"rows [{index['start']}, {index['stop']}): {counts}")
    say(f"recipe {index['recipe']['digest']}")
    for entry in rows(index):
        number, name = f"{label(entry):>8}", f"{entry['name']!r}"
        if entry.get("source"):
            name = f"{entry['source']!r} {name}"
        if "reason" in entry:
            say(f"{number}  {'skipped':12}  {name}  {entry['reason']!r}")
            continue
        sizes = " ".join(f"{h}x{w}" for h, w in [entry["shape"]["target"], *entry["shape"]["controls"]])
        tokens = f"tokens {entry['tokens']} {entry['empty_tokens']}"
        say(f"{number}  {entry['key'][:12]}  {name}  sizes {sizes}  {tokens}")


def read(path: Path, key: str | None, faults: Faults) -> str | None:
    """Check and print the shard, or the one record that `key` begins; returns what is wrong with `key`."""
    with faults.of("index"):
        index = json.loads(path.with_suffix(".json").read_bytes())
        check_index(index, path.stem, faults)
        if key is None:
            show_index(index)
        samples = [sample for sample in index["samples"] if sample["key"].startswith(key or "")]
        if key is not None and len({sample["key"] for sample in samples}) != 1:
            return f"{len(samples)} samples of this shard have a key that begins with {key!r}"
        with faults.of("tar"):
            with path.open("rb") as file:
                tar = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if key is None:
                check_tar(index, path, tar, faults)
            for sample in samples:
                with faults.of(f"row {label(sample)}"):
                    record = parse(payload(index, sample["key"], tar))
                    check_record(index, sample, *record[:2], faults)
            if key is not None and not faults:
                show_record(*record)
    return None


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or not arguments[0].endswith(".tar"):
        print(__doc__, file=sys.stderr)
        return 2
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    faults = Faults()
    misuse = read(Path(arguments[0]), arguments[1] if len(arguments) == 2 else None, faults)
    for line in faults or filter(None, [misuse]):
        say(" ".join(line.split()), sys.stderr)
    return 1 if faults else 2 if misuse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

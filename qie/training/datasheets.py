"""GPUs by name: what their makers say of them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from qie.errors import UsageError


@dataclass(frozen=True)
class Datasheet:
    """A GPU as its datasheet has it.

    Attributes:
        tflops: dense bfloat16 products with float32 sums, at the power limit of the datasheet.
        memory_gb: 10⁹ bytes; drivers report a few percent more, or less with error correction.
        bandwidth_gb_s: of its memory.
        link_gb_s: to host memory, in one direction: 31.5 for PCIe 4.0 × 16, 63 for 5.0.
    """

    tflops: float
    memory_gb: float
    bandwidth_gb_s: float
    link_gb_s: float


# Sources: NVIDIA's datasheets (A100, H100, H200, H20, L4, L40, L40S, A10, A40, DGX/HGX B200 and B300, GB200), with FLOP
# halved where a figure is with sparsity; NVIDIA's whitepapers on the Ampere GA102, Ada and RTX Blackwell architectures
# for the others; AMD's datasheets for Instinct. A name is the beginning of torch.cuda.get_device_name, less the maker.
DATASHEETS = {
    "A100": Datasheet(312.0, 80, 2039, 31.5),
    "A800": Datasheet(312.0, 80, 2039, 31.5),
    "H100 PCIe": Datasheet(756.0, 80, 2000, 63.0),
    "H100 NVL": Datasheet(835.0, 94, 3900, 63.0),
    "H100": Datasheet(989.0, 80, 3350, 63.0),
    "H800 PCIe": Datasheet(756.0, 80, 2000, 63.0),
    "H800": Datasheet(989.0, 80, 3350, 63.0),
    "H200 NVL": Datasheet(835.0, 141, 4800, 63.0),
    "H200": Datasheet(989.0, 141, 4800, 63.0),
    "H20": Datasheet(148.0, 96, 4000, 63.0),
    "GH200": Datasheet(989.0, 96, 4000, 450.0),
    "B200": Datasheet(2250.0, 180, 8000, 63.0),
    "B300": Datasheet(2250.0, 288, 8000, 63.0),
    "GB200": Datasheet(2500.0, 186, 8000, 63.0),
    "L4": Datasheet(121.0, 24, 300, 31.5),
    "L40": Datasheet(181.0, 48, 864, 31.5),
    "L40S": Datasheet(362.0, 48, 864, 31.5),
    "A10": Datasheet(125.0, 24, 600, 31.5),
    "A10G": Datasheet(70.0, 24, 600, 31.5),
    "A40": Datasheet(149.7, 48, 696, 31.5),
    "RTX A5000": Datasheet(111.1, 24, 768, 31.5),
    "RTX A6000": Datasheet(154.8, 48, 768, 31.5),
    "RTX 6000 Ada Generation": Datasheet(364.2, 48, 960, 31.5),
    "RTX PRO 6000 Blackwell Workstation Edition": Datasheet(503.8, 96, 1792, 63.0),
    "GeForce RTX 3090": Datasheet(71.0, 24, 936, 31.5),
    "GeForce RTX 3090 Ti": Datasheet(80.0, 24, 1008, 31.5),
    "GeForce RTX 4080": Datasheet(97.5, 16, 717, 31.5),
    "GeForce RTX 4090": Datasheet(165.2, 24, 1008, 31.5),
    "GeForce RTX 5080": Datasheet(112.6, 16, 960, 63.0),
    "GeForce RTX 5090": Datasheet(209.5, 32, 1792, 63.0),
    "Instinct MI250X": Datasheet(383.0, 128, 3277, 31.5),
    "Instinct MI300X": Datasheet(1307.4, 192, 5300, 63.0),
    "Instinct MI325X": Datasheet(1307.4, 256, 6000, 63.0),
}


def find_datasheet(device_name: str) -> Datasheet | None:
    """The GPU of a `torch.cuda.get_device_name`; None: not known.

    The table knows whole GPUs, but no slower variant of one (Laptop, D, a MIG slice).
    """
    name = re.sub(r"^(NVIDIA|AMD) ", "", device_name)
    for known in sorted(DATASHEETS, key=len, reverse=True):
        # The form and the memory may follow, as in A100-SXM4-80GB or H100 80GB HBM3.
        if re.fullmatch(rf"{known}([ -](SXM\d?|PCIE|OAM|HBM\w+|\d+GB))*", name, re.IGNORECASE):
            return DATASHEETS[known]
    return None


def named_datasheet(name: str) -> Datasheet:
    """The GPU that a person names, with its maker and series or without.

    Raises:
        UsageError: none has this name; names some that are alike.
    """
    found = [
        datasheet
        for series in ("", "GeForce ", "GeForce RTX ", "Instinct ")
        if (datasheet := find_datasheet(series + name))
    ]
    if not found:
        alike = difflib.get_close_matches(name, DATASHEETS, n=4, cutoff=0.3)
        raise UsageError(
            "no GPU of this name is known",
            where="--gpu",
            expected=", ".join(alike or DATASHEETS),
            found=name,
            hint="name one that is like it, and its memory by --vram",
        )
    memory = re.search(r"\b(\d+) ?GB\b", name, re.IGNORECASE)
    return replace(found[0], memory_gb=float(memory[1])) if memory else found[0]

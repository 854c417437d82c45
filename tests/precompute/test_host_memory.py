"""What a run holds in host memory: as many rows for a million as for a thousand, and weights that processes share."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from qie.data.sources import open_source
from qie.data.variants import Variants
from qie.encode import Encoder, EncoderOptions
from qie.precompute import Settings, precompute
from qie.precompute.engine import DEPTH, READERS
from qie.pretrained import open_pretrained
from qie.types import Row
from tests.conftest import AREA_PX
from tests.stubs import StubEncoder, StubSource


class Counting(Variants):
    """Counts the rows on their way that somebody still holds."""

    held = most = 0
    lock = threading.RLock()  # a row may be freed while another one is counted

    def of(self, row: Row) -> list[Row]:
        variants = super().of(row)
        for variant in variants:
            self.note(1)
            weakref.finalize(variant, self.note, -1)
        return variants

    @classmethod
    def note(cls, more: int) -> None:
        with cls.lock:
            cls.held += more
            cls.most = max(cls.most, cls.held)


def test_of_many_rows_a_few_are_held(tmp_path: Path) -> None:
    count, settings = 300, Settings(variants=Counting())
    precompute(StubSource.of(count), StubEncoder(), tmp_path, rows=(0, count), shard_size=64, settings=settings)
    # Six stages hold one each, the readers more; and there is a queue before each, and behind the last.
    assert READERS < Counting.most <= 7 * (DEPTH + 1) + READERS < count / 4


def mappings(folder: Path) -> Iterator[tuple[range, int]]:
    """Where this process has mapped files of a folder, and how many bytes of each are its own."""
    text = Path("/proc/self/smaps").read_text()
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last, name = re.match(r"([0-9a-f]+)-([0-9a-f]+) (.*)", block).groups()  # type: ignore[union-attr]
        if name.endswith(".safetensors") and str(folder) in name:
            own = re.search(r"Anonymous: +(\d+) kB", block)  # copied when they were written to
            assert own
            yield range(int(first, 16), int(last, 16)), int(own[1]) * 1024


def test_the_text_encoders_weights_are_pages_of_their_file_that_all_processes_share(
    tiny_edit: Path, photos: Path
) -> None:
    """Two workers on one host, or eight, hold them once: nothing is copied, and nothing is written to the pages."""
    cpu = torch.device("cpu")
    pretrained = open_pretrained(str(tiny_edit))
    encoder = Encoder.open(pretrained, vae_device=cpu, text_device=cpu, options=EncoderOptions(areas_px=(AREA_PX,)))
    encoder.encode(open_source(photos).read(0))
    mapped = list(mappings(pretrained.component("text_encoder")))
    assert mapped and sum(own for _, own in mapped) == 0
    for name, weight in encoder.text._model.named_parameters():
        assert any(weight.data_ptr() in pages for pages, _ in mapped), name

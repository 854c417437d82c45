"""The encoders on a GPU that is not there: devices, waits and copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qie.shards.tensors import store_together, to_storage
from tests.fake_cuda import GPU, FakeGpu, fake_gpu

HALF = torch.bfloat16


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as made:
        yield made


def test_storage_rounds_on_the_gpu_and_copies_to_page_locked_memory_with_one_wait(gpu: FakeGpu) -> None:
    values = torch.empty(1400, 3584, dtype=HALF, device=GPU)
    to_storage(values, "x")
    assert gpu.to_host == [(2 * values.numel(), torch.float16)] and gpu.waits == ["store_together reads a value"]
    gpu.forget()
    store_together((values, "x"), (values[:6], "y"))
    assert len(gpu.to_host) == 2 and len(gpu.waits) == 1

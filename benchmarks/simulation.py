"""The bytes that machines with local copies of whole shards fetch: simulated with the real plan."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache

import numpy as np
from many import SHARD_SIZE

from qie.data.plan import Order, plan_epoch
from qie.shards.sample_table import Columns, ends_of
from qie.types import Shape

NODE = 8
"""GPUs of a machine, a process each."""


@cache
def fetched(order: Order, gpus: int, room: float, samples: int = 64_000) -> float:
    """Simulated: an epoch of the real plan, and one machine's `cache.local_dir` with room for a share of all shards,
    of which that used longest ago goes first. Shards that it fetches, in samples, by samples that it uses."""
    position = np.arange(samples)
    none = np.zeros(samples, np.int32)
    shards = (position // SHARD_SIZE).astype(np.int32)
    columns = Columns(none, (Shape((128, 128), ((128, 128),)),), position, none + 1400, none, ends_of(shards))
    plan = plan_epoch(columns, seed=0, epoch=0, global_batch_size=gpus, order=order)
    local: OrderedDict[int, None] = OrderedDict()
    used = missed = 0
    for shard in shards[plan.positions[:, : min(gpus, NODE)]].ravel().tolist():
        used += 1
        if shard not in local:
            missed += 1
            if len(local) >= room * samples / SHARD_SIZE:
                local.popitem(last=False)
        local[shard] = None
        local.move_to_end(shard)
    return missed * SHARD_SIZE / used

"""A rank's part of the training state in host memory, handed over by the training thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.core.sharding.layout import RankLayout


@dataclass(frozen=True)
class ShardSnapshot:
    """State after optimizer step `step`, as rank `rank` of `world_size` holds it. Owns its memory.

    `tensors` maps "<kind>/<buffer>" to 1-D contiguous CPU tensors; every buffer named there is in `layout.buffers` with
    that length. Kinds of sharded state are "fp32" (or the master's real dtype) and the optimizer's own names; kinds of
    replicated state are "param" (frozen parameters) and "buffer" (module buffers), of which each tensor is given by
    exactly one rank. `parameters` maps every tensor name to its shape, on the first rank of each lane (None on others,
    which have the same). `extra_state` is as in `ShardRecord`.
    """

    run_id: str
    generation: int
    rank: int
    world_size: int
    step: int
    zero_stage: int
    layout: RankLayout
    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, tuple[int, ...]] | None
    extra_state: Mapping[str, Json] | None = None
    # As in `ShardRecord`.
    tp: int = 1

"""All weights of a sharded model on each rank for a while, where its layers would gather theirs in every pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gathered_at_once(model: torch.nn.Module) -> Iterator[None]:
    """Passes without gradients gather nothing within. Collective at its beginning."""
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if isinstance(model, FSDPModule):
        # What torch does in a root's first pass: it decides there what stays gathered after a pass.
        model._get_fsdp_state()._lazy_init()
    groups = [group for module in sharded for group in module._get_fsdp_state()._fsdp_param_groups]
    usual = [group.post_forward_mesh_info for group in groups]
    try:
        for module in sharded:
            module.unshard()
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, mesh in zip(groups, usual, strict=True):
            group.post_forward_mesh_info = mesh
        for module in sharded:
            module.reshard()

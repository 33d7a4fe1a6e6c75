"""FSDP2's collectives, counted: torch lets each module have its own all-gather and reduce-scatter."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from elastic.comm.collective_ledger import CollectiveLedger


class _AllGather(DefaultAllGather):
    def __init__(self, ledger: CollectiveLedger) -> None:
        super().__init__()
        self._counted = ledger.timed("all_gather_into_tensor", super().__call__)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        # FSDP2 waits for torch's own handles only.
        call = super().__call__ if async_op else self._counted
        return call(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, ledger: CollectiveLedger) -> None:
        super().__init__()
        self._counted = ledger.timed("reduce_scatter_tensor", super().__call__)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        call = super().__call__ if async_op else self._counted
        return call(output_tensor, input_tensor, group, op, async_op)


def count_collectives(model: torch.nn.Module, ledger: CollectiveLedger) -> None:
    """From here on the ledger has those of the model's forward and backward passes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather(ledger))
            module.set_custom_reduce_scatter(_ReduceScatter(ledger))

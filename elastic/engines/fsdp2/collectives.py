"""FSDP2's collectives, counted: torch lets each module have its own all-gather and reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import placement_types

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


# What DTensors call when they move between placements (torch/distributed/tensor/placement_types.py, release 2.13).
_EXCHANGES = ("all_gather_single", "all_reduce", "reduce_scatter_single")


class CountedExchanges:
    """Counts the exchanges of DTensors from `install` to `remove`: the ranks of a cell wait for one another in them.

    On the CPU each is waited for where it is made. On a device, where one may run beside the next layer's computation,
    they are left as they are and not counted.
    """

    def __init__(self, ledger: CollectiveLedger) -> None:
        self._ledger = ledger
        self._functional: Any = None
        self._dist: Any = None

    def install(self) -> None:
        if not self._ledger.on_device:
            self._functional = vars(placement_types)["funcol"]
            vars(placement_types)["funcol"] = _Counted(self._functional, self._ledger)

    def install_all_reduce(self) -> None:
        """Those over copies of a shard, too, which `fully_shard` makes itself."""
        if not self._ledger.on_device:
            self._dist = vars(_fsdp_collectives)["dist"]
            vars(_fsdp_collectives)["dist"] = _CountedAllReduce(self._dist, self._ledger)

    def remove(self) -> None:
        if self._functional is not None:
            vars(placement_types)["funcol"], self._functional = self._functional, None
        if self._dist is not None:
            vars(_fsdp_collectives)["dist"], self._dist = self._dist, None


class _CountedAllReduce:
    """torch.distributed with its all_reduce counted."""

    def __init__(self, of: Any, ledger: CollectiveLedger) -> None:
        self._of = of
        self.all_reduce = ledger.timed("all_reduce", of.all_reduce)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _Counted:
    """torch's module of functional collectives with some of them counted."""

    def __init__(self, functional: Any, ledger: CollectiveLedger) -> None:
        self._functional = functional
        for name in _EXCHANGES:
            setattr(self, name, _counted(name, getattr(functional, name), ledger))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functional, name)


def _counted(op: str, call: Callable[..., Any], ledger: CollectiveLedger) -> Callable[..., Any]:
    def exchanged(tensor: Any, *args: Any, group: Any, **named: Any) -> Any:
        if _are_we_tracing():
            return call(tensor, *args, group=group, **named)

        def waited(payload: Any, group: Any) -> Any:
            result = call(payload, *args, group=of, **named)
            return result.wait() if isinstance(result, AsyncCollectiveTensor) else result

        mesh, dim = of = group
        return ledger.timed(op, waited)(tensor, group=mesh.get_group(dim))

    return exchanged

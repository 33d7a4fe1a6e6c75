"""Models that are built on the meta device: they get memory when they are sharded, and values by their own
`init_weights`, as torchtitan's have it.

`init_weights` sees plain and whole parameters, on every rank with rank 0's seed. Those that it works on have memory,
one after another, and a rank keeps its part: initial weights are those of a model on one device, whatever the world.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.meshes import Meshes, cut_of, rows_of
from elastic.engines.model.plain_names import named_parameters


def is_deferred(model: torch.nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def begin(model: torch.nn.Module, device: torch.device) -> None:
    """Of a model that is about to be sharded: its buffers get memory. Raises UsageError, naming a parameter, for one
    that is there in part, or that nothing gives values."""
    named = dict(named_parameters(model))
    absent = next(name for name, parameter in named.items() if parameter.is_meta)
    if not callable(getattr(model, "init_weights", None)):
        raise UsageError(
            f"parameter {absent!r} is on the meta device, and {type(model).__name__} has no init_weights() that gives "
            "it values; build the model on the CPU or its device"
        )
    there = next((name for name, parameter in named.items() if not parameter.is_meta), None)
    if there is not None:
        raise UsageError(
            f"parameter {absent!r} is on the meta device, and {there!r} is not; build all of the model in one place"
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)


def give_values(model: torch.nn.Module, meshes: Meshes, device: torch.device, begins: bool) -> None:
    """By `init_weights`, of a model that is sharded and has memory. Raises UsageError where it leaves a parameter out,
    or makes another one, by name.

    Collective where the run `begins`; else a restore follows, for which other ranks may have a model already."""
    init: Any = model.init_weights
    known = inspect.signature(init).parameters.values()
    takes = any(each.name == "buffer_device" or each.kind is each.VAR_KEYWORD for each in known)
    seed = torch.tensor([torch.initial_seed()], dtype=torch.uint64).view(torch.int64).to(device)
    if begins:
        dist.broadcast(seed, src=0)
    shards = {name: shard for name, shard in named_parameters(model) if isinstance(shard, DTensor)}
    plain = {id(shard): _Plain(shard, meshes, device, begins) for shard in shards.values()}
    places = [
        (module, name, plain[id(shard)])
        for module in model.modules()
        for name, shard in module._parameters.items()
        if id(shard) in plain
    ]
    for module, name, one in places:
        module._parameters[name] = one.parameter
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), _Watch(plain.values()):
        torch.manual_seed(int(seed.view(torch.uint64)))
        init(**({"buffer_device": device} if takes else {}))
    for module, name, one in places:
        one.keep()
        one.given = one.given and module._parameters[name] is one.parameter
        module._parameters[name] = one.shard
    left = next((name for name, shard in shards.items() if not plain[id(shard)].given), None)
    if left is not None:
        raise UsageError(
            f"{type(model).__name__} is on the meta device, and its init_weights() gives no values to parameter "
            f"{left!r} where it is; let it write into it (torch.nn.init), or build the model on the CPU or its device"
        )


class _Plain:
    """A parameter in the place of its shard, with memory from `bring` to `keep`. `given`: it has been worked on."""

    def __init__(self, shard: Any, meshes: Meshes, device: torch.device, begins: bool) -> None:
        self.shard, self._meshes, self._begins, self.given = shard, meshes, begins, False
        self.parameter = nn.Parameter(torch.empty(shard.shape, dtype=shard.dtype, device=device), shard.requires_grad)
        self.memory = self.parameter.untyped_storage()
        self._bytes = self.memory.nbytes()
        self.memory.resize_(0)

    def bring(self) -> None:
        if self.memory.nbytes() < self._bytes:
            self.memory.resize_(self._bytes)
            if self.given and self._begins:
                self.parameter.copy_(self.shard.full_tensor())
        self.given = True

    @torch.no_grad()
    def keep(self) -> None:
        """This rank's part."""
        if self.memory.nbytes() and self._bytes:
            self.shard._local_tensor.copy_(self._part())
            self.memory.resize_(0)

    def _part(self) -> torch.Tensor:
        whole, cut = self.parameter.detach(), cut_of(self.shard)
        tp, lane = self._meshes.tp, self._meshes.shards
        if cut is not None:
            assert tp is not None
            ((start, stop),) = cut.ranges[tp.get_local_rank()]
            whole = whole.narrow(cut.dim, start, stop - start)
        first, end = rows_of(self.shard, lane.size(), lane.get_local_rank())
        return whole[first:end]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Parameters that an operation works on have memory, and no others."""

    def __init__(self, plain: Iterable[_Plain]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plain = {one.memory._cdata: one for one in plain}
        self._present: list[_Plain] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memories = (each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if type(each) in _TENSORS)
        if wanted := [self._plain[memory] for memory in memories if memory in self._plain]:
            for one in self._present:
                if one not in wanted:
                    one.keep()
            for one in wanted:
                one.bring()
            self._present = wanted
        return func(*args, **(kwargs or {}))


_TENSORS = (torch.Tensor, nn.Parameter)

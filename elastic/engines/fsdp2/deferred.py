"""Models that are built on the meta device: they get memory when they are sharded, and values by their own
`init_weights`, as torchtitan's have it.

`init_weights` sees plain and whole parameters, on every rank with rank 0's seed. Those that it works on have memory,
one after another, and a rank keeps its part: initial weights are those of a model on one device, whatever the world.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
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


class Others:
    """Layers of a whole model that other stages have: they are there while `init_weights` runs."""

    def __init__(self, model: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Before they are left out. `places`: the module that has one, and its name there."""
        self.names = {id(parameter): name for name, parameter in named_parameters(model)}
        self._layers = [(above, name, above._modules[name]) for above, name in places]

    @contextmanager
    def present(self) -> Iterator[None]:
        stand_ins = [above._modules[name] for above, name, _ in self._layers]
        for above, name, layer in self._layers:
            above._modules[name] = layer
        yield
        for (above, name, _), stand_in in zip(self._layers, stand_ins, strict=True):
            above._modules[name] = stand_in


def give_values(
    model: nn.Module, meshes: Meshes, device: torch.device, begins: bool, others: Others | None = None
) -> None:
    """By `init_weights`, of a model that is sharded and has memory, beside which there are `others`. Raises UsageError
    where it leaves a parameter out, or makes another one, by name.

    Collective where the run `begins`; else a restore follows, for which other ranks may have a model already."""
    seed = _seed(device, begins)
    shards = {name: shard for name, shard in named_parameters(model) if isinstance(shard, DTensor)}
    own = {name: _Plain(shard, shard, meshes, device, begins) for name, shard in shards.items()}
    plain = {id(one.shard): one for one in own.values()}
    with nullcontext() if others is None else others.present():
        places = _places(model)
        for _, _, parameter in places:
            if id(parameter) not in plain:
                assert others is not None
                # Another stage's, if it is no other place of one that this rank has.
                found = own.get(others.names[id(parameter)])
                plain[id(parameter)] = found or _Plain(parameter, None, meshes, device, begins)
        for module, name, parameter in places:
            module._parameters[name] = plain[id(parameter)].parameter
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), _Watch(plain.values()):
            torch.manual_seed(seed)
            _call(model.init_weights, device)
        for module, name, parameter in places:
            one = plain[id(parameter)]
            one.keep()
            one.given = one.given and module._parameters[name] is one.parameter
            module._parameters[name] = parameter
    left = next((name for name, one in own.items() if not one.given), None)
    if left is not None:
        raise UsageError(
            f"{type(model).__name__} is on the meta device, and its init_weights() gives no values to parameter "
            f"{left!r} where it is; let it write into it (torch.nn.init), or build the model on the CPU or its device"
        )


def _seed(device: torch.device, of_first: bool) -> int:
    """This rank's, or rank 0's, which is collective."""
    seed = torch.tensor([torch.initial_seed()], dtype=torch.uint64).view(torch.int64).to(device)
    if of_first:
        dist.broadcast(seed, src=0)
    return int(seed.cpu().view(torch.uint64))


def _places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where each parameter is."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _call(init: Any, device: torch.device) -> None:
    known = inspect.signature(init).parameters.values()
    takes = any(each.name == "buffer_device" or each.kind is each.VAR_KEYWORD for each in known)
    init(**({"buffer_device": device} if takes else {}))


class _Plain:
    """A parameter in the place of its shard, or of another stage's, with memory from `bring` to `keep`. `given`: it has
    been worked on."""

    def __init__(self, like: Any, shard: Any, meshes: Meshes, device: torch.device, begins: bool) -> None:
        self.shard, self._meshes, self._begins, self.given = shard, meshes, begins, False
        self.parameter = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device=device), like.requires_grad)
        self.memory = self.parameter.untyped_storage()
        self._bytes = self.memory.nbytes()
        self.memory.resize_(0)

    def bring(self) -> None:
        if self.memory.nbytes() < self._bytes:
            self.memory.resize_(self._bytes)
            if self.given and self.shard is None:
                raise UsageError(
                    "init_weights of a model on the meta device comes back to a parameter after others, and another "
                    "stage has it (mesh.pp); let it finish with each, or build the model on the CPU"
                )
            if self.given and self._begins:
                self.parameter.copy_(self.shard.to(self.parameter.device).full_tensor())
        self.given = True

    @torch.no_grad()
    def keep(self) -> None:
        """This rank's part."""
        if self.memory.nbytes() and self._bytes:
            if self.shard is not None:
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

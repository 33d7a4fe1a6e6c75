"""`elastic.engines.live_state.ShardedState` of a model under `fully_shard`.

Each parameter, or the slice of it that this lane has, is cut into blocks of ceil(rows / ranks) rows, in the order of
the lane's ranks; the last blocks may be short or empty (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
`_init_sharded_param`, release 2.13). Where ranks share experts, the rows of a rank's experts are cut so over
the ranks with the same ones: they are rows of the whole, too. The shard is what the optimizer updates, and what forward
passes gather: there are no other weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic.core.errors import UsageError
from elastic.core.sharding.layout import Chunk
from elastic.engines.fsdp2.layers.tensor_parallel import cuts_of
from elastic.engines.fsdp2.meshes import Meshes, is_experts, rows_of, slice_shape
from elastic.engines.fsdp2.sharding import reshard, summed_gradients
from elastic.engines.fsdp2.update.stand_ins import local_of
from elastic.engines.live_state import (
    PARAM,
    Beside,
    Extra,
    Master,
    Sharing,
    TensorSpec,
    Weight,
    specs_of,
    whole_buffer,
)
from elastic.engines.model.cuts import Cuts
from elastic.engines.model.plain_names import named_parameters


class Fsdp2State:
    # Cut over all ranks, parameter by parameter, as ZeRO-3 does it; by rows, where ZeRO-3 goes by elements.
    zero_stage = 3
    optimizer_tried = True
    once: dist.ProcessGroup | None = None
    writers: tuple[int, ...] | None = None
    tied: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()

    def __init__(
        self,
        module: torch.nn.Module,
        base: torch.optim.Optimizer,
        scheduler: Any,
        meshes: Meshes,
        keeps_others: Collection[str] = (),
    ) -> None:
        self.module, self.keeps_others = module, keeps_others
        self.base = base
        # Of a pipeline's parameters, in which layers they are.
        self.layers: Mapping[str, tuple[int, ...]] = {}
        self.rank, self.world_size = meshes.dp.get_local_rank(), meshes.dp.size()
        tp, slice_ = (1, 0) if meshes.tp is None else (meshes.tp.size(), meshes.tp.get_local_rank())
        self._shards, self._shard = meshes.shards.size(), meshes.shards.get_local_rank()
        self.part = (self._shards * tp, self._shard * tp + slice_)
        self.cell = None if meshes.tp is None else meshes.tp.get_group()
        self.copies = meshes.copies
        if self.copies is not None:
            self.once = meshes.shards.get_group()
            self.writers = tuple(range(self._shard, self.world_size, self._shards))
        self._scheduler = scheduler
        reshard(module)
        # The sharded parameters stay the same objects; while it is gathered the module has others.
        self._parameters: dict[str, DTensor] = {}
        for name, parameter in named_parameters(module):
            # torch's cache of shardings outlives a generation's groups, and its meshes do not compare them.
            if not isinstance(parameter, DTensor) or not meshes.holds(parameter):
                raise UsageError(f"parameter {name!r} is not sharded over this generation's ranks")
            self._parameters[name] = parameter
        self.cuts: Cuts | None = None if meshes.tp is None else cuts_of(module, self._parameters)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._chunks = {name: self._chunk(name) for name in self._parameters}

    def specs(self) -> list[TensorSpec]:
        trained = [name for group in self.groups() for name in group]
        return specs_of(self.module, trained, slice_shape)

    def groups(self) -> list[list[str]]:
        return [[self._names[id(p)] for p in group["params"] if p.requires_grad] for group in self.base.param_groups]

    def group_holders(self) -> Mapping[str, Sequence[dict[str, Any]]]:
        held = getattr(self._scheduler, "optimizer", None)
        return {
            "the optimizer": tuple(self.base.param_groups),
            "the scheduler": tuple(getattr(held, "param_groups", ())),
        }

    def require_readable(self) -> None:
        return None

    def masters(self) -> list[Master]:
        found = []
        for number, names in enumerate(self.groups()):
            for name in names:
                parameter, chunk = self._parameters[name], self._chunks[name]
                chunks = (chunk,) if chunk.numel else ()
                local, copied = local_of(parameter), self.copies is not None
                found.append(Master(chunk.buffer, number, local, chunks, (name,), copied, parameter, others=True))
        return found

    def frozen(self) -> list[Extra]:
        trained = {name for group in self.groups() for name in group}
        return [
            Extra(PARAM, local_of(self._parameters[name]), chunk, replicated=self.copies is not None)
            for name, chunk in self._chunks.items()
            if name not in trained and chunk.numel
        ]

    def weights(self) -> list[Weight]:
        trained, copied = {name for group in self.groups() for name in group}, self.copies is not None
        return [
            Weight(name, chunk.start, local_of(parameter).reshape(-1), copied, experts=copied, sliced=sliced)
            for name, chunk in self._chunks.items()
            # Ranks with one shard compare, and so name, all of it, rows or not, as those of other shards do.
            if name in trained and (chunk.numel or copied)
            for parameter in [self._parameters[name]]
            for sliced in [is_experts(parameter) or name in (self.cuts or {})]
        ]

    def sharing(self) -> Sharing:
        experts = frozenset(name for name, parameter in self._parameters.items() if is_experts(parameter))
        # With copies of shards `part` says how many there are.
        shards = self.part[0] if self.copies else 0
        # The reduced gradient is of the parameter's type, whatever it was computed in, and lies where the shard does.
        reduced, summed = (Beside("part"),), summed_gradients(self.module)
        return Sharing(
            "rows",
            experts,
            layers=self.layers,
            shard_workers=shards,
            beside=reduced,
            summed={self._names[of]: sizes for of, sizes in summed.items()},
        )

    def begin_install(self) -> None:
        # Parameters that an evaluation pass has gathered would keep their old values.
        reshard(self.module)

    def finish_install(self) -> None:
        return None

    def _chunk(self, name: str) -> Chunk:
        parameter = self._parameters[name]
        shape = slice_shape(parameter)
        width = math.prod(shape[1:])
        first, last = rows_of(parameter, self._shards, self._shard)
        if (last - first) * width != local_of(parameter).numel():
            raise UsageError(
                f"parameter {name!r}: shard {self._shard} of {self._shards} has {local_of(parameter).numel()} elements "
                f"where rows {first} to {last} of {shape} were expected: this torch shards otherwise"
            )
        return Chunk(name, first * width, (last - first) * width, whole_buffer(name), 0)

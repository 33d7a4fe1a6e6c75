"""What the three kinds of ZeRO state share, and which one an engine has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.errors import UsageError
from elastic.core.sharding.experts import Place, neighbours
from elastic.core.sharding.layout import RankLayout
from elastic.core.sharding.mesh_memory import CutBy
from elastic.engines.deepspeed.experts import config, placement
from elastic.engines.deepspeed.experts.native import Counterparts
from elastic.engines.deepspeed.pipeline import module as pipeline
from elastic.engines.deepspeed.state.muon import is_deepspeeds
from elastic.engines.live_state import (
    Beside,
    Extra,
    Master,
    Sharing,
    TensorSpec,
    Weight,
    parameter_names,
    specs_of,
    weights_whole,
)
from elastic.engines.model.cuts import Cuts
from elastic.engines.model.plain_names import named_parameters


class ZeroState(ABC):
    """`elastic.engines.live_state.ShardedState` of a DeepSpeedEngine; one subclass for each way of partitioning."""

    zero_stage: int
    keeps_others: Collection[str] = ()
    once: dist.ProcessGroup | None = None
    writers: tuple[int, ...] | None = None
    base: torch.optim.Optimizer

    def __init__(self, engine: Any) -> None:
        self.module: torch.nn.Module = engine.module
        self.rank, self.world_size = rank_in(engine.seq_data_parallel_group)
        self.counterparts = Counterparts(engine.module)
        self.lanes = max(engine.autotp_size(), 1)
        ep = max(config.size_of(engine._config._param_dict) // self.lanes, self.counterparts.ep)
        self.copies = placement.copies_group(engine)
        self.cell: dist.ProcessGroup | None = None
        if self.lanes > 1:
            self.cell = engine.mpu.get_tensor_model_parallel_group()
        beside = 1 if self.copies is None else neighbours(dist.get_process_group_ranks(self.copies))
        self.place = Place(self.rank, self.world_size, ep, self.counterparts.ep > 1, beside)
        self.tied = pipeline.tied_names(engine.module)
        self.elsewhere = pipeline.saved_elsewhere(engine.module)
        self.cuts: Cuts | None = None
        # Weights of forward passes are whole.
        self.part = (1, 0)
        self._engine = engine
        self._wrapper = engine.optimizer
        self._names = parameter_names(engine.module)
        # ZeRO gives it the update of whole matrices.
        self.optimizer_tried = engine.zero_optimization_stage() > 0 and is_deepspeeds(engine.basic_optimizer)

    def specs(self) -> list[TensorSpec]:
        own = specs_of(self.module, [name for group in self.groups() for name in group], self.full_shape)
        return self.counterparts.of_specs(own)

    def group_holders(self) -> Mapping[str, Sequence[dict[str, Any]]]:
        wrapper, scheduler = self._engine.optimizer, self._engine.lr_scheduler
        holders = {
            "the engine's optimizer": wrapper,
            "the optimizer that steps": getattr(wrapper, "optimizer", None),
            "the optimizer that was given": self._engine.basic_optimizer,
            "the optimizer of a backup": getattr(wrapper, "backup_optimizer", None),
            "the scheduler": getattr(scheduler, "optimizer", None),
        }
        return {who: tuple(getattr(holder, "param_groups", ())) for who, holder in holders.items()}

    def require_readable(self) -> None:
        if getattr(self._engine.optimizer, "offloaded_states", None):
            raise UsageError(
                "the engine's state is offloaded; call engine.reload_states() before a snapshot or a restore"
            )

    def whole_weights(self, trained: Sequence[str]) -> list[Weight]:
        """Of parameters that are whole on every rank, but for other ranks' experts."""
        named = dict(named_parameters(self.module))
        return [
            replace(weight, start=first, experts=experts) if experts or first else weight
            for weight in weights_whole(self.module, trained)
            for first, experts in [(self.first_element(named[weight.name]), placement.is_expert(named[weight.name]))]
        ]

    def shares_of_experts(self) -> Iterator[tuple[int, int]]:
        """Of `ranks_of_parts`."""
        for group in self._engine.expert_parallel_group.values():
            yield dist.get_rank(group) // self.lanes, self.place.share

    def first_element(self, parameter: Any) -> int:
        """Where in the whole tensor, or this lane's slice of it, the part begins that this rank has a shard of."""
        return placement.first_element(parameter, self.lanes)

    def full_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """The shape before stage 3 partitioned it, with the experts of all ranks of this lane."""
        whole = placement.whole_shape(parameter, self.lanes)
        return whole or tuple(getattr(parameter, "ds_shape", parameter.shape))

    def sharing(self) -> Sharing:
        cut_by: Sequence[CutBy] = ("whole", "flat", "flat", "elements")
        experts = frozenset(name for name, p in named_parameters(self.module) if placement.is_expert(p))
        names, apart = frozenset(self.counterparts.of_names(experts)), self.counterparts.any
        layers = pipeline.layers_by_name(self.module)
        beside, whole = tuple(self.beside()), self.frozen_also_whole()
        return Sharing(cut_by[self.zero_stage], names, apart, layers, beside=beside, also_whole=whole)

    def frozen_also_whole(self) -> Mapping[str, torch.Tensor]:
        """`Sharing.also_whole`."""
        return {}

    @abstractmethod
    def groups(self) -> list[list[str]]: ...

    @abstractmethod
    def masters(self) -> list[Master]: ...

    @abstractmethod
    def frozen(self) -> list[Extra]: ...

    @abstractmethod
    def weights(self) -> list[Weight]: ...

    @abstractmethod
    def beside(self) -> Iterable[Beside]:
        """`Sharing.beside`: what lies in memory when the last backward pass of a step ends, before any of it is
        reduced, as long as stages 2 and 3 do not reduce within it."""

    @abstractmethod
    def expected(self) -> RankLayout | None:
        """The pure layout that the chunks of `masters` must equal, if there is one."""

    @abstractmethod
    def ranks_of_parts(self) -> Iterable[tuple[int, int]]:
        """(as which rank DeepSpeed has cut a part of this rank, by the group that it keeps with it; as which one it is
        taken here), for parts of all kinds."""

    def begin_install(self) -> None:
        return None

    @abstractmethod
    def finish_install(self) -> None: ...


def own_numel(parameter: torch.Tensor) -> int:
    """Of this rank's experts where ranks share them, before stage 3 partitioned it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape)).numel()


def rank_in(group: dist.ProcessGroup) -> tuple[int, int]:
    """(rank, size) in a process group."""
    return dist.get_rank(group), dist.get_world_size(group)

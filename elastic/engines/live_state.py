"""What a live engine holds, in the words of `elastic.core.sharding.layout`: the part that differs between ZeRO stages.

A *master* is one tensor that the base optimizer updates: a flat partition (stages 1 to 3), a flat group or a parameter
(stage 0). It is also the key under which the base optimizer keeps its state. An *extra* is a tensor that no optimizer
updates: a frozen parameter or a module buffer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic.core.sharding.layout import Chunk, Layout

MASTER = "master"
PARAM = "param"
BUFFER = "buffer"


@dataclass(frozen=True)
class Master:
    """One live tensor of the base optimizer. `chunks` are in elements of the flattened `tensor`, none in padding.

    `names` are the parameters that it holds on all ranks together: they share its optimizer scalars.
    """

    buffer: str
    group: int
    tensor: torch.Tensor
    chunks: tuple[Chunk, ...]
    names: tuple[str, ...]
    replicated: bool


@dataclass(frozen=True)
class Weight:
    """What a forward pass uses of one trained parameter on this rank, 1-D: its elements from `start` on, or all."""

    name: str
    start: int
    tensor: torch.Tensor
    whole: bool


@dataclass(frozen=True)
class Extra:
    """One live tensor without optimizer state: all of it (`replicated`) or this rank's slice of it."""

    kind: str
    tensor: torch.Tensor
    chunk: Chunk
    replicated: bool


@dataclass(frozen=True)
class Member:
    """One tensor of the model. `persistent` is False for buffers that a state_dict leaves out."""

    name: str
    kind: str
    shape: tuple[int, ...]
    persistent: bool = True

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class Stage(Protocol):
    """One ZeRO stage's live state. All tensors are looked up anew at each call, since DeepSpeed re-points them.

    1. `masters`, `frozen`, `weights` whenever the state is read or written; `expected` once, when the engine is opened
    2. `begin_install` before anything is written; not collective
    3. `finish_install` after: the model's own weights follow from the masters; collective
    """

    zero_stage: int
    rank: int
    world_size: int
    base: torch.optim.Optimizer

    def groups(self) -> list[list[str]]:
        """Names of the optimized parameters by parameter group, in the group's order."""
        ...

    def masters(self) -> list[Master]: ...

    def frozen(self) -> list[Extra]: ...

    def weights(self) -> list[Weight]:
        """The trained parameters as the module itself has them: not by way of the flats that they may lie in."""
        ...

    def expected(self) -> Layout | None:
        """The pure layout that this rank's chunks of `masters` must equal, if there is one; others' may be missing."""
        ...

    def begin_install(self) -> None: ...

    def finish_install(self) -> None: ...


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """id of each parameter -> its first name; a tied parameter appears once, under the name that torch lists first."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape before stage 3 partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: torch.Tensor) -> int:
    return torch.Size(full_shape(parameter)).numel()


def members(module: torch.nn.Module, optimized: Sequence[str]) -> list[Member]:
    """Every tensor of the model in its own order: parameters, then buffers."""
    trained = set(optimized)
    found = [
        Member(name, MASTER if name in trained else PARAM, full_shape(parameter))
        for name, parameter in module.named_parameters()
    ]
    return found + [
        Member(name, BUFFER, tuple(tensor.shape), persistent) for name, tensor, persistent in _buffers(module)
    ]


def buffers(module: torch.nn.Module) -> list[Extra]:
    """The module's buffers, whole. Buffers without elements hold nothing and are left out."""
    return [
        Extra(BUFFER, tensor, Chunk(name, 0, tensor.numel(), whole_buffer(name), 0), replicated=True)
        for name, tensor, _ in _buffers(module)
        if tensor.numel()
    ]


def frozen_whole(module: torch.nn.Module, optimized: Sequence[str]) -> list[Extra]:
    """Stages 0 to 2: parameters that no optimizer updates are whole on every rank."""
    trained = set(optimized)
    return [
        Extra(PARAM, parameter.data, Chunk(name, 0, parameter.numel(), whole_buffer(name), 0), replicated=True)
        for name, parameter in module.named_parameters()
        if name not in trained and parameter.numel()
    ]


def weights_whole(module: torch.nn.Module, optimized: Sequence[str]) -> list[Weight]:
    """Stages 0 to 2: every rank has every trained parameter whole."""
    trained = set(optimized)
    return [
        Weight(name, 0, parameter.data.reshape(-1), whole=True)
        for name, parameter in module.named_parameters()
        if name in trained and parameter.numel()
    ]


def whole_buffer(name: str) -> str:
    """The buffer's name of a tensor that is not part of a flat: its own, kept apart from those of flats."""
    return f"{name}~" if re.fullmatch(r"(group|sub)\d+", name) else name


def rank_in(group: Any) -> tuple[int, int]:
    """(rank, size) in a DeepSpeed process group."""
    from deepspeed import comm

    return int(comm.get_rank(group=group)), int(comm.get_world_size(group=group))


def _buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    fleeting = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }
    return [(name, tensor, name not in fleeting) for name, tensor in module.named_buffers()]

"""What a live engine holds, in the terms of `elastic.core.sharding.layout`: the part that differs between engines.

A *master* is one tensor that the base optimizer updates: with ZeRO a flat partition (stages 1 to 3), a flat group or a
parameter (stage 0); with FSDP2 a rank's rows of one parameter. It is also the key under which the base optimizer keeps
its state. An *extra* is a tensor that no optimizer updates: a frozen parameter or a module buffer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from elastic.core.checkpoint.shares import is_share
from elastic.core.sharding.layout import Chunk
from elastic.core.sharding.mesh_memory import CutBy
from elastic.engines.model.plain_names import named_buffers, named_modules, named_parameters

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from elastic.engines.model.cuts import Cuts

MASTER = "master"
PARAM = "param"
BUFFER = "buffer"
# A tensor of an object that the user has registered.
KEPT = "kept"


@dataclass(frozen=True)
class Master:
    """One live tensor of the base optimizer. `chunks` are in elements of the flattened `tensor`, none in padding.

    `names` are the parameters that it holds on all ranks together: they share its optimizer scalars. `wrapper` is the
    DTensor whose local part `tensor` is: the optimizer keeps its state under that one, and as DTensors. `among`: of
    what is `replicated`, the ranks that have copies and write one of them; None: as `ShardedState.writers` says.
    `others`: the optimizer may keep tensors of other shapes of it, the same on all ranks.
    """

    buffer: str
    group: int
    tensor: torch.Tensor
    chunks: tuple[Chunk, ...]
    names: tuple[str, ...]
    replicated: bool
    wrapper: DTensor | None = None
    among: tuple[int, ...] | None = None
    others: bool = False

    @property
    def key(self) -> torch.Tensor:
        """What the base optimizer keeps this master's state under."""
        return self.tensor if self.wrapper is None else self.wrapper

    def wrapped(self, state: torch.Tensor) -> torch.Tensor:
        """A state tensor of the master's shape as the optimizer keeps it."""
        if self.wrapper is None:
            return state
        # Not at the top: engines without DTensors do not need it.
        from torch.distributed.tensor import DTensor

        like = self.wrapper
        return DTensor.from_local(
            state, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


@dataclass(frozen=True)
class Weight:
    """What a forward pass uses of one trained parameter on this rank, 1-D: its elements from `start` on.

    `whole`: all that any rank has of it for its forward passes, so that other ranks have copies: all ranks, or with
    `experts` those with the same experts or shard (`ShardedState.copies`), with `sliced` those with the same slices; of
    a part it also says so of what ranks of a cell have different experts of. Where each expert is a tensor by itself,
    those of other ranks are here without elements; where ranks have copies of a shard, what it has no rows of, too."""

    name: str
    start: int
    tensor: torch.Tensor
    whole: bool
    experts: bool = False
    sliced: bool = False


@dataclass(frozen=True)
class Extra:
    """One live tensor without optimizer state: all of it (`replicated`) or this rank's slice of it."""

    kind: str
    tensor: torch.Tensor
    chunk: Chunk
    replicated: bool


@dataclass(frozen=True)
class Fragment:
    """Elements of one tensor of one kind from `start` on, 1-D and live: this rank's part of it, or all."""

    kind: str
    name: str
    start: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model, whole. `kind` is MASTER (trained), PARAM (frozen) or BUFFER; `persistent` is False for
    buffers that a state_dict leaves out."""

    name: str
    kind: str
    shape: tuple[int, ...]
    persistent: bool = True

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Beside:
    """What an engine keeps of trained elements beside weights, masters and optimizer state: gradients as they are added
    up over a step's micro-batches, copies on their way to and from host memory.

    `of`: of all elements that a lane has ("lane"), of those of a rank's masters, their padding too ("part"), or of all
    elements of each tensor that a rank's masters have any of ("reached"). `device`: None: where the master is, or of a
    lane's the weight. `element_bytes`: None: as of the weights, or of the masters where there are no weights.
    """

    of: Literal["lane", "part", "reached"]
    device: torch.device | None = None
    element_bytes: int | None = None


@dataclass(frozen=True)
class Sharing:
    """By which rules an engine shares tensors out, at any world size: see `core.sharding.mesh_memory` for `cut_by` and
    `shard_workers`. `experts`: parameters of which the first dimension is experts that ranks share, or with `apart`
    each of which is one. `layers`: the layers of a pipeline that have each parameter; empty: it is none. `beside`: what
    else lies in memory. `also_whole`: frozen parameters that ranks have whole beside their parts. `summed`: of trained
    parameters whose gradients are added up unreduced over several micro-batches, in the place of what is reduced of
    them at the step's end: the elements on this rank, and the bytes of each."""

    cut_by: CutBy
    experts: frozenset[str] = frozenset()
    apart: bool = False
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shard_workers: int = 0
    beside: tuple[Beside, ...] = ()
    also_whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    summed: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class ShardedState(Protocol):
    """One rank's part of an engine's tensors. All tensors are looked up anew at each call: engines re-point them.

    1. `require_readable`, then `masters`, `frozen`, `weights` whenever the state is read or written
    2. `begin_install` before anything is written; not collective
    3. `finish_install` after: the model's own weights follow from the masters; collective
    """

    # ZeRO's stage, or the one that has the same layout: 0 where every rank holds everything.
    zero_stage: int
    # The engine itself has made sure that the optimizer's result does not depend on the number of ranks.
    optimizer_tried: bool
    # Then: what that keeps in other shapes than its parameters', if it does.
    keeps_others: Collection[str]
    rank: int
    world_size: int
    # The ranks with the same experts as this one, where ranks share experts, or with the same shard of everything.
    copies: dist.ProcessGroup | None
    # The ranks that share each layer with this one, and have the same part of what is not sliced; None: none do.
    cell: dist.ProcessGroup | None
    # Where several ranks have the same shard, or experts: those that have everything once between them, this one among
    # them, but for what each has whole; and who deals out among themselves what is written of this shard.
    once: dist.ProcessGroup | None
    writers: tuple[int, ...] | None
    # Tied parameters that other stages of a pipeline have copies of: the model's, all ranks alike; and those here of
    # which an earlier stage's copy is saved, buffers of all stages included.
    tied: tuple[str, ...]
    elsewhere: frozenset[str]
    # In how many parts the ranks of a stage have a weight, all slices together, and which part this rank has.
    part: tuple[int, int]
    # Where ranks share layers, how parameters are cut, by what this rank has found; None: nobody has looked.
    cuts: Cuts | None
    module: torch.nn.Module
    # Its state is keyed by the masters' tensors.
    base: torch.optim.Optimizer

    def specs(self) -> list[TensorSpec]:
        """Every tensor of the model in its own order: parameters, then buffers."""
        ...

    def groups(self) -> list[list[str]]:
        """Names of the optimized parameters by parameter group, in the group's order: the same on all ranks that are
        no stages of a pipeline, whoever has which experts."""
        ...

    def group_holders(self) -> Mapping[str, Sequence[dict[str, Any]]]:
        """Who holds parameter groups (the optimizer, the scheduler, ...) and the very dicts that it holds."""
        ...

    def require_readable(self) -> None:
        """Raises UsageError while the user has moved the tensors out of the engine."""
        ...

    def masters(self) -> list[Master]: ...

    def frozen(self) -> list[Extra]: ...

    def weights(self) -> list[Weight]:
        """The trained parameters as the module itself has them: not by way of the flats that they may lie in."""
        ...

    def sharing(self) -> Sharing: ...

    def begin_install(self) -> None: ...

    def finish_install(self) -> None: ...


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """id of each parameter -> its first name; a tied parameter appears once, under the name that torch lists first."""
    return {id(parameter): name for name, parameter in named_parameters(module)}


def specs_of(
    module: torch.nn.Module, optimized: Sequence[str], shape_of: Callable[[torch.Tensor], tuple[int, ...]]
) -> list[TensorSpec]:
    """`ShardedState.specs`; `shape_of` gives a parameter's whole shape."""
    trained = set(optimized)
    found = [
        TensorSpec(name, MASTER if name in trained else PARAM, shape_of(parameter))
        for name, parameter in named_parameters(module)
    ]
    return found + [
        TensorSpec(name, BUFFER, tuple(tensor.shape), persistent) for name, tensor, persistent in _buffers(module)
    ]


def buffers(module: torch.nn.Module) -> list[Extra]:
    """The module's buffers, whole. Buffers without elements hold nothing and are left out."""
    return [
        Extra(BUFFER, tensor, Chunk(name, 0, tensor.numel(), whole_buffer(name), 0), replicated=True)
        for name, tensor, _ in _buffers(module)
        if tensor.numel()
    ]


def kept(tensors: Mapping[str, torch.Tensor]) -> list[Extra]:
    """Tensors besides the model's, whole on every rank but for shares, which are one rank's. Those without elements
    hold nothing and are left out."""
    return [
        Extra(KEPT, tensor, Chunk(name, 0, tensor.numel(), name, 0), replicated=not is_share(name))
        for name, tensor in tensors.items()
        if tensor.numel()
    ]


def frozen_whole(module: torch.nn.Module, optimized: Sequence[str]) -> list[Extra]:
    """Frozen parameters of an engine that keeps them whole on every rank."""
    trained = set(optimized)
    return [
        Extra(PARAM, parameter.data, Chunk(name, 0, parameter.numel(), whole_buffer(name), 0), replicated=True)
        for name, parameter in named_parameters(module)
        if name not in trained and parameter.numel()
    ]


def weights_whole(module: torch.nn.Module, optimized: Sequence[str]) -> list[Weight]:
    """Trained parameters of an engine that keeps them whole on every rank."""
    trained = set(optimized)
    return [
        Weight(name, 0, parameter.data.reshape(-1), whole=True, sliced=is_sliced(parameter))
        for name, parameter in named_parameters(module)
        if name in trained and parameter.numel()
    ]


def is_sliced(parameter: torch.Tensor) -> bool:
    """Do the ranks of a cell hold different slices of it? AutoTP says so as Megatron does."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def whole_buffer(name: str) -> str:
    """The buffer name of a tensor outside any flat: the tensor's own, distinct from the names of flats."""
    return f"{name}~" if re.fullmatch(r"(group|sub)\d+", name) else name


def _buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    fleeting = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in named_modules(module)
        for name in child._non_persistent_buffers_set
    }
    return [(name, tensor, name not in fleeting) for name, tensor in named_buffers(module)]

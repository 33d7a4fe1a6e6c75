"""What a rank holds of the training state, for predictions of what it would hold on another mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch

from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.mesh_memory import HeldState, HeldTensors, together
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import MASTER, PARAM, ShardedState, Sharing


def held_state(state: ShardedState, device: torch.device, slices: int) -> tuple[HeldState, int]:
    """(the model's, or its stage's of a pipeline; the bytes of this rank on `device`), once the optimizer has what it
    keeps. `slices`: so many ranks share each layer.

    Gradients are counted as an optimizer step finds them, in the types of the weights: whole in stages 0 and 1, sharded
    like the masters in the others. Module buffers and what the user keeps are not counted.
    """
    sharing, held = state.sharing(), _Held(device)
    _count(state, sharing, held)
    group = {name: number for number, names in enumerate(state.groups()) for name in names}
    tensors = [
        _shape(state, sharing, spec.name, spec.shape, slices)._replace(
            lane_bytes=held.lane[spec.name], data_bytes=held.data[spec.name], group=group.get(spec.name, -1)
        )
        for spec in state.specs()
        if spec.kind in (MASTER, PARAM) and spec.name not in state.elsewhere
    ]
    return HeldState(sharing.cut_by, together(tensors), sharing.shard_workers, slices), held.own


class _Held:
    """Bytes per element by parameter: what every rank of a lane has, and what one of those that share the data has;
    `own` are those of this rank, all together."""

    def __init__(self, device: torch.device) -> None:
        self.lane, self.data, self.own = Counter[str](), Counter[str](), 0
        self._device = device

    def add(self, names: Iterable[str], tensor: torch.Tensor, whole: bool, element_bytes: int | None = None) -> None:
        """What lies elsewhere, in host memory, does not count."""
        if tensor.device.type == self._device.type:
            size = tensor.element_size() if element_bytes is None else element_bytes
            (self.lane if whole else self.data).update(dict.fromkeys(names, size))
            self.own += tensor.numel() * size


def _count(state: ShardedState, sharing: Sharing, held: _Held) -> None:
    inventory, everywhere = Inventory.of(state), sharing.cut_by in ("whole", "flat")
    # With FSDP2 they are the masters. Those of other ranks' experts are here without elements.
    weights = [] if sharing.cut_by == "rows" else [each for each in state.weights() if each.tensor.numel()]
    for weight in weights:
        # Stage 3 keeps small parameters whole besides.
        held.add([weight.name], weight.tensor, everywhere or weight.whole)
        if state.zero_stage < 2:
            held.add([weight.name], weight.tensor, whole=True)
    sizes = {weight.name: weight.tensor.element_size() for weight in weights}
    same = {weight.tensor.untyped_storage().data_ptr() for weight in weights}
    for master, kept in zip(inventory.masters, inventory.states, strict=True):
        own = [] if master.tensor.untyped_storage().data_ptr() in same else [master.tensor]
        for tensor in (*own, *kept.tensors.values()):
            held.add(master.names, tensor, sharing.cut_by == "whole")
        if state.zero_stage >= 2:
            gradient = max((sizes.get(name, 0) for name in master.names), default=0)
            held.add(master.names, master.tensor, False, gradient if weights else master.tensor.element_size())
    for extra in inventory.extras:
        if extra.kind == PARAM:
            held.add([extra.chunk.name], extra.tensor, everywhere)
    if sharing.apart:
        # Another rank's experts are what this one's are.
        here = max((held.lane[name] for name in sharing.experts), default=0)
        held.lane.update({name: here - held.lane[name] for name in sharing.experts})


def _shape(state: ShardedState, sharing: Sharing, name: str, shape: tuple[int, ...], slices: int) -> HeldTensors:
    """Before anything cuts it."""
    cut, experts = (state.cuts or {}).get(name), 0
    if isinstance(cut, Cut):
        shape = cut.shape
    rows = shape[0] if shape else 1
    if isinstance(cut, str):
        # Nobody knows how, but it is in as many slices.
        rows *= slices
    if name in sharing.experts:
        experts = 2 if sharing.apart else 1
    first, *also = sharing.layers.get(name) or (0,)
    along = -1 if cut is None else min(cut.dim, 1) if isinstance(cut, Cut) else 0
    return HeldTensors(rows, math.prod(shape[1:]), cut=along, experts=experts, layer=first, also=tuple(also))

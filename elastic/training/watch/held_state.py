"""What a rank holds of the training state, for predictions of what it would hold on another mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.mesh_memory import HeldState, HeldTensors, together
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import MASTER, PARAM, Beside, Master, ShardedState, Sharing, Weight


def held_state(state: ShardedState, device: torch.device, slices: int, adds_up: bool = False) -> tuple[HeldState, int]:
    """(the model's, or its stage's of a pipeline; the bytes of this rank on `device`), once the optimizer has what it
    keeps. `slices`: so many ranks share each layer. `adds_up`: the gradients of several micro-batches, before they are
    reduced.

    What lies elsewhere than on `device`, in host memory, is not counted; where `device` is the host's, all is.
    Gradients are counted as the engine adds them up, though there are none between steps (`Sharing.beside`). Module
    buffers and what the user keeps are not counted.
    """
    sharing, held = state.sharing(), _Held(device)
    _count(state, sharing, held)
    reduced = _reduced(state, sharing, device)
    if adds_up:
        held.own += sum(
            max(0, numel * size - reduced.get(name, (0, 0))[0]) for name, (numel, size) in sharing.summed.items()
        )
    group = {name: number for number, names in enumerate(state.groups()) for name in names}
    tensors = [
        _shape(state, sharing, spec.name, spec.shape, slices)._replace(
            lane_bytes=held.bytes["lane"][spec.name],
            data_bytes=held.bytes["part"][spec.name],
            reached_bytes=held.bytes["reached"][spec.name],
            summed_bytes=sharing.summed[spec.name][1] if spec.name in sharing.summed else 0,
            reduced_bytes=reduced[spec.name][1] if spec.name in reduced else 0,
            group=group.get(spec.name, -1),
        )
        for spec in state.specs()
        if spec.kind in (MASTER, PARAM) and spec.name not in state.elsewhere
    ]
    return HeldState(sharing.cut_by, together(tensors), sharing.shard_workers, slices), held.own


class _Held:
    """Bytes per element by parameter, each as `Beside.of` says; `own` are those of this rank, all together."""

    def __init__(self, device: torch.device) -> None:
        self.bytes: dict[str, Counter[str]] = {"lane": Counter(), "part": Counter(), "reached": Counter()}
        self.own = 0
        self._device = device

    def add(self, of: str, names: Iterable[str], tensor: torch.Tensor) -> None:
        self.add_elements(of, names, tensor.device, tensor.numel(), tensor.element_size())

    def add_elements(self, of: str, names: Iterable[str], device: torch.device, numel: int, size: int) -> None:
        """What lies elsewhere, in host memory, does not count."""
        if device.type == self._device.type:
            self.bytes[of].update(dict.fromkeys(names, size))
            self.own += numel * size


def _count(state: ShardedState, sharing: Sharing, held: _Held) -> None:
    inventory, everywhere = Inventory.of(state), sharing.cut_by in ("whole", "flat")
    # With FSDP2 they are the masters. Those of other ranks' experts are here without elements.
    weights = [] if sharing.cut_by == "rows" else [each for each in state.weights() if each.tensor.numel()]
    for weight in weights:
        # Stage 3 keeps small parameters whole besides.
        held.add("lane" if everywhere or weight.whole else "part", [weight.name], weight.tensor)
    same = {weight.tensor.untyped_storage()._cdata for weight in weights}
    for master, kept in zip(inventory.masters, inventory.states, strict=True):
        own = [] if master.tensor.untyped_storage()._cdata in same else [master.tensor]
        for tensor in (*own, *kept.tensors.values()):
            held.add("lane" if sharing.cut_by == "whole" else "part", master.names, tensor)
    for beside in sharing.beside:
        _count_beside(beside, weights, inventory.masters, held)
    for extra in inventory.extras:
        if extra.kind == PARAM:
            held.add("lane" if everywhere else "part", [extra.chunk.name], extra.tensor)
    for name, tensor in sharing.also_whole.items():
        held.add("lane", [name], tensor)
    if sharing.apart:
        # Another rank's experts are what this one's are.
        lane = held.bytes["lane"]
        here = max((lane[name] for name in sharing.experts), default=0)
        lane.update({name: here - lane[name] for name in sharing.experts})


def _count_beside(beside: Beside, weights: Sequence[Weight], masters: Sequence[Master], held: _Held) -> None:
    if beside.of == "lane":
        for weight in weights:
            size = beside.element_bytes or weight.tensor.element_size()
            device = beside.device or weight.tensor.device
            held.add_elements("lane", [weight.name], device, weight.tensor.numel(), size)
        return
    sizes = {weight.name: weight.tensor.element_size() for weight in weights}
    numels = {weight.name: weight.tensor.numel() for weight in weights}
    for master in masters:
        # Of padding alone, as of all others.
        own = [sizes[name] for name in master.names if name in sizes] or [*sizes.values(), master.tensor.element_size()]
        numel = master.tensor.numel()
        if beside.of == "reached":
            numel = sum(numels[name] for name in {chunk.name for chunk in master.chunks})
        device = beside.device or master.tensor.device
        held.add_elements(beside.of, master.names, device, numel, beside.element_bytes or own[0])


def _reduced(state: ShardedState, sharing: Sharing, device: torch.device) -> dict[str, tuple[int, int]]:
    """Of what is added up: the bytes of this rank's reduced gradient on `device`, and those of each element."""
    found = {}
    for master in state.masters() if sharing.summed else ():
        size = master.tensor.element_size() if master.tensor.device.type == device.type else 0
        found[master.names[0]] = master.tensor.numel() * size, size
    return found


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

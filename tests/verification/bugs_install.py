"""Bugs in what is installed: tensors that are left, lost, mixed up or taken twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic.engines.inventory import Inventory
from verification.tools import Change, changed, modules, together


def kept_old(kind: str) -> Change:
    """Frozen parameters ("param") or module buffers ("buffer") stay what they were in the fresh model."""
    return _kept(lambda state: _extras(state, kind))


def buffers_kept_off_rank_0() -> Change:
    return _kept(lambda state: {} if state._sharded.rank == 0 else _extras(state, "buffer"))


def _kept(select: Callable[[Any], dict[str, torch.Tensor]], method: str = "_install") -> Change:
    """What `select(state)` names has its old value again after the install."""

    def install(original: Any, self: Any, *args: Any) -> None:
        before = {key: tensor.detach().clone() for key, tensor in select(self).items()}
        original(self, *args)
        for key, tensor in select(self).items():
            tensor.detach().copy_(before[key])

    return changed(modules().restore.Restore, method, install)


def _extras(state: Any, kind: str) -> dict[str, torch.Tensor]:
    return {extra.chunk.name: extra.tensor for extra in Inventory.of(state._sharded).extras if extra.kind == kind}


def masters_stale() -> Change:
    """The low-precision weights are the checkpoint's, the masters those of the fresh model."""
    return _kept(lambda state: {m.buffer: m.tensor for m in state._sharded.masters()}, "install")


def weights_stale() -> Change:
    return changed(modules().stage3.Stage3State, "finish_install", lambda original, self: None)


def gather_skipped() -> Change:
    import deepspeed.runtime.bf16_optimizer as bf16
    import deepspeed.runtime.zero.stage_1_and_2 as zero

    skipped = [changed(module, "all_gather_dp_groups", lambda original, *_, **__: None) for module in (zero, bf16)]
    return together(*skipped)


def persistent_stale() -> Change:
    def gather(original: Any, parameters: Any) -> None:
        original(parameters)
        for parameter in parameters:
            parameter.data.add_(1.0)

    return changed(modules().stage3, "gather", gather)


def replica_kept() -> Change:
    """Each rank keeps what it had of a parameter whose master another rank holds."""

    def finish(original: Any, self: Any) -> None:
        parameter = dict(self.module.named_parameters())["layers.10.weight"]
        before = parameter.detach().clone()
        original(self)
        if self.rank == 1:
            parameter.data.copy_(before)

    return changed(modules().partitioned.PartitionedState, "finish_install", finish)


def state_only_where_there_is_some() -> Change:
    def install(original: Any, base: Any, master: Any, tensors: Any, scalars: Any, others: Any) -> None:
        live = base.state.get(master.tensor) or {}
        original(base, master, {key: value for key, value in tensors.items() if key in live}, scalars, others)

    return changed(modules().restore, "install_state", install)


def without_moments(world: Any) -> None:
    from verification.scene import stage_of

    def clear(engine: Any, _: int) -> None:
        stage_of(engine).base.state.clear()

    world.run(clear)


def twice() -> Change:
    """Values are added to what is there, as a second application would."""

    def install(original: Any, base: Any, master: Any, tensors: Any, scalars: Any, others: Any) -> None:
        original(base, master, {key: value + value for key, value in tensors.items()}, scalars, others)

    return changed(modules().restore, "install_state", install)


def turned() -> Change:
    """One square matrix is installed with its axes swapped."""

    def master(original: Any, self: Any, wanted: Any) -> Any:
        found = original(self, wanted).clone()
        for chunk in wanted.chunks:
            if chunk.name == "layers.2.weight":
                span = slice(chunk.offset, chunk.offset + chunk.numel)
                found[span] = found[span].reshape(7, 7).t().reshape(-1)
        return found

    return changed(modules().reading.Staged, "master", master)


def tied_twice() -> Change:
    """The tensor is installed under each of its names, and its values are added up."""

    def master(original: Any, self: Any, wanted: Any) -> Any:
        found = original(self, wanted).clone()
        for chunk in wanted.chunks:
            if chunk.name == "embedding.weight":
                found[chunk.offset : chunk.offset + chunk.numel] *= 2
        return found

    return changed(modules().reading.Staged, "master", master)


def padding_raises() -> Change:
    def install(original: Any, base: Any, master: Any, tensors: Any, scalars: Any, others: Any) -> None:
        if not master.chunks:
            raise IndexError("list index out of range")
        original(base, master, tensors, scalars, others)

    return changed(modules().restore, "install_state", install)

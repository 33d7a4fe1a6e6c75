"""The corpus: every mutation with a configuration in which it makes a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from proof.model import PLAIN, Parameter, Setup
from proof.tools import Lying, Mutation, Reading, changed, together

_SUBS = {"sub_group_size": 60, "stage3_param_persistence_threshold": 10}
_TINY = (*PLAIN[:2], Parameter("one", (1,)), Parameter("two", (2,)), Parameter("seven", (7,), group=1))
_ONE_GROUP = tuple(replace(p, group=None if p.group is None else 0) for p in PLAIN)

Z0, Z1, Z2, Z3 = Setup(0), Setup(1), Setup(2), Setup(3, zero=_SUBS)
BF2, BF3 = Setup(2, "bf16"), Setup(3, "bf16", zero=_SUBS)
FP16 = Setup(2, "fp16")
TINY3 = Setup(3, parameters=_TINY, zero={"sub_group_size": 30})
ROUND = Setup(1, zero={"round_robin_gradients": True}, parameters=_ONE_GROUP)


def _state() -> Any:
    """The modules that are changed, imported when they are: the table can be printed without torch's engine."""
    import elastic.training.state as package
    from elastic.core import assembly, plan, zero_layout
    from elastic.training.state import (
        client,
        engine_state,
        inventory,
        live,
        optimizer,
        partitioned,
        reading,
        replicated,
        stage3,
    )

    class Modules:
        pass

    found: Any = Modules()
    for module in (assembly, plan, zero_layout, client, engine_state, inventory, live, optimizer, partitioned):
        setattr(found, module.__name__.rsplit(".", 1)[1], module)
    for module in (reading, replicated, stage3):
        setattr(found, module.__name__.rsplit(".", 1)[1], module)
    found.package = package
    return found


# -- what is read -----------------------------------------------------------------------------------------------------


def _after_read(change: Callable[[Any, Any], None]) -> Callable[[Reading], Any]:
    return lambda reading: Lying(reading.store, then=change)


def _tail_uninitialised(manifest: Any, wanted: Any) -> None:
    shard = manifest.shards[wanted.rank]
    ends = {piece.offset + piece.numel for piece in shard.pieces if piece.buffer == wanted.key.split("/", 1)[1]}
    if wanted.rank == manifest.world_size - 1 and wanted.offset + wanted.numel in ends:
        wanted.target[-1:] = 777


def _through_bf16(manifest: Any, wanted: Any) -> None:
    if wanted.target.is_floating_point():
        wanted.target.copy_(wanted.target.bfloat16())


def _truncated(manifest: Any, wanted: Any) -> None:
    wanted.target[-1:] = 0


def _kinds_swapped(wanted: Any) -> Any:
    kind, buffer = wanted.key.split("/", 1)
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(kind, kind)
    return replace(wanted, key=f"{other}/{buffer}")


def _swapped(reading: Reading) -> Any:
    return Lying(reading.store, ask=_kinds_swapped)


class _OneStale:
    """The first range that it is asked for comes from the step before, where the same rank wrote the same layout."""

    name = "storage"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def manifest(self, checkpoint_id: str) -> Any:
        return self._reading.store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Any) -> int:
        count = self._reading.store.read(manifest, ranges)
        older = self._reading.older.manifest(self._reading.older_id)
        if self._reading.rank == 0:
            keys = {tensor.key: tensor for tensor in older.shards[0].tensors}
            wanted = next(r for r in ranges if r.rank == 0 and r.key in keys and r.target.numel() > 1)
            self._reading.older.read(older, [wanted])
        return int(count)


class _Fails:
    name = "storage"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def manifest(self, checkpoint_id: str) -> Any:
        return self._reading.store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Any) -> int:
        if self._reading.rank == 1:
            raise KeyError("exp_avg")
        return int(self._reading.store.read(manifest, ranges))


class _FileByRank:
    """Rank r reads file r, from whichever checkpoint has one."""

    name = "storage"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def manifest(self, checkpoint_id: str) -> Any:
        return self._reading.store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Any) -> int:
        here = self._reading
        if here.rank < manifest.world_size:
            return int(here.store.read(manifest, ranges))
        older = here.older.manifest(here.older_id)
        own = {tensor.key: tensor.numel for tensor in older.shards[here.rank].tensors}
        for wanted in ranges:
            if wanted.key in own:
                count = min(wanted.numel, own[wanted.key])
                here.older.read(
                    older, [replace(wanted, rank=here.rank, offset=0, numel=count, target=wanted.target[:count])]
                )
        return sum(wanted.target.numel() * wanted.target.element_size() for wanted in ranges)


# -- which is which ---------------------------------------------------------------------------------------------------


def _names(pairs: dict[str, str]) -> Any:
    """A plan that takes one parameter's elements for another's."""
    return changed(
        _state().plan.SourceIndex, "_intervals", lambda original, self, name: original(self, pairs.get(name, name))
    )


def _sorted_names() -> Any:
    # In the model's order 2 comes before 10, in that of sorted names after.
    return _names({"layers.2.weight": "layers.10.weight", "layers.10.weight": "layers.2.weight"})


def _local_ranks() -> Any:
    def of_four(original: Any, group: Any) -> tuple[int, int]:
        rank, size = original(group)
        return rank % 4, size

    return changed(_state().partitioned, "rank_in", of_four)


def _offsets_go_on() -> Any:
    def masters(original: Any, self: Any) -> Any:
        found, offset = [], 0
        for master in original(self):
            pieces = tuple(replace(piece, offset=piece.offset + offset) for piece in master.pieces)
            found.append(replace(master, pieces=pieces))
            offset += sum(piece.numel for piece in master.pieces)
        return found

    return changed(_state().stage3.Stage3, "masters", masters)


def _absolute(original: Any, self: Any, parameter: Any) -> tuple[int, int]:
    from elastic.training.state.live import full_numel

    part, numel = int(parameter.partition_numel()), full_numel(parameter)
    return self.rank * part, min(part, abs(numel - self.rank * part))


def _floor(original: Any, self: Any, parameter: Any) -> tuple[int, int]:
    from elastic.training.state.live import full_numel

    numel = full_numel(parameter)
    part = numel // self.world_size
    return self.rank * part, min(part, numel - self.rank * part)


def _tail_alignment(original: Any, self: Any, name: str, numel: int, begin: int, part: int, buffer: str) -> Any:
    return original(self, name, numel, begin, part - 1, buffer)


def _as_registered(original: Any, self: Any) -> Any:
    return [_end_to_end([(self._names[id(p)], p.numel()) for p in group]) for group in self._listed()]


def _end_to_end(tensors: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    placed, offset = [], 0
    for name, numel in tensors:
        placed.append((name, numel, offset))
        offset += numel
    return placed


def _registration_order() -> Any:
    return changed(_state().partitioned.PartitionedStage, "_placed", _as_registered)


def _registration_order_everywhere() -> Any:
    """Both our look at the engine and the layout that it is compared with are wrong in the same way."""
    modules = _state()
    unordered = changed(
        modules.partitioned, "zero12_layout", lambda original, *a, **k: original(*a, **{**k, "round_robin": False})
    )
    return together(_registration_order(), unordered)


# -- what is written to storage ---------------------------------------------------------------------------------------


def _dealt_shards() -> Any:
    """Every rank's own slice is taken for one more replica, and one rank writes each."""

    def written(original: Any, self: Any, rank: int, world_size: int) -> Any:
        masters = tuple(replace(master, replicated=bool(master.pieces)) for master in self.masters)
        return original(replace(self, masters=masters), rank, world_size)

    return changed(_state().inventory.Inventory, "written", written)


def _rank_0_only() -> Any:
    def assemble(original: Any, shards: Any, **more: Any) -> Any:
        return original([shard for shard in shards if shard.rank == 0], **more)

    return changed(_state().assembly, "assemble", assemble)


def _written_without(name: str, from_rank: int) -> Any:
    def written(original: Any, self: Any, rank: int, world_size: int) -> Any:
        layout = original(self, rank, world_size)
        if rank < from_rank:
            return layout
        return replace(layout, pieces=tuple(piece for piece in layout.pieces if piece.name != name))

    return changed(_state().inventory.Inventory, "written", written)


def _untie(world: Any) -> None:
    """The target's model was built without its tie."""
    for engine in world.engines:
        module = engine.module
        module.head.weight = torch.nn.Parameter(module.embedding.weight.detach().clone(), requires_grad=False)


# -- what is installed ------------------------------------------------------------------------------------------------


def _kept_old(select: Callable[[Any], dict[str, torch.Tensor]], method: str = "_install") -> Any:
    """What `select(state)` names has its old value again after the install."""

    def install(original: Any, self: Any, *args: Any) -> None:
        before = {key: tensor.detach().clone() for key, tensor in select(self).items()}
        original(self, *args)
        for key, tensor in select(self).items():
            tensor.detach().copy_(before[key])

    return changed(_state().engine_state.LiveState, method, install)


def _extras(kind: str) -> Callable[[Any], dict[str, torch.Tensor]]:
    return lambda state: {e.piece.name: e.tensor for e in state._inventory().extras if e.kind == kind}


def _buffers_off_rank_0(state: Any) -> dict[str, torch.Tensor]:
    return {} if state._stage.rank == 0 else _extras("buffer")(state)


def _masters_stale() -> Any:
    """The low-precision weights are the checkpoint's, the masters those of the fresh model."""
    return _kept_old(lambda state: {m.buffer: m.tensor for m in state._stage.masters()}, "_install_together")


def _weights_stale(stage: str, owner: str) -> Any:
    return changed(getattr(getattr(_state(), stage), owner), "finish_install", lambda original, self: None)


def _gather_skipped() -> Any:
    import deepspeed.runtime.zero.stage_1_and_2 as zero

    return changed(zero, "all_gather_dp_groups", lambda original, *args, **kwargs: None)


def _persistent_stale() -> Any:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Wrapper

    def epilogue(original: Any, self: Any) -> None:
        original(self)
        for parameter in self.persistent_parameters:
            parameter.data.add_(1.0)

    return changed(Wrapper, "checkpoint_event_epilogue", epilogue)


def _replica_kept() -> Any:
    """Each rank keeps what it had of a parameter whose master another rank holds."""
    modules = _state()

    def finish(original: Any, self: Any) -> None:
        parameter = dict(self._module.named_parameters())["layers.10.weight"]
        before = parameter.detach().clone()
        original(self)
        if self.rank == 1:
            parameter.data.copy_(before)

    return changed(modules.partitioned.PartitionedStage, "finish_install", finish)


def _state_only_where_there_is_some() -> Any:
    def install(original: Any, stage: Any, master: Any, tensors: Any, scalars: Any) -> None:
        live = stage.base.state.get(master.tensor) or {}
        original(stage, master, {key: value for key, value in tensors.items() if key in live}, scalars)

    return changed(_state().engine_state, "install_state", install)


def _without_moments(world: Any) -> None:
    from proof.scene import stage_of

    def clear(engine: Any, _: int) -> None:
        stage_of(engine).base.state.clear()

    world.run(clear)


def _twice() -> Any:
    """Values are added to what is there, as a second application would."""

    def install(original: Any, stage: Any, master: Any, tensors: Any, scalars: Any) -> None:
        original(stage, master, {key: value + value for key, value in tensors.items()}, scalars)

    return changed(_state().engine_state, "install_state", install)


def _turned() -> Any:
    """One square matrix is installed with its axes swapped."""

    def master(original: Any, self: Any, wanted: Any) -> Any:
        found = original(self, wanted).clone()
        for piece in wanted.pieces:
            if piece.name == "layers.2.weight":
                span = slice(piece.offset, piece.offset + piece.numel)
                found[span] = found[span].reshape(7, 7).t().reshape(-1)
        return found

    return changed(_state().reading.Staged, "master", master)


def _tied_twice() -> Any:
    """The tensor is installed under each of its names, and its values are added up."""

    def master(original: Any, self: Any, wanted: Any) -> Any:
        found = original(self, wanted).clone()
        for piece in wanted.pieces:
            if piece.name == "embedding.weight":
                found[piece.offset : piece.offset + piece.numel] *= 2
        return found

    return changed(_state().reading.Staged, "master", master)


def _padding_raises() -> Any:
    def install(original: Any, stage: Any, master: Any, tensors: Any, scalars: Any) -> None:
        if not master.pieces:
            raise IndexError("list index out of range")
        original(stage, master, tensors, scalars)

    return changed(_state().engine_state, "install_state", install)


# -- what is no tensor ------------------------------------------------------------------------------------------------


def _first_group_for_all() -> Any:
    def install(original: Any, optimizers: Any, stored: Any) -> None:
        original(optimizers, [stored[0]] * len(stored))

    return changed(_state().client, "install_groups", install)


def _other_dicts() -> Any:
    """The engine's optimizer is a new one with the loaded groups; the scheduler goes on writing into the old ones."""
    import copy

    def install(original: Any, engine: Any, stage: Any, client: Any) -> None:
        original(engine, stage, client)
        stage.base = engine.optimizer.optimizer = copy.copy(stage.base)
        stage.base.param_groups = [dict(group) for group in stage.base.param_groups]

    return changed(_state().engine_state, "install_client", install)


def _steps_dropped() -> Any:
    def install(original: Any, stage: Any, master: Any, tensors: Any, scalars: Any) -> None:
        original(stage, master, tensors, None if master.group == 1 else scalars)

    return changed(_state().engine_state, "install_state", install)


def _step_shared() -> Any:
    def install(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        states = list(self._stage.base.state.values())
        for state in states:
            state["step"] = next(s["step"] for s in states if s["step"] == state["step"])

    return changed(_state().engine_state.LiveState, "_install", install)


def _scaler_reset() -> Any:
    return changed(_state().client, "_install_scaler", lambda original, engine, stored: None)


def _scheduler_replayed() -> Any:
    def install(original: Any, engine: Any, stage: Any, client: Any) -> None:
        original(engine, stage, client)
        for _ in range(12):
            engine.lr_scheduler.step()

    return changed(_state().engine_state, "install_client", install)


def _rate_on_one_rank() -> Any:
    """The scheduler's own state is right; one rank's group has another rate."""

    def install(original: Any, engine: Any, stage: Any, client: Any) -> None:
        original(engine, stage, client)
        if stage.rank == 1:
            stage.base.param_groups[1]["lr"] *= 2

    return changed(_state().engine_state, "install_client", install)


def _counters_fresh() -> Any:
    return changed(
        _state().engine_state,
        "install_client",
        lambda original, engine, stage, client: original(engine, stage, {**client, "engine": {**_ZERO}}),
    )


_ZERO = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 0)


def corpus() -> list[Mutation]:
    """Made when asked for, since most changes need the modules that they change."""
    swap_bias = {"layers.2.bias": "layers.10.bias", "layers.10.bias": "layers.2.bias"}
    return [
        Mutation("M1", "tail of a padded tensor uninitialised", Z3, (2, 3), reading=_after_read(_tail_uninitialised)),
        Mutation("M2", "scheduler holds other group dicts", Z1, (2, 1), restoring=_other_dicts()),
        Mutation("M4", "shards taken for replicas", Z2, (3, 2), saving=_dealt_shards()),
        Mutation("M5a", "weights restored, masters stale", BF2, (3, 2), restoring=_masters_stale()),
        Mutation("M5b", "masters restored, weights stale", BF3, (2, 3), restoring=_weights_stale("stage3", "Stage3")),
        Mutation("M8a", "one rank keeps its own weights", BF2, (2, 3), restoring=_replica_kept()),
        Mutation("M8b", "buffers restored on rank 0 only", Z1, (2, 3), restoring=_kept_old(_buffers_off_rank_0)),
        Mutation("M10", "frozen parameters not carried", Z2, (2, 1), restoring=_kept_old(_extras("param"))),
        Mutation("M10s", "frozen slices not carried (stage 3)", Z3, (4, 6), restoring=_kept_old(_extras("param"))),
        Mutation("M11", "reading fails on one rank only", Z2, (2, 3), reading=_Fails),
        Mutation("M12", "matched by sort order (layers.2, layers.10)", Z1, (3, 2), restoring=_sorted_names()),
        Mutation("M13", "only rank 0 writes", Z3, (2, 1), saving=_rank_0_only()),
        Mutation("M14", "offsets not reset per sub-group", Z3, (6, 4), restoring=_offsets_go_on()),
        Mutation("M15", "rank r reads file r, a stale one exists", Z2, (4, 6), reading=_FileByRank),
        Mutation(
            "M16", "tied tensor missing from later files", Z3, (3, 2), saving=_written_without("embedding.weight", 1)
        ),
        Mutation("M17", "local rank used for rank", Z1, (4, 6), restoring=_local_ranks()),
        Mutation("M18", "group 0's hyper-parameters for all", Z2, (6, 4), restoring=_first_group_for_all()),
        Mutation(
            "M19",
            "abs instead of max(0, ...)",
            TINY3,
            (2, 3),
            restoring=changed(_state().stage3.Stage3, "_slice", _absolute),
        ),
        Mutation(
            "M21", "floor instead of ceil", Z3, (7, 5), restoring=changed(_state().stage3.Stage3, "_slice", _floor)
        ),
        Mutation(
            "M22",
            "wrong tail alignment",
            Z1,
            (12, 5),
            restoring=changed(_state().partitioned.PartitionedStage, "_piece", _tail_alignment),
        ),
        Mutation("M23a", "tied alias counted twice", Z2, (2, 3), restoring=_tied_twice()),
        Mutation("M23b", "tie lost in the target", Z2, (2, 3), before_restore=_untie),
        Mutation("M25", "step dropped for a group", Z1, (2, 3), restoring=_steps_dropped()),
        Mutation("M26", "one step tensor for several", Z3, (3, 2), restoring=_step_shared()),
        Mutation("M27", "gather of low-precision weights skipped", BF2, (3, 2), restoring=_gather_skipped()),
        Mutation(
            "M27s",
            "parameters that stay whole keep old values (stage 3)",
            BF3,
            (3, 2),
            restoring=_persistent_stale(),
        ),
        Mutation(
            "M28",
            "fresh optimizer without moments",
            Z2,
            (1, 2),
            restoring=_state_only_where_there_is_some(),
            before_restore=_without_moments,
        ),
        Mutation("M32", "buffers not carried", Z3, (1, 2), restoring=_kept_old(_extras("buffer"))),
        Mutation("M33a", "registration order, round robin", ROUND, (3, 2), restoring=_registration_order()),
        Mutation(
            "M33b",
            "registration order on both sides of every check",
            ROUND,
            (3, 2),
            saving=_registration_order_everywhere(),
            restoring=_registration_order_everywhere(),
        ),
        Mutation("M34", "a rank of padding only raises", Z2, (7, 5), restoring=_padding_raises()),
        Mutation("G1", "exp_avg and exp_avg_sq swapped", Z3, (4, 6), reading=_swapped),
        Mutation("G2", "two equal shapes swapped", BF2, (6, 4), restoring=_names(swap_bias)),
        Mutation("G3", "a matrix installed turned", Z0, (2, 3), restoring=_turned()),
        Mutation("G4", "every range one element short", Z3, (12, 5), reading=_after_read(_truncated)),
        Mutation("G5", "applied twice", Z2, (7, 5), restoring=_twice()),
        Mutation("G6", "cast through bf16", Z1, (2, 1), reading=_after_read(_through_bf16)),
        Mutation("G7", "one piece from an older step", Z2, (2, 2), reading=_OneStale),
        Mutation("G8", "scheduler advanced by replayed steps", Z1, (2, 3), restoring=_scheduler_replayed()),
        Mutation("G9", "scaler reset", FP16, (2, 3), restoring=_scaler_reset()),
        Mutation("G10", "another rate on one rank", Z2, (2, 3), restoring=_rate_on_one_rank()),
        Mutation("G11", "step counters of the engine not restored", Z2, (3, 2), restoring=_counters_fresh()),
    ]

"""The sharded state of one live engine: copied to host memory, and restored at another world size.

Everything is keyed by the tensors' names, so a checkpoint of one ZeRO stage and world size can be installed into any
other.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from elastic.checkpoint.shards import DTYPE_NAMES, check_dtype
from elastic.checkpoint.shares import KeptBesides, Shares
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.source import CheckpointSource
from elastic.comm.lanes import Lanes
from elastic.core.checkpoint.lanes import CUTS
from elastic.core.checkpoint.manifest import Json, ShardRecord, StoredTensor
from elastic.core.checkpoint.shares import is_share
from elastic.core.data.readers import READERS
from elastic.core.errors import UsageError, Where
from elastic.core.mesh import Mesh
from elastic.core.names import shard_file
from elastic.core.settings import WeightsSettings
from elastic.core.sharding.cuts import to_json
from elastic.core.sharding.layout import RankLayout, without
from elastic.engines.base import Engine
from elastic.engines.inventory import Inventory, gaps
from elastic.engines.live_state import BUFFER, KEPT, PARAM
from elastic.engines.model.cuts import Cuts, agreed
from elastic.engines.model.description import describe
from elastic.engines.model.plain_names import named_parameters
from elastic.engines.optimizer.other_shapes import is_stored
from elastic.engines.optimizer.state import install_groups, others_of
from elastic.engines.optimizer.trial import is_elementwise, try_optimizer
from elastic.training.session import RestoreReport
from elastic.training.state import late_buffers
from elastic.training.state.capture_check import CaptureCheck, views
from elastic.training.state.extra_state import read_extra
from elastic.training.state.host import HostCopy, HostPool, Transfer, packed, placed, transfer
from elastic.training.state.replicas import Replicas, marks_of_tied, require_tied, tied_parts
from elastic.training.state.restore import Restore
from elastic.training.state.verification import Verification
from elastic.training.state.verify_scalars import LiveGroups
from elastic.training.state.weights.initial import install_weights
from elastic.training.state.weights.whole import gather_whole

_log = logging.getLogger(__name__)


def open_state(engine: Engine, mesh: Mesh | None = None) -> EngineState:
    """The state of `engine` before or after any number of steps. Collective: raises on all ranks or on none. `mesh`
    says which ranks share layers; None: no others do.

    Raises UsageError for what cannot be carried to another world size (named, with the reason) and for an engine whose
    partitioning is not the one that the pure layouts follow.
    """
    lanes = Lanes.of(engine.data_group, engine.device, mesh)
    found: EngineState | None = None
    error: Exception | None = None
    try:
        found = EngineState(engine, lanes)
    except Exception as caught:  # noqa: BLE001 - the other ranks proceed to collectives: they must learn of it
        error = caught
    lanes.every.raise_together(error, "looking at the engine")
    assert found is not None
    found.agree_on_cuts()
    if lanes.stages > 1:
        groups = [count for (count,) in lanes.every.by_rank([len(found.sharded.base.param_groups)])]
        if len(set(groups)) > 1:
            raise UsageError(
                f"the stages of the pipeline have {', '.join(map(str, groups))} parameter groups by rank: make the "
                "same groups in every stage, in one order"
            )
    return found


class EngineState:
    """Called from the training thread only, between optimizer steps.

    1. `restore` or `begin_from` at most once, before the first step, by all ranks together
    2. `snapshot` after any step, by any rank by itself
    3. `close` when the engine is closed: nobody reads its tensors any more

    `layout` is what this rank alone holds; empty in stage 0. `agreement` compares numbers over all ranks. `kept` gives
    tensors by name that snapshots carry besides the engine's; those of a checkpoint are in `restored`, 1-D on the host.
    """

    def __init__(self, engine: Engine, lanes: Lanes) -> None:
        self.lanes, self.agreement = lanes, lanes.every
        self.kept: Callable[[], Mapping[str, torch.Tensor]] = dict
        self.restored: Mapping[str, torch.Tensor] = {}
        self.shares = Shares()
        self._groups: Json = None
        self._engine = engine
        self.sharded = engine.state()
        copies = self.sharded.copies
        shard = None if self.sharded.writers is None else self.sharded.part[1]
        self.copies = lanes if copies is None else Lanes.of_copies(copies, lanes, engine.device, shard)
        cell = self.sharded.cell
        self._cells = None if cell is None else Lanes.of_cells(cell, lanes, engine.device)
        others = self.sharded.keeps_others
        if not self.sharded.optimizer_tried:
            live = {master.group: master.tensor for master in self.sharded.masters()}
            others = try_optimizer(self.sharded.base, self.sharded.zero_stage > 0, live)
        # Also what a trial has not shown.
        self._scans = not is_elementwise(self.sharded.base)
        if others and lanes.stages > 1:
            raise self._keeps_others("stages of a pipeline have different parts of the model", others)
        self._others = others
        self._pool = HostPool(engine.device)
        self._built = late_buffers.shapes(self.sharded.specs())
        self._model = describe(self.sharded.module)
        # None: not known.
        self._cuts: Cuts | None = None if lanes.slices > 1 else {}
        self._verification: Verification | None = None
        self._step_hook: RemovableHandle | None = None
        self._captures = 0
        self._ahead: int | None = None
        inventory = Inventory.of(self.sharded)
        for key, tensor in inventory.tensors().items():
            check_dtype(key, tensor.dtype)
        # A scheduler or optimizer that cannot be carried is refused now, not at the first snapshot.
        read_extra(engine, self.sharded, inventory, {})
        self.zero_stage = self.sharded.zero_stage
        self.layout: RankLayout = inventory.sharded()

    def agree_on_cuts(self) -> None:
        """Once, before anything is saved: snapshots say which part of its whole tensor each slice is. Collective."""
        cuts, lanes = self.sharded.cuts, self.lanes
        if lanes.slices > 1 and cuts is not None:
            names = [name for name, _ in named_parameters(self.sharded.module)]
            self._cuts = agreed(cuts, names, lanes.every, lanes.stages, lanes.stage)

    def keep(self, shares: Shares) -> None:
        """Before `restore`: what ranks keep besides, from here on."""
        self.shares = shares
        if shares.apart is not None and self._others:
            raise self._keeps_others("islands train by themselves", self._others)
        if shares.apart is not None:
            self.copies = Lanes.of_islands(shares.apart, self.lanes.every, self._engine.device)

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Every carried tensor's name -> full shape: parameters in the model's order, buffers, what is kept besides."""
        kept = {name: tuple(tensor.shape) for name, tensor in self.besides().items() if tensor.numel()}
        return {spec.name: spec.shape for spec in self.sharded.specs()} | kept | self.shares.shapes_kept()

    def snapshot(self, *, run_id: str, generation: int, step: int, caller: Mapping[str, Json]) -> ShardSnapshot:
        """A copy of this rank's state in host memory; `caller` (JSON) comes back from `restore`. Not collective.

        Of replicated tensors each is carried by one rank; module buffers by rank 0, whose values are the run's. The
        snapshot owns its memory, which is reused only after the last tensor of it is gone.
        """
        snapshot, copies = self.capture(run_id=run_id, generation=generation, step=step, caller=caller)
        copies.run()
        return snapshot

    def capture(
        self, *, run_id: str, generation: int, step: int, caller: Mapping[str, Json]
    ) -> tuple[ShardSnapshot, Transfer]:
        """The same, with tensors still to be filled: the Transfer must run before the next optimizer step."""
        inventory, layout, wanted = self._wanted()
        tensors, copies = self._pool.prepare(wanted)
        extra = self._extra(inventory, caller)
        snapshot = ShardSnapshot(
            run_id=run_id,
            generation=generation,
            rank=self.agreement.rank,
            world_size=self.agreement.world_size,
            step=step,
            zero_stage=self.zero_stage,
            layout=layout,
            tensors=tensors,
            parameters=self.parameters if self.lanes.leads else None,
            extra_state=extra,
            tp=self.lanes.slices,
        )
        return snapshot, replace(copies, check=self._check(generation, step, layout, tensors, extra))

    def record(self, generation: int, shard: tuple[int, int] | None = None) -> tuple[ShardRecord, int]:
        """The record of this rank's part as it would lie in memory of this many bytes, without a step or digests.

        It stays the same from step to step, unless the optimizer begins to keep more. `shard`: the part is the whole of
        this shard of so many, as that of a world of so many ranks, and not what this rank writes of it beside others.
        """
        _, layout, wanted = self._wanted(shard is not None)
        begins, size = packed(wanted)
        rank, world_size = shard or (self.agreement.rank, self.agreement.world_size)
        tensors = tuple(
            StoredTensor(item.key, DTYPE_NAMES[item.source.dtype], item.source.numel(), begin)
            for item, begin in zip(wanted, begins, strict=True)
        )
        record = ShardRecord(
            rank=rank,
            world_size=world_size,
            generation=generation,
            step=0,
            file=shard_file(rank, world_size),
            bytes=size,
            xxh3="",
            tensors=tensors,
            chunks=layout.chunks,
            digests={},
            zero_stage=self.zero_stage,
            parameters=self.parameters if self._leads(shard is not None) else None,
            tp=self.lanes.slices,
        )
        return record, size

    def capture_into(
        self, memory: torch.Tensor, record: ShardRecord, step: int, caller: Mapping[str, Json]
    ) -> tuple[Mapping[str, Json] | None, Transfer] | None:
        """Fill `memory` (1-D uint8) as `record` says: the extra state (rank 0's, and that of each stage's first rank)
        and the Transfer; None if it no longer fits."""
        shard = record.world_size != self.agreement.world_size
        inventory, _, wanted = self._wanted(shard)
        shapes = [(item.key, DTYPE_NAMES[item.source.dtype], item.source.numel()) for item in wanted]
        if shapes != [(tensor.key, tensor.dtype, tensor.numel) for tensor in record.tensors]:
            return None
        targets = placed(wanted, [tensor.begin for tensor in record.tensors], memory)
        extra, copies = self._extra(inventory, caller, shard), transfer(wanted, targets)
        # The places that a reader of the shard will look at, whatever the copies are made to.
        stored = views(record.tensors, memory)
        return extra, replace(copies, check=self._check(record.generation, step, record.layout, stored, extra, shard))

    def _check(
        self,
        generation: int,
        step: int,
        layout: RankLayout,
        targets: Mapping[str, torch.Tensor],
        extra: Mapping[str, Json] | None,
        shard: bool = False,
    ) -> CaptureCheck:
        turn, self._captures = self._captures, self._captures + 1
        where = Where(rank=self.agreement.rank, step=step, generation=generation)
        at_once = self.zero_stage == 0
        first = self._leads(True) if shard else self.sharded.rank == 0
        kept, elsewhere = self.besides(), self.sharded.elsewhere
        check = CaptureCheck.of(self._engine, where, layout, targets, extra, turn, at_once, kept, first, elsewhere)
        check.wrong += [] if extra is None else self._miscounted(extra, step)
        return check

    def _miscounted(self, extra: Mapping[str, Json], step: int) -> list[str]:
        """The engine counts what the run counts, from wherever it began: as restored, or as first found."""
        ahead = extra["engine"].get("global_steps", step) - step
        if self._ahead is None:
            self._ahead = ahead
        return (
            [] if ahead == self._ahead else [f"the engine's count of {step + ahead} steps, not {step + self._ahead},"]
        )

    def modules(self) -> Json:
        """What modules keep besides tensors: of the run are those of rank 0."""
        return self._engine.extra_state()["modules"]

    def _leads(self, shard: bool) -> bool:
        """Does this rank write what is of no single shard: as the first of its lane, or of the ranks with a `shard`?"""
        return self._first(shard) == 0

    def _first(self, shard: bool) -> int:
        """Of this rank's lane: which one is this, or where it writes the whole of its `shard` the first with that."""
        return self.sharded.writers[0] if shard and self.sharded.writers else self.lanes.own.rank

    def _wanted(self, shard: bool = False) -> tuple[Inventory, RankLayout, list[HostCopy]]:
        """What this rank's part of a snapshot is copied from, now; with `shard` the whole of what copies of it have."""
        self.verified()
        self.sharded.require_readable()
        inventory = Inventory.of(self.sharded)
        inventory = inventory.with_kept(self.besides(inventory))
        apart = self.shares.apart
        writers = self.sharded.writers if apart is None else apart.writers
        rank = self._first(True) if shard else self.sharded.rank
        written = inventory.written(rank, self.sharded.world_size, (rank,) if shard else writers)
        layout = without(written, self.sharded.elsewhere)
        padding = gaps(layout)
        wanted = []
        for key, tensor in inventory.tensors().items():
            kind, buffer = key.split("/", 1)
            if buffer in layout.buffers:
                # A forward pass changes module buffers, and the user's own code may change frozen parameters (an
                # average of the weights, say), in stage 0 also the masters.
                at_once = kind in (BUFFER, PARAM, KEPT) or self.zero_stage == 0
                wanted.append(HostCopy(key, tensor, padding[buffer], at_once))
        return inventory, layout, wanted

    def besides(self, inventory: Inventory | None = None) -> Mapping[str, torch.Tensor]:
        """What is not the model's, and what the optimizer keeps in other shapes than its parameters'. It is the same in
        all stages of a pipeline: the first one writes it. `inventory`: the state's, where it is known."""
        others = self._other_shapes(inventory)
        return {} if self.lanes.stages > 1 and self.lanes.stage > 0 else {**self.kept(), **others}

    def _other_shapes(self, inventory: Inventory | None = None) -> Mapping[str, torch.Tensor]:
        """Raises UsageError where ranks may have different ones, which a trial has not shown."""
        if not self._scans:
            return {}
        found = others_of(*((inventory or Inventory.of(self.sharded)).optimizer))
        if found and (self.lanes.stages > 1 or self.shares.apart is not None):
            raise self._keeps_others("stages of a pipeline, or islands, would have different ones", [*found][:1])
        return found

    def _keeps_others(self, why: str, others: Iterable[str]) -> UsageError:
        return UsageError(
            f"optimizer {type(self.sharded.base).__name__} keeps {', '.join(sorted(others))} in another shape than its "
            f"parameters', which is carried only where all workers have the same, and {why}: use an optimizer whose "
            "state has one value per weight"
        )

    def _extra(
        self, inventory: Inventory, caller: Mapping[str, Json], shard: bool = False
    ) -> Mapping[str, Json] | None:
        if not self._leads(shard) or self.lanes.slice > 0:
            return None
        specs = self.sharded.specs()
        grown = late_buffers.grown(self._built, late_buffers.shapes(specs))
        extra = read_extra(self._engine, self.sharded, inventory, caller, specs)
        cuts = {CUTS: to_json(self._cuts)} if self.lanes.slices > 1 and self._cuts is not None else {}
        return {**extra, "model": self._model, "grown_buffers": grown, **cuts}

    def restore(
        self, source: CheckpointSource, checkpoint_id: str, later: bool = False
    ) -> tuple[RestoreReport, Mapping[str, Json]]:
        """Read this rank's part of a checkpoint of any world size and stage, install it, verify it. Collective.

        Returns the times and the `caller` of the snapshot, with the states of a stream's readers under "readers".
        Raises on all ranks or on none: ModelMismatch (another model: the first difference is named), StorageError,
        IntegrityError. Until all ranks have read all they need, nothing is installed; after a failed verification the
        engine must be thrown away.

        `later`: masters and optimizer state are read again on a thread, concurrently with the first forward and
        backward pass. The verdict is given before the first optimizer step changes anything; that step raises what
        this would have raised. Everything else is read before this returns, and judged with it.
        """
        began = monotonic()
        found = Restore(self._engine, self.sharded, self.lanes, self.shares, self._cuts, self._built)
        found.read(source, checkpoint_id)
        read = monotonic()
        groups, staged = LiveGroups.of(self.sharded), found.staged
        found.install()
        # The optimizer has its own by now.
        self.restored = {name: tensor for name, tensor in found.kept.items() if not is_stored(name)}
        installed = monotonic()
        self._groups = found.groups
        self._ahead = staged.manifest.extra_state["engine"].get("global_steps", 0) - staged.manifest.step
        answers = frozenset(name for name in self.restored if is_share(name) and self.shares.answers(name))
        kept = KeptBesides({**self.restored, **self._other_shapes()}, answers)
        self._verification = Verification(self._engine, self.sharded, staged.manifest, groups, kept, found.expected)
        if later:
            self._before_first_step()
        else:
            self.verified()
        report = RestoreReport(
            checkpoint=checkpoint_id,
            source=source.name,
            step=staged.manifest.step,
            bytes_read=staged.bytes_from.total,
            bytes_from=staged.bytes_from,
            bytes_needed=staged.bytes_needed,
            read_s=read - began,
            install_s=installed - read,
            verify_s=monotonic() - installed,
        )
        _log.info("restored %s at world size %d: %s", checkpoint_id, self.agreement.world_size, report)
        if found.recut is not None and self.agreement.rank == 0:
            _log.warning("%s", found.recut.said(self.lanes.slices))
        extra_state = staged.manifest.extra_state
        readers = {READERS: extra_state[READERS]} if READERS in extra_state else {}
        return report, {**extra_state["caller"], **readers}

    def begin_from(self, weights: WeightsSettings) -> None:
        """Parameters and buffers from elsewhere; see `install_weights`. Collective: raises on all ranks or on none."""
        install_weights(self.sharded, weights, self.lanes, self._cuts)

    def whole(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """The model's tensors on rank 0; see `gather_whole`. Collective: raises on all ranks or on none."""
        inventory, layout, _ = self._wanted()
        return gather_whole(self.sharded, inventory, layout, self._cuts, self.lanes, self._engine.device, names)

    def verified(self) -> None:
        """The verdict on a restore that is verified `later`. Collective until it was given, then nothing.

        Called by the first optimizer step and the first snapshot; after a failure it raises at every call.
        """
        if self._verification is not None:
            self._verification.verdict(self.lanes, self.copies.own)
            self._verification = None

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer that updates the masters."""
        return self.sharded.base

    def param_groups(self) -> list[dict[str, Any]]:
        """The dicts that hold the optimizer's hyper-parameters, of whoever holds them."""
        holders = [self.sharded.base.param_groups, *self.sharded.group_holders().values()]
        return [group for held in holders for group in held]

    def reinstall_groups(self) -> None:
        """After a restore: the optimizer's hyper-parameters as they were restored, whatever was done to them since.

        A learning-rate scheduler that is made after the restore sets those of step 0.
        """
        if self._groups is not None:
            install_groups([self.sharded.base.param_groups, *self.sharded.group_holders().values()], self._groups)

    def verify_replicas(self) -> None:
        """Before a snapshot: are the ranks' copies of whatever is not partitioned equal? Collective.

        Raises IntegrityError on all ranks: a snapshot would carry one copy and a restore would give it to all.
        """
        replicas = self.replicas()
        if self.agreement.world_size > 1:
            self.require_equal(self.agreement.least(self.marks(replicas)), replicas)

    def marks(self, replicas: Replicas | None) -> list[int]:
        """Numbers whose least over all ranks `require_equal` understands; None: they will not be looked at."""
        everywhere, own, beside, across = (0, 0, 0, 0) if replicas is None else replicas.fingerprints()
        found = [*self.copies.low_and_high(everywhere, own), *self.lanes.low_and_high(0, beside)]
        if self._cells is not None:
            found += self._cells.low_and_high(0, across)
        if replicas is None:
            return found + [0 for _ in tied_parts(self.sharded) for _ in range(2)]
        return found + marks_of_tied(self.sharded)

    def require_equal(self, least: Sequence[int], replicas: Replicas | None) -> None:
        """Raises IntegrityError, on all ranks, where copies differ."""
        if replicas is None:
            return
        marks = iter(least)
        for lanes, hashes in (
            (self.copies, replicas.own),
            (self.lanes, replicas.beside),
            *([] if self._cells is None else [(self._cells, replicas.across)]),
        ):
            lanes.require_equal([*islice(marks, 2 + 2 * lanes.count)], partial(replicas.difference, hashes=hashes))
        require_tied(self.sharded, [*marks])

    def replicas(self, turn: int | None = None) -> Replicas | None:
        """This rank's copies of whatever is not partitioned, to be compared; None where there is one rank only."""
        if self.sharded.world_size == 1 and self.lanes.count == 1:
            return None
        inventory = Inventory.of(self.sharded)
        inventory = inventory.with_kept(self._other_shapes(inventory))
        return Replicas(self._engine, self.sharded, inventory, turn, self.lanes, self.shares.apart)

    def before_step(self) -> None:
        """Before an update: `verified`. From then on the optimizer has no hook of the platform's."""
        self.verified()
        self._end_hook()

    def close(self) -> None:
        self._end_hook()
        if self._verification is not None:
            self._verification.stop()
        self._pool.close()

    def _end_hook(self) -> None:
        hook, self._step_hook = self._step_hook, None
        if hook is not None:
            hook.remove()

    def _before_first_step(self) -> None:
        """Also where the script steps the base optimizer by itself: every update of the masters goes through it."""
        self._end_hook()
        # Weak reference: holding the optimizer must not keep the engine alive.
        state = weakref.ref(self)

        def verify_first(*_: Any) -> None:
            if (live := state()) is not None:
                live.verified()

        self._step_hook = self.sharded.base.register_step_pre_hook(verify_first)

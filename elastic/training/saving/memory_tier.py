"""Snapshots of one rank in the memory of its node: which steps have one, and when they are given up.

All ranks decide together, in one small reduction at the steps where a snapshot is due, so that there is always one that
every rank has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.checkpoint.snapshots import STEPS, is_snapshot, parse_snapshot_id, steps_to_json
from elastic.core.errors import CollectiveFailed, Fenced, IntegrityError, StorageError, UsageError
from elastic.core.generation_spec import MemoryPlan
from elastic.core.policy.snapshot_interval import Cadence, Costs
from elastic.training.saving.twins import Twins
from elastic.training.scope import GenerationScope
from elastic.training.session import Phase, SnapshotMemory
from elastic.training.state.engine_state import EngineState
from elastic.training.state.host import Transfer, over
from elastic.training.state.pins import done

logger = logging.getLogger(__name__)

# How long a snapshot that must be taken waits for the one before it to be complete on all nodes; and the last one of a
# generation that ends as planned, without which steps would be repeated: many gigabytes take their time.
_WAIT_S = 10.0
_LAST_WAIT_S = 30.0
# A committed snapshot that is not complete after so long, and the time that its bytes take at the slowest rate, will
# never be: a node that keeps its replica lives but does not take it. Longer than a sender's own tries.
_COMPLETE_LIMIT_S = 60.0
_SLOWEST_BYTES_S = 20e6
_CHECK_S = 0.1
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class MemoryCopy:
    """A snapshot of `step`, to be committed when it is copied; `extra` is what of this rank's state is no tensor."""

    transfer: Transfer
    step: int
    extra: Mapping[str, Json] | None
    tier: MemoryTier

    def commit(self) -> None:
        self.tier.commit(self.step, self.extra)


class MemoryTier:
    """Training thread only, except for `commit`. Used once an optimizer step was applied: before that (fp16 finds its
    scale first) the optimizer keeps nothing, and what it will keep has no place in the node's memory."""

    def __init__(
        self,
        scope: GenerationScope,
        state: EngineState,
        run_state: Callable[[], Mapping[str, Json]],
        plan: MemoryPlan,
        memory: SnapshotMemory,
        own_state: Callable[[], Mapping[str, Json]] = dict,
    ) -> None:
        self._scope = scope
        self._state = state
        self._run_state = run_state
        self._own_state = own_state
        self._plan = plan
        self._memory = memory
        self._cadence = Cadence(plan.every_steps, plan.cost_limit)
        self._costs = Costs()
        self._record: ShardRecord | None = None
        self._taken: int | None = None
        # When the snapshot of `_taken` was committed, on the monotonic clock.
        self._committed_at: float | None = None
        self._complete = -1
        self._captures = 0
        self._due = False
        self._steps = 0
        self._reported_interval = 0
        self._moved: str | None = None
        # Why this rank takes no snapshots; all ranks stop when one of them has a reason.
        self._problem: str | None = None
        self.off = False
        # Does this rank's training function ask for a save, and has that of any rank asked?
        self._asks = self._asked = False
        # Where ranks with the same shard are each other's replicas; and their step reports, since the last `exchange`.
        self._twins: Twins | None = None
        self._told: Mapping[str, Json] | None = None
        self._untold = False

    def after_step(
        self, step: int, duration_s: float, whole: bool = True, asks: bool = False, ends_epoch: bool = False
    ) -> MemoryCopy | None:
        """Collective where a snapshot is due, or has been since the last `whole` step: others have none. `asks`: for a
        save, see `take_asked`."""
        self._asks = asks
        if self.off:
            return None
        self._steps += 1
        busy = self._taken is not None and self._complete < self._taken
        self._look()
        if self._steps > 1:
            self._costs.step(duration_s, busy)
        self._due = self._due or self._cadence.due(step, ends_epoch)
        if not (self._due and whole):
            return None
        self._due = False
        began = time.perf_counter()
        agreed = self._ready(_WAIT_S if self._cadence.fixed else 0.0)
        copy = self._capture(step) if agreed else None
        self._cadence.passed(step, agreed)
        if agreed:
            self._costs.snapshot(time.perf_counter() - began)
        return copy

    def take_asked(self) -> bool:
        """Had any rank asked for a save when they last agreed on a snapshot? The same on all ranks; once."""
        asked, self._asked = self._asked, False
        return asked

    def at_end(self, step: int) -> MemoryCopy | None:
        """The generation ends as planned with this step. Collective."""
        if self.off or self._taken == step or not self._ready(_LAST_WAIT_S):
            return None
        return self._capture(step)

    def exchange(self) -> None:
        """After the step was reported, before its copies begin. Collective where `after_step` was: over the ranks with
        the same shard, where these are each other's replicas."""
        if self._untold and self._twins is not None:
            self._told = self._twins.reports(self._scope.coordinator.recent_steps())
        self._untold = False

    def commit(self, step: int, extra: Mapping[str, Json] | None) -> None:
        """On the copier's thread. This rank's step reports go with it: if the rank is lost, only they tell of them."""
        spec, told = self._scope.spec, self._told
        steps = {str(spec.rank): self._scope.coordinator.recent_steps()} if told is None else told
        try:
            self._memory.commit(step, {**(extra or {}), STEPS: steps_to_json(spec.world_size, steps)})
            self._committed_at = time.monotonic()
        except (StorageError, IntegrityError, Fenced) as error:
            logger.warning("the snapshot of step %d is not in this node's memory: %s", step, error)
            self._problem = str(error)

    def close(self, copied: bool) -> None:
        """After the last copy; not `copied`: one of them has not ended. Memory that is still written is not used in the
        next generation, which gets other memory."""
        if self._captures and not (copied and done(self._scope.device)):
            logger.warning("memory of snapshots is left as it is: copies into it have not ended")
            self._memory.abandon()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ready(self, wait_s: float) -> bool:
        """Collective. True when every rank takes a snapshot of this step. Raises CollectiveFailed where their copies of
        what is replicated have drifted apart: the way back is the same as from a lost peer."""
        ready = self._agree()
        if not ready and wait_s and not self.off:
            self._await_last(wait_s)
            ready = self._agree()
        return ready

    def _agree(self) -> bool:
        """Collective. True when the last snapshot is complete everywhere: the next may replace the one before it."""
        self._look()
        cost_s = self._costs.cost_s
        # Of no interest where a rank is not ready; it costs one number then.
        ready = self._taken is None or self._complete >= self._taken
        replicas = self._state.replicas(self._captures) if ready else None
        own = (
            self._complete,
            self._problem is None,
            not self._asks,
            cost_s is not None,
            -round((cost_s or 0.0) * _MICROSECONDS),
            -round(self._costs.step_s * _MICROSECONDS),
            *self._state.marks(replicas),
        )
        complete, works, unasked, known, cost, step, *fingerprints = self._state.agreement.least(own)
        # The reduction of a group that was aborted meanwhile may return this rank's own figures only.
        self._scope.check()
        self._asked = self._asked or not unasked
        if not works:
            self._give_up()
            return False
        if complete >= 0:
            self._settle(complete)
        cost_s, step_s = -cost / _MICROSECONDS, -step / _MICROSECONDS
        self._cadence.agreed(cost_s if known else None, step_s)
        self._report_interval(cost_s, step_s)
        if self._taken is not None and complete < self._taken:
            return False
        try:
            self._state.require_equal(fingerprints, replicas)
        except IntegrityError as error:
            raise CollectiveFailed(error.message, self._scope.where()) from error
        return self._state.sharded.writers is None or self._has_twins()

    def _has_twins(self) -> bool:
        """Collective. What is found before the first snapshot holds for the generation: False where it does not."""
        if self._captures and self._twins is None:
            return True
        kept = self._plan.targets or self._plan.stripe or self._own_state()
        mesh, before = self._scope.spec.mesh, self._twins
        self._twins = Twins.of(self._state, self._memory.node, not kept, mesh.per_cell * mesh.ep)
        if before is not None and self._twins is None:
            self._problem = "module buffers of the ranks differ now, and only those of rank 0 are the run's"
        return self._problem is None

    def _report_interval(self, cost_s: float, step_s: float) -> None:
        """All ranks agree, so rank 0 reports; a small change is not worth a line."""
        every, before = self._cadence.interval, self._reported_interval
        if self._cadence.fixed or cost_s <= 0.0 or self._scope.spec.rank != 0 or before / 1.5 < every < before * 1.5:
            return
        self._reported_interval = every
        self._scope.coordinator.cadence(self._scope.step, every, cost_s, step_s)

    def _capture(self, step: int) -> MemoryCopy | None:
        """A problem of one rank is reported at the next agreement; until then the others continue."""
        self._taken, self._committed_at = step, None
        self._captures += 1
        self._untold = True
        if self._twins is not None and not self._twins.writes:
            # Another rank of this node has the same shard.
            self._complete = step
            return None
        self._scope.enter(Phase.SAVING)
        try:
            return self._captured(step)
        except UsageError as error:
            if self._plan.required:
                raise
            self._problem = str(error)
        except (StorageError, IntegrityError, Fenced) as error:
            self._problem = str(error)
        return None

    def _captured(self, step: int) -> MemoryCopy:
        state, run_state = self._state, self._run_state()
        for _ in range(2):
            if self._record is not None:
                captured = state.capture_into(over(self._memory.segment()), self._record, step, run_state)
                if captured is not None:
                    extra, transfer = captured
                    return MemoryCopy(transfer, step, {**(extra or {}), **self._own_state()}, self)
            # The first snapshot, or the optimizer keeps more than it did at the one before.
            twins = self._twins
            shard = None if twins is None else (twins.shard, twins.shards)
            self._record, size = state.record(self._scope.spec.generation, shard)
            plan = self._plan
            self._memory.open(self._record, size, plan.targets, self._base(), plan.stripe, plan.spares)
        raise AssertionError(f"the state of step {step} has another shape each time it is looked at")

    def _await_last(self, limit_s: float) -> None:
        """Wait for this rank's part of the last snapshot to be complete; the generation may be aborted meanwhile."""
        assert self._taken is not None
        deadline = time.monotonic() + limit_s
        while not self._memory.wait_complete(self._taken, _CHECK_S) and time.monotonic() < deadline:
            self._scope.check()
            if self._memory.failed() is not None:
                return

    def _base(self) -> tuple[int, int] | None:
        """(generation, step) of the snapshot that this generation was restored from."""
        checkpoint = self._scope.spec.checkpoint
        if checkpoint is None or not is_snapshot(checkpoint):
            return None
        step, generation = parse_snapshot_id(checkpoint)
        return generation, step

    def _settle(self, step: int) -> None:
        """Older ones are not needed any more, on any node."""
        if self._twins is not None and not self._twins.writes:
            return
        try:
            self._memory.settled(step)
        except (StorageError, Fenced) as error:
            self._problem = str(error)

    def _look(self) -> None:
        if (moved := self._memory.moved()) is not None and moved != self._moved:
            self._moved = moved
            self._scope.coordinator.replica_moved(moved)
        try:
            self._complete = max(self._complete, self._memory.complete())
        except UsageError as error:  # a node that keeps replicas lacks the memory
            if self._plan.required:
                raise
            self._problem = str(error)
        except StorageError as error:
            self._problem = str(error)
        else:
            self._problem = self._problem or self._overdue()

    def _overdue(self) -> str | None:
        """Why the last snapshot will not become complete, where it has had its time."""
        if self._taken is None or self._complete >= self._taken or self._committed_at is None:
            return None
        limit_s = _COMPLETE_LIMIT_S + (self._record.bytes if self._record is not None else 0) / _SLOWEST_BYTES_S
        # Each node that may take the keeper's place has its time.
        limit_s *= 1 + len(self._plan.spares)
        waited_s = time.monotonic() - self._committed_at
        if waited_s <= limit_s:
            return None
        keepers = ", ".join(f"{host}:{port}" for host, port in self._plan.targets) or "this node alone"
        why = self._memory.failed() or f"{keepers} keeps it, and takes it too slowly or not at all"
        return f"the snapshot of step {self._taken} is not complete after {waited_s:.0f} s: {why}"

    def _give_up(self) -> None:
        self.off = True
        logger.warning(
            "no more snapshots are taken into the nodes' memory: %s", self._problem or "another rank says why"
        )
        self._scope.coordinator.memory_lost(self._problem or "")

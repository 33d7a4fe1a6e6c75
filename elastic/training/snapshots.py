"""When this rank's state is copied, and where to: its node's memory, storage, or both.

The copies are made beside the next step (`state/copier.py`). Whether a step's snapshot goes to memory is decided by all
ranks together, in one small reduction at the steps where one is due, so that there is always a snapshot that all of
them have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from elastic.core.checkpoint.snapshots import STEPS, is_snapshot, parse_snapshot_id
from elastic.core.errors import CollectiveFailed, Fenced, IntegrityError, StorageError, UsageError
from elastic.core.generation_spec import MemoryPlan
from elastic.core.policy.snapshot_interval import Cadence, Costs
from elastic.training.session import Phase, SnapshotMemory
from elastic.training.state.copier import Copier
from elastic.training.state.host import over
from elastic.training.state.pins import Pins

if TYPE_CHECKING:
    from elastic.core.checkpoint.manifest import Json, ShardRecord
    from elastic.training.context import Generation
    from elastic.training.state import EngineState

logger = logging.getLogger(__name__)

# How long a snapshot that must be taken waits for the one before it to be complete on all nodes; and the last one of a
# generation that ends as planned, without which steps would be repeated: many gigabytes take their time.
_WAIT_S = 10.0
_LAST_WAIT_S = 30.0
_CHECK_S = 0.1
_MICROSECONDS = 1e6


class Snapshots:
    """Of one generation of one rank; training thread only. After every step: `prepare`, then `start`.

    `client` gives what is not a tensor. `saved_step` is the last step that storage was given, or has.
    """

    def __init__(
        self, generation: Generation, state: EngineState, group: Any, client: Callable[[], Mapping[str, Json]]
    ) -> None:
        self._generation = generation
        self._state = state
        self._group = group
        self._client = client
        self._copier = Copier(generation.device)
        self._started: list[Callable[[], None]] = []
        self.saved_step: int | None = None
        plan = generation.spec.memory
        memory = generation.coordinator.memory() if plan is not None else None
        self._memory = _MemoryTier(self, plan, memory) if plan is not None and memory is not None else None

    def fence(self) -> float:
        """Before an optimizer step. Returns the seconds that it had to wait for copies of the last one's result."""
        return self._copier.fence()

    def prepare(self, duration_s: float) -> float:
        """After a step: get ready what is due. Returns how long that kept the training thread, in seconds."""
        began, step = time.perf_counter(), self._generation.step
        every = self._generation.spec.checkpoint_every_steps
        if every is not None and step % every == 0:
            self._to_storage(step)
        if self._memory is not None:
            self._memory.after_step(step, duration_s)
        return time.perf_counter() - began if self._started else 0.0

    def start(self) -> None:
        """Begin the copies that were prepared. After the step was reported: a checkpoint covers only what is known."""
        started, self._started = self._started, []
        for begin in started:
            begin()

    def at_end(self, durable: bool) -> None:
        """The generation ends with the step just finished: save it, unless it is. Returns when the copies are made.

        Not `durable`: the memory of the nodes is enough, where they take it.
        """
        step = self._generation.step
        if not durable and self._memory is not None:
            self._memory.at_end(step)
        elif self.saved_step != step:
            self._to_storage(step)
        self.start()
        self.drain()

    def drain(self) -> None:
        """Before the generation ends: the snapshots that were begun are handed over, those of earlier steps too."""
        if not self._copier.drain(_WAIT_S):
            logger.warning("a snapshot is still being copied after %.0f s, at step %d", _WAIT_S, self._generation.step)

    def close(self) -> None:
        """Copies under way are finished: they may be all that is left of the last step."""
        self._started.clear()
        self._copier.close()
        if self._memory is not None:
            self._memory.close()

    def begin(self, transfer: Any, then: Callable[[], None]) -> None:
        """Note a copy for `start`."""
        self._started.append(lambda: self._copier.start(transfer, then))

    def _to_storage(self, step: int) -> None:
        generation = self._generation
        generation.enter(Phase.SAVING)
        try:
            self._state.prove_replicas()
        except IntegrityError as error:
            # Not what was restored is wrong but what has become of it: the way back is the same as from a lost peer.
            raise CollectiveFailed(error.message, generation.where()) from error
        snapshot, copies = self._state.capture(
            run_id=generation.spec.run_id, generation=generation.spec.generation, step=step, client=self._client()
        )
        self.saved_step = step
        self.begin(copies, lambda: generation.coordinator.save(snapshot))


class _MemoryTier:
    """The nodes' memory as one rank uses it."""

    def __init__(self, owner: Snapshots, plan: MemoryPlan, memory: SnapshotMemory) -> None:
        self._owner = owner
        self._plan = plan
        self._memory = memory
        self._cadence = Cadence(plan.every_steps, plan.cost_limit)
        self._costs = Costs()
        self._pins = Pins(owner._generation.device)
        self._record: ShardRecord | None = None
        self._taken: int | None = None
        self._complete = -1
        self._steps = 0
        self._told = 0
        # Why this rank takes no snapshots; all ranks stop when one of them has a reason.
        self._problem: str | None = None
        self._off = False

    def after_step(self, step: int, duration_s: float) -> None:
        if self._off or self._untouched():
            return
        self._steps += 1
        busy = self._taken is not None and self._complete < self._taken
        self._look()
        if self._steps > 1:
            self._costs.step(duration_s, busy)
        if self._cadence.due(step):
            began = time.perf_counter()
            taken = self._take(step, _WAIT_S if self._cadence.fixed else 0.0)
            self._cadence.passed(step, taken)
            if taken:
                self._costs.snapshot(time.perf_counter() - began)

    def _untouched(self) -> bool:
        """No optimizer step was applied yet (fp16 finds its scale first): the optimizer keeps nothing that could be
        copied, and what it will keep has no place in the node's memory before it is known."""
        generation = self._owner._generation
        assert generation.engine is not None
        engine = generation.engine.deepspeed
        return generation.spec.checkpoint is None and engine.global_steps <= engine.skipped_steps

    def at_end(self, step: int) -> None:
        if not self._off and not self._untouched() and self._taken != step:
            self._take(step, _LAST_WAIT_S)

    def close(self) -> None:
        """After the last copy."""
        self._pins.close()

    def _take(self, step: int, wait_s: float) -> bool:
        """Collective. True when every rank takes a snapshot of this step."""
        ready = self._agree()
        if not ready and wait_s and not self._off:
            self._await_last(wait_s)
            ready = self._agree()
        if not ready:
            return False
        self._capture(step)
        return True

    def _agree(self) -> bool:
        """Collective. True when the last snapshot is complete everywhere: the next may replace the one before it."""
        self._look()
        cost_s = self._costs.cost_s
        own = (
            self._complete,
            self._problem is None,
            cost_s is not None,
            -round((cost_s or 0.0) * _MICROSECONDS),
            -round(self._costs.step_s * _MICROSECONDS),
        )
        complete, works, known, cost, step = _least(own, self._owner._group)
        # Of a group that was aborted meanwhile the answer may be this rank's own figures only.
        self._owner._generation.check()
        if not works:
            self._give_up()
            return False
        if complete >= 0:
            self._settle(complete)
        cost_s, step_s = -cost / _MICROSECONDS, -step / _MICROSECONDS
        self._cadence.agreed(cost_s if known else None, step_s)
        self._tell(cost_s, step_s)
        return self._taken is None or complete >= self._taken

    def _tell(self, cost_s: float, step_s: float) -> None:
        """All ranks agree, so one of them tells; a small change is not worth a line."""
        every, told = self._cadence.interval, self._told
        generation = self._owner._generation
        if self._cadence.fixed or cost_s <= 0.0 or generation.spec.rank != 0 or told / 1.5 < every < told * 1.5:
            return
        self._told = every
        generation.coordinator.cadence(generation.step, every, cost_s, step_s)

    def _capture(self, step: int) -> None:
        """A problem of this rank alone is told at the next agreement: until then the others go on."""
        self._taken = step
        generation = self._owner._generation
        generation.enter(Phase.SAVING)
        try:
            captured = self._captured(step)
        except UsageError as error:
            if self._plan.required:
                raise
            self._problem = str(error)
            return
        except (StorageError, IntegrityError, Fenced) as error:
            self._problem = str(error)
            return
        client, transfer = captured
        self._owner.begin(transfer, lambda: self._commit(step, client))

    def _commit(self, step: int, client: Mapping[str, Json] | None) -> None:
        """On the copier's thread. What this rank has done goes with it: should it be lost, nobody else could tell."""
        steps = self._owner._generation.coordinator.recent_steps()
        try:
            self._memory.commit(step, {**(client or {}), STEPS: steps})
        except (StorageError, IntegrityError, Fenced) as error:
            logger.warning("the snapshot of step %d is not in this node's memory: %s", step, error)
            self._problem = str(error)

    def _captured(self, step: int) -> tuple[Mapping[str, Json] | None, Any]:
        state, client = self._owner._state, self._owner._client()
        for _ in range(2):
            if self._record is not None:
                target = over(self._memory.segment())
                self._pins.pin(target)
                captured = state.capture_into(target, self._record, client)
                if captured is not None:
                    return captured
            # The first snapshot, or the optimizer keeps more than it did at the one before.
            self._record, size = state.record(self._owner._generation.spec.generation)
            self._memory.open(self._record, size, self._plan.targets, self._base(), self._plan.stripe)
        raise AssertionError(f"the state of step {step} has another shape each time it is looked at")

    def _await_last(self, limit_s: float) -> None:
        """Wait for this rank's part of the last snapshot to be complete; the generation may be aborted meanwhile."""
        assert self._taken is not None
        deadline = time.monotonic() + limit_s
        while not self._memory.wait_complete(self._taken, _CHECK_S) and time.monotonic() < deadline:
            self._owner._generation.check()
            if self._memory.failed() is not None:
                return

    def _base(self) -> tuple[int, int] | None:
        """(generation, step) of the snapshot that this generation was restored from."""
        checkpoint = self._owner._generation.spec.checkpoint
        if checkpoint is None or not is_snapshot(checkpoint):
            return None
        step, generation = parse_snapshot_id(checkpoint)
        return generation, step

    def _settle(self, step: int) -> None:
        """Older ones, on every node, are not needed any more."""
        try:
            self._memory.settled(step)
        except (StorageError, Fenced) as error:
            self._problem = str(error)

    def _look(self) -> None:
        try:
            self._complete = max(self._complete, self._memory.complete())
        except StorageError as error:
            self._problem = str(error)

    def _give_up(self) -> None:
        self._off = True
        reason = self._problem or "another rank's node cannot"
        logger.warning("no more snapshots are taken into the nodes' memory: %s", reason)
        self._owner._generation.coordinator.memory_lost(reason)


def _least(values: tuple[int | bool, ...], group: Any) -> list[int]:
    """The least of each value over all ranks. Collective."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    tensor = torch.tensor([int(value) for value in values], dtype=torch.int64)
    on_device = tensor.to(get_accelerator().current_device_name())
    comm.all_reduce(on_device, op=comm.ReduceOp.MIN, group=group)
    return [int(value) for value in on_device.cpu().tolist()]

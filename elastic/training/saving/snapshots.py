"""When this rank's state is copied, and where to: its node's memory, storage, or both.

The copies are made concurrently with the next step (`state/copier.py`), and each snapshot is handed over when its
copies are made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from elastic.checkpoint.shares import Shares
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.comm.agreement import Agreement
from elastic.comm.device_stream import DelayClock
from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import CollectiveFailed, IntegrityError
from elastic.core.settings import WeightsSettings
from elastic.training.saving.memory_tier import MemoryTier
from elastic.training.scope import GenerationScope
from elastic.training.session import Coordinator, Phase
from elastic.training.state.copier import Copier
from elastic.training.state.engine_state import EngineState
from elastic.training.state.host import Transfer

logger = logging.getLogger(__name__)

# How long the end of a generation waits for copies that were begun.
_DRAIN_S = 10.0


class PendingCopy(Protocol):
    """A snapshot whose copies are still to be made. `commit` hands it over when they are, on the copier's thread."""

    @property
    def transfer(self) -> Transfer: ...

    def commit(self) -> None: ...


@dataclass(frozen=True)
class _StorageCopy:
    transfer: Transfer
    snapshot: ShardSnapshot
    coordinator: Coordinator

    def commit(self) -> None:
        self.coordinator.save(self.snapshot)


class Snapshots:
    """Of one generation of one rank; training thread only. Around every step:

    1. `before_update` before the optimizer step
    2. `prepare` after it, then `start` when the step was reported

    `run_state` gives what is saved besides the engine's state, as JSON: rank 0's is the run's. `own_state` gives what
    every rank saves for itself. `saved_step` is the last step that storage has or was given. `compare` is called after
    the first step and before every save to storage; it may be collective. `shares` say after which steps the run may be
    saved.
    """

    def __init__(
        self,
        scope: GenerationScope,
        state: EngineState,
        run_state: Callable[[], Mapping[str, Json]],
        saved_step: int | None = None,
        own_state: Callable[[], Mapping[str, Json]] = dict,
        compare: Callable[[], None] | None = None,
        shares: Shares | None = None,
    ) -> None:
        self._shares = shares or Shares()
        self._storage_due = False
        self._scope = scope
        self._state = state
        self._run_state = run_state
        self._own_state = own_state
        self._compare = compare or (lambda: None)
        self._compared = False
        self._copier = Copier(scope.device)
        self._delays = DelayClock(scope.device)
        self._pending: list[PendingCopy] = []
        # Of a step with which the run may end, copied before the script goes on.
        self._held: _StorageCopy | None = None
        # Was any optimizer step of this run applied? Before that there is no optimizer state.
        self._applied = scope.spec.checkpoint is not None
        self.saved_step = saved_step
        # The training function asks for this step to be saved: told with the next snapshot in memory.
        self.asks = False
        # Weights of another step have been loaded.
        self._loaded = False
        self._memory: MemoryTier | None = None
        if scope.spec.memory is not None and (memory := scope.coordinator.memory()) is not None:
            self._memory = MemoryTier(scope, state, run_state, scope.spec.memory, memory, own_state)

    @property
    def agreement(self) -> Agreement:
        return self._state.agreement

    def before_update(self) -> float:
        """The state is verified if it was restored, and copied where a copy was begun. Returns the seconds that the
        copies took. Collective while a verdict is missing."""
        self._held = None
        self._state.before_step()
        try:
            with self._delays.delay():
                return self._copier.fence()
        except IntegrityError as error:
            raise self._lost(error) from error

    def prepare(self, duration_s: float, applied: bool, ends_epoch: bool = False) -> float:
        """After a step of `duration_s`, `applied` or skipped: prepare the snapshots that are due. Returns the seconds
        that this kept the training thread. Collective."""
        began, step = time.perf_counter(), self._scope.step
        self._applied = self._applied or applied
        if not self._compared:
            self._compared = True
            self._compare()
        # What cannot wait is copied by the stream of the next step, before that.
        with self._delays.delay():
            every = self._scope.spec.checkpoint_every_steps
            # What is due where islands differ is taken after the next step where they do not.
            whole = self._shares.whole
            self._storage_due = self._storage_due or (every is not None and step % every == 0)
            if self._storage_due and whole:
                self._storage_due = False
                self._to_storage_if_free(step)
            if self._memory is not None and self._applied:
                self._note(self._memory.after_step(step, duration_s, whole, self.asks, ends_epoch))
        return time.perf_counter() - began if self._pending else 0.0

    def delayed_s(self) -> float:
        """Seconds by which snapshots have delayed the device besides, up to its last synchronisation."""
        return self._delays.take()

    def asked_for(self, at_once: bool) -> bool:
        """Has any rank asked for this step, or for one before? Not `at_once`: it may be known with the next snapshot
        in memory only. Collective."""
        if at_once or self._memory is None or self._memory.off:
            return self.agreement.any(self.asks)
        return self._memory.take_asked()

    def start(self) -> None:
        """Begin the copies that were prepared. After the step was reported: a checkpoint covers reported steps only.
        Collective where ranks with the same shard are each other's replicas."""
        if self._memory is not None:
            self._memory.exchange()
        pending, self._pending = self._pending, []
        for copy in pending:
            self._copier.start(copy.transfer, copy.commit)

    def at_end(self, durable: bool) -> None:
        """The generation ends with the step just finished: save it, unless it is saved. Returns when copies are made.

        Not `durable`: the memory of the nodes is enough, where they take it.
        """
        if self._loaded:
            return
        step = self._scope.step
        if not durable and self._memory is not None:
            if self._applied:
                self._note(self._memory.at_end(step))
        elif self._held is not None:
            self.saved_step = step
            self._held.commit()
        elif self.saved_step != step:
            self._to_storage()
        self._held = None
        self.start()
        self._require_copied()

    def hold(self) -> None:
        """Copy the step just finished for storage, which gets it where the generation ends with this step. Until the
        next update of the engine's, what becomes of the weights is no part of it. Returns when copies are made.
        Collective."""
        if self.saved_step != self._scope.step and not self._loaded:
            self._held = self._for_storage()
            self._copier.start(self._held.transfer, lambda: None)
        self._require_copied()

    def load_weights(self, weights: WeightsSettings) -> None:
        """In the place of the weights that were saved: from here on nothing is. Collective; raises on all ranks or on
        none: see `install_weights`."""
        self.before_update()
        self._state.begin_from(weights)
        self._loaded = True

    def whole_weights(self, names: Collection[str] | None) -> dict[str, torch.Tensor]:
        """See `gather_whole`. Collective."""
        return self._state.whole(names)

    def drain(self) -> None:
        """Before the generation ends: hand over every snapshot that was begun, those of earlier steps too."""
        if not self._copier.drain(_DRAIN_S):
            logger.warning("a snapshot is still being copied after %.0f s, at step %d", _DRAIN_S, self._scope.step)

    def close(self) -> None:
        """Copies that were begun are finished first: they may be all that is left of the last step."""
        self._pending.clear()
        self._held = None
        copied = self._copier.close()
        if self._memory is not None:
            self._memory.close(copied)

    def _lost(self, error: IntegrityError) -> CollectiveFailed:
        """The restored state was good, what was to be saved is not: the way back is the same as from a lost peer."""
        return CollectiveFailed(error.message, self._scope.where())

    def _note(self, copy: PendingCopy | None) -> None:
        if copy is not None:
            self._pending.append(copy)

    def _to_storage_if_free(self, step: int) -> None:
        """Collective. If every rank replaced its own waiting snapshots, hardly any checkpoint would become whole."""
        (free,) = self._state.agreement.least([self._scope.coordinator.can_save()])
        # Of a group that was aborted meanwhile, the answer may be this rank's own.
        self._scope.check()
        if free:
            self._to_storage()
        else:
            self._scope.coordinator.save_left_out(step)

    def _to_storage(self) -> None:
        copy = self._for_storage()
        self.saved_step = copy.snapshot.step
        self._note(copy)

    def _for_storage(self) -> _StorageCopy:
        """Collective."""
        scope = self._scope
        scope.enter(Phase.SAVING)
        try:
            self._state.verify_replicas()
        except IntegrityError as error:
            raise self._lost(error) from error
        self._compare()
        snapshot, transfer = self._state.capture(
            run_id=scope.spec.run_id, generation=scope.spec.generation, step=scope.step, caller=self._run_state()
        )
        if own := self._own_state():
            snapshot = replace(snapshot, extra_state={**(snapshot.extra_state or {}), **own})
        return _StorageCopy(transfer, snapshot, scope.coordinator)

    def _require_copied(self) -> None:
        self.drain()
        try:
            self._copier.raise_failure()
        except IntegrityError as error:
            raise self._lost(error) from error

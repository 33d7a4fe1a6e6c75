"""Sense: the capacity that a run can expect, and which of its slots other runs need.

The judgements are pure (`core.policy.capacity`, `core.policy.priority_sharing`); this module gathers their facts and
emits changes as events. Controllers find each other by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import ray

from elastic.core.events import CapacityJudged, Event, SlotsShared
from elastic.core.policy import priority_sharing
from elastic.core.policy.capacity import Judgement, Need, Supply, fits, judge
from elastic.core.policy.priority_sharing import Claim
from elastic.core.run.state import RunState, SlotPhase
from elastic.runtime import names
from elastic.runtime.control_store import StoreThreads
from elastic.runtime.controller.senses.cluster_view import ClusterProbe, ClusterView

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# While the run has all slots that it may have, and no other run exists.
_CALM_LOOK_S = 5.0
# A new cluster does not know its nodes yet: an impossible request is refused only after this time, and later where
# nodes join by themselves.
_SURE_S = 5.0
_SURE_BY_HAND_S = 15.0
# While nodes are starting, other runs are asked to release slots only after this many times the usual wait.
_ARRIVING_FACTOR = 10
_PEER_LIMIT_S = 2.0
# The claim of a run that does not answer counts for this long: its controller may be restarting.
_REMEMBER_S = 30.0


class CapacityMonitor:
    """`state` gives the run's state at present; `emit` gets CapacityJudged and SlotsShared on changes."""

    def __init__(
        self,
        state: Callable[[], RunState],
        emit: Callable[[Event], None],
        look: Callable[[], ClusterView] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._emit = emit
        self._look = look
        self._thread = StoreThreads(1, "elastic-supply")
        self._clock = clock
        self._shortage = state().fleet.shortage
        self._limit = state().fleet.slot_limit
        self._held = priority_sharing.Held(
            priority_sharing.Share(self._limit, state().fleet.slot_limit_reason), clock() + priority_sharing.HOLD_S
        )
        self._hopeless_since: float | None = None
        self._refused = False
        self._claim: Claim | None = None
        self._peers: dict[str, tuple[float, Claim]] = {}
        self._actors: dict[str, Any] = {}

    @property
    def claim(self) -> Claim | None:
        """This run's claim, for other runs; None before the first look at the cluster."""
        return self._claim

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(await self._turn())
        finally:
            self._thread.close()

    async def _turn(self) -> float:
        """One look at the cluster and the other runs; returns the seconds until the next one."""
        try:
            others = await self._others()
            await self.look(await self._thread.call(self._view), others)
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            # The control store may be unavailable; earlier facts stay valid.
            logger.debug("the state of the cluster cannot be had: %s", error)
            return _LOOK_S
        except Exception:
            # Other runs may need slots of this run: continue with the next look after any error.
            logger.exception("looking at the state of the cluster failed")
            return _LOOK_S
        calm = not others and self._claim is not None and not self._wants() and self._limit is None
        return _CALM_LOOK_S if calm else _LOOK_S

    def _wants(self) -> bool:
        return any(slot.phase is SlotPhase.PENDING for slot in self._state().fleet.slots.values())

    async def look(self, view: ClusterView, others: list[Claim]) -> None:
        """Judge the facts and emit changes."""
        state, now = self._state(), self._clock()
        sure_s = _SURE_S if view.cluster.autoscaled else _SURE_BY_HAND_S
        self._tell_shortage(judge(need_of(state), view.cluster), sure_s, now)
        self._claim = claim_of(state, view, now)
        free = sum(fits(self._claim.slot, place) for place in view.free.values())
        self._held = self._held.next(priority_sharing.decide(self._claim, others, free), now)
        share = self._held.share
        if share.limit != self._limit:
            self._limit = share.limit
            self._emit(SlotsShared(share.limit, share.reason))

    def _tell_shortage(self, judged: Judgement, sure_s: float, now: float) -> None:
        never = judged.supply is Supply.NEVER
        self._hopeless_since = (self._hopeless_since or now) if never else None
        sure = self._hopeless_since is not None and now - self._hopeless_since >= sure_s
        if judged.sentence != self._shortage or (sure and not self._refused):
            self._shortage, self._refused = judged.sentence, sure
            self._emit(CapacityJudged(judged.sentence, sure))

    def _view(self) -> ClusterView:
        if self._look is None:
            self._look = ClusterProbe()
        return self._look()

    # --- other runs ---

    async def _others(self) -> list[Claim]:
        """The claims of the other runs. The last claim of a run that does not answer counts for a while."""
        own, known = names.controller(self._state().settings.run_id), frozenset(self._actors)
        self._actors.update(await self._thread.call(lambda: _controllers(known)))
        others = [name for name in self._actors if name != own]
        told = await asyncio.gather(*(self._ask(name) for name in others))
        now = self._clock()
        for name, (answered, claim) in zip(others, told, strict=True):
            if claim is not None:
                self._peers[name] = (now, claim)
            elif answered:
                self._peers.pop(name, None)
        self._peers = {name: told for name, told in self._peers.items() if now - told[0] < _REMEMBER_S}
        return [claim for _, claim in self._peers.values()]

    async def _ask(self, name: str) -> tuple[bool, Claim | None]:
        """(whether the run answered, its claim); the claim is None after the run's end."""
        try:
            return True, await asyncio.wait_for(self._actors[name].claim.remote(), _PEER_LIMIT_S)
        except ray.exceptions.ActorDiedError:
            del self._actors[name]
            return True, None
        except (ray.exceptions.RayError, OSError, asyncio.TimeoutError) as error:
            logger.debug("no claim from %s: %s", name, error or type(error).__name__)
            return False, None


def _controllers(known: Collection[str]) -> dict[str, Any]:
    """Handles of controllers that are not in `known`. Blocks."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    found = [entry["name"] for entry in listed if entry["namespace"] == names.NAMESPACE]
    handles = {}
    for name in found:
        if names.is_controller(name) and name not in known:
            with contextlib.suppress(ValueError):  # It has ended since.
                handles[name] = ray.get_actor(name, names.NAMESPACE)
    return handles


def need_of(state: RunState) -> Need:
    scaling = state.settings.scaling
    return Need(state.settings.resources_per_worker, scaling.workers_per_slot, scaling.min_slots)


def claim_of(state: RunState, view: ClusterView, now: float) -> Claim:
    """A slot counts as wanted after a long enough wait; the wait is longer while nodes are starting."""
    scaling = state.settings.scaling
    long_s = scaling.share_after_s * (_ARRIVING_FACTOR if view.arriving else 1)
    phases = [slot.phase for slot in state.fleet.slots.values()]
    pending = [slot for slot in state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    return Claim(
        run=state.settings.run_id,
        priority=scaling.priority,
        since=state.started_at,
        slot=need_of(state).slot,
        least=scaling.min_slots,
        held=phases.count(SlotPhase.PLACED),
        wanted=sum(now - slot.since >= long_s for slot in pending),
    )

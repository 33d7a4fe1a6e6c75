"""Watches what a run can hope for: what the cluster lacks for it, and what other runs need of its slots.

The judgements are pure (`core.capacity`, `core.sharing`); here their facts are gathered, and what has changed becomes
an event. Controllers find each other by their names.
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
from elastic.core.policy.capacity import Judgement, Need, Outlook, fits, judge
from elastic.core.policy.priority_sharing import Claim
from elastic.core.run.state import RunState, SlotPhase
from elastic.runtime import names
from elastic.runtime.control_store import StoreThreads
from elastic.runtime.controller.senses.cluster_view import ClusterProbe, ClusterView

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# While the run has all that it may have, and is alone.
_CALM_LOOK_S = 5.0
# A cluster that has just begun does not know its nodes yet: what cannot be had is refused only after so long, and later
# where nodes join by themselves.
_SURE_S = 5.0
_SURE_BY_HAND_S = 15.0
# While nodes are on their way to the cluster other runs are asked to make room only after so many times the usual time.
_ARRIVING_FACTOR = 10
_PEER_LIMIT_S = 2.0
# What another run said of itself counts for so long when it does not answer: its controller may be being restarted.
_REMEMBER_S = 30.0


class CapacityMonitor:
    """`state` gives the run's state as it is now; `emit` gets CapacityJudged and SlotsShared when they have changed."""

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
        self._thread = StoreThreads(1, "elastic-outlook")
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
        """What this run says of itself to others; None before it has looked at the cluster."""
        return self._claim

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(await self._turn())
        finally:
            self._thread.close()

    async def _turn(self) -> float:
        """One look with whatever can be had; returns when the next one is due, in seconds."""
        try:
            others = await self._others()
            await self.look(await self._thread.call(self._view), others)
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            # The control store may be away; what was known stays known.
            logger.debug("the state of the cluster cannot be had: %s", error)
            return _LOOK_S
        except Exception:
            # Whatever it is, others may need what this run has, and be told so by the next look.
            logger.exception("looking at the state of the cluster failed")
            return _LOOK_S
        calm = not others and self._claim is not None and not self._wants() and self._limit is None
        return _CALM_LOOK_S if calm else _LOOK_S

    def _wants(self) -> bool:
        return any(slot.phase is SlotPhase.PENDING for slot in self._state().fleet.slots.values())

    async def look(self, view: ClusterView, others: list[Claim]) -> None:
        """One look: judge, and tell what is new."""
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
        never = judged.outlook is Outlook.NEVER
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
        """What the other runs say of themselves. Who does not answer is remembered for a while."""
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
        """(whether it answered, its claim; None of a run that is over)."""
        try:
            return True, await asyncio.wait_for(self._actors[name].claim.remote(), _PEER_LIMIT_S)
        except ray.exceptions.ActorDiedError:
            del self._actors[name]
            return True, None
        except (ray.exceptions.RayError, OSError, asyncio.TimeoutError) as error:
            logger.debug("%s has not said what it needs: %s", name, error or type(error).__name__)
            return False, None


def _controllers(known: Collection[str]) -> dict[str, Any]:
    """Handles of the controllers that are not known yet. Blocks."""
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
    """A slot that has been waited for long enough cannot otherwise be had; nodes on their way are waited for longer."""
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

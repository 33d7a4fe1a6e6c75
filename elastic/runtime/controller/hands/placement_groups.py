"""Placement groups: one per slot, so that slots are requested, gained and lost independently."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from elastic.core import events as ev
from elastic.runtime import names
from elastic.runtime.control_store import StoreThreads

logger = logging.getLogger(__name__)

# The delay until a placed slot is noticed; one call answers for all slots.
_POLL_S = 0.1
# Ray labels every node with its own id.
_NODE_LABEL = "ray.io/node-id"
_MAX_POLL_S = 1.0
# Ray's table arrives within milliseconds; a control store that takes longer than this counts as unavailable.
_AWAY_S = 4.0


class SlotKeeper:
    """Requests, watches and releases the slots of one attempt.

    Ray's calls block, so all of them run on one thread of this object's own. `emit` gets SlotPlaced and SlotLost, and
    also ControlStoreAway and ControlStoreBack: no other module polls the control store all the time.
    """

    def __init__(
        self, run_id: str, attempt: int, resources: Mapping[str, float], emit: Callable[[ev.Event], None]
    ) -> None:
        self._run_id = run_id
        self._attempt = attempt
        self._resources = dict(resources)
        self._emit = emit
        self._wanted: set[int] = set()
        self._groups: dict[int, PlacementGroup] = {}
        self._waiting: set[int] = set()
        self._placed: dict[int, str | None] = {}
        self._asked = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._thread = StoreThreads(1, "elastic-slots")

    def group(self, slot: int) -> PlacementGroup | None:
        return self._groups.get(slot)

    async def request(self, slot: int, workers: int, avoid: Sequence[str] = ()) -> None:
        """Idempotent: a slot that was requested before a restart of the controller is found by its name."""
        if slot in self._groups:
            return
        self._wanted.add(slot)
        try:
            group = await self._call(self._find_or_create, slot, workers, avoid)
        except ray.exceptions.RayError as error:
            await asyncio.sleep(_MAX_POLL_S)
            self._emit(ev.SlotLost(slot, f"the cluster refused the placement group: {error}"))
            return
        if slot not in self._wanted:
            # Released during the request, which takes as long as an outage of the control store.
            await self._call(ray.util.remove_placement_group, group)
            return
        self._groups[slot] = group
        self._waiting.add(slot)
        self._watch()

    async def attach(self, slot: int, node: str) -> None:
        """Find a placed slot again after a restart of the controller."""
        name = names.slot(self._run_id, self._attempt, slot)
        self._wanted.add(slot)
        try:
            self._groups[slot] = await self._call(ray.util.get_placement_group, name)
            self._placed[slot] = node
            self._watch()
        except ValueError:
            self._emit(ev.SlotLost(slot, "its placement group is gone"))

    async def release(self, slot: int) -> None:
        self._wanted.discard(slot)
        self._waiting.discard(slot)
        self._placed.pop(slot, None)
        group = self._groups.pop(slot, None)
        if group is not None:
            await self._call(ray.util.remove_placement_group, group)

    async def close(self) -> None:
        for slot in tuple(self._groups):
            await self.release(slot)
        if self._poller is not None:
            self._poller.cancel()
        self._thread.close()

    def _watch(self) -> None:
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())
        self._asked.set()

    async def _poll(self) -> None:
        pause = _POLL_S
        while self._groups:
            table = await self._table()
            for slot in tuple(self._groups):
                if slot in self._groups and self._look(slot, table.get(self._groups[slot].id.hex())):
                    pause = _POLL_S
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), pause)
                pause = _POLL_S
            self._asked.clear()
            pause = min(pause * 1.1, _MAX_POLL_S)

    async def _table(self) -> Mapping[str, Any]:
        """Ray's table of placement groups, however long it takes; a long wait is reported as an event. Empty if Ray
        fails."""
        asked, away = time.monotonic(), False
        call = asyncio.ensure_future(self._call(ray.util.placement_group_table))
        while not (await asyncio.wait((call,), timeout=_AWAY_S))[0]:
            if not away:
                self._emit(ev.ControlStoreAway(time.monotonic() - asked))
            away = True
        if away:
            self._emit(ev.ControlStoreBack(time.monotonic() - asked))
        try:
            table: Mapping[str, Any] = call.result()
            return table
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            logger.warning("Ray's table of placement groups could not be read and is asked for again: %s", error)
            return {}

    def _look(self, slot: int, entry: Mapping[str, Any] | None) -> bool:
        """Check one slot's row of Ray's table; True when the slot has changed."""
        if entry is None:
            return False
        node = next(iter(entry["bundles_to_node_id"].values()), None)
        if slot in self._waiting and entry["state"] == "CREATED" and node is not None:
            self._waiting.discard(slot)
            self._placed[slot] = node
            self._emit(ev.SlotPlaced(slot, node))
            return True
        moved = slot in self._placed and (entry["state"] != "CREATED" or node != self._placed[slot])
        if moved or entry["state"] == "REMOVED":
            # Ray would reschedule the bundles one by one, and two groups can deadlock: request a new group instead.
            self._waiting.discard(slot)
            self._placed.pop(slot, None)
            self._emit(ev.SlotLost(slot, f"Ray has lost its node (placement group {entry['state'].lower()})"))
            return True
        return False

    def _find_or_create(self, slot: int, workers: int, avoid: Sequence[str]) -> PlacementGroup:
        name = names.slot(self._run_id, self._attempt, slot)
        try:
            found: PlacementGroup = ray.util.get_placement_group(name)
            return found
        except ValueError:
            bundles = [dict(self._resources) for _ in range(workers)]
            elsewhere = [{_NODE_LABEL: f"!in({','.join(avoid)})"}] * workers if avoid else None
            made: PlacementGroup = ray.util.placement_group(
                bundles, strategy="STRICT_PACK", name=name, lifetime="detached", bundle_label_selector=elsewhere
            )
            return made

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._thread.call(partial(function, *args))

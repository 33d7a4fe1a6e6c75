"""Placement groups: one per slot, so that each is lost, gained and asked of the autoscaler by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from elastic.core import events as ev
from elastic.runtime import names

logger = logging.getLogger(__name__)

# A placed slot is noticed this much later at most; one call answers for all slots.
_POLL_S = 0.1
_MAX_POLL_S = 1.0


class SlotKeeper:
    """Asks for, watches and gives back the slots of one attempt at a run.

    Ray's calls block, so all of them run on one thread of this object's own. `emit` gets SlotPlaced and SlotLost.
    """

    def __init__(
        self, run_id: str, attempt: int, resources: Mapping[str, float], emit: Callable[[ev.Event], None]
    ) -> None:
        self._run_id = run_id
        self._attempt = attempt
        self._resources = dict(resources)
        self._emit = emit
        self._groups: dict[int, PlacementGroup] = {}
        self._waiting: set[int] = set()
        self._poller: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic-slots")

    def group(self, slot: int) -> PlacementGroup | None:
        return self._groups.get(slot)

    async def request(self, slot: int, workers: int) -> None:
        """Idempotent: a slot that was asked for before a restart of the controller is found by its name."""
        if slot in self._groups:
            return
        try:
            self._groups[slot] = await self._call(self._find_or_create, slot, workers)
        except ray.exceptions.RayError as error:
            await asyncio.sleep(_MAX_POLL_S)
            self._emit(ev.SlotLost(slot, f"the cluster refused the placement group: {error}"))
            return
        self._waiting.add(slot)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    async def attach(self, slot: int) -> None:
        """Find a placed slot again after a restart of the controller."""
        name = names.slot(self._run_id, self._attempt, slot)
        try:
            self._groups[slot] = await self._call(ray.util.get_placement_group, name)
        except ValueError:
            self._emit(ev.SlotLost(slot, "its placement group is gone"))

    async def release(self, slot: int) -> None:
        self._waiting.discard(slot)
        group = self._groups.pop(slot, None)
        if group is not None:
            await self._call(ray.util.remove_placement_group, group)

    async def close(self) -> None:
        for slot in tuple(self._groups):
            await self.release(slot)
        self._thread.shutdown(wait=False)

    async def _poll(self) -> None:
        pause = _POLL_S
        while self._waiting:
            table = await self._call(ray.util.placement_group_table)
            for slot in tuple(self._waiting):
                group = self._groups.get(slot)
                entry = table.get(group.id.hex()) if group is not None else None
                if entry is not None and entry["state"] == "CREATED":
                    self._waiting.discard(slot)
                    pause = _POLL_S
                    self._emit(ev.SlotPlaced(slot, next(iter(entry["bundles_to_node_id"].values()))))
                elif entry is not None and entry["state"] == "REMOVED":
                    self._waiting.discard(slot)
                    self._emit(ev.SlotLost(slot, "its placement group was removed"))
            await asyncio.sleep(pause)
            pause = min(pause * 1.1, _MAX_POLL_S)

    def _find_or_create(self, slot: int, workers: int) -> PlacementGroup:
        name = names.slot(self._run_id, self._attempt, slot)
        try:
            found: PlacementGroup = ray.util.get_placement_group(name)
            return found
        except ValueError:
            bundles = [dict(self._resources) for _ in range(workers)]
            made: PlacementGroup = ray.util.placement_group(
                bundles, strategy="STRICT_PACK", name=name, lifetime="detached"
            )
            return made

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))

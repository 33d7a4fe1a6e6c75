"""Sense: which nodes are about to leave, according to Ray: preempted, drained, or leaving `ray start --block`.

Ray pushes no notices, so its list is polled once a second. This is the only module with Ray's private call for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

import ray
from ray._private.state import state as ray_state

from elastic.core.events import NodesDraining

logger = logging.getLogger(__name__)

_POLL_S = 1.0
# A deadline that has moved by less is the same one.
_SAME_S = 0.5


def draining_nodes() -> dict[str, float]:
    """Node id -> deadline in wall clock seconds, 0 for none."""
    listed: Mapping[str, int] = ray_state.get_draining_nodes()
    return {node: deadline_ms / 1000.0 for node, deadline_ms in listed.items()}


def dead_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}  # type: ignore[no-untyped-call]


class DrainMonitor:
    """`emit` gets NodesDraining on each change of the list. `used` names the nodes on which the run has slots."""

    def __init__(
        self,
        known: Mapping[str, float],
        used: Callable[[], Collection[str]],
        emit: Callable[[NodesDraining], None],
        from_wall: Callable[[float], float],
        listed: Callable[[], dict[str, float]] = draining_nodes,
        dead: Callable[[], set[str]] = dead_nodes,
    ) -> None:
        """`known` is the list that the run has, with deadlines by its own clock; `from_wall` gives that clock's time of
        an instant in wall clock seconds."""
        self._known = dict(known)
        # Ray's own figures: while they stay, a wall clock that is set must not move a deadline.
        self._by_ray: dict[str, float] = {}
        self._from_wall = from_wall
        self._used = used
        self._emit = emit
        self._listed = listed
        self._dead = dead

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except (ray.exceptions.RayError, OSError, RuntimeError) as error:
                # The control store may be unavailable; the known list stays valid.
                logger.debug("the list of draining nodes cannot be had: %s", error)
            except Exception:
                # No error may end the watch: the next node's notice would be missed.
                logger.exception("looking for draining nodes failed")
            await asyncio.sleep(_POLL_S)

    async def look(self) -> None:
        listed = self._deadlines(await asyncio.to_thread(self._listed))
        gone = self._known.keys() - listed.keys()
        if gone & set(self._used()):
            # A dead node is on no list either, although its drain was not cancelled. Its slots are about to be lost.
            dead = await asyncio.to_thread(self._dead)
            listed |= {node: self._known[node] for node in gone & dead & set(self._used())}
        if listed != self._known:
            self._known = dict(listed)
            self._emit(NodesDraining(tuple(sorted(listed.items()))))

    def _deadlines(self, by_ray: Mapping[str, float]) -> dict[str, float]:
        """The run's own times of Ray's deadlines."""
        found = {node: self._deadline(node, when) for node, when in by_ray.items()}
        self._by_ray = dict(by_ray)
        return found

    def _deadline(self, node: str, when: float) -> float:
        if node in self._known and self._by_ray.get(node) == when:
            return self._known[node]
        ours, known = self._from_wall(when) if when > 0 else 0.0, self._known.get(node)
        # A restarted controller's clock differs a little from that of the one before.
        return known if known is not None and abs(ours - known) < _SAME_S and (ours > 0) == (known > 0) else ours

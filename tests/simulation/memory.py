"""The simulated memory of nodes: which node holds which rank's shard of which snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.core import events as ev
from elastic.core.checkpoint.parity import Stripe, place_parity
from elastic.core.checkpoint.snapshots import (
    Copies,
    Held,
    copies_of,
    parse_snapshot_id,
    place_replicas,
    recoverable,
    snapshot_id,
)
from simulation.processes import Group, Node

if TYPE_CHECKING:
    from simulation.world import World

# Two segments per rank: one complete snapshot, and the one that is being taken.
_KEPT = 2


class Memory:
    """A node keeps the two newest snapshots of each rank that it holds; its memory is lost with its agent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: dict[str, list[Held]] = {}
        self.corrupt: set[str] = set()
        self.settled: set[int] = set()
        self.placed: tuple[list[str], tuple[tuple[str, ...], ...]] = ([], ())

    def take(self, group: Group) -> None:
        """Every member copies its shard to its node; replicas follow, unless a fault prevents it."""
        world, plan = self.world, self.world.plan
        nodes = [member.node.name for member in group.members]
        if self.placed[0] != nodes:
            count = 0 if plan.settings.snapshots.parity else plan.settings.snapshots.replicas
            self.placed = (nodes, place_replicas(nodes, count))
        replicas = self.placed[1]
        world.saved[snapshot_id(group.step, group.number)] = group.samples
        for rank, member in enumerate(group.members):
            held = Held(group.number, group.step, rank, len(nodes), replica=False)
            self._keep(member.node, held)
            for target in replicas[rank]:
                copy = Held(group.number, group.step, rank, len(nodes), replica=True)
                world.clock.after(world.rng.uniform(0.0, 0.3), self._receive, [member.node], target, [copy])
        for stripe in self._stripes(nodes):
            senders = [group.members[rank].node for rank in stripe.ranks]
            ranks = stripe.ranks if len(stripe.ranks) > 1 else ()
            copies = [Held(group.number, group.step, rank, len(nodes), True, ranks) for rank in stripe.ranks]
            world.clock.after(world.rng.uniform(0.0, 0.3), self._receive, senders, stripe.holder, copies)
        if group.number not in self.settled:
            world.clock.after(0.31, self._free_older, group.number)

    def wipe(self, node: Node) -> None:
        """Its agent has ended."""
        self.held.pop(node.name, None)

    def survey(self, number: int, reach: tuple[str, ...]) -> None:
        """`reach`: the nodes that test whether they can reach each other."""
        world = self.world
        if world.rng.random() < world.plan.lost_surveys:
            world.seen("survey without an answer")
            return
        world.clock.after(world.rng.uniform(0.0, 0.2), self._answer, number, reach)

    def readable(self, identifier: str) -> bool:
        """Whether a restore can read it: it may have been lost since the survey."""
        if identifier in self.corrupt:
            return False
        return any(snapshot.id == identifier for snapshot in recoverable(self._reachable()))

    def _answer(self, number: int, reach: tuple[str, ...]) -> None:
        cut = [(first, other) for first, other in map(sorted, self.world.cuts) if first in reach and other in reach]
        if cut:
            self.world.seen("nodes that cannot reach each other")
        held = self._reachable()
        whole = recoverable(held)
        found = tuple((snapshot.id, snapshot.step) for snapshot in whole)
        copies = copies_of(whole[0]) if whole else Copies()
        as_they_are = {name: [copy for copy in copies if not copy.stripe] for name, copies in held.items()}
        if len(found) > len(recoverable(as_they_are)):
            self.world.seen("a shard made of parity")
        if not self.world.plan.settings.snapshots.enabled:
            found, copies = (), Copies()
        told = ev.SnapshotsReported(number, found, tuple(sorted(cut)), ranks=copies.ranks, copies=copies.nodes)
        self.world.tell(told, 0.01)

    def _reachable(self) -> dict[str, list[Held]]:
        nodes = {node.name: node for node in self.world.cluster.placed.values() if node.alive and not node.frozen}
        return {name: self.held.get(name, []) for name in nodes}

    def _stripes(self, nodes: list[str]) -> list[Stripe]:
        width = self.world.plan.settings.snapshots.parity
        placed = place_parity(nodes, width) if width else ()
        return list(dict.fromkeys(stripe for stripe in placed if stripe is not None))

    def _receive(self, senders: list[Node], target: str, copies: list[Held]) -> None:
        """A replica, or the parity of a stripe, which is complete when all its ranks have sent their shares."""
        node = next(node for node in self.world.cluster.nodes if node.name == target)
        if all(part.alive and not part.frozen for part in (node, *senders)) and node.slot is not None:
            for copy in copies:
                self._keep(node, copy)

    def _keep(self, node: Node, copy: Held) -> None:
        mine = self.held.setdefault(node.name, [])
        mine.append(copy)
        same = sorted(
            other
            for other in mine
            if (other.rank, other.replica, other.generation, other.stripe)
            == (copy.rank, copy.replica, copy.generation, copy.stripe)
        )
        for old in same[:-_KEPT]:
            mine.remove(old)
        if self.world.corrupts(len(mine)) and copy.step % 7 == 0:
            self.corrupt.add(next(s.id for s in recoverable({"x": [Held(copy.generation, copy.step, 0, 1, False)]})))

    def _free_older(self, generation: int) -> None:
        """Snapshots of older generations are freed when a newer one is complete on every node."""
        whole = recoverable(self.held)
        newest = max((parse_snapshot_id(snapshot.id)[1] for snapshot in whole), default=0)
        if newest == generation:
            self.settled.add(generation)
            for held in self.held.values():
                held[:] = [copy for copy in held if copy.generation >= newest]

"""Simulated cluster and storage: where slots and checkpoints come from, and how they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic.core import events as ev
from simulation.processes import Group, Node, Process
from simulation.samples import Samples

if TYPE_CHECKING:
    from simulation.world import World


class Cluster:
    """One slot per node. A frozen node can still be assigned: its freeze is not yet detected."""

    def __init__(self, world: World, nodes: int) -> None:
        self.world = world
        self.nodes = [Node(f"n{i}") for i in range(nodes)]
        self.names = nodes
        # How many slots the run may have, because another run needs some.
        self.limit: int | None = None
        self.pending: list[int] = []
        self.placed: dict[int, Node] = {}
        self.requested: set[int] = set()
        self.released: set[int] = set()
        self.processes: dict[int, Process] = {}
        # Since when Ray's control store does not answer; calls that need it wait in `stalled`.
        self.away_since: float | None = None
        self.stalled: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # --- the control store ---

    def lose_store(self) -> None:
        if self.away_since is None:
            self.away_since = self.world.clock.now
            self.world.clock.after(4.0 + self.world.rng.uniform(0.0, 1.0), self._notice_away, self.away_since)

    def _notice_away(self, since: float) -> None:
        if self.away_since == since:
            self.world.tell(ev.ControlStoreAway(self.world.clock.now - since), 0.0)

    def restore_store(self) -> None:
        if self.away_since is None:
            return
        self.world.tell(ev.ControlStoreBack(self.world.clock.now - self.away_since), 0.0)
        self.away_since = None
        stalled, self.stalled = self.stalled, []
        for call, args in stalled:
            self.world.clock.after(self.world.rng.uniform(0.0, 1.0), call, *args)
        self.place()

    def when_back(self, call: Callable[..., None], *args: Any) -> None:
        """Call now, or when the control store is back."""
        if self.away_since is None:
            call(*args)
        else:
            self.stalled.append((call, args))

    # --- slots and processes ---

    def request(self, slot: int) -> None:
        self.when_back(self._request, slot)

    def _request(self, slot: int) -> None:
        if slot in self.placed:
            self.world.tell(ev.SlotPlaced(slot, self.placed[slot].name), 0.1)
        elif slot in self.released:
            self.world.tell(ev.SlotLost(slot, "its group is gone"), 0.1)
        elif slot not in self.pending:
            self.requested.add(slot)
            self.pending.append(slot)
            self.world.clock.after(self.world.rng.uniform(*self.world.place_s), self.place)

    def place(self) -> None:
        if self.away_since is not None:
            return
        free = [node for node in self.nodes if node.alive and node.slot is None and self._takes(node)]
        while self.pending and free:
            slot = self.pending.pop(0)
            if self.world.slot_fails():
                self.released.add(slot)
                self.world.tell(ev.SlotLost(slot, "the group could not be created"), 0.05)
                continue
            node = free.pop(self.world.rng.randrange(len(free)))
            node.slot, self.placed[slot] = slot, node
            self.world.tell(ev.SlotPlaced(slot, node.name), self.world.rng.uniform(0.01, 0.3))

    def _takes(self, node: Node) -> bool:
        """Whether a slot may be placed there: rarely on a draining node, as before the notice has spread."""
        return node.draining is None or self.world.rng.random() < 0.05

    def drain(self, node: Node, deadline: float) -> None:
        node.draining = deadline
        self.tell_draining()

    def share(self, limit: int | None) -> None:
        """Another run needs slots; None: no other run needs any."""
        self.limit = limit
        self.tell_share()

    def tell_share(self) -> None:
        self.when_back(self._tell_share)

    def _tell_share(self) -> None:
        self.world.tell(ev.SlotsShared(self.limit, "another run waits" if self.limit is not None else ""), 0.1)

    def tell_draining(self) -> None:
        self.world.clock.after(self.world.rng.uniform(0.0, 1.0), self.when_back, self._tell_draining)

    def _tell_draining(self) -> None:
        # A dead draining node stays listed while the run has a slot on it.
        used = self.world.controller.state.fleet.nodes
        draining = [(n, n.draining) for n in self.nodes if n.draining is not None]
        going = tuple((n.name, deadline) for n, deadline in draining if n.alive or n.name in used)
        self.world.tell(ev.NodesDraining(going), 0.0)

    def release(self, slot: int) -> None:
        self.released.add(slot)
        if slot in self.pending:
            self.pending.remove(slot)
        node = self.placed.pop(slot, None)
        if node is None:
            return
        for process in self.processes.values():
            if process.slot == slot and process.alive:
                self.kill(process)
        self.world.memory.wipe(node)
        self.when_back(self._free, node, slot)

    def _free(self, node: Node, slot: int) -> None:
        if node.slot == slot:
            node.slot = None
        self.world.clock.after(self.world.rng.uniform(0.0, 0.5), self.place)

    def start(self, worker: int, slot: int) -> None:
        if self.away_since is None:
            self._start(worker, slot)
        else:
            self.stalled.append((self._start_late, (worker, slot)))

    def _start_late(self, worker: int, slot: int) -> None:
        """A worker that was abandoned in the meantime is not started."""
        self.world.seen("a start that waited for the control store")
        if worker in self.world.controller.state.fleet.workers:
            self.when_back(self._start, worker, slot)

    def _start(self, worker: int, slot: int) -> None:
        known = self.processes.get(worker)
        if known is not None:
            known.repeat("WorkerReady") if known.alive else self.world.tell(ev.WorkerStartFailed(worker, "gone"), 0.1)
            return
        if slot in self.released and self.world.controller.forgot:
            return
        assert slot not in self.released, f"worker {worker} was started in slot {slot}, which was given back"
        node = self.placed.get(slot)
        if node is None:
            return
        process = self.processes[worker] = Process(self.world, worker, slot, node)
        if not node.alive or (node.lemon and self.world.rng.random() < self.world.plan.lemon_rate):
            process.alive = False
            self.world.tell(ev.WorkerStartFailed(worker, "it did not start"), self.world.rng.uniform(0.1, 1.0))
        else:
            process.act(self.world.rng.uniform(0.2, 2.0), process.ready)

    def kill(self, process: Process) -> None:
        """The controller's kill does not reach a frozen process, which wakes up later as a zombie."""
        if process.frozen and self.world.rng.random() < 0.5:
            return
        process.die()

    def lose(self, node: Node) -> list[Process]:
        """Remove the node with everything on it; returns its workers."""
        node.alive = False
        self.world.memory.wipe(node)
        victims = [process for process in self.processes.values() if process.node is node and process.alive]
        for process in victims:
            process.die()
        return victims

    def add(self) -> None:
        self.names += 1
        self.nodes.append(Node(f"n{self.names - 1}"))
        self.place()


class Storage:
    """Checkpoints of whole groups. `down`: writes fail and are retried. `unreached`: nodes whose writes fail."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.down = False
        self.unreached: set[str] = set()
        self.corrupt: set[str] = set()
        self.committed: list[tuple[str, int]] = list(world.plan.earlier)
        self.corrupt |= {name for name, _ in self.committed[:-1] if world.corrupts(len(self.committed))}

    def save(self, group: Group) -> None:
        delay = self.world.rng.uniform(0.2, 1.5)
        self.world.clock.after(delay, self._commit, group, group.step, group.samples, 0)

    def _commit(self, group: Group, step: int, samples: Samples, tries: int) -> None:
        # A shard that was lost with its process, or that a controller forgot, never becomes a checkpoint.
        if any(not member.alive for member in group.members) or self.world.loses_commit(step):
            return
        cut = [member for member in group.members if member.node.name in self.unreached]
        if self.down or cut or any(member.frozen for member in group.members):
            if self.down:
                self.world.tell(ev.SaveFailing(step, "503 slow down", 1.0), 0.05)
            for member in cut:
                self.world.tell(ev.SaveFailing(step, "no answer", 1.0, member.worker), 0.05)
            if tries < 400:
                self.world.clock.after(1.0, self._commit, group, step, samples, tries + 1)
            return
        name = f"{step:06d}-{group.number}"
        self.world.saved[name] = samples
        if (name, step) not in self.committed:
            self.committed.append((name, step))
            if self.world.corrupts(len(self.committed)):
                self.corrupt.add(name)
        self.world.tell(ev.CheckpointCommitted(name, step, group.number), self.world.rng.uniform(0.01, 0.3))

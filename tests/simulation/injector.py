"""Injects faults into the simulated world: the effect of each kind of fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic.core import events as ev
from elastic.core.run.phase import Joining, Training
from simulation.faults import Fault
from simulation.processes import Node, Process

if TYPE_CHECKING:
    from simulation.world import World


class Injector:
    def __init__(self, world: World) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.rng
        self.cluster, self.storage, self.controller = world.cluster, world.storage, world.controller
        self.healed = False
        self.at_stages = [fault for fault in world.plan.faults if fault.phase]
        for fault in world.plan.faults:
            if not fault.phase:
                self.clock.at(world.begin_s + fault.time, self.apply, fault)
        self.clock.at(world.begin_s + world.plan.horizon_s, self.heal)

    def stage_entered(self, phase: str) -> None:
        for fault in [fault for fault in self.at_stages if fault.phase == phase][:1]:
            self.at_stages.remove(fault)
            self.clock.after(fault.time, self.apply, fault)

    def apply(self, fault: Fault) -> None:
        if not self.healed and not self.controller.over:
            getattr(self, f"_{fault.kind}")(fault)

    def _nodes(self) -> list[Node]:
        return [node for node in self.cluster.nodes if node.alive and node.slot is not None]

    def _processes(self) -> list[Process]:
        return [process for process in self.cluster.processes.values() if process.alive and not process.frozen]

    def _pick(self, fault: Fault, items: list[Any]) -> Any:
        return items[int(fault.arg * len(items))] if items else None

    def _kill_node(self, fault: Fault) -> None:
        node = self._pick(fault, self._nodes())
        if node is None:
            return
        slot, victims = node.slot, self.cluster.lose(node)
        if victims and self.rng.random() < 0.4:
            self.world.died(victims[0])
        if victims and self.rng.random() < 0.2:
            self.clock.after(1.0, self.world.silence, victims, node)
        lost = ev.SlotLost(slot, f"node {node.name} is gone")
        if self.cluster.away_since is not None and fault.arg < 0.5:
            # Only Ray could have reported it; its heartbeats cease.
            self.cluster.when_back(self.world.tell, lost, 0.0)
            self.clock.after(1.0, self.world.silence, victims, node)
        else:
            self.world.tell(lost, self.rng.uniform(0.3, 1.5))
        if fault.lasts_s:
            self.clock.after(fault.lasts_s, self.cluster.add)

    def _lose_server(self, fault: Fault) -> None:
        """A server of the trace, named by `arg`: the same server fails repeatedly."""
        node = self.cluster.nodes[int(fault.arg)]
        if node.alive:
            self.cluster.lose(node)
            if node.slot is not None:
                self.world.tell(ev.SlotLost(node.slot, f"node {node.name} is gone"), self.rng.uniform(0.3, 1.5))
            self.clock.after(fault.lasts_s, self._repaired, node)

    def _freeze_server(self, fault: Fault) -> None:
        self._freeze(self.cluster.nodes[int(fault.arg)], fault.lasts_s)

    def _repaired(self, node: Node) -> None:
        if node.slot is not None and node.slot not in self.cluster.released:
            self.clock.after(1.0, self._repaired, node)
            return
        node.alive, node.frozen, node.slot = True, False, None
        self.cluster.place()

    def _freeze_node(self, fault: Fault) -> None:
        node = self._pick(fault, [node for node in self._nodes() if not node.frozen])
        if node is not None:
            self._freeze(node, fault.lasts_s)

    def _freeze(self, node: Node, lasts_s: float) -> None:
        if node.frozen or not node.alive:
            return
        node.frozen = True
        processes = [process for process in self.cluster.processes.values() if process.node is node and process.alive]
        self.clock.after(1.0, self.world.silence, processes, node)
        self.clock.after(lasts_s or 1e9, self._thaw, node)

    def _thaw(self, node: Node) -> None:
        if node.frozen:
            node.frozen = False
            self.world.seen("late waker")
            for process in self.cluster.processes.values():
                if process.node is node and process.alive:
                    process.thaw()
            self.cluster.place()

    def _freeze_worker(self, fault: Fault) -> None:
        process = self._pick(fault, self._processes())
        if process is not None:
            process.stopped = True
            self.clock.after(1.0, self.world.silence, [process], None)
            self.clock.after(fault.lasts_s or 1e9, self._thaw_worker, process)

    def _thaw_worker(self, process: Process) -> None:
        process.stopped = False
        if process.alive:
            process.thaw()

    def _kill_worker(self, fault: Fault) -> None:
        process = self._pick(fault, self._processes())
        if process is not None:
            process.die()
            self.world.died(process)

    def _hang_worker(self, fault: Fault) -> None:
        process = self._pick(fault, self._processes())
        if process is not None:
            process.hung = True

    def _stubborn_worker(self, fault: Fault) -> None:
        process = self._pick(fault, self._processes())
        if process is not None:
            process.stubborn = True

    def _false_alarm(self, fault: Fault) -> None:
        process = self._pick(fault, self._processes())
        if process is not None:
            nodes = (process.node.name,) if self.rng.random() < 0.5 else ()
            self.world.tell(ev.WorkersSilent((process.worker,), 1.0, nodes), 0.0)

    def _break_group(self, fault: Fault) -> None:
        """The network between two members fails: all workers live, but the collective fails."""
        group = self.controller.groups.get(self.controller.state.generation)
        if group is not None and not group.broken and isinstance(self.controller.state.phase, Training | Joining):
            group.broken = True
            member = self._pick(fault, group.members)
            member.act(0.01, member.notice_broken, group)

    def _cut(self, fault: Fault) -> None:
        """Two nodes cannot reach each other; the controller reaches both."""
        nodes = self._nodes()
        if len(nodes) < 2:
            return
        first = self._pick(fault, nodes)
        other = self.rng.choice([node for node in nodes if node is not first])
        pair = frozenset((first.name, other.name))
        self.world.cuts.add(pair)
        self.clock.after(fault.lasts_s, self.world.cuts.discard, pair)
        group = self.controller.groups.get(self.controller.state.generation)
        if group is not None and self.world.is_cut(group.members):
            group.cannot_talk()

    def _glitch(self, fault: Fault) -> None:
        """The current step becomes non-finite, whatever its samples are."""
        group = self.controller.groups.get(self.controller.state.generation)
        if group is not None:
            group.glitch = True

    def _miscompute(self, fault: Fault) -> None:
        """An audit of the current step finds that ranks compute different numbers."""
        group = self.controller.groups.get(self.controller.state.generation)
        if group is not None:
            group.miscomputes = True

    def _slow_worker(self, fault: Fault) -> None:
        """One member is reported as slower than its peers, twice."""
        state = self.controller.state
        member = self._pick(fault, list(state.members))
        for confirmed in (False, True) if member is not None else ():
            event = ev.StragglerFound(state.generation, member, 1.3, 2.6, 2.0, 3 + confirmed, confirmed)
            self.world.tell(event, 0.1 + confirmed)

    def _failing_device(self, fault: Fault) -> None:
        """The GPU of one worker reports an error, and then that it will not last."""
        worker = self._pick(fault, list(self.controller.state.fleet.workers))
        for unfit in (False, True) if worker is not None else ():
            self.world.tell(ev.DeviceFailed(worker, "0", "Xid 48", unfit), 0.1 + unfit)

    def _drain_node(self, fault: Fault) -> None:
        """A drain notice; at its deadline the node ends."""
        node = self._pick(fault, [node for node in self._nodes() if not node.draining])
        if node is not None:
            self.cluster.drain(node, self.clock.now + fault.lasts_s)
            self.clock.after(fault.lasts_s, self._drained, node)

    def _drained(self, node: Node) -> None:
        if node.alive and node.draining is not None:
            left = node.slot is None or not any(p.node is node and p.inside for p in self.cluster.processes.values())
            self.world.seen("drained in time" if left else "drained too late")
            slot = node.slot
            self.cluster.lose(node)
            if slot is not None:
                self.world.tell(ev.SlotLost(slot, f"node {node.name} is gone"), self.rng.uniform(0.3, 1.5))
            self.cluster.tell_draining()
            self.clock.after(self.rng.uniform(0.0, 20.0), self.cluster.add)

    def _drain_cancelled(self, fault: Fault) -> None:
        node = self._pick(fault, [node for node in self._nodes() if not node.draining])
        if node is not None:
            self.cluster.drain(node, self.clock.now + 2 * fault.lasts_s)
            self.clock.after(fault.lasts_s, self._stays, node)

    def _stays(self, node: Node) -> None:
        if node.alive:
            self.world.seen("a drain that was cancelled")
            node.draining = None
            self.cluster.tell_draining()
            self.cluster.place()

    def _drain_forever(self, fault: Fault) -> None:
        """Without a deadline: the node ends when nothing runs on it."""
        node = self._pick(fault, [node for node in self._nodes() if not node.draining])
        if node is not None:
            self.cluster.drain(node, 0.0)
            self._wait_until_empty(node)

    def _wait_until_empty(self, node: Node) -> None:
        if node.slot is None:
            self._drained(node)
        elif node.alive and not self.controller.over:
            self.clock.after(1.0, self._wait_until_empty, node)

    def _other_run(self, fault: Fault) -> None:
        """Another run needs slots for a while."""
        self.cluster.share(int(fault.arg * self.controller.state.settings.scaling.max_slots))
        self.clock.after(fault.lasts_s, self.cluster.share, None)

    def _control_store_away(self, fault: Fault) -> None:
        self.cluster.lose_store()
        self.clock.after(fault.lasts_s, self.cluster.restore_store)

    def _storage_down(self, fault: Fault) -> None:
        self.storage.down = True
        self.clock.after(fault.lasts_s, self._storage_up)

    def _storage_up(self) -> None:
        self.storage.down = False

    def _storage_cut(self, fault: Fault) -> None:
        """One node cannot reach storage; everything else it can."""
        node = self._pick(fault, self._nodes())
        if node is not None:
            self.storage.unreached.add(node.name)
            self.clock.after(fault.lasts_s, self.storage.unreached.discard, node.name)

    def _lemon(self, fault: Fault) -> None:
        node = self._pick(fault, self.cluster.nodes)
        if node is not None:
            node.lemon = True

    def _crash_controller(self, fault: Fault) -> None:
        self.controller.crash(fault.lasts_s, int(fault.arg * 4) if fault.arg < 0.5 else None)

    def _lose_message(self, fault: Fault) -> None:
        """The controller is killed after it has accepted the next message and before it journals it."""
        self.controller.down_s, self.controller.loses_next = fault.lasts_s, self.controller.up

    def _journal_away(self, fault: Fault) -> None:
        if self.controller.up and not self.controller.journal_away:
            self.controller.journal_away = True
            self.clock.after(fault.lasts_s, self._journal_back)

    def _journal_back(self) -> None:
        if self.controller.journal_away:
            self.controller.journal_back()

    def _stop(self, fault: Fault) -> None:
        self.world.tell(ev.StopRequested("a person asked"), 0.0)

    def _add_node(self, fault: Fault) -> None:
        self.cluster.add()

    def _nonsense(self, fault: Fault) -> None:
        """A worker sends false messages: old generations, steps that never were done, checkpoints not restored."""
        worker, old = int(fault.arg * 10), max(0, self.controller.state.generation - 1)
        lies: list[ev.Event] = [
            ev.TrainingReached(old, worker, 7), ev.FirstStepDone(old, 9), ev.WorkerCompleted(old, worker, 10**6, True),
            ev.CollectiveFailed(old, worker, 10**6, "lie"), ev.WorkerLeft(old, worker, 10**6),
            ev.StopPromised(old, worker, 10**6), ev.GroupJoined(old + 7, worker), ev.WorkerReady(10**6, 1, "?"),
            ev.ProbeAnswered(10**6), ev.SlotPlaced(10**6, "?"), ev.WorkerDied(10**6, "?"), ev.SlotLost(10**6, "?"),
            ev.WorkerLeft(old + 1, 10**6, 3), ev.CollectiveFailed(old + 1, 10**6, 10**6, "lie"),
            ev.WorkerCompleted(old + 1, 10**6, 10**6, True), ev.StopPromised(old + 1, 10**6, 10**6),
            ev.AnomalyFound(old, worker, 3, "loss", "nan", ((0, 9),)),
            ev.AnomalyFound(old + 1, 10**6, 3, "loss", "nan", ((0, 9),)),
            ev.AuditFailed(old, worker, 3, (0,), True, "lie"), ev.AuditFailed(old + 1, 10**6, 3, (0,), True, "lie"),
            ev.StepSkipped(old, 3, "lie", ((0, 9),)),
            ev.UserCodeFailed(old + 1, 10**6, 10**6, "lie"), ev.RestoreFailed(old + 1, 10**6, "0-0", "lie"),
        ]  # fmt: skip
        for lie in lies:
            self.world.tell(lie, self.rng.uniform(0, 0.1))
        measures: list[ev.Event] = [
            ev.StepTimeMeasured(old, 9.0), ev.StepTimeMeasured(old + 1, 0.0), ev.NodeMeasured("?", (("gemm", 0.0),)),
            ev.DeviceFailed(10_000, "0", "Xid 48", unfit=True),
            ev.CollectivesSlowed(old, 2.0, 0.0, 0.0, 3),
        ]  # fmt: skip
        for lie in measures:
            self.world.tell(lie, 0.05)

    def heal(self) -> None:
        """No more faults, and nodes are available: from here on the run must make progress."""
        self.healed = True
        self.storage.down = False
        self.storage.unreached.clear()
        self._journal_back()
        self.cluster.restore_store()
        self.world.cuts.clear()
        for node in self.cluster.nodes:
            node.lemon = False
            self._thaw(node)
        for process in self.cluster.processes.values():
            self._thaw_worker(process)
        alive = sum(node.alive for node in self.cluster.nodes)
        for _ in range(self.world.plan.settings.scaling.max_slots - alive if self.world.plan.recovers else 0):
            self.cluster.add()

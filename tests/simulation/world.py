"""The simulated world: a cluster, a storage and a network around the real state machine, driven by one seed."""

from __future__ import annotations

from random import Random
from typing import Any

from elastic.core import events as ev
from elastic.core.state import Joining, RunState, SlotPhase, Training, WorkerPhase
from simulation.clock import Clock
from simulation.cluster import Cluster, Storage
from simulation.controller import Controller
from simulation.faults import Fault, Plan
from simulation.processes import Group, Node, Process


class World:
    """One run. `plan` says how large it is and what goes wrong; after `plan.horizon_s` nothing goes wrong any more."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.rng = Random(f"world {seed}")
        self.plan, self.clock = plan, Clock()
        self.begin_s = self.clock.now
        self.max_steps, self.step_s, self.place_s = plan.max_steps, plan.step_s, plan.place_s
        self.reaches_end = not plan.returns_early
        self.healed = False
        self.sometimes: set[str] = set()
        self.storage = Storage(self)
        self.cluster = Cluster(self, plan.nodes)
        self.controller = Controller(self, plan.settings)
        self.stage_faults = [fault for fault in plan.faults if fault.stage]

    # --- running ---

    def run(self) -> None:
        """To the end of the run. Raises AssertionError when it does not come, or a rule is broken on the way."""
        for fault in self.plan.faults:
            if not fault.stage:
                self.clock.at(self.begin_s + fault.time, self.apply, fault)
        self.clock.at(self.begin_s + self.plan.horizon_s, self.heal)
        self.controller.deliver(ev.RunStarted(self.plan.earlier, self.plan.earlier_generation))
        self.clock.run(self.begin_s + self.plan.horizon_s + self.plan.patience_s, lambda: self.controller.over)
        self.controller.invariants.at_end(self.controller)

    def seen(self, what: str) -> None:
        self.sometimes.add(what)

    def stage_entered(self, stage: str) -> None:
        self.seen(f"stage {stage}")
        for fault in [fault for fault in self.stage_faults if fault.stage == stage][:1]:
            self.stage_faults.remove(fault)
            self.clock.after(fault.time, self.apply, fault)

    def apply(self, fault: Fault) -> None:
        if not self.healed and not self.controller.over:
            getattr(self, f"_{fault.kind}")(fault)

    # --- the network ---

    def send(self, process: Process, event: ev.Event) -> None:
        """From a worker: in order, late, sometimes twice, never lost (it is repeated until it is acknowledged)."""
        arrives = max(self.clock.now + self.rng.expovariate(20), process.sent_until + 1e-6)
        process.sent_until = arrives
        self.clock.at(arrives, self.controller.deliver, event)
        if self.rng.random() < 0.1:
            self.clock.at(arrives + self.rng.uniform(0.0, 4.0), self.controller.deliver, event)

    def tell(self, event: ev.Event, delay: float) -> None:
        """From the controller's own helpers: watchers, committer, executor."""
        self.clock.after(delay, self.controller.deliver, event)

    def ask(self, worker: int, what: str, *args: Any) -> None:
        """A call to a worker. One that is dead is found out to be so."""
        process = self.cluster.processes.get(worker)
        if process is None or not process.alive:
            self.tell(ev.WorkerDied(worker, "the call found it dead"), self.rng.uniform(0.05, 1.0))
        else:
            process.act(self.rng.expovariate(20), getattr(process, what), *args)

    def probe(self, worker: int) -> None:
        process = self.cluster.processes.get(worker)
        if process is not None and self.rng.random() > 0.1:
            process.act(self.rng.uniform(0.01, 0.45), self.send, process, ev.ProbeAnswered(worker))

    # --- watchers: what the detector would find out ---

    def watch(self, group: Group) -> None:
        """Progress: reported again after every limit while it fails to come."""
        limit = self.controller.settings.failures.hang_floor_s
        state = self.controller.state
        if state.generation != group.number or self.controller.over:
            return
        stalled = self.clock.now - group.progress_at
        if self.controller.up and isinstance(state.stage, Training) and stalled >= limit:
            self.controller.deliver(ev.ProgressStalled(group.number, group.step, stalled, limit))
        self.clock.after(limit, self.watch, group)

    def silence(self, processes: list[Process], node: Node | None) -> None:
        """Silent workers are reported, and again after every second of silence."""
        silent = tuple(p.worker for p in processes if p.frozen or not p.alive)
        silent = tuple(worker for worker in silent if worker in self.controller.state.workers)
        if not silent or self.controller.over:
            return
        whole = node is not None and (node.frozen or not node.alive)
        if self.controller.up:
            self.controller.deliver(ev.WorkersSilent(silent, 1.0, (node.name,) if whole and node else ()))
        self.clock.after(1.0, self.silence, processes, node)

    def died(self, process: Process) -> None:
        if self.rng.random() < 0.2:
            self.clock.after(1.0, self.silence, [process], None)
        else:
            self.tell(ev.WorkerDied(process.worker, "exit code -9"), self.rng.uniform(0.05, 1.0))

    def reattach(self, state: RunState) -> None:
        """What a restarted controller finds: strangers are ended, and the dead are noticed."""
        for slot in [slot for slot in (*self.cluster.pending, *self.cluster.placed) if slot not in state.slots]:
            self.cluster.release(slot)
        for process in self.cluster.processes.values():
            if process.alive and process.worker not in state.workers:
                self.cluster.kill(process)
        for worker in state.workers.values():
            known = self.cluster.processes.get(worker.id)
            if worker.phase is not WorkerPhase.STARTING and known is not None and not known.alive:
                self.tell(ev.WorkerDied(worker.id, "it was gone when the controller came back"), 0.05)
        for slot in state.slots.values():
            node = self.cluster.placed.get(slot.id)
            if slot.phase is SlotPhase.PLACED and (node is None or not node.alive):
                self.tell(ev.SlotLost(slot.id, "its node was gone when the controller came back"), 0.05)

    # --- training ---

    def step_ended(self, group: Group) -> None:
        if group.step == group.start + 1:
            self.tell(ev.FirstStepDone(group.number, group.step), self.rng.uniform(0.01, 0.3))
        last = group.step >= self.max_steps
        if last or group.step % self.plan.save_every == 0 or any(m.stop_at == group.step for m in group.members):
            self.storage.save(group)

    def raises(self, step: int, members: list[Process]) -> Process | None:
        if step not in self.plan.bugs:
            return None
        if not self.plan.bugs_stay:
            self.plan.bugs.remove(step)
        return members[self.rng.randrange(len(members))]

    def user_error(self, generation: int, process: Process, step: int) -> ev.UserCodeFailed:
        return ev.UserCodeFailed(generation, process.worker, step, "ValueError: bad batch", "...", self.plan.usage)

    def slot_fails(self) -> bool:
        return not self.healed and self.rng.random() < self.plan.slot_failures

    def loses_commit(self, step: int) -> bool:
        return self.rng.random() < self.plan.lost_commits and not (self.plan.liveness and step >= self.max_steps)

    def corrupts(self, number: int) -> bool:
        """A run that has to finish keeps its first checkpoint good."""
        return self.rng.random() < self.plan.corruption and not (self.plan.liveness and number == 1)

    # --- faults ---

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
            self.died(victims[0])
        if victims and self.rng.random() < 0.2:
            self.clock.after(1.0, self.silence, victims, node)
        self.tell(ev.SlotLost(slot, f"node {node.name} is gone"), self.rng.uniform(0.3, 1.5))
        if fault.lasts_s:
            self.clock.after(fault.lasts_s, self.cluster.add)

    def _lose_server(self, fault: Fault) -> None:
        """A server of the trace, named by `arg`: the same one fails again and again."""
        node = self.cluster.nodes[int(fault.arg)]
        if node.alive:
            self.cluster.lose(node)
            if node.slot is not None:
                self.tell(ev.SlotLost(node.slot, f"node {node.name} is gone"), self.rng.uniform(0.3, 1.5))
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
        self.clock.after(1.0, self.silence, processes, node)
        self.clock.after(lasts_s or 1e9, self._thaw, node)

    def _thaw(self, node: Node) -> None:
        if node.frozen:
            node.frozen = False
            self.seen("late waker")
            for process in self.cluster.processes.values():
                if process.node is node and process.alive:
                    process.thaw()
            self.cluster.place()

    def _freeze_worker(self, fault: Fault) -> None:
        process = self._pick(fault, self._processes())
        if process is not None:
            process.stopped = True
            self.clock.after(1.0, self.silence, [process], None)
            self.clock.after(fault.lasts_s or 1e9, self._thaw_worker, process)

    def _thaw_worker(self, process: Process) -> None:
        process.stopped = False
        if process.alive:
            process.thaw()

    def _kill_worker(self, fault: Fault) -> None:
        process = self._pick(fault, self._processes())
        if process is not None:
            process.die()
            self.died(process)

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
            self.tell(ev.WorkersSilent((process.worker,), 1.0, nodes), 0.0)

    def _break_group(self, fault: Fault) -> None:
        """The network between two members fails: everybody is alive, the collective is not."""
        group = self.controller.groups.get(self.controller.state.generation)
        if group is not None and not group.broken and isinstance(self.controller.state.stage, Training | Joining):
            group.broken = True
            member = self._pick(fault, group.members)
            member.act(0.01, member.notice_broken, group)

    def _storage_down(self, fault: Fault) -> None:
        self.storage.down = True
        self.clock.after(fault.lasts_s, self._storage_up)

    def _storage_up(self) -> None:
        self.storage.down = False

    def _lemon(self, fault: Fault) -> None:
        node = self._pick(fault, self.cluster.nodes)
        if node is not None:
            node.lemon = True

    def _crash_controller(self, fault: Fault) -> None:
        self.controller.crash(fault.lasts_s, int(fault.arg * 4) if fault.arg < 0.5 else None)

    def _stop(self, fault: Fault) -> None:
        self.tell(ev.StopRequested("a person asked"), 0.0)

    def _add_node(self, fault: Fault) -> None:
        self.cluster.add()

    def _nonsense(self, fault: Fault) -> None:
        """A worker lies: old generations, steps that never were, checkpoints that nobody restores."""
        worker, old = int(fault.arg * 10), max(0, self.controller.state.generation - 1)
        lies: list[ev.Event] = [
            ev.TrainingReached(old, worker, 7), ev.FirstStepDone(old, 9), ev.WorkerCompleted(old, worker, 10**6, True),
            ev.CollectiveFailed(old, worker, 10**6, "lie"), ev.WorkerLeft(old, worker, 10**6),
            ev.HoldAnswered(old, worker, 10**6), ev.GroupJoined(old + 7, worker), ev.WorkerReady(10**6, 1, "?"),
            ev.ProbeAnswered(10**6), ev.SlotPlaced(10**6, "?"), ev.WorkerDied(10**6, "?"), ev.SlotLost(10**6, "?"),
            ev.WorkerLeft(old + 1, 10**6, 3), ev.CollectiveFailed(old + 1, 10**6, 10**6, "lie"),
            ev.WorkerCompleted(old + 1, 10**6, 10**6, True), ev.HoldAnswered(old + 1, 10**6, 10**6),
            ev.UserCodeFailed(old + 1, 10**6, 10**6, "lie"), ev.RestoreFailed(old + 1, 10**6, "0-0", "lie"),
        ]  # fmt: skip
        for lie in lies:
            self.tell(lie, self.rng.uniform(0, 0.1))

    def heal(self) -> None:
        """From here on nothing goes wrong, and nodes are there: now the run has no excuse."""
        self.healed = True
        self.storage.down = False
        for node in self.cluster.nodes:
            node.lemon = False
            self._thaw(node)
        for process in self.cluster.processes.values():
            self._thaw_worker(process)
        alive = sum(node.alive for node in self.cluster.nodes)
        for _ in range(self.plan.settings.scaling.max_slots - alive if self.plan.recovers else 0):
            self.cluster.add()

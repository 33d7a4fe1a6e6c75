"""The simulated world: a cluster, a storage and a network around the real state machine, driven by one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.data.steps import Range
from elastic.core.run.phase import Training
from elastic.core.run.state import RunState, SlotPhase, WorkerPhase
from elastic.core.sharding.mesh_memory import HeldState, HeldTensors, state_bytes
from elastic.core.typed_json import encode
from simulation.clock import Clock
from simulation.cluster import Cluster, Storage
from simulation.controller import Controller
from simulation.faults import Plan
from simulation.injector import Injector
from simulation.memory import Memory
from simulation.processes import Group, Node, Process
from simulation.samples import BATCH, Samples

# What a run with several meshes trains: layers that are cut, experts, and what all of it takes besides.
MODEL = HeldState(
    "rows",
    (
        HeldTensors(120, 8, 4, data_bytes=16, cut=0, group=0, summed_bytes=2, reduced_bytes=4),
        HeldTensors(12, 80, 4, data_bytes=16, experts=1, group=1, summed_bytes=2, reduced_bytes=4),
    ),
    slices=2,
    passes=4,
)
MODEL_REST = 60_000


class World:
    """One run. `plan` defines its size and its faults; after `plan.horizon_s` there are no more faults."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.rng = Random(f"world {seed}")
        self.plan, self.clock = plan, Clock()
        self.begin_s = self.clock.now
        self.max_steps, self.step_s, self.place_s = plan.max_steps, plan.step_s, plan.place_s
        self.reaches_end = not plan.returns_early
        self.sometimes: set[str] = set()
        # Pairs of nodes that cannot reach each other.
        self.cuts: set[frozenset[str]] = set()
        # The samples that each checkpoint and each snapshot was trained on.
        self.saved = {name: Samples(((0, step * BATCH),) if step else ()) for name, step in plan.earlier}
        self.storage = Storage(self)
        self.memory = Memory(self)
        self.cluster = Cluster(self, plan.nodes)
        self.controller = Controller(self, plan.settings)
        self.injector = Injector(self)

    # --- running ---

    def run(self) -> None:
        """Play to the end of the run. Raises AssertionError if the run does not end or a rule is broken."""
        self.controller.deliver(ev.RunStarted(self.plan.earlier, self.plan.earlier_generation))
        self.clock.run(self.begin_s + self.plan.horizon_s + self.plan.patience_s, lambda: self.controller.over)
        self.controller.invariants.at_end(self.controller)

    def seen(self, what: str) -> None:
        self.sometimes.add(what)

    def stage_entered(self, phase: str) -> None:
        self.seen(f"phase {phase}")
        self.injector.stage_entered(phase)

    # --- the network ---

    def send(self, process: Process, event: ev.Event) -> None:
        """A worker's message: in order, delayed, sometimes twice, never lost (it is repeated until acknowledged)."""
        arrives = max(self.clock.now + self.rng.expovariate(20), process.sent_until + 1e-6)
        process.sent_until = arrives
        self.clock.at(arrives, self.controller.deliver, event)
        if self.rng.random() < 0.1:
            self.clock.at(arrives + self.rng.uniform(0.0, 4.0), self.controller.deliver, event)

    def tell(self, event: ev.Event, delay: float) -> None:
        """An event of the controller's own parts: watchers, committer, executor."""
        self.clock.after(delay, self.controller.deliver, event)

    def ask(self, worker: int, what: str, *args: Any) -> None:
        """A call to a worker. A dead worker is detected by it."""
        process = self.cluster.processes.get(worker)
        if process is None or not process.alive:
            self.tell(ev.WorkerDied(worker, "the call found it dead"), self.rng.uniform(0.05, 1.0))
        else:
            process.act(self.rng.expovariate(20), getattr(process, what), *args)

    def probe(self, worker: int) -> None:
        process = self.cluster.processes.get(worker)
        if process is not None and self.rng.random() > 0.1:
            process.act(self.rng.uniform(0.01, 0.45), self.send, process, ev.ProbeAnswered(worker))

    def measure(self, node: str) -> None:
        """One node of five is slow; one of twenty gives no answer."""
        rng = Random(f"speed {node} {self.begin_s} {self.plan.settings.run_id}")
        rate, failed = rng.choice((1.0, 1.0, 1.0, 1.0, 0.2)) * rng.uniform(0.98, 1.02), rng.random() < 0.05
        told = ev.NodeMeasured(node, failed="no answer") if failed else ev.NodeMeasured(node, (("gemm", rate),))
        self.tell(told, rng.uniform(0.5, 3.0))

    # --- watchers: what the failure detector would detect ---

    def watch(self, group: Group) -> None:
        """Missing progress is reported, and again after each further limit."""
        limit = self.controller.settings.failures.hang_floor_s
        state = self.controller.state
        if state.generation != group.number or self.controller.over:
            return
        stalled = self.clock.now - group.progress_at
        if self.controller.up and isinstance(state.phase, Training) and stalled >= limit:
            self.controller.deliver(ev.ProgressStalled(group.number, group.step, stalled, limit))
        self.clock.after(limit, self.watch, group)

    def silence(self, processes: list[Process], node: Node | None) -> None:
        """Silent workers are reported, and again after each further second of silence."""
        silent = tuple(p.worker for p in processes if p.frozen or not p.alive)
        silent = tuple(worker for worker in silent if worker in self.controller.state.fleet.workers)
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

    def reattach(self, state: RunState) -> ev.ControllerRestarted:
        """What a restarted controller finds: unknown actors are ended, and dead workers are noticed."""
        there = [process for process in self.cluster.processes.values() if process.alive]
        known = [process for process in there if process.worker in state.fleet.workers and process.status != "starting"]
        heard = [max(process.generation, process.ended) for process in known if not process.frozen]
        slots = [*self.cluster.pending, *self.cluster.placed]
        found = ev.ControllerRestarted(
            0, max(heard, default=0), max(slots, default=-1) + 1, max([-1, *(p.worker for p in there)]) + 1
        )
        for slot in [slot for slot in (*self.cluster.pending, *self.cluster.placed) if slot not in state.fleet.slots]:
            self.cluster.release(slot)
        for process in self.cluster.processes.values():
            if process.alive and process.worker not in state.fleet.workers:
                self.cluster.kill(process)
        self.cluster.tell_draining()
        self.cluster.tell_share()
        for worker in state.fleet.workers.values():
            known = self.cluster.processes.get(worker.id)
            if worker.phase is not WorkerPhase.STARTING and known is not None and not known.alive:
                self.tell(ev.WorkerDied(worker.id, "it was gone when the controller came back"), 0.05)
        for slot in state.fleet.slots.values():
            node = self.cluster.placed.get(slot.id)
            if slot.phase is SlotPhase.PLACED and (node is None or not node.alive):
                self.tell(ev.SlotLost(slot.id, "its node was gone when the controller came back"), 0.05)
        return found

    def resend(self, state: RunState, lost: list[ev.Event]) -> None:
        """Workers repeat, in order, the messages that no journal has; events that follow from them occur again."""
        written = {id(event) for event, _ in self.controller.journal}
        for process in self.cluster.processes.values():
            if process.alive and process.worker in state.fleet.workers:
                for event in [event for event in process.told if id(event) not in written]:
                    self.send(process, event)
        for event in lost:
            reports = isinstance(event, ev.FirstStepDone | ev.StepSkipped) and event.generation == state.generation
            # A committed checkpoint is in storage, whether or not the controller knows of it.
            if reports or isinstance(event, ev.CheckpointCommitted):
                self.tell(event, self.rng.uniform(0.1, 1.0))

    # --- training ---

    def step_of(self, group: Group) -> float:
        slower = self.plan.settings.scaling.max_workers / len(group.members) if self.plan.linear else 1.0
        return self.step_s * slower

    def step_ended(self, group: Group) -> None:
        if group.step == group.start + 1:
            self.tell(ev.FirstStepDone(group.number, group.step), self.rng.uniform(0.01, 0.3))
        if group.step == group.start + 3:
            self.tell(ev.StepTimeMeasured(group.number, self.step_of(group)), 0.1)
            self.measure_memory(group)
        last, ends = group.step >= self.max_steps, any(m.stop_at == group.step for m in group.members)
        durable = ends and any(m.durable for m in group.members if m.stop_at == group.step)
        if ends:
            group.kept.add(group.step)
        if last or durable or group.step % self.plan.save_every == 0:
            self.storage.save(group)
        if self.plan.settings.snapshots.enabled and (ends or group.step % self.plan.snapshot_every == 0):
            self.memory.take(group)

    def measure_memory(self, group: Group) -> None:
        """What the workers of a run with several meshes would report of its memory."""
        axes = self.controller.state.axes
        if self.plan.limit_bytes is not None and axes and self.controller.state.generation == group.number:
            rest = MODEL_REST // math.prod(axes.values())
            self.tell(ev.MemoryMeasured(group.number, self.plan.limit_bytes, rest, encode(MODEL)), 0.1)

    def needed_bytes(self, axes: Mapping[str, int], world_size: int) -> int:
        """The truth: all of what is no state lies in what the axes cut."""
        shape = self.plan.settings.mesh.shape(axes)
        return state_bytes(MODEL, shape, world_size) + MODEL_REST // math.prod(axes.values())

    def stops_where_it_is(self, group: Group, durable: bool) -> None:
        """The promised step is already done: it is saved now."""
        if group.step not in group.kept and (group.step > group.start or group.stops_at_start):
            group.kept.add(group.step)
            if durable:
                self.storage.save(group)
            if self.plan.settings.snapshots.enabled:
                self.memory.take(group)

    def begun_at_the_end(self, group: Group) -> None:
        """Nothing is left to train; the state, so far only in memory, is saved to storage."""
        if group.base is not None and is_snapshot(group.base):
            self.seen("begun at the end")
            self.storage.save(group)

    def is_bad(self, positions: Range) -> bool:
        return positions[0] // BATCH in self.plan.bad_batches

    def step_skipped(self, group: Group, positions: Range) -> None:
        event = ev.StepSkipped(group.number, group.step + 1, "the loss is nan", (positions,))
        for _ in range(1 + (self.rng.random() < 0.1)):
            self.tell(event, self.rng.uniform(0.01, 0.3))

    def restorable(self, base: str) -> bool:
        return self.memory.readable(base) if is_snapshot(base) else base not in self.storage.corrupt

    def is_cut(self, members: list[Process]) -> bool:
        names = {member.node.name for member in members}
        return any(pair <= names for pair in self.cuts)

    def raises(self, step: int, members: list[Process]) -> Process | None:
        if step not in self.plan.bugs:
            return None
        if not self.plan.bugs_stay:
            self.plan.bugs.remove(step)
        return members[self.rng.randrange(len(members))]

    def user_error(self, generation: int, process: Process, step: int) -> ev.UserCodeFailed:
        return ev.UserCodeFailed(generation, process.worker, step, "ValueError: bad batch", "...", self.plan.usage)

    def slot_fails(self) -> bool:
        return not self.injector.healed and self.rng.random() < self.plan.slot_failures

    def loses_commit(self, step: int) -> bool:
        return self.rng.random() < self.plan.lost_commits and not (self.plan.liveness and step >= self.max_steps)

    def corrupts(self, number: int) -> bool:
        """Whether a checkpoint becomes corrupt; never the first one of a liveness plan."""
        return self.rng.random() < self.plan.corruption and not (self.plan.liveness and number == 1)

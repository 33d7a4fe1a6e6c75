"""Short stories for the state machine: each line is something that happens, and time passes as the story says."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.mesh import MeshSettings
from elastic.core.run import machine
from elastic.core.run.phase import Finished, RunPhase
from elastic.core.run.state import SlotPhase, WorkerPhase
from elastic.core.settings import CalibrationSettings, FailureSettings, RunSettings, ScalingSettings, SnapshotSettings

A = TypeVar("A")


class Scenario:
    """A run of `low` to `high` workers. `last` holds the actions since `do`, `tick` or `wait` was called last."""

    def __init__(
        self,
        low: int = 2,
        high: int = 3,
        per_slot: int = 1,
        gather_s: float = 5.0,
        memory: bool = False,
        policy: Literal["eager", "measured", "patient"] = "eager",
        cell: int = 1,
        max_steps: int | None = None,
        calibration: CalibrationSettings | None = None,
        mesh: MeshSettings | None = None,
        **failures: Any,
    ) -> None:
        scaling = ScalingSettings(low, high, per_slot, gather_s, policy=policy)
        self.now = 1000.0
        self.state = machine.initial(
            RunSettings(
                "r",
                scaling=scaling,
                max_steps=max_steps,
                calibration=calibration or CalibrationSettings(),
                snapshots=SnapshotSettings(memory),
                failures=FailureSettings(**failures),
                mesh=mesh or MeshSettings(cell),
            ),
            self.now,
        )
        self.last: list[act.Action] = []
        self.journal: list[tuple[ev.Event, float]] = []

    # --- telling ---

    def do(self, *events: ev.Event, after: float = 0.01) -> Scenario:
        self.last = []
        for event in events:
            self.now += after
            self._step(event)
        return self

    def wait(self, seconds: float) -> Scenario:
        """Let time pass, with a Tick at every deadline on the way."""
        self.last, until = [], self.now + seconds
        while (deadline := machine.next_deadline(self.state)) is not None and deadline <= until:
            assert deadline > self.now or not self.last, "the clock spins"
            self.now = max(deadline, self.now)
            self._step(ev.Tick())
        self.now = until
        return self

    def _step(self, event: ev.Event) -> None:
        self.journal.append((event, self.now))
        self.state, actions = machine.step(self.state, event, self.now)
        self.last.extend(actions)
        for action in actions:
            if isinstance(action, act.QuerySnapshots) and not self.state.settings.snapshots.enabled:
                # Where nothing is held in memory, only reachability was asked for, and everybody reaches everybody.
                self._step(ev.SnapshotsReported(action.survey))

    # --- common passages ---

    def nodes(self, count: int) -> Scenario:
        """This many pending slots get a node each, and their workers come up."""
        pending = [slot.id for slot in self.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING][:count]
        self.do(*(ev.SlotPlaced(slot, f"node-{slot}") for slot in pending))
        starting = [
            w.id for w in self.state.fleet.workers.values() if w.phase is WorkerPhase.STARTING and w.slot in pending
        ]
        done, events = list(self.last), [ev.WorkerReady(worker, 100 + worker, "host") for worker in starting]
        self.do(*events)
        self.last = done + self.last
        return self

    def join(self) -> Scenario:
        state = self.state
        events = [ev.TrainingReached(state.generation, worker, state.start_step) for worker in state.members]
        return self.do(*events)

    def train(self) -> Scenario:
        """The generation joins and does its first step."""
        return self.join().do(ev.FirstStepDone(self.state.generation, self.state.start_step + 1))

    def started(self, count: int) -> Scenario:
        """From nothing to a generation of `count` workers that trains."""
        self.do(ev.RunStarted()).nodes(count).wait(self.state.settings.scaling.gather_s)
        return self.train()

    def commit(self, step: int) -> Scenario:
        return self.do(ev.CheckpointCommitted(f"c{step}", step, self.state.generation))

    def left(self, step: int, *workers: int) -> Scenario:
        who = workers or self.state.members_inside
        return self.do(*(ev.WorkerLeft(self.state.generation, worker, step) for worker in who))

    def completed(self, step: int, *workers: int, reached_end: bool = True) -> Scenario:
        who = workers or self.state.members_inside
        return self.do(*(ev.WorkerCompleted(self.state.generation, worker, step, reached_end) for worker in who))

    def lose_node(self, worker: int, evidence: str = "the raylet is gone") -> Scenario:
        return self.do(ev.SlotLost(self.state.fleet.workers[worker].slot, evidence))

    def broken(self, *workers: int, step: int = 1) -> Scenario:
        """The collective fails on these members; everybody leaves alive."""
        events = [ev.CollectiveFailed(self.state.generation, worker, step, "peer closed") for worker in workers]
        self.do(*events)
        return self.left(step)

    # --- asking ---

    @property
    def phase(self) -> RunPhase:
        return self.state.phase

    @property
    def end(self) -> tuple[str, str]:
        assert isinstance(self.phase, Finished), self.phase
        return self.phase.status, self.phase.reason

    def acts(self, kind: type[A]) -> list[A]:
        return [action for action in self.last if isinstance(action, kind)]

    def said(self) -> str:
        return "\n".join(note.sentence for note in self.acts(act.Note))

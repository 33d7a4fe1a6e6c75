"""The state of a run. Frozen: `machine.step` returns a new one.

    Waiting --enough workers--> Joining --all members train--> Training --planned end--> Pausing --all left--> Waiting
                                   |                              |                         |
                                   +-------------- evidence of a failure: Ending <----------+
    Training --all completed--> Closing --last checkpoint committed--> Finished
    Closing --some cannot write it--> Waiting, for those who can
    Ending --every member left or written off--> Waiting, or Finished when a budget is spent

A suspicion (silent workers being probed) stands beside the phase: training goes on while it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elastic.core.policy.quarantine import Quarantine
from elastic.core.run.anomaly import Anomaly
from elastic.core.run.incident import Incident
from elastic.core.settings import RunSettings


class SlotPhase(str, Enum):
    PENDING = "pending"
    PLACED = "placed"


class WorkerPhase(str, Enum):
    STARTING = "starting"
    IDLE = "idle"
    MEMBER = "member"


@dataclass(frozen=True)
class Slot:
    """One node's share of the run. A lost slot is removed from the state; its number is never used again."""

    id: int
    phase: SlotPhase
    since: float
    node: str | None = None
    start_failures: int = 0
    # Nodes that it was asked not to be placed on.
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Worker:
    """One worker process. A dead worker is removed; its successor in the same slot has a new number."""

    id: int
    slot: int
    phase: WorkerPhase
    since: float
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True)
class KnownCheckpoint:
    id: str
    step: int


@dataclass(frozen=True)
class Waiting:
    """No generation. `not_before` holds a start back after failures (0: it does not); `again_at` is when the scaling
    policy wants to be asked again."""

    since: float
    reason: str
    not_before: float = 0.0
    again_at: float | None = None


@dataclass(frozen=True)
class Joining:
    since: float
    joined: frozenset[int] = frozenset()
    training: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Training:
    since: float
    first_step_done: bool = False
    completed: frozenset[int] = frozenset()
    all_reached_end: bool = True


@dataclass(frozen=True)
class Pausing:
    """A planned end. `stop_at` is None until every member has answered; then all leave after that many steps."""

    since: float
    deadline: float
    purpose: str
    was: Training
    answers: Mapping[int, int] = field(default_factory=dict)
    stop_at: int | None = None
    # False where the memory of the nodes takes the last step, and storage need not be waited for.
    durable: bool = True


@dataclass(frozen=True)
class Ending:
    """The generation has failed; members that have not left by `deadline` are written off.

    `kind` and `evidence` are the strongest reason known for this one failure (an incident may hold several), `lost` the
    members that it cost, `raised` those whose training function raised.
    """

    since: float
    deadline: float
    kind: str = "collective-failed"
    evidence: str = ""
    lost: frozenset[int] = frozenset()
    raised: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Closing:
    """Every member's function has returned; the run waits for the checkpoint of its last step."""

    since: float
    deadline: float
    step: int
    reached_end: bool


@dataclass(frozen=True)
class Finished:
    since: float
    status: str
    reason: str


RunPhase = Waiting | Joining | Training | Pausing | Ending | Closing | Finished


@dataclass(frozen=True)
class Suspicion:
    """Silent workers, each with the time until which it may answer its probe. `nodes`: their agents are silent too."""

    since: float
    suspects: Mapping[int, float]
    nodes: frozenset[str]
    silence_s: float

    @property
    def deadline(self) -> float:
        return min(self.suspects.values())


@dataclass(frozen=True)
class Survey:
    """The nodes are being asked what their memory holds. Who has not answered by `deadline` holds nothing."""

    number: int
    deadline: float
    reach: bool = False


@dataclass(frozen=True)
class Notice:
    """A node is about to go away, as heard at `since`; by `deadline` (0: it does not say when).

    `gathering`: a replacement may still be found; `urgent`: the deadline is so near that the node is left at any cost.
    """

    since: float
    deadline: float = 0.0
    gathering: bool = True
    urgent: bool = False


@dataclass(frozen=True)
class Streaks:
    """Failures in a row. `mark` is (furthest step, newest checkpoint step) at the last one: beyond it is progress.

    `node_losses` are generations that ended with their nodes, `crashes` those that ended in any other way.
    """

    crashes: int = 0
    node_losses: int = 0
    user_errors: int = 0
    start_failures: int = 0
    slot_failures: int = 0
    in_place: int = 0
    mark: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class RunState:
    settings: RunSettings
    phase: RunPhase
    generation: int = 0
    first_generation: int = 0
    members: tuple[int, ...] = ()
    start_step: int = 0
    base: KnownCheckpoint | None = None
    slots: Mapping[int, Slot] = field(default_factory=dict)
    quarantine: Quarantine = field(default_factory=dict)
    # When this attempt at the run began, in wall clock seconds: of runs of one priority the earlier comes first.
    started_at: float = 0.0
    # What the cluster lacks for `min_workers`, as a sentence; "": nothing.
    shortage: str = ""
    # So many slots at most, for the sake of other runs (None: no limit), and why.
    slot_limit: int | None = None
    slot_limit_reason: str = ""
    # Every node of the cluster that is about to go away.
    draining: Mapping[str, Notice] = field(default_factory=dict)
    workers: Mapping[int, Worker] = field(default_factory=dict)
    next_slot: int = 0
    next_worker: int = 0
    checkpoints: tuple[KnownCheckpoint, ...] = ()
    # What the last survey found in the memory of nodes, newest first; forgotten when a generation begins.
    snapshots: tuple[KnownCheckpoint, ...] = ()
    survey: Survey | None = None
    surveys: int = 0
    # Nodes with a history that were asked, beside this generation, whether they and the others reach each other.
    reached: frozenset[str] = frozenset()
    # The last generation that had to stop taking snapshots into memory.
    memory_lost_in: int = 0
    rejected: tuple[str, ...] = ()
    # Steps whose loss or gradient was no number, oldest first; and every range of positions that is left out for it.
    anomalies: tuple[Anomaly, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    # Slots that are given back (slow, on a node that goes, needed by another run), once the generation that goes on
    # without them trains.
    evicted: tuple[int, ...] = ()
    # Those of them that another run needs.
    ceded: tuple[int, ...] = ()
    furthest_step: int = 0
    streaks: Streaks = field(default_factory=Streaks)
    suspicion: Suspicion | None = None
    incident: Incident | None = None
    incidents: int = 0
    storage_failing: bool = False
    # Workers whose writes have failed since the newest checkpoint, or the begin of the generation.
    cannot_save: tuple[int, ...] = ()
    # Ray's control store does not answer: no slot can be placed and no worker started, and nobody is late with either.
    control_store_away: bool = False
    # Requests for slots are held back until then, after slots that failed; 0: they are not.
    slots_not_before: float = 0.0
    # The run's last step, once every member has done it: when a checkpoint covers it, there is nothing left to do.
    done_step: int | None = None
    stop_reason: str | None = None
    # Why the run is given up, once storage has what so far only memory has: a generation begins that does nothing else.
    gives_up_for: str | None = None
    false_alarms: int = 0

    @property
    def max_slots(self) -> int:
        """Slots that the run may ask for now."""
        most = self.settings.scaling.max_slots
        return most if self.slot_limit is None else min(most, self.slot_limit)

    @property
    def carrying(self) -> frozenset[int]:
        """The slots that members of the generation are in."""
        return frozenset(self.workers[member].slot for member in self.members if member in self.workers)

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def newest_checkpoint(self) -> KnownCheckpoint | None:
        """The newest complete checkpoint that no restore has refused."""
        good = (known for known in self.checkpoints if known.id not in self.rejected)
        return max(good, key=lambda known: known.step, default=None)

    @property
    def newest_snapshot(self) -> KnownCheckpoint | None:
        """The newest snapshot in memory that no restore has refused."""
        return next((known for known in self.snapshots if known.id not in self.rejected), None)

    @property
    def newest_state(self) -> KnownCheckpoint | None:
        """Where the next generation begins: in memory, unless storage is further."""
        snapshot, checkpoint = self.newest_snapshot, self.newest_checkpoint
        if snapshot is None or checkpoint is None:
            return snapshot or checkpoint
        return snapshot if snapshot.step >= checkpoint.step else checkpoint

    @property
    def members_inside(self) -> tuple[int, ...]:
        """Members whose training threads are, as far as is known, still inside the generation."""
        return tuple(w for w in self.members if w in self.workers and self.workers[w].phase is WorkerPhase.MEMBER)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the run's slots, as far as is known."""
        return tuple(dict.fromkeys(slot.node for slot in self.slots.values() if slot.node is not None))

    @property
    def idle(self) -> tuple[Worker, ...]:
        """Workers that could be members now. Those of a slot that is to be given back could not; those on a node that
        is going away only where it takes them to begin at all, and there is time."""
        ready = [w for w in self.workers.values() if w.phase is WorkerPhase.IDLE and w.slot not in self.evicted]
        if not self.draining:
            return tuple(ready)
        notices = [(worker, self.draining.get(self.slots[worker.slot].node or "")) for worker in ready]
        staying = tuple(worker for worker, notice in notices if notice is None)
        if not isinstance(self.phase, Waiting) or len(staying) >= self.settings.scaling.min_workers:
            return staying
        return tuple(worker for worker, notice in notices if notice is None or not notice.urgent)

    def rank_of(self, worker: int) -> int | None:
        return self.members.index(worker) if worker in self.members else None

    def node_of(self, worker: int) -> str | None:
        known = self.workers.get(worker)
        slot = self.slots.get(known.slot) if known else None
        return slot.node if slot else None


# Exit statuses; `jobs` maps them to exit codes.
FINISHED = "finished"
NOT_FINISHED = "not-finished"
USER_CODE_FAILED = "user-code-failed"
USAGE = "usage"
STOPPED = "stopped"
GAVE_UP = "gave-up"
NO_CAPACITY = "no-capacity"
INTEGRITY = "integrity"

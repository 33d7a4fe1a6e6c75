"""The state of a run. Frozen: `machine.step` returns a new one.

`RunState` says in which phase and generation the run is. Three records next to it hold the rest: `Fleet` (nodes, slots,
workers), `Saved` (checkpoints and snapshots) and `Trouble` (failures, suspicions, incidents, anomalies). The phases are
in `phase.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.core.checkpoint.snapshots import Copies
from elastic.core.fleet import Members, Slots, Workers
from elastic.core.fleet import Slot as Slot
from elastic.core.fleet import SlotPhase as SlotPhase
from elastic.core.fleet import Worker as Worker
from elastic.core.fleet import WorkerPhase as WorkerPhase
from elastic.core.incident import Incident
from elastic.core.policy.calibration import Calibration
from elastic.core.policy.measured import Meter
from elastic.core.policy.quarantine import Quarantine
from elastic.core.run.phase import RunPhase, Waiting
from elastic.core.settings import RunSettings
from elastic.core.tables import Numbers
from elastic.core.typed_json import NOT_KEPT


@dataclass(frozen=True)
class KnownCheckpoint:
    id: str
    step: int


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
    """A query for the snapshots in the nodes' memory. Nodes that do not answer by `deadline` count as holding none."""

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
class Anomaly:
    """A step whose loss or gradient was non-finite, or that an audit has refused, found in `generation` after `step`
    finished steps; `evidence` says where and what.

    `undone`: the run went back, so that nothing beyond `step` of that or an earlier generation counts any more.
    """

    generation: int
    step: int
    evidence: str
    undone: bool


@dataclass(frozen=True)
class Fleet:
    """The nodes, slots and workers of the run, and the limits on how many it asks for."""

    slots: Slots = field(default_factory=Slots)
    workers: Workers = field(default_factory=Workers)
    # The members whose training threads are, as far as is known, still inside the generation.
    inside: Numbers = field(default_factory=Numbers)
    next_slot: int = 0
    next_worker: int = 0
    quarantine: Quarantine = field(default_factory=Quarantine)
    # Every node of the cluster that is about to go away.
    draining: Mapping[str, Notice] = field(default_factory=dict)
    # Nodes with a history that were asked, during this generation, whether they and the others reach each other.
    reached: frozenset[str] = frozenset()
    # Slots that are given back (slow, on a draining node, needed by another run) once the next generation trains
    # without them.
    evicted: tuple[int, ...] = ()
    # The evicted slots that another run needs.
    ceded: tuple[int, ...] = ()
    # The most slots that the run may ask for while other runs need some (None: no limit), and why.
    slot_limit: int | None = None
    slot_limit_reason: str = ""
    # What the cluster lacks for `min_workers`, as a sentence; "": nothing.
    shortage: str = ""
    # After slots that failed, no slot is requested before this time; 0: no pause.
    slots_not_before: float = 0.0
    # What the newest nodes measured when they joined.
    calibrations: tuple[Calibration, ...] = ()
    # Ray's control store does not answer: no slot can be placed and no worker started, and neither counts as late.
    control_store_away: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the run's placed slots."""
        return tuple(dict.fromkeys(slot.node for slot in self.slots.values() if slot.node is not None))

    @property
    def staying_slots(self) -> int:
        """How many slots are not on a draining node."""
        return len(self.slots) - sum(len(self.slots.on(node)) for node in self.draining)

    @property
    def idle(self) -> int:
        """How many workers are ready and inside no generation."""
        return len(self.workers) - len(self.workers.starting) - len(self.inside)

    def idle_in(self, slots: Iterable[int]) -> int:
        """How many of these are in these slots."""
        there = [number for slot in slots for number in self.workers.numbers_in(slot)]
        return len(there) - len(self.workers.starting.among(there)) - len(self.inside.among(there))

    def node_of(self, worker: int) -> str | None:
        known = self.workers.get(worker)
        slot = self.slots.get(known.slot) if known else None
        return slot.node if slot else None


@dataclass(frozen=True)
class Saved:
    """What the next generation can begin from, and whether storage and memory take what is saved."""

    checkpoints: tuple[KnownCheckpoint, ...] = ()
    # What the last survey found in the memory of nodes, newest first; forgotten when a generation begins.
    snapshots: tuple[KnownCheckpoint, ...] = ()
    # Which nodes hold what of the newest one; those of the same generation are placed alike.
    copies: Copies = field(default_factory=Copies)
    survey: Survey | None = None
    surveys: int = 0
    # Checkpoints and snapshots that a restore has refused.
    rejected: tuple[str, ...] = ()
    # The last generation that had to stop taking snapshots into memory.
    memory_lost_in: int = 0
    storage_failing: bool = False
    # Workers whose writes have failed since the newest checkpoint, or since the generation began.
    cannot_save: tuple[int, ...] = ()

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


@dataclass(frozen=True)
class Trouble:
    """What has gone wrong so far, and what is being looked into."""

    streaks: Streaks = field(default_factory=Streaks)
    suspicion: Suspicion | None = None
    incident: Incident | None = None
    incidents: int = 0
    # Steps with a non-finite loss or gradient, oldest first; and every range of sample positions that is left out.
    anomalies: tuple[Anomaly, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    false_alarms: int = 0
    # How many audits have named a rank on each node.
    miscomputed: Mapping[str, int] = field(default_factory=dict)
    # The last step in which an audit before a failed one had all ranks agree.
    agreed_step: int | None = None
    # (generation, step) of what earlier attempts have undone: as `Anomaly`.
    undone: tuple[tuple[int, int], ...] = ()

    @property
    def all_undone(self) -> tuple[tuple[int, int], ...]:
        """(generation, step): nothing beyond `step` of that or an earlier generation counts any more."""
        return (*self.undone, *((a.generation, a.step) for a in self.anomalies if a.undone))

    def counts(self, generation: int, step: int) -> bool:
        """False for a checkpoint or snapshot that lies behind an anomaly: its step was done again with other samples,
        and the next generation must never begin from a state of the abandoned timeline."""
        return not any(generation <= of and step > last for of, last in self.all_undone)


@dataclass(frozen=True)
class RunState:
    settings: RunSettings = field(metadata=NOT_KEPT)
    phase: RunPhase
    # When this attempt at the run began, in wall clock seconds: of runs of one priority the earlier comes first.
    started_at: float = 0.0
    generation: int = 0
    first_generation: int = 0
    members: Members = field(default_factory=Members)
    # The generation's sizes of the mesh's axes that may change.
    axes: Mapping[str, int] = field(default_factory=dict)
    start_step: int = 0
    base: KnownCheckpoint | None = None
    furthest_step: int = 0
    # The run's last step, once every member has done it: when a checkpoint covers it, the run is finished.
    done_step: int | None = None
    stop_reason: str | None = None
    # Why the run is given up. A last generation begins that only saves to storage what memory alone has.
    gives_up_for: str | None = None
    fleet: Fleet = field(default_factory=Fleet)
    saved: Saved = field(default_factory=Saved)
    trouble: Trouble = field(default_factory=Trouble)
    meter: Meter = field(default_factory=Meter)

    @property
    def max_slots(self) -> int:
        """Slots that the run may ask for now."""
        most, limit = self.settings.scaling.max_slots, self.fleet.slot_limit
        return most if limit is None else min(most, limit)

    @property
    def carrying(self) -> frozenset[int]:
        """The slots that members of the generation are in."""
        workers = self.fleet.workers
        return frozenset(workers[member].slot for member in self.members if member in workers)

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def members_inside(self) -> tuple[int, ...]:
        """Members whose training threads are, as far as is known, still inside the generation."""
        return tuple(filter(set(self.fleet.inside).__contains__, self.members))

    def is_inside(self, worker: int) -> bool:
        """Whether it is one of `members_inside`; without looking at the others."""
        return worker in self.fleet.inside

    @property
    def anyone_inside(self) -> bool:
        return len(self.fleet.inside) > 0

    @property
    def idle_slots(self) -> tuple[tuple[Slot, tuple[int, ...]], ...]:
        """Slots with workers that could be members now, each with these workers; both in the order of their numbers.

        Workers of evicted slots could not. Workers on a draining node could only where the run cannot begin without
        them and there is time left.
        """
        fleet = self.fleet
        busy, evicted = {*fleet.inside, *fleet.workers.starting}, set(fleet.evicted)
        ready: list[tuple[Slot, tuple[int, ...]]] = []
        for slot in fleet.slots.values():
            workers = fleet.workers.numbers_in(slot.id)
            if not busy.isdisjoint(workers):
                workers = tuple(worker for worker in workers if worker not in busy)
            if workers and slot.id not in evicted:
                ready.append((slot, workers))
        if not fleet.draining:
            return tuple(ready)
        staying = tuple(one for one in ready if one[0].node not in fleet.draining)
        if not isinstance(self.phase, Waiting) or _count(staying) >= self.settings.scaling.min_workers:
            return staying
        notices = [(one, fleet.draining.get(one[0].node or "")) for one in ready]
        return tuple(one for one, notice in notices if notice is None or not notice.urgent)

    @property
    def idle_count(self) -> int:
        """How many workers `idle_slots` has, without looking at each slot."""
        fleet = self.fleet
        draining = [slot for node in fleet.draining for slot in fleet.slots.on(node) if slot not in fleet.evicted]
        staying = fleet.idle - fleet.idle_in((*dict.fromkeys(fleet.evicted), *draining))
        if not isinstance(self.phase, Waiting) or staying >= self.settings.scaling.min_workers:
            return staying
        return staying + fleet.idle_in(s for s in draining if not fleet.draining[fleet.slots[s].node or ""].urgent)

    def rank_of(self, worker: int) -> int | None:
        return self.members.ranks.get(worker)


def _count(slots: Iterable[tuple[Slot, tuple[int, ...]]]) -> int:
    return sum(len(workers) for _, workers in slots)

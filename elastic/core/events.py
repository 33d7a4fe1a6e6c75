"""Events: everything that the controller learns about a run reaches the state machine as one of these.

An event with a `generation` belongs to that generation; `machine.step` drops it when the generation is over,
and that is the only place where messages are fenced. Heartbeats are not events: they update `policy.liveness.LastSeen`,
and only its verdicts are events. Every event is plain data with an exact JSON form: the journal is replayed from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args


@dataclass(frozen=True)
class RunStarted:
    """First event of an attempt at a run. `checkpoints` are (id, step) of complete checkpoints found in storage, newest
    first; `last_generation` is the last one that an earlier attempt used (numbers are never used again); `skips` are
    the ranges of positions that earlier attempts have left out; `measured` is the JSON form of what they measured. For
    `undone`, see `Trouble.all_undone`; `checkpoints` are those that count all the same."""

    checkpoints: tuple[tuple[str, int], ...] = ()
    last_generation: int = 0
    skips: tuple[tuple[int, int], ...] = ()
    measured: Mapping[str, Any] | None = None
    undone: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ControllerRestarted:
    """A new controller process has replayed the journal and re-attached to the living actors.

    The journal lacks what its predecessor did while the journal could not be written. `newest_generation` is the newest
    that any living worker knows; `next_slot` and `next_worker` are above every number found in use.
    """

    incarnation: int
    newest_generation: int = 0
    next_slot: int = 0
    next_worker: int = 0


@dataclass(frozen=True)
class StopRequested:
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed and a deadline may have been reached."""


@dataclass(frozen=True)
class NodesDraining:
    """The list of draining nodes has changed: (node, deadline in wall clock seconds or 0) of each."""

    nodes: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class CapacityJudged:
    """The cluster's shortage for `min_workers` has changed; `sentence` is empty if there is none. `never`: the cluster
    can never hold the run."""

    sentence: str
    never: bool = False


@dataclass(frozen=True)
class SlotsShared:
    """The run may hold at most `limit` slots (None: no limit), because other runs need the rest."""

    limit: int | None
    reason: str = ""


# --- slots and workers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotPlaced:
    """Ray has placed the slot on a node."""

    slot: int
    node: str


@dataclass(frozen=True)
class SlotLost:
    """The node under the slot, or its agent, is gone."""

    slot: int
    evidence: str


@dataclass(frozen=True)
class WorkerReady:
    """The worker process is up, has imported what it needs, and passed its health check. `lasting`: the higher it is,
    the less likely is the loss of its node; 0 where nothing is known."""

    worker: int
    pid: int
    host: str
    lasting: int = 0


@dataclass(frozen=True)
class WorkerSettingUp:
    """The worker's function does its set-up still, while others train, and makes progress: it has as long again."""

    worker: int


@dataclass(frozen=True)
class WorkerStartFailed:
    """`usage` marks errors that a retry cannot fix (the entry point does not import)."""

    worker: int
    evidence: str
    usage: bool = False


@dataclass(frozen=True)
class WorkerDied:
    """The worker's process is known to be gone (not merely silent)."""

    worker: int
    evidence: str


@dataclass(frozen=True)
class NodeMeasured:
    """See `policy.calibration.Calibration` for the fields. `failed`: why there are none."""

    node: str
    rates: tuple[tuple[str, float], ...] = ()
    partner: str = ""
    link: str = ""
    sent: tuple[tuple[int, float], ...] = ()
    received: tuple[tuple[int, float], ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class DeviceFailed:
    """The GPU of the worker has reported an error, or will not last: `evidence`. `unfit`: no worker should go on with
    it."""

    worker: int
    gpu: str
    evidence: str
    unfit: bool = False


@dataclass(frozen=True)
class WorkersSilent:
    """No heartbeat from these workers for `silence_s` seconds; they may still be alive.

    `nodes` are those whose agents are silent too: there the node is suspected, not the worker.
    """

    workers: tuple[int, ...]
    silence_s: float
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeAnswered:
    worker: int


@dataclass(frozen=True)
class SnapshotsReported:
    """The answer to `QuerySnapshots` number `survey`: the complete snapshots, newest first.

    Each is (id, step). `unreachable` are pairs of nodes (from, to), if that was asked. `missing` says, in sentences,
    what newer snapshots lack. `copies` says which node holds what of the newest one, which is of `ranks` ranks: see
    `core.checkpoint.snapshots.Copies`.
    """

    survey: int
    snapshots: tuple[tuple[str, int], ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    ranks: int = 0
    copies: tuple[tuple[str, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]], ...] = ()


# --- a generation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupJoined:
    """The worker is a member of the process group and builds its engine."""

    generation: int
    worker: int


@dataclass(frozen=True)
class RestoreProgressed:
    """The worker has read `bytes` of the state that it restores so far; reported while a restore takes long."""

    generation: int
    worker: int
    bytes: int


@dataclass(frozen=True)
class SetUpProgressed:
    """The worker's set-up computes, or says that it is busy; reported while the generation's start takes long."""

    generation: int
    worker: int


@dataclass(frozen=True)
class TrainingReached:
    """The worker's state is installed and verified (or freshly initialised); its next step is `step`."""

    generation: int
    worker: int
    step: int
    source: str = ""


@dataclass(frozen=True)
class FirstStepDone:
    """Every member has finished the generation's first optimizer step."""

    generation: int
    step: int


@dataclass(frozen=True)
class StepTimeMeasured:
    """The generation's steps take `step_s` (a median), which was not known of its world size, or was another time."""

    generation: int
    step_s: float


@dataclass(frozen=True)
class MemoryMeasured:
    """Every member has made the generation's first steps. A worker has `limit_bytes`, without what others use of it;
    no rank's peak was more than `rest_bytes` above the training state that it holds. `held` is the JSON form of the
    whole model's (`sharding.mesh_memory.HeldState`)."""

    generation: int
    limit_bytes: int
    rest_bytes: int
    held: Mapping[str, Any]


@dataclass(frozen=True)
class ProgressStalled:
    """Heartbeats continue but no step has ended for `stalled_s`; `limit_s` follows from the run's own step times.

    `behind` are the members that have not reached the collective that the others wait in, where that is known.
    """

    generation: int
    step: int
    stalled_s: float
    limit_s: float
    behind: tuple[int, ...] = ()


@dataclass(frozen=True)
class CollectiveFailed:
    generation: int
    worker: int
    step: int
    error: str


@dataclass(frozen=True)
class UserCodeFailed:
    """The training function raised. `usage` marks errors that a retry cannot fix (bad configuration)."""

    generation: int
    worker: int
    step: int
    error: str
    traceback: str = ""
    usage: bool = False


@dataclass(frozen=True)
class MeshRefused:
    """The model cannot be cut for this generation's mesh, as every member finds; the job leaves the sizes open."""

    generation: int
    worker: int
    step: int
    error: str


@dataclass(frozen=True)
class AnomalyFound:
    """After `step` finished steps, the loss or gradient of the next one is non-finite; that step was not saved.

    `kind` is "loss", "gradient" or "loss scale", `value` what it was; `positions` are the ranges of the global sample
    order that the whole step consumed. Every member reports it, each with its own observation.
    """

    generation: int
    worker: int
    step: int
    kind: str
    value: str
    positions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AuditFailed:
    """After `step` finished steps, ranks did not find the same gradient or update of the next one, which does not
    count, or the memory of one has changed; `evidence` says so. Every member reports it alike.

    `suspects` are the ranks that were outvoted (`decided`), or those among which no majority decides. In step
    `agreed_step` all ranks agreed (None: in none of this generation). What was saved after step `sound_step` may have
    the fault already (None: after `step`).
    """

    generation: int
    worker: int
    step: int
    suspects: tuple[int, ...]
    decided: bool
    evidence: str
    agreed_step: int | None = None
    sound_step: int | None = None


@dataclass(frozen=True)
class StepSkipped:
    """Every member has finished step `step` without applying it, for the reason `what`; `positions` were skipped."""

    generation: int
    step: int
    what: str
    positions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StragglerFound:
    """The worker's own part of a step takes `factor` times as long as its peers', in `windows` windows running.

    `own_s` and `peers_s` are the medians of the last window. `confirmed`: one window more than it takes to be found.
    `slowed`: what its device says about that, if anything.
    """

    generation: int
    worker: int
    factor: float
    own_s: float
    peers_s: float
    windows: int
    confirmed: bool = False
    slowed: str = ""


@dataclass(frozen=True)
class CollectivesSlowed:
    """Rank 0's collectives take `now_s` of a step and took `usual_s` when the generation began, `factor` times as long,
    in `windows` windows running in which no rank was a straggler."""

    generation: int
    factor: float
    usual_s: float
    now_s: float
    windows: int


@dataclass(frozen=True)
class RestoreFailed:
    """The named checkpoint is incomplete, or what was read is not what was saved.

    `checkpoint` is empty where storage could not be reached: that says nothing about what lies there.
    """

    generation: int
    worker: int
    checkpoint: str
    error: str


@dataclass(frozen=True)
class StopPromised:
    """The worker promises to stop at `step` finished steps until CommitStop names the common step.

    `memory`: its node takes snapshots, so the end need not wait for storage.
    """

    generation: int
    worker: int
    step: int
    memory: bool = False


@dataclass(frozen=True)
class MemoryLost:
    """No more snapshots are taken into memory in this generation. `reason` is empty if another member reports it."""

    generation: int
    worker: int
    reason: str


@dataclass(frozen=True)
class WorkerLeft:
    """The worker's training thread has left the generation after `step` finished steps; the process is idle."""

    generation: int
    worker: int
    step: int


@dataclass(frozen=True)
class WorkerCompleted:
    """The training function returned. `reached_end` is False when it did so before the run's last step."""

    generation: int
    worker: int
    step: int
    reached_end: bool


@dataclass(frozen=True)
class MembersReported:
    """Reports of one kind by members of one generation that came in one turn: as if one came after the other.

    `report` is the name of the events that it stands for; `workers` sent them in this order, each with its step (0
    where such an event has none). `memory` is the same in all of them (False where such an event has none).
    """

    generation: int
    report: str
    workers: tuple[int, ...]
    steps: tuple[int, ...]
    memory: bool = False


@dataclass(frozen=True)
class CheckpointCommitted:
    """Not fenced: a checkpoint that is complete stays complete, whatever happened to its generation since."""

    checkpoint: str
    step: int
    by_generation: int


@dataclass(frozen=True)
class SaveFailing:
    """A shard of `worker`, or a manifest (None), could not be written; retried after `retry_s` (0: never)."""

    step: int
    error: str
    retry_s: float
    worker: int | None = None


@dataclass(frozen=True)
class ControlStoreAway:
    """Ray's control store has not answered for `silent_s`. Nothing can be started or placed until it does."""

    silent_s: float


@dataclass(frozen=True)
class ControlStoreBack:
    """Ray's control store answers again, `away_s` after its last answer."""

    away_s: float


GenerationEvent = (
    GroupJoined | RestoreProgressed | SetUpProgressed | TrainingReached | FirstStepDone | StepTimeMeasured |
    MemoryMeasured | ProgressStalled | CollectiveFailed | UserCodeFailed | MeshRefused | AnomalyFound | AuditFailed |
    StepSkipped | StragglerFound | CollectivesSlowed | RestoreFailed | StopPromised | MemoryLost | WorkerLeft |
    WorkerCompleted | MembersReported
)  # fmt: skip

Event = (
    RunStarted | ControllerRestarted | StopRequested | Tick | NodesDraining | CapacityJudged | SlotsShared |
    SlotPlaced | SlotLost | WorkerReady | WorkerSettingUp | WorkerStartFailed | WorkerDied | NodeMeasured |
    DeviceFailed | WorkersSilent | ProbeAnswered | SnapshotsReported | CheckpointCommitted | SaveFailing |
    ControlStoreAway | ControlStoreBack |
    GenerationEvent
)  # fmt: skip

_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Event)}
# Names in journals of release 0.1.0 and before. Read for one release.
_TYPES |= {"HoldAnswered": StopPromised, "MemorySurveyed": SnapshotsReported}
# Looked up once: a controller of many workers reads 80,000 events of one type in a second.
_FIELDS = {cls: frozenset(field.name for field in dataclasses.fields(cls)) for cls in _TYPES.values()}


def to_json(event: Event) -> dict[str, Any]:
    """The journal's form of an event: its fields and its name under "event"."""
    return {"event": type(event).__name__, **vars(event)}


def from_json(data: Mapping[str, Any]) -> Event:
    """Inverse of `to_json`. Raises KeyError for an event that this version does not know."""
    cls = _TYPES[data["event"]]
    names = _FIELDS[cls]
    event: Event = cls(**{
        key: _frozen(value) if isinstance(value, list) else value for key, value in data.items() if key in names
    })  # fmt: skip
    return event


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value

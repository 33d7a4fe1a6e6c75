"""What the state machine asks for. The executor performs actions; each action that can end reports an event.

Actions are idempotent: a restarted controller issues the open actions again (`machine.reissue`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.core.incident import Incident


@dataclass(frozen=True)
class RequestSlot:
    """Ask the cluster for one node's share, not on the nodes in `avoid` -> SlotPlaced, or SlotLost.

    A pending request is the demand for nodes.
    """

    slot: int
    workers: int
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReleaseSlot:
    """Release the slot and end every process in it. No event."""

    slot: int
    cause: str


@dataclass(frozen=True)
class StartWorker:
    """Start a fresh worker process in a placed slot -> WorkerReady or WorkerStartFailed."""

    worker: int
    slot: int


@dataclass(frozen=True)
class KillWorker:
    """End a worker's process in any state. No event: the machine has already written it off."""

    worker: int
    cause: str


@dataclass(frozen=True)
class BeginGeneration:
    """Start training on `members` (worker ids; the position is the rank) from `checkpoint` (None: from scratch)
    -> GroupJoined, TrainingReached, FirstStepDone, or one of the failures.

    `skips`: see `core.data.micro_batches`. `axes`: the sizes of the mesh's axes that may change. With `stops_at_start`
    the members do no step: they wait for CommitStop.
    """

    generation: int
    members: tuple[int, ...]
    checkpoint: str | None
    step: int
    skips: tuple[tuple[int, int], ...] = ()
    stops_at_start: bool = False
    axes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EndGeneration:
    """Abort the generation on these members -> WorkerLeft from each living member, WorkerDied from each dead one."""

    generation: int
    workers: tuple[int, ...]
    cause: str


@dataclass(frozen=True)
class Probe:
    """Ask these workers for a sign of life -> ProbeAnswered from each that can answer."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class QuerySnapshots:
    """Ask these nodes which snapshots their memory holds -> SnapshotsReported.

    With `reach` each node also reports which of the others it cannot reach.
    """

    survey: int
    nodes: tuple[str, ...]
    reach: bool = False


@dataclass(frozen=True)
class MeasureNode:
    """Have a node that has just joined measured, its connection to one of the idle nodes `partners` included
    -> NodeMeasured. Its workers begin after that. Not issued again: a restarted controller does without.
    """

    node: str
    partners: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProposeStop:
    """First phase of a planned end: each member promises a step that it will not pass -> StopPromised from each."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class CommitStop:
    """Second phase: every member stops after exactly `step` finished steps, saves, and leaves -> WorkerLeft.

    `durable`: save to storage; otherwise the memory of the nodes is enough.
    """

    generation: int
    workers: tuple[int, ...]
    step: int
    durable: bool = True
    # The run stops here: the users' functions are left.
    last: bool = False


@dataclass(frozen=True)
class Note:
    """One decision and its reason as a sentence with numbers, written to the journal and to the log."""

    sentence: str
    kind: str = "decision"
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CloseIncident:
    """The incident is over: write its record."""

    incident: Incident


@dataclass(frozen=True)
class FinishRun:
    """Last action of a run: release everything, write the summary. `status` names an exit code."""

    status: str
    reason: str


Action = (
    RequestSlot | ReleaseSlot | StartWorker | KillWorker | BeginGeneration | EndGeneration | Probe | QuerySnapshots |
    MeasureNode | ProposeStop | CommitStop | Note | CloseIncident | FinishRun
)  # fmt: skip

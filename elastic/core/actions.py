"""What the state machine asks for. The executor carries actions out; each one that can end ends by an event.

Actions are idempotent: a restarted controller issues the open ones again (`machine.reissue`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.core.run.incident import Incident


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
    """Give the slot back, with every process in it. No event."""

    slot: int
    cause: str


@dataclass(frozen=True)
class StartWorker:
    """Start a fresh worker process in a placed slot -> WorkerReady or WorkerStartFailed."""

    worker: int
    slot: int


@dataclass(frozen=True)
class KillWorker:
    """End a worker's process, whatever state it is in. No event: the machine has written it off already."""

    worker: int
    cause: str


@dataclass(frozen=True)
class BeginGeneration:
    """Start training on `members` (worker ids; the position is the rank) from `checkpoint` (None: from scratch)
    -> GroupJoined, TrainingReached, FirstStepDone, or one of the failures. `skips`: see `core.batches`. With `holds` no
    step is done: the members wait, as after a promise, to be told that they stop where they are."""

    generation: int
    members: tuple[int, ...]
    checkpoint: str | None
    step: int
    skips: tuple[tuple[int, int], ...] = ()
    holds: bool = False


@dataclass(frozen=True)
class EndGeneration:
    """Abort the generation on these members -> WorkerLeft from each that is alive, WorkerDied from each that is not."""

    generation: int
    workers: tuple[int, ...]
    cause: str


@dataclass(frozen=True)
class Probe:
    """Ask these workers for a sign of life -> ProbeAnswered from each that can."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class SurveyMemory:
    """Ask these nodes what their memory holds, with `reach` also whom of them they cannot reach -> MemorySurveyed."""

    survey: int
    nodes: tuple[str, ...]
    reach: bool = False


@dataclass(frozen=True)
class AskHold:
    """First half of a planned end -> HoldAnswered from each."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class ConfirmHold:
    """Second half: every member stops after exactly `step` finished steps, saves, and leaves -> WorkerLeft.

    `durable`: to storage; otherwise the memory of the nodes is enough.
    """

    generation: int
    workers: tuple[int, ...]
    step: int
    durable: bool = True


@dataclass(frozen=True)
class Note:
    """One decision and its reason, as a sentence with numbers. Written to the journal and to the log."""

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
    RequestSlot | ReleaseSlot | StartWorker | KillWorker | BeginGeneration | EndGeneration | Probe | SurveyMemory |
    AskHold | ConfirmHold | Note | CloseIncident | FinishRun
)  # fmt: skip

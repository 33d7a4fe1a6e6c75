"""How a generation ended on one rank, as plain data: its readers need no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elastic.core.data.steps import Range
from elastic.core.errors import Where

Kind = Literal[
    "finished",
    "ended",
    "anomaly",
    "user_error",
    "collective_failed",
    "device_failed",
    "restore_failed",
    "usage_error",
    "mesh_refused",
]

# A survivor continues after these. Everything else is the user's code, its use of the platform, or this rank's device.
SURVIVED: frozenset[Kind] = frozenset({"ended", "anomaly", "collective_failed", "restore_failed", "mesh_refused"})


@dataclass(frozen=True)
class BadStep:
    """What was non-finite: `kind` is "loss", "gradient" or "loss scale"; `positions` are those of the whole step.

    Or "audit": ranks did not find the same gradient or update, or a rank's memory has changed, and `value` says so.
    `suspects` are the ranks that were outvoted (`decided`), or those among which no majority decides; `agreed_step` is
    the step of this generation's last audit in which all agreed. What was saved after step `sound_step` may have the
    fault already (None: what was saved up to here is as good as before)."""

    kind: str
    value: str
    positions: tuple[Range, ...] = ()
    suspects: tuple[int, ...] = ()
    decided: bool = False
    agreed_step: int | None = None
    sound_step: int | None = None

    def __str__(self) -> str:
        if self.kind == "audit":
            return self.value
        return f"the {self.kind} is {self.value}"


@dataclass(frozen=True)
class GenerationResult:
    """How a generation ended on this rank.

    finished            the user's function returned; `completed` tells whether the loader had reached the run's end
    ended               ended as planned, or aborted; `message` is the reason
    anomaly             a step's loss or gradient was non-finite, as `bad_step` says; on every rank alike
    user_error          the user's function raised
    usage_error         the job or the user's loop cannot work as written (a UsageError); not worth retrying
    mesh_refused        the model cannot be cut for this generation's mesh, and the job leaves the mesh open
    collective_failed   a peer was lost: `peer` is "host:port" and `peer_rank` its rank where they are known
    device_failed       the hardware of this rank's device
    restore_failed      the state of `checkpoint` could not be read or verified

    `step` counts finished optimizer steps.
    """

    kind: Kind
    step: int = 0
    completed: bool = False
    error_type: str | None = None
    message: str = ""
    traceback: str | None = None
    peer: str | None = None
    peer_rank: int | None = None
    checkpoint: str | None = None
    bad_step: BadStep | None = None
    where: Where = field(default_factory=Where)

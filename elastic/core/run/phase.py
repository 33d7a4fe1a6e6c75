"""The phases of a run, and the statuses that it ends with.

    Waiting --enough workers--> Joining --all members train--> Training --planned end--> Pausing --all left--> Waiting
                                   |                              |                         |
                                   +-------------- evidence of a failure: Ending <----------+
    Training --all completed--> Closing --last checkpoint committed--> Finished
    Closing --some members cannot write it--> Waiting, for the members that can
    Ending --every member left or was written off--> Waiting, or Finished when a budget is spent

A suspicion (silent workers that are being probed) is no phase: training continues while it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.tables import Amounts, Numbers

# Exit statuses; `jobs` maps them to exit codes.
FINISHED = "finished"
NOT_FINISHED = "not-finished"
USER_CODE_FAILED = "user-code-failed"
USAGE = "usage"
STOPPED = "stopped"
GAVE_UP = "gave-up"
NO_CAPACITY = "no-capacity"
INTEGRITY = "integrity"


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
    joined: Numbers = field(default_factory=Numbers)
    training: Numbers = field(default_factory=Numbers)
    # Bytes of state that each member has read so far; when one of these numbers has grown, or a member's set-up has
    # last made progress (0: not yet).
    restored: Amounts = field(default_factory=Amounts)
    moved_at: float = 0.0

    @property
    def progress_at(self) -> float:
        """When the generation has last come nearer to training: what it restores may be of any size."""
        return max(self.since, self.moved_at)


@dataclass(frozen=True)
class Training:
    """`declined`: the largest world size that the scaling policy, or the choice of mesh, has compared with the present
    one and not taken."""

    since: float
    first_step_done: bool = False
    completed: Numbers = field(default_factory=Numbers)
    all_reached_end: bool = True
    declined: int = 0


@dataclass(frozen=True)
class Pausing:
    """A planned end. `stop_at` is None until every member has answered; then all leave after that many steps."""

    since: float
    deadline: float
    purpose: str
    was: Training
    answers: Amounts = field(default_factory=Amounts)
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
    lost: Numbers = field(default_factory=Numbers)
    raised: Numbers = field(default_factory=Numbers)


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

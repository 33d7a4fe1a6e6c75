"""What ranks keep besides the engine's state of which a restore makes something else: see `core.checkpoint.shares`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from elastic.core.checkpoint.manifest import Json
from elastic.core.checkpoint.shares import island_of, outer_of
from elastic.core.data.steps import StepReport
from elastic.core.errors import UsageError
from elastic.core.server.continuing import Saved


@dataclass(frozen=True)
class Apart:
    """This rank trains in island `index` of `count`, together with the ranks of `group`. What optimizers keep is equal
    within an island only, and with `weights` so are the weights. The ranks in `writers`, the first island, write what
    all ranks have copies of."""

    group: dist.ProcessGroup
    count: int
    index: int
    writers: tuple[int, ...]
    weights: bool


@dataclass(frozen=True)
class StepPart:
    """Of the step under way, the one after `step` finished ones: how many of `total` samples this rank has. `last`: the
    run ends with it."""

    step: int
    samples: float
    total: int
    last: bool


class Live(Protocol):
    """One rank's weights as its optimizer updates them, and what the optimizer keeps; looked up anew at each call."""

    def weights(self) -> dict[str, torch.Tensor]:
        """By the parameter's name, 1-D views."""
        ...

    def moments(self) -> dict[tuple[str, str], torch.Tensor]:
        """By (kind, parameter), 1-D views."""
        ...

    def changed(self) -> None:
        """`weights` were written."""
        ...


# As JSON; None where other tensors belong to it.
Told = Callable[[], Mapping[str, Json] | None]


@dataclass(frozen=True)
class Newer:
    """A later state than the one that was restored: `install` puts the optimizer's tensors into the engine, `told` is
    what `Told` had of it. `reports`: the steps up to it as ranks had reported them, JSON by step."""

    step: int
    told: Mapping[str, Json]
    reports: Mapping[int, Sequence[Mapping[str, Json]]]
    install: Callable[[], None]


class Shares:
    """One rank's. The ranks of a generation have different ones, and together all that `shapes_kept` names. This one
    is that of a run without any."""

    # None: all ranks have equal weights and optimizer state after every step.
    apart: Apart | None = None

    def begin(self, live: Callable[[], Live], part: Callable[[], StepPart], told: Told) -> None:
        """Once, before a restore. `live` raises UsageError where a rank has not all of it; `part` tells of the step
        under way; `told` what is saved of the step just finished besides the optimizer's tensors."""

    def newer(self, saved: Saved) -> Newer | None:
        """What has become elsewhere of the state that was restored. Collective."""
        return None

    def closed(self, report: StepReport) -> None:
        """The step just finished was reported."""

    @property
    def whole(self) -> bool:
        """May the run be saved after the step just finished? The same on every rank."""
        return True

    @property
    def late(self) -> int:
        """How many steps before the one just finished the gradient was computed by which that is judged."""
        return 0

    def settle(self) -> None:
        """Make it so, where it is not. Collective."""

    def close(self) -> None:
        """The generation is over."""

    def answers(self, name: str) -> bool:
        """Is this the one rank, of those that read the same, by which verification counts it?"""
        return False

    def shapes_kept(self) -> dict[str, tuple[int, ...]]:
        return {}

    def reads(self, name: str) -> bool:
        """Does this rank take back what a checkpoint has under this name? Raises UsageError where no rank does."""
        raise UsageError(refusal(name))

    def kept(self) -> Mapping[str, torch.Tensor]:
        """This rank's tensors by name; no later step changes them before they are copied."""
        return {}

    def install(self, saved: Mapping[str, torch.Tensor]) -> None:
        """What `reads` has chosen, 1-D on the host."""


def refusal(name: str) -> str:
    """Why a run that has no use for this share cannot go on from its checkpoint."""
    if island_of(name) is not None or outer_of(name) is not None:
        return (
            f"the checkpoint holds what islands keep that train by themselves ({name}): so that it is not lost, resume "
            "the run with the communication that it had, semantics: local and the same strategy"
        )
    return (
        f"the checkpoint holds what error feedback has not sent yet of the gradients ({name}): so that it is not "
        "lost, resume the run with communication: {semantics: error_feedback}"
    )


@dataclass(frozen=True)
class KeptBesides:
    """What a rank has read of a checkpoint that is not the engine's, by name. Of the ranks that have read one share
    the one that has it in `answers` gives its content; all others rely on it."""

    tensors: Mapping[str, torch.Tensor]
    answers: frozenset[str] = frozenset()

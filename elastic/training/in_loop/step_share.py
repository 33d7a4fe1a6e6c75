"""What this rank has computed of the step under way, and whether the engine's sums are whole.

A rank that is lost is noticed between two calls of the engine, or in the collectives at the end of the step's last
backward. A failure within the backward of another micro-batch (a collective in the model itself) leaves a sum to which
a part of that micro-batch was added: such a rank gives up its share, and only its own.

The engine reduces in place. So before the reduction the ranks meet: one that was lost has not come, and the sums are
still whole on all others. Only a loss within the reduction itself, or in the optimizer's step, costs the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.unfinished import kept_factor
from elastic.core.errors import CollectiveFailed
from elastic.engines.base import Engine
from elastic.training.scope import GenerationScope

_BACKWARD = "its backward pass was under way"
_REDUCED = "the reduction of the gradients had begun"


@dataclass
class Unfinished:
    """One rank's share of a step that its engine has not finished, taken out of that engine.

    `sums` are those of `batches`, begun with `ranks` ranks; `loss` and `tokens` are those of `batches`, too. `why` is
    not empty where the share must be computed again. `weights`: see `in_loop.unfinished.fingerprint`; `user`: see
    `user.comparison.fingerprints`.
    """

    step: int
    ranks: int
    batches: tuple[MicroBatch, ...]
    loss: torch.Tensor | float
    tokens: int
    module: torch.nn.Module
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    why: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    user: Mapping[str, int] = field(default_factory=dict)

    def scaled_to(self, ranks: int) -> dict[str, torch.Tensor]:
        """The sums, in place, for a step that so many ranks finish."""
        factor, self.ranks = kept_factor(self.ranks, ranks), ranks
        if factor != 1.0:
            for value in self.sums.values():
                value.mul_(factor)
        return self.sums


class StepShare:
    """Of one engine. For every micro-batch with a backward pass: `adding` before it, `added` after it; `take` where the
    generation ends within a step. `refused` says why nothing is kept; empty: no pass could be saved."""

    def __init__(self, engine: Engine, scope: GenerationScope, refused: str | None, carried: Unfinished | None) -> None:
        """All ranks are given equal `refused`: they meet. `carried`: what this rank has of the next step already."""
        self._engine = engine
        self._scope = scope
        self._refused = engine.sums if refused is None and isinstance(engine.sums, str) else refused
        self._carried = carried
        self._step = -1
        self._batches: list[MicroBatch] = []
        self._loss: torch.Tensor | float = 0.0
        self._tokens = 0
        self._why = ""
        self._current: tuple[MicroBatch, torch.Tensor | float, int] | None = None
        if carried is not None:
            self._step, self._batches = carried.step, list(carried.batches)
            self._loss, self._tokens = carried.loss, carried.tokens
        if self._refused is None and not isinstance(engine.sums, str) and scope.spec.world_size > 1:
            engine.sums.before_reduction(self._before_reduction)

    @property
    def loss(self) -> torch.Tensor | float:
        """What the next step's loss begins with."""
        return self._loss

    def adding(self, step: int, batch: MicroBatch, loss: torch.Tensor | float, tokens: int) -> None:
        """Before the backward of `batch`; `loss` and `tokens` count it."""
        if step != self._step:
            self._step, self._batches = step, []
        self._why, self._current = _BACKWARD, (batch, loss, tokens)
        carried, self._carried = self._carried, None
        if carried is not None and not isinstance(self._engine.sums, str):
            # Not earlier: scripts clear gradients before a step's first backward.
            self._engine.sums.add(carried.scaled_to(self._scope.spec.world_size))

    def added(self) -> None:
        """The engine's sums have all of it."""
        if self._current is not None:
            batch, self._loss, self._tokens = self._current
            self._batches.append(batch)
        self._why, self._current = "", None

    def take(self, ranks: int, refused: str | None = None) -> Unfinished | None:
        """The share of a generation of `ranks` ranks, which ends here; None where there is nothing of the next step, or
        nothing that could be saved. `refused`: why this step's cannot be kept."""
        carried, self._carried = self._carried, None
        done = tuple(batch for batch in self._batches if batch.weight > 0.0)
        if self._step != self._scope.step or not done or self._refused == "":
            return None
        taken = Unfinished(self._step, ranks, done, self._loss, self._tokens, self._engine.module)
        taken.why = self._refused or self._why or refused or ""
        if carried is not None:
            # Not added yet: as they came.
            taken.sums, taken.ranks = carried.sums, carried.ranks
        elif not taken.why and not isinstance(self._engine.sums, str):
            try:
                taken.sums = self._engine.sums.take()
            except ValueError as error:
                taken.why = str(error)
        return taken

    def _before_reduction(self) -> None:
        self.added()
        with self._engine.ledger.waiting():
            came = _meet(self._engine.device, self._engine.data_group)
        # A communicator that was aborted lets its calls return.
        self._scope.check()
        if came != self._scope.spec.world_size:
            raise CollectiveFailed("the ranks did not all come to the reduction of the gradients", self._scope.where())
        self._why = _REDUCED


def _meet(device: torch.device, group: dist.ProcessGroup) -> int:
    """How many ranks of the group have come: all, once it returns. Waits for the device."""
    came = torch.ones((), dtype=torch.int64, device=device)
    dist.all_reduce(came, group=group)
    return int(came)

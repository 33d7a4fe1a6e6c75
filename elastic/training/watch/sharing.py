"""Do the ranks of a cell share sequences, and samples, as the job says that they do?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from elastic.comm.agreement import Agreement
from elastic.core.errors import UsageError
from elastic.engines.base import StepOutcome
from elastic.training.state.verify_weights import fingerprint, fingerprints
from elastic.training.watch.once import warn_once

logger = logging.getLogger(__name__)

# By this step of a generation its exchanges are in the ledger, on a device too.
_BY_STEP = 3


class SharingWatch:
    """Of one generation with `sp` ranks to a cell."""

    def __init__(self, sp: int) -> None:
        self._sp = sp
        # Finished steps up to the first exchange between ranks of a cell.
        self._unshared: int | None = 0 if sp > 1 else None

    def look(self, outcome: StepOutcome) -> None:
        """Ranks that do not share their sequences all compute the same: right, and no faster."""
        if self._unshared is None:
            return
        self._unshared += 1
        if any(use.axis == "sp" for use in outcome.collectives):
            self._unshared = None
        elif self._unshared == _BY_STEP:
            warn_once(
                logger,
                f"mesh: {{sp: {self._sp}}}: the script shares no sequences, so that all workers of a cell "
                "compute the same; use elastic.sequence (docs/parallelism.md), or leave mesh out",
            )


class EvaluationWatch:
    """Of one generation whose ranks in `cell` share each layer. The loader deals them the same samples to train on;
    those of an evaluation the script deals. With different ones a layer would be applied to one rank's samples in one
    half and to another's in the other."""

    def __init__(self, cell: dist.ProcessGroup, device: torch.device) -> None:
        self._agreement = Agreement(cell, device)
        self._looked_at: int | None = None

    def look(self, step: int, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Before a pass that is not trained on. Collective over the cell in the first one after step `step`. Raises
        UsageError on all of its ranks where their inputs differ."""
        if self._looked_at == step:
            return
        self._looked_at = step
        tensors = [each for each in tree_leaves((inputs, dict(named))) if isinstance(each, torch.Tensor)]
        described = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        seen = fingerprint(torch.tensor(list((described + repr(fingerprints(tensors))).encode())))
        _, (unlike,) = self._agreement.any_and_unequal([], [seen])
        if unlike:
            raise UsageError(
                f"ranks {', '.join(map(str, self._agreement.ranks))} share each layer (mesh.tp), and were called with "
                "different inputs in an evaluation: give all of them the same samples, which are those of "
                "elastic.get_context().coordinates['dp'], or of a DataLoader that accelerate prepares"
            )

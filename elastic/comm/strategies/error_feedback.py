"""Lossy strategies with error feedback: what is not sent of a gradient is added to the next one (Seide et al.,
Interspeech 2014; Karimireddy et al., ICML 2019).

Within an island gradients are reduced and scattered exactly; only what goes between islands is compressed. So an
island has one residual per parameter, which one of its ranks holds. In units of the mean gradient, what the weights
still lack is the *sum of the residuals over the islands*. Where islands come or go that sum is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from elastic.checkpoint import shares as kept_besides
from elastic.comm.strategies.exact import Wire, all_gather, own_part, reduce_scatter
from elastic.comm.strategies.lossy import Compressor, Int8, Lane, PowerSgd, TopK, Whole
from elastic.core.checkpoint.shares import basis_name, basis_of, residual_name, residual_of
from elastic.core.errors import UsageError
from elastic.core.policy.hops import Islands
from elastic.core.settings import CommunicationSettings

Shapes = Mapping[str, tuple[int, ...]]


class ErrorFeedback(kept_besides.Shares):
    """Of one rank in one generation. `shapes` are those of all trained parameters, in their order.

    What it keeps is saved with the run's state: `shapes_kept` names it all, `kept` is this rank's, live; `reads` says
    what this rank takes back from a checkpoint, and `install` does.
    """

    def __init__(
        self, settings: CommunicationSettings, islands: Islands, wire: Wire, shapes: Shapes, device: torch.device
    ) -> None:
        self._islands, self._wire, self._shapes, self._device = islands, wire, shapes, device
        self.island, _ = islands.find(wire.rank)
        self._inside = islands.places[self.island]
        self._parts = parts_of(shapes, islands.width)
        self._own = {name: shapes[name] for name in self._parts[own_part(self._inside, wire.rank)]}
        self._lane = Lane(islands.lane(wire.rank), wire)
        self._residual = {
            name: torch.zeros(prod(shape), dtype=torch.float32, device=device) for name, shape in self._own.items()
        }
        self._low_rank = PowerSgd(settings.rank, self._own)
        self.compressors: Mapping[str, Compressor] = {
            "hierarchical": Whole(),
            "int8": Int8(),
            "top_k": TopK(settings.density),
            "power_sgd": self._low_rank,
        }

    def reduce(self, gradients: Mapping[str, Tensor], strategy: str) -> None:
        """To their means over the ranks, as far as they were sent, in place. Collective.

        Where the result is not finite the step is not going to be applied: what is kept stays as it was.
        """
        if gradients.keys() != self._shapes.keys():
            odd = min(gradients.keys() ^ self._shapes.keys())
            raise UsageError(f"communication: parameter {odd!r} was frozen or released after elastic.initialize")
        flat = torch.cat([gradients[name].reshape(-1).float() for name in self._shapes]).div_(self._wire.ranks)
        parts = torch.split(flat, [sum(prod(self._shapes[name]) for name in part) for part in self._parts])
        reduce_scatter(parts, self._inside, self._wire)
        own = parts[own_part(self._inside, self._wire.rank)]
        left = own
        if own.numel():
            owed = own + torch.cat(list(self._residual.values()))
            # A single island has nobody to send to: it hands in all that it owes.
            compressor = self.compressors[strategy] if self._islands.count > 1 else Whole()
            summed, sent = compressor.sum(owed, self._lane)
            own.copy_(summed)
            left = owed - sent
        all_gather(parts, self._inside, self._wire)
        if bool(flat.isfinite().all()):
            self._keep(left)
        pieces = torch.split(flat, [prod(shape) for shape in self._shapes.values()])
        for name, piece in zip(self._shapes, pieces, strict=True):
            gradients[name].copy_(piece.view_as(gradients[name]))

    def _keep(self, left: Tensor) -> None:
        # New tensors: a snapshot may still be reading the old ones.
        lengths = [prod(shape) for shape in self._own.values()]
        self._residual = dict(zip(self._own, torch.split(left.clone(), lengths), strict=True))
        self._low_rank.bases |= self._low_rank.found
        self._low_rank.found = {}

    # -- what is saved -------------------------------------------------------------------------------------------------

    def answers(self, name: str) -> bool:
        """Of ranks that read the same, one of the first island answers for it."""
        return self.island == 0

    def shapes_kept(self) -> dict[str, tuple[int, ...]]:
        """What all ranks keep together, by its name in a checkpoint."""
        found: dict[str, tuple[int, ...]] = {
            residual_name(island, name): (prod(shape),)
            for island in range(self._islands.count)
            for name, shape in self._shapes.items()
        }
        whole = PowerSgd(self._low_rank.rank, self._shapes)
        return found | {basis_name(name): (shape[1], whole.rank) for name, shape in whole.matrices().items()}

    def kept(self) -> dict[str, Tensor]:
        """This rank's, by its name in a checkpoint; live until the next `reduce`."""
        found = {residual_name(self.island, name): tensor for name, tensor in self._residual.items()}
        if self.island == 0:
            names = self._low_rank.matrices()
            found |= {basis_name(name): self._low_rank.base(name, self._device) for name in names}
        return found

    def reads(self, name: str) -> bool:
        """Is it a residual, or a basis, of a parameter that this rank keeps?"""
        residual, basis = residual_of(name), basis_of(name)
        if residual is None and basis is None:
            raise UsageError(kept_besides.refusal(name))
        return (basis if residual is None else residual[1]) in self._own

    def install(self, saved: Mapping[str, Tensor]) -> None:
        """`saved` is what `reads` has chosen of a checkpoint of any number of islands, 1-D. Its sum over the islands is
        kept; it is added up in the order of the islands."""
        sums: dict[str, Tensor] = {}
        found = {residual: tensor for key, tensor in saved.items() if (residual := residual_of(key)) is not None}
        for island, name in sorted(found):
            sums[name] = sums[name] + found[island, name] if name in sums else found[island, name].clone()
        for name, total in sums.items():
            self._residual[name] = (total / self._islands.count).to(self._device)
        matrices = self._low_rank.matrices()
        for key, tensor in saved.items():
            basis, rank = basis_of(key), self._low_rank.rank
            if basis in matrices and tensor.numel() == matrices[basis][1] * rank:
                self._low_rank.bases[basis] = tensor.clone().view(-1, rank).to(self._device)


def parts_of(shapes: Shapes, count: int) -> list[list[str]]:
    """Neighbouring parameters in `count` parts of about the same size. No parameter is cut."""
    total = sum(prod(shape) for shape in shapes.values())
    parts: list[list[str]] = [[] for _ in range(count)]
    begun = 0
    for name, shape in shapes.items():
        # By its middle: a large one does not push its neighbours into the next part.
        parts[min(count - 1, int((begun + prod(shape) / 2) * count // max(1, total)))].append(name)
        begun += prod(shape)
    return parts

"""What a lane sends instead of its part of the gradient: each compressor adds up what the members of the lane send, and
says what this member's share of that was. The difference is the residual of error feedback.

Every member decodes the same messages in the same order, and has the same bits afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad

from elastic.comm.strategies.exact import Wire, all_gather, own_part, reduce_scatter

# Elements that share a scale.
BLOCK = 1024


@dataclass(frozen=True)
class Lane:
    """The ranks that have the same part of the gradient, one of each island."""

    members: Sequence[int]
    wire: Wire

    def gather(self, own: Tensor) -> Sequence[Tensor]:
        """Everybody's tensor, equally long, in the order of the members."""
        count = len(self.members)
        rows = list(own.new_empty((count, *own.shape)))
        rows[own_part(self.members, self.wire.rank)].copy_(own)
        all_gather(rows, self.members, self.wire)
        # A reduce-scatter leaves part i + 1 with member i.
        return [rows[(number + 1) % count] for number in range(count)]

    def add_up(self, tensor: Tensor) -> None:
        """Over the members, exactly and in place."""
        parts = tensor.tensor_split(len(self.members))
        reduce_scatter(parts, self.members, self.wire)
        all_gather(parts, self.members, self.wire)


class Compressor(Protocol):
    def sum(self, part: Tensor, lane: Lane) -> tuple[Tensor, Tensor]:
        """(what all members of the lane have sent of their parts, added up; what this one has), flat as `part`, fp32.
        Non-finite where any member's part is. Collective over the lane."""
        ...


class Whole:
    """Nothing is left out."""

    def sum(self, part: Tensor, lane: Lane) -> tuple[Tensor, Tensor]:
        summed = part.clone()
        lane.add_up(summed)
        return summed, part


class Int8:
    """The largest element of each block becomes 127."""

    def sum(self, part: Tensor, lane: Lane) -> tuple[Tensor, Tensor]:
        blocks = pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127.0
        whole = (blocks / scales.masked_fill(scales == 0.0, 1.0)).round().nan_to_num().clamp(-127, 127).to(torch.int8)
        sent = [
            (values.float() * scale).view(-1)[: part.numel()]
            for values, scale in zip(lane.gather(whole), lane.gather(scales), strict=True)
        ]
        return torch.stack(sent).sum(dim=0), sent[lane.members.index(lane.wire.rank)]


@dataclass(frozen=True)
class TopK:
    """The `density` of the elements that are the largest by amount, and where they are."""

    density: float

    def sum(self, part: Tensor, lane: Lane) -> tuple[Tensor, Tensor]:
        count = min(part.numel(), max(1, round(self.density * part.numel())))
        # NaN counts as the largest.
        places = part.abs().topk(count).indices.to(torch.int32)
        summed, sent = torch.zeros_like(part), torch.zeros_like(part)
        for where, values in zip(lane.gather(places), lane.gather(part[places]), strict=True):
            summed.index_add_(0, where, values)
        sent[places] = part[places]
        return summed, sent


@dataclass
class PowerSgd:
    """Each matrix as a product of rank `rank`: one step of subspace iteration (Vogels et al., NeurIPS 2019), begun with
    `bases`, the second factors of the step before. Tensors of one dimension, and small ones, are sent whole.

    `shapes` are those of the tensors in a part, in their order.
    """

    rank: int
    shapes: Mapping[str, tuple[int, ...]]
    bases: dict[str, Tensor] = field(default_factory=dict)
    # Those of the step under way.
    found: dict[str, Tensor] = field(default_factory=dict)

    def sum(self, part: Tensor, lane: Lane) -> tuple[Tensor, Tensor]:
        pieces = dict(zip(self.shapes, torch.split(part, [prod(shape) for shape in self.shapes.values()]), strict=True))
        matrices = {name: pieces[name].view(shape) for name, shape in self.matrices().items()}
        rest = [piece for name, piece in pieces.items() if name not in matrices]
        whole = _added(lane, rest)
        left = [matrix @ orthogonal(self.base(name, matrix.device)) for name, matrix in matrices.items()]
        left = [orthogonal(factor) for factor in _added(lane, left)]
        own = [matrix.T @ factor for matrix, factor in zip(matrices.values(), left, strict=True)]
        right = _added(lane, own)
        self.found = dict(zip(matrices, right, strict=True))
        sent = dict(pieces) | {n: a @ b.T for n, a, b in zip(matrices, left, own, strict=True)}
        summed = {n: a @ b.T for n, a, b in zip(matrices, left, right, strict=True)}
        summed |= dict(zip((name for name in pieces if name not in matrices), whole, strict=True))
        return _flat(summed[name] for name in pieces), _flat(sent[name] for name in pieces)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (rows, columns) of the tensors that are sent as products."""
        rows = {name: (shape[0], prod(shape[1:])) for name, shape in self.shapes.items() if len(shape) > 1}
        return {name: shape for name, shape in rows.items() if self.rank * sum(shape) < prod(shape)}

    def base(self, name: str, device: torch.device) -> Tensor:
        """(columns, rank). The first one depends on the name alone: it is the same on every rank."""
        if name not in self.bases:
            chance = torch.Generator().manual_seed(crc32(name.encode()))
            self.bases[name] = torch.randn(self.matrices()[name][1], self.rank, generator=chance).to(device)
        return self.bases[name]


def orthogonal(factor: Tensor) -> Tensor:
    """Orthonormal columns that span those of `factor`, and others where these are none."""
    found: Tensor = torch.linalg.qr(factor)[0]
    return found


def _added(lane: Lane, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each added up over the lane, sent together."""
    if not tensors:
        return []
    flat = _flat(tensors)
    lane.add_up(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])

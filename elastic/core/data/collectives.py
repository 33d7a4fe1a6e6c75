"""What the collectives of one step moved and cost, as it travels to the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class CollectiveUse:
    """All calls of one operation over one axis with one dtype, on one rank.

    `op` is torch.distributed's name. `axis`: "dp" is the data parallel group, "world" all ranks where those are more,
    any other group is "N ranks". `bytes` is the payload, the larger side of the operation: the tensor of an all-reduce,
    broadcast or reduce, the output of an all-gather, the input of a reduce-scatter; what crosses the wire follows from
    it (`elastic.planner.wire`). `seconds` run from the call to its completion. `waited_s` are those of them in which
    the training thread, on a device the stream, did nothing else; the rest was overlapped.
    """

    op: str
    axis: str
    dtype: str
    calls: int
    bytes: int
    seconds: float
    waited_s: float

    def to_json(self) -> list[Any]:
        """The fields in their order: a step has several of these, and a run many steps."""
        *names, seconds, waited_s = astuple(self)
        return [*names, round(seconds, 6), round(waited_s, 6)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> CollectiveUse:
        """The inverse. Raises TypeError for a row of another length."""
        return cls(*data)

"""Verdicts over all ranks where the ranks hold different slices of the model's layers (`core.mesh`: lanes)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic.comm.agreement import Agreement
from elastic.core.errors import IntegrityError

# Says nothing where the least of several numbers is sought.
_NEUTRAL = (1 << 63) - 1


@dataclass(frozen=True)
class Lanes:
    """`every` is the agreement of all ranks, `own` that of the ranks with the same slices as this one, lane `index` of
    `count`. With one lane they are one."""

    every: Agreement
    own: Agreement
    count: int = 1
    index: int = 0

    @classmethod
    def of(cls, data_group: dist.ProcessGroup, device: torch.device, count: int) -> Lanes:
        """`data_group` is that of this rank's lane. Not collective."""
        own = Agreement(data_group, device)
        if count == 1:
            return cls(own, own)
        assert dist.group.WORLD is not None
        every = Agreement(dist.group.WORLD, device)
        return cls(every, own, count, every.rank % count)

    def low_and_high(self, fingerprint: int) -> list[int]:
        """Numbers whose least over all ranks `apart` understands: this lane's fingerprints do not meet another's."""
        found = [_NEUTRAL] * (2 * self.count)
        found[2 * self.index : 2 * self.index + 2] = fingerprint, -fingerprint
        return found

    def apart(self, least: Sequence[int]) -> list[int]:
        """The lanes whose ranks have different fingerprints."""
        return [lane for lane in range(self.count) if least[2 * lane] != -least[2 * lane + 1]]

    def require_equal(self, least: Sequence[int], difference: Callable[[Agreement], IntegrityError]) -> None:
        """Raises IntegrityError on all ranks where the copies within any lane differ; then `difference` is asked by the
        ranks of such a lane, which may be collective over them."""
        apart = self.apart(least)
        if self.index in apart:
            raise difference(self.own)
        if apart:
            raise IntegrityError(
                f"the copies of one state have drifted apart between the ranks with tensor coordinate {apart[0]}: "
                "their own error says what differs"
            )

"""Host memory for snapshots: reused, never overwritten while anybody can still read it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# Tensors begin on cache lines, so that every dtype is aligned.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class HostCopy:
    """One tensor to copy out under `key`; `gaps` are the (offset, numel) of its elements that have no meaning."""

    key: str
    source: torch.Tensor
    gaps: Sequence[tuple[int, int]] = ()


class HostPool:
    """Slabs of host memory, pinned where that makes the copy faster. `keep` idle slabs are kept for the next snapshots.

    What `copy` hands out owns its slab: the slab comes back by itself when the last tensor made from it (any view of
    it included) is gone. A writer that is slow therefore costs memory, never a torn snapshot.
    """

    def __init__(self, pinned: bool, keep: int = 2) -> None:
        self._pinned = pinned
        # A deque, since slabs come back from whichever thread (or garbage collection) drops the last tensor.
        self._idle: deque[torch.Tensor] = deque(maxlen=keep)

    def copy(self, wanted: Sequence[HostCopy]) -> Mapping[str, torch.Tensor]:
        """1-D contiguous CPU tensors by key, equal to the sources now; gaps are zero. Waits for the device once."""
        begins, size = [], 0
        for item in wanted:
            begins.append(size)
            size += -(-item.source.numel() * item.source.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slab = self._slab(size)
        handed = self._hand_out(slab)
        found: dict[str, torch.Tensor] = {}
        for item, begin in zip(wanted, begins, strict=True):
            end = begin + item.source.numel() * item.source.element_size()
            target = slab[begin:end].view(item.source.dtype)
            target.copy_(item.source.detach().reshape(-1), non_blocking=self._pinned)
            found[item.key] = handed[begin:end].view(item.source.dtype)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        for item in wanted:
            for offset, numel in item.gaps:
                found[item.key][offset : offset + numel] = 0
        return found

    def _slab(self, size: int) -> torch.Tensor:
        while self._idle:
            slab = self._idle.popleft()
            if slab.numel() >= size:
                return slab
        return torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=self._pinned)

    def _hand_out(self, slab: torch.Tensor) -> torch.Tensor:
        # torch keeps the array alive as long as any tensor made from it; its end is the slab's return.
        array = slab.numpy()[:]
        weakref.finalize(array, self._idle.append, slab).atexit = False
        return torch.from_numpy(array)

"""Host memory for snapshots: reused, but never overwritten while a tensor of it is alive."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic.comm.device_stream import DeviceStream, enqueues
from elastic.training.state.capture_check import CaptureCheck
from elastic.training.state.pins import Pins

# Tensors begin on cache lines, so that every dtype is aligned.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class HostCopy:
    """One tensor to copy out under `key`; `gaps` are the (offset, numel) of its elements that have no meaning.

    `at_once`: something other than an optimizer step may change it, so the copy cannot be made concurrently.
    """

    key: str
    source: torch.Tensor
    gaps: Sequence[tuple[int, int]] = ()
    at_once: bool = False

    @property
    def bytes(self) -> int:
        return self.source.numel() * self.source.element_size()


@dataclass(frozen=True)
class Transfer:
    """Copies (target, source) to make, and the targets' gaps, to be set to zero after them.

    `device`: where copies come from; some may have been enqueued already, on the stream that was the current one then.
    None: all come from host memory. `check` reads the sources once more, between the copies and the next optimizer
    step, and then compares.
    """

    moves: Sequence[tuple[torch.Tensor, torch.Tensor]]
    zeros: Sequence[torch.Tensor]
    device: torch.device | None = None
    check: CaptureCheck | None = None

    def enqueue(self) -> None:
        """On the current stream, where the sources are on a device and the targets are pinned."""
        for target, source in self.moves:
            target.copy_(source, non_blocking=True)

    def parted(self) -> tuple[Transfer, Transfer]:
        """The copies from a device; and the copies from host memory, with the gaps of both."""
        device = [move for move in self.moves if move[1].is_cuda]
        host = [move for move in self.moves if not move[1].is_cuda]
        return Transfer(device, ()), Transfer(host, self.zeros, check=self.check)

    def finish(self) -> None:
        """After every copy has arrived."""
        for gap in self.zeros:
            gap.zero_()

    def run(self) -> None:
        """Make all copies; returns when they are made."""
        self.enqueue()
        if self.check is not None:
            self.check.look(cuda=True)
            self.check.look(cuda=False)
        if self.device is not None:
            DeviceStream(self.device).mark().synchronize()
        self.finish()
        if self.check is not None:
            self.check.compare()


def over(memory: memoryview) -> torch.Tensor:
    """The same memory, 1-D uint8. A rank that was dealt nothing of a replicated state has none, which torch refuses."""
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)


def packed(wanted: Sequence[HostCopy]) -> tuple[tuple[int, ...], int]:
    """Where each tensor begins when they lie one after the other, and how long that is; bytes."""
    begins, size = [], 0
    for item in wanted:
        begins.append(size)
        size += -(-item.bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(begins), size


def placed(wanted: Sequence[HostCopy], begins: Sequence[int], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views by key of `memory` (1-D uint8), of the sources' dtypes and lengths."""
    return {
        item.key: memory[begin : begin + item.bytes].view(item.source.dtype)
        for item, begin in zip(wanted, begins, strict=True)
    }


def transfer(wanted: Sequence[HostCopy], targets: Mapping[str, torch.Tensor]) -> Transfer:
    """The copies of `wanted` into `targets`. Those that cannot wait are made or enqueued before this returns.

    Enqueued, on the current stream, they precede whatever the training does to their sources next.
    """
    moves, zeros, device = [], [], None
    for item in wanted:
        move = (targets[item.key], item.source.detach().reshape(-1))
        if enqueues(item.source.device):
            device = item.source.device
        if item.at_once:
            move[0].copy_(move[1], non_blocking=True)
        else:
            moves.append(move)
        zeros += [targets[item.key][offset : offset + numel] for offset, numel in item.gaps]
    return Transfer(moves, zeros, device)


def host_memory(nbytes: int) -> torch.Tensor:
    """Zeroed memory of its own mapping, 1-D uint8, that data workers do not inherit (MADV_DONTFORK).

    A process that is forked shares private pages until one side writes. Where the parent writes, it gets another page;
    a device keeps writing into the first one where the kernel does not know of pins, and the copy is torn.
    """
    mapping = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class HostPool:
    """Slabs of host memory, pinned on a CUDA device. `keep` idle slabs are kept for the next snapshots.

    Not torch's own pinned memory: that takes up to twice as much (it rounds up to a power of two), and keeps what has
    become too small, as at another world size, until the process ends.

    What `copy` hands out owns its slab: the slab comes back by itself when the last tensor made from it (any view of
    it included) is gone. A writer that is slow therefore costs memory, never a torn snapshot.
    """

    def __init__(self, device: torch.device, keep: int = 2) -> None:
        self._pins = Pins(device)
        # A deque, since slabs are returned by any thread (or the garbage collector) that drops the last tensor.
        # Pinned slabs stay pinned until the end and are all kept: no more than were ever in use at once.
        self._idle: deque[torch.Tensor] = deque(maxlen=None if device.type == "cuda" else keep)

    def copy(self, wanted: Sequence[HostCopy]) -> Mapping[str, torch.Tensor]:
        """1-D contiguous CPU tensors by key, equal to the sources now; gaps are zero. Waits for the device once."""
        found, copies = self.prepare(wanted)
        copies.run()
        return found

    def prepare(self, wanted: Sequence[HostCopy]) -> tuple[Mapping[str, torch.Tensor], Transfer]:
        """The same tensors before they are filled, and what fills them. Sources must not change until that ran."""
        begins, size = packed(wanted)
        found = placed(wanted, begins, self._hand_out(self._slab(size)))
        return found, transfer(wanted, found)

    def _slab(self, size: int) -> torch.Tensor:
        while self._idle:
            slab = self._idle.popleft()
            if slab.numel() >= size:
                return slab
        made = host_memory(size)
        self._pins.pin(made)
        return made

    def close(self) -> None:
        """Call when no copy is pending. Tensors that were handed out can still be read."""
        self._pins.close()
        self._idle.clear()

    def _hand_out(self, slab: torch.Tensor) -> torch.Tensor:
        # torch keeps the array alive as long as any tensor made from it; its end is the slab's return.
        array = slab.numpy()[:]
        weakref.finalize(array, self._idle.append, slab).atexit = False
        return torch.from_numpy(array)

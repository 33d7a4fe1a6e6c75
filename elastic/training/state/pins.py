"""Memory that others made, pinned for a CUDA device: only then do copies into it run beside the computation."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


class Pins:
    """Registers memory with the driver, each stretch once. Does nothing on a device that is no CUDA device.

    What is pinned is kept alive until `close`: the driver must let go of memory before it is unmapped.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pinned: dict[tuple[int, int], torch.Tensor] = {}

    def pin(self, memory: torch.Tensor) -> None:
        """`memory` is 1-D. Where the driver refuses, copies are correct and slower; that is logged once per stretch."""
        key = (memory.data_ptr(), memory.numel() * memory.element_size())
        if not self._cuda or not key[1] or key in self._pinned:
            return
        # Registered once whatever comes of it: a refusal would only be repeated.
        self._pinned[key] = memory
        error = torch.cuda.cudart().cudaHostRegister(*key, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            logger.warning("%d MiB of snapshot memory could not be pinned: CUDA error %d", key[1] >> 20, int(error))

    def close(self) -> None:
        """No copy may be under way."""
        for address, _ in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()

"""Memory that others made, pinned for a CUDA device: only then do copies into it run beside the computation."""

from __future__ import annotations

import contextlib
import logging

import torch

logger = logging.getLogger(__name__)


class Pins:
    """Registers memory with the driver, each stretch once. Does nothing on a device that is no CUDA device.

    What is pinned is kept alive until `close`: the driver must let go of memory before it is unmapped.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: dict[tuple[int, int], torch.Tensor] = {}
        self._refused: set[tuple[int, int]] = set()

    def pin(self, memory: torch.Tensor) -> None:
        """`memory` is 1-D. Where the driver refuses, copies are correct and slower; that is logged once per stretch."""
        key = (memory.data_ptr(), memory.numel() * memory.element_size())
        if self._device.type != "cuda" or not key[1] or key in self._pinned or key in self._refused:
            return
        error = torch.cuda.cudart().cudaHostRegister(*key, 0)  # type: ignore[no-untyped-call]
        if int(error) == 0:
            self._pinned[key] = memory
            return
        # It would only be refused again.
        self._refused.add(key)
        logger.warning("%d MiB of snapshot memory could not be pinned: CUDA error %d", key[1] >> 20, int(error))
        self._forget_error()

    def close(self) -> None:
        """No copy may be under way."""
        for address, _ in self._pinned:
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:  # type: ignore[no-untyped-call]
                self._forget_error()
        self._pinned.clear()

    def _forget_error(self) -> None:
        """The runtime tells a refusal once more to whoever launches the next kernel, which would be the training. Let
        it be this one."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

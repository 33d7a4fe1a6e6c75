"""Pinning of existing memory for a CUDA device: only then do copies into it run concurrently with computation."""

from __future__ import annotations

import contextlib
import logging

import torch

logger = logging.getLogger(__name__)


class Pins:
    """Registers memory with the driver, each range once. Does nothing on other devices than CUDA.

    Pinned memory is kept alive until `close`: it must be unregistered before it is unmapped.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: dict[tuple[int, int], torch.Tensor] = {}
        self._refused: set[tuple[int, int]] = set()

    def pin(self, memory: torch.Tensor) -> None:
        """`memory` is 1-D. Where the driver refuses, copies are correct and slower; that is logged once per range."""
        key = (memory.data_ptr(), memory.numel() * memory.element_size())
        if self._device.type != "cuda" or not key[1] or key in self._pinned or key in self._refused:
            return
        error = torch.cuda.cudart().cudaHostRegister(*key, 0)  # type: ignore[no-untyped-call]
        if int(error) == 0:
            self._pinned[key] = memory
            return
        # The driver would refuse it again.
        self._refused.add(key)
        logger.warning("%d MiB of snapshot memory could not be pinned: CUDA error %d", key[1] >> 20, int(error))
        self._forget_error()

    def close(self) -> None:
        """Call when no copy is pending."""
        for address, _ in self._pinned:
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:  # type: ignore[no-untyped-call]
                self._forget_error()
        self._pinned.clear()

    def _forget_error(self) -> None:
        """The runtime reports a refusal again at the next kernel launch. Launch one here, so that training does not see
        it."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

"""Pinning of existing memory for a CUDA device: only then do copies into it run concurrently with computation."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import torch

from elastic.comm.device_stream import DeviceStream
from elastic.engines.select import engine_kind

logger = logging.getLogger(__name__)

# What is enqueued when a generation ends are copies of a second; a collective that was not aborted never ends.
_LIMIT_S = 5.0
_POLL_S = 0.001
# Memory that a device may still write into.
_KEPT: list[dict[tuple[int, int], torch.Tensor]] = []


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

    def unpin(self, memory: torch.Tensor) -> None:
        """Unregister what `pin` was called with. The device must be done with it."""
        self._forget((memory.data_ptr(), memory.numel() * memory.element_size()))

    def close(self) -> None:
        """Unregister all of it, unless the device is still at work: it stays registered until the process ends then."""
        if self._pinned and not done(self._device):
            logger.warning("%d stretches of pinned memory are kept: the device is still at work", len(self._pinned))
            _KEPT.append(self._pinned)
            self._pinned = {}
            return
        for key in tuple(self._pinned):
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        # Another mapping may come to lie there.
        self._refused.discard(key)
        if self._pinned.pop(key, None) is None:
            return
        if int(torch.cuda.cudart().cudaHostUnregister(key[0])) != 0:  # type: ignore[no-untyped-call]
            self._forget_error()

    def _forget_error(self) -> None:
        """The runtime reports a refusal again at the next kernel launch. Launch one here, so that training does not see
        it."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


def pinning(engine: str, local_rank: int = 0) -> Callable[[memoryview], Callable[[], None]]:
    """A function that pins memory for this engine's device and returns one that unpins it, before it is unmapped."""
    pins: list[Pins] = []

    def pin(memory: memoryview) -> Callable[[], None]:
        if not pins:
            # Not before: which device is used is asked for when there is one.
            pins.append(Pins(engine_kind(engine).device(local_rank)[1]))
        mapped = torch.frombuffer(memory, dtype=torch.uint8)
        pins[0].pin(mapped)
        return lambda: pins[0].unpin(mapped)

    return pin


def done(device: torch.device) -> bool:
    """Has the device done everything that was enqueued on the current stream, copies into pinned memory among it?

    Waits for it for a few seconds. True for other devices than CUDA, which nothing is pinned for.
    """
    if device.type != "cuda":
        return True
    try:
        event = DeviceStream(device).mark()
        deadline = time.monotonic() + _LIMIT_S
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
    except RuntimeError:
        return False
    return True

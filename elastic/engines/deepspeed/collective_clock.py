"""The time that a rank spends in collectives; the rest of a step is its own compute time.

With synchronous collectives all ranks have the same step time; the slow rank is the one that waits least. Every
collective of DeepSpeed goes through one object (`deepspeed.comm.comm.cdb`); a proxy in its place measures the time.

On a device a collective is only enqueued and returns at once; the wait shows wherever the thread next synchronises with
the device. No time is measured there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# Operations in which a rank may wait for others. All others of the backend return at once.
_COLLECTIVES = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
        "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
        "gather", "inference_all_reduce", "monitored_barrier", "recv", "reduce", "reduce_scatter",
        "reduce_scatter_tensor", "scatter", "send",
    }
)  # fmt: skip


class CollectiveClock:
    """`waited_s` only grows: seconds in collectives since `install`. Call `remove` before the groups are destroyed."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._backend: Any = None

    def install(self, device: torch.device) -> None:
        """No effect on devices other than the CPU: see above."""
        from deepspeed.comm import comm

        if device.type == "cpu" and comm.cdb is not None:
            self._backend = comm.cdb
            comm.cdb = _Timed(comm.cdb, self)

    def remove(self) -> None:
        from deepspeed.comm import comm

        if self._backend is not None:
            comm.cdb, self._backend = self._backend, None

    @property
    def works(self) -> bool:
        return self._backend is not None

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, with its time added. An asynchronous call returns a handle whose wait is timed too."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                result = call(*args, **kwargs)
            finally:
                self.waited_s += time.perf_counter() - began
            return _Handle(result, self) if hasattr(result, "wait") else result

        return wrapped


class _Timed:
    """DeepSpeed's communication backend with its collectives timed."""

    def __init__(self, backend: Any, clock: CollectiveClock) -> None:
        self._backend = backend
        for name in _COLLECTIVES:
            if hasattr(backend, name):
                setattr(self, name, clock.timed(getattr(backend, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _Handle:
    """torch's handle of a pending collective with its wait timed."""

    def __init__(self, handle: Any, clock: CollectiveClock) -> None:
        self._handle = handle
        self.wait = clock.timed(handle.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

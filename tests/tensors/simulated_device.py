"""Devices that are behind the thread that enqueues their work, with streams and events as `DeviceStream` has them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Device:
    """`now` is the thread's clock, `free_at` when the device has done what it was given. Seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free_at = 0.0

    def work(self, seconds: float) -> None:
        """Enqueued by the thread, which does not wait."""
        self.free_at = max(self.free_at, self.now) + seconds

    def wait_until(self, at: float) -> None:
        """Enqueued: the stream waits for another one."""
        self.free_at = max(self.free_at, self.now, at)

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)


class Mark:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = max(device.free_at, device.now)

    def query(self) -> bool:
        return self.at <= self._device.now

    def elapsed_time(self, later: Mark) -> float:
        return 1000.0 * (later.at - self.at)


class SimulatedStream:
    """In the place of `DeviceStream`. All of them are one stream of `simulated`, which a subclass sets."""

    simulated: Device

    def __init__(self, device: torch.device, own: bool = False) -> None:
        self._device = self.simulated

    def mark(self, timed: bool = False) -> Mark:
        assert timed
        return Mark(self._device)


class LateDevice:
    """Stands in for `DeviceStream`: copies are made when somebody waits for a mark behind them, and not before."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.seen: list[str] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.pending.append(lambda: void(target.copy_(source)))

    def mark(self) -> Any:
        number = sum("enqueued" in what for what in self.seen)
        self.seen.append(f"batch {number} is enqueued")
        before, self.pending = self.pending, []

        def synchronize() -> None:
            self.seen.append(f"batch {number} is waited for")
            while before:
                before.pop(0)()

        return SimpleNamespace(synchronize=synchronize)


def void(_: object) -> None: ...

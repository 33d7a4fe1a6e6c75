"""Streams and events of a device: the one place that asks torch for them, in torch's terms for all accelerators.

A call that enqueues work on a device returns before that is done. On the CPU everything is done when a call returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def enqueues(device: torch.device) -> bool:
    """Is work on this device still under way when the call that began it has returned?"""
    return device.type != "cpu"


def capturing(device: torch.device) -> bool:
    """Is what the calling thread enqueues recorded into a CUDA graph, and not done now?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class DeviceStream:
    """The stream that the calling thread uses at the time of each call, or with `own` another one beside it."""

    def __init__(self, device: torch.device, own: bool = False) -> None:
        self._device = device
        self._own: Any = torch.Stream(device=device) if own else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy. It is concurrent only where the side on the host is pinned."""
        with self.used():
            target.copy_(source, non_blocking=True)

    def mark(self, timed: bool = False) -> torch.Event:
        """Reached by the device (`query`, `synchronize`) when everything is done that was enqueued so far."""
        event = torch.Event(device=self._device, enable_timing=timed)
        self._stream().record_event(event)
        return event

    def wait(self, mark: torch.Event) -> None:
        """What is enqueued from here on begins when `mark` is reached. The calling thread does not wait."""
        self._stream().wait_event(mark)

    def follow(self) -> None:
        """A stream of its own: begin after what the thread's stream was given so far."""
        self._own.wait_stream(torch.accelerator.current_stream(self._device))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Whatever is computed inside is enqueued here."""
        if self._own is None:
            yield
        else:
            with self._own:
                yield

    def _stream(self) -> Any:
        return torch.accelerator.current_stream(self._device) if self._own is None else self._own


class DelayClock:
    """How long a device's work was delayed by what is enqueued between its steps, beyond the time that the calling
    thread itself took for that. On the CPU that is nothing.

    Measured by events on the stream, which are read when the device has reached them: nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = DeviceStream(device) if enqueues(device) else None
        self._pending: list[tuple[torch.Event, torch.Event, float]] = []

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Around what the device does instead of training, or waits for."""
        if self._stream is None:
            yield
            return
        before, began = self._stream.mark(timed=True), time.perf_counter()
        yield
        self._pending.append((before, self._stream.mark(timed=True), time.perf_counter() - began))

    def take(self) -> float:
        """Seconds of the delays that the device has passed since the last call. Call it after a synchronisation."""
        passed = [entry for entry in self._pending if entry[1].query()]
        self._pending = [entry for entry in self._pending if entry not in passed]
        # Events count milliseconds.
        return sum(max(0.0, before.elapsed_time(after) / 1000.0 - spent_s) for before, after, spent_s in passed)

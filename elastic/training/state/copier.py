"""Copies of the state that are made concurrently with training, between two optimizer steps.

Only an optimizer step changes masters and optimizer state, so the copies of a snapshot can be made while the next step
computes its gradients; `fence` delays that step's update until they are made.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.comm.device_stream import DeviceStream, enqueues
from elastic.core.errors import ElasticError, IntegrityError
from elastic.training.state.host import Transfer

logger = logging.getLogger(__name__)

# A copy to host memory takes seconds at most; one that takes this long will not end.
_LIMIT_S = 120.0


@dataclass
class _Job:
    """`transfer` is copied by the thread. `enqueued` is copied by the device, which is done when `event` is reached."""

    transfer: Transfer
    then: Callable[[], None]
    enqueued: Transfer | None = None
    event: Any = None
    copied: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Copier:
    """One thread, and on a CUDA device one stream. `start` and `fence` belong to the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._training = DeviceStream(device)
        self._stream = DeviceStream(device, own=True) if enqueues(device) else None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: list[_Job] = []
        self._idle = threading.Condition()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._failure: IntegrityError | None = None

    def start(self, transfer: Transfer, then: Callable[[], None]) -> None:
        """Begin to copy; `then` is called on the copier's thread when the copies are made. An exception is logged."""
        job = _Job(transfer, then)
        if self._stream is not None:
            # The state of an offloaded optimizer is in host memory: copying it here would block this thread.
            job.enqueued, job.transfer = transfer.parted()
            self._stream.follow()
            with self._stream.used():
                job.enqueued.enqueue()
                if transfer.check is not None:
                    transfer.check.look(cuda=True)
            job.event = self._stream.mark()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elastic-copier", daemon=True)
            self._thread.start()
        with self._idle:
            self._unfinished += 1
        self._pending.append(job)
        self._jobs.put(job)

    def fence(self) -> float:
        """Before the state changes: wait until every copy that was started has read it. Returns the seconds waited.

        For tensors on a device its stream waits, not this thread (see `DelayClock`). Raises ElasticError when a copy
        failed, and IntegrityError from the first verified copy on that was not what the engine holds.
        """
        self.raise_failure()
        began, pending = time.perf_counter(), self._pending
        self._pending = []
        for job in pending:
            if job.event is not None:
                self._training.wait(job.event)
            if (job.transfer.moves or job.transfer.check is not None) and not job.copied.wait(_LIMIT_S):
                raise ElasticError(f"a copy of the state to host memory has not ended for {_LIMIT_S:.0f} s")
            self.raise_failure()
            if job.error is not None:
                raise ElasticError(f"the state could not be copied to host memory: {job.error}") from job.error
        return time.perf_counter() - began if pending else 0.0

    def raise_failure(self) -> None:
        """Raises the IntegrityError of a copy that was not what the engine holds; it was not handed over."""
        if self._failure is not None:
            raise self._failure

    def drain(self, timeout_s: float) -> bool:
        """Wait until every copy was made and every `then` has returned."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._unfinished, timeout_s)

    def close(self) -> bool:
        """End the thread after the copies that were started. No source is read after this returns True."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(_LIMIT_S)
        self._pending.clear()
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._finish(job)
            with self._idle:
                self._unfinished -= 1
                self._idle.notify_all()
            # Its tensors must not stay alive while this thread waits for the next job.
            del job

    def _finish(self, job: _Job) -> None:
        try:
            job.transfer.enqueue()
            if job.transfer.check is not None:
                job.transfer.check.look(cuda=False)
            job.copied.set()
            if job.event is not None:
                job.event.synchronize()
            job.transfer.finish()
            if job.transfer.check is not None:
                job.transfer.check.compare()
        except IntegrityError as error:
            logger.error("%s", error)
            job.error = self._failure = error
            job.copied.set()
            return
        except Exception as error:
            logger.exception("a copy to host memory failed")
            job.error = error
            job.copied.set()
            return
        try:
            job.then()
        except Exception:
            logger.exception("a snapshot was copied to host memory but could not be handed over")

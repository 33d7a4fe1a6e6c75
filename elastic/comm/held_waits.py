"""Releases threads that wait for a collective or a message of gloo which gloo will not end before its timeout.

When a connection is lost, gloo (as of torch 2.13) tells the operations that are queued, but not the one whose bytes are
on their way: `Pair::signalException` (gloo/transport/tcp/pair.cc) passes over the buffers of `rx_` and `tx_`.
So a rank that gathers or exchanges megabytes when a peer is killed waits for the group's timeout. Here an abort lets
waits of Python code end all the same. The groups, whose destruction would wait too, are kept until gloo has given up.

A wait for a collective looks up in between. One for a message from rank to rank (`send`, `recv`) cannot, as a wait with
a limit closes the connection when it is over: another thread waits in its place. A reduce-scatter's has no limit, and
was not held in 21 of 21 kills amid 48 MB: it is left to torch.

Not covered: waits inside of torch's C++ code. There the worker counts as lost when `abort_timeout_s` is over.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

logger = logging.getLogger(__name__)

# How often a wait looks whether there was an abort, and how long after one gloo may end a collective by itself. Sockets
# that are shut down do that within milliseconds where they can.
_LOOK_S = 0.1
_BY_ITSELF_S = 0.3
# Beyond the timeout of the last collective that began.
_MARGIN_S = 5.0

# Not in torch's stubs. Works tell theirs as a number.
_OpType: Any = c10d.OpType  # type: ignore[attr-defined]
_MESSAGES = frozenset(op.value for op in (_OpType.SEND, _OpType.RECV, _OpType.RECVANYSOURCE))
# Which a reduce-scatter of gloo has.
_UNKNOWN = _OpType.UNKNOWN.value
# torch's own.
_wait = Work.wait


class HeldWaits:
    """From `install` to `remove` waits of this process's threads end with an abort. One at a time is installed."""

    def __init__(self, generation: int, timeout_s: float, groups: Callable[[], Iterable[dist.ProcessGroup]]) -> None:
        """`timeout_s` is that of the groups."""
        self._generation = generation
        self._timeout_s = timeout_s
        self._groups = groups
        self._aborted_at: float | None = None
        self._waiters = _Waiters()

    def install(self) -> None:
        # It is called as a method: a bound one would be given no `Work`.
        held = self
        Work.wait = lambda work, *args, **kwargs: held._waited(work, *args, **kwargs)  # type: ignore[method-assign]

    def remove(self) -> None:
        Work.wait = _wait  # type: ignore[method-assign]
        self._waiters.end()

    def abort(self) -> None:
        """From any thread, any number of times."""
        if self._aborted_at is None:
            self._aborted_at = time.monotonic()

    def _waited(self, work: Any, *args: Any, **kwargs: Any) -> bool:
        op = work._get_op_type()
        if args or kwargs or op == _UNKNOWN:
            return _wait(work, *args, **kwargs)
        if op in _MESSAGES:
            return self._message(work)
        while True:
            try:
                return _wait(work, timedelta(seconds=_LOOK_S))
            except RuntimeError:
                if work.is_completed():
                    # With its own error, or meanwhile.
                    return _wait(work)
                self._leave(work)

    def _message(self, work: Any) -> bool:
        outcome = self._waiters.wait(work)
        while True:
            try:
                found = outcome.get(timeout=_LOOK_S)
            except queue.Empty:
                self._leave(work)
                continue
            if isinstance(found, BaseException):
                raise found
            return found

    def _leave(self, work: Any) -> None:
        """Raises where there was an abort and gloo had its time."""
        if self._aborted_at is not None and time.monotonic() - self._aborted_at > _BY_ITSELF_S:
            self._keep_groups(work)
            op = _OpType(work._get_op_type()).name
            raise RuntimeError(f"generation {self._generation} was aborted while gloo held a half-done {op}") from None

    def _keep_groups(self, work: Any) -> None:
        kept: list[Any] = [work, *self._groups()]
        logger.warning(
            "generation %d: a peer was lost within a transfer: gloo keeps the groups and the tensor for %.0f s more",
            self._generation,
            self._timeout_s,
        )
        timer = threading.Timer(self._timeout_s + _MARGIN_S, kept.clear)
        timer.daemon = True
        timer.start()


_Outcome = queue.SimpleQueue[bool | BaseException]
_Jobs = queue.SimpleQueue[tuple[Any, _Outcome] | None]


class _Waiters:
    """Threads that wait for a work until it ends, as many as there are waits at once; idle ones are used again."""

    def __init__(self) -> None:
        self._idle: deque[_Jobs] = deque()
        self._threads: list[threading.Thread] = []
        self._ended = False

    def wait(self, work: Any) -> _Outcome:
        """Gets what the wait returns or raises."""
        outcome: _Outcome = queue.SimpleQueue()
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            # Gloo may hold it longer than the process has to do.
            thread = threading.Thread(target=self._serve, args=[jobs], name="elastic-message-wait", daemon=True)
            thread.start()
            self._threads.append(thread)
        jobs.put((work, outcome))
        return outcome

    def end(self) -> None:
        """Those that gloo holds end when it has given up."""
        self._ended = True
        while self._idle:
            self._idle.pop().put(None)
        for thread in self._threads:
            thread.join(_LOOK_S)
        self._threads.clear()

    def _serve(self, jobs: _Jobs) -> None:
        while (job := jobs.get()) is not None:
            work, outcome = job
            try:
                found: bool | BaseException = _wait(work)
            except BaseException as error:  # noqa: BLE001 - it is raised where the work is waited for
                found = error
            # Before its outcome is known: the next wait finds it.
            self._idle.append(jobs)
            outcome.put(found)
            del work, outcome, job, found
            if self._ended and self._withdrawn(jobs):
                return

    def _withdrawn(self, jobs: _Jobs) -> bool:
        """Whoever else has taken it puts something into it."""
        try:
            self._idle.remove(jobs)
        except ValueError:
            return False
        return True

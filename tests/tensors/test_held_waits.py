"""Waits for collectives and messages of gloo that an abort ends. Works are made up; see also
tests/processes/test_generation.py."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Work

from elastic.comm import held_waits
from elastic.comm.held_waits import HeldWaits

# As `OpType` numbers them.
ALL_TO_ALL, SEND = 10, 12


class Held:
    """A `Work` that never ends by itself."""

    def __init__(self, op: int, ends: bool = False) -> None:
        self._op, self._ends = op, ends
        self.asked: list[timedelta | None] = []
        self.on_wait: Any = lambda: None

    def _get_op_type(self) -> int:
        return self._op

    def is_completed(self) -> bool:
        return self._ends

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.asked.append(timeout)
        self.on_wait()
        raise RuntimeError("its own error" if self._ends else "Operation timed out!")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWaits]:
    monkeypatch.setattr(held_waits, "_wait", lambda work, *args: work.wait(*args))
    monkeypatch.setattr(held_waits, "_BY_ITSELF_S", 0.0)
    monkeypatch.setattr(held_waits, "_MARGIN_S", 0.0)
    made = HeldWaits(7, 0.0, lambda: [])
    yield made
    made._waiters.end()


class Group:
    pass


def test_a_held_collective_is_left_once_there_was_an_abort(waits: HeldWaits) -> None:
    work = Held(ALL_TO_ALL)
    work.on_wait = lambda: waits.abort() if len(work.asked) == 3 else None
    with pytest.raises(RuntimeError, match="generation 7 was aborted while gloo held a half-done ALLTOALL_BASE"):
        waits._waited(work)
    assert len(work.asked) >= 3, "as long as nobody has aborted, it is waited for"


def test_its_groups_are_kept_until_gloo_has_given_up(waits: HeldWaits) -> None:
    groups: list[Any] = [Group()]
    gone = weakref.ref(groups[0])
    waits._groups = lambda: groups
    waits._timeout_s = 0.2
    waits.abort()
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="half-done"):
        waits._waited(Held(ALL_TO_ALL))
    groups.clear()
    (timer,) = set(threading.enumerate()) - before
    assert timer.daemon
    timer.join(20.0)
    assert gone() is None


def test_its_own_error_is_told_and_a_limit_of_the_callers_is_left_to_torch(waits: HeldWaits) -> None:
    waits.abort()
    for work in (Held(ALL_TO_ALL, ends=True), Held(SEND, ends=True)):
        with pytest.raises(RuntimeError, match="its own error"):
            waits._waited(work)
    limited = Held(ALL_TO_ALL)
    with pytest.raises(RuntimeError, match="timed out"):
        waits._waited(limited, timedelta(seconds=3))
    assert limited.asked == [timedelta(seconds=3)]


def test_a_held_message_is_left_and_its_wait_has_no_limit(waits: HeldWaits) -> None:
    """A wait with a limit for a message closes its connection when the limit is over."""
    message, gives_up = Held(SEND), threading.Event()

    def held() -> None:
        waits.abort()
        gives_up.wait(20.0)

    message.on_wait = held
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="generation 7 was aborted while gloo held a half-done SEND"):
        waits._waited(message)
    assert message.asked == [None]
    waiting = [thread for thread in set(threading.enumerate()) - before if thread.name == "elastic-message-wait"]
    assert [thread.daemon for thread in waiting] == [True]
    waits._waiters.end()
    gives_up.set()
    waiting[0].join(20.0)
    assert not waiting[0].is_alive()


def test_messages_are_waited_for_at_once_by_as_many_threads_as_there_are_at_once(waits: HeldWaits) -> None:
    before = set(threading.enumerate())
    first, second, third = (Held(SEND) for _ in range(3))
    second_waits = threading.Event()
    # The first ends only when the second is waited for, too.
    first.on_wait = lambda: second_waits.wait(20.0)
    second.on_wait = second_waits.set

    def wait_for_first() -> None:
        with pytest.raises(RuntimeError, match="timed out"):
            waits._waited(first)

    other = threading.Thread(target=wait_for_first)
    other.start()
    for work in (second, third):
        with pytest.raises(RuntimeError, match="timed out"):
            waits._waited(work)
    other.join(20.0)
    assert not other.is_alive()
    waiting = {thread for thread in set(threading.enumerate()) - before if thread.name == "elastic-message-wait"}
    assert len(waiting) <= 2
    waits._waiters.end()
    for thread in waiting:
        thread.join(20.0)
        assert not thread.is_alive()


def test_a_wait_that_begins_as_the_generation_closes_is_served(waits: HeldWaits) -> None:
    """By the thread that has just served another one."""
    served, closed, waiters = threading.Event(), threading.Event(), waits._waiters

    class Idle(deque[Any]):
        def append(self, jobs: Any) -> None:
            super().append(jobs)
            served.set()
            closed.wait(20.0)

    waiters._idle = Idle()
    before = set(threading.enumerate())
    first = waiters.wait(Held(SEND))
    served.wait(20.0)
    second = waiters.wait(Held(SEND))
    waiters.end()
    closed.set()
    for outcome in (first, second):
        assert "timed out" in str(outcome.get(timeout=20.0))
    for thread in set(threading.enumerate()) - before:
        thread.join(20.0)
        assert not thread.is_alive()


def test_only_waits_between_install_and_remove_are_its_own() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        before, asked = Work.wait, []
        waits = HeldWaits(7, 60.0, lambda: [])
        waits._waited = lambda work, *args: asked.append(work)  # type: ignore[method-assign, assignment, misc]
        waits.install()
        dist.all_reduce(torch.ones(2))
        waits.remove()
        dist.all_reduce(torch.ones(2))
        assert Work.wait is before
        assert [work._get_op_type() for work in asked] == [1]
    finally:
        dist.destroy_process_group()

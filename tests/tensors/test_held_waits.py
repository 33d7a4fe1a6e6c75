"""Waits for collectives of gloo that an abort ends. Works are made up; see also tests/processes/test_generation.py."""

from __future__ import annotations

import threading
import weakref
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
def waits(monkeypatch: pytest.MonkeyPatch) -> HeldWaits:
    monkeypatch.setattr(held_waits, "_wait", lambda work, *args: work.wait(*args))
    monkeypatch.setattr(held_waits, "_BY_ITSELF_S", 0.0)
    monkeypatch.setattr(held_waits, "_MARGIN_S", 0.0)
    return HeldWaits(7, 0.0, lambda: [])


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


def test_its_own_error_is_told_and_messages_are_waited_for_as_torch_does(waits: HeldWaits) -> None:
    waits.abort()
    with pytest.raises(RuntimeError, match="its own error"):
        waits._waited(Held(ALL_TO_ALL, ends=True))
    # A wait with a limit for a message closes its connection.
    message, limited = Held(SEND), Held(ALL_TO_ALL)
    with pytest.raises(RuntimeError, match="timed out"):
        waits._waited(message)
    assert message.asked == [None]
    with pytest.raises(RuntimeError, match="timed out"):
        waits._waited(limited, timedelta(seconds=3))
    assert limited.asked == [timedelta(seconds=3)]


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

"""What becomes of a process when a peer is lost under NCCL. Without NCCL: the groups are not real."""

from __future__ import annotations

import os
import threading

import pytest

from elastic.training import process_group
from elastic.training.process_group import ProcessGroup, outlive_peers
from elastic.training.session import GenerationSpec, Rendezvous

LIMIT_S = 20.0


def test_torch_does_not_end_a_process_that_is_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"})
    outlive_peers()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1", "the user's own word counts"


class Stuck:
    """Its abort returns only when that of the other group has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.other: Stuck | None = None
        self.released = 0

    def abort(self) -> None:
        self.begun.set()
        assert self.other is not None
        self.released += self.other.begun.wait(LIMIT_S)


def test_no_groups_abort_waits_for_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    world, clone = Stuck(), Stuck()
    world.other, clone.other = clone, world
    monkeypatch.setattr(process_group, "_groups", lambda: [world, clone])
    group = ProcessGroup(GenerationSpec("run", 1, 0, 2), Rendezvous("127.0.0.1", 1))
    group._backend, group._joined = "nccl", True
    group.sweep()
    assert (world.released, clone.released) == (1, 1)
    # A group may connect after it was aborted.
    group.sweep()
    assert (world.released, clone.released) == (2, 2)

"""Two hundred generations in one worker process, each restored from the last one's snapshot: nothing piles up."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_one_rank import train

from benchmarks.alone import MemoryNode, live
from elastic.comm.process_group import await_dropped

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GENERATIONS, SETTLED = 200, 40
# Python's and malloc's own hesitation to give memory back; the state of one generation is 0.1 MB.
TOLERATED_BYTES = 8_000_000


@dataclass(frozen=True)
class Held:
    """What this process has: threads, open descriptors, mapped snapshot segments, and resident bytes."""

    threads: int
    descriptors: int
    segments: int
    resident: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        assert await_dropped()
        maps = Path("/proc/self/maps").read_text().count("memfd:elastic-snapshot")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(threading.active_count(), len(os.listdir("/proc/self/fd")), maps, pages * os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_hundred_generations_in_one_process_leave_nothing_behind(stage: int, tmp_path: Path) -> None:
    config = {"stage": stage, "dtype": "fp32"}
    held: list[Held] = []
    losses: list[float] = []
    with MemoryNode() as node:
        for number in range(1, GENERATIONS + 1):
            lived = live(number, train, config, tmp_path, end_at=2 * number, node=node, restore=number > 1)
            losses += [report.loss for report in lived.steps]
            held.append(Held.now())
    settled, last = held[SETTLED], held[-1]
    assert (last.threads, last.descriptors, last.segments) == (settled.threads, settled.descriptors, settled.segments)
    assert last.resident - settled.resident < TOLERATED_BYTES
    if torch.cuda.is_available():
        assert torch.cuda.memory_allocated() == 0
    with MemoryNode() as node:
        whole = live(1, train, config, tmp_path, end_at=2 * GENERATIONS, node=node)
    # One rank throughout: the same operations in the same order.
    assert losses == [report.loss for report in whole.steps]


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL's groups are closed by all ranks at once")
def test_the_training_thread_does_not_wait_until_connections_are_closed(tmp_path: Path) -> None:
    """gloo takes up to 10 ms for each of them."""
    closed_by: list[str] = []

    def watching(config: dict[str, Any]) -> None:
        for group in dist.distributed_c10d._world.pg_map:
            weakref.finalize(group, lambda: closed_by.append(threading.current_thread().name))
        train(config)

    with MemoryNode() as node:
        live(1, watching, {"stage": 1, "dtype": "fp32"}, tmp_path, end_at=2, node=node)
    assert await_dropped()
    assert set(closed_by) == {"elastic-close"}

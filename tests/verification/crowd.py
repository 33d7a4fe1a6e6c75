"""All ranks of any world size in one process: one thread per rank, real collectives between the threads.

Engines are built one after the other, each under torch's fake process group as the rank it is to be; what they do
together later runs in threads, with the collectives of `deepspeed.comm` and `torch.distributed` replaced by exchanges
between them. Only one thread runs at a time, so that DeepSpeed's process-wide state is never touched by two.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch

T = TypeVar("T")

# An exchange between threads that do arithmetic on small tensors takes milliseconds.
_LIMIT_S = 60.0
_ENVIRONMENT = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class LeftAlone(RuntimeError):
    """A rank waits in a collective that another one never joins: in a real run it would hang."""


class Crowd:
    """`run` calls `work(rank)` in as many threads as there are ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        # Whoever holds it runs; the others wait for it, or in a collective.
        self._baton = threading.Condition()
        self._slots: list[Any] = [None] * world_size
        self._round = self._arrived = 0
        self._gone: list[int] = []

    def run(self, work: Callable[[int], T]) -> list[T | Exception]:
        """What each rank returned or raised, by rank."""
        found: list[Any] = [None] * self.world_size
        self._arrived, self._gone = 0, []

        def one(rank: int) -> None:
            _here.rank, _here.crowd = rank, self
            with self._baton:
                try:
                    found[rank] = work(rank)
                except Exception as error:  # noqa: BLE001 - what it raises is the result
                    found[rank] = error
                self._gone.append(rank)
                self._baton.notify_all()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        with _between_threads():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found

    def exchange(self, value: T) -> list[T]:
        """Everyone's value, by rank. Collective; raises LeftAlone when a rank has ended without it."""
        self._slots[_here.rank] = value
        self._meet()
        found = list(self._slots)
        self._meet()
        return found

    def _meet(self) -> None:
        current = self._round
        self._arrived += 1
        if self._arrived == self.world_size:
            self._arrived, self._round = 0, current + 1
            self._baton.notify_all()
            return
        self._baton.wait_for(lambda: self._round != current or bool(self._gone), _LIMIT_S)
        if self._round == current:
            raise LeftAlone(f"rank {_here.rank} waits in a collective, ranks {sorted(self._gone)} have gone")


class _Here(threading.local):
    rank: int = -1
    crowd: Crowd | None = None


_here = _Here()


def own_rank() -> tuple[int, int]:
    """(rank, world size) of the calling thread."""
    assert _here.crowd is not None
    return _here.rank, _here.crowd.world_size


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process is one rank of a group whose collectives do nothing: DeepSpeed builds its engine as it would."""
    import torch.distributed as dist
    from deepspeed import comm
    from torch.testing._internal.distributed.fake_pg import FakeStore

    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), **_ENVIRONMENT}
    with mock.patch.dict(os.environ, environment):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            comm.destroy_process_group()


@contextmanager
def _between_threads() -> Iterator[None]:
    from deepspeed import comm

    functions = {
        "is_initialized": lambda: True,
        "has_all_gather_into_tensor": lambda: True,
        "get_rank": lambda group=None: _here.rank,
        "get_world_size": lambda group=None: _here.crowd.world_size,
        "barrier": lambda *_, **__: _here.crowd.exchange(None),
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_into,
        "allgather_fn": _all_gather_into,
    }
    # Ours goes to torch itself.
    ours = {name: functions[name] for name in ("get_rank", "get_world_size", "all_reduce")}
    ours["get_process_group_ranks"] = lambda group=None: [*range(_here.crowd.world_size)]
    with mock.patch.multiple(comm, **functions), mock.patch.multiple(torch.distributed, **ours):
        yield


class _Done:
    def wait(self) -> None:
        return None


def _all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False, **_: Any) -> _Done:
    stacked = torch.stack(_here.crowd.exchange(tensor.detach().clone()))
    # By name: DeepSpeed's operations are not torch's.
    reductions = {"SUM": lambda: stacked.sum(0), "MAX": lambda: stacked.amax(0), "MIN": lambda: stacked.amin(0)}
    tensor.copy_(reductions["SUM" if op is None else op.name]())
    return _Done()


def _all_gather(targets: list[torch.Tensor], tensor: torch.Tensor, *_: Any, **__: Any) -> _Done:
    for target, value in zip(targets, _here.crowd.exchange(tensor.detach().clone()), strict=True):
        target.copy_(value)
    return _Done()


def _all_gather_into(target: torch.Tensor, tensor: torch.Tensor, *_: Any, **__: Any) -> _Done:
    target.copy_(torch.cat([value.reshape(-1) for value in _here.crowd.exchange(tensor.detach().clone())]))
    return _Done()

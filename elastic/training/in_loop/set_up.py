"""The user's set-up, up to its first batch: its barriers, and who in it asks for the rank.

`torch.distributed.barrier` is between the ranks that are in their set-up. Scripts have it around what one rank does for
all (a download, a cache). Of a worker that joins, the others have passed it long ago and are in their loops: it passes
too. Where functions are called again, those meet, and nobody else.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch.distributed as dist

from elastic.comm.process_group import ProcessGroup
from elastic.comm.rendezvous import await_all
from elastic.training.in_loop import ahead

# In the count of those that have joined, what one adds that is in its set-up.
_IN_SET_UP = 1 << 32


class SetUp:
    """Of one process, on its training thread. Call order: 1. `begins` when the function is called 2. `joined` for each
    generation; `closed` and `reopened` around what is no set-up."""

    def __init__(self) -> None:
        # Packages whose code has been told this process's rank in a set-up, and may keep it.
        self.rank_known_to: set[str] = set()
        self._open = False
        self._thread = 0
        self._group: ProcessGroup | None = None
        self._takes_part, self._met = False, 0
        # Whether the function has passed one before it had a generation.
        self.passed = False
        _install()

    def begins(self) -> None:
        global _current
        _current = self
        self._thread, self.passed = threading.get_ident(), False
        self.reopened()

    def rank_asked(self) -> None:
        self.rank_known_to.add(ahead.asker())

    def joined(self, group: ProcessGroup, in_set_up: bool) -> None:
        """The function is `in_set_up`, from its top: it comes to every barrier. Collective, without waiting."""
        self._group, self._takes_part, self._met = group, in_set_up, 0
        size = group.spec.world_size
        count = group.store.add(self._key("joined"), 1 + _IN_SET_UP * in_set_up)
        if count % _IN_SET_UP == size:
            group.store.set(self._key("meet"), str(count // _IN_SET_UP))

    def closed(self) -> None:
        self._open = False
        ahead.listen(None)

    def reopened(self) -> None:
        self._open = True
        ahead.listen(self.rank_asked)

    def passes(self, group: Any) -> bool:
        """The barrier is passed, maybe after a while. False: it is torch's own."""
        if not self._open or threading.get_ident() != self._thread:
            return False
        if ahead.may_pass():
            self.passed = True
            return True
        if self._group is None or not (group is None or group is dist.distributed_c10d._world.default_pg):
            return False
        if self._takes_part:
            self._met += 1
            meet = int(self._group.store.get(self._key("meet")))
            await_all(self._group.store, self._key(f"barrier{self._met}"), meet)
        return True

    def _key(self, name: str) -> str:
        assert self._group is not None
        return f"elastic/{self._group.spec.generation}/set-up/{name}"


_current: SetUp | None = None


@functools.cache
def _install() -> None:
    """Once per process."""
    original = dist.barrier

    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Any:
        if not async_op and _current is not None and _current.passes(group):
            return None
        return original(group, async_op, device_ids, timeout)

    dist.barrier = dist.distributed_c10d.barrier = barrier

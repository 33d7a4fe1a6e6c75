"""A group of all ranks that a set-up has made, by `torch.distributed.new_group()` without ranks: of gloo, mostly, for
what is on the host. For the script it is one object in all generations; behind it is a group of torch's in each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# Modules of torch that use a group's name at once. Others, such as DeviceMesh, keep it, and the number of ranks too.
_AT_ONCE = frozenset({"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"})
# Of the object itself.
_OWN = frozenset({"boxed"})


class GroupOfAll(dist.ProcessGroup):
    """`behind` is None while its process has no generation: what needs it calls `join`, which is to set it before the
    first. `kept` is called where something keeps what is only this generation's.

    In dictionaries, torch's above all, it is the group that is behind it.
    """

    def __init__(self, join: Callable[[], None], kept: Callable[[], None]) -> None:
        # What C++ sees of it alone, which calls it for all that it does: no rank of no ranks.
        # Of torch's two forms the other, with a store, makes no subclass; the stub has that one alone.
        super().__init__(-1, -1)  # type: ignore[call-arg]
        self.behind: dist.ProcessGroup | None = None
        self._join = join
        self._kept = kept

    def now(self) -> Any:
        if self.behind is None:
            self._join()
        if self.behind is None:
            raise ValueError("Invalid process group specified: its generation is over, or has not begun")
        return self.behind

    def __eq__(self, other: object) -> bool:
        return bool(self.now() == (other.now() if isinstance(other, GroupOfAll) else other))

    def __hash__(self) -> int:
        return hash(self.now())

    @property
    def group_name(self) -> Any:
        if sys._getframe(1).f_globals.get("__name__") not in _AT_ONCE:
            self._kept()
        return self.now().group_name


def _method(name: str) -> Callable[..., Any]:
    def call(self: GroupOfAll, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.now(), name)(*args, **kwargs)

    return call


def _property(name: str) -> property:
    def get(self: GroupOfAll) -> Any:
        return getattr(self.now(), name)

    def put(self: GroupOfAll, value: Any) -> None:
        setattr(self.now(), name, value)

    return property(get, put)


def _delegate() -> None:
    """Everything else is done by the group that is behind."""
    for name in set(dir(dist.ProcessGroup)) - set(vars(GroupOfAll)) - _OWN:
        found = inspect.getattr_static(dist.ProcessGroup, name)
        if name.startswith(("__", "_pybind11")):
            continue
        if isinstance(found, property):
            setattr(GroupOfAll, name, _property(name))
        elif inspect.isroutine(found) and not isinstance(found, staticmethod):
            setattr(GroupOfAll, name, _method(name))


_delegate()

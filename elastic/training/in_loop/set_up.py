"""The user's set-up, up to its first batch: its barriers and other collectives, and who in it asks for the rank.

`torch.distributed.barrier` is between the ranks that are in their set-up. Scripts have it around what one rank does for
all (a download, a cache). Of a worker that joins, the others have passed it long ago and are in their loops: it passes
too. Where functions are called again, those meet, and nobody else.

What other collectives gave when all ranks were in their set-up is kept (`in_loop.recording`), and given to whoever
comes later. Where that would not be what the others have, all functions are called again, together.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from elastic.comm.process_group import ProcessGroup
from elastic.comm.rendezvous import await_all
from elastic.core.errors import CollectiveFailed
from elastic.training.in_loop import ahead
from elastic.training.in_loop.group_of_all import GroupOfAll
from elastic.training.in_loop.own_collectives import OwnCollectives
from elastic.training.in_loop.recording import Collective, Recording, recordable

# What one rank adds to the count of those that have joined: itself; that its function is called in this generation, or
# ahead of it; that it comes to every barrier; that it makes every other collective.
_JOINED, _CALLED, _MEETS, _MAKES = (1 << 16 * number for number in range(4))


_OF_ANOTHER_TIME = "some of the functions have done their set-up while others stood by, and have other results of it"


class SetUp:
    """Of one process, on its training thread. Call order: 1. `begins` when the function is called 2. `joined` for each
    generation; `closed` and `reopened` around what is no set-up."""

    def __init__(self) -> None:
        # Packages whose code has been told this process's rank in a set-up, and may keep it.
        self.rank_known_to: set[str] = set()
        # How many collectives of this process are in its recording, or its engine's.
        self.recorded = 0
        self.recording = Recording()
        self.is_open = False
        self._thread = 0
        self._group: ProcessGroup | None = None
        # Has the function passed a barrier ahead of its generation? How many ranks meet at one, how often this one has.
        self._passed, self._meeting, self._met = False, 0, 0
        # Groups that this call of the function has made, or was given; what is behind them in this generation.
        self._groups: list[GroupOfAll] = []
        self._behind: list[Any] = []
        # Do all ranks make the other collectives? How many the function was given instead; why not the next one.
        self._all, self._given, self._unmatched = False, 0, ""
        self._within = False
        # Do all functions stay, and have they been shown the ends of the same steps?
        self.alike = False

    def begins(self) -> None:
        global _current
        _current = self
        self._thread, self._passed, self._given, self._groups = threading.get_ident(), False, 0, []
        self.reopened()

    def rank_asked(self) -> None:
        self.rank_known_to.add(ahead.asker())

    def joined(
        self,
        group: ProcessGroup,
        called: bool,
        own: OwnCollectives,
        behind: bool = False,
        shown: int = 0,
    ) -> str:
        """The function is `called`, in this generation or ahead of it; else it stays in its loop, and may be `behind`:
        have stood by while there were steps. `own`: what is known of its loop's collectives; `shown`: the
        last step whose end it was shown (`ShownEnds.last`). Collective.

        Returns why it is to be called again in this very generation, as on all other ranks; empty where it is not.
        Raises CollectiveFailed where it was given what the others do not have, and torch's DistError.
        """
        self._group, self._met = group, 0
        size, store = group.spec.world_size, group.store
        meets, makes = called and not self._passed, called and not self._given
        if called and (why := self._unmatched or self.recording.unfit(size)):
            self._say("together", why)
        if why := own.why or ("" if called else self.recording.unfit(size)):
            self._say("apart", why)
        if not called:
            self._say_of_loop(own)
            if behind:
                self._say("behind", "")
            if group.store.compare_set(self._key("shown"), "", str(shown)).decode() != str(shown):
                self._say("differ", "")
        count = store.add(self._key("joined"), _JOINED + _CALLED * called + _MEETS * meets + _MAKES * makes)
        if count % _CALLED == size:
            store.set(self._key("all"), str(count))
        count = int(store.get(self._key("all")))
        self.alike = not (count % _MEETS // _CALLED or self._is_said("differ"))
        together = self._said("together")
        if not together and (count % _MEETS // _CALLED or self._is_said("behind")):
            together = self._said("apart") or ("" if self._is_said("sure") else self._said("unsure"))
        self._behind, self._all = [], bool(together) or count // _MAKES == size
        self._meeting = size if together else count % _MAKES // _MEETS * meets
        if self._all:
            self.recording, self._unmatched = Recording(group.spec.generation, size), ""
        else:
            self._share(none_stays=count % _MEETS // _CALLED == size, called=called)
            self._make_groups()
        return "" if meets and makes else together

    def _say_of_loop(self, own: OwnCollectives) -> None:
        """What matters where the functions of others are called, or were at another time."""
        if own.sure:
            self._say("sure", "")
        elif own.unsure:
            self._say("unsure", own.unsure)
        assert self._group is not None
        mine = str(self.recording.generation)
        if self._group.store.compare_set(self._key("recorded/in"), "", mine).decode() != mine:
            self._say("together", _OF_ANOTHER_TIME)

    def _say(self, name: str, text: str) -> None:
        assert self._group is not None
        self._group.store.set(self._key(name), text)

    def _is_said(self, name: str) -> bool:
        assert self._group is not None
        return bool(self._group.store.check([self._key(name)]))

    def _said(self, name: str) -> str:
        assert self._group is not None
        return self._group.store.get(self._key(name)).decode() if self._is_said(name) else ""

    def _share(self, none_stays: bool, called: bool) -> None:
        """Ranks that stay have all the same one, which those that are called are given."""
        assert self._group is not None
        may = self._given > 0 if none_stays else not called
        store: Any = self._group.store  # whose stubs know no bytes
        if may and store.add(self._key("recorded/by"), 1) == 1:
            store.set(self._key("recorded"), self.recording.packed())
        if called:
            self._take_shared()

    def _take_shared(self) -> None:
        assert self._group is not None
        found = Recording.unpacked(self._group.store.get(self._key("recorded")))
        if self._given and found.generation != self.recording.generation:
            self._refuse("it was given what its collectives had given before the others did their set-up again")
        self.recording = found

    def _make_groups(self) -> None:
        """Those of the recording, of all ranks. Collective."""
        assert self._group is not None
        make = _functions()["new_group"][0]
        self._behind = [make(**options) for options in self.recording.groups()]
        self._group.know(self._behind)
        for group, behind in zip(self._groups, self._behind, strict=False):
            group.behind = behind

    def _handed(self, call: Collective, result: Any = None) -> Any:
        """What the function gets of a collective: of one that makes a group, its own object for it."""
        if not call.makes_group:
            return result
        group = GroupOfAll(ahead.join, self._taken)
        if len(self._groups) < len(self._behind):
            group.behind = self._behind[len(self._groups)]
        self._groups.append(group)
        return group

    def _taken(self) -> None:
        if self._group is not None:
            self._group.taken()

    def left(self) -> None:
        """The generation is about to be: connections of groups are closed when nothing refers to these any more."""
        self._behind = []
        for group in self._groups:
            group.behind = None

    def closed(self) -> None:
        self.is_open = False
        ahead.listen(None)
        _stand_between(False)

    def reopened(self) -> None:
        self.is_open = True
        ahead.listen(self.rank_asked)
        _stand_between(True)

    def owns(self, group: Any) -> bool:
        """Is it a call of the set-up's own, among all ranks?"""
        mine = self.is_open and not self._within and threading.get_ident() == self._thread
        of_all = group is None or isinstance(group, GroupOfAll) or group is dist.distributed_c10d._world.default_pg
        return mine and of_all

    def passes(self) -> bool:
        """The barrier is passed, maybe after a while. False: it is torch's own."""
        if ahead.may_pass():
            self._passed = True
            return True
        if self._group is None:
            return False
        if self._meeting:
            self._met += 1
            await_all(self._group.store, self._key(f"barrier{self._met}"), self._meeting)
        return True

    def makes(self, call: Collective, original: Callable[[], Any]) -> Any:
        """The collective, of all ranks together; or what it gave, and a group or None."""
        if ahead.may_pass():
            if self._is_given_ahead(call):
                return self._handed(call)
            ahead.join()
        if self._group is None:
            return original()
        if self._all:
            return self._recorded(call, original)
        self._give(call)
        return self._refuse(self._unmatched) if self._unmatched else self._handed(call)

    def _is_given_ahead(self, call: Collective) -> bool:
        if not self._given:
            packed = ahead.recording()
            if not packed:
                return False
            self.recording = Recording.unpacked(packed)
        self._give(call)
        return not self._unmatched

    def _give(self, call: Collective) -> None:
        """Its number is asked for only where it matters: it may be another one when this worker joins."""
        size = dist.get_world_size() if call.by_world_size else 0
        self._unmatched = self.recording.give(self._given, call, size)
        self._given += not self._unmatched

    def _recorded(self, call: Collective, original: Callable[[], Any]) -> Any:
        assert self._group is not None
        before = self._group.collectives()
        self._within = True
        try:
            # What torch itself asks in it is no question of the function's.
            with ahead.unheard():
                result = original()
        finally:
            self._within = False
        if not self.recording.take(call):
            return result
        self.recorded += self._group.collectives() - before
        if call.makes_group:
            self._behind.append(result)
            self._group.know([result])
        return self._handed(call, result)

    @contextmanager
    def engines_own(self) -> Iterator[None]:
        """Collectives and groups in it are not the set-up's: those make them too that stay in their loop."""
        assert self._group is not None
        group, before, self._within = self._group, self._group.collectives(), True
        try:
            # What it asks for itself is no question of the function's.
            with ahead.unheard(), group.knowing():
                yield
        finally:
            self._within = False
            self.recorded += group.collectives() - before

    def _refuse(self, why: str) -> None:
        """In the next generation all are called again: see `joined`."""
        self._unmatched = why
        raise CollectiveFailed(f"{why}: all ranks are to do their set-up together")

    def _key(self, name: str) -> str:
        assert self._group is not None
        return f"elastic/{self._group.spec.generation}/set-up/{name}"


_current: SetUp | None = None


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Any:
        if not async_op and _current is not None and _current.owns(group) and _current.passes():
            return None
        return original(group, async_op, device_ids, timeout)

    return barrier


def _collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = None if _current is None else Collective.of(name, original, args, kwargs)
        if call is None or _current is None or not _current.owns(call.group):
            return original(*args, **kwargs)
        return _current.makes(call, lambda: original(*args, **kwargs))

    return collective


@functools.cache
def _functions() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """torch's and ours, by name."""
    made = {name: (function, _collective(name, function)) for name, function in recordable().items()}
    return {"barrier": (dist.barrier, _barrier(dist.barrier)), **made}


def _stand_between(stand: bool) -> None:
    """Put ours in the place of torch's functions, or torch's back. Another library's replacement stays."""
    for name, pair in _functions().items():
        ours, instead = pair if stand else reversed(pair)
        for module in (dist, dist.distributed_c10d):
            if getattr(module, name, None) is ours:
                setattr(module, name, instead)

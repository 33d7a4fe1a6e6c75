"""The user's function is called before its process has a generation: set-up is done while the others train.

It runs until something needs to know the generation. There the call waits, on the training thread: for the process to
be a member, and for its groups. What needs it: whatever of `elastic` asks for the current generation, the variables
that torchrun would set, and the default group of torch.distributed. Whether that is initialized is answered with yes,
without waiting: libraries ask it everywhere, and it is before anything is done with it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.mesh import Mesh
from elastic.engines import foreign_loops
from elastic.engines.base import EngineKind
from elastic.training import context
from elastic.training.generation import public_initialize
from elastic.training.in_loop.alone import engine_alone
from elastic.training.in_loop.assembly import Given
from elastic.training.in_loop.group_of_all import GroupOfAll
from elastic.training.in_loop.rehearsal import Rehearsal
from elastic.training.user import accelerate_calls

if TYPE_CHECKING:
    from elastic.training.loop import GenerationRunner

logger = logging.getLogger(__name__)

# What `ProcessGroup.join` sets.
_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})

# Each worker has one accelerator, which is the only one that it sees.
_LOCAL_RANK = 0

# For so long the training thread waits, and the process computes nothing: it waits for a thread that waits for it.
_STUCK_S = 20.0
_LOOKS_EVERY_S = 0.5
# Of one that waits for its place.
_ASKS_EVERY_S = 5.0
# Of one processor.
_COMPUTES = 0.2
# Where Python code waits for another thread. `fsspec` does so for its thread of reads.
_WAITING = frozenset({"threading", "queue", "concurrent.futures._base", "asyncio.base_events", "selectors"})


@dataclass(frozen=True)
class Ahead:
    """`first` returns this process's first generation; it may be waited for long, and the rehearsal is called every now
    and then until it is over. `begins(seconds)`: is it there, now or after so long? `passes` are those that others make
    (`in_loop.passes`), as far as they have told; `rehearsed` is given what came of making them here. `place`: the rank,
    never 0, and the world size that the function may be told before; None: nothing is known yet. `mesh` is that of so
    many workers; None: it is decided when they are there. `alone`: of a worker that trains by itself, for passes of an
    engine. `recording`: of the others' set-up (`in_loop.recording`), packed; empty where all ranks do theirs together,
    None where nobody has told it yet."""

    run_id: str
    seed: int
    kind: EngineKind
    first: Callable[[Rehearsal | None], GenerationRunner]
    begins: Callable[[float], bool] = lambda _: True
    passes: Callable[[], Sequence[Any]] = tuple
    rehearsed: Callable[[str], None] = logger.info
    place: Callable[[], tuple[int, int] | None] = lambda: None
    alone: GenerationSpec | None = None
    recording: Callable[[], bytes | None] = lambda: b""
    mesh: Callable[[int], Mesh] | None = None

    def awaited(self, given: Given | None) -> GenerationRunner:
        """The first generation. `given` to `elastic.initialize`, where that is what waits for it."""
        if given is None:
            return self.first(None)
        alone = None if self.alone is None else partial(engine_alone, self.kind, self.alone, given)
        rehearsal = Rehearsal(given.model, self.passes, self.rehearsed, alone)
        rehearsal()
        return self.first(None if rehearsal.over else rehearsal)


class _Gate:
    """Closed until the function needs its generation; `join` is called once, on the thread that made the gate."""

    def __init__(
        self,
        join: Callable[[Given | None, tuple[int, int] | None], None],
        ahead: Ahead,
    ) -> None:
        self._join = join
        self._ahead = ahead
        self._thread = threading.get_ident()
        self._joined = threading.Event()
        self._open = False
        # What `elastic.initialize` was given, where that is what asks.
        self.given: Given | None = None
        # (rank, world size) as the run expects them, and as the function was told.
        self._place: tuple[int, int] | None = None
        self.told: tuple[int, int] | None = None

    def is_placed(self) -> bool:
        """Is the place known, ahead of the generation? Returns when either is there: a spare comes before the run's
        first step, when nobody knows a place."""
        while self._place is None and threading.get_ident() == self._thread and not self._open:
            self._place = self._ahead.place()
            if self._place is None and self._ahead.begins(_ASKS_EVERY_S):
                break
        return self._place is not None

    def tell(self) -> tuple[int, int] | None:
        """The answer that the function gets, the same each time; None: it waits for its generation."""
        self.told = self._place if self.is_placed() else None
        if self.told is not None and self._ahead.mesh is not None:
            accelerate_calls.expect(self._ahead.mesh(self.told[1]))
        return self.told

    def early(self) -> dict[str, Callable[[], Any]]:
        """What of `elastic.get_context()` is known."""
        ahead = self._ahead
        known: dict[str, Callable[[], Any]] = {
            "rank": lambda: dist.get_rank(),
            "world_size": lambda: dist.get_world_size(),
            "run_id": lambda: ahead.run_id,
            "local_rank": lambda: _LOCAL_RANK,
            "device": lambda: ahead.kind.device(_LOCAL_RANK)[1],
        }
        if ahead.mesh is not None and (place := self._place) is not None:
            mesh = ahead.mesh(place[1])
            known |= {
                "mesh": lambda: self._tells(mesh.axes),
                "coordinates": lambda: self._tells(mesh.coordinates(place[0])),
            }
        return known

    def _tells(self, what: Mapping[str, int]) -> Mapping[str, int]:
        """The mesh follows from the place: telling one tells the other."""
        self.tell()
        return what

    def alone(self) -> GenerationSpec | None:
        return self._ahead.alone

    def recording(self) -> bytes:
        """Returns when it has been told, or the generation is there."""
        while (found := self._ahead.recording()) is None and not self._ahead.begins(_ASKS_EVERY_S):
            pass
        return found or b""

    def pass_through(self) -> None:
        if threading.get_ident() != self._thread:
            # A thread of the user's set-up. The training thread opens the gate at the latest when it returns.
            self._wait_for_training_thread()
        elif not self._open:
            self.open()
            self._join(self.given, self.told)
            self._joined.set()

    def open(self) -> None:
        """From here on everything is as in a generation."""
        self._open = True
        _watch(None)

    def _wait_for_training_thread(self) -> None:
        """Raises UsageError where that one waits for this one, which is what both standing still is taken for."""
        since, used_s = time.monotonic(), time.process_time()
        while not self._joined.wait(_LOOKS_EVERY_S):
            passed_s = time.monotonic() - since
            computes = time.process_time() - used_s >= _COMPUTES * passed_s
            if self._open or computes or not _waits(self._thread):
                since, used_s = time.monotonic(), time.process_time()
            elif passed_s > _STUCK_S:
                raise UsageError(
                    f"the thread {threading.current_thread().name} asks for its rank, or for something else of its "
                    f"generation, which the training thread has not begun: for {passed_s:.0f} s that one has been "
                    "waiting, as it seems for this thread. Call elastic.get_context() in the training function before "
                    "it starts such threads"
                )


_gate: _Gate | None = None
# Called when the rank is asked for.
_asked: Callable[[], None] | None = None
# Their code hands on what torch or the environment says.
_HAND_ON = re.compile(r"(elastic|torch\.distributed|deepspeed\.comm|ray|os|collections|_collections_abc)(\.|$)")
_PLAIN: Any = type(os.environ)
_META: Any = type(dist.GroupMember)
_WORLD, _IS_INITIALIZED = _META.WORLD, dist.is_initialized


def join() -> None:
    """Wait for the generation, where there is none yet."""
    gate = _gate
    if gate is not None:
        gate.pass_through()


def _note() -> None:
    if _asked is not None:
        _asked()


@contextmanager
def unheard() -> Iterator[None]:
    """What asks within it looks for the default group, which is no question for the rank there."""
    global _asked
    before, _asked = _asked, None
    try:
        yield
    finally:
        _asked = before


def asker() -> str:
    """The package whose code asks for the rank that is being told."""
    frame = sys._getframe(1)
    while _HAND_ON.match(name := str(frame.f_globals.get("__name__"))) and frame.f_back is not None:
        frame = frame.f_back
    return name.partition(".")[0]


def may_pass() -> bool:
    """Of a barrier: the others are past it. Returns when that is known, or when the generation is there."""
    gate = _gate
    if gate is None:
        return False
    if gate.is_placed():
        return True
    join()
    return False


def spec_alone() -> GenerationSpec | None:
    """That of a worker that trains by itself, which is to join others that train; None: it knows its generation, or
    waits for it to learn anything."""
    return _gate.alone() if _gate is not None and _gate.is_placed() else None


def recording() -> bytes:
    """What collectives have given to those that are past their set-up. Empty: it is not to be had before joining."""
    return b"" if _gate is None else _gate.recording()


def known_context() -> dict[str, Callable[[], Any]] | None:
    """What `elastic.get_context()` can answer ahead of the generation; None: nothing, it waits."""
    return _gate.early() if _gate is not None and _gate.is_placed() else None


def _is_of_all(caller: FrameType) -> bool:
    """All variables are read, for no certain one (`copy()`, `items()`), or it is asked whether there is one. networkx
    does the former when torch.compile imports it."""
    module, name = caller.f_globals.get("__name__"), caller.f_code.co_name
    if module == "os":
        return name == "copy"
    return module in ("collections.abc", "_collections_abc") and name in ("__iter__", "__contains__")


class _Variables(_PLAIN):  # type: ignore[misc]  # a class that is found at run time
    """`os.environ`, in which a rank's variables are waited for."""

    def __getitem__(self, key: Any) -> Any:
        if key == "RANK" and not _is_of_all(sys._getframe(1)):
            _note()
        if key in _VARIABLES and _gate is not None:
            if (told := _told(key)) is not None:
                return told
            join()
        # Not super(): passing through has made it the plain class again.
        return _PLAIN.__getitem__(self, key)


def initializes(given: Given) -> None:
    """`elastic.initialize` is about to ask for the generation."""
    if _gate is not None:
        _gate.given = given


def _waits(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_globals.get("__name__") in _WAITING


def _told(key: str) -> str | None:
    """The variable, where it is known before the generation."""
    if key == "LOCAL_RANK":
        return str(_LOCAL_RANK)
    if _gate is None:
        return None
    if key in ("MASTER_ADDR", "MASTER_PORT"):
        # On CPUs accelerate looks whether they are there, and uses them for a group that there is already.
        return "of its generation" if asker() == "accelerate" and _gate.is_placed() else None
    if (place := _gate.tell()) is None:
        return None
    return str(place[key == "WORLD_SIZE"])


def _answering(original: Callable[..., int], number: int) -> Callable[..., int]:
    """`get_rank` and `get_world_size`: of the default group it is known what they will say."""

    @functools.wraps(original)
    def answer(group: Any = None) -> int:
        if number == 0:
            _note()
        of_all = group is None or isinstance(group, GroupOfAll)
        if of_all and _gate is not None and (place := _gate.tell()) is not None:
            return place[number]
        with unheard():
            return original(group)

    return answer


_ASKED = {"get_rank": _answering(dist.get_rank, 0), "get_world_size": _answering(dist.get_world_size, 1)}
_ANSWERED = {"get_rank": dist.get_rank, "get_world_size": dist.get_world_size}


def _world(cls: Any) -> Any:
    _note()
    join()
    return _WORLD.fget(cls)


def _is_initialized() -> bool:
    return _gate is not None or _WORLD.fget(dist.GroupMember) is not None


def _watch(gate: _Gate | None) -> None:
    """`torch.distributed.get_rank` and the others all ask for WORLD. None: nothing waits any more."""
    global _gate
    _gate = gate
    context.await_with(None if gate is None else gate.pass_through)
    _stand_between()


def listen(asked: Callable[[], None] | None) -> None:
    """From here on every question for the rank calls `asked` before it is answered. None ends it."""
    global _asked
    _asked = asked
    _stand_between()


def _stand_between() -> None:
    """Between who asks for the rank and who knows it, while either is of interest."""
    plain = _gate is None and _asked is None
    dist.is_initialized = dist.distributed_c10d.is_initialized = _IS_INITIALIZED if plain else _is_initialized
    os.environ.__class__ = _PLAIN if plain else _Variables
    _META.WORLD = _WORLD if plain else property(_world, _WORLD.fset)
    for name, function in (_ANSWERED if plain else _ASKED).items():
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)


@contextmanager
def until_needed(ahead: Ahead, join: Callable[[Given | None, tuple[int, int] | None], None]) -> Iterator[None]:
    """Within it, `join` is called by the first thing that needs the generation, with what it was given where that
    is `elastic.initialize`, and with (rank, world size) where the function was told them. It installs and joins one, or
    raises what the function is to be left with."""
    foreign_loops.refuse(ahead.kind.name)
    gate = _Gate(join, ahead)

    def spec() -> Any:
        _note()
        current = context.current()
        assert current is not None
        return current.scope.spec

    ahead.kind.answer_user_calls(public_initialize, ahead.run_id, spec)
    # Another launcher, or this process's last generation, has left these: they are not this rank's. A library that
    # copies the whole environment would wait at them for ever (botocore, on a thread that this thread waits for).
    os.environ.__class__ = _PLAIN
    for name in _VARIABLES:
        os.environ.pop(name, None)
    _watch(gate)
    try:
        yield
    finally:
        context.prepare_early(None)
        gate.open()
        gate._joined.set()

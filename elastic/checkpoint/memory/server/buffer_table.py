"""Which copy of a shard may be overwritten, which may be freed, which can be read: no memory, no sockets, no clock.

A *line* is what one rank writes, generation by generation, or the replica of that, or the parity of a stripe of ranks.
It has at most two *copies*, of which at most one is incomplete. The *mark* is the newest snapshot that is known to be
complete on all ranks; its copies are neither overwritten nor freed until the mark moves on. Older generations stay
until the mark is past them.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic.checkpoint.memory.shard_buffers import Copy, Line, Mark, Shape
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import Fenced, IntegrityError

# How many older generations keep their copies although none of their snapshots is known to be complete everywhere.
_UNSETTLED_GENERATIONS = 2


class Books:
    """Not thread-safe. Copies are told apart by numbers that the owner of the memory gives them."""

    def __init__(self) -> None:
        self.mark: Mark = (-1, -1)
        self.newest = -1
        self.lines: dict[Line, Shape] = {}
        self.copies: dict[int, Copy] = {}

    def open(self, line: Line, shape: Shape, base: Mark | None) -> None:
        """A line begins, or is opened once more as it was. `base` is the snapshot that its generation started from:
        nothing else of older generations is needed then. Raises Fenced for a generation that is over.

        A stripe is opened once by each of its ranks, and has no copies before all of them have done so.
        """
        self._check_generation(line)
        known = self.lines.get(line, shape)
        if line.stripe:
            shape = known.joined(shape)
        if not known.agrees(shape) and (self._of(line) or not line.stripe):
            raise IntegrityError("a shard was opened again with another size within its generation", line.where)
        self.newest = line.generation
        self.lines[line] = shape
        if base is not None and base[0] < line.generation and self.mark[0] < line.generation:
            # Not max(): a run that went back to an older snapshot needs that one.
            self.mark = base
            self._drop(copy for copy in self._older(line.generation) if copy.mark != base)
        else:
            self._drop(self._forgotten(line.generation))

    def forget(self, line: Line, before: Shape | None) -> None:
        """The line could not be opened after all and is what it was before; copies that it had stay readable."""
        if before is not None:
            self.lines[line] = before
        elif not self._of(line):
            self.lines.pop(line, None)

    def unknown(self, line: Line) -> list[int]:
        """The ranks of the stripe that have not opened it."""
        return [rank for rank in line.ranks if rank not in self._shape(line).templates]

    def room_for_more(self, line: Line) -> bool:
        """Is the line one that goes on, and without its second copy?"""
        return line in self.lines and line.generation == self.newest and len(self._of(line)) < 2

    def choose(self, line: Line) -> Copy | None:
        """The copy that the next snapshot of the line overwrites; None when the line is to get one more.

        The choice may have users: it can be begun when they are done. Raises Fenced, and IntegrityError for an own
        line whose last snapshot may count already without this node having been told.
        """
        self._check_generation(line)
        self._shape(line)
        copies = self._of(line)
        unsettled = [copy for copy in copies if copy.mark is not None and copy.mark > self.mark]
        if unsettled and not line.replica:
            raise IntegrityError(
                f"the snapshot of step {unsettled[0].step} is not yet known to be complete on all ranks; say `settled` "
                "before the next one is written",
                line.where,
            )
        free = [copy for copy in copies if copy.mark != self.mark]
        incomplete = [copy for copy in free if copy.step is None]
        if incomplete:
            return incomplete[0]
        if len(copies) < 2:
            return None
        return min(free, key=lambda copy: copy.step or 0)

    def add(self, line: Line, number: int) -> Copy:
        copy = self.copies[number] = Copy(number, line)
        return copy

    def begin(self, copy: Copy) -> None:
        """What the copy holds is invalid from here on."""
        if copy.users:
            raise RuntimeError(f"copy {copy.id} is in use and must not be overwritten")
        copy.step = copy.note = None

    def complete(self, copy: Copy, step: int) -> None:
        """Raises Fenced when the copy's generation is over, and IntegrityError for a step that is not a new one."""
        self._check_generation(copy.line)
        steps = [other.step for other in self._of(copy.line) if other.step is not None]
        if copy.dropped or copy.step is not None or step <= max(steps, default=-1):
            raise IntegrityError(f"step {step} follows {sorted(steps)} and is no new snapshot", copy.line.where)
        copy.step = step

    def settle(self, mark: Mark) -> None:
        """The snapshot is complete on all ranks. What is older is not needed, of older generations nothing is."""
        # A generation that is over has nothing to say about what may go.
        if mark > self.mark and mark[0] >= self.newest:
            self.mark = mark
            self._drop(self._older(mark[0]))

    def adopt(self, line: Line, shape: Shape, number: int, step: int) -> Copy:
        """A complete copy that nobody has sent: made of what lies here, of a generation that may be over."""
        self.lines.setdefault(line, shape)
        copy = self.add(line, number)
        copy.step = step
        return copy

    def find(
        self, generation: int, step: int, rank: int, replica: bool | None = None, stripe: tuple[int, ...] = ()
    ) -> Copy | None:
        """A complete copy, the rank's own where there are both and it does not matter which; or a stripe's parity."""
        found = [c for c in self.copies.values() if c.mark == (generation, step) and c.line.stripe == stripe]
        fitting = [c for c in found if not c.dropped and rank in c.line.ranks and replica in (None, c.line.replica)]
        return min(fitting, key=lambda c: c.line.replica, default=None)

    def gathering(self, line: Line) -> Copy | None:
        """The stripe's copy that is being put together."""
        return next((copy for copy in self._of(line) if copy.step is None and copy.note is not None), None)

    def held(self) -> tuple[Held, ...]:
        return tuple(
            Held(line.generation, copy.step, rank, self.lines[line].world_size, line.replica, line.stripe)
            for copy in self.copies.values()
            if copy.step is not None and not copy.dropped
            for line in [copy.line]
            for rank in line.ranks
        )

    def sweep(self) -> list[int]:
        """Takes out and returns the copies whose memory may go now; lines without copies that are over go too."""
        gone = [copy.id for copy in self.copies.values() if copy.dropped and not copy.users]
        for number in gone:
            del self.copies[number]
        used = {copy.line for copy in self.copies.values()}
        for line in [line for line in self.lines if line.generation < self.newest and line not in used]:
            del self.lines[line]
        return gone

    def wanted_bytes(self) -> int:
        """What the newest generation's lines do not have yet of their two copies each, and of what a stripe needs on
        the day when a shard is made of it."""
        return sum(
            shape.nbytes * (2 + bool(line.stripe) - len(self._of(line)))
            for line, shape in self.lines.items()
            if line.generation == self.newest
        )

    def passing(self) -> list[int]:
        """The copies that go when a snapshot of the newest generation has settled."""
        return [copy.id for copy in self.copies.values() if copy.line.generation < self.newest]

    def _check_generation(self, line: Line) -> None:
        if line.generation < max(self.newest, self.mark[0]):
            raise Fenced(f"generation {self.newest} has begun here: snapshots of older ones are not taken", line.where)

    def _shape(self, line: Line) -> Shape:
        if line not in self.lines:
            raise IntegrityError("a shard is written that was not opened", line.where)
        return self.lines[line]

    def _of(self, line: Line) -> list[Copy]:
        return [copy for copy in self.copies.values() if copy.line == line and not copy.dropped]

    def _older(self, generation: int) -> Iterator[Copy]:
        return (copy for copy in self.copies.values() if copy.line.generation < generation)

    def _forgotten(self, generation: int) -> Iterator[Copy]:
        """Incomplete copies of older generations, and all of those that failed before anything was known to settle."""
        held = {copy.line.generation for copy in self._older(generation) if copy.step is not None}
        unsettled = sorted(held - {self.mark[0]})[-_UNSETTLED_GENERATIONS:]
        kept = {self.mark[0], *unsettled}
        return (c for c in self._older(generation) if c.step is None or c.line.generation not in kept)

    def _drop(self, copies: Iterator[Copy]) -> None:
        for copy in list(copies):
            copy.dropped = True

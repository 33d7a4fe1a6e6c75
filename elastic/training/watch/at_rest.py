"""Masters and optimizer state between two updates: nothing may change a byte of them. See `core.data.update_audits`.

Their digests are taken when an update is made and compared before the next one. Where the masters are the module's own
weights (stage 0, FSDP2) the script may change them between two steps, so theirs are taken before the first forward
pass.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from elastic.core.sharding.layout import Chunk
from elastic.engines.base import Witness
from elastic.engines.live_state import BUFFER, MASTER, PARAM, Fragment, ShardedState
from elastic.training.state.digest_reader import digests

# So many bytes are read in every step at least; as in `state.capture_check`, next to nothing.
_LEAST_BYTES = 16 << 20


class AtRest:
    """Of one engine, for one generation; nothing here is collective. In every step: `begin` before its first forward
    pass, `changed` before its update, `rest` after it. `every_steps`: of so many steps one may cost a micro-batch."""

    def __init__(self, engine: Witness, state: ShardedState, every_steps: int) -> None:
        self._engine = engine
        self._every_steps = every_steps
        weights = {weight.tensor.untyped_storage().data_ptr() for weight in state.weights()}
        # May the script write to the masters between two steps?
        self._exposed = any(master.tensor.untyped_storage().data_ptr() in weights for master in state.masters())
        # None: all, and how long they are is not known yet.
        self._names: list[str] | None = None
        self._bytes: dict[str, int] = {}
        self._next = 0
        self._before: dict[str, int] | None = None
        self._began = 0.0
        # The shortest pass, and what reading has taken on average.
        self._pass_s = float("inf")
        self._read_s, self._read_bytes = 0.0, 0

    def rest(self) -> None:
        """An update was made: what only an update changes is read."""
        self._choose()
        self._before = self._read(masters=not self._exposed, state=True)

    def begin(self) -> None:
        """Before the first forward pass of a step: what the script may have changed up to here is read."""
        if self._before is None:
            self._before = self._read(masters=True, state=True)
        elif self._exposed:
            self._before |= self._read(masters=True, state=False)
        self._began = time.perf_counter()

    def changed(self, passes: int) -> list[str]:
        """Before the update, after `passes` micro-batches: what has changed since, as "<kind> of <parameter>"."""
        before, self._before = self._before, None
        if before is None:
            return []
        self._pass_s = min(self._pass_s, (time.perf_counter() - self._began) / max(1, passes))
        after = self._read(masters=True, state=True)
        wrong = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        return [" of ".join(key.split("/", 1)) for key in sorted(wrong)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _read(self, masters: bool, state: bool) -> dict[str, int]:
        """Digests by "<kind>/<parameter>". Waits for the device."""
        began = time.perf_counter()
        found = list(self._fragments(self._names, masters, state))
        chunks = {each.name: Chunk(each.name, each.start, each.tensor.numel(), each.name, 0) for each in found}
        read = digests(chunks.values(), ((f"{each.kind}/{each.name}", each.tensor) for each in found))
        sizes: dict[str, int] = {}
        for each in found:
            size = each.tensor.numel() * each.tensor.element_size()
            sizes[each.name] = sizes.get(each.name, 0) + size
        if masters and state:
            self._bytes |= sizes
        self._read_s += time.perf_counter() - began
        self._read_bytes += sum(sizes.values())
        return read

    def _fragments(self, names: Collection[str] | None, masters: bool, state: bool) -> Iterable[Fragment]:
        for each in self._engine.fragments(names):
            if each.kind not in (BUFFER, PARAM) and (masters if each.kind == MASTER else state):
                yield each

    def _choose(self) -> None:
        """What is read in the next step: all, or neighbours in turn that take as long, read twice, as one pass in
        `every_steps` steps."""
        names = [*self._bytes]
        byte_s = self._read_s / self._read_bytes if self._read_bytes else float("inf")
        limit = max(_LEAST_BYTES, self._pass_s / (2 * byte_s * self._every_steps))
        if sum(self._bytes.values()) <= limit:
            self._names = names or None
            return
        chosen: list[str] = []
        size = 0
        while not chosen or size + self._bytes[names[self._next]] <= limit:
            chosen.append(names[self._next])
            size += self._bytes[names[self._next]]
            self._next = (self._next + 1) % len(names)
        self._names = chosen

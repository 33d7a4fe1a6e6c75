"""All live tensors of one rank by "<kind>/<buffer>", with the layouts that say what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.core.sharding.zero import owner_layout
from elastic.engines.live_state import BUFFER, KEPT, MASTER, Extra, Master, ShardedState, buffers, kept
from elastic.engines.optimizer.state import MasterState, read_states


@dataclass(frozen=True)
class Inventory:
    """What this rank holds at one moment. Tensors are live: the next step changes them."""

    masters: tuple[Master, ...]
    states: tuple[MasterState, ...]
    extras: tuple[Extra, ...]

    @classmethod
    def of(cls, state: ShardedState) -> Inventory:
        masters = state.masters()
        extras = [*state.frozen(), *buffers(state.module)]
        return cls(tuple(masters), tuple(read_states(state.base, masters)), tuple(extras))

    @property
    def optimizer(self) -> tuple[tuple[Master, ...], tuple[MasterState, ...]]:
        return self.masters, self.states

    def with_kept(self, tensors: Mapping[str, torch.Tensor]) -> Inventory:
        """The same and `tensors` by name, which are not the model's."""
        return replace(self, extras=(*self.extras, *kept(tensors)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live tensors by "<kind>/<buffer>", of their own shapes; flattened, they have the layout's lengths."""
        found = {f"{MASTER}/{master.buffer}": master.tensor for master in self.masters}
        for master, state in zip(self.masters, self.states, strict=True):
            found |= {f"{kind}/{master.buffer}": tensor for kind, tensor in state.tensors.items()}
        return found | {f"{extra.kind}/{extra.chunk.buffer}": extra.tensor for extra in self.extras}

    def held(self) -> RankLayout:
        """All that this rank holds, replicas included."""
        return _layout(self.masters, self.extras)

    def sharded(self) -> RankLayout:
        """What only this rank holds."""
        return _layout([m for m in self.masters if not m.replicated], [e for e in self.extras if not e.replicated])

    def written(self, rank: int, world_size: int, writers: Sequence[int] | None = None) -> RankLayout:
        """What this rank's snapshot carries: its own slices, and the replicated tensors that it was assigned, whole.
        These are dealt to the ranks in `writers`, or to all.

        Module buffers are written by rank 0 and nobody else. They are not kept equal by DeepSpeed (batch statistics
        differ from rank to rank), and as in torch's DistributedDataParallel rank 0's are the run's. The same holds for
        what the user has registered.
        """
        writers = range(world_size) if writers is None else writers
        shared: dict[Sequence[int], list[Master | Extra]] = {writers: []}
        for master in (m for m in self.masters if m.replicated):
            shared.setdefault(writers if master.among is None else master.among, []).append(master)
        shared[writers] += [e for e in self.extras if e.replicated and e.kind not in (BUFFER, KEPT)]
        mine = [item for among, items in shared.items() for item in _dealt(items, among, rank)]
        if rank == 0:
            mine += [extra for extra in self.extras if extra.kind in (BUFFER, KEPT) and extra.replicated]
        masters = [m for m in self.masters if not m.replicated] + [i for i in mine if isinstance(i, Master)]
        extras = [e for e in self.extras if not e.replicated] + [i for i in mine if isinstance(i, Extra)]
        return _layout(masters, extras)


def _dealt(items: Sequence[Master | Extra], writers: Sequence[int], rank: int) -> list[Master | Extra]:
    """What of it this rank writes, where the ranks in `writers` write each once."""
    # Of a parameter with few rows a rank may have none.
    sizes = [(_buffer(item), pieces[-1].offset + pieces[-1].numel) for item in items if (pieces := _pieces(item))]
    if not sizes or rank not in writers:
        return []
    own = owner_layout(sizes, len(writers)).ranks[writers.index(rank)].buffers
    return [item for item in items if _buffer(item) in own]


def gaps(layout: RankLayout) -> Mapping[str, list[tuple[int, int]]]:
    """The padding of each buffer: (offset, numel) of what no chunk covers. Its content is undefined in stage 3."""
    found: dict[str, list[tuple[int, int]]] = {buffer: [] for buffer in layout.buffers}
    reached = dict.fromkeys(layout.buffers, 0)
    for chunk in sorted(layout.chunks, key=lambda chunk: (chunk.buffer, chunk.offset)):
        if chunk.offset > reached[chunk.buffer]:
            found[chunk.buffer].append((reached[chunk.buffer], chunk.offset - reached[chunk.buffer]))
        reached[chunk.buffer] = chunk.offset + chunk.numel
    for buffer, numel in layout.buffers.items():
        if numel > reached[buffer]:
            found[buffer].append((reached[buffer], numel - reached[buffer]))
    return found


def _layout(masters: Iterable[Master], extras: Iterable[Extra]) -> RankLayout:
    chunks: list[Chunk] = []
    sizes: dict[str, int] = {}
    for master in masters:
        chunks += master.chunks
        sizes[master.buffer] = master.tensor.numel()
    for extra in extras:
        chunks.append(extra.chunk)
        sizes[extra.chunk.buffer] = extra.chunk.numel
    return RankLayout(tuple(chunks), sizes)


def _buffer(item: Master | Extra) -> str:
    return item.buffer if isinstance(item, Master) else item.chunk.buffer


def _pieces(item: Master | Extra) -> tuple[Chunk, ...]:
    return item.chunks if isinstance(item, Master) else (item.chunk,)

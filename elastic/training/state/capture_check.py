"""Verification of a capture: what a snapshot holds, against the live engine, read by another way than the copies.

A restore can only be compared with what was saved. So while the state stands still between two optimizer steps, live
tensors are looked up parameter by parameter (`Engine.fragments`) and their digests compared with those of the copied
bytes at the places that the shard's record gives; numbers are read from the objects that own them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elastic.checkpoint.digest import device_total, digest, unsigned
from elastic.checkpoint.shards import DTYPE_NAMES
from elastic.core.checkpoint.manifest import Json, StoredTensor
from elastic.core.errors import IntegrityError, Where
from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.engines.base import Witness
from elastic.engines.live_state import BUFFER, KEPT, MASTER, PARAM, Fragment
from elastic.training.state.verification import listed

# A generation's first snapshot is verified whole; each later one so many bytes of it, in turn.
SAMPLE_BYTES = 16 << 20


@dataclass
class CaptureCheck:
    """One snapshot's. `targets` are its host tensors by "<kind>/<buffer>", filled between 1 and 3.

    1. `CaptureCheck.of` on the training thread, when the copies are prepared: tensors that something other than an
       optimizer step may change (`at_once`) are read now
    2. `look` once for tensors on a CUDA device, on the stream that copies them, and once for the others, before the
       next optimizer step
    3. `compare` after all copies have arrived
    """

    where: Where
    layout: RankLayout
    targets: Mapping[str, torch.Tensor]
    live: dict[tuple[str, str], Fragment]
    wrong: list[str]
    found: dict[tuple[str, str], int | torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        engine: Witness,
        where: Where,
        layout: RankLayout,
        targets: Mapping[str, torch.Tensor],
        extra: Mapping[str, Json] | None,
        turn: int,
        at_once: bool,
        kept: Mapping[str, torch.Tensor],
        first: bool,
        elsewhere: Collection[str],
    ) -> CaptureCheck:
        """`extra` is what rank 0 saves besides. `turn` counts this generation's snapshots. `at_once`: masters and
        optimizer state are read now, too. `kept` are tensors by name that are not the engine's. `first`: is this the
        rank that writes module buffers, but for those `elsewhere`, which another stage of a pipeline writes?"""
        wanted = _sample(layout, targets, turn)
        names = None if turn == 0 else {chunk.name for _, chunk in wanted}
        live = {(each.kind, each.name): each for each in engine.fragments(names)}
        whole = {(KEPT, name): Fragment(KEPT, name, 0, tensor.reshape(-1)) for name, tensor in kept.items()}
        live |= {(kind, chunk.name): whole[kind, chunk.name] for kind, chunk in wanted if (kind, chunk.name) in whole}
        wrong = _unlike(wanted, live) + (_left_out(layout, targets, live, first, elsewhere) if turn == 0 else [])
        if extra is not None:
            wrong += engine.wrong_numbers(extra, names)
            if extra["caller"].get("step", where.step) != where.step:
                wrong.append(f"the caller's step {extra['caller']['step']}")
        chosen = {(kind, chunk.name) for kind, chunk in wanted}
        check = cls(where, layout, targets, {key: each for key, each in live.items() if key in chosen}, wrong)
        check._read([key for key in check.live if at_once or key[0] in (BUFFER, PARAM, KEPT)])
        return check

    def look(self, cuda: bool) -> None:
        self._read([key for key, each in self.live.items() if each.tensor.is_cuda == cuda])

    def compare(self) -> None:
        """Raises IntegrityError naming what differs."""
        totals = {key: value for key, value in self.found.items() if isinstance(value, torch.Tensor)}
        digests = {key: value for key, value in self.found.items() if isinstance(value, int)}
        digests |= zip(totals, unsigned(list(totals.values())), strict=True)
        by_name: dict[str, list[Chunk]] = {}
        for chunk in self.layout.chunks:
            by_name.setdefault(chunk.name, []).append(chunk)
        for kind, name in sorted(digests):
            copied = 0
            for chunk in by_name[name]:
                target = self.targets.get(f"{kind}/{chunk.buffer}")
                if target is not None:
                    part = target[chunk.offset : chunk.offset + chunk.numel]
                    copied += digest(part, f"{kind}/{name}", chunk.start)
            if copied % 2**64 != digests[kind, name]:
                self.wrong.append(f"{kind}/{name}")
        if self.wrong:
            raise IntegrityError(f"a snapshot is not what the engine holds: {listed(self.wrong)}", self.where)

    def _read(self, keys: Sequence[tuple[str, str]]) -> None:
        for key in keys:
            each = self.live.pop(key)
            name = "/".join(key)
            content = each.tensor.contiguous()
            self.found[key] = (device_total if content.is_cuda else digest)(content, name, each.start)


def views(tensors: Iterable[StoredTensor], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """By key, what lies in `memory` (1-D uint8) where a record says."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return {
        each.key: memory[each.begin : each.begin + each.numel * dtypes[each.dtype].itemsize].view(dtypes[each.dtype])
        for each in tensors
    }


def _sample(layout: RankLayout, targets: Mapping[str, torch.Tensor], turn: int) -> list[tuple[str, Chunk]]:
    """(kind, chunk) of what this turn looks at: neighbours of `SAMPLE_BYTES` together or one chunk; all at turn 0."""
    by_buffer: dict[str, list[Chunk]] = {}
    for chunk in layout.chunks:
        by_buffer.setdefault(chunk.buffer, []).append(chunk)
    bins: list[list[tuple[str, Chunk]]] = [[]]
    size = 0
    for key, target in targets.items():
        kind, buffer = key.split("/", 1)
        # A part of padding alone has no chunk.
        for chunk in by_buffer.get(buffer, ()):
            nbytes = chunk.numel * target.element_size()
            if turn and bins[-1] and size + nbytes > SAMPLE_BYTES:
                bins.append([])
                size = 0
            bins[-1].append((kind, chunk))
            size += nbytes
    return bins[turn % len(bins)]


def _unlike(wanted: Sequence[tuple[str, Chunk]], live: Mapping[tuple[str, str], Fragment]) -> list[str]:
    """What the snapshot has and this rank has not, or not those elements of it."""
    found = []
    for kind, chunk in wanted:
        each = live.get((kind, chunk.name))
        if each is None or (each.start, each.tensor.numel()) != (chunk.start, chunk.numel):
            has = "nothing" if each is None else f"elements [{each.start}, {each.start + each.tensor.numel()})"
            found.append(f"elements [{chunk.start}, {chunk.stop}) of {kind}/{chunk.name}, of which this rank has {has}")
    return found


def _left_out(
    layout: RankLayout,
    targets: Mapping[str, torch.Tensor],
    live: Mapping[tuple[str, str], Fragment],
    first: bool,
    elsewhere: Collection[str],
) -> list[str]:
    """What the snapshot should have and has not: the optimizer's state of each master that it has, and the module
    buffers of the first rank, which are the run's. What all ranks leave out is noticed when shards are assembled."""
    kinds = {
        (key.split("/", 1)[0], chunk.name)
        for key in targets
        for chunk in layout.chunks
        if key.endswith(f"/{chunk.buffer}")
    }
    carried = {name for kind, name in kinds if kind == MASTER}
    missing = []
    for kind, name in live:
        due = (first and name not in elsewhere) if kind == BUFFER else kind not in (MASTER, PARAM) and name in carried
        if due and (kind, name) not in kinds:
            missing.append(f"{kind}/{name}, which is left out")
    buffers = [name for kind, name in sorted(kinds) if kind == BUFFER and not first]
    return missing + [f"{BUFFER}/{name} of another than the first rank" for name in buffers]

"""Builds a manifest from shard records, and checks that all ranks together wrote one complete checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from elastic.core.checkpoint.lanes import lane_name, shards_of
from elastic.core.checkpoint.manifest import Json, Manifest, ShardRecord
from elastic.core.checkpoint.stages import union_of_extra, union_of_parameters
from elastic.core.collector import no_collection
from elastic.core.data.readers import READERS, ReaderStates, merged
from elastic.core.errors import IntegrityError, Where
from elastic.core.names import checkpoint_id
from elastic.core.sharding.layout import check_cover, check_rank

_DIGEST_MODULUS = 2**64

# The kinds that a buffer of a rank has, with their dtypes: (("exp_avg", "F32"), ("fp32", "F32")).
_Kinds = tuple[tuple[str, str], ...]

# Elements [start, stop) of a parameter, the rank that holds them, and in which kinds.
_Span = tuple[int, int, int, _Kinds]


@no_collection()
def assemble(
    shards: Sequence[ShardRecord],
    *,
    run_id: str,
    versions: Mapping[str, str] | None = None,
    written_at: float = 0.0,
) -> Manifest:
    """The manifest of a checkpoint from what every rank of one generation reported, in any order.

    Raises IntegrityError when a rank is missing or doubled, when records differ in generation, step, world size or
    stage, when any element of any kind of any parameter is not held exactly once, or when the state of a stream's
    reader is missing or doubled.
    """
    ordered = _one_checkpoint(shards)
    first = ordered[0]
    parameters: dict[str, tuple[int, ...]] = {}
    digests: dict[str, int] = {}
    for lane in range(first.tp):
        own = shards_of(ordered, lane, first.tp)
        shapes = union_of_parameters(own)
        _check_cover(shapes, own)
        parameters |= {lane_name(name, lane, first.tp): shape for name, shape in shapes.items()}
        digests |= {lane_name(key, lane, first.tp): digest for key, digest in _summed(own).items()}
    return Manifest(
        id=checkpoint_id(first.step, first.generation),
        run_id=run_id,
        generation=first.generation,
        step=first.step,
        world_size=first.world_size,
        zero_stage=first.zero_stage,
        parameters=parameters,
        shards=tuple(replace(shard, digests={}, extra_state=None, parameters=None) for shard in ordered),
        digests=digests,
        extra_state=_extra_state(ordered),
        versions=dict(versions or {}),
        written_at=written_at,
        tp=first.tp,
    )


def _extra_state(shards: Sequence[ShardRecord]) -> dict[str, Json]:
    """Rank 0's, with those of other stages' first ranks, and the states of all ranks' readers where the run reads a
    stream."""
    own = ((shard.rank, (shard.extra_state or {}).get(READERS)) for shard in shards)
    readers = merged((rank, None if data is None else ReaderStates.from_json(data)) for rank, data in own)
    saved = [shard.extra_state or {} for shard in shards]
    extra_state = union_of_extra([saved[0], *(extra for extra in saved[1:] if "optimizer" in extra)])
    return extra_state if readers is None else {**extra_state, READERS: readers.to_json()}


def _one_checkpoint(shards: Sequence[ShardRecord]) -> list[ShardRecord]:
    if not shards:
        raise IntegrityError("a checkpoint needs the record of at least one rank")
    first = shards[0]
    by_rank: dict[int, ShardRecord] = {}
    for shard in shards:
        where = Where(rank=shard.rank, step=shard.step, generation=shard.generation)
        for what in ("generation", "step", "world_size", "zero_stage", "tp"):
            if getattr(shard, what) != getattr(first, what):
                values = f"{getattr(shard, what)} and {getattr(first, what)}"
                raise IntegrityError(f"shards of one checkpoint differ in {what}: {values}", where)
        if by_rank.setdefault(shard.rank, shard) is not shard:
            raise IntegrityError(f"rank {shard.rank} reported two shards", where)
    # Nothing here is as long as the world size says: a damaged one may be larger than memory.
    foreign = sorted(rank for rank in by_rank if not 0 <= rank < first.world_size)
    if foreign or len(by_rank) != first.world_size:
        missing = list(islice((rank for rank in range(first.world_size) if rank not in by_rank), 8))
        raise IntegrityError(
            f"world size {first.world_size} needs one shard per rank: missing {missing}, not members {foreign[:8]}"
        )
    if first.tp < 1 or first.world_size % first.tp:
        raise IntegrityError(f"{first.world_size} ranks cannot have {first.tp} lanes of one length")
    return [by_rank[rank] for rank in range(first.world_size)]


def _check_cover(parameters: Mapping[str, tuple[int, ...]], shards: Sequence[ShardRecord]) -> None:
    spans: dict[str, list[_Span]] = {name: [] for name in parameters}
    for shard in shards:
        check_rank(shard.layout)
        kinds = _kinds_by_buffer(shard)
        for chunk in shard.chunks:
            if chunk.name not in spans:
                raise IntegrityError(f"{chunk.name!r} is in a shard but not in the model", Where(rank=shard.rank))
            spans[chunk.name].append((chunk.start, chunk.stop, shard.rank, kinds[chunk.buffer]))
    for name, shape in parameters.items():
        numel = math.prod(shape)
        if numel and not spans[name]:
            raise IntegrityError(f"no shard holds {name!r}, which the model has")
        for kind, own in _by_kind(spans[name]).items():
            check_cover(f"{kind}/{name}", numel, own)


def _by_kind(spans: Sequence[_Span]) -> dict[str, list[tuple[int, int, int]]]:
    """The spans of one parameter for each kind that must be checked by itself: one stands for all if all are alike."""
    alike = {span[3] for span in spans}
    if len(alike) == 1:
        return {"+".join(kind for kind, _ in alike.pop()): [span[:3] for span in spans]}
    by_kind: dict[str, list[tuple[int, int, int]]] = {}
    dtypes: dict[str, str] = {}
    for start, stop, rank, kinds in spans:
        for kind, dtype in kinds:
            if dtypes.setdefault(kind, dtype) != dtype:
                raise IntegrityError(
                    f"ranks hold one parameter's {kind} as {dtypes[kind]} and {dtype}", Where(rank=rank)
                )
            by_kind.setdefault(kind, []).append((start, stop, rank))
    return by_kind


def _kinds_by_buffer(shard: ShardRecord) -> dict[str, _Kinds]:
    kinds: dict[str, list[tuple[str, str]]] = {}
    for tensor in shard.tensors:
        kind, buffer = tensor.key.split("/", 1)
        kinds.setdefault(buffer, []).append((kind, tensor.dtype))
    return {buffer: tuple(sorted(entries)) for buffer, entries in kinds.items()}


def _summed(shards: Sequence[ShardRecord]) -> dict[str, int]:
    total: dict[str, int] = {}
    for shard in shards:
        kinds = _kinds_by_buffer(shard)
        expected = {f"{kind}/{chunk.name}" for chunk in shard.chunks for kind, _ in kinds[chunk.buffer]}
        if expected != shard.digests.keys():
            odd = min(expected ^ shard.digests.keys())
            raise IntegrityError(f"content checks and stored state differ for {odd!r}", Where(rank=shard.rank))
        for key, digest in shard.digests.items():
            total[key] = (total.get(key, 0) + digest) % _DIGEST_MODULUS
    return total

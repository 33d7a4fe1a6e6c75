"""Checkpoints whose ranks held different layers (`mesh: {pp: N}`): one manifest, under the names of the whole model.

A *stage* is here what one rank of a pipeline has, whichever layers these are. Its ranks hold whole tensors, so that
shards are those of a run without stages, and are read at any number of them. What is no tensor is saved by the first
rank of each stage, of its own layers, and put together here; a stage then reads a checkpoint as if it were of its
layers alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic.core.checkpoint.lanes import CUTS
from elastic.core.checkpoint.manifest import Json, Manifest, ShardRecord
from elastic.core.errors import IntegrityError, Where
from elastic.core.sharding.cuts import union


def union_of_parameters(shards: Sequence[ShardRecord]) -> dict[str, tuple[int, ...]]:
    """What the records name, stage after stage: a rank may have layers before and after another one's. Raises
    IntegrityError where the first names nothing, or two disagree."""
    found: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        if shard.parameters is None:
            if shard is shards[0]:
                where = Where(rank=shard.rank, step=shard.step)
                raise IntegrityError(f"the record of rank {shard.rank} does not name the parameters", where)
            continue
        for name, shape in shard.parameters.items():
            if found.setdefault(name, shape) != shape:
                raise IntegrityError(f"ranks hold {name!r} in shapes {found[name]} and {shape}", Where(rank=shard.rank))
    return found


def union_of_extra(extras: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """One extra state from those of the stages, the first stage's first. What is not of single layers is the first's.

    Raises IntegrityError where stages have different numbers of parameter groups, or hyper-parameters.
    """
    whole = dict(extras[0])
    if len(extras) == 1:
        return whole
    optimizers = [extra["optimizer"] for extra in extras]
    hyper = [[group["hyper"] for group in optimizer["groups"]] for optimizer in optimizers]
    if any(other != hyper[0] for other in hyper):
        raise IntegrityError(f"the stages of a pipeline have different parameter groups: {hyper}")
    groups = [
        {"names": _once(name for group in groups for name in group["names"]), "hyper": groups[0]["hyper"]}
        for groups in zip(*(optimizer["groups"] for optimizer in optimizers), strict=True)
    ]
    scalars = [entry for optimizer in optimizers for entry in optimizer["scalars"]]
    whole["optimizer"] = {**optimizers[0], "groups": groups, "scalars": _distinct(scalars)}
    whole["fleeting_buffers"] = _once(name for extra in extras for name in extra["fleeting_buffers"])
    for key in ("modules", "grown_buffers"):
        whole[key] = {name: value for extra in extras for name, value in extra.get(key, {}).items()}
    if all(CUTS in extra for extra in extras):
        whole[CUTS] = union([extra[CUTS] for extra in extras])
    aliases = {name: first for extra in extras for name, first in extra["model"]["aliases"].items()}
    whole["model"] = {**whole["model"], "aliases": aliases}
    return whole


def part_of(manifest: Manifest, names: Collection[str], modules: Collection[str]) -> Manifest:
    """The checkpoint as one of these tensors, and of the extra state of these modules, alone. Its shards hold the
    others too."""
    own = frozenset(names)
    extra: dict[str, Any] = dict(manifest.extra_state)
    optimizer = extra["optimizer"]
    extra["optimizer"] = {
        **optimizer,
        "groups": [_restricted(group, own) for group in optimizer["groups"]],
        "scalars": [entry for entry in (_restricted(entry, own) for entry in optimizer["scalars"]) if entry["names"]],
    }
    extra["fleeting_buffers"] = [name for name in extra["fleeting_buffers"] if name in own]
    for key, kept in (("modules", frozenset(modules)), ("grown_buffers", own)):
        if key in extra:
            extra[key] = {name: value for name, value in extra[key].items() if name in kept}
    return replace(
        manifest,
        parameters={name: shape for name, shape in manifest.parameters.items() if name in own},
        digests={key: digest for key, digest in manifest.digests.items() if key.split("/", 1)[1] in own},
        extra_state=extra,
    )


def _restricted(entry: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {**entry, "names": [name for name in entry["names"] if name in names]}


def _distinct(scalars: Sequence[Any]) -> list[Any]:
    """Of tied parameters, which several stages have, the first stage's."""
    seen: set[str] = set()
    found = []
    for entry in scalars:
        names = [name for name in entry["names"] if name not in seen]
        seen.update(names)
        if names:
            found.append({**entry, "names": names})
    return found


def _once(names: Any) -> list[str]:
    return list(dict.fromkeys(names))

"""Checkpoints whose ranks held slices of the model's layers (`mesh: {tp: N}`): one manifest, with a part for each lane.

A lane (`core.mesh`) is a data-parallel world of its own, so that what is known of a checkpoint without lanes holds for
the part of each: its shards hold every element of the lane's slices once. In the manifest, which is of all lanes, the
lane is in the name: "layer.weight@tp0".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.errors import UsageError
from elastic.core.mesh import described


def lane_name(name: str, lane: int, tp: int) -> str:
    """The name in the manifest of what `lane` calls `name`."""
    return name if tp == 1 else f"{name}@tp{lane}"


def shards_of(shards: Sequence[ShardRecord], lane: int, tp: int) -> tuple[ShardRecord, ...]:
    """Those of one lane, of shards in the order of their ranks."""
    return tuple(shards[lane::tp])


def lane_of(manifest: Manifest, lane: int, tp: int) -> Manifest:
    """The part of one lane as a manifest by itself, with the model's names; its shards keep their ranks.

    Raises UsageError where the checkpoint has another number of lanes: slices cannot be put together anew so far.
    """
    if manifest.tp != tp:
        raise UsageError(
            f"checkpoint {manifest.id} was saved with {_said(manifest.tp)} and cannot be restored with {_said(tp)}: "
            "the number of ranks that share each layer stays for a run; "
            + ("leave mesh.tp out" if manifest.tp == 1 else f"give {described(1, manifest.tp)}")
        )
    if tp == 1:
        return manifest
    end = lane_name("", lane, tp)
    return replace(
        manifest,
        world_size=manifest.world_size // tp,
        parameters={name.removesuffix(end): shape for name, shape in manifest.parameters.items() if name.endswith(end)},
        digests={key.removesuffix(end): digest for key, digest in manifest.digests.items() if key.endswith(end)},
        shards=shards_of(manifest.shards, lane, tp),
        tp=1,
    )


def require_whole(manifest: Manifest) -> None:
    """Raises UsageError for a checkpoint whose ranks held slices, for readers of whole tensors."""
    if manifest.tp != 1:
        raise UsageError(
            f"checkpoint {manifest.id} was saved with {_said(manifest.tp)} and holds slices of the layers, which "
            "cannot be put together so far: a run can be resumed from it with the same mesh.tp, not begun, and nothing "
            "can be exported"
        )


def _said(tp: int) -> str:
    return described(1, tp) if tp > 1 else "no mesh.tp"

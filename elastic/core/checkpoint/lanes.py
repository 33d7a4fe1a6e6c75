"""Checkpoints whose ranks held slices of the model's layers (`mesh: {tp: N}`): one manifest, with a part for each lane.

A lane (`core.mesh`) is a data-parallel world of its own, so that what is known of a checkpoint without lanes holds for
the part of each: its shards hold every element of the lane's slices once. In the manifest, which is of all lanes, the
lane is in the name: "layer.weight@tp0". Which part of the whole tensor that is, is in the extra state ("cuts").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.mesh import described
from elastic.core.sharding.cuts import Cut, from_json

# Of the extra state: `core.sharding.cuts.to_json` of the parameters that each lane has a part of.
CUTS = "cuts"


def lane_name(name: str, lane: int, tp: int) -> str:
    """The name in the manifest of what `lane` calls `name`."""
    return name if tp == 1 else f"{name}@tp{lane}"


def shards_of(shards: Sequence[ShardRecord], lane: int, tp: int) -> tuple[ShardRecord, ...]:
    """Those of one lane, of shards in the order of their ranks."""
    return tuple(shards[lane::tp])


def lane_of(manifest: Manifest, lane: int) -> Manifest:
    """The part of one of its lanes as a manifest by itself, with the model's names; its shards keep their ranks."""
    tp = manifest.tp
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


def cuts_of(manifest: Manifest) -> Mapping[str, Cut]:
    """The parameters that each lane has a part of, by the model's names; all others are whole in every lane.

    Raises UsageError where slices cannot be put together: the checkpoint does not say which parts they are, or why not;
    IntegrityError for a record that its tensors do not fit.
    """
    if manifest.tp == 1:
        return {}
    if CUTS not in manifest.extra_state:
        raise UsageError(
            f"checkpoint {manifest.id} was saved with {said(manifest.tp)} and does not say which parts of the whole "
            "tensors its slices are, as it was written by an older release: resume the run with the same mesh.tp, and "
            "export, begin from, or change mesh.tp with a checkpoint that it writes then"
        )
    cuts: dict[str, Cut] = {}
    for name, cut in from_json(manifest.extra_state[CUTS], manifest.tp).items():
        if isinstance(cut, str):
            raise UsageError(
                f"checkpoint {manifest.id} was saved with {said(manifest.tp)}, and the slices of {name!r} cannot be "
                f"put together: {cut}; a run can be resumed from it with the same mesh.tp"
            )
        cuts[name] = cut
    _check_shapes(manifest, cuts)
    return cuts


def are_cut_otherwise(manifest: Manifest, cuts: Mapping[str, Cut | str] | None) -> bool:
    """Is it known of a parameter that its slices are other parts of it here than in a checkpoint of as many lanes?"""
    if manifest.tp == 1 or CUTS not in manifest.extra_state:
        return False
    known = {name: cut for name, cut in (cuts or {}).items() if isinstance(cut, Cut)}
    saved = from_json(manifest.extra_state[CUTS], manifest.tp)
    return any(isinstance(cut, Cut) and known.get(name, cut) != cut for name, cut in saved.items())


def _check_shapes(manifest: Manifest, cuts: Mapping[str, Cut]) -> None:
    shapes = [lane_of(manifest, lane).parameters for lane in range(manifest.tp)]
    for name in {name: None for own in shapes for name in own} | dict.fromkeys(cuts):
        found = [own.get(name) for own in shapes]
        expected = [cuts[name].slice_shape(lane) if name in cuts else found[0] for lane in range(manifest.tp)]
        if found != expected:
            raise IntegrityError(
                f"checkpoint {manifest.id} has slices of {name!r} in shapes {found}, and its record of them says "
                f"{expected}"
            )


def said(*sizes: int) -> str:
    """How many ranks share each layer, as a job file says it; several where generations may have another number."""
    if len(sizes) > 1:
        return f"mesh: {{tp: {list(sizes)}}}"
    return described(1, *sizes) if sizes > (1,) else "no mesh.tp"

"""A checkpoint as one of a lane's slices where as many ranks as now did not share each layer when it was saved.

The lane of a run reads what it needs of the slices of the checkpoint's lanes, or of whole tensors. What it then has is
numbered otherwise than what is stored, so that the stored digests are compared with what all ranks have read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.core.checkpoint.lanes import cuts_of, lane_name, lane_of, said
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import ModelMismatch, UsageError
from elastic.core.mesh import DRAWN_ANEW
from elastic.core.sharding.cuts import Box, Cut, recut, uncut


@dataclass(frozen=True)
class Stored:
    """One lane's slice of "<kind>/<name>", in the checkpoint; `digest` None: it holds none."""

    key: str
    lane: int
    numel: int
    digest: int | None


@dataclass(frozen=True)
class Recut:
    """`whole` is the manifest of all lanes. `manifest` is it as if it were of this lane alone: shapes are those of
    slices here, shards those of the first lane, of which what both have whole is read. Digests of what is cut here or
    there are not known and are 0. `source` and `target` are cuts by parameter, there and here."""

    whole: Manifest
    manifest: Manifest
    source: Mapping[str, Cut]
    target: Mapping[str, Cut]
    lane: int

    @classmethod
    def of(cls, whole: Manifest, cuts: Mapping[str, Cut | str] | None, lane: int, tp: int) -> Recut:
        """`cuts` of what `tp` ranks share here; None: nobody knows them.

        Raises UsageError where slices cannot be put together, there or here; ModelMismatch for a parameter of another
        shape; IntegrityError for a record of cuts that its tensors do not fit.
        """
        source, target = cuts_of(whole), _known(whole, cuts, tp)
        first = lane_of(whole, 0)
        shapes = {name: source[name].shape if name in source else shape for name, shape in first.parameters.items()}
        for name, cut in target.items():
            if name in shapes and shapes[name] != cut.shape:
                raise ModelMismatch(
                    f"the checkpoint is of another model: {name!r} has shape {cut.shape} here before it is cut, "
                    f"{shapes[name]} in the checkpoint"
                )
        lanes = [lane_of(whole, number) for number in range(whole.tp)]
        digests = dict.fromkeys((key for own in lanes for key in own.digests), 0)
        cut_somewhere = {*source, *target}
        digests |= {key: value for key, value in first.digests.items() if key.split("/", 1)[1] not in cut_somewhere}
        parameters = {name: target[name].slice_shape(lane) if name in target else shapes[name] for name in shapes}
        return cls(whole, replace(first, parameters=parameters, digests=digests), source, target, lane)

    def boxes(self, name: str, start: int, stop: int) -> list[Box]:
        """Where the elements [start, stop) of this lane's slice lie in the stored slices, of which lanes."""
        cut = self.target.get(name) or self.source.get(name)
        if cut is None:
            return [Box(0, start, stop - start, 0, stop - start, 1, stop - start)] if stop > start else []
        whole = uncut(cut.dim, cut.shape)
        lane = self.lane if name in self.target else 0
        return recut(self.source.get(name, whole), self.target.get(name, whole), lane, start, stop)

    def said(self, tp: int) -> str:
        """The sentence for the log of a run that is resumed with other slices."""
        if tp == self.whole.tp:
            return (
                f"checkpoint {self.whole.id}: saved and resumed with {said(tp)}, by which other parameters are cut now"
            )
        return f"checkpoint {self.whole.id}: {change_of_slices((self.whole.tp,), (tp,))}"

    def stored(self) -> list[Stored]:
        """What the ranks of a run read, of all its lanes and in one order on each. Of what each lane has whole, the
        first lane's."""
        found = []
        for key in sorted(self.manifest.digests):
            name = key.split("/", 1)[1]
            for lane in range(self.whole.tp) if name in self.source else (0,):
                numel = math.prod(self.whole.parameters[lane_name(name, lane, self.whole.tp)])
                if numel:
                    digest = self.whole.digests.get(lane_name(key, lane, self.whole.tp))
                    found.append(Stored(key, lane, numel, digest))
        return found


def change_of_slices(before: Sequence[int], now: Sequence[int]) -> str:
    """What changes with the number of ranks that share each layer, in words. Several: those that a run may have."""
    return f"saved with {said(*before)} and resumed with {said(*now)}: {DRAWN_ANEW}, and all else goes on as it was"


def _known(whole: Manifest, cuts: Mapping[str, Cut | str] | None, tp: int) -> dict[str, Cut]:
    found = {}
    refused = f"checkpoint {whole.id} was saved with {said(whole.tp)} and cannot be restored with {said(tp)}: "
    if cuts is None:
        raise UsageError(f"{refused}nobody knows which parts of the whole tensors the slices are here")
    for name, cut in cuts.items():
        if isinstance(cut, str):
            raise UsageError(f"{refused}nobody knows which part of {name!r} the slices are here: {cut}")
        found[name] = cut
    return found

"""Verification after a restore: the live engine's state, compared with the manifest on all ranks.

Nothing here depends on how the state is partitioned: contents are compared by sums of partial digests, everything else
by name. Nor does it share with the restore what could be wrong in both: live tensors are looked up parameter by
parameter (`Engine.fragments`), and what may be left out and what counters must be is worked out here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic.checkpoint.shares import KeptBesides
from elastic.comm.agreement import Agreement
from elastic.comm.lanes import Lanes
from elastic.core.checkpoint.manifest import Json, Manifest
from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk
from elastic.engines.base import Engine
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import BUFFER, KEPT, PARAM, Fragment, ShardedState
from elastic.training.state.digest_reader import Reader, digests
from elastic.training.state.verify_scalars import LiveGroups, wrong_groups, wrong_rest, wrong_scalars
from elastic.training.state.verify_weights import unfaithful, whole_hashes

_SHOWN = 3
_EXTRA = "optimizer state that was not saved"


class Verification:
    """The verification of one restore: looks at once, judges when asked.

    1. `Verification(...)` right after everything was installed; not collective. Masters and optimizer state, which only
       an optimizer step changes, are read on a thread of their own; everything else is read before this returns
    2. `verdict` before the first optimizer step and before anything is saved; collective
    """

    def __init__(
        self,
        engine: Engine,
        state: ShardedState,
        manifest: Manifest,
        groups: LiveGroups,
        kept: KeptBesides,
        expected: Mapping[str, int],
    ) -> None:
        """`groups` are the optimizer's before the install; `kept` is what is not the engine's; `expected` are the
        digests of what this rank's place has (`own_digests`), whatever `manifest` has made of them."""
        self._manifest, self._expected = manifest, expected
        left = _left_alone(manifest, state)
        self._keys = sorted(key for key in manifest.digests if key.split("/", 1)[1] not in left)
        self._error: Exception | None = None
        self._failure: Exception | None = None
        self._flags: dict[str, bool] = {}
        self._hashes: dict[str, int] = {}
        self._experts: dict[str, int] = {}
        self._whole: dict[str, int] = {}
        self._partial: dict[str, int] = {}
        # Every copy of a shard would count.
        self._once = None if state.once is None else Agreement(state.once, engine.device)
        self._reader: Reader | None = None
        try:
            inventory = Inventory.of(state)
            fragments = [each for each in engine.fragments() if each.name not in left]
            fragments += [Fragment(KEPT, name, 0, tensor) for name, tensor in kept.tensors.items()]
            chunks, tensors = _sorted(fragments, state.zero_stage, manifest.parameters)
            self._reader = Reader(chunks, tensors.steady, engine.device)
            self._partial = digests(chunks, tensors.sliced.items())
            self._whole = digests(chunks, tensors.whole.items())
            self._partial |= {key: self._whole[key] for key in (f"{KEPT}/{name}" for name in kept.answers)}
            self._flags = _flags(engine, state, inventory, manifest.extra_state, groups)
            self._hashes, self._experts = _hashes(state)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the verdict: it is raised there
            self._error = error

    def verdict(self, lanes: Lanes, copies: Agreement) -> None:
        """Collective. Raises IntegrityError naming what differs first, on every rank. The manifest is that of the ranks
        of this lane; `copies` is the agreement of the ranks with the same experts as this one.

        An error is raised again at every later call, without another collective.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._judge(lanes, copies)
        except Exception as error:
            self._failure = error
            raise

    def stop(self) -> None:
        """The engine is being closed: no verdict will be asked for."""
        if self._reader is not None:
            self._reader.stop()

    def _judge(self, lanes: Lanes, copies: Agreement) -> None:
        try:
            if self._error is None:
                assert self._reader is not None
                self._partial |= self._reader.result()
        except Exception as error:  # noqa: BLE001 - as above
            self._error = error
        # Begun with the exchange of errors: of a rank that has one nobody looks at the sums.
        sums = (self._once or lanes.own).sums_later([self._partial.get(key, 0) for key in self._keys])
        lanes.every.raise_together(self._error, f"verifying checkpoint {self._manifest.id}")
        failed = self._failed(sums(), lanes.own, copies)
        elsewhere = lanes.count > 1 and lanes.every.any(bool(failed))
        if failed or elsewhere:
            what = f"{listed(failed)} differ" if failed else "ranks with other parts of the layers say what differs"
            raise IntegrityError(f"what checkpoint {self._manifest.id} gave back is not what was saved: {what}")

    def _failed(self, sums: Sequence[int], agreement: Agreement, copies: Agreement) -> list[str]:
        """What differs on any rank: one or two more exchanges of a few bytes per tensor."""
        digests, expected = self._manifest.digests, self._expected
        found = {key: self._whole.get(key, total) for key, total in zip(self._keys, sums, strict=True)}
        wrong = {key: key not in expected or value != expected[key] for key, value in found.items()}
        _, unequal = copies.any_and_unequal([], list(self._experts.values()))
        wrong |= zip(self._experts, unequal, strict=True)
        wrong |= {_EXTRA: bool((self._partial.keys() | self._whole.keys()) - digests.keys()), **self._flags}
        flagged, unequal = agreement.any_and_unequal(list(wrong.values()), list(self._hashes.values()))
        failed = [what for what, flag in zip(wrong, flagged, strict=True) if flag]
        return failed + [what for what, flag in zip(self._hashes, unequal, strict=True) if flag]


def own_digests(whole: Manifest, rank: int) -> Mapping[str, int]:
    """Of the slices that belong to this place of a cell, as the manifest of all ranks says. Not by the way that leads
    to what is read (`core.checkpoint.lanes`): ranks that take each other's slices would agree with one another."""
    if whole.tp == 1:
        return whole.digests
    end = f"@tp{rank % whole.tp}"
    return {key[: -len(end)]: value for key, value in whole.digests.items() if key.endswith(end)}


def _flags(
    engine: Engine, state: ShardedState, inventory: Inventory, saved: Mapping[str, Json], groups: LiveGroups
) -> dict[str, bool]:
    """What is wrong on this rank; the same names on every rank."""
    weights = state.weights()
    names = sorted(name for group in state.groups() for name in group)
    scalars, unlike = wrong_scalars(inventory, saved), unfaithful(inventory.masters, weights)
    hyper = wrong_groups(state.base, saved)
    flags = {f"weights of {name}": name in unlike for name in names}
    flags |= {f"optimizer scalars of {name}": name in scalars for name in names}
    flags |= {f"hyper-parameters of group {number}": number in hyper for number in range(len(state.base.param_groups))}
    flags["live parameter groups"] = bool(groups.moved(LiveGroups.of(state)))
    flags |= wrong_rest(engine.extra_state(), engine.expected_extra_state(saved))
    return flags


def _hashes(state: ShardedState) -> tuple[dict[str, int], dict[str, int]]:
    """Of weights that other ranks have copies of: what must be equal on all ranks, and on those with the same experts;
    the same names on every rank."""
    weights = state.weights()
    names = sorted(name for group in state.groups() for name in group)
    experts = {weight.name for weight in weights if weight.experts and state.copies is not None}
    found = dict(zip(names, whole_hashes(names, weights), strict=True))
    everywhere = {f"replicas of {name}": value for name, value in found.items() if name not in experts}
    return everywhere, {f"replicas of {name}": value for name, value in found.items() if name in experts}


@dataclass(frozen=True)
class _Sorted:
    """Tensors by "<kind>/<buffer>". `steady` ones, slices of masters and of their state, change in a step only.

    `sliced` are other slices (frozen parameters in stage 3), `whole` are replicated tensors: forward passes change
    module buffers, and the user's own code may change frozen parameters, in stage 0 also the masters.
    """

    steady: dict[str, torch.Tensor]
    sliced: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]


def _sorted(
    fragments: Sequence[Fragment], zero_stage: int, shapes: Mapping[str, Sequence[int]]
) -> tuple[tuple[Chunk, ...], _Sorted]:
    """Each fragment is a buffer of its own; all kinds of one name have the same elements. `shapes` are of the whole."""
    found = _Sorted({}, {}, {})
    chunks = {each.name: Chunk(each.name, each.start, each.tensor.numel(), each.name, 0) for each in fragments}
    for each in fragments:
        sliced = found.sliced if each.kind == PARAM or zero_stage == 0 else found.steady
        # In stage 0 a rank has some of the experts only, where ranks share them.
        part = each.kind not in (BUFFER, KEPT) and each.tensor.numel() < math.prod(shapes.get(each.name, ()))
        place = found.whole if is_whole(each.kind, zero_stage) and not (zero_stage == 0 and part) else sliced
        place[f"{each.kind}/{each.name}"] = each.tensor
    return tuple(chunks.values()), found


def is_whole(kind: str, zero_stage: int) -> bool:
    """Does each rank have all of a tensor of this kind, or a slice of it?"""
    return zero_stage == 0 or kind in (BUFFER, KEPT) or (kind == PARAM and zero_stage < 3)


def _left_alone(manifest: Manifest, state: ShardedState) -> frozenset[str]:
    """Caches outside the state_dict that have another shape here, or exist on one side only. Nothing else may be left
    out of a restore, whatever the check of the model has said."""
    live = {spec.name: spec for spec in state.specs()}
    fleeting = {name for name, spec in live.items() if spec.kind == BUFFER and not spec.persistent}
    gone = {name for name in manifest.extra_state["fleeting_buffers"] if name not in live}
    changed = {name for name in fleeting if tuple(manifest.parameters.get(name, (-1,))) != live[name].shape}
    return frozenset(gone | changed)


def listed(failed: Sequence[str]) -> str:
    """The first few of what differs, and how many more."""
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return f"{', '.join(failed[:_SHOWN])}{more}"

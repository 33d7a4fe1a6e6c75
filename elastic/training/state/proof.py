"""The proof after a restore: what now is in the live engine, compared with what the manifest says, on all ranks.

Nothing here depends on how the state is cut: contents are compared by sums of partial digests, everything else by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.checkpoint.digest import partial_digests
from elastic.core.errors import IntegrityError
from elastic.core.layout import Piece, RankLayout
from elastic.core.manifest import Json, Manifest
from elastic.core.samples import SampleOrder
from elastic.training.progress import StepPlan
from elastic.training.state.agree import Agreement
from elastic.training.state.cursor import next_step, whole_step
from elastic.training.state.inventory import Inventory
from elastic.training.state.live import Stage
from elastic.training.state.plain import REST, LiveGroups, wrong_groups, wrong_rest, wrong_scalars
from elastic.training.state.weights import fingerprint, replicas, unfaithful, whole_hashes

_SHOWN = 3
_EXTRA = "optimizer state that was not saved"


@dataclass(frozen=True)
class Evidence:
    """One rank's part of the proof, before anything was exchanged. `flags` and `hashes` are the same lists everywhere.

    `partial` digests of slices are to be summed over the ranks; `whole` ones of replicas are compared here. `flags`:
    what is wrong on this rank. `hashes` of replicas are to be equal on all ranks.
    """

    partial: dict[str, int]
    whole: dict[str, int]
    flags: dict[str, bool]
    hashes: dict[str, int]


def prove(
    engine: Any,
    stage: Stage,
    inventory: Inventory,
    manifest: Manifest,
    skipped: Collection[str],
    groups: LiveGroups,
    agreement: Agreement,
) -> None:
    """Collective. Raises IntegrityError naming what differs first, with the same verdict on every rank.

    `inventory` is what is held now, without `skipped`; `groups` were the optimizer's before anything was installed.
    """
    evidence: Evidence | None = None
    error: Exception | None = None
    try:
        evidence = collect(engine, stage, inventory, manifest, groups)
    except Exception as caught:  # noqa: BLE001 - the other ranks wait: they must learn of it, then it is raised
        error = caught
    agreement.raise_together(error, f"proving checkpoint {manifest.id}")
    assert evidence is not None
    keys = sorted(key for key in manifest.digests if key.split("/", 1)[1] not in skipped)
    judge(evidence, keys, manifest, agreement)


def prove_place(
    saved: Mapping[str, Json],
    here: Mapping[str, Json],
    plan: StepPlan,
    order: SampleOrder,
    agreement: Agreement,
) -> None:
    """Collective. Does the run go on where the snapshot was taken: step, samples, random streams, the user's state?

    `saved` is the snapshot's client, `here` what this rank would save now; more of the user's may be here than was
    saved. Raises IntegrityError naming what differs, with the same verdict on every rank.
    """
    wrong = {name: not _contains(here.get(name), value) for name, value in saved.items()}
    step = int(saved["step"])
    dealt = agreement.sums([next_step(plan, order, step)])
    wrong["samples and random streams of the next step"] = dealt != [whole_step(plan, order, step)]
    flagged, _ = agreement.any_and_unequal(list(wrong.values()), [])
    failed = [what for what, flag in zip(wrong, flagged, strict=True) if flag]
    if failed:
        raise IntegrityError(f"the run would not go on where the snapshot of step {step} was taken: {_listed(failed)}")


def prove_replicas(stage: Stage, inventory: Inventory, agreement: Agreement) -> None:
    """Collective, before a snapshot: of what every rank holds a copy of, are the copies equal?

    A snapshot carries one of them and a restore gives it to all, so copies that have drifted apart would become another
    run without a word. Module buffers are left out: rank 0's are the run's. Raises IntegrityError on every rank.
    """
    found = {f"weights of {w.name}": fingerprint(w.tensor) for w in stage.weights() if w.whole}
    states = [state.tensors for state in inventory.states]
    for what, tensor in replicas(inventory.masters, states, inventory.extras).items():
        found[what] = fingerprint(tensor)
    _, unequal = agreement.any_and_unequal([], list(found.values()))
    failed = [what for what, flag in zip(found, unequal, strict=True) if flag]
    if failed:
        raise IntegrityError(
            f"the ranks' copies of one tensor have drifted apart: {_listed(failed)}. A snapshot would carry one of "
            "them only; go back to an older checkpoint, and look for code that changes weights on some ranks alone"
        )


def collect(engine: Any, stage: Stage, inventory: Inventory, manifest: Manifest, groups: LiveGroups) -> Evidence:
    """All that this rank can say by itself. Reads every tensor once."""
    partial, whole = _digests(inventory)
    weights = stage.weights()
    names = sorted(name for group in stage.groups() for name in group)
    scalars, unlike = wrong_scalars(inventory, manifest.client), unfaithful(inventory.masters, weights)
    hyper, rest = wrong_groups(stage, manifest.client), wrong_rest(engine, manifest.client)
    flags = {f"weights of {name}": name in unlike for name in names}
    flags |= {f"optimizer scalars of {name}": name in scalars for name in names}
    flags |= {f"hyper-parameters of group {number}": number in hyper for number in range(len(stage.base.param_groups))}
    flags["live parameter groups"] = bool(groups.moved(LiveGroups.of(engine)))
    flags[_EXTRA] = bool((partial.keys() | whole.keys()) - manifest.digests.keys())
    flags |= {what: what in rest for what in REST}
    hashes = dict(zip([f"replicas of {name}" for name in names], whole_hashes(names, weights), strict=True))
    return Evidence(partial, whole, flags, hashes)


def judge(evidence: Evidence, keys: Sequence[str], manifest: Manifest, agreement: Agreement) -> None:
    """Collective. The verdict over all ranks' evidence; two exchanges of a few bytes per tensor."""
    sums = agreement.sums([evidence.partial.get(key, 0) for key in keys])
    contents = {
        key: evidence.whole.get(key, total) != manifest.digests[key] for key, total in zip(keys, sums, strict=True)
    }
    wrong = contents | evidence.flags
    flagged, unequal = agreement.any_and_unequal(list(wrong.values()), list(evidence.hashes.values()))
    failed = [what for what, flag in zip(wrong, flagged, strict=True) if flag]
    failed += [what for what, flag in zip(evidence.hashes, unequal, strict=True) if flag]
    if failed:
        raise IntegrityError(f"what checkpoint {manifest.id} gave back is not what was saved: {_listed(failed)} differ")


def _listed(failed: Sequence[str]) -> str:
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return f"{', '.join(failed[:_SHOWN])}{more}"


def _contains(here: Json, saved: Json) -> bool:
    """Is everything saved here? Beside it there may be what was set since."""
    if isinstance(saved, dict) and isinstance(here, dict):
        return all(key in here and here[key] == value for key, value in saved.items())
    return bool(here == saved)


def _digests(inventory: Inventory) -> tuple[dict[str, int], dict[str, int]]:
    """Digests of slices, and of what is whole on every rank, by "<kind>/<parameter>"."""
    pieces: dict[str, list[Piece]] = {}
    for piece in inventory.held().pieces:
        pieces.setdefault(piece.buffer, []).append(piece)
    whole_buffers = {m.buffer for m in inventory.masters if m.replicated}
    whole_buffers |= {e.piece.buffer for e in inventory.extras if e.replicated}
    partial: dict[str, int] = {}
    whole: dict[str, int] = {}
    for key, tensor in inventory.tensors().items():
        buffer = key.split("/", 1)[1]
        # One at a time, so that the device's state is never on the host twice.
        host = tensor.detach().reshape(-1).cpu()
        values = partial_digests(RankLayout(tuple(pieces.get(buffer, ())), {buffer: host.numel()}), {key: host})
        (whole if buffer in whole_buffers else partial).update(values)
    return partial, whole

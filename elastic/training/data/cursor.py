"""The data cursor of a saved state: its step, what defines the order of samples, and which samples are left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic.comm.agreement import Agreement
from elastic.core.data.adaptive_batch import Change
from elastic.core.data.finite import FinitePlace
from elastic.core.data.readers import MODULUS, ReaderStates, merged, owned
from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.steps import Range, union
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.training import rng
from elastic.training.state.verification import listed

# Compared by what they mean: samples may have been left out since.
_BATCHES = "batches"
_MOVED = ("skips", "position", _BATCHES)
# Of checkpoints from before these were saved.
_BEFORE = {"shuffle": True, "epochs of the readers": "each its own", "batch": "the same in all steps"}


def to_state(plan: StepPlan, seed: int, step: int) -> dict[str, Any]:
    """The cursor after `step` steps, as JSON; it is saved with every state."""
    finite = plan.finite
    return {
        "step": step,
        **({} if finite is None else {"epoch": finite.epoch, "samples": finite.samples, "begun": finite.begun}),
        "position": plan.position(step),
        **({} if plan.adaptive is None else {_BATCHES: [list(change) for change in plan.changes]}),
        "skips": [list(range_) for range_ in plan.skips],
        "data": _order(plan, seed),
    }


def require_equal(plan: StepPlan, seed: int, agreement: Agreement) -> None:
    """Do all ranks read the same data in the same order? Collective. Raises UsageError on every rank, naming its own:
    a folder that is still being filled, for example, is another stream on each of them."""
    order = _order(plan, seed)
    _, (unequal,) = agreement.any_and_unequal([], [rng.derive(json.dumps(order, sort_keys=True))])
    if unequal:
        told = ", ".join(f"{name} {value}" for name, value in order.items())
        raise UsageError(f"the ranks do not read the same training data: rank {plan.rank} has {told}")


def validate(saved: Mapping[str, Any], plan: StepPlan, seed: int) -> None:
    """Raises UsageError where the saved state was trained with another order of samples than this run's."""
    order = _order(plan, seed)
    for name in {**order, **saved["data"]}:
        value, before = order.get(name), saved["data"].get(name, _BEFORE.get(name) if name in order else None)
        if before != value:
            if name == "global_batch":
                _refuse_by_workers(int(before), int(order[name]), plan.world_size)
            raise UsageError(
                f"the checkpoint was made with {name} {before}, this run has {value}: it cannot continue "
                f"with the same samples; set {name} back, or start a new run"
            )


def _refuse_by_workers(before: int, now: int, workers: int) -> None:
    """As DeepSpeed-Chat: micro-batch * torch.distributed.get_world_size() * accumulation. Raises UsageError."""
    if now % workers == 0 and before % (now // workers) == 0:
        raise UsageError(
            f"the run began with train_batch_size {before}, and has {now} with {workers} workers: the script computes "
            "it from their number, it seems. A run has one global batch at every world size: leave it out "
            "(train_micro_batch_size_per_gpu is taken times max_workers), or give the number, and resume the run"
        )


def from_state(saved: Mapping[str, Any], plan: StepPlan, batch: BatchSettings) -> StepPlan:
    """The plan, which also leaves out what `saved` left out: the controller of another attempt may not know of it.

    Raises IntegrityError for a state that was trained on samples that this run leaves out.
    """
    position = int(saved["position"])
    if plan.finite is not None:
        step, samples, epoch = (int(saved[name]) for name in ("step", "samples", "epoch"))
        place = FinitePlace(batch.epochs, step, samples, position, epoch, begun=bool(saved["begun"]))
        plan = replace(plan, finite=place)
    if plan.adaptive is not None:
        plan = plan.from_step(int(saved["step"]), _changes(saved), batch)
    before = _until(position, ((start, stop) for start, stop in saved.get("skips", ())))
    for start, stop in _until(position, plan.skips):
        if not any(a <= start and stop <= b for a, b in before):
            raise IntegrityError(
                f"the state after step {saved['step']} was trained on samples {start} to {stop - 1}, which were found "
                "to be no good since then"
            )
    return skipping(plan, union((*plan.skips, *before)), batch)


def skipping(plan: StepPlan, skips: tuple[Range, ...], batch: BatchSettings) -> StepPlan:
    """The plan of the same run without these positions."""
    plan = replace(plan, skips=skips)
    return replace(plan, total_samples=plan.total(batch))


def verify(
    saved: Mapping[str, Any], here: Mapping[str, Any], plan: StepPlan, order: SampleOrder, agreement: Agreement
) -> None:
    """Does the run continue where `saved` was taken: step, samples, random streams, the user's state? Collective.

    `here` is what this rank would save now; the user's state may have more keys than were saved. Raises IntegrityError
    that names what differs, with the same verdict on every rank.
    """
    step = int(saved["step"])
    wrong = {name: not _contains(here.get(name), value) for name, value in saved.items() if name not in _MOVED}
    wrong["position"] = not _follows(saved, here, plan)
    wrong["batches"] = plan.adaptive is not None and not _continued(saved, here)
    # Both exchanges at once; what the sum is compared with is compared itself, so that the verdict is the same.
    dealt, whole = agreement.sums_later([next_step(plan, order, step)]), whole_step(plan, order, step)
    flagged, unequal = agreement.any_and_unequal(list(wrong.values()), divmod(whole, 1 << 32))
    failed = [what for what, flag in zip(wrong, flagged, strict=True) if flag]
    if any([*unequal, dealt() != [whole]]):
        failed.append("samples and random streams of the next step")
    if failed:
        raise IntegrityError(
            f"the run would not continue where the snapshot of step {step} was taken: {listed(failed)}"
        )


def readers_of(saved: Any, plan: StepPlan, agreement: Agreement) -> ReaderStates | None:
    """The states of all readers of a stream, from the JSON in a manifest. Collective.

    Raises IntegrityError, on every rank, unless the ranks own every reader once and continue from what was saved.
    """
    if not plan.stream:
        return None
    states = merged([(0, None if saved is None else ReaderStates.from_json(saved))])
    if states is None or states.total != plan.slots.readers:
        found = "none" if states is None else str(states.total)
        raise IntegrityError(f"the checkpoint has states of {found} readers, the run reads with {plan.slots.readers}")
    hashes = {reader: rng.derive(reader, json.dumps(state, sort_keys=True)) for reader, state in states.states.items()}
    mine = owned(states.total, plan.world_size, plan.rank) if plan.leads else range(0)
    if agreement.sums([sum(hashes[reader] for reader in mine)]) != [sum(hashes.values()) % MODULUS]:
        raise IntegrityError("the ranks do not continue from the reader states that were saved")
    return states


def next_step(plan: StepPlan, order: SampleOrder, step: int) -> int:
    """Samples, weights and random streams of this rank's micro-batches in `step` as one number below 2**64.

    Its sum over the ranks modulo 2**64 is `whole_step` at every world size. 0 after the last step, and for ranks that
    stand for nobody.
    """
    if plan.over(step) or not plan.leads:
        return 0
    batches = [batch for batch in plan.deal(step) if batch.weight > 0.0]
    total = 0
    for batch in batches:
        samples = ",".join(map(str, order.indices(batch.start, batch.stop)))
        stream = rng.derive(*rng.forward_stream(order.seed, step, batch.index, 0))
        total += rng.derive(batch.index, batch.start, batch.stop, batch.weight.hex(), samples, stream)
    return total % MODULUS


def whole_step(plan: StepPlan, order: SampleOrder, step: int) -> int:
    """The same for all micro-batches of the step, as a single rank would have it."""
    return next_step(replace(plan, world_size=1, rank=0, leads=True), order, step)


def _order(plan: StepPlan, seed: int) -> dict[str, Any]:
    """What defines the order in which positions count samples, and the random streams."""
    return {
        **dict(plan.stream),
        **({"epochs of the readers": "each its own" if plan.finite is None else "together"} if plan.stream else {}),
        **({"blocks of samples": f"{plan.block}, {plan.blocks_at_once} at once"} if plan.block else {}),
        "seed": seed,
        "global_batch": plan.full_batch or plan.global_batch,
        "batch": _BEFORE["batch"] if plan.adaptive is None else "in proportion to the workers",
        "micro_batch": plan.micro_batch,
        "dataset_size": plan.dataset_size,
        "shuffle": plan.shuffle,
    }


def _until(position: int, ranges: Iterable[Range]) -> tuple[Range, ...]:
    return union((start, min(stop, position)) for start, stop in ranges if start < position)


def _follows(saved: Mapping[str, Any], here: Mapping[str, Any], plan: StepPlan) -> bool:
    """Samples that were left out since the state was saved move what comes next, and nothing else does: the saved ones
    are still left out, the saved position is where its steps end with those alone, and whatever lies between that
    position and the present one is left out now."""
    then, now = _ranges(saved.get("skips", ())), _ranges(here.get("skips", ()))
    position, moved = int(saved["position"]), int(here["position"])
    # Counted here and not by the plan: what is below the position and not left out was consumed.
    consumed = position - sum(min(stop, position) - start for start, stop in then if start < position)
    if plan.finite is not None:
        whole = int(saved["samples"])
    elif plan.adaptive is not None:
        whole = _in_steps(saved)
    else:
        whole = int(saved["step"]) * plan.global_batch
    counted = consumed == whole or (plan.finite is None and plan.over(int(saved["step"])))
    between = union((*now, (position, moved))) == now if moved > position else moved == position
    return counted and union((*then, *now)) == now and between


def _changes(saved: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(Change(*map(int, change)) for change in saved[_BATCHES])


def _continued(saved: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """The batches of the steps so far are what they were."""
    step, then, now = int(saved["step"]), _changes(saved), _changes(here)
    before = [change for change in then if change.step < step]
    return [change for change in now if change.step < step] == before


def _in_steps(saved: Mapping[str, Any]) -> int:
    """Samples of the steps so far, each with its own batch. Not from the sums that were saved with them."""
    ends = [change.step for change in _changes(saved)[1:]] + [int(saved["step"])]
    return sum((end - change.step) * change.batch for change, end in zip(_changes(saved), ends, strict=True))


def _ranges(pairs: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    return union((int(start), int(stop)) for start, stop in pairs)


def _contains(here: Any, saved: Any) -> bool:
    """Is everything that was saved here? Keys that were set since are allowed."""
    if isinstance(saved, dict) and isinstance(here, dict):
        return all(key in here and here[key] == value for key, value in saved.items())
    return bool(here == saved)

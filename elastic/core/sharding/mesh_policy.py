"""Which mesh the next generation trains on, where the job lets the sizes of an axis change: every admissible one is
looked at, at every loss and growth.

What has run out of memory is left out, and what is predicted to (`sharding.mesh_memory`). Of the others the best
predicted step time decides; where predictions are too near to tell, the mesh that moves the fewest bytes over the
network; then the present one. Pure: the same facts give the same mesh in every incarnation of the controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median
from typing import Any

from elastic.core.checkpoint.snapshots import Copies
from elastic.core.mesh import Mesh, MeshSettings, whole_cells
from elastic.core.policy.measured import Axes, TriedMesh
from elastic.core.sharding.mesh_memory import KnownMemory, MemoryNeed, predict
from elastic.core.sharding.placement import boxes_of
from elastic.core.wording import plural

# Predictions that differ by less are alike.
_ALIKE = 0.05


@dataclass(frozen=True)
class MeshFacts:
    """What the choice may look at. `workers` could be members, `least` must be. `passes`: the micro-batches of a step
    (None: not known before a script says). `before` is the mesh that the state was left on by `copies` (None: it comes
    from storage, or there is none). `nodes_of(world size, mesh)` are the nodes of the ranks in their order. `memory`:
    what meshes have needed; `refused_tp`: by how many workers the model cannot be cut."""

    settings: MeshSettings
    workers: int
    least: int = 1
    passes: int | None = None
    tried: Sequence[TriedMesh] = ()
    present: Axes | None = None
    before: Mesh | None = None
    copies: Copies = field(default_factory=Copies)
    nodes_of: Callable[[int, MeshSettings], Sequence[str | None]] = lambda size, mesh: ()
    memory: KnownMemory = field(default_factory=KnownMemory)
    refused_tp: Sequence[int] = ()


@dataclass(frozen=True)
class MeshCandidate:
    """`step` is in `seconds` where a step of this run was measured (`measured`: of this very mesh), else in those of
    one worker that trains alone; `moved` the share of the state's sliced part that crosses the network (None: unknown,
    or others are faster). `need`: what memory is predicted (None: unknown, or known to suffice). `refusal`: why it
    cannot be taken."""

    axes: Axes
    world_size: int
    step: float = math.inf
    measured: bool = False
    seconds: bool = False
    moved: float | None = None
    need: MemoryNeed | None = None
    refusal: str = ""

    def __str__(self) -> str:
        return f"{plural(self.world_size, 'worker')} with {said(self.axes)}"

    @property
    def unfit(self) -> bool:
        """Is more memory predicted than there is?"""
        return self.need is not None and not self.need.suffices


@dataclass(frozen=True)
class MeshVerdict:
    chosen: MeshCandidate
    reason: str
    candidates: tuple[MeshCandidate, ...]


def said(axes: Axes) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in axes.items())


def choose(facts: MeshFacts) -> MeshVerdict:
    """`workers` are a multiple of one of the cells, and at least `least`. `candidates` are all that were looked at, in
    the order of the settings."""
    found = _judged(facts)
    open_ = [one for one in found if not one.refusal]
    if not open_ and any(one.unfit for one in found):
        return _least_unfit(found)
    if not open_:
        # What has failed before is tried again rather than nothing: the run's budgets end it if it fails again. What
        # the model refuses is not, while there is another.
        formed = [one for one in found if one.world_size >= max(1, facts.least)]
        formed = [one for one in formed if not _refused(facts, one.axes)] or formed
        chosen = max(formed, key=lambda one: facts.settings.shape(one.axes).cell)
        return MeshVerdict(chosen, "no other is left to try", tuple(found))
    fastest = min(one.step for one in open_)
    # What a mesh moves is asked of those alone that it decides on: at a thousand ranks it takes a millisecond of each.
    held = _held(facts)
    found = [replace(one, moved=_moved(facts, one, held)) if _is_near(one, fastest) else one for one in found]
    alike = [one for one in found if _is_near(one, fastest)]
    best = min(alike, key=lambda one: _preference(facts, one))
    kept = next((one.refusal for one in found if one.refusal == _kept(facts)), "")
    if not kept and any(one.unfit for one in found):
        kept = "nothing else fits into memory"
    return MeshVerdict(best, _why(facts, best, open_, alike, kept), tuple(found))


def _least_unfit(found: Sequence[MeshCandidate]) -> MeshVerdict:
    """A prediction is no proof: rather than nothing, what needs least is tried."""
    needs = [(one.need.peak_bytes, at) for at, one in enumerate(found) if one.need is not None and one.unfit]
    _, least = min(needs)
    candidates = tuple(replace(one, refusal="") if at == least else one for at, one in enumerate(found))
    chosen = candidates[least]
    return MeshVerdict(
        chosen, f"no mesh is predicted to fit into memory; this one needs least, {chosen.need}", candidates
    )


def _judged(facts: MeshFacts) -> list[MeshCandidate]:
    predict_step = _predictor(facts)
    found = []
    for axes in facts.settings.axes:
        shape = facts.settings.shape(axes)
        one = MeshCandidate(axes, whole_cells(facts.workers, shape.cell))
        if one.world_size < max(1, facts.least):
            needed = -(-max(1, facts.least) // shape.cell) * shape.cell
            found.append(replace(one, refusal=f"{facts.workers} workers, and it needs {needed}"))
            continue
        if _refused(facts, axes):
            found.append(replace(one, refusal=f"the model cannot be cut by {axes['tp']}"))
            continue
        if (full := _out_of_memory(facts, one)) is not None:
            found.append(replace(one, refusal=f"memory did not suffice: {full.world_size} workers, {said(full.axes)}"))
            continue
        step, measured = predict_step(shape, axes, one.world_size)
        seconds = any(tried.step_s is not None for tried in facts.tried)
        one = replace(one, step=step, measured=measured, seconds=seconds, need=_need(facts, one))
        found.append(replace(one, refusal=f"memory would not suffice: {one.need}" if one.unfit else ""))
    # The tensor axis decides about dropout inside cut layers, and so about the curve: it stays while it can.
    tp = (facts.present or {}).get("tp")
    if any(not one.refusal and one.axes.get("tp") == tp for one in found):
        found = [
            one if one.refusal or one.axes.get("tp") == tp else replace(one, refusal=_kept(facts)) for one in found
        ]
    return found


def _is_near(one: MeshCandidate, fastest: float) -> bool:
    return not one.refusal and one.step <= fastest * (1 + _ALIKE)


def _kept(facts: MeshFacts) -> str:
    return f"tp {(facts.present or {}).get('tp')} can be kept"


def _refused(facts: MeshFacts, axes: Axes) -> bool:
    """Sizes that the job lists are not left out: an earlier attempt may have left them open."""
    return facts.settings.any_tp and axes.get("tp") in facts.refused_tp


def _out_of_memory(facts: MeshFacts, one: MeshCandidate) -> TriedMesh | None:
    """Where the same has failed, or what would have left each worker at least as much memory."""
    failed = (tried for tried in facts.tried if tried.step_s is None and tried.world_size >= one.world_size)
    return next((tried for tried in failed if all(tried.axes.get(a, 0) >= size for a, size in one.axes.items())), None)


def _need(facts: MeshFacts, one: MeshCandidate) -> MemoryNeed | None:
    """None also for what has trained with as few workers."""
    fits = facts.memory.fitted(one.world_size, one.axes)
    return None if fits else predict(facts.memory, facts.settings, one.axes, one.world_size)


def _preference(facts: MeshFacts, one: MeshCandidate) -> tuple[float, bool, int]:
    """Bytes moved; then the present mesh; then the one that leaves each worker the most memory. Of sizes that the job
    has not chosen the smallest: what workers send each other within a layer is in no prediction."""
    cell = facts.settings.shape(one.axes).cell
    return one.moved or 0.0, one.axes != facts.present, cell if facts.settings.any_tp else -cell


def _why(
    facts: MeshFacts, best: MeshCandidate, open_: Sequence[MeshCandidate], alike: Sequence[MeshCandidate], kept: str
) -> str:
    """`kept`: why others were not looked at."""
    if len(open_) == 1:
        return kept or "nothing else can be formed"
    if len(alike) == 1:
        return "the fastest step by what was measured" if best.measured else "the fastest step by prediction"
    if best.moved is not None and any((one.moved or 0.0) > best.moved for one in alike):
        return "as fast as any, and the fewest bytes move"
    if best.axes == facts.present:
        return "as fast as any, and no change"
    return "as fast as any, and the " + ("fewest share layers" if facts.settings.any_tp else "most memory left")


def outlook(facts: MeshFacts, left: Sequence[int]) -> str:
    """In words what the loss of a node, of two, ... would leave, of which `left` have that many workers. What is held
    where then decides between meshes that are as fast as each other."""
    said_: list[str] = []
    for lost, workers in enumerate(left, 1):
        workers = whole_cells(workers, *facts.settings.cells)
        after = f"{plural(workers, 'worker')} of the {facts.least} that the run needs"
        if workers >= max(1, facts.least):
            verdict = choose(replace(facts, workers=workers, before=None))
            after = f"{verdict.chosen} ({verdict.reason})"
        said_.append(f"{plural(lost, 'lost node')} would leave {after}")
    return "; ".join(said_)


# --- step time ---


def _predictor(facts: MeshFacts) -> Callable[[MeshSettings, Axes, int], tuple[float, bool]]:
    """Step time of (shape, its axes, world size), and whether it was measured as it is.

    Others are relative to each other by `relative_step`, in seconds by what was measured at the same axes, or at any.
    """
    known = [tried for tried in facts.tried if tried.step_s is not None]
    exact = {(tried.world_size, tuple(tried.axes.items())): tried.step_s or 0.0 for tried in known}
    ratios: dict[tuple[tuple[str, int], ...], list[float]] = {}
    for tried in known:
        relative = relative_step(facts.settings.shape(tried.axes), tried.world_size, facts.passes)
        ratios.setdefault(tuple(tried.axes.items()), []).append((tried.step_s or 0.0) / relative)
    anywhere = median([ratio for found in ratios.values() for ratio in found]) if ratios else 1.0

    def predict(shape: MeshSettings, axes: Axes, world_size: int) -> tuple[float, bool]:
        key = tuple(axes.items())
        if (world_size, key) in exact:
            return exact[world_size, key], True
        scale = median(ratios[key]) if key in ratios else anywhere
        return scale * relative_step(shape, world_size, facts.passes), False

    return predict


def relative_step(shape: MeshSettings, world_size: int, passes: int | None) -> float:
    """Of a step of `passes` micro-batches, in forward and backward passes of a whole model on one worker.

    Workers that train on the same samples share the work of a pass; in a pipeline each waits for the first micro-batch
    and for the last, through stages that are the shorter the more of them it has. Without communication, which is only
    known where it was measured. With `passes` unknown, any number of data-parallel parts is even.
    """
    groups, bubble = world_size // shape.readers, (shape.pp - 1) / shape.stages_per_rank
    return (math.ceil(passes / groups) + bubble if passes is not None else 1 / groups) / shape.readers


# --- bytes moved ---


def _held(facts: MeshFacts) -> dict[str, list[Box]] | None:
    """What of the state each node has; None: unknown."""
    before = facts.before
    if before is None or not facts.copies.nodes or facts.copies.ranks != before.dp * before.per_cell:
        return None
    return {
        node: [box for span in (*first, *others) for box in shares_of(before, *span)]
        for node, first, others in facts.copies.nodes
    }


def _moved(facts: MeshFacts, one: MeshCandidate, held: Mapping[str, Sequence[Box]] | None) -> float | None:
    """The share of what the axes cut that is read from another node: parts are boxes, lane x place in the lane."""
    if held is None:
        return None
    shape = facts.settings.shape(one.axes)
    mesh, found, begin = shape.mesh(one.world_size), 0.0, 0
    for node, ranks in groupby(facts.nodes_of(one.world_size, shape)):
        end = begin + sum(1 for _ in ranks)
        found += sum(_common(own, other) for own in shares_of(mesh, begin, end) for other in held.get(node or "", ()))
        begin = end
    return round(max(0.0, 1.0 - found), 4)


Box = tuple[float, float, float, float]


def shares_of(mesh: Mesh, begin: int, end: int) -> list[Box]:
    """Of the unit square, first and last lane and place of what these ranks have."""
    _, lanes, _, places = mesh.part(0)
    return [
        (left / lanes, right / lanes, low / places, high / places)
        for left, right, low, high in boxes_of(mesh, begin, end)
    ]


def _common(one: Box, other: Box) -> float:
    width, height = min(one[1], other[1]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[2], other[2])
    return width * height if width > 0 and height > 0 else 0.0


# --- the journal ---


def table(verdict: MeshVerdict) -> dict[str, Any]:
    """Of every mesh that was looked at: what was expected of it, or why it was refused."""
    rows = [
        {
            "axes": dict(one.axes),
            "world_size": one.world_size,
            **({"refusal": one.refusal} if one.refusal else _expected(one)),
            **_memory(one),
            "chosen": one == verdict.chosen,
        }
        for one in verdict.candidates
    ]
    return {"meshes": rows}


def _memory(one: MeshCandidate) -> dict[str, Any]:
    """The peak of the fullest worker, in bytes, and what it has."""
    return {} if one.need is None else {"peak_bytes": one.need.peak_bytes, "limit_bytes": one.need.limit_bytes}


def _expected(one: MeshCandidate) -> dict[str, Any]:
    moved = {"moved": one.moved} if one.moved is not None else {}
    return {"step": round(one.step, 4), "measured": one.measured, "seconds": one.seconds, **moved}

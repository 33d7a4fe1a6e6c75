"""The live figures of a run: for people, displays and fault injection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.actions import Note
from elastic.core.run.phase import Closing, Training
from elastic.core.run.state import RunState, SlotPhase, WorkerPhase
from elastic.core.wording import plural
from elastic.observe import records
from elastic.runtime.controller.telemetry import Telemetry


@dataclass
class News:
    """The latest sentences that describe the current activity."""

    doing: str = "starting"
    storage: str = ""
    memory: str = ""

    def hear(self, note: Note) -> None:
        if note.kind == "storage":
            self.storage = note.sentence
        elif note.kind == "memory":
            self.memory = note.sentence
        elif note.kind in ("decision", "waiting", "start"):
            self.doing = note.sentence


def figures(state: RunState, telemetry: Telemetry, news: News, slow: Mapping[int, float]) -> dict[str, Any]:
    """The keys of `elastic_jobs.running.handle.RunHandle.progress`, without the status. `slow` are the stragglers
    among the members, with their factors."""
    newest = state.saved.newest_checkpoint
    return {
        "step": telemetry.step,
        "max_steps": state.settings.max_steps,
        "loss": telemetry.loss,
        "learning_rate": telemetry.learning_rate,
        "grad_norm": telemetry.grad_norm,
        **telemetry.rates(),
        "world_size": state.world_size,
        "mesh": state.settings.mesh.shared(state.axes, state.world_size),
        "generation": state.generation,
        "last_checkpoint": newest.id if newest else None,
        "last_checkpoint_step": newest.step if newest else None,
        "doing": _doing(state, news),
        "incidents": state.trouble.incidents,
        "asking_for": _asking_for(state),
        "workers": _placement(state),
        "stragglers": [
            {"worker": worker, "rank": state.rank_of(worker), "node": state.fleet.node_of(worker), "factor": factor}
            for worker, factor in slow.items()
        ],
    }


def _doing(state: RunState, news: News) -> str | None:
    """What the run does besides training, in one sentence."""
    if isinstance(state.phase, Training):
        if state.saved.storage_failing:
            return news.storage
        return news.memory if state.saved.memory_lost_in == state.generation else None
    if isinstance(state.phase, Closing):
        return f"waiting for the checkpoint of step {state.phase.step}, the last one"
    return news.doing


def _asking_for(state: RunState) -> str | None:
    """The pending slots in words; None without any."""
    pending = sum(slot.phase is SlotPhase.PENDING for slot in state.fleet.slots.values())
    return plural(pending, "more node") if pending else None


def _placement(state: RunState) -> list[dict[str, Any]]:
    """Node, rank and phase of each worker."""
    ranks = {member: rank for rank, member in enumerate(state.members)}
    return [
        {
            "worker": worker.id,
            "rank": ranks.get(worker.id),
            "node": state.fleet.node_of(worker.id),
            "pid": worker.pid,
            "phase": "member" if worker.id in state.fleet.inside else "idle",
        }
        for worker in state.fleet.workers.values()
        if worker.phase is not WorkerPhase.STARTING
    ]


def replica_moved_record(told: Mapping[str, Any]) -> records.Decision:
    """The journal's record of a node that keeps replicas in the place of another one."""
    place = {key: told[key] for key in ("step", "generation", "world_size")}
    return records.decision("replica-moved", told["sentence"], **place, data={})


def left_out_record(told: Mapping[str, Any]) -> records.Decision:
    """The journal's record of a save that all ranks left out; of one that is in storage and does not become a
    checkpoint where `by` names the step of the one that takes its place."""
    step, by = told["step"], told.get("by")
    instead = "an older one still waits" if by is None else f"that of step {by} takes its place"
    return records.decision(
        "save-left-out",
        f"the checkpoint of step {step} is left out: storage is slower than the cadence, and {instead}",
        step=step,
        generation=told["generation"],
        world_size=told["world_size"],
        data={},
    )


def function_left_record(told: Mapping[str, Any]) -> records.Decision:
    """The journal's record of a training function that could not stay in its loop."""
    sentence = f"worker {told['worker']}: the training function is left and called again: {told['reason']}"
    return _of_worker("function-left", sentence, told, reason=told["reason"])


def rehearsed_record(told: Mapping[str, Any]) -> records.Decision:
    """The journal's record of the passes that a worker has made before it joined."""
    return _of_worker("rehearsed", f"worker {told['worker']} {told['what']}", told)


def _of_worker(kind: str, sentence: str, told: Mapping[str, Any], **data: Any) -> records.Decision:
    place = {key: told[key] for key in ("step", "generation", "world_size")}
    return records.decision(kind, sentence, **place, data={"worker": told["worker"], **data})


def unfinished_step_record(restore: Mapping[str, Any], world_size: int) -> records.Decision | None:
    """The journal's record of a step that was lost within: whether survivors keep what they had computed of it. None
    where they had computed nothing. `restore` is the record of that type."""
    kept, again, step = restore["kept"], restore["again"], restore["step"] + 1
    if not kept and not again:
        return None
    why = "; ".join(again)
    if kept:
        sentence = f"step {step} continues: the gradients of {kept} of its micro-batches are kept"
        sentence += f", but not those of every survivor: {why}" if why else ""
    else:
        sentence = f"step {step} is done again from its first micro-batch: {why}"
    return records.decision(
        "step-continued" if kept else "step-repeated",
        sentence,
        step=restore["step"],
        generation=restore["generation"],
        world_size=world_size,
        data={"kept": kept, "again": again},
    )


def cadence_record(told: Mapping[str, Any]) -> records.Decision:
    """The journal's record of the snapshot cadence and its reason, from a member's report."""
    every = int(told["every_steps"])
    often = "at every step" if every == 1 else f"every {every} steps"
    cost_ms, step_ms = 1e3 * told["cost_s"], 1e3 * told["step_s"]
    why = f"one delays training by {cost_ms:.2g} ms, and a step takes {step_ms:.3g} ms"
    figures = {"every_steps": every, "cost_s": told["cost_s"], "step_s": told["step_s"]}
    sentence = f"a snapshot is taken into memory {often}: {why}"
    return records.decision(
        "cadence",
        sentence,
        step=told["step"],
        generation=told["generation"],
        world_size=told["world_size"],
        data=figures,
    )

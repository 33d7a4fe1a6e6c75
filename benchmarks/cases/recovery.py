"""This project's recovery: a fault strikes one of four nodes, the others continue, the node comes back; many times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.children import NotMeasured
from benchmarks.figures import Figure, Target, not_measured, ratio
from benchmarks.marks import changes, read_marks
from benchmarks.options import Options
from benchmarks.own import Cluster, OwnRun, settings, timeline
from benchmarks.workload import BASE, SMALL, Size
from elastic.core.mesh import MeshSettings
from elastic.core.settings import SnapshotSettings

CASE = "recovery"
NODES = 4
# Saved to storage this often where storage is what is measured; at most as many steps are repeated.
SAVE_EVERY = 10
_STEPS_BETWEEN = 6


@dataclass(frozen=True)
class Form:
    """How the workers share the model, or that it is compiled, by the name that this has in `benchmarks.bodies.meshes`;
    without one by ZeRO."""

    name: str = ""
    engine: str = "deepspeed"
    mesh: MeshSettings = field(default_factory=MeshSettings)

    @property
    def left(self) -> int:
        """How many workers train when one of all is lost."""
        cell = self.mesh.sp * self.mesh.tp * self.mesh.ep * self.mesh.pp
        return (NODES - 1) // cell * cell


# With DeepSpeed on top of ZeRO-1, but for FSDP2.
FORMS = (
    Form("compiled"),
    Form("FSDP2", "fsdp2"),
    Form("FSDP2 compiled", "fsdp2"),
    Form("FSDP2 tp 2", "fsdp2", MeshSettings(tp=2)),
    Form("AutoTP 2", mesh=MeshSettings(tp=2)),
    Form("sp 2", mesh=MeshSettings(sp=2)),
    Form("ep 2", mesh=MeshSettings(ep=2)),
    Form("pp 2", mesh=MeshSettings(pp=2)),
    Form("FSDP2 pp 2", "fsdp2", MeshSettings(pp=2)),
)


@dataclass(frozen=True)
class Plan:
    """One run with one kind of fault, `repetitions` times. `source`: "memory" or "storage".

    Without `grows` the run ends with the last recovery and not with the node's return. `set_up_s`: what the training
    function does before it builds its model; `size`: which of the workload's that is. The fault strikes when a step has
    just been seen to end, or with `any_moment` at a random moment of a step: which one decides whether the newest
    snapshot is of the step before.
    """

    what: str
    fault: str
    stage: int
    source: str
    repetitions: int
    targets: tuple[Target, ...] = ()
    spares: int = 0
    grows: bool = True
    set_up_s: float = 0.0
    any_moment: bool = False
    form: Form = field(default_factory=Form)
    size: Size = SMALL

    @property
    def name(self) -> str:
        return f"{self.what}, {self.conditions}"

    @property
    def conditions(self) -> str:
        set_up = f", {self.set_up_s:g} s of set-up" if self.set_up_s else ""
        moment = ", at any moment of a step" if self.any_moment else ""
        size = "" if self.size == SMALL else f", {self.size.name} model"
        return f"{self.trained}{size}, from {self.source}{set_up}{moment}"

    @property
    def trained(self) -> str:
        own = self.form.name, f"ZeRO-{self.stage}" if self.form.engine == "deepspeed" else ""
        return " x ".join(filter(None, own))

    @property
    def run_id(self) -> str:
        about = f"{self.fault}-{self.stage}-{self.source}-{self.spares}-{self.set_up_s:g}-{self.any_moment:d}"
        words = filter(None, (about, self.form.name, self.size.name))
        return " ".join(words).lower().replace("_", "-").replace(" ", "-")


@dataclass
class Found:
    """What the repetitions of one plan came to."""

    seconds: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    resizes: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""


def plans(options: Options) -> list[Plan]:
    killed, slower, some, few = (options.pick(full, 1) for full in (10, 6, 4, 2))
    fast = (Target("median", 1.5), Target("p95", 3.0))
    slow = (Target("median", 3.0),)
    every = [
        *(Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", stage, "memory", times, targets)
          for stage, times, targets in ((1, killed, fast), (2, killed, fast), (3, slower, slow))),
        *(Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", stage, "memory", some, targets, set_up_s=20.0)
          for stage, targets in ((1, fast), (2, fast), (3, slow))),
        Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", 1, "memory", killed, fast, any_moment=True),
        Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", 3, "memory", slower, slow, any_moment=True),
        Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", 1, "memory", some, size=BASE),
        *(Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", stage, "storage", few) for stage in (1, 2, 3)),
        *(Plan(f"node SIGKILL -> next step, 4 -> {form.left}", "kill_node", 1, "memory", slower, any_moment=any_moment,
               form=form)
          for form in FORMS for any_moment in (False, True)),
        *(Plan(f"node SIGKILL -> next step, 4 -> {form.left}", "kill_node", 1, "memory", some, set_up_s=20.0, form=form)
          for form in FORMS if form.mesh.pp > 1),
        Plan("node SIGKILL -> next step, 4 -> 3", "kill_node", 3, "memory", slower, form=FORMS[0]),
    ]  # fmt: skip
    if options.plan:
        asked = [plan for plan in every[1:] if any(part in plan.name for part in options.plan.split("; "))]
        if not asked:
            names = "; ".join(plan.conditions for plan in every[1:])
            raise ValueError(f"no plan has {options.plan!r} in its name; there are {names}")
        return [every[0], *asked]
    return every[:1] if options.quick else every


def measure(options: Options) -> list[Figure]:
    wanted = plans(options)
    figures = measure_plans(options, wanted)
    found = {figure.name: figure for figure in figures}
    ratios = [
        ratio(CASE, f"{plan.trained} over {wanted[0].trained}", found[plan.name], found[wanted[0].name],
              Target("median", 1.5))
        for plan in wanted if plan.form.name and not plan.any_moment and not plan.set_up_s
    ]  # fmt: skip
    return figures + ratios


def measure_plans(options: Options, wanted: Sequence[Plan]) -> list[Figure]:
    figures: list[Figure] = []
    with Cluster(NODES) as cluster:
        for plan in sorted(wanted, key=lambda plan: plan.spares):
            while len(cluster.nodes()) < NODES + plan.spares:
                cluster.local.add_node()
            figures += report(plan, _measure(options, cluster, plan))
    return figures


def _measure(options: Options, cluster: Cluster, plan: Plan) -> Found:
    memory = plan.source == "memory"
    made = settings(
        plan.run_id,
        options.folder,
        workers=(2, NODES),
        snapshots=SnapshotSettings(enabled=memory, every_steps=1 if memory else None),
        # With memory on, storage is the tier below: seldom written, as in a real run.
        save_every=100 if memory else SAVE_EVERY,
        spares=plan.spares,
        engine=plan.form.engine,
        mesh=plan.form.mesh,
    )
    found, moments = Found(), random.Random(1)
    if options.over:
        return Found(failure="the time was over before its turn came")
    try:
        cluster.heal()
        with OwnRun(cluster, made, plan.size.name, plan.stage, set_up_s=plan.set_up_s, form=plan.form.name) as run:
            for turn in range(plan.repetitions):
                if options.over:
                    raise NotMeasured(f"the time was over after {turn} of {plan.repetitions} repetitions")
                run.wait_steps(max(_STEPS_BETWEEN, 0 if memory else SAVE_EVERY), NODES)
                if not memory:
                    run.wait_checkpoint()
                if plan.any_moment:
                    time.sleep(moments.uniform(0.0, run.step_s()))
                _strike(run, plan, found)
                if plan.grows:
                    cluster.heal()
            if plan.grows:
                run.wait_steps(_STEPS_BETWEEN, NODES)
            found.pauses, found.resizes = _growth(run)
    except NotMeasured as error:
        found.failure = str(error)
    return found


def _strike(run: OwnRun, plan: Plan, found: Found) -> None:
    fault: Callable[[], tuple[float, str]] = getattr(run, plan.fault)
    at, node = fault()
    change, incident = run.recovery(at)
    source = incident["source"] or "nothing"
    told = {
        "node": node, "kind": incident["kind"], "seconds": round(change.seconds, 3), "source": source,
        "world_sizes": [change.world_size, change.next_world_size], "steps_repeated": change.steps_repeated,
        "timeline": timeline(incident, run.records(), at), "restore": incident.get("restore"),
    }  # fmt: skip
    found.incidents.append(told)
    if plan.source not in source:
        raise NotMeasured(f"the state came from {source}, not from {plan.source}")
    found.seconds.append(change.seconds)
    found.repeated.append(float(change.steps_repeated))


def _moved(found: Found) -> tuple[float, ...]:
    """MB over the network of each restore from the nodes' memory."""
    places = [incident["restore"]["bytes_from"] for incident in found.incidents if incident["restore"]]
    return tuple(place["network"] / 1e6 for place in places if not place["storage"])


def _growth(run: OwnRun) -> tuple[list[float], list[dict[str, Any]]]:
    """The pauses of the scale-ups to all nodes, and their own timelines."""
    grown = [change for change in changes(read_marks(run.marks)) if change.next_world_size > change.world_size]
    records = run.records()
    resizes = [incident for incident in run.incidents() if incident["kind"] == "resize"]
    told = [
        {
            "world_sizes": [i["world_size"], i["next_world_size"]], "steps_repeated": i["steps_repeated"],
            "timeline": timeline(i, records, i["times"]["symptom"]), "source": i["source"],
        }
        for i in resizes
    ]  # fmt: skip
    return [change.seconds for change in grown], told


def report(plan: Plan, found: Found) -> list[Figure]:
    """Seconds, steps repeated, what of the state crossed the network, and the pause of the scale-ups in between."""
    cadence = 1 if plan.source == "memory" else SAVE_EVERY
    notes = ("a snapshot at every step" if cadence == 1 else f"a checkpoint every {cadence} steps",)
    details = {"incidents": found.incidents}
    missing = found.failure or "no repetition came to its end"
    if not found.seconds:
        return [not_measured(CASE, plan.name, "s", missing, targets=plan.targets, details=details)]
    rows = [
        Figure(CASE, plan.name, "s", tuple(found.seconds), targets=plan.targets, notes=notes, failure=found.failure,
               details=details),
        Figure(CASE, f"{plan.name}: steps repeated", "steps", tuple(found.repeated),
               targets=(Target("max", 0 if plan.form.name else cadence),), failure=found.failure),
    ]  # fmt: skip
    if moved := _moved(found):
        told = ("of what all ranks restored; the rest was in the memory of their nodes",)
        name = f"{plan.name}: state over the network"
        rows.append(Figure(CASE, name, "MB", moved, notes=told, failure=found.failure))
    if plan.fault != "kill_node" or not plan.grows:
        return rows
    targets = (Target("median", 1.0),) if plan.stage < 3 and plan.source == "memory" and not plan.form.name else ()
    name = f"scale-up pause, {plan.form.left} -> 4, {plan.conditions}"
    pause = Figure(CASE, name, "s", tuple(found.pauses), targets=targets, failure=found.failure,
                   notes=("from the end of the last step before to that of the first step after, that step included",),
                   details={"resizes": found.resizes})  # fmt: skip
    return [*rows, pause]

"""What the platform costs while nothing goes wrong: the same steps under it and under plain torchrun with DeepSpeed.

All subjects are there from the start and take turns, a few steps each, so that whatever else the machine does strikes
all of them. A gate between two steps holds those whose turn it is not. A single step varies by more than what is looked
for, so there are many short turns, and a median comes with the interval that it lies in.

Two clocks: the wall, and the processor time of the whole machine, which also has what the platform does next to the
training, and does not have what a neighbour takes away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.children import Children, NotMeasured, free_port, until
from benchmarks.figures import Figure, Target, median_interval, not_measured, statistic
from benchmarks.marks import completed, open_gate, read_marks
from benchmarks.options import Options
from benchmarks.own import Cluster, OwnRun, settings
from benchmarks.workload import LARGE, TINY, Size, build
from elastic.core.settings import SnapshotSettings

PLAIN, DEFAULT, FORCED = "torchrun + DeepSpeed", "snapshots at the default cadence", "a snapshot at every step"
WORKERS, STAGE = 2, 2
_LIMIT_S = 240.0
# fp32 master, first and second moment.
_BYTES_PER_PARAMETER = 12


@dataclass(frozen=True)
class Mode:
    """A case. `elsewhere_s`: each pass sleeps so long, as the processor does while an accelerator computes."""

    case: str
    size: Size
    elsewhere_s: float
    subjects: tuple[str, ...]
    rounds: int

    @property
    def note(self) -> str:
        told = f"{self.size.name} model, batch {self.size.batch}, {WORKERS} workers, ZeRO-{STAGE}"
        elsewhere = (
            f", {self.elsewhere_s:g} s of each step slept as if an accelerator computed" if self.elsewhere_s else ""
        )
        return f"{told}{elsewhere}; one value per round of turns"


@dataclass(frozen=True)
class Turn:
    """`wall`: the seconds of each step but the first, which begins with cold caches. `busy`: processor seconds of the
    whole machine per step."""

    wall: tuple[float, ...]
    busy: float

    @property
    def step_s(self) -> float:
        return statistic(self.wall, "median")


@dataclass
class Subject:
    """One of those that take turns. `step` is the last that it was let do."""

    name: str
    marks: Path
    gate: Path
    step: int = 0

    def turn(self, steps: int) -> Turn:
        """Let it do `steps` steps more."""
        last, self.step = self.step, self.step + steps
        busy = machine.busy_seconds()
        open_gate(self.gate, self.step)
        awaited = f"step {self.step} of {self.name}"
        until(lambda: any(done.step == self.step for done in completed(read_marks(self.marks))), awaited, _LIMIT_S)
        own = [done.at for done in completed(read_marks(self.marks)) if done.step > last]
        return Turn(tuple(later - earlier for earlier, later in pairwise(own)), (machine.busy_seconds() - busy) / steps)


def measure(options: Options) -> list[Figure]:
    return measure_mode(options, Mode("steady", LARGE, 0.0, (PLAIN, DEFAULT, FORCED), rounds=24))


def measure_mode(options: Options, mode: Mode) -> list[Figure]:
    rounds, steps = options.pick(mode.rounds, 2), options.pick(4, 3)
    mode = replace(mode, size=TINY, elsewhere_s=min(mode.elsewhere_s, 0.05)) if options.quick else mode
    try:
        with ExitStack() as stack:
            subjects = _start(stack, options, mode)
            turns = _take_turns(options, {name: subject for name, (subject, _) in subjects.items()}, rounds, steps)
            cadence = _cadence(subjects[DEFAULT][1]) if DEFAULT in subjects else {}
    except NotMeasured as error:
        return [not_measured(mode.case, "cost of the platform", "%", str(error))]
    return _report(mode, turns, cadence)


def _start(stack: ExitStack, options: Options, mode: Mode) -> dict[str, tuple[Subject, OwnRun | None]]:
    children = stack.enter_context(Children(options.make_folder("plain")))
    plain = _subject(PLAIN, children.folder)
    children.start_python(
        "plain", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={WORKERS}", f"--master_port={free_port()}",
        "-m", "benchmarks.bodies.plain_worker", mode.size.name, str(STAGE), str(plain.marks), str(plain.gate),
        str(mode.elsewhere_s),
    )  # fmt: skip
    # Room for all runs of this project at once.
    cluster = stack.enter_context(Cluster((len(mode.subjects) - 1) * WORKERS))
    found: dict[str, tuple[Subject, OwnRun | None]] = {PLAIN: (plain, None)}
    for name, run_id, snapshots in (
        (DEFAULT, "default", SnapshotSettings(enabled=True)),
        (FORCED, "forced", SnapshotSettings(enabled=True, every_steps=1)),
    ):
        if name not in mode.subjects:
            continue
        made = settings(run_id, options.folder, workers=(WORKERS, WORKERS), snapshots=snapshots, save_every=None)
        # A subject whose turn it is not stands still for longer than any step.
        made = replace(made, failures=replace(made.failures, hang_floor_s=10 * _LIMIT_S))
        subject = _subject(name, options.make_folder(f"gate-{run_id}"))
        run = OwnRun(cluster, made, mode.size.name, STAGE, gate=str(subject.gate), elsewhere_s=mode.elsewhere_s)
        stack.callback(_let_go, subject, run)
        found[name] = (replace(subject, marks=run.marks), run)
    return found


def _subject(name: str, folder: Path) -> Subject:
    subject = Subject(name, folder, folder / "gate")
    open_gate(subject.gate, 0)
    return subject


def _let_go(subject: Subject, run: OwnRun) -> None:
    """A planned end comes between two steps, so the gate must be open."""
    open_gate(subject.gate, 1 << 30)
    run.stop()


def _take_turns(options: Options, subjects: Mapping[str, Subject], rounds: int, steps: int) -> dict[str, list[Turn]]:
    """subject -> its turns, round by round, in another order each time. The first round warms up and does not count."""
    turns: dict[str, list[Turn]] = {name: [] for name in subjects}
    names = list(subjects)
    for number in range(rounds + 1):
        if options.over and number > 2:
            break
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            turns[name].append(subjects[name].turn(steps))
    return {name: found[1:] for name, found in turns.items()}


def _cadence(run: OwnRun | None) -> dict[str, Any]:
    """What the ranks agreed on, each time that it changed, with what a snapshot was found to cost."""
    records = [] if run is None else run.records()
    found = [record for record in records if record["type"] == "decision" and record["kind"] == "cadence"]
    return {"agreed": [{"step": record["step"], **record["data"]} for record in found]}


def _report(mode: Mode, turns: Mapping[str, list[Turn]], cadence: Mapping[str, Any]) -> list[Figure]:
    case, note = mode.case, mode.note
    copied = 2 * _BYTES_PER_PARAMETER * _parameters(mode.size) // WORKERS
    # The ranks' snapshots are made at the same time and share this machine's memory.
    copy_s = statistic(machine.copy_seconds(copied, at_once=WORKERS), "median")
    alone_s = statistic(machine.copy_seconds(copied), "median")
    copy_note = (
        f"own shard and replica of {WORKERS} ranks, {copied / 1e6:.0f} MB each, at once: "
        f"{WORKERS * copied / copy_s / 1e9:.1f} GB/s; one rank's alone take {alone_s:.3f} s"
    )
    plain = turns[PLAIN]
    extra = tuple(own.step_s - alone.step_s for own, alone in zip(turns[FORCED], plain, strict=True))
    kept = {name: [{"wall": turn.wall, "busy": turn.busy} for turn in found] for name, found in turns.items()}
    return [
        *(Figure(case, "step", "s", tuple(turn.step_s for turn in found), name, notes=(note,))
          for name, found in turns.items()),
        *(Figure(case, "processor time of the machine per step", "s", tuple(turn.busy for turn in found), name)
          for name, found in turns.items()),
        *(_cost(case, name, turns[name], plain, (note, *_chosen(name, cadence))) for name in mode.subjects[1:]),
        Figure(case, "time to copy own and replica bytes once", "s", (copy_s,), "memory", notes=(copy_note,)),
        Figure(case, f"extra time per step, {FORCED}, over that copy", "x", tuple(value / copy_s for value in extra),
               targets=(Target("median", 1.5),), notes=(_interval_note([value / copy_s for value in extra], "x"),),
               details={"extra_s": extra, "cadence": dict(cadence), "turns": kept}),
    ]  # fmt: skip


def _chosen(name: str, cadence: Mapping[str, Any]) -> tuple[str, ...]:
    if name != DEFAULT:
        return ()
    if not cadence["agreed"]:
        return ("no cadence was agreed on: too few steps",)
    newest = cadence["agreed"][-1]
    return (f"cadence chosen: every {newest['every_steps']} steps, one delays training by {newest['cost_s']:.3f} s",)


def _cost(case: str, name: str, own: Sequence[Turn], plain: Sequence[Turn], notes: tuple[str, ...]) -> Figure:
    """With the interval of the median, and the same of the processor time, in the notes."""
    slower = tuple(100 * (mine.step_s / alone.step_s - 1) for mine, alone in zip(own, plain, strict=True))
    busier = [100 * (mine.busy / alone.busy - 1) for mine, alone in zip(own, plain, strict=True)]
    told = (
        f"{name}: {_interval_note(slower, '%')}; processor time of the machine: {statistic(busier, 'median'):+.1f} % "
        f"({_interval_note(busier, '%')})"
    )
    targets = (Target("median", 2.0),) if name == DEFAULT else ()
    return Figure(case, f"cost of the platform, {name}", "%", slower, targets=targets, notes=(*notes, told),
                  details={"busier_percent": busier})  # fmt: skip


def _interval_note(values: Sequence[float], unit: str) -> str:
    if (interval := median_interval(values)) is None:
        return f"too few rounds ({len(values)}) for an interval"
    return f"the median lies between {interval[0]:+.1f} and {interval[1]:+.1f} {unit} (95 %)"


def _parameters(size: Size) -> int:
    return sum(int(parameter.numel()) for parameter in build(size)[0].parameters())

"""Steps as the training processes themselves see them, in files: the same clock and the same moment for all subjects.

A process appends one line when an optimizer step is done. What is read from the lines is pure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# Those that wait at their gates must not keep the processors from the one whose turn it is.
_GATE_POLL_S = 0.02


@dataclass(frozen=True)
class Mark:
    """`step` (from 1) was done at `at` (wall clock) by `rank` of `world_size`.

    `era` is another number for every set of members that trained together: a generation, a restart.
    """

    at: float
    step: int
    rank: int
    world_size: int
    era: int


class MarkWriter:
    """One per process; `folder` must exist. A line is one write, so a process that is killed leaves whole lines."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / f"marks-{os.getpid()}.jsonl"

    def step_done(self, step: int, rank: int, world_size: int, era: int) -> None:
        line = json.dumps([time.time(), step, rank, world_size, era])
        with open(self._path, "ab", buffering=0) as file:
            file.write(line.encode() + b"\n")


def pass_gate(gate: str | None, step: int) -> None:
    """Wait until the number in the file `gate` says that `step` may begin; at once without a gate.

    Read by every rank between two steps. Ends with the process, which the case kills.
    """
    while gate is not None and int(Path(gate).read_text(encoding="utf-8") or 0) < step:
        time.sleep(_GATE_POLL_S)


def open_gate(gate: Path, step: int) -> None:
    """Steps up to and including `step` may be done."""
    written = gate.with_suffix(".new")
    written.write_text(str(step), encoding="utf-8")
    written.replace(gate)


# By file: the bytes that were read, and what was in them. Cases poll while others train: reading all lines each time
# took a quarter of a core after a thousand steps.
_READ: dict[Path, tuple[int, list[Mark]]] = {}


def read_marks(folder: str | Path) -> list[Mark]:
    """Every whole line of every process, in the order of time."""
    found = []
    for path in Path(folder).glob("marks-*.jsonl"):
        at, marks = _READ.get(path, (0, []))
        with open(path, "rb") as file:
            file.seek(at)
            lines = [line for line in file if line.endswith(b"\n")]
        marks += [Mark(*json.loads(line)) for line in lines]
        _READ[path] = (at + sum(map(len, lines)), marks)
        found += marks
    return sorted(found, key=lambda mark: mark.at)


@dataclass(frozen=True)
class StepDone:
    """A step that every rank of its world has done, at the time of the last of them."""

    at: float
    step: int
    world_size: int
    era: int


def completed(marks: Iterable[Mark]) -> list[StepDone]:
    """Steps in the order of time; a step that was repeated comes once per era that did it."""
    ranks: dict[tuple[int, int], set[int]] = {}
    done = []
    for mark in sorted(marks, key=lambda mark: mark.at):
        there = ranks.setdefault((mark.era, mark.step), set())
        there.add(mark.rank)
        if len(there) == mark.world_size:
            done.append(StepDone(mark.at, mark.step, mark.world_size, mark.era))
    return done


@dataclass(frozen=True)
class Change:
    """From one era's last step, or from a fault, to the next era's first step done by all of its ranks."""

    seconds: float
    steps_repeated: int
    last_step: int
    first_step: int
    world_size: int
    next_world_size: int
    at: float


def recovered(marks: Iterable[Mark], fault_at: float) -> Change | None:
    """None while no other era than the one that was struck has done a step since.

    Steps that it finished after the fault are its own: the collective of the step under way may have been over.
    """
    done = completed(marks)
    struck = next((step for step in reversed(done) if step.at <= fault_at), None)
    if struck is None:
        return None
    after = next((step for step in done if step.at > fault_at and step.era != struck.era), None)
    if after is None:
        return None
    last = max(step.step for step in done if step.era == struck.era)
    return _change(last, struck.world_size, after, after.at - fault_at)


def changes(marks: Iterable[Mark]) -> list[Change]:
    """Every change of era, with the time from the last step before to the first step after."""
    done = completed(marks)
    return [
        _change(before.step, before.world_size, after, after.at - before.at)
        for before, after in pairwise(done)
        if before.era != after.era
    ]


def _change(last: int, world_size: int, after: StepDone, seconds: float) -> Change:
    repeated = max(0, last - after.step + 1)
    return Change(seconds, repeated, last, after.step, world_size, after.world_size, after.at)

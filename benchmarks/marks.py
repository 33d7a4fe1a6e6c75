"""Steps as the training processes themselves see them, in files: the same clock and the same moment for all subjects.

A process appends one line when an optimizer step is done. What is read from the lines is pure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mark:
    """`step` (from 1) was done at `at` (wall clock) by `rank` of `world_size`."""

    at: float
    step: int
    rank: int
    world_size: int
    pid: int


class MarkWriter:
    """One per process; `folder` must exist. A line is one write, so a process that is killed leaves whole lines."""

    def __init__(self, folder: str | Path) -> None:
        self._file = open(Path(folder) / f"marks-{os.getpid()}.jsonl", "ab", buffering=0)

    def step_done(self, step: int, rank: int, world_size: int) -> None:
        line = json.dumps([time.time(), step, rank, world_size, os.getpid()])
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def read_marks(folder: str | Path) -> list[Mark]:
    """Every whole line of every process, in the order of time."""
    found = []
    for path in Path(folder).glob("marks-*.jsonl"):
        text = path.read_text(encoding="utf-8")
        found += [Mark(*json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return sorted(found, key=lambda mark: mark.at)


@dataclass(frozen=True)
class StepDone:
    """A step that every rank of its world has done, at the time of the last of them."""

    at: float
    step: int
    world_size: int


def completed(marks: Iterable[Mark]) -> list[StepDone]:
    """Steps in the order of time; a step that was repeated comes once per world that did it.

    A step counts as done by `world_size` ranks; marks of one rank for one step a second time begin a repetition.
    """
    open_steps: dict[tuple[int, int], set[int]] = {}
    done = []
    for mark in sorted(marks, key=lambda mark: mark.at):
        ranks = open_steps.setdefault((mark.step, mark.world_size), set())
        if mark.rank in ranks:
            ranks.clear()
        ranks.add(mark.rank)
        if len(ranks) == mark.world_size:
            done.append(StepDone(mark.at, mark.step, mark.world_size))
            ranks.clear()
    return done


@dataclass(frozen=True)
class Recovered:
    """From a fault to the next step done by another world; `steps_repeated` of those that had been done before."""

    seconds: float
    steps_repeated: int
    last_step: int
    first_step: int
    next_world_size: int


def recovered(marks: Sequence[Mark], fault_at: float, world_size: int) -> Recovered | None:
    """None while no other world has done a step. Steps that the old world finished after the fault count as its own:
    the collective of the step under way may have been over when the fault struck."""
    done = completed(marks)
    after = next((step for step in done if step.at > fault_at and step.world_size != world_size), None)
    if after is None:
        return None
    before = [step for step in done if step.world_size == world_size and step.at < after.at]
    last = before[-1].step if before else 0
    repeated = max(0, last - after.step + 1)
    return Recovered(after.at - fault_at, repeated, last, after.step, after.world_size)

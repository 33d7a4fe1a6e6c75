"""Reports of many members that one turn takes as one event.

Thousands of members join, train, promise where to stop, and leave at about the same time. One event for all of those in
a turn is written down, decided on and replayed in little more time than each of them alone; and what a turn took
together is in the journal, so that a replay takes it together too.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from elastic.core.events import Event, GroupJoined, MembersReported, StopPromised, TrainingReached, WorkerLeft

# Which of their events are taken together, and what those name besides generation and worker.
_REPORTS: dict[type[Any], tuple[str, ...]] = {
    GroupJoined: (), TrainingReached: ("step",), StopPromised: ("step", "memory"), WorkerLeft: ("step",),
}  # fmt: skip


def together(events: Iterable[Event]) -> list[tuple[Event, list[Event]]]:
    """The events of a turn in their order, each with those that it stands for.

    Consecutive reports of one kind and generation become one MembersReported; any other event stands for itself.
    """
    made: list[tuple[Event, list[Event]]] = []
    for kind, group in groupby(events, _kind):
        parts = list(group)
        if kind is None or len(parts) == 1:
            made += [(event, [event]) for event in parts]
        else:
            made.append((_all_of(*kind, parts), parts))
    return made


def apart(event: Event) -> list[Event]:
    """The reports that the event stands for, in their order."""
    if not isinstance(event, MembersReported):
        return [event]
    kind = next(kind for kind in _REPORTS if kind.__name__ == event.report)
    return [
        kind(event.generation, worker, *(step, event.memory)[: len(_REPORTS[kind])])
        for worker, step in zip(event.workers, event.steps, strict=True)
    ]


def _kind(event: Any) -> tuple[type[Any], int, bool] | None:
    kind = type(event)
    return (kind, event.generation, kind is StopPromised and event.memory) if kind in _REPORTS else None


def _all_of(report: type[Any], generation: int, memory: bool, parts: list[Any]) -> MembersReported:
    steps = [part.step for part in parts] if _REPORTS[report] else [0] * len(parts)
    return MembersReported(generation, report.__name__, tuple([part.worker for part in parts]), tuple(steps), memory)

"""Exceptions in the controller's loop: journaled, so that the next incarnation continues without the poisoned event.

An exception says that the controller's own code could not handle an event; workers and their state are fine. The
incarnation ends, Ray restarts the actor, and the replay leaves the event out; of reports that were taken together only
those that cannot be handled. A budget bounds repeats: a run whose controller fails again and again without finishing a
step in between ends.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core import events as ev
from elastic.core.event_groups import apart
from elastic.core.run import machine
from elastic.core.run.state import RunState
from elastic.observe.records import Record, decision

logger = logging.getLogger(__name__)

KIND = "controller-fault"
# Faults of the controller in a row without a new finished step.
MOST_IN_A_ROW = 3
_KEY_CHARACTERS = 2000


@dataclass(frozen=True)
class Faults:
    """The faults of this attempt at the run, as its journal knows them: after which step each came, the numbers of the
    events that could not be handled, and the events themselves."""

    steps: tuple[int, ...] = ()
    numbers: frozenset[int] = frozenset()
    keys: frozenset[str] = frozenset()

    def more(self, records: Iterable[Mapping[str, Any]]) -> Faults:
        """With those of further records."""
        own = [r for r in records if r.get("type") == "decision" and r.get("kind") == KIND]
        return Faults(
            (*self.steps, *(int(r.get("step") or 0) for r in own)),
            self.numbers | {r["data"]["event_number"] for r in own if r["data"]["event_number"] is not None},
            self.keys.union(*(r["data"]["event"].split("\n") for r in own)),
        )

    def refuses(self, event: ev.Event) -> bool:
        """True for a poisoned event that its worker sends again. Events without a worker are never the same twice."""
        return bool(self.keys) and hasattr(event, "worker") and _key(event) in self.keys

    def rest_of(self, event: ev.Event, number: int) -> list[ev.Event]:
        """What of the attempt's event number `number` can be handled, to be taken one after the other."""
        if number not in self.numbers:
            return [event]
        reports = apart(event)
        return [] if reports == [event] else [report for report in reports if _key(report) not in self.keys]

    def budget_spent(self, step: int) -> bool:
        """Whether one more fault, with `step` finished steps, is one too many."""
        return sum(known >= step for known in self.steps) >= MOST_IN_A_ROW


def fault_record(
    error: BaseException, events: Sequence[ev.Event], number: int | None, step: int, place: Mapping[str, int]
) -> Record:
    """The journal's record of an exception while the attempt's event number `number` was being handled. `events` are
    those of one kind for which it stands that are left out from now on."""
    if events:
        what, then = type(events[0]).__name__, "continues without that event"
    elif number is not None:
        what, then = "reports that came together", "takes them one after the other"
    else:
        what, then = "no event", "continues"
    why = f"{type(error).__name__}: {str(error)[:500]}"
    sentence = f"the controller could not handle {what}: {why}; it is restarted and {then}"
    data = {"event_number": number, "event": "\n".join(map(_key, events)), "traceback": _trace(error)}
    return decision(KIND, sentence, step=step, data=data, **place)


def unable(state: RunState, event: ev.Event, parts: Sequence[ev.Event], now: float) -> Sequence[ev.Event]:
    """Which of the `parts` that `event` stands for the rules cannot handle in this state. All of them where the rules
    can handle the event: then it is what follows from it that cannot be done."""
    _, failed = one_by_one(state, [event], now)
    return one_by_one(state, parts, now)[1] if failed else parts


def one_by_one(state: RunState, events: Iterable[ev.Event], now: float) -> tuple[RunState, list[ev.Event]]:
    """The state after these events, one after the other, without those that cannot be handled, and these."""
    failed = []
    for event in events:
        try:
            state, _ = machine.step(state, event, now)
        except Exception:
            logger.exception("%s cannot be handled", event)
            failed.append(event)
    return state, failed


def unreadable_record(error: BaseException, worker: int, kind: str, step: int, place: Mapping[str, int]) -> Record:
    """The journal's record of a worker's message that could not be taken and is left out."""
    what = f"{type(error).__name__}: {str(error)[:500]}"
    sentence = f"a message of worker {worker} ({kind}) could not be taken and is left out: {what}"
    return decision("unreadable", sentence, step=step, data={"traceback": _trace(error)}, **place)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-8000:]


def _key(event: ev.Event) -> str:
    return repr(event)[:_KEY_CHARACTERS]

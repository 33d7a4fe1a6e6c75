"""A controller's state rebuilt from its journal: the same events, through the same pure function, in the same order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic.core import events as ev
from elastic.core.data.steps import Range
from elastic.core.event_groups import apart
from elastic.core.run import machine
from elastic.core.run.state import RunState, Trouble
from elastic.core.settings import RunSettings
from elastic.core.typed_json import encode
from elastic.observe.journal import JournalWriter, Problem
from elastic.observe.records import Record, begins_generation, skips_of, steps_of, undone_by
from elastic.observe.replay_points import ReplayPoint
from elastic.runtime.controller.faults import Faults, one_by_one
from elastic.runtime.controller.replay_state import ReplayState
from elastic.runtime.controller.telemetry import Telemetry

logger = logging.getLogger(__name__)

# So many anomalies and failed audits of earlier attempts are known; checkpoints from before are long deleted.
_UNDONE = 100


class Replayed:
    """What the journal says of a run, read record by record.

    `attempt` numbers the starts of a run (resumes included); it is the incarnation that wrote RunStarted. `begun`: the
    journal has this attempt's start. `generation` is the highest number that any record names. `unknown`: events are
    missing, and what came after the first missing one is not in `state`; the controller then has to ask the cluster and
    storage, as after an outage of the journal. `events` is the number of the attempt's last event, `last_time` the
    latest time that its controllers went by, `faults` what they could not handle. `measured` is the JSON form of what
    the run has measured about itself, by the last record of it.
    """

    def __init__(self, settings: RunSettings, now: float = 0.0) -> None:
        self._settings = settings
        self._telemetry = Telemetry(settings, now, lambda _: None)
        self.state: RunState = machine.initial(settings, now)
        self.attempt = 0
        self.begun = False
        self.generation = 0
        self.unknown = False
        self.events = 0
        self.last_time = 0.0
        self.faults = Faults()
        self.measured: Mapping[str, Any] | None = None
        # As `Trouble.all_undone`, of earlier attempts.
        self.undone: tuple[tuple[int, int], ...] = ()

    @classmethod
    def nothing(cls, settings: RunSettings, journal: JournalWriter) -> Replayed:
        """A new attempt. Of those before it count the generation numbers (a number is never used again), which samples
        were consumed, and what was left out."""
        made = cls._from(settings, journal.point)
        for record in journal.replayed:
            made._account(record)
        # A damaged line may have named a newer generation than all others.
        made.generation += sum(problem.kind == "damaged" for problem in journal.problems)
        made._forget(journal.incarnation)
        return made

    @classmethod
    def _from(cls, settings: RunSettings, point: ReplayPoint | None) -> Replayed:
        """What was known at the replay point, or nothing."""
        made = cls(settings)
        if point is not None:
            kept: ReplayState = point.content
            made.attempt, made.begun, made.generation, made.events = kept.attempt, True, kept.generation, kept.events
            made.last_time, made.faults, made.state = kept.last_time, kept.faults, kept.state
            made.undone = kept.state.trouble.all_undone
            made._telemetry.take(kept.books)
            made.measured = encode(kept.state.meter.measured)
        return made

    def counts(self, generation: int, step: int) -> bool:
        """Is a checkpoint of an earlier attempt one that the run may begin from?"""
        return Trouble(undone=self.undone).counts(generation, step)

    @property
    def skips(self) -> tuple[Range, ...]:
        """What the run leaves out."""
        return self._telemetry.samples.skips

    def telemetry(self, settings: RunSettings, now: float, record: Callable[[Record], None]) -> Telemetry:
        """Losses, samples, times and the running generation; what is new goes to `record`."""
        if not self.begun:
            self._begin(self.attempt, now)
            self.begun = False
        self._telemetry.write_to(record)
        return self._telemetry

    def _begin(self, attempt: int, now: float) -> None:
        samples, contents = self._telemetry.samples, self._telemetry.contents
        self._telemetry = Telemetry(self._settings, now, lambda _: None)
        self._telemetry.samples, self._telemetry.contents = samples, contents
        self.state = machine.initial(self._settings, now)
        self.attempt, self.begun, self.unknown = attempt, True, False

    def _forget(self, attempt: int) -> None:
        """A new attempt: nothing of the one before continues."""
        self._begin(attempt, 0.0)
        self.begun, self.events, self.last_time, self.faults = False, 0, 0.0, Faults()

    def _account(self, record: Record) -> None:
        """A record of an earlier attempt. What of it was rolled back shows when a generation begins."""
        self._telemetry.replay_samples((record,))
        undone = undone_by(record)
        if undone is not None and undone not in self.undone:
            self.undone = (*self.undone[-_UNDONE + 1 :], undone)
        if record["type"] == "generation":
            self.generation = max(self.generation, int(record.get("number", 0)))
        elif record["type"] == "facts":
            self.measured = record.get("measured")

    def _add(self, record: Record) -> None:
        """A record of the attempt that is replayed."""
        kind, telemetry = record["type"], self._telemetry
        if "now" in record:
            self.last_time = max(self.last_time, float(record["now"]))
        if kind == "event":
            # Journals of older releases do not number them.
            self.events = int(record.get("number", self.events + 1))
            if not self.unknown:
                self._event(record)
        elif begins_generation(record):
            self.generation = max(self.generation, int(record["number"]))
            now = record.get("now", record["time"])
            telemetry.generation_begins(
                record["number"], record["world_size"], record["first_step"] - 1, now, skips_of(record)
            )
        for step in steps_of((record,)):
            telemetry.replay_step(step, step["time"])

    def _event(self, record: Record) -> None:
        try:
            event, now = ev.from_json(record), float(record["now"])
            rest = self.faults.rest_of(event, self.events)
            if not rest:
                return
            if isinstance(event, ev.RunStarted):
                self._begin(int(record["incarnation"]), now)
            self.state, failed = one_by_one(self.state, rest, now)
            # Of reports that were taken together, the others are as good as ever.
            self.state, failed = one_by_one(self.state, [part for whole in failed for part in apart(whole)], now)
        except Exception:
            # Whatever a record holds: a controller that cannot start is worse than one that has to ask.
            logger.exception("record %s of the journal cannot be replayed; what follows it is unknown", record["seq"])
            self.unknown = True
            return
        if failed:
            logger.error("record %s of the journal cannot be replayed; what follows it is unknown", record["seq"])
            self.unknown = True
        self.generation = max(self.generation, self.state.generation)
        self._telemetry.owner(self.state, now)
        if isinstance(event, ev.CheckpointCommitted):
            self._telemetry.committed(event.step)
        elif isinstance(event, ev.FirstStepDone):
            self._telemetry.table.first_known(event.generation)


def replay(
    records: Sequence[Record], settings: RunSettings, problems: Sequence[Problem] = (), point: ReplayPoint | None = None
) -> Replayed:
    """The state after the last attempt's events. Nothing is carried out again: `machine.reissue` finds what is open.

    `problems` are the journal's: an event that was lost is unknown, and so is what depends on it. `records` are those
    after `point`, if there is one.
    """
    starts = [i for i, r in enumerate(records) if r["type"] == "event" and r.get("event") == "RunStarted"]
    holes = [problem.place for problem in problems if problem.maybe_event]
    made = Replayed._from(settings, point)
    # The attempt of the point continues where no other one has begun: then all holes come after its start.
    first = starts[-1] if starts else -1
    began = bool(starts) or made.begun
    attempt = int(records[first]["incarnation"]) if starts else made.attempt
    if not began or _another_began(records[max(0, first) :], attempt, holes):
        for record in records:
            made._account(record)
        made._forget(max(_incarnation(records), made.attempt + 1))
        made.unknown = bool(holes)
        return made
    made.faults = (Faults() if starts else made.faults).more(records[max(0, first) :])
    hole = min((place for place in holes if place > first), default=len(records) + 1)
    for place, record in enumerate(records):
        if place < first:
            made._account(record)
        else:
            made.unknown = made.unknown or place >= hole
            made._add(record)
    # A torn or damaged last line has no record after it.
    made.unknown = made.unknown or hole <= len(records)
    return made


def _another_began(records: Sequence[Record], attempt: int, holes: Sequence[int]) -> bool:
    """Whether a later attempt began whose RunStarted is lost. Its "run" record is written with it."""
    later = (r for r in records if r["type"] == "run" and r.get("status") == "running")
    return bool(holes) and any(record.get("attempt", attempt) != attempt for record in later)


def _incarnation(records: Sequence[Record]) -> int:
    return max((int(record["incarnation"]) for record in records), default=0) + 1

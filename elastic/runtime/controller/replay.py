"""A controller's state rebuilt from its journal: the same events, through the same pure function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.core import events as ev
from elastic.core.data.steps import Range
from elastic.core.run import machine
from elastic.core.run.state import RunState
from elastic.core.settings import RunSettings
from elastic.observe.journal import JournalWriter
from elastic.observe.records import Record, begins_generation, skips_of
from elastic.runtime.controller.telemetry import Telemetry


@dataclass(frozen=True)
class Replayed:
    """`attempt` numbers the starts of a run (resumes included); it is the incarnation that wrote RunStarted.

    `records` are those of this attempt, `before` those of the attempts before it.
    """

    state: RunState
    attempt: int
    generation: int
    records: tuple[Record, ...] = ()
    before: tuple[Record, ...] = ()

    @property
    def skips(self) -> tuple[Range, ...]:
        """What the attempts before have left out."""
        begun = [record for record in self.before if begins_generation(record)]
        return skips_of(begun[-1]) if begun else ()

    @classmethod
    def nothing(cls, settings: RunSettings, journal: JournalWriter) -> Replayed:
        """A new attempt. Of those before it, the last generation number is kept (numbers are never used again), and
        which samples they consumed."""
        numbers = (int(r["number"]) for r in journal.replayed if r.get("type") == "generation")
        state = machine.initial(settings, 0.0)
        return cls(state, journal.incarnation, max(numbers, default=0), before=journal.replayed)

    def telemetry(self, settings: RunSettings, now: float, record: Callable[[Record], None]) -> Telemetry:
        """Losses, samples, times and the running generation, as the journal knows them."""
        silent = Telemetry(settings, self.records[0]["now"] if self.records else now, lambda _: None)
        silent.replay_samples(self.before)
        state = machine.initial(settings, now)
        for when, item in _timeline(self.records):
            if item["type"] == "event":
                event = ev.from_json(item)
                state, _ = machine.step(state, event, item["now"])
                silent.owner(state, when)
                if isinstance(event, ev.CheckpointCommitted):
                    silent.time.commit(event.step)
                elif isinstance(event, ev.FirstStepDone):
                    silent.table.first_known(event.generation)
            elif begins_generation(item):
                silent.generation_begins(
                    item["number"], item["world_size"], item["first_step"] - 1, when, skips_of(item)
                )
            elif item["type"] == "step":
                silent.replay_step(item, when)
        silent.write_to(record)
        return silent


def replay(records: Sequence[Record], settings: RunSettings) -> Replayed:
    """The state after the last attempt's events. Nothing is carried out again: `machine.reissue` finds what is open."""
    starts = [i for i, r in enumerate(records) if r.get("type") == "event" and r.get("event") == "RunStarted"]
    if not starts:
        return Replayed(machine.initial(settings, 0.0), _incarnation(records), 0)
    own = records[starts[-1] :]
    state = machine.initial(settings, own[0]["now"])
    for record in own:
        if record.get("type") == "event":
            state, _ = machine.step(state, ev.from_json(record), record["now"])
    return Replayed(state, int(own[0]["incarnation"]), state.generation, tuple(own), tuple(records[: starts[-1]]))


def _timeline(records: Sequence[Record]) -> list[tuple[float, Record]]:
    """Every record at its own time: steps are written down in bundles, after the events that they came before."""
    found: list[tuple[float, Record]] = []
    for record in records:
        if record["type"] == "steps":
            found += [(step["time"], {**step, "type": "step"}) for step in record["steps"]]
        else:
            found.append((record.get("now", record["time"]), record))
    return sorted(found, key=lambda item: item[0])


def _incarnation(records: Sequence[Record]) -> int:
    return max((int(record["incarnation"]) for record in records), default=0) + 1

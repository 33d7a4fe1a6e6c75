"""The run's telemetry from step reports: losses, metrics, samples, time, and the live figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core import events as ev
from elastic.core.data.joined_reports import JoinedReports
from elastic.core.data.step_contents import StepContents
from elastic.core.data.step_table import StepTable
from elastic.core.data.steps import CompletedStep, Range, StepReport
from elastic.core.policy.liveness import HangLimit, ProgressWatch
from elastic.core.run.state import RunState
from elastic.core.settings import RunSettings
from elastic.observe import records
from elastic.observe.text import finite
from elastic.observe.time_ledger import RESHARD, RESTORE, VERIFY, SampleLedger, TimeLedger, owner_of

# A record of steps holds at most this many steps and is delayed by at most this long.
_STEPS_PER_RECORD = 100
_FLUSH_S = 2.0
# Steps whose save's stall is remembered until their checkpoint is complete.
_STALLS = 10_000


@dataclass(frozen=True)
class Books:
    """What a replay of the journal knows of steps, samples and times."""

    generation: int
    table: StepTable
    samples: SampleLedger
    time: TimeLedger
    step: int
    loss: float | None
    metrics: dict[str, Any]


class Telemetry:
    """One per controller. `record` appends to the journal; everything here can be rebuilt from those records."""

    def __init__(self, settings: RunSettings, now: float, record: Callable[[records.Record], None]) -> None:
        limits = settings.failures
        self._record = record
        self.table = StepTable()
        self.generation = 0
        self.samples = SampleLedger()
        self.contents = StepContents()
        self.time = TimeLedger(now)
        self._per_slot = settings.scaling.workers_per_slot
        self._hang = HangLimit(limits.hang_floor_s, limits.hang_factor, limits.join_timeout_s)
        self.watch = ProgressWatch(self._hang)
        self._unwritten: list[records.Step] = []
        self._written_at = now
        # (time, tokens, samples) of the last steps.
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=20)
        self._stalls: dict[int, float] = {}
        self._restores: dict[int, Mapping[str, Any]] = {}
        self._verify_s = 0.0
        self.step = 0
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        # The newest value of each metric that the training function has reported.
        self.metrics: dict[str, Any] = {}

    # --- generations ---

    def generation_begins(
        self,
        number: int,
        world_size: int,
        step: int,
        now: float,
        skips: Iterable[Range] = (),
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        """Steps after `step` were rolled back; they will be done again. `skips` is all that the run leaves out."""
        self.generation = number
        self.table.begin(number, world_size, step)
        self.samples.rollback(step)
        self.samples.skip(skips)
        self.time.rollback(step)
        self.step = step
        self._recent.clear()
        self._restores.clear()
        self._record(records.generation_began(number, world_size, step + 1, now, skips, mesh or {}))

    def generation_ended(self, number: int, now: float) -> None:
        self.flush(now, force=True)
        self._record(records.generation_ended(number, self.step))

    # --- reports ---

    def report(self, report: StepReport, now: float) -> tuple[CompletedStep | None, ev.FirstStepDone | None]:
        """One rank's step report. Returns the step when it is complete, and the event if it is a generation's first."""
        self.watch.step_ended(report.generation, report.step, now)
        return self._counted(self.table.add(report), now)

    def joined_reports(
        self, reports: JoinedReports, now: float
    ) -> tuple[CompletedStep | None, ev.FirstStepDone | None]:
        """As `report`, of several ranks; only where `table.takes` them."""
        self.watch.step_ended(reports.generation, reports.step, now)
        return self._counted(self.table.add_joined(reports), now)

    def _counted(self, done: CompletedStep | None, now: float) -> tuple[CompletedStep | None, ev.FirstStepDone | None]:
        if done is None:
            return None, None
        self._completed(done, now)
        return done, done.first_step_done

    def _completed(self, done: CompletedStep, now: float) -> None:
        if done.first:
            # The time of verification is known only after the restore; until then it is booked as the restore's.
            for owner in (RESHARD, RESTORE):
                self._verify_s -= self.time.move(owner, VERIFY, self._verify_s)
            self._verify_s = 0.0
        self._reached(done.step, finite(done.loss))
        self.metrics.update(done.metrics)
        self.samples.add(done.step, done.positions, done.skipped)
        self.contents.add(done.step, (*done.positions, *done.skipped), done.content)
        self.time.step_done(done.step, now, done.save_stall_s, done.data_wait_s, done.straggler_s)
        if not done.first:
            self._hang.add(done.duration_s)
        if done.save_stall_s:
            self._stalls[done.step] = done.save_stall_s
            if len(self._stalls) > _STALLS:
                # Oldest first: no checkpoint of so old a step will come.
                del self._stalls[next(iter(self._stalls))]
        self._recent.append((now, done.tokens, done.samples))
        self.grad_norm = done.grad_norm
        self.learning_rate = done.learning_rates[0] if done.learning_rates else None
        self._unwritten.append(records.step(done, now))
        self.flush(now)

    def _reached(self, step: int, loss: float | None) -> None:
        """After a restart of the controller reports are sent again, older ones after newer ones."""
        if step > self.step:
            self.step, self.loss = step, self.loss if loss is None else loss

    def restored(self, data: Mapping[str, Any]) -> records.Restore | None:
        """One rank's restore report; returns the record of all ranks with the last missing report. A repeated report
        (the first answer was lost) changes nothing."""
        known = data["rank"] in self._restores
        self._restores.setdefault(data["rank"], data)
        if known or len(self._restores) < data["world_size"]:
            return None
        record = records.restore([self._restores[rank] for rank in sorted(self._restores)])
        self._verify_s = record["verify_s"]
        self._record(record)
        return record

    def stall_of(self, step: int) -> float | None:
        """Seconds by which the save of `step` delayed the slowest training thread."""
        return self._stalls.get(step)

    def recovered(
        self, generation: int, world_size: int, steps: Mapping[int, Iterable[Mapping[str, Any]]], now: float
    ) -> None:
        """Reports by rank that were stored with a snapshot: a lost worker cannot send its last reports."""
        table, last = StepTable(), 0
        table.begin(generation, world_size)
        for rank, reports in steps.items():
            for part in reports:
                done = table.add(StepReport.from_json(part, generation, rank))
                if done is not None and self.samples.add(done.step, done.positions, done.skipped):
                    self.contents.add(done.step, (*done.positions, *done.skipped), done.content)
                    self._unwritten.append(records.step(done, now))
                    last = max(last, done.step)
        self.flush(now, force=True)
        if last:
            self._record(records.generation_ended(generation, last))

    # --- after a restart of the controller ---

    def replay_step(self, step: Mapping[str, Any], when: float) -> None:
        """One completed step from the journal."""
        self._reached(step["step"], step["loss"])
        self.metrics.update(step.get("metrics") or {})
        self._recall_samples(step)
        stalls = [step.get(name, 0.0) for name in ("save_stall_s", "data_wait_s", "straggler_s")]
        self.time.step_done(step["step"], when, *stalls)
        self.table.known(step["step"])

    def replay_samples(self, replayed: Iterable[records.Record]) -> None:
        """Samples that earlier attempts consumed; rollbacks are seen where a generation begins."""
        for record in replayed:
            if records.begins_generation(record):
                self.samples.rollback(record["first_step"] - 1)
                self.samples.skip(records.skips_of(record))
            for step in records.steps_of([record]):
                self._recall_samples(step)

    def _recall_samples(self, step: Mapping[str, Any]) -> None:
        positions, skipped = step["positions"], step.get("skipped", ())
        self.samples.add(step["step"], [(a, b) for a, b in positions], [(a, b) for a, b in skipped])
        self.contents.add(step["step"], [(a, b) for a, b in (*positions, *skipped)], int(step.get("content", "0"), 16))

    def books(self) -> Books:
        """A view of what keeps changing; complete where nothing is unwritten."""
        return Books(self.generation, self.table, self.samples, self.time, self.step, self.loss, self.metrics)

    def take(self, books: Books) -> None:
        """Continue with the books of the controller before."""
        self.generation, self.samples, self.time = books.generation, books.samples, books.time
        self.table = books.table.restored()
        self.step, self.loss, self.metrics = books.step, books.loss, books.metrics

    def write_to(self, record: Callable[[records.Record], None]) -> None:
        self._record = record

    # --- time ---

    def owner(self, state: RunState, now: float) -> None:
        # Accelerators are held where slots are placed.
        slots = state.fleet.slots
        self.time.hold((len(slots) - len(slots.pending)) * self._per_slot, now)
        self.time.switch(owner_of(state), now)

    def committed(self, step: int) -> None:
        """A checkpoint covers everything up to and including `step`."""
        self.time.commit(step)

    def flush(self, now: float, force: bool = False) -> None:
        """Write waiting steps when there are many, or when they have waited long."""
        if self._unwritten and (
            force or len(self._unwritten) >= _STEPS_PER_RECORD or now - self._written_at > _FLUSH_S
        ):
            self._record(records.steps(self._unwritten))
            self._unwritten = []
            self._written_at = now

    def rates(self) -> dict[str, float]:
        """Per second over the last steps: steps, and tokens, or samples if the model does not count tokens."""
        seconds = self._recent[-1][0] - self._recent[0][0] if self._recent else 0.0
        if seconds <= 0:
            return {}
        later = list(self._recent)[1:]
        tokens, samples = sum(step[1] for step in later), sum(step[2] for step in later)
        counted = {"tokens_per_s": tokens / seconds} if tokens else {"samples_per_s": samples / seconds}
        return {"steps_per_s": len(later) / seconds, **counted}

    def summary_records(self, now: float) -> list[records.Record]:
        """The closing records of a run: samples and time."""
        counted = self.samples.result(self.samples.end())
        return [
            records.samples(counted),
            records.ledger(self.time.totals(now), self.time.wall_s(), self.time.held_totals(now)),
        ]

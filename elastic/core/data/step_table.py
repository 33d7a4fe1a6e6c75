"""The table that joins the ranks' step reports: a step that all ranks have reported is complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.data.joined_reports import JoinedReports, completed, joined
from elastic.core.data.steps import CompletedStep, StepReport
from elastic.core.typed_json import NOT_KEPT


@dataclass
class _Reports:
    """Of one step that is not complete: those that came alone, and those that came joined."""

    ranks: set[int] = field(default_factory=set)
    single: list[StepReport] = field(default_factory=list)
    joined: list[JoinedReports] = field(default_factory=list)

    def parts(self) -> list[JoinedReports]:
        return [*self.joined, joined(self.single)] if self.single else self.joined


@dataclass
class StepTable:
    """The reports of one generation, joined step by step. Reports of other generations are dropped."""

    # The generation that is being counted; -1 before the first.
    generation: int = -1
    _world_size: int = 0
    # Workers send again what is not complete.
    _reports: dict[int, _Reports] = field(default_factory=dict, metadata=NOT_KEPT)
    _done: set[int] = field(default_factory=set)
    _done_below: int = 0
    # The next complete step is reported to the state machine as the generation's first.
    _first: bool = True
    # The state machine knows of the first step.
    _first_known: bool = False

    def begin(self, generation: int, world_size: int, start_step: int = 0) -> None:
        """A generation of `world_size` ranks begins after `start_step` finished steps."""
        self.generation, self._world_size, self._done_below = generation, world_size, start_step + 1
        self._reports, self._done, self._first, self._first_known = {}, set(), True, False

    def add(self, report: StepReport) -> CompletedStep | None:
        """One rank's report of a finished step; the completed step when it was the last one missing.

        A second report of the same rank and step changes nothing: the first one counts.
        """
        if not self._counts(report.generation, report.step, report.rank, report.rank):
            return None
        reports = self._reports.setdefault(report.step, _Reports())
        if report.rank not in reports.ranks:
            reports.ranks.add(report.rank)
            reports.single.append(report)
        return self._complete_if_all(report.step)

    def add_joined(self, reports: JoinedReports) -> CompletedStep | None:
        """As `add`, for all ranks of `reports` at once. Only where `takes` says so."""
        if not self._counts(reports.generation, reports.step, reports.ranks[0], reports.ranks[-1]):
            return None
        known = self._reports.setdefault(reports.step, _Reports())
        if known.ranks.isdisjoint(reports.ranks):
            known.ranks.update(reports.ranks)
            known.joined.append(reports)
        return self._complete_if_all(reports.step)

    def takes(self, reports: JoinedReports) -> bool:
        """False where some of the ranks have reported the step already and others have not: what is joined cannot be
        taken in part, and each rank's own report is needed."""
        known = self._reports.get(reports.step)
        if known is None or reports.generation != self.generation or known.ranks.isdisjoint(reports.ranks):
            return True
        return known.ranks.issuperset(reports.ranks)

    def known(self, step: int) -> None:
        """The journal has the completed step: further reports of it change nothing."""
        self._mark_done(step)

    def first_known(self, generation: int) -> None:
        """The state machine knows of the generation's first step. A step in the journal does not imply that: a
        controller may have ended between the two."""
        if generation == self.generation:
            self._first, self._first_known = False, True

    def restored(self) -> StepTable:
        """After a restart of the controller: a first step that the state machine did not get to know is reported with
        the next one."""
        self._first = not self._first_known
        return self

    def _mark_done(self, step: int) -> None:
        if not self._is_done(step):
            self._done.add(step)
        while self._done_below in self._done:
            self._done.remove(self._done_below)
            self._done_below += 1

    def _counts(self, generation: int, step: int, lowest: int, highest: int) -> bool:
        ranks = lowest >= 0 and highest < self._world_size
        return ranks and generation == self.generation and not self._is_done(step)

    def _complete_if_all(self, step: int) -> CompletedStep | None:
        return self._complete(step) if len(self._reports[step].ranks) == self._world_size else None

    def _is_done(self, step: int) -> bool:
        return step < self._done_below or step in self._done

    def _complete(self, step: int) -> CompletedStep:
        first, self._first = self._first, False
        reports = self._reports.pop(step)
        self._mark_done(step)
        return completed(reports.parts(), first)

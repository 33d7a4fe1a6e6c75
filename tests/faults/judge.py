"""The one judge of all faults: what was trained is what an undisturbed run trains, and each sample is seen once.

That nothing is left behind is what `Run.finish` waits for, and the clusters' fixtures after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from harness import Record, Run, given_samples
from undisturbed import Undisturbed

from elastic.core.data.samples import SampleOrder
from elastic.core.data.steps import Range

WORLD_SIZE = 3
EPOCHS = 3
# The order of additions differs between world sizes; tests/ray/test_runs.py measures by how much: 5e-7.
MOST_DIFFERENT = 4e-6


@dataclass(frozen=True)
class Row:
    """One line of the table. `seconds`: from the fault to the next finished step."""

    fault: str
    noticed_by: str
    seconds: float
    steps_repeated: int
    lost: int
    repeated: int
    difference: float


class Judge:
    def __init__(self, rows: list[Row], folders: pytest.TempPathFactory) -> None:
        self._rows = rows
        self._folders = folders
        self._still: Undisturbed | None = None
        self._losses: dict[tuple[Range, ...], Mapping[int, float]] = {}

    def judge(
        self, run: Run, fault: str, struck_at: float | None, skips: tuple[Range, ...] = (), noticed_by: str = ""
    ) -> None:
        """Of a run that has finished. `struck_at`: wall clock seconds, or None for the first symptom; `skips`: the
        positions that it has to leave out; `noticed_by` where there was no incident."""
        incident = _incident(run)
        struck_at = incident["times"]["symptom"] if struck_at is None and incident is not None else struck_at
        assert struck_at is not None
        lost, repeated = _samples(run, skips)
        row = Row(
            fault,
            noticed_by or (str(incident["detector"]) if incident is not None else "nobody"),
            _next_step(run, incident, struck_at) - struck_at,
            incident["steps_repeated"] if incident is not None else 0,
            lost,
            repeated,
            self._difference(run, skips),
        )
        self._rows.append(row)
        assert (row.lost, row.repeated) == (0, 0), row
        assert row.difference <= MOST_DIFFERENT, row
        run.assert_time_is_accounted_for()
        run.assert_generations_are_told()

    def _difference(self, run: Run, skips: tuple[Range, ...]) -> float:
        still, losses = self._undisturbed(skips), run.losses()
        both = still.keys() & losses.keys()
        assert len(both) == min(len(still), len(losses)) > 0
        if run.settings.epochs != EPOCHS:
            # The last step of the undisturbed run has what is left of the data.
            both -= {max(still)}
        return max(abs(still[step] - losses[step]) / max(1.0, abs(still[step])) for step in both)

    def _undisturbed(self, skips: tuple[Range, ...]) -> Mapping[int, float]:
        if skips not in self._losses:
            self._still = self._still or Undisturbed(WORLD_SIZE)
            folder = self._folders.mktemp("still") / "run"
            config = {"size": 127, "batch": 10}
            self._losses[skips] = self._still.train(config, EPOCHS, folder, WORLD_SIZE, skips).losses
        return self._losses[skips]

    def close(self) -> None:
        if self._still is not None:
            self._still.close()


def _incident(run: Run) -> Record | None:
    """The one that the fault has made: the first that is no growth."""
    found = [incident for incident in run.incidents() if incident["next_world_size"] <= incident["world_size"]]
    return found[0] if found else None


def _next_step(run: Run, incident: Record | None, struck_at: float) -> float:
    if incident is not None:
        return float(incident["times"]["first_step"])
    return min(float(step["time"]) for step in run.steps().values() if step["time"] > struck_at)


def _samples(run: Run, skips: Sequence[Range]) -> tuple[int, int]:
    """How many were never trained on, and how often one was more than once too many: by the run's ledger, and by what
    the datasets of its workers were asked for."""
    ledger = run.records("samples")[-1]
    order, total = SampleOrder(run.config["size"], run.settings.seed), run.config["size"] * (run.settings.epochs or 1)
    left_out = {position for begin, end in skips for position in range(begin, end)}
    wanted = Counter(order.at(position)[1] for position in range(total) if position not in left_out)
    trained: Counter[int] = Counter()
    for by_generation in given_samples(run.folder).values():
        # The newest generation that did a step is the one whose step was not rolled back.
        trained.update(index for indices in by_generation[max(by_generation)].values() for index in indices)
    lost, repeated = (wanted - trained).total(), (trained - wanted).total()
    return max(lost, ledger["missing"]), max(repeated, ledger["repeated"])


def table(rows: Sequence[Row]) -> str:
    """As in docs/failures.md."""
    head = "| fault | noticed by | next step after | steps repeated | samples lost | samples repeated | losses differ |"
    lines = [
        f"| {row.fault} | {row.noticed_by} | {row.seconds:.2f} s | {row.steps_repeated} | {row.lost} | {row.repeated} "
        f"| {row.difference:.1e} |"
        for row in rows
    ]
    return "\n".join([head, "|---|---|---|---|---|---|---|", *lines])

"""All figures as one table, with the ratios between this project and its peers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import NOT_MEASURED, Figure, Target, ratio, statistic

_COLOURS = {"reached": "green", "missed": "red", NOT_MEASURED: "yellow"}
# Wide enough for every column where the output is no terminal.
_WIDTH = 200


def with_ratios(figures: Sequence[Figure]) -> list[Figure]:
    """The figures, and how many times faster this project's recovery is, where both were to be measured."""
    made = list(figures)
    own = _find(figures, "recovery", "node SIGKILL -> next step, 4 -> 3, ZeRO-1, from memory")
    targets = {"ray-train": Target("median", 30.0, at_most=False), "torchrun": None, "torchft": None}
    for case, target in targets.items():
        peer = next((figure for figure in figures if figure.case == case and figure.unit == "s"), None)
        if own is not None and peer is not None:
            made.append(ratio("ratios", f"recovery of a lost node, {peer.subject} over ours", peer, own, target))
    return made


def show(figures: Sequence[Figure], machine: Mapping[str, Any]) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(render(figures))
    if timelines := render_timelines(figures):
        console.print(timelines)
    for number, note in enumerate(_notes(figures), 1):
        console.print(f"[{number}] {note}", markup=False, highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    console.print(f"{machine['cores']} cores ({machine['processor']}), {versions}", markup=False, highlight=False)


def render(figures: Sequence[Figure]) -> Table:
    table = Table(show_lines=False)
    for heading in ("case", "figure", "of", "unit"):
        table.add_column(heading, overflow="fold")
    for heading in ("median", "min", "p95", "max", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("to reach", "result", "notes"):
        table.add_column(heading, overflow="fold")
    notes = _notes(figures)
    for figure in figures:
        table.add_row(*_cells(figure, notes), style=_COLOURS.get(figure.verdict))
    return table


def render_timelines(figures: Sequence[Figure]) -> Table | None:
    """Where the time of the incidents went: the median of each mark, in seconds since the fault or the decision."""
    found = [(figure, incidents) for figure in figures if (incidents := _incidents(figure))]
    marks = sorted(
        {mark: at for _, incidents in found for mark, at in _medians(incidents).items()}.items(), key=_second
    )
    if not marks:
        return None
    table = Table(title="timelines of the incidents: medians, in seconds", title_justify="left")
    table.add_column("figure", overflow="fold")
    for mark, _ in marks:
        table.add_column(mark.replace("_", " "), justify="right", no_wrap=True)
    for figure, incidents in found:
        medians = _medians(incidents)
        table.add_row(figure.name, *(_number(medians[mark]) if mark in medians else "" for mark, _ in marks))
    return table


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def _incidents(figure: Figure) -> list[Mapping[str, Any]]:
    return [*figure.details.get("incidents", ()), *figure.details.get("resizes", ())]


def _medians(incidents: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for incident in incidents for name in incident["timeline"])
    at = {name: [i["timeline"][name] for i in incidents if name in i["timeline"]] for name in names}
    return {name: statistic(values, "median") for name, values in at.items()}


def _cells(figure: Figure, notes: Sequence[str]) -> list[str]:
    names = ("median", "min", "p95", "max")
    numbers = [_number(statistic(figure.values, name)) if figure.values else "" for name in names]
    marks = " ".join(f"[{notes.index(note) + 1}]" for note in _own_notes(figure))
    targets = ", ".join(map(str, figure.targets))
    count = str(len(figure.values)) if figure.values else ""
    cells = [figure.case, figure.name, figure.subject, figure.unit, *numbers, count, targets, figure.verdict, marks]
    return [cell.replace("[", r"\[") for cell in cells]


def _own_notes(figure: Figure) -> list[str]:
    """A failure is a note too: it says why there is no figure, or why there are fewer repetitions."""
    return [*figure.notes, *([f"{figure.name}: {_short(figure.failure)}"] if figure.failure else [])]


def _notes(figures: Sequence[Figure]) -> list[str]:
    return list(dict.fromkeys(note for figure in figures for note in _own_notes(figure)))


def _short(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... (whole in the JSON file)"


def _number(value: float) -> str:
    """Three significant digits, without an exponent for what is usual."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _find(figures: Sequence[Figure], case: str, name: str) -> Figure | None:
    return next((figure for figure in figures if (figure.case, figure.name) == (case, name)), None)

"""The lab's figures as SVG, and the page that holds them and everything that was printed. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from elastic.observe.html.chart import LEFT, RIGHT, WIDTH, Axis, Point, frame, line, rect, svg, text, vertical
from elastic.observe.html.page import document
from elastic.observe.html.style import STYLE
from elastic.observe.text import brief, size
from elastic.planner.links import Link
from lab import report

Record = Mapping[str, Any]

# Over the report's own style: the two runs, the algorithms (measured: a line, predicted: dashed), and collectives in
# flight, of which the thread waited for the darker part.
_STYLE = """
.paper { fill: var(--paper); } .below { stroke: var(--world); stroke-width: 6; stroke-linejoin: round; }
.ring { stroke: #1d4ed8; } .tree { stroke: #15803d; } .hierarchical { stroke: #b45309; } .gloo { stroke: #6b7280; }
.formula { stroke-dasharray: 3 5; } .ring, .tree, .hierarchical, .gloo { stroke-width: 1.8; }
text.ring, text.tree, text.hierarchical, text.gloo { stroke: none; }
text.ring { fill: #1d4ed8; } text.tree { fill: #15803d; } text.hierarchical { fill: #b45309; }
text.gloo { fill: #6b7280; }
.forward { fill: var(--p5); } .backward { fill: var(--p2); } .step { fill: var(--p3); }
.flight { fill: var(--p4); } .waited { fill: #1d4ed8; }
"""
_LANE = 5


class Run(Protocol):
    """The part of a run that is drawn."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> Record: ...
    @property
    def watched(self) -> Sequence[Record]: ...


def pictures(
    measured: report.Times,
    link: Link,
    nodes: tuple[int, int],
    runs: Sequence[Run],
    losses: Sequence[Mapping[int, float]],
) -> dict[str, str]:
    """Name -> SVG. `nodes`: the ranks of the all-reduce, and how many of them are on one node."""
    steps = [(run.name, entry) for run in runs for entry in run.watched if entry["rank"] == 0]
    return {
        "losses": loss_curves(runs, losses),
        "all-reduce": all_reduce(measured, link, *nodes),
        **{f"{name}-step-{entry['step']}": step(name, entry) for name, entry in steps},
    }


def page(said: Sequence[str], drawn: Mapping[str, str]) -> str:
    body = "".join(f"<h2>{escape(name)}</h2>{picture}" for name, picture in drawn.items())
    return document("micro-lab", f"<h1>Micro-lab</h1>{body}<pre>{escape(chr(10).join(said))}</pre>", STYLE + _STYLE)


def standalone(picture: str) -> str:
    """As a file of its own."""
    begin, end = picture.index("<svg ") + 5, picture.index(">") + 1
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {picture[begin:end]}<style>{STYLE}{_STYLE}</style>'
    return f'{head}<rect class="paper" width="100%" height="100%"/>{picture[end:]}\n'


def loss_curves(runs: Sequence[Run], losses: Sequence[Mapping[int, float]]) -> str:
    """Both in one picture, the first one wide below the second; where the nodes were lost."""
    height, top = 300, 40
    x = Axis.over([0.0, *(float(number) for number in losses[0])], LEFT, WIDTH - RIGHT)
    y = Axis.over([loss for one in losses for loss in one.values()], height - 34, top, margin=0.04)
    styles = ("below", "loss")
    parts = list(frame(x, y, lambda value: f"{value:g}", lambda value: f"{value:,.0f}"))
    for number, (run, one, style) in enumerate(zip(runs, losses, styles, strict=True)):
        points = [(float(at), loss) for at, loss in sorted(one.items())]
        key = Axis(0.0, 1.0, LEFT + 200 * number, LEFT + 200 * number + 28)
        parts += [line(points, x, y, style), line([(0.0, 14.0), (1.0, 14.0)], key, Axis(0.0, 1.0, 0.0, 1.0), style)]
        parts.append(text(key.end + 8, 18, run.name))
        parts += [
            vertical(x(float(lost["step"])), top, y.start, "failure", f"{run.name}: {lost['kind']}")
            for lost in run.summary["incidents"]
        ]
    return svg(height, parts, "Loss at each step of both runs")


def all_reduce(measured: report.Times, link: Link, ranks: int, per_node: int) -> str:
    """Best times over sizes, on logarithmic scales; dashed: what alpha and beta predict."""
    height, top = 320, 40
    sizes = sorted(measured["pair"])
    found: dict[str, list[Point]] = {
        name: [(math.log10(count), math.log10(min(measured[name][count]))) for count in sizes]
        for name in ("ring", "tree", "hierarchical", "gloo")
    }
    predicted: dict[str, list[Point]] = {name: [] for name in ("ring", "tree", "hierarchical")}
    for count in sizes:
        for name, cost in report.predictions(ranks, per_node, count).items():
            seconds = link.seconds(cost.messages, cost.bytes)
            predicted[name].append((math.log10(count), math.log10(seconds)))
    every = [point for points in (*found.values(), *predicted.values()) for point in points]
    x = Axis.over([at for at, _ in every], LEFT, WIDTH - RIGHT)
    y = Axis.over([value for _, value in every], height - 34, top, margin=0.04)
    parts = list(frame(x, y, lambda value: brief(10**value), lambda value: size(10**value)))
    parts += [line(points, x, y, name) for name, points in found.items()]
    parts += [line(points, x, y, f"{name} formula") for name, points in predicted.items()]
    parts += [text(LEFT + 130 * number, 18, name, name) for number, name in enumerate(found)]
    parts.append(text(LEFT + 130 * len(found), 18, "dashed: predicted"))
    return svg(height, parts, f"Time of an all-reduce on {ranks} ranks over its size")


def step(name: str, entry: Record) -> str:
    """One step as rank 0 saw it: its passes, and below them each collective from its call to where it was needed. The
    dark end of a bar is the time that the training thread waited for it."""
    end_s = max(float(ended) for _, _, ended in entry["phases"])
    x = Axis(0.0, end_s, LEFT, WIDTH - RIGHT)
    title = f"{name}, step {entry['step']} on {entry['world_size']} ranks"
    parts = [text(LEFT, 16, title)]
    for phase, began, ended in entry["phases"]:
        parts.append(rect(x(began), 24, x(ended) - x(began), 16, phase, f"{phase}: {brief(ended - began)}"))
        if x(ended) - x(began) > 60:
            parts.append(text(x(began) + 4, 36, phase, "inside"))
    top = 46.0
    for gathers, label in ((True, "weights"), (False, "gradients")):
        calls = [call for call in entry["calls"] if (call["op"] == report.GATHERS) == gathers]
        lanes = list(_lanes(calls))
        parts.append(text(LEFT - 8, top + 8, label, anchor="end"))
        for call, lane in lanes:
            parts += _bars(call, x, top + lane * (_LANE + 1))
        top += (_LANE + 1) * max((lane + 1 for _, lane in lanes), default=1) + 8
    for value in x.ticks(8):
        parts += [vertical(x(value), top, top + 4, "axis"), text(x(value), top + 18, brief(value), anchor="middle")]
    return svg(top + 26, parts, title)


def _lanes(calls: Sequence[Record]) -> Iterator[tuple[Record, int]]:
    """Each call with the first lane that is free when it begins."""
    free: list[float] = []
    for call in sorted(calls, key=lambda call: float(call["began_s"])):
        began = float(call["began_s"])
        lane = next((number for number, until in enumerate(free) if until <= began), len(free))
        free[lane : lane + 1] = [began + float(call["seconds"])]
        yield call, lane


def _bars(call: Record, x: Axis, top: float) -> Iterator[str]:
    began, seconds, waited = (float(call[key]) for key in ("began_s", "seconds", "waited_s"))
    title = f"{call['op']}, {size(call['bytes'])}: {brief(seconds)}, {brief(waited)} of which waited"
    yield rect(x(began), top, max(1.0, x(began + seconds) - x(began)), _LANE, "flight", title)
    yield rect(
        x(began + seconds - waited), top, x(began + seconds) - x(began + seconds - waited), _LANE, "waited", title
    )

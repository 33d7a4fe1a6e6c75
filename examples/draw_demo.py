"""Draws a demo's two runs from their journals: python examples/draw_demo.py runs/demo-<time> docs/demo.svg"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from demo import MARKS, heading, largest_difference, losses_of

WIDTH, LEFT, RIGHT = 760, 46, 744
CURVE_TOP, CURVE_BOTTOM = 52, 226
BAR_TOP, BAR_BOTTOM = 300, 318
BAR_LEFT, BAR_RIGHT = 60, 640
INK, FAINT, STILL, MOVED, LOST, GROWN = "#1f2937", "#6b7280", "#c3cad5", "#1d4ed8", "#b91c1c", "#15803d"
PARTS = ("#fca5a5", "#fdba74", "#fde68a", "#bae6fd", "#a7f3d0")


def draw(folder: Path) -> str:
    moved = json.loads((folder / "disturbed.json").read_text(encoding="utf-8"))
    losses = losses_of(folder, "undisturbed"), losses_of(folder, "disturbed")
    body = [*_curves(moved, *losses), *_recovery(moved)]
    style = "font-family='system-ui,sans-serif' font-size='12'"
    size = f"width='{WIDTH}' height='372' viewBox='0 0 {WIDTH} 372'"
    paper = f"<rect width='{WIDTH}' height='372' rx='8' fill='#ffffff'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>", paper, *body, "</svg>"]) + "\n"


def _curves(moved: Mapping[str, Any], still: Mapping[int, float], other: Mapping[int, float]) -> Iterator[str]:
    last, low, high = max(still), min(still.values()), max(still.values())

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / last

    def y(loss: float) -> float:
        return CURVE_BOTTOM - (CURVE_BOTTOM - CURVE_TOP) * (loss - low) / (high - low)

    def line(losses: Mapping[int, float], look: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(losses.items()))
        return f"<polyline points='{points}' fill='none' {look}/>"

    for generation in moved["generations"]:
        begin, end = x(generation["first_step"] - 1), x(generation["last_step"])
        shade = "#ffffff" if generation["world_size"] == 4 else "#f3f4f6"
        yield f"<rect x='{begin:.1f}' y='34' width='{end - begin:.1f}' height='{CURVE_BOTTOM - 34}' fill='{shade}'/>"
        yield _text((begin + end) / 2, 48, f"{generation['world_size']} workers", FAINT, "middle")
    for value in range(int(low) + 1, int(high) + 1):
        yield _text(LEFT - 8, y(value) + 4, str(value), FAINT, "end")
        yield f"<path d='M{LEFT} {y(value):.1f}H{RIGHT}' stroke='#e5e7eb'/>"
    yield line(still, f"stroke='{STILL}' stroke-width='6' stroke-linejoin='round'")
    yield line(other, f"stroke='{MOVED}' stroke-width='1.5' stroke-linejoin='round'")
    for incident in moved["incidents"]:
        colour = GROWN if incident["planned"] else LOST
        step = incident["resumed_step"] if incident["planned"] else incident["step"]
        what = "node back, grown again" if incident["planned"] else "node killed (SIGKILL)"
        yield f"<path d='M{x(step):.1f} 34V{CURVE_BOTTOM}' stroke='{colour}' stroke-dasharray='4 3'/>"
        yield _text(x(step) + 6, 92 if incident["planned"] else 74, f"{what}, step {step}", colour)
    yield _text(LEFT, 22, "Loss at each step:", INK)
    yield _text(LEFT + 112, 22, "undisturbed run", FAINT)
    yield _text(LEFT + 218, 22, "run that lost a node", MOVED)
    step, largest = largest_difference(still, other)
    yield _text(RIGHT, 22, f"largest difference: {largest:.0e}", INK, "end")
    yield f"<path d='M{LEFT} {CURVE_BOTTOM}H{RIGHT}' stroke='{INK}'/>"
    for mark in range(0, last + 1, 20):
        yield _text(x(mark), CURVE_BOTTOM + 16, f"step {mark}" if mark == 0 else str(mark), FAINT, "middle")


def _recovery(moved: Mapping[str, Any]) -> Iterator[str]:
    incident = next(i for i in moved["incidents"] if not i["planned"])
    seconds = incident["seconds_from_fault"]
    total = seconds["first_step"]

    def x(at: float) -> float:
        return BAR_LEFT + (BAR_RIGHT - BAR_LEFT) * at / total

    yield _text(LEFT, 276, f"From SIGKILL to the first step on {incident['next_world_size']} workers", INK)
    before = 0.0
    for number, (mark, shade) in enumerate(zip(MARKS, PARTS, strict=True)):
        at = seconds[mark]
        yield (
            f"<rect x='{x(before):.1f}' y='{BAR_TOP}' width='{x(at) - x(before):.1f}' "
            f"height='{BAR_BOTTOM - BAR_TOP}' fill='{shade}'/>"
        )
        yield f"<path d='M{x(at):.1f} {BAR_TOP - 4}V{BAR_BOTTOM + 4}' stroke='{INK}'/>"
        # Every other label below, so that neighbours do not run into each other.
        height = BAR_TOP - 8 if number % 2 else BAR_BOTTOM + 18
        yield _text(x(at), height, f"{mark.replace('_', ' ')} {at:.2f} s", INK, "middle")
        before = at
    yield f"<path d='M{BAR_LEFT} {BAR_TOP - 4}V{BAR_BOTTOM + 4}' stroke='{LOST}'/>"
    yield _text(BAR_LEFT, BAR_TOP - 8, "0 s", LOST, "middle")
    note = (
        f"{incident['steps_repeated']} steps repeated; state from {incident['source']}, step {incident['resumed_step']}"
    )
    yield _text(LEFT, 358, f"{heading(incident, moved)}: {note}", FAINT)


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' text-anchor='{anchor}'>{text}</text>"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1])), encoding="utf-8")

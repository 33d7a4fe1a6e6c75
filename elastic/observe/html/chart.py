"""Small charts as SVG text. Colours are CSS variables, so that one picture serves light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH = 920
LEFT, RIGHT = 64, 16
# A line has at most about two points per pixel; between them the extremes are kept.
_BUCKETS = 800


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels. `low` < `high`; `start` and `end` are pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    @staticmethod
    def over(values: Iterable[float], start: float, end: float, margin: float = 0.0) -> Axis:
        """An axis that holds all finite values; of none, or of one value, an axis of length one around it."""
        finite = [value for value in values if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        if high <= low:
            low, high = low - 0.5, high + 0.5
        space = (high - low) * margin
        return Axis(low - space, high + space, start, end)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values (1, 2 or 5 times a power of ten apart) that lie on the axis."""
        rough = (self.high - self.low) / max(1, most)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[Point], buckets: int = _BUCKETS) -> list[Point]:
    """At most 2 points per bucket of x, the lowest and the highest, in their order; few points stay as they are."""
    if len(points) <= 2 * buckets:
        return list(points)
    points = [point for point in points if math.isfinite(point[1])]
    kept: list[Point] = []
    size = math.ceil(len(points) / buckets)
    for begin in range(0, len(points), size):
        part = range(begin, min(begin + size, len(points)))
        extremes = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        kept.extend(points[i] for i in sorted(extremes))
    return kept


def line(points: Sequence[Point], x: Axis, y: Axis, style: str) -> str:
    """A polyline; points that are not finite break it."""
    parts, current = [], []
    for px, py in [*thinned(points), (math.nan, math.nan)]:
        if math.isfinite(px) and math.isfinite(py):
            current.append(f"{x(px):.1f},{y(py):.1f}")
        elif current:
            # A single point is drawn as a dot: a line of no length is invisible.
            tail = current[0] if len(current) == 1 else ""
            parts.append(f'<polyline class="{style}" points="{" ".join([*current, tail])}"/>')
            current = []
    return "".join(parts)


def text(x: float, y: float, words: str, style: str = "label", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    """A rectangle, with a tooltip where `title` says something."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
    return f'<rect class="{style}" {size}>{inner}</rect>'


def vertical(x: float, top: float, bottom: float, style: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="{style}" d="M{x:.1f} {top:.1f}V{bottom:.1f}">{inner}</path>'


def frame(x: Axis, y: Axis, label: Callable[[float], str], below: Callable[[float], str] | None) -> Iterator[str]:
    """Horizontal grid lines with values at the left and, where `below` is given, values under the chart."""
    for value in y.ticks(5):
        yield f'<path class="grid" d="M{x.start:.1f} {y(value):.1f}H{x.end:.1f}"/>'
        yield text(x.start - 8, y(value) + 4, label(value), anchor="end")
    yield f'<path class="axis" d="M{x.start:.1f} {y.start:.1f}H{x.end:.1f}"/>'
    for value in x.ticks(8) if below else ():
        assert below is not None
        yield vertical(x(value), y.start, y.start + 4, "axis")
        yield text(x(value), y.start + 18, below(value), anchor="middle")


def svg(height: float, parts: Iterable[str], name: str) -> str:
    """`name` is what a screen reader says."""
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(name, quote=True)}">{body}</svg>'

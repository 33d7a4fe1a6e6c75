"""Live progress: one panel that is redrawn on a terminal, one line per change anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.observe.text import clean, duration, finite, mesh_words

Progress = Mapping[str, Any]

# A line about steps alone at most this often.
_STEP_LINE_S = 10.0
_CHANGES = ("status", "generation", "world_size", "doing", "last_checkpoint", "incidents", "asking_for")


class Display(Protocol):
    """1. `update` whenever something may have changed; 2. `note` between updates; 3. `close` once."""

    def update(self, progress: Progress) -> None: ...

    def note(self, sentence: str) -> None: ...

    def close(self) -> None: ...


def open_display(stream: IO[str]) -> Display:
    return PanelDisplay(stream) if stream.isatty() else LineDisplay(stream)


def facts(progress: Progress) -> dict[str, str]:
    """The values of both displays, in order, as safe text, without unknown ones."""
    step, last = progress.get("step"), progress.get("max_steps")
    checkpoint, checkpoint_step = progress.get("last_checkpoint"), progress.get("last_checkpoint_step")
    shown = {
        "step": None if step is None else f"{step}/{last}" if last else f"{step}",
        "loss": _number(progress.get("loss"), ".4f"),
        "lr": _number(progress.get("learning_rate"), ".3g"),
        "grad norm": _number(progress.get("grad_norm"), ".3g"),
        "tokens/s": _number(progress.get("tokens_per_s"), ",.0f"),
        "samples/s": _number(progress.get("samples_per_s"), ",.1f"),
        "world size": progress.get("world_size"),
        "mesh": mesh_words(progress.get("mesh")),
        "generation": progress.get("generation"),
        "last checkpoint": f"step {checkpoint_step}" if checkpoint_step is not None else checkpoint,
        "incidents": progress.get("incidents") or None,
        "asking for": progress.get("asking_for"),
        "left": _left(progress),
    }
    return {name: clean(value) for name, value in shown.items() if value is not None}


def _left(progress: Progress) -> str | None:
    """The time to the end at the present rate; None if unknown."""
    step, last, rate = progress.get("step"), progress.get("max_steps"), finite(progress.get("steps_per_s"))
    if step is None or not last or not rate:
        return None
    return duration(max(0, last - step) / rate)


def doing(progress: Progress) -> str:
    """The present activity: a sentence while the run does anything but train, else its status."""
    return clean(progress.get("doing") or progress.get("status") or "starting")


class LineDisplay:
    """Prints lines without control characters and never redraws: for a pipe or a log file."""

    def __init__(
        self, stream: IO[str], clock: Callable[[], float] = time.monotonic, step_line_s: float = _STEP_LINE_S
    ) -> None:
        self._step_line_s = step_line_s
        self._stream = stream
        self._clock = clock
        self._shown: tuple[object, ...] | None = None
        self._shown_step: object = None
        self._shown_at = 0.0

    def update(self, progress: Progress) -> None:
        change = tuple(progress.get(key) for key in _CHANGES)
        moved = progress.get("step") != self._shown_step and self._clock() - self._shown_at >= self._step_line_s
        if change == self._shown and not moved:
            return
        self._shown, self._shown_step, self._shown_at = change, progress.get("step"), self._clock()
        self.note(", ".join([doing(progress), *(f"{name} {value}" for name, value in facts(progress).items())]))

    def note(self, sentence: str) -> None:
        self._stream.write(f"{clean(sentence)}\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class PanelDisplay:
    """A few lines at the bottom of a terminal; notes scroll above them."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream)
        self._live = Live(console=self._console, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def update(self, progress: Progress) -> None:
        self._live.update(panel(progress, self._console.width))

    def note(self, sentence: str) -> None:
        self._console.print(Text(clean(sentence)))

    def close(self) -> None:
        self._live.stop()


def panel(progress: Progress, width: int = 80) -> Table:
    """Text objects only: rich would read a "[...]" in evidence as markup. As many rows of facts as fit into `width`."""
    outer = Table.grid(padding=(0, 2))
    shown = facts(progress)
    outer.add_row(Text(doing(progress), style="yellow" if progress.get("doing") else "green"))
    for row in _rows(shown, width - 2):
        values = Table.grid(padding=(0, 2))
        values.add_row(*(Text(name, style="dim", no_wrap=True) for name in row))
        values.add_row(*(Text(shown[name], style="bold", no_wrap=True) for name in row))
        outer.add_row(values)
    if progress.get("max_steps"):
        outer.add_row(
            ProgressBar(total=progress["max_steps"], completed=progress.get("step") or 0, width=min(60, width))
        )
    return outer


def _rows(shown: Mapping[str, str], width: int) -> list[list[str]]:
    """The names in rows whose values stand side by side without being cut."""
    rows: list[list[str]] = []
    room = 0
    for name, value in shown.items():
        wide = max(len(name), len(value)) + 2
        if not rows or wide > room:
            rows.append([])
            room = width
        rows[-1].append(name)
        room -= wide
    return rows


def _number(value: object, form: str) -> str | None:
    number = finite(value)
    if number is None:
        return None if value is None else clean(value)
    return format(number, form)

"""Progress on a pipe: a line per change, no control characters. On a terminal: the same facts in a panel."""

from __future__ import annotations

import io
from typing import Any

from elastic_jobs.display import LineDisplay, PanelDisplay, open_display, panel
from rich.console import Console


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


PROGRESS: dict[str, Any] = {
    "status": "running",
    "step": 7,
    "max_steps": 100,
    "loss": 2.34567,
    "tokens_per_s": 12345.6,
    "world_size": 4,
    "generation": 1,
    "last_checkpoint": "step-00000005-g0001",
    "last_checkpoint_step": 5,
    "incidents": 0,
}


def test_one_line_per_change_with_everything_known() -> None:
    stream, clock = io.StringIO(), Clock()
    display = LineDisplay(stream, clock)
    display.update(PROGRESS)
    display.update({**PROGRESS, "step": 8})
    display.update({**PROGRESS, "step": 9, "doing": "waiting for 1 more worker", "incidents": 1})
    assert stream.getvalue().splitlines() == [
        "running, step 7/100, loss 2.3457, tokens/s 12,346, world size 4, generation 1, last checkpoint step 5",
        "waiting for 1 more worker, step 9/100, loss 2.3457, tokens/s 12,346, world size 4, generation 1, "
        "last checkpoint step 5, incidents 1",
    ]


def test_the_mesh_where_ranks_share_anything() -> None:
    stream = io.StringIO()
    LineDisplay(stream).update({"status": "running", "world_size": 4, "mesh": {"dp": 2, "tp": 2}, "generation": 3})
    assert stream.getvalue() == "running, world size 4, mesh dp 2, tp 2, generation 3\n"


def test_steps_alone_are_told_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    display = LineDisplay(stream, clock)
    for step in range(100):
        display.update({"status": "running", "step": step})
        clock.now += 0.25
    assert len(stream.getvalue().splitlines()) == 3


def test_nothing_known_yet() -> None:
    stream = io.StringIO()
    LineDisplay(stream).update({})
    assert stream.getvalue() == "starting\n"


def test_no_control_characters_whatever_the_run_says() -> None:
    stream = io.StringIO()
    display = LineDisplay(stream)
    display.update({"status": "running", "doing": "rank 1: \x1b[31mboom\x1b[0m\r\nnext", "loss": float("nan")})
    display.note("a\x07b")
    text = stream.getvalue()
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "loss nan" in text


def test_a_pipe_gets_lines_and_a_terminal_a_panel() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(open_display(io.StringIO()), LineDisplay)
    display = open_display(Terminal())
    display.close()
    assert isinstance(display, PanelDisplay)


def test_the_panel_shows_brackets_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(panel({**PROGRESS, "doing": "probing [rank 3] \x1b[31m"}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "probing [rank 3] [31m" in text
    assert "7/100" in text
    assert "\x1b" not in text


def test_a_panel_of_80_columns_shows_every_fact_whole() -> None:
    progress = {
        **PROGRESS, "step": 12_345, "max_steps": 100_000, "learning_rate": 0.00123456, "grad_norm": 12.345,
        "steps_per_s": 2.0, "asking_for": "3 more nodes", "incidents": 12,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    console.print(panel(progress, console.width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("12345/100000", "12,346", "0.00123", "12.3", "3 more nodes", "last checkpoint", "12 h 10 min"):
        assert whole in text, whole

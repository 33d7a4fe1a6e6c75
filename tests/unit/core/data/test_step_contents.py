"""What completed steps have read, for the steps that are done again."""

from __future__ import annotations

from elastic.core.data.step_contents import StepContents


def test_steps_after_the_checkpoint_are_known_by_their_first_position() -> None:
    contents = StepContents()
    for step in (1, 2, 3):
        contents.add(step, [(step * 10 - 10, step * 10)], step)
    assert contents.after(1) == {10: 2, 20: 3}
    assert contents.after(3) == {}


def test_what_was_read_first_counts() -> None:
    contents = StepContents()
    contents.add(1, [(4, 8), (0, 4)], 7)
    contents.add(1, [(0, 8)], 8)
    assert contents.after(0) == {0: 7}


def test_nothing_is_kept_of_map_style_data() -> None:
    contents = StepContents()
    contents.add(1, [(0, 10)], 0)
    contents.add(2, [], 5)
    assert contents.after(0) == {}


def test_the_oldest_steps_are_forgotten() -> None:
    contents = StepContents()
    for step in range(1, 10_001):
        contents.add(step, [(step, step + 1)], step)
    assert 1000 < len(contents.after(0)) < 5000
    assert contents.after(9_999) == {10_000: 10_000}

"""The one line of an error that people are shown."""

from __future__ import annotations

from elastic.runtime.ray_errors import sentence


def test_the_last_line_says_what_happened_and_the_class_of_what() -> None:
    assert sentence(ValueError("Traceback:\n  line 1\nthe cause\n\n")) == "ValueError: the cause"
    assert sentence(TimeoutError()) == "TimeoutError: no message"
    assert len(sentence(ValueError("x" * 1000))) == 500

"""What each member of a generation is given."""

from __future__ import annotations

import pytest

from elastic.core.actions import BeginGeneration
from elastic.core.settings import RunSettings
from elastic.runtime.controller.hands.generation_specs import generation_specs


@pytest.mark.parametrize(("checkpoint", "content"), [("step-00000004-g0001", {40: 7}), (None, {})])
def test_repeated_steps_are_known_where_the_run_goes_on_from_a_checkpoint(
    checkpoint: str | None, content: dict[int, int]
) -> None:
    """A run that begins anew may have been given other data."""
    begin = BeginGeneration(2, (0, 1), checkpoint, 4 if checkpoint else 0)
    specs = generation_specs(RunSettings("r"), begin, [None, None], {40: 7})
    assert [spec.content for spec in specs] == [content, content]

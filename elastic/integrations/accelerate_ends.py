"""The ends of steps that a script has been told, by `accelerator.sync_gradients`, and is not told again.

After a loss a run may go back over steps that the script has counted, logged and saved already. They are made again as
they were: what the script has asked for at a step's end is asked for in its place. What is registered goes back with
the run, and must see its steps again; then the script is told.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from elastic.training import context
from elastic.training.engine import ElasticEngine
from elastic.training.generation import Generation

# Under which the schedulers are registered that `prepare` was given.
PREPARED = "accelerate_scheduler_"
# Steps further back are told again.
_MOST = 1000


class End:
    """What is asked for with the last batch of a step: the norm to clip to, and how often each scheduler steps."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.clipped: float | None = None
        self.scheduled: Counter[Any] = Counter()


class Ends:
    """Of one call of the function. For each batch `begin`, and `told` or `untold` where it was the last of its step."""

    def __init__(self) -> None:
        self._told: dict[int, End] = {}
        # Of the batch at hand; and the collectives of the script's own, up to when it was told.
        self.now = End(0)
        self._collectives: int | None = None

    def begin(self, engine: ElasticEngine) -> None:
        self.now, self._collectives = End(steps_made() + 1), None
        engine.untold = self.now.step in self._told and not engine.tells_again and not _goes_back()

    @property
    def before(self) -> End:
        """Of the step at hand, when it was made before."""
        return self._told[self.now.step]

    def telling(self) -> None:
        """What the script does with the rest of this batch may depend on it."""
        if self._collectives is None:
            self._collectives = _generation().scope.of_script()

    def tell(self, engine: ElasticEngine) -> None:
        if self._collectives is not None and _generation().scope.of_script() > self._collectives:
            engine.meets_at_ends = True
        self._told[self.now.step] = self.now
        self._told.pop(self.now.step - _MOST, None)
        engine.told_step = self.now.step

    def left_out(self) -> Counter[Any]:
        """How often each scheduler has not stepped, with this batch, as it has before."""
        return self.before.scheduled - self.now.scheduled


def steps_made() -> int:
    """Of the run. Not by `elastic.get_context().step`: a loop that asks for that is believed to count by it."""
    return _generation().scope.step


def _goes_back() -> bool:
    """Does anything of the script's, besides the prepared schedulers?"""
    state = _generation().state
    return bool(state) or any(not name.startswith(PREPARED) for name in state.objects)


def _generation() -> Generation:
    generation = context.current()
    assert generation is not None
    return generation

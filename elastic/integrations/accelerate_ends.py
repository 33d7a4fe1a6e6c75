"""Which ends of steps a script is shown by `accelerator.sync_gradients`: each once, also where a step is repeated.

After a loss a run may repeat steps that the script has counted, logged and saved already. Their ends are hidden from
the script, and the step is made as it was: it is clipped to the same norm, and the same schedulers step. Objects that
the script has registered are restored to the earlier step, and need its updates again: then repeated steps are shown.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from elastic.training import context
from elastic.training.engine import ElasticEngine
from elastic.training.generation import Generation

# Under which the schedulers are registered that `prepare` was given.
PREPARED = "accelerate_scheduler_"
# How many steps are remembered. Older ones are shown again if they are repeated.
_MOST = 1000


class End:
    """What is asked for with the last batch of a step: the norm to clip to, and how often each scheduler steps."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.clipped: float | None = None
        self.scheduled: Counter[Any] = Counter()


class Ends:
    """Of one call of the function. For each batch `begin`; then `note` where it was the last of a step, and shown."""

    def __init__(self) -> None:
        self._shown: dict[int, End] = {}
        # Of the batch at hand; and how many collectives of its own the script had made when it was shown the end.
        self.now = End(0)
        self._collectives: int | None = None

    def begin(self, engine: ElasticEngine) -> None:
        self.now, self._collectives = End(steps_made() + 1), None
        ends = engine.shown_ends
        ends.hidden = self.now.step in self._shown and not ends.again and not _goes_back()

    @property
    def before(self) -> End:
        """Of the step at hand, when it was made before."""
        return self._shown[self.now.step]

    def shown(self) -> None:
        """Collectives of the script that follow in this batch may depend on it."""
        if self._collectives is None:
            self._collectives = _generation().scope.of_script()

    def note(self, engine: ElasticEngine) -> None:
        if self._collectives is not None and _generation().scope.of_script() > self._collectives:
            engine.shown_ends.collectives = True
        self._shown[self.now.step] = self.now
        self._shown.pop(self.now.step - _MOST, None)
        engine.shown_ends.last = self.now.step

    def left_out(self) -> Counter[Any]:
        """How often each scheduler has not stepped, with this batch, as it has before."""
        return self.before.scheduled - self.now.scheduled


def steps_made() -> int:
    """Of the run. Not by `elastic.get_context().step`: a loop that asks for that is believed to count by it."""
    return _generation().scope.step


def _goes_back() -> bool:
    """Has the script registered anything besides the prepared schedulers, that is restored with the run?"""
    state = _generation().state
    return bool(state) or any(not name.startswith(PREPARED) for name in state.objects)


def _generation() -> Generation:
    generation = context.current()
    assert generation is not None
    return generation

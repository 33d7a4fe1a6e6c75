"""What the completed steps of a run over a stream have read: a step that is repeated must read the same."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.core.data.steps import Range

# More than are ever repeated: checkpoints are not that far apart.
_MOST = 4096


class StepContents:
    """The content (see `CompletedStep.content`) by the step's first position, which is what decides about it: after a
    rollback that leaves samples out, a step of the same number reads others."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def add(self, step: int, positions: Iterable[Range], content: int) -> None:
        """What was read first counts. Nothing is kept of map-style data, whose content is 0."""
        start = min((start for start, _ in positions), default=None)
        if content and start is not None:
            self._known.setdefault(start, (step, content))
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]

    def after(self, step: int) -> dict[int, int]:
        """First position to content of the steps that are done again when the run continues after `step`."""
        return {start: content for start, (number, content) in self._known.items() if number > step}

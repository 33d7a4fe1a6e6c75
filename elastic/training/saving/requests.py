"""Saves that the training function asks for, by `engine.save_checkpoint`: of the same step on all ranks."""

from __future__ import annotations

import logging

from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.user.state import State

logger = logging.getLogger(__name__)


class SaveRequests:
    """Of one generation of one rank; training thread only. For every step `announce` before its snapshots are prepared,
    and `due` after; `made` when it was saved.

    In a run's first generation all functions have begun together, and ask together. Later a worker that has joined may
    count from its own beginning (`if step % 1000 == 0`), so only rank 0's requests count. Once a function has asked,
    each step has an exchange for it; the run's state tells workers that join. Before the first request nothing is
    exchanged for it: that one goes with the next snapshot in memory. So it is from the beginning where rank 0 alone may
    ask (`follow_rank_0`). `apart`: where islands train by themselves each answers for itself.
    """

    def __init__(self, scope: GenerationScope, user: State, snapshots: Snapshots, apart: bool) -> None:
        self._scope = scope
        self._user = user
        self._snapshots = snapshots
        self._apart = apart
        self._alone = apart or scope.spec.generation == 1
        # The step of the oldest request that was not met.
        self._asked: int | None = None

    def follow_rank_0(self) -> None:
        """On all ranks, before the first step."""
        self._alone = self._apart

    def ask(self) -> None:
        if self._asked is None:
            self._asked = self._scope.step
        if self._alone:
            self._user.saves = True

    def announce(self) -> None:
        self._snapshots.asks = self._asks and not self._alone

    def due(self) -> bool:
        """Is the step just finished to be saved? Collective."""
        if self._alone:
            return self._asked is not None
        due = self._snapshots.asked_for(self._user.saves)
        if due:
            self._user.saves = True
        return due

    def made(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and asked < self._scope.step and self._scope.spec.rank == 0 and not self._alone:
            logger.warning(
                "engine.save_checkpoint was called after step %d, for the first time, and step %d is saved, the next "
                "that memory has a snapshot of; from here on it is the step itself",
                asked,
                self._scope.step,
            )

    @property
    def _asks(self) -> bool:
        return self._asked is not None and self._scope.spec.rank == 0

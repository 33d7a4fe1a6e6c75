"""What a controller keeps at a replay point: everything that a replay of the journal up to there would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from elastic.core.run.state import RunState
from elastic.core.settings import RunSettings
from elastic.core.typed_json import NOT_KEPT, decode, encode
from elastic.runtime.controller.faults import Faults
from elastic.runtime.controller.telemetry import Books


@dataclass(frozen=True)
class ReplayState:
    """See `Replayed` for the fields. `generation` is the highest number so far."""

    attempt: int
    generation: int
    events: int
    last_time: float
    faults: Faults
    state: RunState
    books: Books = field(metadata=NOT_KEPT)

    def writer(self) -> Callable[[], dict[str, Any]]:
        """Makes the JSON form, on any thread and later: what changes is encoded now, the frozen state then."""
        books = encode(self.books)
        return lambda: {**encode(self), "books": books}


def reader(settings: RunSettings) -> partial[ReplayState]:
    """Makes `ReplayState` of its JSON form, with the run's settings, which are not in it.

    The partial raises ValueError, TypeError or KeyError for what another release wrote.
    """
    return partial(_read, settings)


def _read(settings: RunSettings, data: Mapping[str, Any]) -> ReplayState:
    own = dict(data)
    books = decode(Books, own.pop("books"))
    read = decode(ReplayState, own, books=books)
    return replace(read, state=replace(read.state, settings=settings))

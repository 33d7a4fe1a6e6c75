"""Every R-th document of one sequence: readers without shards of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Striped:
    """Documents `reader`, `reader` + `readers`, ... of `documents`, all of which are read. Its state is that of
    `documents`, which must have one."""

    def __init__(self, documents: Any, reader: int, readers: int) -> None:
        self._documents, self._reader, self._readers = documents, reader, readers
        # The number of the next document of the whole sequence.
        self._number = 0

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number, "of": self._documents.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._number = state["number"]
        self._documents.load_state_dict(state["of"])

    def __iter__(self) -> Iterator[Any]:
        for document in self._documents:
            number, self._number = self._number, self._number + 1
            if number % self._readers == self._reader:
                yield document

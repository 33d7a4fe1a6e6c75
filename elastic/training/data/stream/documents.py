"""The documents of one reader, epoch after epoch, and the marks from which reading resumes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from elastic.core.errors import UsageError


class Open(Protocol):
    """Opens what reader `reader` of `readers` reads in one epoch: its share of the documents, in an order of its own.

    Where the iterable has `state_dict` and `load_state_dict`, reading resumes from its state; the state is that after
    the document given last. Otherwise documents are counted and read again. `set_epoch` is called with the number of
    the epoch, where there is one, before a state is loaded.
    """

    def __call__(self, reader: int, readers: int) -> Iterable[Any]: ...


@dataclass(frozen=True)
class Mark:
    """The place before document `document` of `epoch`. `state` is the source's own there, as JSON text; None: from the
    beginning of the epoch on, documents are counted."""

    epoch: int = 0
    document: int = 0
    state: str | None = None


class Documents:
    """Training thread or loading process only. `epoch` is the one that is being read, from `source`."""

    source: Any
    # That of the source after the documents taken.
    _state: str | None
    # The document that was read to see whether there is another one, and whether there was none.
    _ahead: list[Any]
    _ended: bool

    def __init__(self, open_: Open, reader: int, readers: int, mark: Mark | None = None) -> None:
        """Raises UsageError where the source has no document at `mark` any more."""
        self._open = open_
        self._reader, self._readers = reader, readers
        mark = mark or Mark()
        self._begin(mark.epoch, mark.state)
        self._document = mark.document
        if mark.state is None and sum(1 for _ in islice(self._iterator, mark.document)) < mark.document:
            raise UsageError(
                f"reader {reader} of {readers} has fewer than the {mark.document} documents of epoch {mark.epoch} that "
                "it has read before: its files have changed since the checkpoint"
            )

    def mark(self) -> Mark:
        """Where the next document is read from."""
        if self._ended:
            return Mark(self.epoch + 1)
        return Mark(self.epoch, self._document, self._state) if self._document else Mark(self.epoch)

    def take(self, most: int) -> list[Any]:
        """The next documents of the current epoch: `most`, fewer at its end, none when it is over."""
        taken = [*self._ahead, *islice(self._iterator, most - len(self._ahead))]
        self._document += len(taken)
        self._ahead = []
        # Until the first document after a load, the state of some sources (Hugging Face's) is their beginning.
        if taken and hasattr(self.source, "state_dict"):
            # As text at once: the source changes what it has given.
            self._state = json.dumps(self.source.state_dict(), default=_plain, separators=(",", ":"))
            # The state of some sources (torchdata's) after their last document is their beginning, too.
            self._ahead = list(islice(self._iterator, 1))
            self._ended = not self._ahead
        return taken

    def next_epoch(self, must_read: bool) -> None:
        """Raises UsageError for a reader without documents in the epoch now over, which `must_read` some."""
        if must_read and self._document == 0:
            raise UsageError(
                f"reader {self._reader} of {self._readers} has no documents: a stream needs at least one shard or file "
                "for each micro-batch of a step; use more shards, striped=True, or a larger micro-batch"
            )
        self._begin(self.epoch + 1, None)
        self._document = 0

    def _begin(self, epoch: int, state: str | None) -> None:
        self.epoch = epoch
        self._state, self._ahead, self._ended = state, [], False
        self.source = self._open(self._reader, self._readers)
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        if state is not None:
            self.source.load_state_dict(json.loads(state))
        self._iterator: Iterator[Any] = iter(self.source)


def _plain(value: Any) -> Any:
    """Numbers of numpy, which states of users' own sources hold."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UsageError(
        f"the state_dict() of a streamed source holds a {type(value).__qualname__}, which JSON cannot keep; use "
        "numbers, text, lists and dictionaries"
    )

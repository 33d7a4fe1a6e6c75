"""From one reader's documents to its samples: windows that are shuffled, a transform, packing; the state is O(1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastic.core.data.samples import SampleOrder
from elastic.core.errors import UsageError
from elastic.training import rng
from elastic.training.data.stream.content import chained, content_hash
from elastic.training.data.stream.documents import Documents, Mark, Open

Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class Pack:
    """Documents, sequences of token ids, are joined, each followed by `eos` (None: by nothing), and cut into samples of
    exactly `tokens` ids: 1-D int64 tensors. A document may continue in the next sample of the same reader."""

    tokens: int
    eos: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError(f"Pack(tokens={self.tokens}): a sample needs at least one token")


@dataclass(frozen=True)
class Stages:
    """What is made of documents. Windows of `window` documents of one epoch are shuffled; 1 leaves their order."""

    open: Open
    window: int = 1
    pack: Pack | None = None
    transform: Transform | None = None


class EpochEnded(Exception):
    """The next sample is not of the epochs that were asked for."""


@dataclass(frozen=True)
class _Begin:
    """Where a sample begins: the mark before the window and its hash, the documents of it that are used up, and of the
    next one the tokens that are (`tokens`: all that it has)."""

    mark: Mark
    window_hash: int
    used: int
    offset: int
    tokens: np.ndarray[Any, np.dtype[np.int64]]

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.mark.epoch,
            "document": self.mark.document,
            "source": self.mark.state,
            "used": self.used,
            "offset": self.offset,
            "window": f"{self.window_hash:x}",
            "tokens": f"{content_hash(self.tokens):x}" if self.offset else "0",
        }


class Pipeline:
    """The samples of one reader, epoch after epoch. A packed sample belongs to the epoch in which it ends.

    The state is the mark before the window in which the next sample begins, the number of its documents that are used
    up, and the tokens of the next one that are. On resume the window is read again, and must be the same.
    """

    def __init__(
        self, stages: Stages, seed: int, reader: int, readers: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """Raises UsageError where what was read before is not read again."""
        self._stages = stages
        self._reader = reader
        self._seed = seed
        self._mark = Mark() if state is None else Mark(state["epoch"], state["document"], state["source"])
        self._documents = Documents(stages.open, reader, readers, self._mark)
        self._window: list[Any] = []
        self._order: list[int] = []
        self._hash = 0
        self._used = 0
        # Tokens of the document under way: all of them, and how many are in samples already.
        self._tokens = np.empty(0, np.int64)
        self._offset = 0
        # Of a packed sample that is not full at the end of an epoch: its tokens so far, and where it began.
        self._filled = 0
        self._began: _Begin | None = None
        # The last epoch that may be read; None: every one.
        self._until: int | None = None
        if state is not None and (state["used"] or state["offset"]):
            self._resume(state)

    @property
    def source(self) -> Any:
        """What documents are read from now."""
        return self._documents.source

    def state(self) -> dict[str, Any]:
        """JSON: where the next sample begins."""
        return (self._began or self._here()).state()

    def next(self, until: int | None = None) -> Any:
        """The next sample, of epochs up to `until` (None: of any). Raises EpochEnded where these have none left, and
        UsageError for documents that cannot be packed, and what source and transform do."""
        self._until = until
        return self._document() if self._stages.pack is None else self._packed(self._stages.pack)

    def _here(self) -> _Begin:
        return _Begin(self._mark, self._hash, self._used, self._offset, self._tokens)

    def _packed(self, pack: Pack) -> torch.Tensor:
        if self._began is None:
            self._began, self._filled = self._here(), 0
            self._sample = np.empty(pack.tokens, np.int64)
        while self._filled < pack.tokens:
            if self._offset == 0:
                self._tokens = self._tokenized(pack)
            part = self._tokens[self._offset : self._offset + pack.tokens - self._filled]
            self._sample[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self._offset += len(part)
            if self._offset == len(self._tokens):
                self._offset = 0
                self._use_up()
        self._began = None
        return torch.from_numpy(self._sample)

    def _document(self) -> Any:
        document = self._current()
        self._use_up()
        return document

    def _current(self) -> Any:
        """The next document, transformed. It stays the next one until it is used up."""
        if not self._window:
            self._fill()
        number = self._order[self._used]
        document, transform = self._window[number], self._stages.transform
        if transform is None:
            return document
        # Named by the document, so that it is the same whoever transforms it, and how often.
        rng.seed_host(self._seed, "transform", self._reader, self._mark.epoch, self._mark.document + number)
        return transform(document)

    def _use_up(self) -> None:
        self._used += 1
        if self._used == len(self._window):
            self._window, self._used, self._hash = [], 0, 0
            self._mark = self._documents.mark()

    def _beyond(self, further: int = 0) -> bool:
        """Is the epoch that is read, or the one after it, none of those that were asked for?"""
        return self._until is not None and self._documents.epoch + further > self._until

    def _fill(self) -> None:
        """Read the next window. An epoch's last one may be short: no window reaches over into the next epoch."""
        # A state at the end of an epoch is that of the next one's beginning.
        while not (window := [] if self._beyond() else self._documents.take(self._stages.window)):
            if self._beyond(1):
                raise EpochEnded
            # Where epochs are counted, a reader may have none of a small one's documents.
            self._documents.next_epoch(must_read=self._until is None)
            self._mark = self._documents.mark()
        self._window, self._hash = window, 0
        for document in window:
            self._hash = chained(self._hash, content_hash(document, strict=False))
        stream = rng.derive(self._seed, "window", self._reader, self._mark.epoch, self._mark.document)
        self._order = SampleOrder(len(window), stream, self._stages.window > 1).indices(0, len(window))

    def _resume(self, state: Mapping[str, Any]) -> None:
        mark = self._mark
        self._fill()
        if (self._mark, f"{self._hash:x}") != (mark, state["window"]):
            raise UsageError(
                f"reader {self._reader} reads other documents than before from document {mark.document} of epoch "
                f"{mark.epoch} on: its files have changed since the checkpoint, or what it reads is random; "
                "random changes belong into transform=, which is seeded"
            )
        self._used, self._offset = state["used"], state["offset"]
        if self._offset:
            assert self._stages.pack is not None
            self._tokens = self._tokenized(self._stages.pack)
            if f"{content_hash(self._tokens):x}" != state["tokens"]:
                raise UsageError(
                    f"transform= makes other tokens of a document of reader {self._reader} than before (document "
                    f"{mark.document + self._order[self._used]} of epoch {mark.epoch}): it has changed since the "
                    "checkpoint, or it is random by other means than torch, numpy and random, which are seeded"
                )

    def _tokenized(self, pack: Pack) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens of the next document that has any, its `eos` included."""
        epoch = self._mark.epoch
        while self._until is not None or self._mark.epoch <= epoch + 1:
            document = self._current()
            tokens = np.asarray(document)
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise UsageError(
                    f"Pack needs token ids, but a document of reader {self._reader} is a {type(document).__name__}: "
                    "transform= must return a list or a 1-D array of integers"
                )
            whole = tokens.astype(np.int64) if pack.eos is None else np.append(tokens, pack.eos).astype(np.int64)
            if whole.size:
                return whole
            self._use_up()
        raise UsageError(f"no document of reader {self._reader} in epoch {epoch + 1} has any tokens: see transform=")

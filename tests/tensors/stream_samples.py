"""Sources of streams whose every document is known."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

SEED = 11
DOCUMENTS = 9


def documents(reader: int, epoch: int = 0) -> list[list[int]]:
    """Token lists of 0 to 6 tokens, each document of the run another; other documents in another epoch."""
    lengths = random.Random(f"{reader} {epoch}")
    return [[reader, epoch, number, *range(4)][: lengths.choice([0, 3, 4, 7])] for number in range(DOCUMENTS)]


class Numbers:
    """With a state. As Hugging Face's, its state after a load is the beginning until the first document."""

    def __init__(self, reader: int, readers: int) -> None:
        self.reader, self.epoch, self.at, self.begun = reader, 0, 0, False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": np.int64(self.at if self.begun else 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[list[int]]:
        for document in documents(self.reader, self.epoch)[self.at :]:
            self.at, self.begun = self.at + 1, True
            yield document


def counted(reader: int, readers: int) -> Iterable[list[int]]:
    """Without a state, and without epochs of its own."""
    return iter(documents(reader))


def added(document: list[int]) -> list[int]:
    """Random, by torch's, numpy's and Python's generators."""
    return [*document, int(torch.randint(100, ())), int(np.random.randint(100)), random.randrange(100)]


def shown(samples: Iterable[Any]) -> list[list[int]]:
    return [list(map(int, sample)) for sample in samples]


class Ahead:
    """In the place of torch's DataLoader with one process: reads as far ahead, and sends what it has read, but in this
    process, so that thousands of cases take seconds."""

    def __init__(self, dataset: Iterable[Any], num_workers: int, prefetch_factor: int, **_: Any) -> None:
        assert num_workers == 1
        self._dataset, self._prefetched = dataset, prefetch_factor

    def __iter__(self) -> Iterator[Any]:
        source = map(copy.deepcopy, self._dataset)
        ahead = deque(islice(source, self._prefetched))
        while ahead:
            item = ahead.popleft()
            ahead.extend(islice(source, 1))
            yield item

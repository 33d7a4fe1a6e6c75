"""One reader of a run: its samples by count, the chain of their hashes, and mixtures of streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from elastic.training import rng
from elastic.training.data.stream.content import chained, content_hash, reader_sum
from elastic.training.data.stream.pipeline import EpochEnded, Pipeline, Stages

_DRAWS = 1 << 63


@dataclass(frozen=True)
class Parts:
    """One or more streams; each sample is of one of them, chosen by (seed, reader, count) with these weights."""

    stages: tuple[Stages, ...]
    weights: tuple[float, ...]

    def chosen(self, seed: int, reader: int, count: int) -> Iterator[int]:
        """The part of which the reader's sample `count` is; then those of which it is where the ones before are at the
        end of their epoch. What is drawn does not depend on which are, and of the others each keeps its share."""
        left = list(range(len(self.stages)))
        while len(left) > 1:
            reached = list(accumulate(self.weights[part] for part in left))
            again = (len(self.stages) - len(left),) if len(left) < len(self.stages) else ()
            drawn = rng.derive(seed, "mixture", reader, count, *again) / _DRAWS * reached[-1]
            yield left.pop(min(bisect_right(reached, drawn), len(left) - 1))
        yield left[0]

    def begin(self, epoch: int = 0) -> dict[str, Any]:
        """The state of a reader that has read nothing yet, and begins with `epoch`."""
        part = {"epoch": epoch, "document": 0, "source": None, "used": 0, "offset": 0} if epoch else None
        return {"count": 0, "chain": "0", "parts": [part] * len(self.stages)}


class Reader:
    """`count` samples were read; `chain` is over the content of all of them, from the beginning of the run."""

    def __init__(
        self, parts: Parts, seed: int, reader: int, readers: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """`state` is what `state()` gave. Raises UsageError where what was read before is not read again."""
        state = state or parts.begin()
        self._parts = parts
        self._seed = seed
        self.number = reader
        self.count = int(state["count"])
        self.chain = int(state["chain"], 16)
        self._pipelines = [
            Pipeline(stages, rng.derive(seed, "stream", number), reader, readers, part)
            for number, (stages, part) in enumerate(zip(parts.stages, state["parts"], strict=True))
        ]

    @property
    def sources(self) -> list[Any]:
        """What documents are read from now."""
        return [pipeline.source for pipeline in self._pipelines]

    def state(self) -> dict[str, Any]:
        """JSON: what the next sample is, for this reader in another process."""
        parts = [pipeline.state() for pipeline in self._pipelines]
        return {"count": self.count, "chain": f"{self.chain:x}", "parts": parts}

    def read(self, count: int, samples: int) -> list[Any]:
        """The samples from `count` on. Samples before it, which the run leaves out, are read and dropped."""
        assert count >= self.count, f"reader {self.number} is at sample {self.count} and cannot go back to {count}"
        while self.count < count:
            self._next()
        return [self._next() for _ in range(samples)]

    def take(self, samples: int, epoch: int) -> list[Any]:
        """The next samples of `epoch`, fewer than `samples` at its end, none when it is over."""
        taken: list[Any] = []
        try:
            while len(taken) < samples:
                taken.append(self._next(epoch))
        except EpochEnded:
            pass
        return taken

    @property
    def sum(self) -> int:
        """What this reader adds to the sum of the step that it has just read for."""
        return reader_sum(self.number, self.count, self.chain)

    def _next(self, until: int | None = None) -> Any:
        """Raises EpochEnded where no part has a sample of the epochs up to `until`."""
        sample = self._drawn(until)
        self.chain = chained(self.chain, content_hash(sample))
        self.count += 1
        return sample

    def _drawn(self, until: int | None) -> Any:
        for part in self._parts.chosen(self._seed, self.number, self.count):
            try:
                return self._pipelines[part].next(until)
            except EpochEnded:
                continue
        raise EpochEnded

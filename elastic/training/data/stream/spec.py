"""What users write: `elastic.data.stream(...)` and `elastic.data.mix(...)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.core.errors import UsageError
from elastic.training.data.stream.documents import Open
from elastic.training.data.stream.pipeline import Pack, Stages, Transform
from elastic.training.data.stream.reader import Parts


@dataclass(frozen=True)
class Stream:
    """A run's streamed training data. `facts` name what defines its order besides seed and batches; they are kept with
    every checkpoint, and a run with others cannot continue from it."""

    parts: Parts
    facts: tuple[tuple[str, str], ...]
    # Each reader begins anew by itself; otherwise the run counts epochs, as it does where the job has `epochs`.
    repeat: bool = True

    def check(self, readers: int) -> None:
        """Raises UsageError where a source cannot be shared between so many readers."""
        for stages in self.parts.stages:
            if hasattr(stages.open, "check"):
                stages.open.check(readers)


def stream(
    open: Open,
    *,
    shuffle_window: int = 0,
    pack: Pack | None = None,
    transform: Transform | None = None,
    repeat: bool = True,
    fingerprint: str | None = None,
) -> Stream:
    """Training data that is read in order and has no random access, for `elastic.initialize(training_data=...)`.

    `open(reader, readers)` returns an iterable over the documents of one reader; there are `readers` of them, one for
    each micro-batch of a step, whatever the number of workers. `elastic.data.jsonl`, `text`, `webdataset` and
    `hugging_face` give such functions. Windows of `shuffle_window` documents are shuffled (0: none). `transform` is
    applied to each document, with torch, numpy and `random` seeded for it. `pack` cuts token ids into samples of equal
    length.

    With `repeat` a reader that is at its end begins its next epoch by itself, and the run is bounded by `max_steps`.
    Without, and where the job has `epochs`, the run has epochs: each `for batch in loader` is one of them, in which
    every document is read once; steps near its end are short. A packed sample belongs to the epoch in which it ends.

    `fingerprint` stands for the content: a checkpoint is not continued with another one. Raises UsageError.
    """
    if not callable(open):
        raise UsageError(f"elastic.data.stream takes a function open(reader, readers), not a {type(open).__qualname__}")
    if shuffle_window < 0:
        raise UsageError(f"shuffle_window must be at least 0, got {shuffle_window}")
    if fingerprint is None and hasattr(open, "fingerprint"):
        fingerprint = str(open.fingerprint())
    window = max(shuffle_window, 1)
    facts = {
        "streamed files": fingerprint or "unknown",
        "shuffle_window": str(window),
        "pack": "none" if pack is None else f"{pack.tokens} tokens, eos {pack.eos}",
    }
    return Stream(Parts((Stages(open, window, pack, transform),), (1.0,)), tuple(facts.items()), repeat)


def mix(streams: Iterable[Stream], weights: Sequence[float]) -> Stream:
    """Each sample comes from one of the streams, drawn with these weights (any positive numbers) by seed, reader and
    the sample's number: the same at every world size and after every resume.

    Where the run has epochs, one ends with the last of the streams: a stream that is at its end gives nothing more, and
    the others keep their shares among themselves. Raises UsageError."""
    mixed = tuple(streams)
    if len(mixed) < 2 or len(mixed) != len(weights) or not all(0 < weight < math.inf for weight in weights):
        raise UsageError(
            f"elastic.data.mix takes two or more streams and one positive weight for each, got {len(mixed)} streams "
            f"and the weights {list(weights)}"
        )
    if any(len(one.parts.stages) > 1 for one in mixed):
        raise UsageError("elastic.data.mix cannot mix a mixture; give all streams to one call")
    if len({one.repeat for one in mixed}) > 1:
        raise UsageError("elastic.data.mix: some of the streams have repeat=False and others not; set it for all alike")
    parts = Parts(tuple(one.parts.stages[0] for one in mixed), tuple(map(float, weights)))
    facts = {f"{name} of stream {number}": value for number, one in enumerate(mixed) for name, value in one.facts}
    facts["weights of the mixture"] = ", ".join(f"{weight:g}" for weight in weights)
    return Stream(parts, tuple(facts.items()), mixed[0].repeat)

"""The processes that read a dataset: they stay with a function that stays in its loop, and so does what they cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0


class ReadingProcesses:
    """Of one source on one rank. `open` for each generation, which ends with `release`; `close` with the function, or
    where `stay` was not called. Training thread only."""

    def __init__(self) -> None:
        self._stay = False
        self._loader: DataLoader[Any] | None = None
        self._batches = _Batches()
        # How many generations there were, as the processes see it: what is asked for in one before is not read.
        self._now: torch.Tensor | None = None

    def stay(self) -> None:
        self._stay = True

    def open(self, dataset: Dataset[Any], batches: Iterable[Any], how: Mapping[str, Any]) -> Iterator[Any]:
        """Reads `dataset` by the items of `batches`, in their order. `how`: of torch's DataLoader; with the dataset it
        is the same in each generation."""
        if self._now is None:
            self._now = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._batches.now, self._batches.number = batches, int(self._now)
        if (same := self._continued()) is not None:
            return same
        self._loader = DataLoader(
            _Current(dataset, self._now), batch_sampler=self._batches, persistent_workers=True, **how
        )
        return iter(self._loader)

    def _continued(self) -> Iterator[Any] | None:
        """By the processes that there are, once each has done with the sample at hand; None where they cannot."""
        if self._loader is None:
            return None
        before: Any = self._loader._iterator
        # As long as torch waits for them when it ends them.
        before._timeout = _PATIENCE_S
        try:
            return iter(self._loader)
        except RuntimeError as error:
            # One of them was killed meanwhile, for memory, say, or hangs in its sample.
            logger.warning("the processes that read the data are started again: %s", error)
            self.close()
            return None
        finally:
            before._timeout = 0

    def release(self) -> None:
        """What was asked for and is not read yet is not needed any more."""
        self._batches.now = ()
        if self._now is not None:
            self._now += 1
        if not self._stay:
            self.close()

    def close(self) -> None:
        """End them now, not when the garbage collector finds them."""
        loader, self._loader = self._loader, None
        shut: Callable[[], None] | None = getattr(getattr(loader, "_iterator", None), "_shutdown_workers", None)
        if shut is not None:
            shut()


class _Batches:
    """A DataLoader keeps its batch sampler for good; what it gives is that of the generation."""

    def __init__(self) -> None:
        self.now: Iterable[Any] = ()
        self.number = 0

    def __iter__(self) -> Iterator[Any]:
        return ([(self.number, place) for place in batch] for batch in self.now)


class _Current(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], now: torch.Tensor) -> None:
        self._dataset, self._now = dataset, now

    def __getitem__(self, numbered: tuple[int, Any]) -> Any:
        number, place = numbered
        if number != int(self._now):
            raise LookupError("nobody waits for this sample any more: its generation is over")
        return self._dataset[place]

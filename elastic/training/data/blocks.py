"""Map-style data that is read in runs of neighbours: remote shards, memory-mapped tables, chunks in a cache."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from elastic.core.errors import UsageError


class InBlocks(Dataset[Any]):
    """`dataset`, whose shuffled order is local: see `core.data.samples.SampleOrder`."""

    def __init__(self, dataset: Any, block: int, at_once: int) -> None:
        if block < 1 or at_once < 1:
            raise UsageError(f"elastic.data.in_blocks: block and at_once must be at least 1, got {block} and {at_once}")
        self.dataset, self.block, self.at_once = dataset, block, at_once

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def in_blocks(dataset: Any, block: int, at_once: int = 8) -> InBlocks:
    """A map-style dataset whose epochs read `at_once` blocks of `block` neighbouring samples at a time, in a shuffled
    order, instead of any sample anywhere. `block` is best the number of samples in a chunk of the dataset's own (a
    shard of LitData, mosaic or wids, a row group): each is then read once per epoch and rank that shares it.

    Raises UsageError.
    """
    return InBlocks(dataset, block, at_once)

"""Sequences shared by the ranks of a cell (`mesh: {sp: N}` in the job file): docs/parallelism.md."""

from __future__ import annotations

from elastic.training.user.sequence import attention, gather, group, mean, rank, size, split

__all__ = ["attention", "gather", "group", "mean", "rank", "size", "split"]

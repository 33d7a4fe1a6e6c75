"""How torch's allocator is set up on a device that one process uses for generations of many sizes."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# torch 2.13 reads these, the first time that it needs its allocator's settings. CUDA's allocator asks for the second,
# older name first: where either is set, it is the user's, and whole.
_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SETTINGS = "expandable_segments:True"


def let_segments_grow(environment: MutableMapping[str, str] | None = None) -> None:
    """Have the allocator map pages into segments that grow, instead of one fixed segment per large allocation.

    Every world size has shards and buckets of its own sizes. A fixed segment in which the training function keeps one
    small tensor cannot be given back, and is too small for the next generation's larger shard. Settings of the
    environment (None: this process's) are kept. Call it before torch allocates on a device; nothing changes on the CPU.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in _NAMES):
        environment[_NAMES[0]] = _SETTINGS

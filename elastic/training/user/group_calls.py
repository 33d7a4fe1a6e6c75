"""`destroy_process_group` in a training function: the groups are the platform's, which needs them after its last line.

Scripts for torchrun end with it, and accelerate's `end_training` calls it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch.distributed as dist

from elastic.training.watch.once import warn_once

logger = logging.getLogger(__name__)

_kept = False


def keep() -> None:
    """From here on a call for all groups does nothing."""
    global _kept
    _kept = True
    _install()


def release() -> None:
    global _kept
    _kept = False


@functools.cache
def _install() -> None:
    """Once per process."""
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if _kept and (group is None or group is dist.group.WORLD):
            warn_once(
                logger,
                "torch.distributed.destroy_process_group: nothing is done, the process groups are the platform's, "
                "which closes them when the training function has returned",
            )
            return
        original(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group

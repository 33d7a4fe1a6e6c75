"""What several of these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def as_rank() -> Iterator[Any]:
    """Makes this process a rank of a world, under torch's fake process group; again for another one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from elastic.engines.fsdp2.meshes import forget_meshes

    def begin(rank: int, size: int) -> None:
        if dist.is_initialized():
            end()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    def end() -> None:
        forget_meshes()
        dist.destroy_process_group()

    yield begin
    end()

"""What a set-up finds out of the functions of all ranks when a generation is joined."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from elastic.training.in_loop.own_collectives import OwnCollectives
from elastic.training.in_loop.set_up import SetUp


@pytest.mark.parametrize(
    ("shown", "called", "alike"),
    [((5, 5), (False, False), True), ((5, 4), (False, False), False), ((5, 5), (False, True), False)],
    ids=["alike", "one was not shown", "one begins"],
)
def test_functions_are_alike_that_were_shown_the_same(
    shown: tuple[int, int], called: tuple[bool, bool], alike: bool
) -> None:
    """One of them may have heard of the loss before the end of its step."""
    store = dist.HashStore()
    spec = SimpleNamespace(world_size=2, generation=3)
    group: Any = SimpleNamespace(spec=spec, store=store, collectives=lambda: 0, know=lambda _: None)

    def join(rank: int) -> bool:
        set_up = SetUp()
        set_up.joined(group, called=called[rank], own=OwnCollectives(), shown=shown[rank])
        return set_up.alike

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, (0, 1))) == [alike, alike]

"""What torch.compile takes for constant, in a process whose rank and world size change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from elastic.engines.model.compiled import compiles, graphs, guard_ranks


def _over_world_size(x: torch.Tensor) -> torch.Tensor:
    return 2 * x / dist.get_world_size()


def _where_there_are_others(x: torch.Tensor) -> torch.Tensor:
    x = 2 * x
    return x / dist.get_world_size() if dist.is_available() and dist.is_initialized() else x


def _by_rank(x: torch.Tensor) -> torch.Tensor:
    x = 2 * x
    return x + dist.get_rank() if dist.is_initialized() else x


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("asks", [_over_world_size, _where_there_are_others, _by_rank])
@pytest.mark.filterwarnings("ignore")
def test_a_graph_does_not_keep_the_ranks_of_another_generation(asks: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Seen: torch writes them into the graph, and a survivor's loss was divided by the world size of before."""
    guard_ranks()
    compiled, x = torch.compile(asks, backend="eager"), torch.ones(3)
    if asks is not _over_world_size:
        assert torch.equal(compiled(x), asks(x))
    for world_size, rank in ((4, 3), (3, 1), (3, 2), (4, 3)):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
        try:
            before = graphs()
            for _ in range(2):
                assert torch.equal(compiled(x), asks(x)), (world_size, rank)
            assert graphs() <= before + 1, "what has not changed is not compiled again"
        finally:
            dist.destroy_process_group()
        if asks is not _over_world_size:
            assert torch.equal(compiled(x), asks(x)), "between two generations"
    assert compiles()

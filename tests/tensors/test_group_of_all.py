"""A group of all ranks, as the script has it: what torch's own would do."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from elastic.training.in_loop.group_of_all import GroupOfAll


@pytest.fixture
def behind() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def _of(behind: Any, kept: list[int]) -> GroupOfAll:
    group = GroupOfAll(lambda: None, lambda: kept.append(1))
    group.behind = behind
    return group


def test_what_torchs_groups_can_do_is_done_by_the_one_behind() -> None:
    """With another torch there may be more of it."""
    own = {"boxed", "unbox"}
    for name in dir(dist.ProcessGroup):
        found = inspect.getattr_static(dist.ProcessGroup, name)
        if not name.startswith(("__", "_pybind11")) and (isinstance(found, property) or inspect.isroutine(found)):
            assert name in own or name in vars(GroupOfAll), name


def test_it_is_the_group_that_is_behind_it(behind: dist.ProcessGroup) -> None:
    group = _of(behind, kept := [])
    assert isinstance(group, dist.ProcessGroup)
    assert group == behind
    assert behind == group
    assert {behind: 1}[group] == 1
    assert group != dist.group.WORLD
    assert group != dist.GroupMember.NON_GROUP_MEMBER
    assert (dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)) == (0, 1, "gloo")
    assert (dist.get_process_group_ranks(group), dist.get_global_rank(group, 0)) == ([0], 0)
    assert kept == []


def test_collectives_are_those_of_the_group_behind(behind: dist.ProcessGroup) -> None:
    group = _of(behind, kept := [])
    before: Any = behind._get_sequence_number_for_group()
    one, found = torch.ones(2), [None]
    dist.all_reduce(one, group=group)
    dist.broadcast(one, src=0, group=group)
    waited = dist.all_reduce(one, group=group, async_op=True)
    assert waited is not None
    waited.wait()
    dist.all_gather_object(found, "here", group=group)
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    assert functional.all_reduce(one, "sum", group).tolist() == [1.0, 1.0]
    assert found == ["here"]
    assert behind._get_sequence_number_for_group() > before
    assert kept == []


def test_a_mesh_keeps_what_ends_with_the_generation(behind: dist.ProcessGroup) -> None:
    group = _of(behind, kept := [])
    DeviceMesh.from_group(group, "cpu")
    assert kept


def test_one_without_a_generation_waits_for_it(behind: dist.ProcessGroup) -> None:
    joined: list[GroupOfAll] = []

    def join() -> None:
        group.behind = behind
        joined.append(group)

    group = GroupOfAll(join, lambda: None)
    assert joined == []
    dist.barrier(group=group)
    assert dist.get_world_size(group) == 1
    assert len(joined) == 1


def test_none_is_destroyed_twice(behind: dist.ProcessGroup) -> None:
    group = _of(behind, [])
    dist.destroy_process_group(group)
    assert behind not in dist.distributed_c10d._world.pg_map
    with pytest.raises(ValueError, match=r"(?i)group"):
        dist.destroy_process_group(group)

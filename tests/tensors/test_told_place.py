"""Ahead of its generation the training function is told its place as soon as there is one to tell."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elastic
from elastic.runtime.worker.ray_train_face import ContextFace
from elastic.training.in_loop.ahead import Ahead, asker, listen, until_needed


def _ahead(places: list[tuple[int, int] | None], begins: list[bool]) -> Ahead:
    device = torch.device("cpu")
    kind: Any = SimpleNamespace(name="deepspeed", answer_user_calls=lambda *_: None, device=lambda _: ("gloo", device))
    first: Any = None
    return Ahead("run", 1, kind, first, begins=lambda _: begins.pop(0), place=lambda: places.pop(0))


class Joined(Exception):
    pass


def _join(model: Any, told: tuple[int, int] | None) -> None:
    raise Joined(told)


def test_a_spare_is_told_when_the_run_has_begun() -> None:
    """It has asked before the first step."""
    asked: list[str] = []
    places: list[tuple[int, int] | None] = [None, None, (3, 4)]
    ahead, get_rank = _ahead(places, [False, False]), dist.get_rank
    listen(lambda: asked.append(asker()))
    with until_needed(ahead, _join):
        assert os.environ["LOCAL_RANK"] == "0"
        assert asked == []
        assert (os.environ["RANK"], os.environ.get("WORLD_SIZE")) == ("3", "4")
        assert (dist.get_rank(), dist.get_world_size()) == (3, 4)
        face = ContextFace()
        assert (face.get_world_rank(), face.get_world_size(), face.get_local_rank()) == (3, 4, 0)
        assert places == []
        # For its rank: nobody does one thing on a certain worker for the world size.
        assert asked == [__name__.partition(".")[0]] * 3
        with pytest.raises(Joined) as told:
            dist.barrier()
        assert told.value.args == ((3, 4),)
    listen(None)
    assert dist.get_rank is get_rank
    assert "RANK" not in os.environ


def test_one_whose_generation_begins_first_is_told_by_that() -> None:
    with until_needed(_ahead([None, None], [False, True]), _join), pytest.raises(Joined) as told:
        os.environ["RANK"]
    assert told.value.args == (None,)


def test_what_a_context_can_say_it_says() -> None:
    """The step, the generation and the mesh are those of its generation."""
    asked: list[str] = []
    listen(lambda: asked.append(asker()))
    with until_needed(_ahead([(3, 4)], []), _join):
        here = elastic.get_context()
        assert (here.device, here.local_rank, here.run_id) == (torch.device("cpu"), 0, "run")
        with pytest.raises(Joined) as told:
            here.step  # noqa: B018
        assert told.value.args == (None,), "nothing was told of its place"
    with until_needed(_ahead([(3, 4)], []), _join):
        here = elastic.get_context()
        assert (here.world_size, asked) == (4, [])
        assert (here.rank, asked) == (3, [__name__.partition(".")[0]])
        with pytest.raises(Joined) as told:
            here.resumed  # noqa: B018
        assert told.value.args == ((3, 4),)
    listen(None)


def test_in_a_generation_the_rank_is_what_is_asked_for() -> None:
    """Up to the first batch. Nobody does one thing on one worker by the world size, or since there is a group."""
    asked: list[str] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        listen(lambda: asked.append(asker()))
        assert dist.is_initialized()
        assert dist.get_world_size() == 1
        assert asked == []
        assert dist.get_rank() == 0
        listen(None)
        assert (dist.get_rank(), len(asked)) == (0, 1)
    finally:
        listen(None)
        dist.destroy_process_group()

"""Ahead of its generation the training function is told its place as soon as there is one to tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elastic
from elastic.core.mesh import Mesh, MeshSettings
from elastic.engines import foreign_loops
from elastic.runtime.worker.ray_train_face import ContextFace
from elastic.training.in_loop.ahead import Ahead, listen, until_needed
from elastic.training.in_loop.set_up import SetUp
from elastic.training.user import accelerate_calls


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    """As the generation that is joined does, when it ends. Seen: accelerate trained in no later test."""
    yield
    foreign_loops.allow()
    accelerate_calls.left()


def _ahead(
    places: list[tuple[int, int] | None], begins: list[bool], mesh: Callable[[int], Mesh] | None = None
) -> Ahead:
    device = torch.device("cpu")
    kind: Any = SimpleNamespace(name="deepspeed", answer_user_calls=lambda *_: None, device=lambda _: ("gloo", device))
    first: Any = None
    return Ahead("run", 1, kind, first, begins=lambda _: begins.pop(0), place=lambda: places.pop(0), mesh=mesh)


class Joined(Exception):
    pass


def _join(model: Any, told: tuple[int, int] | None) -> None:
    raise Joined(told)


def test_a_spare_is_told_when_the_run_has_begun() -> None:
    """It has asked before the first step."""
    asked: list[int] = []
    places: list[tuple[int, int] | None] = [None, None, (3, 4)]
    ahead, get_rank = _ahead(places, [False, False]), dist.get_rank
    listen(lambda: asked.append(1))
    with until_needed(ahead, _join):
        assert os.environ["LOCAL_RANK"] == "0"
        assert asked == []
        assert (os.environ["RANK"], os.environ.get("WORLD_SIZE")) == ("3", "4")
        assert (dist.get_rank(), dist.get_world_size()) == (3, 4)
        face = ContextFace()
        assert (face.get_world_rank(), face.get_world_size(), face.get_local_rank()) == (3, 4, 0)
        assert places == []
        # For its rank: nobody does one thing on a certain worker for the world size.
        assert len(asked) == 3
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
    """The step and the generation are those of its generation."""
    asked: list[int] = []
    listen(lambda: asked.append(1))
    with until_needed(_ahead([(3, 4)], []), _join):
        here = elastic.get_context()
        assert (here.device, here.local_rank, here.run_id) == (torch.device("cpu"), 0, "run")
        with pytest.raises(Joined) as told:
            here.step  # noqa: B018
        assert told.value.args == (None,), "nothing was told of its place"
    with until_needed(_ahead([(3, 4)], []), _join):
        here = elastic.get_context()
        assert (here.world_size, asked) == (4, [])
        assert (here.rank, asked) == (3, [1])
        with pytest.raises(Joined) as told:
            here.resumed  # noqa: B018
        assert told.value.args == ((3, 4),)
    listen(None)


def test_the_mesh_follows_from_the_place() -> None:
    mesh = MeshSettings(tp=2, pp=2).mesh
    with until_needed(_ahead([(6, 8)], [], mesh), _join):
        here = elastic.get_context()
        assert here.mesh == {"dp": 2, "sp": 1, "tp": 2, "ep": 1, "pp": 2}
        assert here.coordinates == {"dp": 1, "sp": 0, "tp": 0, "ep": 0, "pp": 1}
        with pytest.raises(Joined) as told:
            here.epoch  # noqa: B018
        assert told.value.args == ((6, 8),), "the place was told with it"


@pytest.mark.parametrize("asked", ["mesh", "coordinates"])
def test_a_mesh_that_may_change_is_waited_for(asked: str) -> None:
    with until_needed(_ahead([(6, 8)], []), _join), pytest.raises(Joined) as told:
        getattr(elastic.get_context(), asked)
    assert told.value.args == (None,)


def test_in_a_generation_the_rank_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first batch. Nobody does one thing on one worker by the world size, or since there is a group."""
    asked: list[int] = []
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        listen(lambda: asked.append(1))
        assert dist.is_initialized()
        assert dist.get_world_size() == 1
        # Seen: torch.compile imports networkx, which looks for its own among all variables.
        assert os.environ.copy()["RANK"] == dict(os.environ.items())["RANK"] == "0"
        assert "0" in os.environ.values()
        assert asked == []
        assert (os.environ["RANK"], os.environ.get("RANK"), os.getenv("RANK"), dist.get_rank()) == ("0", "0", "0", 0)
        listen(None)
        assert (dist.get_rank(), len(asked)) == (0, 4)
    finally:
        listen(None)
        dist.destroy_process_group()


def test_who_has_asked_for_the_rank_is_named_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that hand on what torch or the environment says. torch's own log asks for each line."""
    monkeypatch.setenv("RANK", "0")
    set_up, library = SetUp(), {"__name__": "library.parts", "os": os}
    set_up.begins()
    try:
        exec("rank = int(os.environ.get('RANK', 0))", library)
        assert (library["rank"], set_up.rank_known_to) == (0, {"library"})
        exec("os.environ['RANK']", {"__name__": "torch._logging._internal", "os": os})
        assert set_up.rank_known_to == {"library", "torch"}
        set_up.rank_known_to.remove("torch")
        exec("os.environ['RANK']", {"__name__": "torch.distributed.rendezvous", "os": os})
        assert os.environ["RANK"] == "0"
        assert set_up.rank_known_to == {"library", __name__.partition(".")[0]}
    finally:
        set_up.closed()

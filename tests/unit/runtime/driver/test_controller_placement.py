"""Where the controller goes: off the head where there is another choice, and away from workers where there is room."""

from __future__ import annotations

from elastic.runtime.driver.controller_placement import Node, choose

_WORKER = {"CPU": 1.0, "GPU": 1.0}


def _node(name: str, address: str, head: bool = False, **resources: float) -> Node:
    mark = {"node:__internal_head__": 1.0} if head else {}
    return Node(name, address, {f"node:{address}": 1.0, "CPU": 8.0, "memory": 1e9, **resources, **mark})


def test_on_one_machine_it_is_on_the_head_and_nowhere_else() -> None:
    nodes = [_node("b", "127.0.0.1", GPU=1), _node("a", "127.0.0.1", head=True)]
    place = choose(nodes, "b", _WORKER)
    assert (place.node_id, place.only) == ("a", True)


def test_it_stays_with_a_driver_that_is_not_on_the_head() -> None:
    nodes = [_node("a", "10.0.0.1", head=True), _node("b", "10.0.0.2", GPU=8), _node("c", "10.0.0.3")]
    place = choose(nodes, "b", _WORKER)
    assert (place.node_id, place.only) == ("b", False)


def test_a_driver_on_the_head_sends_it_to_a_node_that_no_worker_fits_on() -> None:
    nodes = [_node("a", "10.0.0.1", head=True), _node("b", "10.0.0.2", GPU=8), _node("c", "10.0.0.3")]
    place = choose(nodes, "a", _WORKER)
    assert (place.node_id, place.only, place.reason) == ("c", False, "no worker fits there")


def test_where_workers_fit_everywhere_it_takes_the_smallest_node_that_is_not_the_head() -> None:
    nodes = [
        _node("a", "10.0.0.1", head=True, GPU=1),
        _node("b", "10.0.0.2", GPU=8),
        _node("c", "10.0.0.3", GPU=4),
        _node("d", "10.0.0.4", GPU=4, CPU=4.0),
    ]
    assert choose(nodes, "a", _WORKER).node_id == "d"
    # The same one whatever the order in which Ray lists them.
    assert choose(nodes[::-1], "a", _WORKER).node_id == "d"


def test_a_lone_head_has_to_do() -> None:
    assert choose([_node("a", "10.0.0.1", head=True)], "a", _WORKER).node_id == "a"

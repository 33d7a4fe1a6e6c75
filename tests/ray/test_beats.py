"""Two hundred nodes' beats and step reports on one controller, on real Ray: nobody is accused who beats.

The agents and the fleet are simulated, in a few processes; the controller's methods, its loop, its sense and their time
are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from elastic_cluster import LocalCluster
from harness import LIMIT_S, module_cluster, wait_until

from elastic.core import events as ev

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NODES, RANKS, CREWS, BEATS = 200, 8, 4, 50


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    yield from module_cluster(1, cpus_per_node=1)


def test_nobody_of_two_hundred_nodes_that_beat_is_accused_and_the_one_that_stops_is(cluster: LocalCluster) -> None:
    options = {"num_cpus": 0, "max_concurrency": 1000}
    controller: Any = ray.remote(controller_class()).options(**options).remote(NODES, RANKS)
    crews = [ray.remote(crew_class()).options(**options).remote(controller) for _ in range(CREWS)]
    members = ray.get(controller.members.remote(), timeout=LIMIT_S)
    generation = ray.get(controller.generation.remote(), timeout=LIMIT_S)
    ray.get(
        [
            crew.begin.remote({node: members[node] for node in list(members)[number::CREWS]}, generation)
            for number, crew in enumerate(crews)
        ],
        timeout=LIMIT_S,
    )

    def told() -> Any:
        return ray.get(controller.told.remote(), timeout=LIMIT_S)

    wait_until(lambda: told()["beats"] >= BEATS, f"{BEATS} beats of every node")
    assert told()["events"] == []
    assert told()["refused"] == 0
    assert told()["step"] > 0, "step reports come in between"

    silenced = next(iter(members))
    ray.get(crews[0].silence.remote(silenced), timeout=LIMIT_S)
    (accused,) = wait_until(lambda: told()["events"], "the silence of one node to be noticed")
    assert isinstance(accused, ev.WorkersSilent)
    assert (accused.nodes, accused.workers) == ((silenced,), members[silenced])
    for actor in (*crews, controller):
        ray.kill(actor)


def controller_class() -> type[Any]:
    """Made here, so that Ray sends the class and not the name of this module."""

    class Controller:
        """The methods of the controller's actor that agents call, over a fleet that is told to it."""

        def __init__(self, nodes: int, ranks: int) -> None:
            from functools import partial
            from types import SimpleNamespace

            from elastic.core import events as ev
            from elastic.core.run import machine
            from elastic.core.run.state import SlotPhase, WorkerPhase
            from elastic.core.settings import RunSettings, ScalingSettings
            from elastic.runtime.controller.actor import ControllerActor
            from elastic.runtime.controller.control_loop import ControlLoop
            from elastic.runtime.controller.hands.relays import Relays
            from elastic.runtime.controller.records import Records
            from elastic.runtime.controller.replay import Replayed

            count = nodes * ranks
            settings = RunSettings("run", scaling=ScalingSettings(ranks, count, workers_per_slot=ranks))
            self.events: list[ev.Event] = []
            self.loop = loop = ControlLoop(settings, Replayed(settings), Records(), self.events.append, lambda: None)
            now = loop.clock.now()

            def happen(*events: ev.Event) -> None:
                for event in events:
                    loop.state, _ = machine.step(loop.state, event, now)

            loop.state = machine.initial(settings, now)
            happen(ev.RunStarted())
            pending = [slot.id for slot in loop.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
            happen(*(ev.SlotPlaced(slot, f"node-{slot:03d}") for slot in pending))
            starting = [w.id for w in loop.state.fleet.workers.values() if w.phase is WorkerPhase.STARTING]
            happen(*(ev.WorkerReady(worker, worker, "host") for worker in starting))
            state = loop.state
            happen(*(ev.GroupJoined(state.generation, worker) for worker in state.members))
            happen(*(ev.TrainingReached(state.generation, worker, 0) for worker in state.members))
            loop.telemetry.generation_begins(state.generation, state.world_size, 0, now)
            self.actor: Any = SimpleNamespace(
                _ready=asyncio.Event(), _failed=None, _settings=settings, _result=None, _loop=loop,
                _journal=SimpleNamespace(incarnation=1), _relays=Relays(0),
            )  # fmt: skip
            self.actor._begun = partial(ControllerActor._begun, self.actor)
            self.actor._ready.set()
            self.methods = ControllerActor
            self.beats = dict.fromkeys(loop.state.fleet.nodes, 0)
            self.refused = 0
            self.sense = asyncio.get_running_loop().create_task(loop.heartbeats.run())

        async def beat(self, beat: Any) -> Any:
            self.beats[beat.node] += 1
            return await self.methods.beat(self.actor, beat)

        async def quiet(self, beats: Any) -> Any:
            for node in beats.nodes:
                self.beats[node] += 1
            return await self.methods.quiet(self.actor, beats)

        async def node_reports(self, reports: Any) -> Any:
            reply = await self.methods.node_reports(self.actor, reports)
            self.refused += reply is None
            return reply

        async def members(self) -> dict[str, tuple[int, ...]]:
            by_node: dict[str, tuple[int, ...]] = {}
            for worker in self.loop.state.members:
                node = self.loop.state.fleet.node_of(worker) or ""
                by_node[node] = (*by_node.get(node, ()), worker)
            return by_node

        async def generation(self) -> int:
            return self.loop.state.generation

        async def told(self) -> dict[str, Any]:
            """`beats` of the node that has sent fewest; FirstStepDone is no accusation."""
            steps = ("FirstStepDone", "StepTimeMeasured")
            accusations = [event for event in self.events if type(event).__name__ not in steps]
            step = self.loop.telemetry.step
            return {"beats": min(self.beats.values()), "events": accusations, "refused": self.refused, "step": step}

    return Controller


def crew_class() -> type[Any]:
    class Crew:
        """Agents as `AgentActor` beats: one beat, its answer, a pause. Every fifth beat is followed by a step."""

        def __init__(self, controller: Any) -> None:
            self.controller = controller
            self.silent: set[str] = set()

        async def begin(self, nodes: dict[str, tuple[int, ...]], generation: int) -> None:
            loop = asyncio.get_running_loop()
            self.tasks = [loop.create_task(self.run(*node, generation)) for node in nodes.items()]

        async def silence(self, node: str) -> None:
            self.silent.add(node)

        async def run(self, node: str, workers: tuple[int, ...], generation: int) -> None:
            from elastic.core.data.joined_reports import joined_by_step
            from elastic.core.data.steps import StepReport
            from elastic.runtime.messages import Beat, NodeReports

            number = 0
            while node not in self.silent:
                number += 1
                assert (await self.controller.beat.remote(Beat(node, dict.fromkeys(workers, 0.05)))).wanted
                if number % 5 == 0:
                    steps = joined_by_step(
                        StepReport(number // 5, 1.0, ((w, w + 1),), 1, 1.0, generation=generation, rank=w)
                        for w in workers
                    )
                    await self.controller.node_reports.remote(NodeReports((node,), workers, 1, steps))
                await asyncio.sleep(0.2)

    return Crew

"""What a controller calls the agents of ten thousand nodes for, and their answers, in one process.

Messages are pickled and read, as on their way over the network; what a call of Ray takes besides does not count.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import Held, copies_of, place_replicas, together
from elastic.core.run.state import RunState
from elastic.runtime.controller.hands.commands import Commands
from elastic.runtime.controller.hands.generation_specs import memory_plans, shared_spec
from elastic.runtime.controller.hands.relays import Relays
from elastic.runtime.controller.hands.snapshot_directory import SnapshotDirectory
from elastic.runtime.messages import Command, Handed, NodeFacts, Part, Receiver

_LIMIT_S = 600.0


class SimulatedAgents:
    """Of the members that `begin` names. `calls` are the controller's."""

    def __init__(self, state: RunState, begin: act.BeginGeneration) -> None:
        self.calls = 0
        self._settings, self._begin = state.settings, begin
        self._nodes = [state.fleet.node_of(worker) or "" for worker in begin.members]
        self._known = {
            node: NodeFacts("mailbox", ("10.0.0.1", number), "name") for number, node in enumerate(set(self._nodes))
        }
        node_of = dict(zip(begin.members, self._nodes, strict=True))
        relays = Relays(state.settings.failures.nodes_per_relay)
        handles = {node: SimpleNamespace(hand_on=SimpleNamespace(remote=self._hand_on)) for node in self._known}
        agents: Any = SimpleNamespace(at_hand=handles.get)
        self._commands = Commands(
            1, agents, node_of.__getitem__, lambda node: relays.over(node, state.fleet, 0.0), lambda event: None,
            _LIMIT_S,
        )  # fmt: skip
        self._answers: dict[tuple[str, ...], bytes] = {}
        self._held = self._snapshots()

    # --- what the executor does ---

    def end_and_begin(self) -> None:
        begin, own = self._begin, dict[int, tuple[Any, ...]]
        end = begin.generation - 1, "the connection to its agent was closed"

        async def told() -> None:
            await self._tell("end", end, own.fromkeys(begin.members, ()))
            plans = memory_plans(self._settings, self._nodes, self._known)
            spec = shared_spec(self._settings, begin, {}, self._nodes)
            await self._tell("begin", (spec, "rendezvous"), own(zip(begin.members, enumerate(plans), strict=True)))

        asyncio.run(told())

    def propose_stop(self, action: act.ProposeStop) -> list[ev.Event]:
        promises: list[ev.Event] = []

        def heard(answers: Mapping[int, tuple[int, bool]]) -> None:
            promises.extend(ev.StopPromised(action.generation, worker, *told) for worker, told in answers.items())

        asyncio.run(self._tell("propose_stop", (action.generation,), dict.fromkeys(action.workers, ()), heard))
        return promises

    def commit_stop(self, action: act.CommitStop) -> None:
        shared = action.generation, action.step, action.durable, action.last
        asyncio.run(self._tell("commit_stop", shared, dict.fromkeys(action.workers, ())))

    def survey(self) -> None:
        """To the event that tells the rules what there is."""
        ask = partial(self._commands.ask, self._itself)
        directory = SnapshotDirectory("run", self._agent_of, ask, _LIMIT_S, lambda *steps: None)
        found, missing = asyncio.run(directory.survey(tuple(self._known)))
        if missing or not copies_of(found[0]).nodes:
            raise AssertionError(f"not every shard is found: {missing}")

    def records(self) -> None:
        """Asked for once: what a manifest is made of them does not count."""
        asking = self._commands.ask(self._itself, "memory_records", dict.fromkeys(self._known, ((), 1.0)), _LIMIT_S)
        asyncio.run(_done(asking))

    # --- inside ---

    def _tell(
        self, name: str, shared: tuple[Any, ...], own: Mapping[int, tuple[Any, ...]], heard: Any = None
    ) -> Coroutine[Any, Any, None]:
        return self._commands.tell(self._itself, name, shared, own, _LIMIT_S, heard)

    async def _hand_on(self, command: Command, parts: dict[str, Part]) -> Handed:
        self.calls += 1
        stop = command.name, *parts
        if stop not in self._answers:
            answers = {
                receiver: self._answer(command.name, receiver) for part in parts.values() for receiver in part.own
            }
            self._answers[stop] = pickle.dumps(Handed(answers, {}, {}))
        else:
            pickle.dumps((command, parts))
        handed: Handed = pickle.loads(self._answers[stop])  # noqa: S301
        return handed

    def _answer(self, name: str, receiver: Receiver) -> Any:
        told: dict[str, Callable[[], Any]] = {
            "propose_stop": lambda: (9, True),
            "memory_held": lambda: self._held[str(receiver)],
            # As large as of eight ranks with ten chunks each.
            "memory_records": lambda: bytes(8000),
        }
        return told.get(name, lambda: None)()

    def _snapshots(self) -> dict[str, tuple[Held, ...]]:
        """Two, with one replica of each shard."""
        found: dict[str, list[Held]] = {node: [] for node in self._known}
        for rank, (own, (other, *_)) in enumerate(zip(self._nodes, place_replicas(self._nodes, 1), strict=True)):
            for step in (8, 9):
                found[own].append(Held(1, step, rank, len(self._nodes), False))
                found[other].append(Held(1, step, rank, len(self._nodes), True))
        return {node: together(held) for node, held in found.items()}

    async def _agent_of(self, node: str) -> tuple[Any, NodeFacts]:
        return None, self._known[node]

    async def _itself(self, receiver: Receiver, name: str, *_: Any, retry_s: float) -> Any:
        """A call that no agent has spared the controller."""
        self.calls += 1
        return self._answer(name, receiver)


async def _done(asking: Coroutine[Any, Any, Mapping[str, Any]]) -> Sequence[Any]:
    return list((await asking).values())

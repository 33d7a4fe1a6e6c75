"""What the controller learns of the nodes' memory: asked of agents that are plain objects."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from elastic.core.checkpoint.manifest import ShardRecord, StoredTensor
from elastic.core.checkpoint.snapshots import STEPS, Held, snapshot_id, steps_to_json, together
from elastic.core.errors import IntegrityError, StorageError
from elastic.core.sharding.layout import Chunk
from elastic.runtime.controller.hands.snapshot_directory import SnapshotDirectory
from elastic.runtime.messages import Assembled, NodeFacts

LIMIT_S, LOOK_S = 20.0, 0.001
IDENTIFIER = snapshot_id(8, 1)


def record(rank: int) -> ShardRecord:
    """Rank's half of one parameter of four elements."""
    return ShardRecord(
        rank=rank, world_size=2, generation=1, step=8, file=f"rank-{rank}", bytes=8, xxh3="0",
        tensors=(StoredTensor("fp32/group0", "F32", 2, 0),), chunks=(Chunk("w", 2 * rank, 2, "group0", 0),),
        digests={"fp32/w": 5}, extra_state={STEPS: steps_to_json(2, {str(rank): [{"step": 8}] if rank == 0 else []}),
                                            **({"lr": 0.5} if rank == 0 else {})},
        parameters={"w": (4,)} if rank == 0 else None,
    )  # fmt: skip


class Agent:
    """Of a node that holds these ranks' shards; `silent` never answers. Of its work on a shard `parts` are done, one
    each time it is asked how far it is; after fifty it has the records (or never, where it has so many only).
    `refuses` is its answer in place of them."""

    def __init__(
        self, number: int, ranks: Sequence[int], silent: bool = False, parts: int = 0, replicas: Sequence[int] = (),
        refuses: Exception | None = None,
    ) -> None:  # fmt: skip
        self.facts = NodeFacts("box", ("10.0.0.1", number), "memory")
        self._held = together(Held(1, 8, rank, 2, rank in replicas) for rank in (*ranks, *replicas))
        self.silent, self._refuses = silent, refuses
        self._pace, self._parts = 0, parts

    def answer(self, name: str, *arguments: Any) -> Any:
        if name == "memory_held":
            return self._held
        assert name == "memory_records"
        if self._refuses is not None:
            return self._refuses
        if self._parts and self._pace < 50:
            self._pace = min(self._pace + 1, self._parts)
            return self._pace
        (held, others), wait_s = arguments
        assert others == {}
        assert wait_s == LOOK_S
        return [record(one.rank) for one in held]


class Clock:
    """Ten seconds go by whenever somebody looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def snapshots(told: list[Any], **agents: Agent) -> SnapshotDirectory:
    return directory(lambda *steps: told.append(steps), agents)


def directory(on_steps: Any, agents: dict[str, Agent]) -> SnapshotDirectory:
    async def ask(name: str, own: Mapping[str, tuple[Any, ...]], limit_s: float) -> dict[str, Any]:
        """Not in the order in which they were asked, and each in one of the ways to have no answer."""
        assert limit_s == (LIMIT_S if name == "memory_held" else 4 * LOOK_S)
        gone = ConnectionError("node is not part of the run any more")
        answers = {
            node: agents[node].answer(name, *own[node]) if node in agents else gone for node in reversed(tuple(own))
        }
        silent = [node for node in own if node in agents and agents[node].silent]
        for node in silent:
            del answers[node]
        return answers

    async def agent_of(node: str) -> tuple[Any, NodeFacts]:
        if node not in agents:
            raise ConnectionError(f"node {node} is not part of the run any more")
        return agents[node], agents[node].facts

    return SnapshotDirectory("run", agent_of, ask, LIMIT_S, on_steps, look_s=LOOK_S, clock=Clock())


def test_a_snapshot_is_put_together_once_for_all_workers() -> None:
    told: list[Any] = []

    async def scenario() -> list[Assembled]:
        held = snapshots(told, a=Agent(1, [0]), b=Agent(2, [1]))
        assert await held.survey(["a", "b"]) != ((), ())
        held.collect(2, IDENTIFIER, ["a", "b"])
        return [await held.wait_for(IDENTIFIER) for _ in range(2)]

    first, second = asyncio.run(scenario())
    assert first is second
    manifest = first.manifest()
    assert (manifest.id, manifest.extra_state, manifest.parameters) == (IDENTIFIER, {"lr": 0.5}, {"w": (4,)})
    assert first.copies == ((("10.0.0.1", 1),), (("10.0.0.1", 2),))
    assert told == [(1, 2, {0: [{"step": 8}], 1: []})], "what a lost worker had not told any more"
    assert b"Chunk" not in pickle.dumps(first), "a worker is sent text, not half a million objects"


def test_readers_are_told_of_every_copy_and_one_that_is_gone_since_is_none() -> None:
    async def scenario() -> Assembled:
        held = directory(lambda *steps: None, agents)
        await held.survey(["a", "b", "c"])
        del agents["c"]
        held.collect(2, IDENTIFIER, ["a", "b", "c"])
        return await held.wait_for(IDENTIFIER)

    agents = {"a": Agent(1, [0], replicas=[1]), "b": Agent(2, [1], replicas=[0]), "c": Agent(3, [], replicas=[0, 1])}
    one, two = ("10.0.0.1", 1), ("10.0.0.1", 2)
    assert asyncio.run(scenario()).copies == ((one, two), (two, one))


def test_a_node_that_does_not_answer_holds_nothing_and_that_is_said() -> None:
    async def scenario() -> Any:
        held = snapshots([], a=Agent(1, [0]), b=Agent(2, [1], silent=True))
        found = await held.survey(["a", "b", "gone"])
        held.collect(2, IDENTIFIER, ["a"])
        with pytest.raises(IntegrityError, match="cannot be put together any more"):
            await held.wait_for(IDENTIFIER)
        with pytest.raises(StorageError, match="not the one that the run continues from"):
            await held.wait_for(snapshot_id(7, 1))
        return found

    found, missing = asyncio.run(scenario())
    assert found == ()
    assert missing[0] == "node b, gone did not report its snapshots in time"
    assert "no node that answers has the shard of rank 1" in missing[1]


def test_who_waits_for_a_generation_that_is_over_is_told_so() -> None:
    async def scenario() -> None:
        held = snapshots([], a=Agent(1, [0, 1]))
        await held.survey(["a"])
        held.collect(2, IDENTIFIER, ["a"])
        waiting = asyncio.ensure_future(held.wait_for(IDENTIFIER))
        await asyncio.sleep(0)
        held.collect(3, IDENTIFIER, ["a"])
        with pytest.raises(StorageError, match="is over"):
            await waiting
        assert (await held.wait_for(IDENTIFIER)).manifest().step == 8

    asyncio.run(scenario())


def test_a_node_may_take_as_long_as_it_likes_while_it_goes_on() -> None:
    async def scenario() -> Assembled:
        held = snapshots([], a=Agent(1, [0]), b=Agent(2, [1], parts=50))
        await held.survey(["a", "b"])
        held.collect(2, IDENTIFIER, ["a", "b"])
        return await held.wait_for(IDENTIFIER)

    assert asyncio.run(scenario()).manifest().step == 8


def test_a_node_that_stands_still_is_not_waited_for() -> None:
    async def scenario() -> None:
        held = snapshots([], a=Agent(1, [0]), b=Agent(2, [1], parts=49))
        await held.survey(["a", "b"])
        held.collect(2, IDENTIFIER, ["a", "b"])
        with pytest.raises(StorageError, match="does not answer: node b has stood still for 30 s"):
            await held.wait_for(IDENTIFIER)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (IntegrityError("its bytes are damaged"), IntegrityError, "its bytes are damaged"),
        (StorageError("rank 0 cannot be read"), StorageError, "does not answer: rank 0 cannot be read"),
        (ConnectionError("the actor died"), StorageError, "does not answer: the actor died"),
    ],
)
def test_what_a_node_says_in_place_of_its_records_is_told(answer: Exception, kind: type[Exception], told: str) -> None:
    async def scenario() -> None:
        held = snapshots([], a=Agent(1, [0]), b=Agent(2, [1], refuses=answer))
        await held.survey(["a", "b"])
        held.collect(2, IDENTIFIER, ["a", "b"])
        with pytest.raises(kind, match=told):
            await held.wait_for(IDENTIFIER)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_node_that_has_stopped_answering_is_given_up() -> None:
    async def scenario() -> None:
        silent = Agent(2, [1])
        held = snapshots([], a=Agent(1, [0]), b=silent)
        await held.survey(["a", "b"])
        silent.silent = True
        held.collect(2, IDENTIFIER, ["a", "b"])
        with pytest.raises(StorageError, match="node b has stood still for 30 s"):
            await held.wait_for(IDENTIFIER)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))

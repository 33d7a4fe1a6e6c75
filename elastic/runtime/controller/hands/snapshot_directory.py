"""The snapshots in the memory of the run's nodes: queried on demand, never assumed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from elastic.checkpoint.memory.work_counter import NO_PROGRESS_LIMIT_S
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.checkpoint.manifest_json import to_json
from elastic.core.checkpoint.snapshots import STEPS, Held, Snapshot, found_and_missing, steps_of
from elastic.core.errors import IntegrityError, StorageError
from elastic.runtime.messages import Assembled, NodeFacts
from elastic.runtime.node.shard_records import Wanted
from elastic.transport.handshake import Address

logger = logging.getLogger(__name__)

# A node computes digests, and rebuilds lost shards from parity, on request; the time depends on their size. After so
# long it says how far it is. Of the limit for its answer it is a quarter: agents have less of it than the controller.
_LOOK_S = 1.0

# A node's agent and the node's facts; raises when the node is unavailable.
AgentOf = Callable[[str], Coroutine[Any, Any, "tuple[Any, NodeFacts]"]]

# A question, by node its arguments, and a limit in seconds -> answers by node; see `Commands.ask` and `Agents.ask`.
Ask = Callable[[str, Mapping[str, tuple[Any, ...]], float], Awaitable[Mapping[str, Any]]]

# (generation, world size, step reports of each rank): the last reports of a lost worker are stored with its snapshot.
OnSteps = Callable[[int, int, Mapping[int, Sequence[Mapping[str, Any]]]], None]


class SnapshotDirectory:
    """One per controller. Call order: `survey`; `collect` for the snapshot to restore; any number of `wait_for`."""

    def __init__(
        self,
        run_id: str,
        agent_of: AgentOf,
        ask: Ask,
        limit_s: float,
        on_steps: OnSteps,
        *,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s` limits the answer to a survey."""
        self._run_id = run_id
        self._agent_of = agent_of
        self._ask = ask
        self._limit_s = limit_s
        self._on_steps = on_steps
        self._look_s = look_s
        self._clock = clock
        self._held: dict[str, tuple[Held, ...]] = {}
        self._found: dict[str, Snapshot] = {}
        self._collecting: tuple[int, str, asyncio.Task[Assembled]] | None = None

    async def survey(self, nodes: Sequence[str]) -> tuple[tuple[Snapshot, ...], tuple[str, ...]]:
        """Query every node; a node that does not answer in time counts as holding nothing.

        Returns the snapshots that can be assembled, newest first, and sentences that say why newer ones cannot.
        """
        answers = await self._ask("memory_held", dict.fromkeys(nodes, ()), self._limit_s)
        held_by = {node: held for node, held in answers.items() if isinstance(held, tuple)}
        # In the order of the nodes, not of their answers.
        self._held = {node: held_by[node] for node in nodes if held_by.get(node)}
        found, missing = found_and_missing(self._held)
        self._found = {snapshot.id: snapshot for snapshot in found}
        silent = [node[:8] for node in nodes if node not in held_by]
        unanswered = (f"node {', '.join(silent)} did not report its snapshots in time",) if silent else ()
        return found, (*unanswered, *missing)

    def collect(self, generation: int, identifier: str, nodes: Sequence[str]) -> None:
        """Begin to assemble the snapshot that `generation` begins from; `wait_for` returns it. Done once per
        generation: the next one may begin from the same snapshot, held by other nodes."""
        if self._collecting is not None:
            if self._collecting[0] == generation:
                return
            self._collecting[2].cancel()
        task = asyncio.get_running_loop().create_task(self._collect(identifier, nodes))
        # Retrieve the error of a generation that has ended: asyncio would log it as never retrieved.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._collecting = generation, identifier, task

    async def wait_for(self, identifier: str) -> Assembled:
        """Raises IntegrityError or StorageError that says what is missing."""
        if self._collecting is None or self._collecting[1] != identifier:
            raise StorageError(f"snapshot {identifier} is not the one that the run continues from")
        try:
            return await asyncio.shield(self._collecting[2])
        except asyncio.CancelledError:
            raise StorageError(f"the generation that was to begin from {identifier} is over") from None

    async def _collect(self, identifier: str, nodes: Sequence[str]) -> Assembled:
        began = time.perf_counter()
        if identifier not in self._found:
            # The controller was restarted meanwhile.
            await self.survey(nodes)
        snapshot = self._found.get(identifier)
        if snapshot is None:
            raise IntegrityError(f"snapshot {identifier} cannot be put together any more: a node that held it is gone")
        holders = snapshot.holders
        by_node: dict[str, list[Held]] = {}
        for rank, node in enumerate(holders):
            by_node.setdefault(node, []).append(self._copy(snapshot, rank, node))
        try:
            known = await self._addresses(snapshot, by_node)
            addresses = [known[node] for node in holders]
            told = await self._records({node: _wanted(held, addresses) for node, held in by_node.items()})
        except IntegrityError:
            raise
        except (ray.exceptions.RayError, asyncio.TimeoutError, StorageError, OSError) as error:
            raise StorageError(f"a node that holds a part of {identifier} does not answer: {error}") from error
        records = sorted(told, key=lambda record: record.rank)
        # Takes seconds for a thousand ranks: not in the event loop.
        text = await asyncio.to_thread(self._assembled, records)
        self._on_steps(snapshot.generation, *steps_of(record.extra_state for record in records))
        logger.info("snapshot %s was put together in %.3f s", identifier, time.perf_counter() - began)
        return Assembled(
            identifier, text, tuple(tuple(known[node] for node in nodes if node in known) for nodes in snapshot.copies)
        )

    async def _addresses(self, snapshot: Snapshot, needed: Collection[str]) -> dict[str, Address]:
        """Of the nodes with copies. Raises what asking a `needed` one raises; of the others each is a copy less."""
        nodes = list(dict.fromkeys(node for nodes in snapshot.copies for node in nodes))
        answers = await asyncio.gather(*map(self._agent_of, nodes), return_exceptions=True)
        found: dict[str, Address] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[node] = answer[1].memory
            elif node in needed:
                raise answer
        return found

    async def _records(self, left: dict[str, Wanted]) -> list[ShardRecord]:
        """The records of the shards on these nodes, as each makes them (`ShardRecords.of`). Raises what a node answers
        in their place, or TimeoutError when its work on them makes no progress."""
        told: list[ShardRecord] = []
        moved = dict.fromkeys(left, (-1, self._clock()))
        while left:
            asked = {node: (wanted, self._look_s) for node, wanted in left.items()}
            answers = await self._ask("memory_records", asked, 4 * self._look_s)
            now = self._clock()
            for node, answer in answers.items():
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, list):
                    told += answer
                    del left[node]
                elif answer is not None and answer > moved[node][0]:
                    moved[node] = answer, now
            for node in left:
                if now - moved[node][1] > NO_PROGRESS_LIMIT_S:
                    raise asyncio.TimeoutError(f"node {node[:8]} has stood still for {NO_PROGRESS_LIMIT_S:.0f} s")
            if left.keys() - answers.keys():
                # It refuses this controller, which is about to end.
                await asyncio.sleep(self._look_s)
        return told

    def _assembled(self, records: Sequence[ShardRecord]) -> str:
        whole = assemble(records, run_id=self._run_id, written_at=time.time())
        return to_json(
            replace(whole, extra_state={key: value for key, value in whole.extra_state.items() if key != STEPS})
        )

    def _copy(self, snapshot: Snapshot, rank: int, node: str) -> Held:
        copies = [
            held
            for held in self._held[node]
            if (held.step, held.generation) == (snapshot.step, snapshot.generation) and held.rank <= rank < held.stop
        ]
        best = min(copies, key=lambda held: (bool(held.stripe), held.replica))
        return replace(best, rank=rank, count=1)


def _wanted(held: Sequence[Held], addresses: Sequence[Address]) -> Wanted:
    return tuple(held), {rank: addresses[rank] for one in held for rank in one.others}

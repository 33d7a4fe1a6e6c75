"""Joins the step reports of a node's workers to one message to the controller.

Nothing is kept here for anybody. A worker keeps its reports until it has the controller's answer, and where there is
none from here (the agent has ended, the controller has been replaced or has not taken them) it sends them itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from elastic.core.data.joined_reports import joined_by_step
from elastic.core.data.steps import StepReport
from elastic.runtime.messages import NodeReply, NodeReports, Reply

logger = logging.getLogger(__name__)

# The ranks of a node end a step at about the same time. The first one's report waits this long for the others'.
LINGER_S = 0.02


@dataclass(frozen=True)
class _Waiting:
    heard: int
    reports: Sequence[StepReport]
    answer: asyncio.Future[Reply | None]


class ReportRelay:
    """`send` delivers to the controller; None, or an OSError or TimeoutError, where it has not taken them. `workers`
    are those of the node at present: once all of them have reported, nobody is waited for."""

    def __init__(
        self,
        node: str,
        send: Callable[[NodeReports], Awaitable[NodeReply | None]],
        workers: Callable[[], Collection[int]],
        linger_s: float = LINGER_S,
    ) -> None:
        self._node = node
        self._send = send
        self._workers = workers
        self._linger_s = linger_s
        self._waiting: dict[int, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # How many reports the controller has taken from here.
        self.taken = 0

    async def deliver(self, worker: int, heard: int, reports: Sequence[StepReport]) -> Reply | None:
        """The controller's answer; None where it has not taken them."""
        if worker in self._waiting:
            # It has given up waiting for the first answer.
            self._answer([self._waiting.pop(worker)], None)
        loop = asyncio.get_running_loop()
        waiting = self._waiting[worker] = _Waiting(heard, reports, loop.create_future())
        if self._waiting.keys() >= set(self._workers()):
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._linger_s, self._flush)
        return await waiting.answer

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting, self._timer = self._waiting, {}, None
        heard = max(waiting.heard for waiting in batch.values())
        # The others do not know the newest controller yet, which wants to hear what they have kept first.
        old = [worker for worker, waiting in batch.items() if waiting.heard < heard]
        self._answer([batch.pop(worker) for worker in old], None)
        task = asyncio.get_running_loop().create_task(self._pass_on(batch, heard))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, batch: dict[int, _Waiting], heard: int) -> None:
        steps = joined_by_step(report for waiting in batch.values() for report in waiting.reports)
        reply: NodeReply | None = None
        try:
            reply = await self._send(NodeReports(self._node, tuple(batch), heard, steps))
            self.taken += sum(len(joined.ranks) for joined in steps) if reply is not None else 0
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("the controller did not take step reports of node %s: %r", self._node[:8], error)
        finally:
            # Whatever was raised: nobody waits for an answer that does not come.
            self._answer(batch.values(), reply)

    def _answer(self, waiting: Collection[_Waiting], reply: NodeReply | None) -> None:
        for place, one in enumerate(waiting):
            if not one.answer.done():
                one.answer.set_result(Reply(reply.incarnation, durable=reply.durable[place]) if reply else None)

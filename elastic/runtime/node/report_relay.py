"""Joins the step reports of a node's workers to one message to the controller.

A worker keeps its reports until it has the controller's answer, and where there is none from here (the agent has ended,
the controller has been replaced or has not taken them) it sends them itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from elastic.core.data.joined_reports import joined_by_step
from elastic.core.data.steps import StepReport
from elastic.runtime.messages import NodeReply, NodeReports, Reply
from elastic.runtime.node.gathering import Gathering

# The ranks of a node end a step at about the same time. The first one's report waits this long for the others'.
LINGER_S = 0.02

# The controller's incarnation that a worker has heard of, and its reports.
_Part = tuple[int, Sequence[StepReport]]


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
        self._gathered: Gathering[int, _Part, Reply] = Gathering(self._pass_on, linger_s, workers)
        # How many reports the controller has taken from here.
        self.taken = 0

    async def deliver(self, worker: int, heard: int, reports: Sequence[StepReport]) -> Reply | None:
        """The controller's answer; None where it has not taken them."""
        return await self._gathered.deliver(worker, (heard, reports))

    async def _pass_on(self, parts: dict[int, _Part]) -> Mapping[int, Reply]:
        newest = max(heard for heard, _ in parts.values())
        # The others do not know the newest controller yet, which wants to hear what they have kept first.
        workers = tuple(worker for worker, (heard, _) in parts.items() if heard == newest)
        steps = joined_by_step(report for worker in workers for report in parts[worker][1])
        reply = await self._send(NodeReports((self._node,), workers, newest, steps))
        if reply is None:
            return {}
        self.taken += sum(len(joined.ranks) for joined in steps)
        return {w: Reply(reply.incarnation, durable=d) for w, d in zip(workers, reply.durable, strict=True)}

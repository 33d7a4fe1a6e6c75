"""The agent's part in step reports: joined where all have come, or after a moment; and an answer for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from elastic.core.data.steps import StepReport
from elastic.runtime.messages import NodeReply, NodeReports, Reply
from elastic.runtime.node.report_relay import ReportRelay

FOREVER_S = 1e6


def report(rank: int, step: int = 1) -> StepReport:
    return StepReport(step, 0.5, ((rank, rank + 1),), 1, 0.1, generation=1, rank=rank)


class Controller:
    """Takes what it gets, unless `fails` is to be raised."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.got: list[NodeReports] = []
        self.fails = fails

    async def __call__(self, reports: NodeReports) -> NodeReply | None:
        self.got.append(reports)
        if self.fails is not None:
            raise self.fails
        return NodeReply(5, tuple(10 + worker for worker in reports.workers))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_one_message_once_all_workers_of_the_node_have_reported() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay = ReportRelay("node", controller, lambda: {0, 1}, linger_s=FOREVER_S)
        answers = await asyncio.gather(*(relay.deliver(worker, 5, [report(worker)]) for worker in (0, 1)))
        assert answers == [Reply(5, durable=10), Reply(5, durable=11)]
        [sent] = controller.got
        assert (sent.nodes, sent.workers, sent.heard) == (("node",), (0, 1), 5)
        assert [part.ranks for part in sent.steps] == [(0, 1)]

    run(scenario)


def test_nobody_waits_long_for_a_worker_that_does_not_report() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay = ReportRelay("node", controller, lambda: {0, 1}, linger_s=0.001)
        assert await relay.deliver(0, 5, [report(0)]) == Reply(5, durable=10)
        assert await relay.deliver(0, 5, [report(0, 2), report(0, 3)]) == Reply(5, durable=10)
        assert [[part.step for part in sent.steps] for sent in controller.got] == [[1], [2, 3]]

    run(scenario)


@pytest.mark.parametrize("error", [ConnectionError("it restarts"), TimeoutError()])
def test_a_controller_that_does_not_answer_is_told_to_every_worker(error: Exception) -> None:
    async def scenario() -> None:
        relay = ReportRelay("node", Controller(error), lambda: {0, 1}, linger_s=FOREVER_S)
        answers = await asyncio.gather(*(relay.deliver(worker, 5, [report(worker)]) for worker in (0, 1)))
        assert answers == [None, None]

    run(scenario)


def test_a_worker_that_does_not_know_the_newest_controller_is_not_spoken_for() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay = ReportRelay("node", controller, lambda: {0, 1}, linger_s=FOREVER_S)
        answers = await asyncio.gather(relay.deliver(0, 4, [report(0)]), relay.deliver(1, 5, [report(1)]))
        assert answers == [None, Reply(5, durable=11)]
        assert [sent.workers for sent in controller.got] == [(1,)]

    run(scenario)


def test_a_worker_that_asks_again_has_given_up_the_first_time() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay = ReportRelay("node", controller, lambda: {0, 1}, linger_s=FOREVER_S)
        first = asyncio.ensure_future(relay.deliver(0, 5, [report(0)]))
        await asyncio.sleep(0)
        again = asyncio.ensure_future(relay.deliver(0, 5, [report(0), report(0, 2)]))
        assert await first is None
        await relay.deliver(1, 5, [report(1)])
        assert await again == Reply(5, durable=10)
        assert [part.ranks for part in controller.got[0].steps] == [(0, 1), (0,)]

    run(scenario)

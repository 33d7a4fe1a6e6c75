"""The way from a node's agent to the controller, by another node's agent where a run has many nodes.

One controller can answer some thousand calls per second, and ten thousand nodes would make fifty thousand. Where the
controller names another node's agent as relay, quiet beats, step reports and what all workers say when a generation
starts or ends go to that one, which joins those of about a hundred nodes. Whatever is not taken there (the relay is
gone, slow, or cut off) goes to the controller itself at once: a relay saves work, and nothing depends on it. What is
not quiet never goes by a relay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from itertools import chain
from typing import Any, TypeVar

import ray

from elastic.core.data.joined_reports import JoinedReports, merged
from elastic.core.settings import FailureSettings
from elastic.runtime.messages import (
    BEAT_LIMIT_S,
    Beat,
    BeatReply,
    NodeReply,
    NodeReports,
    Post,
    QuietNodes,
    Reply,
)
from elastic.runtime.node.gathering import Gathering

_T = TypeVar("_T")

# By worker.
Posts = dict[int, Post]
Replies = Mapping[int, Reply]

# A relay that has not answered is not asked again for so long.
WITHOUT_RELAY_S = 10.0
# Less than a worker waits for its agent (`worker.delivery`): the controller's slowness is not the agent's.
_REPORTS_LIMIT_S = 0.8
# What of a worker's wait for its agent is for what workers say when a generation starts or ends: half of it for the
# relay. At a start that is long enough for a controller that has just begun a generation of many.
_OF_POST = 0.8
# What of a limit for a relay the relay has for the controller: an answer without the controller's is one, too, and no
# reason to leave the relay.
_OF_LIMIT = 0.6
# The nodes of a run end a step at about the same time.
_LINGER_S = 0.02


class Uplink:
    """`controller` and relays are actor handles, or what has their methods. All methods are called on one event loop.

    `beat`, `reports` and `posts` are for this node's own agent, `pass_quiet`, `pass_reports` and `pass_posts` for those
    that have it as relay.
    """

    def __init__(self, controller: Any, failures: FailureSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._controller = controller
        self._clock = clock
        self._relay: Any = None
        # How many beats and messages of other nodes the controller has taken from here.
        self.passed_on = 0
        # How many messages of this node's workers the controller has answered to this agent.
        self.posts_taken = 0
        self._not_before = 0.0
        # Beat, relay that does not answer, controller: all of it before this node counts as silent.
        self._beat_limit_s = failures.suspect_after_s / 2
        self._reports_limit_s = min(self._beat_limit_s, _REPORTS_LIMIT_S / 2)
        linger_s = min(failures.heartbeat_s / 2, self._beat_limit_s / 5)
        self._quiet: Gathering[str, tuple[int, ...], bool] = Gathering(self._send_quiet, linger_s)
        self._reports: Gathering[str, NodeReports, NodeReply] = Gathering(self._send_reports, _LINGER_S)
        # By one of their workers.
        self._posts: Gathering[int, Posts, Replies] = Gathering(self._send_posts, _LINGER_S)

    async def beat(self, beat: Beat) -> bool:
        """Is the node part of the run? Raises what Ray raises, or TimeoutError, without the controller's answer."""
        if not beat.gone and not any(beat.ages.values()):
            wanted: bool | None = await self._by_relay(self._beat_limit_s, "pass_quiet", beat.node, tuple(beat.ages))
            if wanted is not None:
                return wanted
        reply: BeatReply = await asyncio.wait_for(self._controller.beat.remote(beat), BEAT_LIMIT_S)
        self._relay = reply.relay
        return reply.wanted

    async def reports(self, reports: NodeReports) -> NodeReply | None:
        """The controller's answer; None where it has not taken them. Raises OSError or TimeoutError without one."""
        begun = self._clock()
        reply: NodeReply | None = await self._by_relay(self._reports_limit_s, "pass_reports", reports)
        if reply is not None:
            return reply
        left_s = _REPORTS_LIMIT_S - (self._clock() - begun)
        return await _connected(asyncio.wait_for(self._controller.node_reports.remote(reports), left_s))

    async def posts(self, posts: Posts) -> Replies:
        """The controller's answers to messages of this node's workers. Raises OSError or TimeoutError without one."""
        limit_s = _half_limit_s(posts)
        passed: Replies | None = await self._by_relay(limit_s, "pass_posts", posts)
        replies = passed if passed is not None else await self._deliver_all(posts, limit_s)
        self.posts_taken += len(replies)
        return replies

    async def pass_quiet(self, node: str, workers: tuple[int, ...]) -> bool | None:
        """Another node's beat: is it part of the run? None: the controller has not answered."""
        return await self._quiet.deliver(node, workers)

    async def pass_reports(self, reports: NodeReports) -> NodeReply | None:
        """Another node's step reports. None: the controller has not taken them."""
        return await self._reports.deliver(reports.nodes[0], reports)

    async def pass_posts(self, posts: Posts) -> Replies | None:
        """Messages of another node's workers. None: the controller has not answered."""
        return await self._posts.deliver(min(posts), posts)

    async def _by_relay(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """None where there is no relay, or it has not brought the controller's answer."""
        if self._relay is None or self._clock() < self._not_before:
            return None
        try:
            return await asyncio.wait_for(getattr(self._relay, method).remote(*arguments), limit_s)
        except (ray.exceptions.RayError, asyncio.TimeoutError):
            self._not_before = self._clock() + WITHOUT_RELAY_S
            return None

    async def _send_quiet(self, workers: dict[str, tuple[int, ...]]) -> Mapping[str, bool]:
        quiet = QuietNodes(tuple(workers), tuple(workers.values()))
        call = self._controller.quiet.remote(quiet)
        released: Collection[str] = await _connected(asyncio.wait_for(call, _OF_LIMIT * self._beat_limit_s))
        self.passed_on += len(workers)
        return {node: node not in released for node in workers}

    async def _send_reports(self, parts: dict[str, NodeReports]) -> Mapping[str, NodeReply]:
        newest = max(part.heard for part in parts.values())
        # Workers of the others do not know the newest controller yet, and have to hear of it first.
        taken = {node: part for node, part in parts.items() if part.heard == newest}
        message = joined_nodes(tuple(taken.values()))
        call = self._controller.node_reports.remote(message)
        reply: NodeReply | None = await _connected(asyncio.wait_for(call, _OF_LIMIT * self._reports_limit_s))
        if reply is None:
            return {}
        self.passed_on += len(taken)
        durable = iter(reply.durable)
        return {
            node: NodeReply(reply.incarnation, tuple(next(durable) for _ in part.workers))
            for node, part in taken.items()
        }

    async def _send_posts(self, parts: dict[int, Posts]) -> Mapping[int, Replies]:
        posts = {worker: post for part in parts.values() for worker, post in part.items()}
        replies = await self._deliver_all(posts, _OF_LIMIT * _half_limit_s(posts))
        self.passed_on += len(parts)
        return {first: {worker: replies[worker] for worker in part} for first, part in parts.items()}

    async def _deliver_all(self, posts: Posts, limit_s: float) -> Replies:
        call: Awaitable[Replies] = self._controller.deliver_all.remote(posts)
        return await _connected(asyncio.wait_for(call, limit_s))


def joined_nodes(parts: tuple[NodeReports, ...]) -> NodeReports:
    """The reports of several nodes, to the same incarnation, as one message."""
    steps: dict[tuple[int, int], list[JoinedReports]] = {}
    for joined in chain.from_iterable(part.steps for part in parts):
        steps.setdefault((joined.generation, joined.step), []).append(joined)
    return NodeReports(
        tuple(chain.from_iterable(part.nodes for part in parts)),
        tuple(chain.from_iterable(part.workers for part in parts)),
        parts[0].heard,
        tuple(merged(steps[place]) for place in sorted(steps)),
    )


def _half_limit_s(posts: Posts) -> float:
    """Of those who have the least time."""
    return _OF_POST * min(post.limit_s for post in posts.values()) / 2


async def _connected(answer: Awaitable[_T]) -> _T:
    """Raises ConnectionError for what Ray raises."""
    try:
        return await answer
    except ray.exceptions.RayError as error:
        raise ConnectionError(str(error)) from error

"""The node agent: one actor per node of the run.

It joins its workers' heartbeats, and their step reports, into one message each to the controller, notices at once when
a worker process ends, and kills its workers when the controller demands it or has been unreachable for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import ray

from elastic.checkpoint.memory.link_probe import Points, measure_link
from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.checkpoint.rounds import PARAMETER_SERVER
from elastic.core.checkpoint.snapshots import Held, together
from elastic.core.data.steps import StepReport
from elastic.core.errors import ElasticError, Fenced, UsageError
from elastic.core.settings import RunSettings
from elastic.runtime import handed_environment
from elastic.runtime.messages import Beat, Command, Handed, NodeFacts, NodeReply, NodeReports, Part, Post, Reply
from elastic.runtime.niceness import raise_priority
from elastic.runtime.node.downlink import Downlink
from elastic.runtime.node.fork_server import ForkServer
from elastic.runtime.node.gathering import Gathering
from elastic.runtime.node.heartbeats import open_mailbox, receive
from elastic.runtime.node.last_words import LastWords
from elastic.runtime.node.report_relay import LINGER_S, ReportRelay
from elastic.runtime.node.shard_records import ShardRecords
from elastic.runtime.node.uplink import Posts, Replies, Uplink
from elastic.runtime.processes import Computing, is_stopped
from elastic.transport.handshake import Address, connect

if TYPE_CHECKING:
    from elastic.comm.server.shard_server import ShardServer

logger = logging.getLogger(__name__)

# Ray's label for how a machine is rented, and how likely it then is to stay: see `core.events.WorkerReady`.
_MARKET_LABEL, _LASTING = "ray.io/market-type", {"on-demand": 1, "spot": -1}
# With less free space in the temporary folder not even a shard's header could be spooled.
_MIN_FREE_BYTES = 64 << 20
# About a second of work, on a node whose processors may be busy.
_MEASURE_LIMIT_S = 20.0


# A worker's heartbeats come from a Python thread: an import or a long library call may delay them for this long in a
# healthy process. A longer delay counts as silence, unless the process computes: a call that keeps Python's lock
# (unpickling a dataset) may take minutes, and what does not end is a hang. A process stopped by a signal is silent.
_BUSY_S = 10.0
# From which silence on and how often the processor's time is asked for, and how much of it a process that computes
# has used.
_LOOKED_AT_S, _COMPUTING_EVERY_S, _COMPUTES = 2.0, 4.0, 0.5
# Two tries take less than the default time limit of a survey.
_REACH_LIMIT_S = 0.7
# Methods that answer questions; see `Downlink`.
_QUESTIONS = frozenset(("memory_held", "memory_records"))


class AgentActor:
    """Asyncio actor; created by the executor on a given node, detached, never restarted by Ray.

    It hosts the node's snapshot server (`checkpoint/memory`), so that snapshots survive the death of a worker, and its
    part of a parameter server where the job asks for one.
    """

    def __init__(self, node: str, settings: RunSettings, controller: Any, token: bytes) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        raise_priority()
        failures = settings.failures
        self._domain_label = settings.snapshots.domain_label
        self._token = token
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._memory = SnapshotServer(token, host)
        self._records = ShardRecords(self._memory)
        self._parameters = _shard_server(settings, token, host)
        self._node = node
        self._failures = failures
        self._uplink = Uplink(controller, failures)
        # The newest controller that was heard of.
        self._incarnation = 0
        self._pids: dict[int, int] = {}
        self._watched: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._downlink = Downlink(node, self._heed, self._answer)
        # Of workers that are silent.
        self._computing: dict[int, Computing] = {}
        self._gone: dict[int, str] = {}
        self._words: dict[int, LastWords] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._relay = ReportRelay(node, self._uplink.reports, self._pids.keys)
        self._posts: Gathering[int, Post, Reply] = Gathering(self._uplink.posts, LINGER_S, self._pids.keys)
        self._wake = asyncio.Event()
        self._box, self._name = open_mailbox()
        self._forks = self._fork_server(settings, niceness)
        loop = asyncio.get_event_loop()
        loop.add_reader(self._box.fileno(), self._collect)
        self._task = loop.create_task(self._beat())

    async def join(self) -> NodeFacts:
        """Check the node's health and return its facts. Raises RuntimeError for an unfit node."""
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < _MIN_FREE_BYTES:
            raise RuntimeError(f"node {self._node[:8]} is unfit: {free >> 20} MiB left in its temporary folder")
        labels = ray.get_runtime_context().get_node_labels()
        domain = str(labels.get(self._domain_label, ""))
        launcher = self._forks.command if self._forks is not None else ""
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        memory, parameters = self._memory, None if self._parameters is None else self._parameters.address
        lasting = _LASTING.get(str(labels.get(_MARKET_LABEL, "")), 0)
        return NodeFacts(self._name, memory.address, memory.local_name, domain, launcher, machine, parameters, lasting)

    async def measure(self) -> dict[str, float]:
        """The node's rates (`measures.rates`), by a process that ends with this call. Raises OSError, ValueError."""
        command = (sys.executable, "-m", "elastic.runtime.node.measures", tempfile.gettempdir())
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        try:
            told, error = await asyncio.wait_for(process.communicate(), _MEASURE_LIMIT_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if process.returncode:
            raise OSError(f"the measuring process ended with {process.returncode}: {error.decode()[-200:]}")
        rates: dict[str, float] = json.loads(told)
        return rates

    async def measure_link(self, other: Address) -> tuple[Points, Points]:
        """(bytes, seconds) to and from the node whose server is at `other`. Raises OSError."""
        return await asyncio.to_thread(measure_link, other, self._token)

    async def memory_held(self) -> tuple[Held, ...]:
        """The complete snapshot shards on this node, those of consecutive ranks together."""
        return together(self._memory.held())

    async def memory_records(self, *wanted: Any) -> list[ShardRecord] | int:
        """What the manifest of a snapshot needs of shards on this node; see `ShardRecords.of`."""
        return await self._records.of(*wanted)

    async def reach(self, others: Mapping[str, Address]) -> tuple[str, ...]:
        """The nodes that cannot be reached from here, after two tries each."""
        return await unreachable(others, self._reaches)

    def _reaches(self, address: Address) -> bool:
        for _ in range(2):
            # The first try after a healed network cut may still fail.
            with contextlib.suppress(OSError):
                connect(address, self._token, limit_s=_REACH_LIMIT_S).close()
                return True
        return False

    async def memory_stats(self) -> dict[str, Any]:
        return dict(self._memory.stats())

    async def watch(self, incarnation: int, worker: int, pid: int, handle: Any) -> None:
        """Report to the controller at once when process `pid` of `worker` ends; its commands go by the actor's
        `handle`. Raises Fenced as `kill` does."""
        self._heed(incarnation)
        self._downlink.workers[worker] = handle
        if worker in self._watched:
            return
        self._pids[worker], self._words[worker] = pid, LastWords(pid)
        self._heard[worker] = time.monotonic()
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(worker)
            return
        self._watched[worker] = process
        asyncio.get_event_loop().add_reader(process, self._ended, worker)

    async def kill(self, incarnation: int, worker: int) -> None:
        """SIGKILL, which also ends a stopped process. The worker is no longer watched.

        Raises Fenced for a controller that was replaced: cut off from storage it may still reach this node, and must
        not end workers of its successor.
        """
        self._heed(incarnation)
        pid = self._pids.get(worker)
        self._forget(worker)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def hand_on(self, command: Command, parts: Mapping[str, Part]) -> Handed:
        """A command for workers of this node, and of those that have it as relay, or a question to their agents; see
        `Downlink`."""
        return await self._downlink.hand_on(command, parts)

    async def asked(self, incarnation: int, name: str, *args: Any) -> Any:
        """A question of the controller of that incarnation to this agent alone. Raises Fenced."""
        self._heed(incarnation)
        return await self._answer(name, *args)

    async def relay(self, worker: int, heard: int, reports: Sequence[StepReport]) -> Reply | None:
        """A worker's step reports, for the controller of incarnation `heard`. Its answer, or None: the worker then
        sends them itself."""
        return await self._relay.deliver(worker, heard, reports)

    async def pass_post(self, worker: int, post: Post) -> Reply | None:
        """What a worker says when a generation starts or ends. The controller's answer, or None: it then says it
        itself."""
        return await self._posts.deliver(worker, post)

    async def pass_posts(self, posts: Posts) -> Replies | None:
        """The same of the workers of a node that has this one as relay."""
        return await self._uplink.pass_posts(posts)

    async def pass_quiet(self, node: str, workers: tuple[int, ...]) -> bool | None:
        """The beat of a node that has this one as relay; see `Uplink`."""
        return await self._uplink.pass_quiet(node, workers)

    async def pass_reports(self, reports: NodeReports) -> NodeReply | None:
        """The step reports of a node that has this one as relay."""
        return await self._uplink.pass_reports(reports)

    async def reports_taken(self) -> int:
        """How many step reports the controller has taken from this agent."""
        return self._relay.taken

    async def posts_taken(self) -> int:
        """How often the controller has answered to this agent what a worker says when a generation starts or ends."""
        return self._uplink.posts_taken

    async def passed_on(self) -> int:
        """How many beats and reports of other nodes the controller has taken from this agent."""
        return self._uplink.passed_on

    async def handed_on(self) -> tuple[int, int, int]:
        """How many commands workers of this node have acknowledged to this agent, and other nodes' to those nodes'; and
        how many questions those nodes' agents have answered to it."""
        return self._downlink.handed_on, self._downlink.passed_down, self._downlink.answered

    async def ping(self) -> bool:
        return True

    # --- inside ---

    async def _answer(self, name: str, *args: Any) -> Any:
        """An error is an answer, too: the question travels with those to other nodes."""
        if name not in _QUESTIONS:
            raise UsageError(f"a node's agent has no question {name!r}")
        try:
            return await getattr(self, name)(*args)
        except ElasticError as error:
            return error

    def _fork_server(self, settings: RunSettings, niceness: int) -> ForkServer | None:
        if not settings.fork_workers:
            return None
        environment = ray.get_runtime_context().runtime_env
        return ForkServer(os.path.dirname(self._name), settings, environment, handed_environment.fetch(), niceness)

    def _heed(self, incarnation: int) -> None:
        if incarnation < self._incarnation:
            newest = self._incarnation
            raise Fenced(f"controller {incarnation} was replaced: node {self._node[:8]} obeys controller {newest}")
        self._incarnation = incarnation

    def _collect(self) -> None:
        now = time.monotonic()
        for pid, message in receive(self._box):
            worker = message.get("worker")
            if isinstance(worker, int) and self._pids.get(worker) == pid:
                self._heard[worker] = now
                self._computing.pop(worker, None)

    def _age(self, worker: int, silent_s: float) -> float:
        return silent_s if is_stopped(self._pids[worker]) or not self._busy(worker, silent_s) else 0.0

    def _busy(self, worker: int, silent_s: float) -> bool:
        if silent_s < _LOOKED_AT_S:
            return True
        now = time.monotonic()
        if worker not in self._computing:
            self._computing[worker] = Computing(self._pids[worker], _COMPUTES, _COMPUTING_EVERY_S, now)
        computes = self._computing[worker].look(now)
        return computes or silent_s <= _BUSY_S

    def _ended(self, worker: int) -> None:
        why, words = f"process {self._pids.get(worker)} on node {self._node[:8]} has ended", self._words.get(worker)
        self._forget(worker)
        task = asyncio.get_event_loop().create_task(self._tell_ended(worker, why, words))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_ended(self, worker: int, why: str, words: LastWords | None) -> None:
        said = "" if words is None else await words.read()
        self._gone[worker] = f"{why}: {said}" if said else why
        self._wake.set()

    def _forget(self, worker: int) -> None:
        handle = self._watched.pop(worker, None)
        if handle is not None:
            asyncio.get_event_loop().remove_reader(handle)
            os.close(handle)
        for table in (self._pids, self._heard, self._words, self._downlink.workers):
            table.pop(worker, None)
        self._computing.pop(worker, None)

    async def _beat(self) -> None:
        last_answer = time.monotonic()
        while True:
            now = time.monotonic()
            gone = dict(self._gone)
            ages = {worker: self._age(worker, now - heard) for worker, heard in self._heard.items()}
            try:
                wanted = await self._uplink.beat(Beat(self._node, ages, gone))
            except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
                logger.debug("the controller did not hear node %s: %s", self._node[:8], error)
                if time.monotonic() - last_answer > self._failures.controller_lease_s:
                    self._abandon()
            else:
                last_answer = time.monotonic()
                self._gone = {worker: why for worker, why in self._gone.items() if worker not in gone}
                if not wanted:
                    self._abandon()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._failures.heartbeat_s)
            self._wake.clear()

    def _abandon(self) -> None:
        """The controller has released this node, or has been unreachable for longer than the lease."""
        logger.warning("node %s leaves the run: its workers are ended", self._node[:8])
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _shard_server(settings: RunSettings, token: bytes, host: str) -> ShardServer | None:
    """This node's part of the parameter server, until the process ends; None where the job asks for none."""
    if settings.communication is None or settings.communication.strategy != PARAMETER_SERVER:
        return None
    # Not at the top: other agents do without torch.
    from elastic.comm.server.shard_server import ShardServer

    return ShardServer("", token, host)


async def unreachable(others: Mapping[str, Address], reaches: Callable[[Address], bool]) -> tuple[str, ...]:
    """The nodes for which `reaches` is False. All are tried concurrently on threads of their own: the loop's default
    threads are few on a small machine and may be busy with digests, and a late answer is useless."""
    if not others:
        return ()
    pool = ThreadPoolExecutor(len(others), "elastic-reach")
    try:
        loop = asyncio.get_running_loop()
        found = await asyncio.gather(*(loop.run_in_executor(pool, reaches, address) for address in others.values()))
    finally:
        pool.shutdown(wait=False)
    return tuple(node for node, reached in zip(others, found, strict=True) if not reached)

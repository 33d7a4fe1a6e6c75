"""A Ray cluster whose nodes are each in a network of their own, and runs in it that are steered from outside.

The process that talks to Ray is on the head's network, where this one is not: `python afar.py ADDRESS` is that process.
It takes one request a line on its standard input and answers each with one line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from elastic_cluster import NodeInfo, NodeState
from harness import PACKAGES, Run, actors_among, left_of_run, remove_runs, start_run, wait_until
from namespaces import LINK, Network
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.core.errors import ElasticError, UsageError
from elastic.core.names import parse_checkpoint_id
from elastic.core.settings import RunSettings, ScalingSettings
from elastic.runtime.driver import client

_PORT = 6379
_UP_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 150.0
_OBJECT_STORE_BYTES = 80_000_000
_RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--include-log-monitor=false"]
_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": LINK,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": PACKAGES,
    "PYTHONWARNINGS": "ignore",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A user's own token, where there is one, would be asked for by the head and shown by nobody.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    # No resolver can be reached from here.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


class Cluster:
    """Node 0 is the head, without room for a worker: the controller is alone there. Every other has room for one.

    A `Place` of runs.
    """

    driver: Driver

    def __init__(self, network: Network, count: int, environment: Mapping[str, str]) -> None:
        """Use `up`."""
        self.network = network
        self.count = count
        self._environment = {**_environment(), **environment}
        self.address = f"{network.address(0)}:{_PORT}"
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}
        self._lives = itertools.count()

    @classmethod
    @contextlib.contextmanager
    def up(
        cls, network: Network, count: int | None = None, environment: Mapping[str, str] | None = None
    ) -> Iterator[Cluster]:
        """On the first `count` nodes of the network (None: on all), which ends what this starts. `environment` is added
        to that of every process."""
        cluster = cls(network, network.count if count is None else count, environment or {})
        try:
            for node in range(cluster.count):
                cluster.start_node(node)
            with Driver.within(network, cluster.address) as cluster.driver:
                wait_until(lambda: len(cluster.nodes()) == cluster.count, "all nodes to be up", _UP_LIMIT_S)
                yield cluster
        finally:
            for node, raylet in cluster._raylets.items():
                network.end_processes(node)
                raylet.wait()

    def start_node(self, node: int) -> None:
        """Again, where its raylet has ended. Returns at once."""
        folder = self.network.folder / str(node)
        address = self.network.address(node)
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor", "--num-cpus=0"]
        where = head if node == 0 else [f"--address={self.address}", "--num-cpus=1"]
        common = [f"--node-ip-address={address}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        # Nodes share a machine but no network: what tells them apart is their folder.
        common += [f"--temp-dir={folder}", f"--node-name=node-{node}", "--min-worker-port=0", "--max-worker-port=0"]
        with open(self.network.folder / f"node-{node}-{next(self._lives)}.log", "wb") as log:
            self._raylets[node] = subprocess.Popen(
                self.network.inside(node, [*_RAY, *where, *common]),
                env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Those that Ray believes to be alive."""
        at = {self.network.address(node): node for node in range(self.count)}
        alive = [(at[address], identity) for address, identity in self.driver.ask("nodes")]
        return tuple(
            NodeInfo(f"node-{node}", NodeState.ALIVE, head=node == 0, node_id=identity)
            for node, identity in sorted(alive)
        )

    def whole(self) -> None:
        """Every way open and every node there, as each test finds it."""
        self.network.heal_all()
        for node, raylet in self._raylets.items():
            if raylet.poll() is not None:
                self.network.end_processes(node)
                self.start_node(node)
        wait_until(lambda: len(self.nodes()) == self.count, "all nodes to be up", _UP_LIMIT_S)

    def left(self) -> list[str]:
        """What any run has here: named actors, placement groups, and processes of actors."""
        pids = [process.pid for node in range(self.count) for process in self.network.members(node)]
        found = [f"process {pid}: {title}" for pid, title in actors_among(pids).items()]
        return [*self.driver.ask("left", ""), *found]

    def clear(self) -> None:
        """The next test must not inherit a run that this one has lost control of."""
        self.driver.ask("clear")
        wait_until(lambda: not self.left(), "the cluster to be clear")

    def number(self, node_id: str) -> int:
        """The number of the node that Ray calls so."""
        return next(int(node.name.removeprefix("node-")) for node in self.nodes() if node.node_id == node_id)


class AfarRun(Run):
    """A run in such a cluster. Where a test reads memory or kills actors it cannot be used."""

    cluster: Cluster

    def start(self) -> AfarRun:
        self.handle = AfarHandle(self.cluster.driver, self.settings, self.entry, self.config)
        return self

    def left(self) -> list[str]:
        found: list[str] = self.cluster.driver.ask("left", self.settings.run_id)
        return found


# A cut of two seconds may be felt for more than three: what was sent meanwhile is sent again in growing intervals.
PATIENT = {"suspect_after_s": 5.0, "probe_timeout_s": 1.0}


def each_test(nodes: Cluster) -> Iterator[Cluster]:
    """The cluster as each test finds it, of whose run nothing may be left."""
    nodes.whole()
    yield nodes
    nodes.network.heal_all()
    try:
        wait_until(lambda: not nodes.left(), "the processes of the run to be gone", 30.0)
    except AssertionError:
        left = nodes.left()
        nodes.clear()
        raise AssertionError(f"the test has left {left}") from None


def begun(cluster: Cluster, folder: Path, failures: dict[str, float], **options: Any) -> AfarRun:
    """All of them (three, unless `scaling` is given) train, and have done six steps; the test allows the next."""
    options = {"epochs": 12, "scaling": ScalingSettings(2, 3), **options}
    run = AfarRun(cluster, folder, failures=failures, **options)
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_checkpoint(5)
    return run


def walk_for(run: AfarRun, seconds: float) -> None:
    """How long a fault lasts; training continues meanwhile, where it can."""
    until = time.monotonic() + seconds
    run.walk_until(lambda: time.monotonic() > until, f"{seconds:g} s to pass")


def walk_to(run: AfarRun, world_size: int, steps: int = 3) -> None:
    """Until a generation of that size has done so many steps."""

    def there() -> bool:
        now = run.handle.progress()
        if now["world_size"] != world_size or now["doing"] is not None:
            done.clear()
        done.append(now["step"])
        return done[-1] - done[0] >= steps

    done: list[int] = []
    run.walk_until(there, f"{steps} steps at world size {world_size}")


def assert_unheard(run: AfarRun, worker: int, generation: int) -> None:
    """Nothing that the worker has said since that generation began is in the journal, nor is a checkpoint before it."""
    records = run.records()
    begun = next(place for place, r in enumerate(records) if r["type"] == "generation" and r["number"] == generation)
    for record in records[begun:]:
        if record["type"] == "event" and record["event"] != "WorkerDied":  # Which Ray says of it.
            assert record.get("worker") != worker, record
        if record["type"] == "checkpoint":
            assert parse_checkpoint_id(record["id"]).generation >= generation, record


class AfarHandle:
    """Implements `harness.Handle` through the driver."""

    def __init__(self, driver: Driver, settings: RunSettings, entry: str, config: Mapping[str, Any]) -> None:
        self._ask = driver.ask
        self._ask("start", settings.to_json(), entry, dict(config))

    def progress(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._ask("progress")
        return found

    def wait_step(self, step: int, timeout_s: float) -> bool:
        return bool(self._ask("wait_step", step, timeout_s))

    def result(self, timeout_s: float) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self._ask("result", timeout_s)
        return found

    def stop(self, reason: str) -> None:
        self._ask("stop", reason)

    def leave(self) -> None:
        self._ask("leave")


class Driver:
    """This process's end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Use `within`."""
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def within(cls, network: Network, address: str) -> Iterator[Driver]:
        with open(network.folder / "driver.log", "wb") as log:
            process = subprocess.Popen(
                network.inside(0, [sys.executable, __file__, address]),
                env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
            )  # fmt: skip
        try:
            yield cls(process)
        finally:
            process.kill()
            process.communicate()

    def ask(self, do: str, *arguments: Any) -> Any:
        """ElasticError with what went wrong there, AssertionError where there is no answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([do, *arguments]) + "\n")
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_LIMIT_S)
        line = self._process.stdout.readline() if ready else ""
        assert line, f"waited {_ANSWER_LIMIT_S:g} s for the driver to answer {do}{arguments}"
        result, error = json.loads(line)
        if error is not None:
            raise ElasticError(error)
        return result


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTEST_CURRENT_TEST")}
    return {**kept, **_ENVIRONMENT}


# -- the driver's own end ----------------------------------------------------------------------------------------------


def _here(_: RunSettings) -> NodeAffinitySchedulingStrategy:
    """Ray 2.60 puts an actor that asks for no resources on any node, whatever its soft affinity says."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


class _Server:
    def __init__(self, address: str) -> None:
        self._address = address
        self._run: client.RayRunHandle | None = None

    def connect(self) -> None:
        deadline = time.monotonic() + _UP_LIMIT_S
        while True:
            try:
                client.connect(self._address)
                return
            except UsageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def answer(self, do: str, arguments: list[Any]) -> Any:
        if do == "nodes":
            found = ray.nodes()  # type: ignore[no-untyped-call]
            return [[node["NodeManagerAddress"], node["NodeID"]] for node in found if node["Alive"]]
        if do == "clear":
            return remove_runs()
        if do == "left":
            return left_of_run(*arguments)
        if do == "start":
            settings, entry, config = arguments
            client._placement = _here
            self._run = start_run(RunSettings.from_json(settings), entry, config, self._address)
            return None
        assert do in ("progress", "wait_step", "result", "stop", "leave"), do
        return getattr(self._run, do)(*arguments)


def _serve() -> None:
    # Ray may print; the lines to the test are answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = _Server(sys.argv[1])
    server.connect()
    for line in sys.stdin:
        do, *arguments = json.loads(line)
        try:
            reply = [server.answer(do, arguments), None]
        except Exception as error:  # noqa: BLE001 - it is the answer
            reply = [None, f"{type(error).__name__}: {error}"]
        answers.write(json.dumps(reply, default=str) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()

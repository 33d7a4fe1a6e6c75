"""A Ray cluster of many nodes (real raylets) on one machine, whose nodes can be killed, frozen and brought back."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from elastic_cluster.draining import drain
from elastic_cluster.json_lines import JsonLines
from elastic_cluster.local.features import DURABLE, TOKEN, token_file
from elastic_cluster.source import ClusterEnded, ClusterError, NodeInfo

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
COMMAND_LIMIT_S = 30.0
# Its directory may hold an environment of several gigabytes for each node, which a job has asked for (`pip`).
_END_LIMIT_S = 180.0
# Ray refuses less.
_MIN_OBJECT_STORE_BYTES = 75 * 1024 * 1024
# Keepers that this process has started and no longer owns: a Popen that is forgotten while its process runs warns.
_let_go: list[subprocess.Popen[bytes]] = []
_ENVIRONMENT = {
    # Every worker on a node without accelerators warns until this choice is made; this is Ray's next default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A raylet ends where its agents need longer than 30 s to come up: on a busy machine they do.
    "RAY_agent_register_timeout_ms": "120000",
}


# The Jobs server joins the cluster by its address, which Ray turns from 127.0.0.1 into this machine's outer one, where
# nobody listens; by this choice, meant for laptops, it leaves it alone.
_DASHBOARD_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class LocalCluster:
    """Implements `NodeSource`. Every node is on 127.0.0.1. Not for several threads at once.

    The cluster belongs to a keeper process and ends when the last process that owns it (started it or attached to it)
    has detached or died, SIGKILL included, or when one of them shuts it down.
    """

    def __init__(self, connection: socket.socket, keeper: subprocess.Popen[bytes] | None) -> None:
        """Use `start` or `attach`."""
        self._lines = JsonLines(connection)
        self._keeper = keeper
        self._ids = itertools.count(1)
        self._about: dict[str, Any] = {}

    @classmethod
    def start(
        cls,
        nodes: int = 4,
        *,
        cpus_per_node: float = 2,
        gpus_per_node: float = 0,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        object_store_bytes: int = 100_000_000,
        environment: Mapping[str, str] | None = None,
        system_config: Mapping[str, Any] | None = None,
        durable_control_store: bool = False,
        token: bool = False,
        logs_to: str | Path | None = None,
        dashboard: bool = False,
        limit_s: float = 60.0,
    ) -> LocalCluster:
        """`nodes` nodes called node-0 (the head) to node-{nodes - 1}, all registered with Ray when this returns.

        `resources` and `labels` are those of each node. GPUs are logical and need no device. `environment` is added
        to this process's own for every process of the cluster; `system_config` is Ray's. With `durable_control_store`
        the control store can be killed and restarted. With `token` every connection must present the one in
        `token_file`. `dashboard` starts Ray's dashboard head for jobs and nodes, with an agent on every node.
        Ray's logs are copied to the directory `logs_to` when the cluster ends; without it they go with the cluster.
        Raises ClusterError when they are not all up after `limit_s` seconds.
        """
        if nodes < 1:
            raise ValueError(f"a cluster has at least one node, not {nodes}")
        store_bytes, store_directory = object_store(nodes, object_store_bytes, shutil.disk_usage("/dev/shm").free)
        options = {
            "num_cpus": cpus_per_node,
            "num_gpus": gpus_per_node,
            "resources": dict(resources or {}),
            "labels": dict(labels or {}),
            "object_store_memory": store_bytes,
            "plasma_directory": store_directory,
            "include_dashboard": dashboard,
        }
        head = {"_system_config": {"prestart_worker_first_driver": False, **(system_config or {})}}
        specs = [{"name": f"node-{i}", "options": {**options, **(head if i == 0 else {})}} for i in range(nodes)]
        wanted = [*([DURABLE] if durable_control_store else []), *([TOKEN] if token else [])]
        cluster = cls._spawn({**(_DASHBOARD_ENVIRONMENT if dashboard else {}), **(environment or {})}, wanted)
        try:
            awaited = f"{nodes} nodes to start"
            logs = None if logs_to is None else os.path.abspath(logs_to)
            cluster._ask("start", limit_s + 5.0, awaited, nodes=specs, limit_s=limit_s, logs_to=logs)
            cluster._hello()
        except BaseException:
            cluster.shutdown()
            raise
        return cluster

    @classmethod
    def _spawn(cls, environment: Mapping[str, str], features: Sequence[str] = ()) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            keeper = subprocess.Popen(
                # From the package's own directory, so that no other `cluster` in the user's is taken for it.
                [sys.executable, "-m", "elastic_cluster.local.keeper", str(theirs.fileno()), os.getcwd(), *features],
                pass_fds=[theirs.fileno()],
                cwd=_PACKAGE_ROOT,
                env={**_without_ray_address(), **_ENVIRONMENT, **environment},
                start_new_session=True,
            )
        return cls(ours, keeper)

    @classmethod
    def attach(cls, socket_path: str | Path) -> LocalCluster:
        """Own a running cluster together with its other owners: it outlives them."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(socket_path))
        except OSError as error:
            connection.close()
            raise ClusterError(f"no cluster answers at {socket_path}: {error.strerror}") from error
        cluster = cls(connection, None)
        cluster._hello()
        return cluster

    def _hello(self) -> None:
        self._about = self._ask("hello", COMMAND_LIMIT_S, "the keeper to answer")

    @property
    def address(self) -> str:
        # The GCS listens on 127.0.0.1 alone, and `ray.init` turns that (and "localhost") into this machine's outer
        # address, where nobody answers. It compares letter by letter; the resolver does not.
        port = self._about["address"].rpartition(":")[2]
        return f"LOCALHOST:{port}"

    @property
    def dashboard_url(self) -> str:
        """Where the Jobs server answers. Raises ClusterError where the cluster was started without a dashboard."""
        if not self._about["dashboard"]:
            raise ClusterError("this cluster has no dashboard: start it with dashboard=True")
        return f"http://{self._about['dashboard']}"

    @property
    def directory(self) -> Path:
        """Removed when the cluster ends. Ray's temporary directory is `ray` in it, with the logs."""
        return Path(self._about["directory"])

    @property
    def socket_path(self) -> Path:
        return self.directory / "keeper.sock"

    @property
    def token_file(self) -> Path | None:
        """Of mode 0600, for RAY_AUTH_TOKEN_PATH (with RAY_AUTH_MODE=token); None where no token is asked for."""
        file = token_file(self.directory)
        return file if file.exists() else None

    @property
    def keeper_pid(self) -> int:
        pid: int = self._about["pid"]
        return pid

    def nodes(self) -> tuple[NodeInfo, ...]:
        return tuple(map(NodeInfo.from_json, self._ask("nodes", COMMAND_LIMIT_S, "the list of nodes")))

    def node(self, name: str) -> NodeInfo:
        for info in self.nodes():
            if info.name == name:
                return info
        raise ClusterError(f"there is no node {name!r}")

    def add_node(self, name: str | None = None, *, limit_s: float = 60.0) -> NodeInfo:
        """Bring back the lost node `name`, or, without a name, the one lost longest, or else make one like the last."""
        awaited = f"{name or 'a node'} to start"
        return NodeInfo.from_json(self._ask("add_node", limit_s + 5.0, awaited, name=name, limit_s=limit_s)[0])

    def remove_node(self, name: str) -> NodeInfo:
        """The node leaves Ray's node table, then its processes end."""
        return self._operate("remove_node", name=name)

    def kill_node(self, name: str) -> NodeInfo:
        """SIGKILL the raylet and every other process of the node at one instant; the reply's `pids` are those."""
        return self._operate("kill_node", name=name)

    def freeze_node(self, name: str) -> NodeInfo:
        """Stop every process of the node (SIGSTOP) until it is thawed, killed, or the cluster ends."""
        return self._operate("freeze_node", name=name)

    def thaw_node(self, name: str) -> NodeInfo:
        return self._operate("thaw_node", name=name)

    def drain_node(self, name: str, notice_s: float = 30.0) -> NodeInfo:
        """Tell Ray that the node will be gone in `notice_s` seconds. It ends as soon as nothing runs there."""
        info = self.node(name)
        # Its raylet registers with the address that the control store was started with.
        drain(str(self._about["address"]), info.node_id, notice_s, "a preemption notice by this cluster's owner")
        return info

    def kill_worker(self, pid: int) -> NodeInfo:
        """SIGKILL a worker process; returns its node. ClusterError if it is not a worker of this cluster."""
        return self._operate("kill_worker", pid=pid)

    def kill_process(self, pid: int) -> NodeInfo:
        """SIGKILL one process of a node, raylet and GCS included; returns its node."""
        return self._operate("kill_process", pid=pid)

    def kill_control_store(self) -> NodeInfo:
        """SIGKILL Ray's control store (the GCS) and nothing else; returns the head. Not without
        `durable_control_store`: all it knows would be gone."""
        return self._operate("kill_control_store")

    def restart_control_store(self, *, limit_s: float = 60.0) -> NodeInfo:
        """Start the killed control store again, over its storage; returns the head once it answers."""
        awaited = "the control store to start again"
        return NodeInfo.from_json(self._ask("restart_control_store", limit_s + 5.0, awaited, limit_s=limit_s)[0])

    def detach(self) -> None:
        """Stop owning the cluster. It ends unless another process owns it."""
        self._lines.connection.close()
        if self._keeper is not None:
            _let_go.append(self._keeper)

    def shutdown(self) -> None:
        """End the cluster, even if it has other owners. Returns when none of its processes and files is left.

        Raises ClusterError when that takes too long; the cluster continues to end.
        """
        if self._lines.connection.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._lines.send({"id": 0, "do": "shutdown"})
        try:
            with contextlib.suppress(ClusterEnded):
                while True:  # Late replies, then the end of the connection, which comes with the end of the keeper.
                    self._lines.receive(_END_LIMIT_S, "the cluster to end")
        except BaseException:
            self.detach()
            raise
        self._lines.connection.close()
        if self._keeper is not None:
            self._keeper.wait(COMMAND_LIMIT_S)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _operate(self, command: str, **arguments: Any) -> NodeInfo:
        awaited = f"{command} {' '.join(map(str, arguments.values()))}"
        return NodeInfo.from_json(self._ask(command, COMMAND_LIMIT_S, awaited, **arguments))

    def _ask(self, command: str, wait_s: float, awaited: str, /, **arguments: Any) -> Any:
        request_id = next(self._ids)
        try:
            self._lines.send({"id": request_id, "do": command, **arguments})
        except OSError as error:
            raise ClusterEnded(f"the cluster has ended; asked for {awaited}") from error
        while True:
            reply = self._lines.receive(wait_s, awaited)
            if reply["id"] != request_id:  # A reply that came after its asker had stopped waiting.
                continue
            if "error" in reply:
                raise ClusterError(reply["error"])
            return reply["result"]


def object_store(nodes: int, wanted_bytes: int, shm_free_bytes: int) -> tuple[int, str | None]:
    """Bytes of object store per node, and the directory for it (None: /dev/shm, Ray's default).

    All nodes share one /dev/shm. Where not even the least that Ray takes fits in half of it for each node, as in a
    container with Docker's default of 64 MB, the stores are files on disk.
    """
    share = shm_free_bytes // 2 // nodes
    if share < _MIN_OBJECT_STORE_BYTES:
        return max(wanted_bytes, _MIN_OBJECT_STORE_BYTES), "/tmp"
    return max(min(wanted_bytes, share), _MIN_OBJECT_STORE_BYTES), None


def _without_ray_address() -> dict[str, str]:
    # It would send the nodes' own workers to another cluster.
    return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}

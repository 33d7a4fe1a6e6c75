"""The process that starts raylets: `python -m elastic_cluster.local.starter TEMP_DIR WORKING_DIR`.

A child of the keeper, spoken to in JSON lines over its standard streams:

    in   {"start": name, "head": bool, "tag": {...}, "options": {...}}
    out  {"started": name, "node_id": ..., "raylet_pid": ..., "pids": [...], "address": ..., "control_store_pid": ...}
         {"failed": name, "pids": [...], "error": ...}
    in   {"start_control_store": head}
    out  {"control_store_of": head, "pids": [...]}, with "error" where it did not start

It is a process of its own because starting a node with Ray's own code blocks, and the keeper must not: a kill has to
work while a node is being added. It also stands in for the keeper: when its standard input ends, the keeper was
killed, and everything below and in its session is killed here.

Every private use of Ray is in this module.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import ray._private.ray_constants as ray_constants
import ray._private.services as services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.utils import write_ray_address
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, without types
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    GcsClient,
    persist_port,
)
from ray.core.generated.autoscaler_pb2 import ClusterConfig  # type: ignore[attr-defined]  # not in Ray's stubs

from elastic_cluster.local import processes

logger = logging.getLogger(__name__)

_REGISTER_LIMIT_S = 30.0
# Below those that the kernel gives to whoever asks for any: nothing else takes one between its choice and its use.
_AGENTS_PORTS = (12_000, 32_000)
# What Ray's own minimal agent writes for a service that is not there.
_NO_SERVICE = -1
# A raylet insists on a dashboard agent. Without a dashboard it has nothing to do, and starting the real one costs a
# second of CPU and 120 MB per node. This reads the pipe that the raylet holds, so it ends when the raylet does.
_IDLE_AGENT = "/bin/cat"
# Another one may call this package's own and start more beside the raylet: tests do.
_NODE_INIT = os.environ.get("ELASTIC_CLUSTER_NODE_INIT") or str(Path(__file__).with_name("node_init.py"))
_CONTROL_STORE = ray_constants.PROCESS_TYPE_GCS_SERVER
# What Ray's processes write between the reason of a crash and the stack.
_STACK_TRACE = "*** StackTrace Information ***"
_AGENT_OPTION = "--dashboard_agent_command="
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# The last part of the folder that a runtime environment agent unpacks packages in.
_RESOURCES = "/runtime_resources"
# Ray Train's own switch.
_TRAIN_PAGE = "RAY_TRAIN_ENABLE_STATE_TRACKING"

_started: list[Any] = []
_heads: dict[str, Node] = {}
_thread = threading.local()
_out_lock = threading.Lock()
_start_ray_process: Any = services.start_ray_process
_get_node: Any = services.get_node


def _start_process(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
    """Ray's own, for a raylet with an idle dashboard agent and under an init of its own."""
    if process_type == "raylet":
        # Nodes of one machine share a session: one's agent would remove what another's has unpacked and still uses.
        command = [part.replace(_RESOURCES, f"{_RESOURCES}/{_thread.name}") for part in command]
        if not _thread.dashboard:
            command = [_AGENT_OPTION + _IDLE_AGENT if part.startswith(_AGENT_OPTION) else part for part in command]
        command = [sys.executable, "-I", "-S", _NODE_INIT, *command]
    if process_type == ray_constants.PROCESS_TYPE_DASHBOARD:
        # Each module is a process. These serve jobs (which ask the one of nodes for the head), the table of nodes, and
        # the autoscaler's report; the last one the page of Ray Train, for those who have Ray fill it.
        train = ",TrainHead" if os.environ.get(_TRAIN_PAGE) in ("1", "true") else ""
        command = [*command, f"--modules-to-load=JobHead,NodeHead,StateHead,ReportHead{train}"]
    if process_type == "monitor":
        # Ray's autoscaler loads the provider of this package, whatever else is called `cluster` where the job is.
        paths = [_PACKAGE_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        kwargs["env_updates"] = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    info = _start_ray_process(command, process_type, *args, **kwargs)
    _started.append(info.process)
    _thread.children.append(info.process)
    return info


def _get_node_soon(gcs_address: str, node_id: str) -> Any:
    """Ray's own call asks once a second; a node is registered 0.3 s after its raylet was started."""
    client = GcsClient(address=gcs_address)
    deadline = time.monotonic() + _REGISTER_LIMIT_S
    # Neither error is a RuntimeError: that one Ray answers by asking again.
    while time.monotonic() < deadline:
        if _raylet_pid(_thread.children[-1].pid) is None:
            raise ChildProcessError(f"its raylet ended before it had registered; {_last_words()}")
        if any(found.hex() == node_id for found in client.get_all_node_info(timeout=5)):
            return _get_node(gcs_address, node_id)
        time.sleep(0.02)
    raise TimeoutError(f"waited {_REGISTER_LIMIT_S:g} s for the raylet to register with the GCS at {gcs_address}")


def _last_words() -> str:
    """What the raylet of this thread's node said last: its logs are gone with the cluster."""
    for kind in ("err", "out"):
        # One file per life of the node.
        lives = sorted(Path(_thread.logs).glob(f"raylet.{_thread.name}.*{kind}"), key=lambda path: path.stat().st_mtime)
        for path in lives[-1:]:
            text = path.read_text(encoding="utf-8", errors="replace")
            # The failed check stands before the addresses of the stack.
            lines = [line.strip() for line in text.partition(_STACK_TRACE)[0].splitlines()]
            if said := [line for line in lines if line]:
                return f"its last words: {said[-1][:300]}"
    return "it said nothing"


class _LeanNode(Node):
    """Ray's node, without dashboard unless one is asked for, and safe to start concurrently with others."""

    def start_api_server(self, **kwargs: Any) -> None:
        if self._ray_params.include_dashboard:
            super().start_api_server(**kwargs)

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        # The raylet is not told the last one but reads it from this file.
        given = self._ray_params.dashboard_agent_listen_port if self._ray_params.include_dashboard else _NO_SERVICE
        persist_port(self._session_dir, self._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, given)
        if not self._ray_params.include_dashboard:
            for port_name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME):
                persist_port(self._session_dir, self._node_id, port_name, _NO_SERVICE)
        _thread.logs = self.get_logs_dir_path()  # type: ignore[no-untyped-call]
        super().start_raylet(*args, **kwargs)
        deadline = time.monotonic() + _REGISTER_LIMIT_S
        while _raylet_pid(self.all_processes["raylet"][0].process.pid) is None:
            if self.all_processes["raylet"][0].process.poll() is not None or time.monotonic() > deadline:
                raise ChildProcessError(f"its raylet could not be run; {_last_words()}")
            time.sleep(0.005)

    def _make_inc_temp(self, suffix: str = "", prefix: str = "", directory_name: str | None = None) -> str:
        # Ray numbers sockets and logs by looking for the first free one; nodes started together would get the same.
        name = f"{prefix}.{self._ray_params.node_name}"
        path: str = super()._make_inc_temp(suffix=suffix, prefix=name, directory_name=directory_name)
        return path


def _start_node(request: dict[str, Any], temp_dir: str) -> dict[str, Any]:
    name, head, options = request["start"], request["head"], dict(request["options"])
    autoscaling = options.get("autoscaling_config")
    parameters = RayParams(
        node_name=name,
        node_ip_address="127.0.0.1",
        temp_dir=temp_dir,
        min_worker_port=0,
        max_worker_port=0,
        include_log_monitor=False,  # type: ignore[arg-type]  # annotated as str, used as bool
        dashboard_port=0,  # type: ignore[arg-type]  # annotated as bool, used as int
        **_agents_ports(bool(options.get("include_dashboard"))),
        no_monitor=autoscaling is None,
        env_vars={**request["tag"], **options.pop("env_vars", {})},
        **options,
    )
    _thread.name, _thread.dashboard = name, parameters.include_dashboard
    # Ray writes the ports that it finds into the parameters that it is given: each try gets its own.
    try:
        node = _LeanNode(copy.copy(parameters), head=head, shutdown_at_exit=False, spawn_reaper=True)
    except ChildProcessError as error:
        if head:  # its control store has started already
            raise
        logger.warning("%s is started a second time: %s", name, error)
        node = _LeanNode(copy.copy(parameters), head=head, shutdown_at_exit=False, spawn_reaper=True)
    if autoscaling is not None:
        _tell_node_types(node.gcs_address, json.loads(Path(autoscaling).read_text()))
    if head:
        _heads[name] = node
    stores = node.all_processes.get(_CONTROL_STORE)
    return {
        "control_store_pid": stores[0].process.pid if stores else None,
        "started": name,
        "node_id": node.node_id,
        "raylet_pid": _raylet_pid(node.all_processes["raylet"][0].process.pid),
        "address": node.gcs_address,
        "dashboard": _dashboard_url(node, temp_dir) if head else "",
    }


def _agents_ports(dashboard: bool) -> dict[str, Any]:
    """Ports for the agents of one node. Where Ray is to find them itself, a raylet waits 15 s for its agents to tell
    theirs, and crashes if they have not: on a busy machine they are still importing by then."""
    names = ["runtime_env_agent_port"]
    if dashboard:
        names += ["metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"]
    ports: dict[str, int] = {}
    while len(ports) < len(names):
        port = random.randrange(*_AGENTS_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in ports.values():
                ports[names[len(ports)]] = port
    return {"dashboard_agent_listen_port": 0, **ports}


def _tell_node_types(gcs_address: str, config: dict[str, Any]) -> None:
    """Where Ray's own libraries look for what a cluster could grow to. The autoscaler itself does not write it."""
    told = ClusterConfig()
    for name, node_type in config["available_node_types"].items():
        if node_type["max_workers"]:
            group = told.node_group_configs.add()
            group.name, group.max_count = name, node_type["max_workers"]
            group.resources.update(node_type["resources"])
    GcsClient(address=gcs_address).report_cluster_config(told.SerializeToString())


def _start_control_store(name: str) -> dict[str, Any]:
    """Again, over its storage, at the same port. As Ray's own tests of its control store do it."""
    node: Any = _heads[name]
    node.all_processes.pop(_CONTROL_STORE, None)
    node._gcs_address = node._gcs_client = None
    node.start_gcs_server()
    # Blocks until it answers, or has ended.
    node.get_gcs_client()
    return {"control_store_of": name}


def _dashboard_url(node: Node, temp_dir: str) -> str:
    if not node.webui_url:
        return ""
    # Where a job's driver looks for the cluster; without it, it would take any other on this machine.
    write_ray_address(node.gcs_address, temp_dir)
    return str(node.webui_url)


def _raylet_pid(init_pid: int) -> int | None:
    """The first child of a node's init that lives; orphans that it adopted have come later."""
    children = [p for p in processes.table().values() if p.ppid == init_pid and not p.zombie]
    return min(children, key=lambda child: child.start_ticks).pid if children else None


def _answer(request: dict[str, Any], temp_dir: str, out: IO[str]) -> None:
    _thread.children = []
    again = request.get("start_control_store")
    try:
        answer = _start_control_store(again) if again else _start_node(request, temp_dir)
    # Ray raises bare Exception here; whatever it is, it becomes the keeper's answer.
    except Exception as error:
        logger.exception("%s was not carried out", request)
        subject = {"control_store_of": again} if again else {"failed": request["start"]}
        answer = {**subject, "error": f"{type(error).__name__}: {error}"}
    answer["pids"] = [child.pid for child in _thread.children]
    with _out_lock:
        out.write(json.dumps(answer) + "\n")
        out.flush()


def _reap(starting: bool) -> None:
    """Take notice of raylets and orphans that ended, so that they do not stay as zombies."""
    for child in list(_started):
        if child.poll() is not None:
            _started.remove(child)
    # While Ray starts a node it waits for short-lived children of its own; those must be left to it.
    if not starting and not _started_ended():
        _reap_any()


def _started_ended() -> bool:
    """Whether the next child to be reaped is one whose exit code somebody wants."""
    try:
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return child is not None and any(child.si_pid == started.pid for started in _started)


def _reap_any() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve(source: IO[bytes], out: IO[str], temp_dir: str) -> None:
    # The threads live as long as this process: the kernel's death signal follows the thread, not the process.
    with ThreadPoolExecutor(max_workers=16) as pool:
        starting: set[Future[None]] = set()
        while True:
            # A timeout, because nothing wakes this when a raylet ends.
            if select.select([source], [], [], 0.05)[0]:
                line = source.readline()
                if not line:
                    _stand_in(Path(temp_dir).parent)
                starting.add(pool.submit(_answer, json.loads(line), temp_dir, out))
            starting = {start for start in starting if not start.done()}
            _reap(bool(starting))


def _stand_in(directory: Path) -> None:
    """The keeper is gone: end everything that it would have ended, then this process."""
    session, own = os.getsid(0), os.getpid()

    def members() -> list[processes.Process]:
        found = processes.table()
        below = processes.descendants([own], found)
        # The keeper itself may stay as a zombie for as long as its parent likes.
        return [p for p in found.values() if p.pid != own and not p.zombie and (p.pid in below or p.session == session)]

    try:
        processes.kill_all(members, lambda: None, limit_s=10.0)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        # Not sys.exit: that waits for node starts which may never end now.
        os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    temp_dir = sys.argv[1]
    # Workers start in the directory from which the cluster was started.
    os.chdir(sys.argv[2])
    # Ray may print; the pipe to the keeper is for answers only.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # As the keeper does, so that orphans are below both: whichever of the two is left can end them.
    processes.adopt_orphans()
    services.start_ray_process = _start_process
    services.get_node = _get_node_soon
    # Unbuffered, so that select sees what readline has not taken.
    _serve(os.fdopen(0, "rb", buffering=0), out, temp_dir)


if __name__ == "__main__":
    main()

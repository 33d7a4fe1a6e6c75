"""The process that owns a local cluster: `python -m elastic_cluster.local.keeper FD WORKING_DIR FEATURE...`

FD is its end of the owner's connection; what features there are is in `elastic_cluster.local.features`.

It starts nothing of Ray itself (`elastic_cluster.local.starter` does), so its loop never waits for Ray. It ends the
whole cluster when its last owner is gone: closed its connection, or died in whatever way. Two things make that
complete:

- it and the starter adopt every orphan below them (subreapers), as does the init of each node
  (`elastic_cluster.local.node_init`), so that no process can leave the tree of the cluster, nor that of its node;
- the starter watches it in turn, and does the same work if the keeper itself is killed.

Only if both are killed in the same instant is it left to the kernel, which then kills the raylets (PR_SET_PDEATHSIG)
but neither a stopped worker process nor the directory: the next cluster that starts does
(`elastic_cluster.local.leftovers`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_cluster.local import features, processes
from elastic_cluster.local.autoscaled_cloud import Cloud, CloudPlan
from elastic_cluster.local.leftovers import clear_remains, private_directory
from elastic_cluster.local.node_table import TAG, Entry, Nodes
from elastic_cluster.local.operations import Operations
from elastic_cluster.local.owner import Owner, Waiting
from elastic_cluster.source import ClusterError, NodeState

logger = logging.getLogger(__name__)

_END_LIMIT_S = 20.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_OPERATIONS = frozenset(
    {"kill_node", "remove_node", "freeze_node", "thaw_node", "kill_worker", "kill_process", "kill_control_store"}
)
# What the cloud of a cluster with an autoscaler is asked, by that autoscaler and by owners.
_OF_CLOUD = frozenset({"launch", "instances", "terminate", "offer"})


class Keeper:
    def __init__(self, first: socket.socket, directory: Path, features: Sequence[str] = ()) -> None:
        self.directory = directory
        self.ending = ""
        self._selector = selectors.DefaultSelector()
        self._owners: list[Owner] = []
        self._waiting: list[Waiting] = []
        self._logs_to: str | None = None
        self._cloud: Cloud | None = None
        self._starter = self._spawn_starter()
        self._nodes = Nodes(directory.name, os.getpid())
        self._operations = Operations(self._nodes, self._reap, features)
        self._listener = self._listen()
        self._add_owner(first)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.directory / "keeper.sock"))
        listener.listen()
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._add_owner(listener.accept()[0]))
        return listener

    def _spawn_starter(self) -> subprocess.Popen[bytes]:
        (self.directory / "ray").mkdir()
        starter = subprocess.Popen(
            [sys.executable, "-m", "elastic_cluster.local.starter", str(self.directory / "ray"), os.getcwd()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_PACKAGE_ROOT,
            # A buffer here would hold answers that the selector cannot see.
            bufsize=0,
        )
        self._selector.register(starter.stdout, selectors.EVENT_READ, self._starter_spoke)  # type: ignore[arg-type]
        return starter

    def run(self) -> None:
        """Serve until the cluster must end."""
        while not self.ending:
            now = time.monotonic()
            nearest = min((waiting.deadline for waiting in self._waiting), default=now + 1.0)
            for key, _ in self._selector.select(max(0.0, min(nearest - now, 1.0))):
                key.data()
            self._reap()
            self._answer_waiting()
            if self._cloud is not None:
                self._cloud.tick()

    def end(self) -> None:
        """Kill everything, remove the directory. The owners learn of it when this process ends."""
        logger.info("ending the cluster: %s", self.ending)
        try:
            processes.kill_all(self._nodes.everything, self._reap, _END_LIMIT_S)
        finally:
            if self._logs_to is not None:
                shutil.copytree(
                    self.directory / "ray/session_latest/logs", self._logs_to, symlinks=True, dirs_exist_ok=True
                )
            shutil.rmtree(self.directory, ignore_errors=True)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._starter.pid:
                    self.ending = self.ending or f"the starter ended with status {status}"

    # Owners

    def _add_owner(self, connection: socket.socket) -> None:
        owner = Owner(connection, os.getpid())
        self._owners.append(owner)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._owner_spoke(owner))
        if owner.handle is not None:
            self._selector.register(owner.handle, selectors.EVENT_READ, lambda: self._drop_owner(owner))

    def _drop_owner(self, owner: Owner) -> None:
        if owner not in self._owners:  # Its connection and its process were both seen to end.
            return
        self._owners.remove(owner)
        self._waiting = [waiting for waiting in self._waiting if waiting.owner is not owner]
        self._selector.unregister(owner.lines.connection)
        if owner.handle is not None:
            self._selector.unregister(owner.handle)
        owner.close()
        if all(other.inside for other in self._owners):
            self.ending = self.ending or f"the last owner, process {owner.pid}, is gone"

    def _owner_spoke(self, owner: Owner) -> None:
        if owner not in self._owners:
            return
        try:
            requests, closed = owner.lines.feed()
            for request in requests:
                self._handle(owner, **request)
        except (ValueError, TypeError) as error:
            logger.warning("process %d sent what is not a command: %s", owner.pid, error)
            closed = True
        if closed:
            self._drop_owner(owner)

    def _handle(self, owner: Owner, id: int, do: str, **arguments: Any) -> None:
        try:
            if do == "start":
                self._start(owner, id, **arguments)
            elif do == "add_node":
                self._add_node(owner, id, **arguments)
            elif do == "restart_control_store":
                self._restart_control_store(owner, id, **arguments)
            elif do in _OPERATIONS:
                owner.reply(id, result=getattr(self._operations, do)(**arguments).to_json())
                if do == "kill_node" and self._cloud is not None:
                    self._cloud.machine_lost()
            elif do in _OF_CLOUD and self._cloud is not None:
                self._operations.nodes()
                owner.reply(id, result=getattr(self._cloud, do)(**arguments))
            elif do == "nodes":
                owner.reply(id, result=[info.to_json() for info in self._operations.nodes()])
            elif do == "hello":
                owner.reply(id, result=self._hello())
            elif do == "shutdown":
                self.ending = f"process {owner.pid} asked for it"
            else:
                raise ClusterError(f"there is no command {do!r}")
        except (ClusterError, TimeoutError, TypeError) as error:
            owner.reply(id, error=str(error))

    def _hello(self) -> dict[str, Any]:
        about = {"address": self._nodes.address, "dashboard": self._nodes.dashboard}
        return {"pid": os.getpid(), "directory": str(self.directory), **about}

    # Starting nodes

    def _start(
        self, owner: Owner, request_id: int, nodes: list[dict[str, Any]], limit_s: float, logs_to: str | None,
        cloud: dict[str, Any] | None = None, autoscaler: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """The first of `nodes` is the head. The others are started, all together, when that is up.

        With `cloud` (a CloudPlan) Ray's autoscaler, configured by `autoscaler`, is started with the head.
        """
        self._logs_to = logs_to
        if cloud is not None and autoscaler is not None:
            self._cloud = Cloud(self._nodes, CloudPlan(**cloud), self._tell_starter, self._operations.remove_node)
            file = self.directory / "autoscaler.json"
            autoscaler["provider"]["keeper_socket"] = str(self.directory / "keeper.sock")
            file.write_text(json.dumps(autoscaler))
            nodes[0]["options"]["autoscaling_config"] = str(file)
        entries = [self._nodes.define(node["name"], i == 0, node["options"]) for i, node in enumerate(nodes)]
        self._waiting.append(Waiting(owner, request_id, entries, limit_s, time.monotonic() + limit_s))
        self._tell_starter(entries[0])

    def _add_node(self, owner: Owner, request_id: int, name: str | None, limit_s: float) -> None:
        if self._cloud is not None:
            owner.reply(request_id, result=[self._cloud.one_more().to_json()])
            return
        self._operations.check_control_store()
        self._operations.bury_lost()
        entry = self._nodes.revive(name)
        self._waiting.append(Waiting(owner, request_id, [entry], limit_s, time.monotonic() + limit_s))
        self._tell_starter(entry)

    def _restart_control_store(self, owner: Owner, request_id: int, limit_s: float) -> None:
        head = self._operations.head_without_control_store()
        head.control_store_starting = True
        self._waiting.append(Waiting(owner, request_id, [head], limit_s, time.monotonic() + limit_s))
        self._ask_starter({"start_control_store": head.name})

    def _tell_starter(self, entry: Entry) -> None:
        options = dict(entry.options) if entry.head else {**entry.options, "gcs_address": self._nodes.address}
        tag = {TAG: self._nodes.tag(entry)}
        self._ask_starter({"start": entry.name, "head": entry.head, "tag": tag, "options": options})

    def _ask_starter(self, request: dict[str, Any]) -> None:
        assert self._starter.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # Its end is noticed, and ends the cluster.
            self._starter.stdin.write(json.dumps(request).encode() + b"\n")

    def _starter_spoke(self) -> None:
        assert self._starter.stdout is not None
        line = self._starter.stdout.readline()
        if not line:
            self.ending = self.ending or "the starter is gone"
            return
        answer = json.loads(line)
        if "control_store_of" in answer:
            self._control_store_started(self._nodes.entries[answer["control_store_of"]], answer)
            return
        entry = self._nodes.entries[answer.get("started") or answer["failed"]]
        entry.roots = tuple(process for pid in answer["pids"] if (process := processes.read(pid)) is not None)
        if "failed" in answer:
            self._node_failed(entry, answer["error"])
        else:
            self._node_started(entry, answer)

    def _node_started(self, entry: Entry, answer: dict[str, Any]) -> None:
        entry.state, entry.node_id = NodeState.ALIVE, answer["node_id"]
        entry.raylet_pid = answer["raylet_pid"] or 0
        if entry.head:
            entry.control_store = processes.read(answer["control_store_pid"])
            self._nodes.address, self._nodes.dashboard = answer["address"], answer["dashboard"]
            # What an autoscaler has asked for meanwhile, the cloud starts.
            for other in self._nodes.entries.values():
                if not other.head and self._cloud is None:
                    self._tell_starter(other)

    def _control_store_started(self, head: Entry, answer: dict[str, Any]) -> None:
        head.control_store_starting = False
        started = [process for pid in answer["pids"] if (process := processes.read(pid)) is not None]
        head.roots = (*head.roots, *started)
        if "error" in answer:
            self._refuse_waiting(head, f"the control store did not start: {answer['error']}")
        else:
            head.control_store = started[-1] if started else None

    def _node_failed(self, entry: Entry, error: str) -> None:
        self._nodes.lost(entry)
        self._operations.bury_lost()
        self._refuse_waiting(entry, f"{entry.name} did not start: {error}")

    def _refuse_waiting(self, entry: Entry, error: str) -> None:
        for waiting in [waiting for waiting in self._waiting if entry in waiting.entries]:
            waiting.owner.reply(waiting.request_id, error=error)
            self._waiting.remove(waiting)

    def _answer_waiting(self) -> None:
        for waiting in list(self._waiting):
            if not any(entry.starting for entry in waiting.entries):
                infos = [self._nodes.info(entry).to_json() for entry in waiting.entries]
                waiting.owner.reply(waiting.request_id, result=infos)
                self._waiting.remove(waiting)
            elif time.monotonic() > waiting.deadline:
                waiting.owner.reply(waiting.request_id, error=waiting.late())
                self._waiting.remove(waiting)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    first = socket.socket(fileno=int(sys.argv[1]))
    directory = private_directory()
    log = os.open(directory / "keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # Release the owner's standard streams: a reader that waits for their end would wait for the cluster.
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    (directory / "session").write_text(str(os.getsid(0)))
    os.chdir(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.update(features.settings(sys.argv[3:], directory))
    processes.adopt_orphans()
    clear_remains(directory)
    keeper = Keeper(first, directory, sys.argv[3:])
    signal.signal(signal.SIGTERM, lambda *_: setattr(keeper, "ending", "SIGTERM"))
    try:
        keeper.run()
    finally:
        keeper.end()


if __name__ == "__main__":
    main()

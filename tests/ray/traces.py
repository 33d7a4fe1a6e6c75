"""What a cluster has on this machine: its processes, its directory, its files in shared memory, where it listens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from elastic_cluster import LocalCluster
from elastic_cluster.local import processes
from elastic_cluster.local.node_table import TAG

LIMIT_S = 60.0


def wait_until(condition: Callable[[], object], awaited: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {awaited()}"
        time.sleep(0.02)


class Trace:
    """What a cluster has on this machine: processes, its directory, files in shared memory."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.directory = cluster.directory
        found = processes.table()
        self.pids = {cluster.keeper_pid, *processes.descendants([cluster.keeper_pid], found)}
        self.identities = {found[pid] for pid in self.pids}
        self.shared = {path for pid in self.pids for path in self._shared_files(pid)}

    @staticmethod
    def _shared_files(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
        return {path for path in paths if not path.endswith("(deleted)")}

    def left(self) -> list[str]:
        now = {(p.pid, p.start_ticks) for p in processes.table().values() if not p.zombie}
        tag = f"{self.directory.name}/"
        tagged = [pid for pid, _ in now if processes.environment(pid).get(TAG, "").startswith(tag)]
        old = [p.pid for p in self.identities if (p.pid, p.start_ticks) in now]
        files = [path for path in (str(self.directory), *self.shared) if os.path.exists(path)]
        return [*(f"process {pid}" for pid in {*old, *tagged}), *files]

    def wait_until_nothing_is_left(self) -> None:
        wait_until(lambda: not self.left(), lambda: f"nothing to be left of the cluster; there is {self.left()}")


def listening_addresses(pids: set[int]) -> set[str]:
    """Where any of the processes takes TCP connections, as the kernel writes it (hex)."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry) if entry.is_symlink() else ""
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found

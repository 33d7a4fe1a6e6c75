"""A worker or a server as a process of its own, for tests that kill it: says where it is, and waits to be told.

`python memory_process.py worker LOCAL_NAME HOST PORT NUMEL` takes step 1, commits step 2 or stops in the middle of it.
`python memory_process.py server` serves until it is killed.
"""

from __future__ import annotations

import sys

import memory_samples as samples
from memory_samples import TOKEN

from elastic.checkpoint.memory.snapshot_client import SnapshotClient


def worker(local_name: str, host: str, port: str, numel: str) -> None:
    record = samples.template(0, 1, numel=int(numel))
    memory = SnapshotClient(local_name, TOKEN)
    memory.open(record, record.bytes, [(host, int(port))] if host else [])
    samples.take(memory, record, 1)
    say("taken")
    if sys.stdin.readline() == "half\n":
        view = memory.segment()
        view[: len(view) // 2] = memoryview(samples.content(record, 2))[: len(view) // 2]
        say("half")
    else:
        samples.snap(memory, record, 2)
        say("committed")
    sys.stdin.readline()


def server() -> None:
    started = samples.server()
    say(f"{started.address[1]} {started.local_name}")
    sys.stdin.readline()


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"worker": worker, "server": server}[sys.argv[1]](*sys.argv[2:])

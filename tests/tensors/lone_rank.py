"""A rank that waits for a peer while its groups are made: `python lone_rank.py BACKEND PEER`.

Both ranks are processes. PEER: "absent", or "stopped" after all have met at the generation's store. Rank 0 joins as a
worker does, is aborted from another thread when it stands, and says in one JSON line where it stood, how it got out,
and what is left of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import torch

from elastic.comm import nccl
from elastic.comm.process_group import ProcessGroup
from elastic.comm.rendezvous import host_store
from elastic.core.generation_spec import GenerationSpec, Rendezvous

LIMIT_S = 60.0


class Hooks:
    def __init__(self, backend: str) -> None:
        self._backend = backend

    def device(self, local_rank: int) -> tuple[str, torch.device]:
        return self._backend, torch.device("cuda", 0) if self._backend == "nccl" else torch.device("cpu")

    def before_join(self) -> None: ...

    def after_join(self, backend: str) -> None:
        """The first collective waits for the communicator, as the engine's does."""
        device = self.device(0)[1]
        torch.distributed.all_reduce(torch.ones(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()

    def destroy_groups(self) -> None:
        torch.distributed.destroy_process_group()


def join(rank: int, backend: str, where: Rendezvous) -> ProcessGroup:
    spec = GenerationSpec("run", 1, rank, 2, collective_timeout_s=LIMIT_S)
    return ProcessGroup(spec, where, Hooks(backend))


def peer(backend: str, host: str, port: str) -> None:
    """Stops itself when all have met: with NCCL before its communicator, with gloo before its first collective."""

    def stop(*_: Any) -> None:
        sys.stdout.write("stopped\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSTOP)

    nccl.Communicators.connect = stop  # type: ignore[method-assign]
    Hooks.after_join = stop  # type: ignore[method-assign]
    join(1, backend, Rendezvous(host, int(port))).join(lambda: None)


def stands(thread: threading.Thread) -> list[str]:
    """The functions of its stack, once it has been the same for a while; empty when it has ended."""
    before: list[str] = []
    seen = 0
    while seen < 5 and thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        now = [entry.name for entry in traceback.extract_stack(frame)] if frame is not None else []
        seen, before = (seen + 1 if now == before else 0), now
        time.sleep(0.1)
    return before if thread.is_alive() else []


def main(backend: str, kind: str) -> None:
    nccl.outlive_peers()
    where = host_store("127.0.0.1")
    group, raised = join(0, backend, where), list[str]()
    other = None
    if kind == "stopped":
        command = [sys.executable, __file__, backend, "peer", where.host, str(where.port)]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def run() -> None:
        try:
            group.join(lambda: None)
        except RuntimeError as error:
            raised.append(type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if other is not None:
        assert other.stdout is not None
        assert other.stdout.readline() == "stopped\n"
    stood = stands(thread)
    began = time.monotonic()
    group.abort()
    thread.join(LIMIT_S)
    took_s = time.monotonic() - began
    group.close()
    told = {"stood": stood, "out": not thread.is_alive(), "raised": raised, "abort_s": round(took_s, 3)}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    if other is not None:
        other.kill()
        other.wait(LIMIT_S)
    # A thread of NCCL's that hangs must not keep this process.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[2] == "peer":
        peer(sys.argv[1], *sys.argv[3:])
    else:
        main(*sys.argv[1:])

"""torchft: replicated DDP, a lighthouse and one manager per replica group; one replica group is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks import workload
from benchmarks.children import Children, NotMeasured, free_port
from benchmarks.figures import Figure, not_measured
from benchmarks.marks import Change, completed, read_marks, recovered
from benchmarks.options import Options

CASE, SUBJECT, NAME = "torchft", "torchft", "node SIGKILL -> next step, 4 -> 3"
REPLICAS = 4
NOTES = (
    "state is replicated (DDP), so nothing is resharded; ZeRO shards are not supported",
    "configured as its README and train_ddp.py: min_replicas 1, quorum tick 100 ms, join timeout 10 s, gloo 5 s",
    "a replica's batch stays as it is: 18 of 24 windows after the loss",
)
_STEPS_BETWEEN = 10
_START_LIMIT_S, _RECOVER_LIMIT_S = 120.0, 90.0


def measure(options: Options) -> list[Figure]:
    seconds, repeated, failure = [], [], ""
    folder = options.make_folder("torchft")
    with Children(folder) as children:
        try:
            lighthouse = f"http://127.0.0.1:{_lighthouse(children)}"
            for replica in range(REPLICAS):
                _replica(children, replica, lighthouse)
            for _ in range(options.pick(3, 1)):
                found = _kill_and_bring_back(children, lighthouse)
                seconds.append(found[0])
                repeated.append(found[1])
        except NotMeasured as error:
            failure = str(error)
    if not seconds:
        return [not_measured(CASE, NAME, "s", failure, subject=SUBJECT, notes=NOTES)]
    return [
        Figure(CASE, NAME, "s", tuple(seconds), SUBJECT, notes=NOTES, failure=failure),
        Figure(CASE, f"{NAME}: steps repeated", "steps", tuple(repeated), SUBJECT,
               notes=("the step under way is discarded by everyone and is not counted",)),
    ]  # fmt: skip


def _lighthouse(children: Children) -> int:
    port = free_port()
    program = Path(sys.executable).with_name("torchft_lighthouse")
    flags = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    children.start("lighthouse", [str(program), *flags, "--bind", f"127.0.0.1:{port}"])
    return port


def _replica(children: Children, replica: int, lighthouse: str) -> None:
    children.start_python(
        f"replica-{replica}", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=1",
        f"--master_port={free_port()}", "-m", "benchmarks.bodies.torchft_replica",
        workload.SMALL.name, str(children.folder),
        REPLICA_GROUP_ID=str(replica), NUM_REPLICA_GROUPS=str(REPLICAS), TORCHFT_LIGHTHOUSE=lighthouse,
    )  # fmt: skip


def _kill_and_bring_back(children: Children, lighthouse: str) -> tuple[float, float]:
    victim = REPLICAS - 1
    _all_train(children, time.time())
    at = children.kill(f"replica-{victim}")

    def back() -> Change | None:
        return recovered(read_marks(children.folder), at)

    found = children.until(back, "a step of the others", _RECOVER_LIMIT_S)
    _replica(children, victim, lighthouse)
    return found.seconds, float(found.steps_repeated)


def _all_train(children: Children, since: float) -> None:
    """Until all have done ten steps together."""

    def enough() -> bool:
        done = (step for step in completed(read_marks(children.folder)) if step.at > since)
        return sum(step.world_size == REPLICAS for step in done) >= _STEPS_BETWEEN

    children.until(enough, f"{_STEPS_BETWEEN} steps of all {REPLICAS} replica groups", _START_LIMIT_S)

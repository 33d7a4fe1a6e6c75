"""What of the state crosses the network when one of 16 nodes is lost, by the ledger of bytes of each restore: ranks
go where most of what they need lies, and read their own node's copies first."""

from __future__ import annotations

import random

from benchmarks.children import NotMeasured
from benchmarks.figures import Figure, Target
from benchmarks.options import Options
from benchmarks.own import Cluster, OwnRun, settings
from benchmarks.workload import SMALL
from elastic.core.settings import SnapshotSettings

CASE, NODES = "placement", 16
# A model of the same change with 847 GB of state: 0 to 53 GB over the network, and 247 to 423 where ranks follow slots.
_TARGET = Target("max", 53 / 847)
_LIMIT_S = 400.0


def measure(options: Options) -> list[Figure]:
    with Cluster(NODES) as cluster:
        return [_measure(options, cluster, stage) for stage in (1, 3)[: options.pick(2, 1)]]


def _measure(options: Options, cluster: Cluster, stage: int) -> Figure:
    made = settings(
        f"placement-{stage}", options.folder, workers=(2, NODES),
        snapshots=SnapshotSettings(enabled=True, every_steps=1), save_every=100,
    )  # fmt: skip
    shares: list[float] = []
    restores, which, failure = [], random.Random(stage), ""
    cluster.heal()
    try:
        with OwnRun(cluster, made, SMALL.name, stage) as run:
            for _ in range(options.pick(4, 1)):
                if options.over:
                    raise NotMeasured("the time was over")
                run.wait_steps(3, NODES, _LIMIT_S)
                at, node = run.kill_node(which.randrange(NODES - 1))
                change, incident = run.recovery(at)
                restore = incident["restore"] or {}
                places = restore.get("bytes_from") or {}
                sizes = [change.world_size, change.next_world_size]
                restores.append({"node": node, "world_sizes": sizes, "source": incident["source"], **places})
                if incident["source"] != "memory":
                    raise NotMeasured(f"the state came from {incident['source']}, not from memory")
                shares.append(places["network"] / sum(places.values()))
                cluster.heal()
    except NotMeasured as error:
        failure = str(error)
    return Figure(
        CASE, f"ZeRO-{stage}, {NODES} -> {NODES - 1} nodes: state over the network, of what all ranks read", "x",
        tuple(shares), targets=(_TARGET,), failure=failure, details={"restores": restores},
        notes=("a worker and a replica of another node's on each node; any node but the head is lost",),
    )  # fmt: skip

"""Ray Train v2, elastic, with DeepSpeed: one of four nodes is killed."""

from __future__ import annotations

import time

from elastic_cluster import LocalCluster

from benchmarks.children import ROOT, Children, NotMeasured
from benchmarks.figures import Figure, not_measured
from benchmarks.marks import Change, Mark, completed, read_marks, recovered
from benchmarks.options import Options
from benchmarks.workload import SMALL

CASE, SUBJECT, NAME = "ray-train", "Ray Train v2 elastic", "node SIGKILL -> next step, 4 -> 3, ZeRO-1"
NODES, SAVE_EVERY = 4, 10
NOTES = (
    "RAY_TRAIN_V2_ENABLED=1, ScalingConfig(num_workers=(2, 4)), max_failures=3; every timeout at its default",
    f"a checkpoint every {SAVE_EVERY} steps; ds_to_universal and load_universal on restart",
    "sample position and learning rate are left to the user, and not restored here",
)
_START_LIMIT_S, _RECOVER_LIMIT_S = 180.0, 300.0


def measure(options: Options) -> list[Figure]:
    folder = options.make_folder("ray-train")
    switch = {"RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": str(ROOT)}
    with Children(folder) as children, LocalCluster.start(NODES, cpus_per_node=1, environment=switch) as cluster:
        try:
            children.start_python(
                "driver", "benchmarks.bodies.ray_train_driver", cluster.address, SMALL.name, "1", "2", str(NODES),
                str(folder), str(SAVE_EVERY), RAY_TRAIN_V2_ENABLED="1",
            )  # fmt: skip
            found = _kill_one(children, cluster)
        except NotMeasured as error:
            return [not_measured(CASE, NAME, "s", str(error), subject=SUBJECT, notes=NOTES)]
    return [
        Figure(CASE, NAME, "s", (found.seconds,), SUBJECT, notes=NOTES),
        Figure(CASE, f"{NAME}: steps repeated", "steps", (float(found.steps_repeated),), SUBJECT),
    ]


def _kill_one(children: Children, cluster: LocalCluster) -> Change:
    def marks() -> list[Mark]:
        return read_marks(children.folder)

    def enough() -> bool:
        done = completed(marks())
        return bool(done) and done[-1].world_size == NODES and done[-1].step >= 2 * SAVE_EVERY + SAVE_EVERY // 2

    children.until(enough, f"{SAVE_EVERY} steps of {NODES} workers", _START_LIMIT_S)
    # The controller of Ray Train is on the driver's node, which is the head.
    victim = next(node.name for node in reversed(cluster.nodes()) if not node.head)
    at = time.time()
    cluster.kill_node(victim)
    return children.until(lambda: recovered(marks(), at), "a step after the loss of a node", _RECOVER_LIMIT_S)

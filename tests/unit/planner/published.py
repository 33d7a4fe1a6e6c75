"""Measured and published step times: the rows that the planner's error is counted on."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic.planner.cost_model import Constants, CostModel
from elastic.planner.devices import DEVICES, Cluster
from elastic.planner.model_shape import ModelShape
from elastic.planner.strategy import Mesh, Recompute, Strategy
from elastic.planner.workload import Workload, workload

_DATA = Path(__file__).resolve().parents[2] / "data" / "vtrain"
A100 = DEVICES["A100"]
# 4 x 200 Gb/s per node: "inter_node_bandwidth": 800 in vTrain's own configurations.
VTRAIN = Cluster(A100, 64, 8, 100e9)
# Selene: 8 x 200 Gb/s per node (Narayanan et al., arXiv 2104.04473, section 5).
SELENE = Cluster(A100, 420, 8, 200e9)


@dataclass(frozen=True)
class Measured:
    """One measured step. `case` groups the rows among which a planner would choose."""

    case: tuple[float, ...]
    work: Workload
    seconds: float


def gpt(hidden: int, heads: int, layers: int, sequence: int = 2048) -> ModelShape:
    return ModelShape(layers, hidden, heads, 51_200, sequence)


def megatron(
    batch: int, micro: int, virtual: int = 1, recompute: Recompute = "full", sequence_parallel: bool = False
) -> Strategy:
    return Strategy(
        0, batch, micro, recompute, virtual_stages=virtual, sequence_parallel=sequence_parallel, scatter_gather=True
    )


def vtrain(name: str) -> list[Measured]:
    """`multi`: cases are the four model sizes. `single`: GPUs, batch, hidden size, layers."""
    with open(_DATA / f"ground_truth_{name}.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return [_row(row) for row in rows]


def _row(row: dict[str, float]) -> Measured:
    size = {key: int(value) for key, value in row.items()}
    model = gpt(size["hidden size"], size["attention heads"], size["# layers"], size["sequence length"])
    mesh = Mesh(dp=size["data parallelism"], tp=size["tensor parallelism"], pp=size["pipeline parallelism"])
    work = workload(model, megatron(size["global batch"], size["micro batch"]), mesh)
    keys = ("# GPUs", "global batch", "hidden size", "# layers")
    return Measured(tuple(row[key] for key in keys), work, row["iteration time (ms)"] / 1e3)


# Narayanan et al., SC21 (arXiv 2104.04473), Table 1: hidden, layers, heads, tp, pp, virtual stages (of the scripts in
# Megatron-LM), GPUs, batch, micro-batch, teraFLOP/s per GPU.
_SC21 = (
    (2304, 24, 24, 1, 1, 1, 32, 512, 16, 137),
    (3072, 30, 32, 2, 1, 1, 64, 512, 16, 138),
    (4096, 36, 32, 4, 1, 1, 128, 512, 16, 142),
    (6144, 40, 48, 8, 1, 1, 256, 1024, 8, 135),
    (8192, 48, 64, 8, 2, 1, 512, 1536, 4, 138),
    (10240, 60, 80, 8, 4, 3, 1024, 1792, 2, 140),
    (12288, 80, 96, 8, 8, 2, 1536, 2304, 2, 148),
    (16384, 96, 128, 8, 16, 2, 1920, 2160, 1, 155),
    (20480, 105, 128, 8, 35, 3, 2520, 2520, 1, 163),
    (25600, 128, 160, 8, 64, 1, 3072, 3072, 1, 163),
)


def sc21() -> list[Measured]:
    """Seconds from the paper's teraFLOP/s by its equation 3, which counts recomputation."""
    found = []
    for hidden, layers, heads, tp, pp, virtual, gpus, batch, micro, teraflops in _SC21:
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51_200 / (16 * layers * hidden))
        mesh = Mesh(dp=gpus // tp // pp, tp=tp, pp=pp)
        work = workload(gpt(hidden, heads, layers), megatron(batch, micro, virtual), mesh)
        found.append(Measured((float(hidden),), work, flops / (gpus * teraflops * 1e12)))
    return found


# Korthikanti et al. (arXiv 2205.05198), Table 5: hidden, layers, heads, pp, virtual stages, batch, micro-batch,
# seconds with full recomputation, and with sequence parallelism and selective recomputation. tp 8, dp 1.
_TABLE_5 = (
    (6144, 48, 64, 1, 1, 4, 4, 1.42, 1.10),
    (12288, 96, 96, 8, 3, 64, 1, 18.13, 13.75),
    (20480, 105, 128, 35, 3, 280, 1, 49.05, 37.83),
    (25600, 128, 160, 64, 1, 512, 1, 94.42, 71.49),
)


def korthikanti() -> list[Measured]:
    found = []
    for hidden, layers, heads, pp, virtual, batch, micro, full, selective in _TABLE_5:
        model, mesh = gpt(hidden, heads, layers), Mesh(tp=8, pp=pp)
        for strategy, seconds in (
            (megatron(batch, micro, virtual), full),
            (megatron(batch, micro, virtual, "selective", True), selective),
        ):
            found.append(Measured((float(hidden),), workload(model, strategy, mesh), seconds))
    return found


def errors(cluster: Cluster, constants: Constants, rows: Iterable[Measured]) -> list[float]:
    """Signed, relative."""
    cost = CostModel(cluster, constants)
    return [cost.step(row.work).total_s / row.seconds - 1 for row in rows]


def mape(found: Iterable[float]) -> float:
    sizes = [abs(error) for error in found]
    return sum(sizes) / len(sizes)


def regret(cluster: Cluster, constants: Constants, rows: list[Measured]) -> float:
    """How much slower the plan that the model chooses was, in measured time, than the best measured one."""
    cost = CostModel(cluster, constants)
    chosen = min(rows, key=lambda row: cost.step(row.work).total_s)
    return chosen.seconds / min(row.seconds for row in rows) - 1

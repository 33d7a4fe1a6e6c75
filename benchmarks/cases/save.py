"""How long a durable save blocks training, and `torch.distributed.checkpoint.async_save` of the same state."""

from __future__ import annotations

from typing import Any

from benchmarks import crews
from benchmarks.children import Children, NotMeasured
from benchmarks.figures import Figure, Target, not_measured, ratio, statistic
from benchmarks.options import Options
from benchmarks.own import Cluster, OwnRun, settings
from benchmarks.workload import LARGE, SMALL, Size
from elastic.core.settings import SnapshotSettings

CASE, NAME = "save", "stall per durable save"
WORKERS, STAGE, SAVE_EVERY = 2, 2, 3
DCP = "torch DCP async_save"


def measure(options: Options) -> list[Figure]:
    size, saves = SMALL if options.quick else LARGE, options.pick(8, 3)
    own, *more = _own(options, size, saves)
    folder = options.make_folder("dcp")
    with Children(folder) as children:
        try:
            job: dict[str, Any] = {"size": size.name, "stage": STAGE, "folder": str(folder), "saves": saves}
            told = crews.do(children, "dcp_save", WORKERS, **job)
            # The first one makes its threads and buffers.
            turns = [max(turn) for turn in zip(*(rank["seconds"] for rank in told), strict=True)][1:]
            notes = (f"{told[0]['bytes'] / 1e6:.0f} MB per rank: fp32 masters and both moments of ZeRO-{STAGE}",)
            peer = Figure(CASE, NAME, "s", tuple(turns), DCP, notes=notes)
        except NotMeasured as error:
            peer = not_measured(CASE, NAME, "s", str(error), subject=DCP)
    share = ratio(CASE, "stall of a durable save over DCP's", own, peer, Target("median", 0.05))
    return [own, *more, peer, share]


def _own(options: Options, size: Size, saves: int) -> list[Figure]:
    made = settings("save", options.folder, workers=(WORKERS, WORKERS), save_every=SAVE_EVERY,
                    snapshots=SnapshotSettings(enabled=True))  # fmt: skip
    try:
        with Cluster(WORKERS) as cluster, OwnRun(cluster, made, size.name, STAGE) as run:

            def saved() -> list[Any]:
                return [record for record in run.records() if record["type"] == "checkpoint"]

            run.until(lambda: len(saved()) > (2 if options.over else saves), f"{saves + 1} checkpoints", 240.0)
            steps = [step for record in run.records() if record["type"] == "steps" for step in record["steps"]]
            records = saved()[1:]
    except NotMeasured as error:
        return [not_measured(CASE, NAME, "s", str(error))]
    stalls = tuple(float(record["stall_s"] or 0.0) for record in records)
    after, others = _durations(steps, {record["step"] for record in records})
    noise = statistic(others, "p95") - statistic(others, "median")
    stall = Figure(CASE, NAME, "s", stalls, notes=(f"{size.name} model",), details={"after": after, "others": others})
    # The copies continue during the next step, which waits for what is left of them before its update.
    extra = tuple(seconds - statistic(others, "median") for seconds in after)
    return [
        stall,
        Figure(CASE, "step after a save, beyond the median of the others", "s", extra),
        Figure(CASE, "noise of a step: p95 beyond the median", "s", (noise,)),
        Figure(CASE, "stall over that noise", "x", tuple(value / noise for value in stalls),
               targets=(Target("median", 1.0),), notes=("below 1 the stall is below the noise",)),
    ]  # fmt: skip


def _durations(steps: list[Any], saved: set[int]) -> tuple[list[float], list[float]]:
    """Seconds of the steps that came right after a save, and of those that neither came after one nor ended in one."""
    later = [step for step in steps if step["step"] > SAVE_EVERY]
    after = [step["duration_s"] for step in later if step["step"] - 1 in saved]
    others = [step["duration_s"] for step in later if not {step["step"], step["step"] - 1} & saved]
    return after, others

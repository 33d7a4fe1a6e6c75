"""What a restarted controller needs to read its journal: seconds and memory, with replay points and without."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import Figure, Target
from benchmarks.options import Options
from elastic.core import events as ev
from elastic.core.data.steps import StepReport
from elastic.core.settings import RunSettings
from elastic.observe.journal import JournalWriter
from elastic.runtime.controller.control_loop import ControlLoop
from elastic.runtime.controller.records import Records
from elastic.runtime.controller.replay import replay

SETTINGS = RunSettings("run", max_steps=1 << 40)
_TURN = 1000

_RESTART = """
import json, resource, sys, time
from elastic.observe.journal import JournalWriter
from elastic.runtime.controller.replay import replay
from elastic.runtime.controller.replay_state import reader
from benchmarks.cases.restart import SETTINGS
def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
url, points = sys.argv[1], sys.argv[2] == "points"
before, begun = peak_mb(), time.perf_counter()
writer = JournalWriter(url, "run", read_point=reader(SETTINGS) if points else None)
old = replay(writer.replayed, SETTINGS, writer.problems, writer.point)
seconds = time.perf_counter() - begun
step = old.telemetry(SETTINGS, 0.0, lambda _: None).step
print(json.dumps({"seconds": seconds, "mb": peak_mb() - before, "step": step, "records": len(writer.replayed)}))
"""


def measure(options: Options) -> list[Figure]:
    """One worker trains; each step is a report through the real loop, its records go to a real journal on a disk."""
    count = options.pick(1_000_000, 20_000)
    url = str(options.make_folder("journal"))
    asyncio.run(_train(url, count))
    size_mb = sum(file.stat().st_size for file in Path(url).rglob("*") if file.is_file()) / 1e6
    notes = (f"{count:,} steps of one rank, {size_mb:.0f} MB of journal",)
    figures = []
    for points in (True, False):
        runs = [_restart(url, points) for _ in range(options.pick(5 if points else 1, 1))]
        wrong = [run for run in runs if run["step"] != count]
        if wrong:
            raise AssertionError(f"a restart knows of {wrong[0]['step']} steps, not of {count}")
        how = "from a replay point" if points else "from all records"
        targets = {"s": 2.0, "MB": 300.0} if points else {}
        figures += [
            Figure(
                "restart",
                f"{what} of a restart {how}",
                unit,
                tuple(float(run[key]) for run in runs),
                targets=(Target("max", targets[unit]),) if unit in targets else (),
                notes=(*notes, f"{runs[0]['records']:,} records read"),
            )
            for what, unit, key in (("time", "s", "seconds"), ("memory", "MB", "mb"))
        ]
    return figures


def _restart(url: str, points: bool) -> dict[str, float]:
    command = [sys.executable, "-c", _RESTART, url, "points" if points else "all"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Nobody:
    """In place of the executor and the committer: nothing is carried out."""

    def perform(self, action: object) -> None:
        pass

    def placed(self, slot: int, node: str) -> None:
        pass


async def _train(url: str, count: int) -> None:
    journal, records = JournalWriter(url, "run"), Records()
    queue: list[ev.Event] = []
    old = replay(journal.replayed, SETTINGS)
    loop = ControlLoop(SETTINGS, old, records, queue.append, lambda: None)
    nobody = _Nobody()
    loop.connect(nobody, nobody)  # type: ignore[arg-type]
    records.open(journal)

    async def turn(*events: ev.Event) -> None:
        queue.extend(events)
        taken = list(queue)
        queue.clear()
        await loop.turn(taken)

    await turn(ev.RunStarted())
    await turn(ev.SlotPlaced(0, "node"))
    await turn(ev.WorkerReady(0, 1, "host"))
    await turn(ev.GroupJoined(1, 0), ev.TrainingReached(1, 0, 0))
    for step in range(1, count + 1):
        report = StepReport(step, 2.0, ((8 * (step - 1), 8 * step),), 8, 0.5, grad_norm=1.0, learning_rates=(1e-3,),
                            generation=1, rank=0)  # fmt: skip
        _, first = loop.telemetry.report(report, loop.clock.now())
        queue.extend([first] if first else [])
        if step % _TURN == 0:
            await turn()
            await records.write()
    await turn()
    await records.write()

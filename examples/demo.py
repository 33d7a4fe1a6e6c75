"""What `make demo` runs: one job twice, undisturbed and with a node killed and brought back, and then the difference.

Everything is kept in runs/demo-<time>. Ends with 0 only if both runs reached their end, every sample was seen exactly
once, and the losses of all steps agree. With `--links`: what strategies of the exchange cost on links that change, see
links.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from elastic.observe.journal import JournalReader
from elastic.observe.text import duration, table

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "demo.yaml"
NODES = 4
FAULTS = "kill-node@step=35,add-node@step=40"

# Two runs differ by the order of additions alone, which is another one at each world size: fp32 rounds at 6e-8, and
# training carries every difference on. Seen: 7e-7 after 180 steps.
TOLERANCE = 1e-4

NAMES = ("undisturbed", "disturbed")
MARKS = ("detected", "decided", "rebuilt", "restored", "first_step")
Summary = Mapping[str, Any]


def main(arguments: Sequence[str] = ()) -> int:
    if list(arguments[:1]) == ["--links"]:
        # Which uses functions of this module.
        import links

        return links.main(arguments[1:])
    if arguments:
        say(f"demo.py: {arguments[0]} is no option of the demo; there is --links")
        return 2
    folder = ROOT / "runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    if not (run(folder, "undisturbed") and run(folder, "disturbed", "--chaos", FAULTS)):
        say(f"the demo did not come to its end; what there is lies in {folder}")
        return 1
    text, wrong = result(folder)
    (folder / "result.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    show("", *text, "", f"kept in {folder.relative_to(ROOT)}; its history:", story_command(folder))
    return 1 if wrong else 0


def run(folder: Path, run_id: str, *more: str, job: Path = JOB, nodes: int = NODES) -> bool:
    """Through the command line, its progress shown live; False if the run did not reach its end."""
    command = ["run", str(job), "--nodes", str(nodes), "--run-id", run_id, "--storage", str(folder)]
    command += ["--summary", str(folder / f"{run_id}.json"), *more]
    # SIGTERM ends the run, too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    say(f"\n{run_id}: elastic run {os.path.relpath(job, ROOT)} --nodes {nodes} {' '.join(more)}".rstrip())
    with open(folder / f"{run_id}.txt", "wb") as report:
        # In a session of its own, since Ctrl-C in a terminal makes `elastic run` leave its run to the background.
        child = subprocess.Popen(
            [sys.executable, "-m", "elastic_jobs.cli", *command],
            stdout=report,
            # Modules that a job names are found here.
            cwd=ROOT / "examples",
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        try:
            return child.wait() == 0
        except (KeyboardInterrupt, SystemExit):
            # The local cluster ends with its last owner.
            child.kill()
            child.wait()
            Console(stderr=True).show_cursor()
            raise


def result(folder: Path) -> tuple[list[str], bool]:
    """What the two runs in `folder` came to, as lines, and whether anything in it is wrong."""
    still, moved = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("undisturbed", "disturbed")
    )
    losses = losses_of(folder, "undisturbed"), losses_of(folder, "disturbed")
    late = (
        []
        if any(i["kind"] == "resize" for i in moved["incidents"])
        else ["the new worker was not ready before the end"]
    )
    wrong = [f"WRONG: {problem}" for problem in problems(still, moved, *losses)]
    return [*recoveries(moved), *late, "", *comparison(still, moved, *losses), *wrong], bool(wrong)


def losses_of(folder: Path, run_id: str) -> dict[int, float]:
    """Step -> loss, from the journal. A step that was repeated counts as it was done last."""
    records = JournalReader(str(folder), run_id).records()
    steps = (step for record in records if record["type"] == "steps" for step in record["steps"])
    return {step["step"]: step["loss"] for step in steps}


def recoveries(moved: Summary) -> list[str]:
    """One column per incident; times count from the fault itself, or for a planned change from the decision."""
    columns = {heading(incident, moved): column(incident, moved) for incident in moved["incidents"]}
    names = list(next(iter(columns.values()), {}))
    return table([{"what happened": name, **{head: cells[name] for head, cells in columns.items()}} for name in names])


def heading(incident: Summary, moved: Summary) -> str:
    cause = cause_of(incident, moved)
    return str(cause["fault"] if cause else incident["kind"])


def cause_of(incident: Summary, moved: Summary) -> Summary | None:
    """The last fault that was injected before it."""
    earlier = [fault for fault in moved["faults"] if fault["at"] <= incident["at"]]
    return earlier[-1] if earlier else None


def column(incident: Summary, moved: Summary) -> dict[str, str]:
    planned, cause = incident["planned"], cause_of(incident, moved)
    seconds = incident.get("seconds_from_fault") or incident["seconds"]
    # A planned change happens at the end of a step, an unplanned one in the middle of the next.
    step = incident["resumed_step"] if planned else incident["step"]
    ready = duration(incident["at"] - cause["at"]) if planned and cause else None
    return {
        "when": f"after {duration(incident['at'] - moved['started_at'])}, step {step}",
        "lost": incident["lost"] or "-",
        "new worker": f"ready after {ready}" if ready else "-",
        "world size": f"{incident['world_size']} -> {incident['next_world_size']}",
        **{mark.replace("_", " "): duration(seconds[mark]) for mark in MARKS},
        **({"detected": "planned"} if planned else {}),
        "state from": f"{incident['source']}, step {incident['resumed_step']}",
        "steps repeated": str(incident["steps_repeated"]),
    }


def comparison(
    still: Summary,
    moved: Summary,
    still_losses: Mapping[int, float],
    moved_losses: Mapping[int, float],
    names: Sequence[str] = NAMES,
) -> list[str]:
    rows = [
        {"": name, names[0]: one, names[1]: other}
        for name, one, other in zip(cells(still), cells(still).values(), cells(moved).values(), strict=True)
    ]
    step, largest = largest_difference(still_losses, moved_losses)
    return [
        *table(rows),
        "",
        f"largest difference of the loss over {len(still_losses)} steps: {largest:.1e} (step {step})",
    ]


def cells(summary: Summary) -> dict[str, str]:
    samples = summary["samples"]
    return {
        "status": summary["status"],
        "steps": str(summary["steps"]),
        "world sizes": " -> ".join(str(generation["world_size"]) for generation in summary["generations"]),
        "samples seen": str(samples["seen"]),
        "missing, repeated": f"{samples['missing']}, {samples['repeated']}",
        "loss at the end": f"{summary['final_loss']:.6f}",
        "wall time": duration(summary["wall_s"]),
    }


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[int, float]:
    """(step, difference) over the steps that both have done."""
    step = max(one.keys() & other.keys(), key=lambda step: abs(one[step] - other[step]))
    return step, abs(one[step] - other[step])


def problems(
    still: Summary,
    moved: Summary,
    still_losses: Mapping[int, float],
    moved_losses: Mapping[int, float],
    names: Sequence[str] = NAMES,
) -> Iterator[str]:
    for name, summary in zip(names, (still, moved), strict=True):
        samples = summary["samples"]
        if samples["missing"] or samples["repeated"] or not samples["seen"]:
            yield f"the {name} run's samples are not exact: {samples}"
    if not any(incident["kind"] == "node-lost" for incident in moved["incidents"]):
        yield f"no node was lost in the {names[1]} run"
    if still_losses.keys() != moved_losses.keys():
        yield "the runs did not do the same steps"
    elif largest_difference(still_losses, moved_losses)[1] > TOLERANCE:
        yield f"the losses differ by more than {TOLERANCE}"


def story_command(folder: Path) -> str:
    return f"  .venv/bin/elastic story disturbed --storage {folder.relative_to(ROOT)}"


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

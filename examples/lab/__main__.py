"""`make lab`: all-reduce by three algorithms, then one training with ZeRO stage 0 and with stage 3, and a node that is
killed in the middle of each; what was predicted and what was measured.

Everything is kept in runs/lab-<time>: page.html has the figures. Ends with 0 only if both runs reached their end, every
sample was seen once, the losses agree, and bytes are those of the formulas.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo
import yaml
from demo import ROOT, say

from elastic.observe.journal import JournalReader
from elastic.planner.links import Link
from lab import allreduce, figures, report
from lab.classifier import Shape
from lab.prepare import Prepared, prepare

JOB = ROOT / "examples" / "lab.yaml"
NODES = 3
STAGES = (0, 3)
# Of the all-reduce: four ranks, two to a node.
RANKS, PER_NODE = 4, 2
SIZES = (4096, 65536, 1 << 20, 1 << 22)
REPETITIONS = 20
# What --full changes in the job: DistilBERT's own shape, a rate for pretrained weights, and about as many buckets.
FULL_CONFIG = {**asdict(Shape()), "lr": 5e-5}
FULL_ZERO = {"reduce_bucket_size": 19_000_000, "stage3_prefetch_bucket_size": 4_000_000}
# Fewer, and none could be watched before and after the killed node.
FEWEST_STEPS = 8


@dataclass(frozen=True)
class Run:
    """One of the two. `watched`: lines of the training function's log, of all ranks."""

    stage: int
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    watched: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        return f"stage-{self.stage}"


def main() -> int:
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    options = _options(job)
    folder = Path(options.folder or ROOT / "runs" / time.strftime("lab-%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    said: list[str] = []

    def tell(*lines: str) -> None:
        demo.show(*lines)
        said.extend(lines)

    tell("1. What is trained")
    prepared = prepare(folder, job["config"], _batches(job)[0], options.full, options.hub_wait, tell)
    tell("", "2. One all-reduce, by three algorithms")
    measured = allreduce.on_ranks(RANKS, allreduce.times, PER_NODE, SIZES, options.repetitions)[0]
    link = report.fitted(measured["pair"])
    tell(*report.all_reduce(measured, link, RANKS, PER_NODE))
    if not all(train(folder, job, prepared, stage) for stage in STAGES):
        say(f"a run did not come to its end; what there is lies in {folder}")
        return 1
    runs = [read(folder, stage) for stage in STAGES]
    losses = [demo.losses_of(folder, run.name) for run in runs]
    wrong = list(compared(runs, losses, prepared, link, _batches(job), tell))
    pictures = figures.pictures(measured, link, (RANKS, PER_NODE), runs, losses)
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(figures.standalone(picture), encoding="utf-8")
    (folder / "page.html").write_text(figures.page(said, pictures), encoding="utf-8")
    tell("", f"figures: {folder / 'page.html'}")
    (folder / "lab.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _options(job: dict[str, Any]) -> argparse.Namespace:
    """`job` is changed where the options say so."""
    parser = argparse.ArgumentParser(prog="lab", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="DistilBERT itself, 66 M parameters: takes long on CPUs")
    parser.add_argument("--sentences", type=int, metavar="N", help="train on N of them (default: those of lab.yaml)")
    parser.add_argument("--hub-wait", type=float, default=60.0, metavar="S", help="wait S seconds for the hub at most")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N", help="of each all-reduce")
    parser.add_argument("--folder", metavar="DIR", help="where everything is kept (default: runs/lab-<time>)")
    options, (batch, _) = parser.parse_args(), _batches(job)
    if options.full:
        job["config"] |= FULL_CONFIG
        job["deepspeed"]["zero_optimization"] |= FULL_ZERO
    if options.sentences is not None:
        if options.sentences < FEWEST_STEPS * batch:
            parser.error(
                f"--sentences {options.sentences}: fewer than {FEWEST_STEPS} steps of {batch}, so that nothing could "
                f"be seen before and after the killed node; give {FEWEST_STEPS * batch} or more"
            )
        job["config"]["sentences"] = options.sentences
    if options.folder is not None and Path(options.folder).exists():
        parser.error(f"--folder {options.folder}: it exists already; name another one")
    if options.repetitions < 1:
        parser.error(f"--repetitions {options.repetitions}: at least 1")
    return options


def _batches(job: Mapping[str, Any]) -> tuple[int, int]:
    """The global batch and the micro-batch."""
    return job["deepspeed"]["train_batch_size"], job["deepspeed"]["train_micro_batch_size_per_gpu"]


def train(folder: Path, job: Mapping[str, Any], prepared: Prepared, stage: int) -> bool:
    """One run to its end. A node is killed in its middle, and one step before and one after that are watched."""
    last, name = prepared.count // _batches(job)[0], f"stage-{stage}"
    kill = last // 2
    watched = folder / f"watched-{name}"
    watched.mkdir()
    config = {**prepared.config, "folder": str(watched), "watched_steps": [kill - 2, last - 2]}
    zero = {**job["deepspeed"]["zero_optimization"], "stage": stage}
    changed = {**job, "config": config, "deepspeed": {**job["deepspeed"], "zero_optimization": zero}}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(changed), encoding="utf-8")
    return demo.run(folder, name, "--chaos", f"kill-node@step={kill}", job=file, nodes=NODES)


def read(folder: Path, stage: int) -> Run:
    name = f"stage-{stage}"
    files = sorted((folder / f"watched-{name}").glob("*.jsonl"))
    return Run(
        stage,
        list(JournalReader(str(folder), name).records()),
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")),
        [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()],
    )


def compared(
    runs: Sequence[Run],
    losses: Sequence[Mapping[int, float]],
    prepared: Prepared,
    link: Link,
    batches: tuple[int, int],
    tell: Callable[..., None],
) -> Iterator[str]:
    """Tells of each run and of both; yields what is wrong."""
    problems = []
    for number, run in enumerate(runs, 3):
        tell("", f"{number}. ZeRO stage {run.stage}")
        for line in run.watched:
            if line["rank"] == 0:
                tell(*report.synchronisation(line, sum(prepared.tensors)), "")
        wire, bad_bytes = report.wire(run.records, prepared.tensors, run.stage, batches, link)
        held, bad_memory = report.held(run.watched, prepared.tensors, run.stage)
        tell(*wire, "", *held, "", *demo.recoveries(run.summary))
        problems += [f"stage {run.stage}: {problem}" for problem in [*bad_bytes, *bad_memory]]
        if len(run.summary["generations"]) < 2:
            problems.append(f"stage {run.stage}: no node was lost")
    one, other = runs
    both = (one.summary, other.summary, losses[0], losses[1], (one.name, other.name))
    tell("", "5. Both", *demo.comparison(*both))
    for problem in [*problems, *demo.problems(*both)]:
        tell(f"WRONG: {problem}")
        yield problem


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""`python -m benchmarks`: every case in a process of its own with a limit, then one table and one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine, table
from benchmarks.children import Children, environment
from benchmarks.figures import Figure, not_measured
from benchmarks.options import Options
from benchmarks.registry import CASES, Case, find

_CLEAN_UP_S = 30.0
RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every case that was asked for came to its end, whatever its figures are."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.child is not None:
        case = find(asked.case[0])
        enough = time.monotonic() + case.enough_s(asked.quick)
        return _measure_here(case, Options(Path(asked.child), asked.quick, enough, asked.plan))
    if asked.plan and "recovery" not in (asked.case or ()):
        parser.error("--plan is one of the case recovery: give --case recovery with it, beside others if you like")
    usual = [case for case in CASES if case.usual and not (asked.quick and case.peer)]
    chosen = [find(name) for name in asked.case] or usual
    signal.signal(signal.SIGTERM, _terminated)
    minutes = sum(case.expected_s(asked.quick) for case in chosen) / 60
    _say(f"{len(chosen)} cases, about {minutes:.0f} minutes on two quiet cores: {', '.join(c.name for c in chosen)}")
    about = {"machine": machine.describe(), "quick": asked.quick, "before": machine.load(), "argv": sys.argv[1:]}
    ran = [_measure_apart(case, asked.quick, asked.plan) for case in chosen]
    figures = table.with_ratios([figure for run in ran for figure in run["figures"]])
    if asked.quick:
        # What a smoke run says about a target would be taken for the answer.
        figures = [replace(figure, targets=()) for figure in figures]
    result = {
        **about, "after": machine.load(), "cases": [{**run, "figures": len(run["figures"])} for run in ran],
        "figures": [figure.to_json() for figure in figures],
    }  # fmt: skip
    target = asked.out or RESULTS / f"{time.strftime('%Y-%m-%d-%H%M')}{'-quick' if asked.quick else ''}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table.show(figures, about["machine"])
    _say(f"kept in {target}")
    return 1 if any(run["failure"] for run in ran) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--case", action="append", default=[], choices=[case.name for case in CASES],
                        help="only this one; may be given several times")  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run of the project's own cases; figures are no use"
    )
    parser.add_argument("--plan", default="", metavar="TEXT",
                        help="of --case recovery ZeRO-1, and what is named so: 'sp 2', 'sp 2; ep 2'")  # fmt: skip
    parser.add_argument("--out", type=Path, help="the JSON file; default: benchmarks/results/<date>.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _terminated(number: int, frame: Any) -> None:
    """SIGTERM is an interrupt: what was started is ended and removed on the way out."""
    raise KeyboardInterrupt


def _measure_apart(case: Case, quick: bool, plan: str) -> dict[str, Any]:
    """In a process of its own: one that hangs, or that leaves something behind, spoils no other."""
    _say(f"{time.strftime('%H:%M:%S')} {case.name}: {case.about}")
    folder = Path(tempfile.mkdtemp(prefix=f"benchmark-{case.name}-"))
    before, begun = machine.load(), time.monotonic()
    command = [sys.executable, "-m", "benchmarks", "--case", case.name, "--child", str(folder), "--plan", plan]
    failure = ""
    try:
        with Children(folder) as children:
            child = children.start(case.name, [*command, *(["--quick"] if quick else [])], environment())
            try:
                status = child.wait(case.limit_s(quick))
                failure = "" if status == 0 else f"ended with {status}: {children.tail(case.name)}"
            except subprocess.TimeoutExpired:
                failure = f"took longer than {case.limit_s(quick):.0f} s: {children.tail(case.name)}"
            finally:
                # Also on an interrupt: a local cluster ends with its owner, and removes its files when it does.
                children.kill_gently(case.name, _CLEAN_UP_S)
        figures = _read(folder / "figures.json")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failure:
        figures.append(not_measured(case.name, case.about, "", failure))
    seconds = round(time.monotonic() - begun, 1)
    return {"case": case.name, "seconds": seconds, "before": before, "after": machine.load(), "failure": failure,
            "figures": figures}  # fmt: skip


def _measure_here(case: Case, options: Options) -> int:
    os.environ.update(environment())
    figures = case.load()(options)
    text = json.dumps([figure.to_json() for figure in figures])
    (options.folder / "figures.json").write_text(text, encoding="utf-8")
    return 0


def _read(file: Path) -> list[Figure]:
    if not file.is_file():
        return []
    return [Figure.from_json(data) for data in json.loads(file.read_text(encoding="utf-8"))]


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        _say("interrupted; nothing of it is left")
        sys.exit(130)

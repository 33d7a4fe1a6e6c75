"""What `demo.py --links` runs: one job whose links change in mid-run, with `strategy: auto` and with each exact one by
itself; what the exchange of gradients cost, and how much more auto's did than the best of them in each phase.

The links are emulated (emulated_links.py), all else is real: nodes, workers, messages over gloo, seconds. Everything is
kept in runs/links-<time>. Ends with 0 only if all runs reached their end and their losses agree.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import demo
import yaml
from demo import ROOT, say
from emulated_links import Links

from elastic.core.data.collectives import CollectiveUse
from elastic.core.errors import UsageError
from elastic.core.policy.communication import AUTO, EXACT
from elastic.observe.journal import JournalReader
from elastic.observe.steps import collective_table, final_steps
from elastic.observe.text import table

JOB = ROOT / "examples" / "links.yaml"
NODES = 2
# Relative. The strategies add up in another order, which fp32 rounds at 6e-8, and training carries every difference on.
TOLERANCE = 1e-5
# What else the ranks exchange is of another type.
_GRADIENTS = "float32"
# What regret should stay below, of brute force.
AIM = 0.05


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    try:
        job = yaml.safe_load(Path(options.job).read_text(encoding="utf-8"))
        links = links_of(job)
    except (OSError, UsageError) as error:
        say(f"demo.py --links: {error}")
        return 2
    folder = Path(options.folder or ROOT / "runs" / time.strftime("links-%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    if not all(train(folder, job, strategy) for strategy in (AUTO, *EXACT)):
        say(f"a run did not come to its end; what there is lies in {folder}")
        return 1
    runs = {name: Measured.of(JournalReader(str(folder), name).records()) for name in (AUTO, *EXACT)}
    losses = {name: demo.losses_of(folder, name) for name in runs}
    wrong = [f"WRONG: {problem}" for problem in problems(losses)]
    text = [*costs(links, runs), "", *regrets(links, runs), loss_line(losses), *wrong]
    (folder / "result.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    demo.show("", *text, "", f"kept in {folder}; what auto saw:", f"  elastic wire auto --storage {folder}")
    return 1 if wrong else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.py --links", description=__doc__.partition("\n\n")[0])
    parser.add_argument("job", nargs="?", default=str(JOB), help="another job of this kind (default: links.yaml)")
    parser.add_argument("--folder", metavar="DIR", help="where everything is kept (default: runs/links-<time>)")
    options = parser.parse_args(arguments)
    if options.folder is not None and Path(options.folder).exists():
        parser.error(f"--folder {options.folder}: it exists already; name another one")
    return options


def links_of(job: Mapping[str, Any]) -> Links:
    """The emulated links of a job. Raises UsageError where one is none, or a phase begins after the last step."""
    links = Links.of((job.get("config") or {}).get("phases") or [])
    late = next((phase for phase in links.phases if phase.from_step > job["max_steps"]), None)
    if late is not None:
        raise UsageError(f"phase {late.name!r} begins with step {late.from_step}, after the last ({job['max_steps']})")
    return links


def train(folder: Path, job: Mapping[str, Any], strategy: str) -> bool:
    """One run to its end, named as its strategy."""
    shared = folder / f"{strategy}-links"
    shared.mkdir()
    changed = {
        **job,
        "config": {**job["config"], "folder": str(shared)},
        "communication": {**job["communication"], "strategy": strategy},
    }
    file = folder / f"{strategy}.yaml"
    file.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    try:
        return demo.run(folder, strategy, job=file, nodes=NODES)
    finally:
        shutil.rmtree(shared)


@dataclass(frozen=True)
class Measured:
    """Of one run, by step: seconds in collectives, and how many of gradients there were of each kind, as rank 0's
    ledger has them, and the step's duration. `travel`: (step, what `elastic wire` says of how gradients travel from
    it on)."""

    exchange_s: Mapping[int, float]
    calls: Mapping[int, Counter[str]]
    step_s: Mapping[int, float]
    travel: Sequence[tuple[int, str]]

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Measured:
        kept = list(records)
        steps, found = final_steps(kept), collective_table(kept)
        uses = {step["step"]: [CollectiveUse.from_json(row) for row in step["collectives"]] for step in steps}
        return cls(
            {step: sum(use.seconds for use in rows) for step, rows in uses.items()},
            {step: _kinds(rows) for step, rows in uses.items()},
            {step["step"]: step["duration_s"] for step in steps},
            found.travel if found is not None else (),
        )

    def strategy(self, step: int) -> str:
        """By which the gradients of a step travel, unless another one is tried in it."""
        return next(said for since, said in reversed(self.travel) if since <= step).partition(":")[0]


def _kinds(rows: Iterable[CollectiveUse]) -> Counter[str]:
    return Counter({f"{use.op} {use.axis}": use.calls for use in rows if use.dtype == _GRADIENTS})


def travelled(runs: Mapping[str, Measured]) -> dict[int, str]:
    """Step of auto -> by which strategy its gradients travelled: that of the run which sent the like in this step."""
    auto = runs[AUTO].calls
    return {step: next(name for name in EXACT if runs[name].calls[step] == calls) for step, calls in auto.items()}


def trials_of(runs: Mapping[str, Measured]) -> list[int]:
    """The steps in which auto tried another strategy than the one in use."""
    return [step for step, name in travelled(runs).items() if name != runs[AUTO].strategy(step)]


def _ranges(steps: Iterable[int]) -> list[str]:
    """Neighbours as first-last."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][-1] == step - 1:
            found[-1].append(step)
        else:
            found.append([step])
    return [f"{some[0]}-{some[-1]}" if len(some) > 1 else f"{some[0]}" for some in found]


def by_phase(links: Links, seconds: Mapping[int, float]) -> dict[str, float]:
    """Phase -> the sum over its steps."""
    found = dict.fromkeys(links.names, 0.0)
    for step, spent in seconds.items():
        found[links.at(step).name] += spent
    return found


def brute_force(fixed: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Phase -> the strategy that cost least in it; `fixed` has seconds by strategy and phase."""
    phases = next(iter(fixed.values()))
    return {phase: min(fixed, key=lambda name: fixed[name][phase]) for phase in phases}


def least(links: Links, runs: Mapping[str, Mapping[int, float]]) -> float:
    """Seconds of brute force; `runs` has seconds by strategy and step."""
    fixed = {name: by_phase(links, runs[name]) for name in EXACT}
    return sum(fixed[name][phase] for phase, name in brute_force(fixed).items())


def costs(links: Links, runs: Mapping[str, Measured]) -> list[str]:
    """Seconds of exchange of every run, as lines; and the whole duration of its steps."""
    seconds, best = {name: by_phase(links, run.exchange_s) for name, run in runs.items()}, bests(links, runs)
    rows = [
        {
            "seconds of exchange": name,
            **{phase: f"{spent:.2f}" for phase, spent in seconds[name].items()},
            "all": f"{sum(seconds[name].values()):.2f}",
            "steps in all": f"{sum(runs[name].step_s.values()):.2f}",
        }
        for name in (*EXACT, AUTO)
    ]
    chosen = {phase: f"{seconds[name][phase]:.2f} {name}" for phase, name in best.items()}
    brute = {"exchange": least(links, exchanges(runs)), "steps": least(links, {n: r.step_s for n, r in runs.items()})}
    cells = {"all": f"{brute['exchange']:.2f}", "steps in all": f"{brute['steps']:.2f}"}
    return table([*rows[:-1], {"seconds of exchange": "brute force", **chosen, **cells}, rows[-1]])


def exchanges(runs: Mapping[str, Measured]) -> dict[str, Mapping[int, float]]:
    return {name: run.exchange_s for name, run in runs.items()}


@dataclass(frozen=True)
class Regret:
    """Seconds of exchange that auto spent beyond brute force's `least_s`. `trials_s`: steps by another strategy than
    the one in use; `late_s`: the one in use was not the fastest; both by the medians of the runs with one strategy
    each. The rest is what two runs differ by on a machine that does other things too."""

    least_s: float
    total_s: float
    trials_s: float
    late_s: float

    @property
    def rest_s(self) -> float:
        return self.total_s - self.trials_s - self.late_s

    def share(self, seconds: float) -> str:
        return f"{100 * seconds / self.least_s:.1f} %"


def regret_of(links: Links, runs: Mapping[str, Measured]) -> Regret:
    auto, least_s, best = runs[AUTO], least(links, exchanges(runs)), bests(links, runs)
    alone = {name: usual(links, runs[name]) for name in EXACT}
    trials_s = late_s = 0.0
    for step, name in travelled(runs).items():
        phase = links.at(step).name
        lost_s = alone[name][phase] - alone[best[phase]][phase]
        if name == auto.strategy(step):
            late_s += lost_s
        else:
            trials_s += lost_s
    return Regret(least_s, sum(auto.exchange_s.values()) - least_s, trials_s, late_s)


def bests(links: Links, runs: Mapping[str, Measured]) -> dict[str, str]:
    """Phase -> the strategy whose exchange cost least in it."""
    return brute_force({name: by_phase(links, runs[name].exchange_s) for name in EXACT})


def usual(links: Links, run: Measured) -> dict[str, float]:
    """Phase -> the median seconds of exchange of its steps."""
    found: dict[str, list[float]] = {}
    for step, spent in run.exchange_s.items():
        found.setdefault(links.at(step).name, []).append(spent)
    return {phase: median(seconds) for phase, seconds in found.items()}


def regrets(links: Links, runs: Mapping[str, Measured]) -> Iterator[str]:
    """What auto chose, and what it cost beyond brute force and beyond the best single strategy, as lines."""
    for step, travel in runs[AUTO].travel:
        yield f"auto, from step {step} on: {travel}"
    found, trials = regret_of(links, runs), trials_of(runs)
    yield f"auto tried others in {len(trials)} steps: {', '.join(_ranges(trials))}"
    parts = {
        "trials": found.trials_s,
        "steps by another strategy than the fastest": found.late_s,
        "the rest": found.rest_s,
    }
    told = "; ".join(f"{name}: {found.share(seconds)}" for name, seconds in parts.items())
    yield f"regret against brute force: {found.share(found.total_s)} ({told})"
    if found.total_s > AIM * found.least_s:
        yield f"that is more than the {100 * AIM:.0f} % that are aimed at"
    steps_s = {name: run.step_s for name, run in runs.items()}
    whole = sum(steps_s[AUTO].values()) / least(links, steps_s) - 1.0
    yield f"in whole steps, computation and all, regret is {100 * whole:.1f} %"
    yield _against_single(found, runs)


def _against_single(found: Regret, runs: Mapping[str, Measured]) -> str:
    totals = {name: sum(runs[name].exchange_s.values()) for name in EXACT}
    single = min(totals, key=lambda name: totals[name])
    change = 100 * ((found.least_s + found.total_s) / totals[single] - 1.0)
    over = found.share(totals[single] - found.least_s)
    return f"the best single strategy, {single}, is {over} above brute force; auto against it: {change:+.1f} %"


def loss_line(losses: Mapping[str, Mapping[int, float]]) -> str:
    name, step, largest = largest_difference(losses)
    steps = len(losses[AUTO])
    return f"losses of all runs over {steps} steps: largest relative difference {largest:.1e} ({name}, step {step})"


def largest_difference(losses: Mapping[str, Mapping[int, float]]) -> tuple[str, int, float]:
    """(strategy, step, relative difference from auto) over the steps that both runs have done; a non-finite loss
    differs most."""
    auto = losses[AUTO]
    found = [
        (name, step, _difference(loss, auto[step]))
        for name in EXACT
        for step, loss in losses[name].items()
        if step in auto
    ]
    return max(found, key=lambda one: math.inf if math.isnan(one[2]) else one[2])


def _difference(one: float | None, other: float | None) -> float:
    """Relative. The journal has None for a non-finite loss."""
    return math.nan if one is None or other is None else abs(one - other) / abs(other)


def problems(losses: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    for name in EXACT:
        if losses[name].keys() != losses[AUTO].keys():
            yield f"{name} and {AUTO} did not do the same steps"
    name, step, largest = largest_difference(losses)
    if not largest <= TOLERANCE:
        yield f"the losses of {name} and {AUTO} differ by {largest:.1e} in step {step}, more than {TOLERANCE:g}"

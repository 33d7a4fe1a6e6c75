"""What `demo.py --links` makes of five runs' records: seconds by phase, brute force, and regret in its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import demo
import links
import pytest
import yaml
from emulated_links import Links
from links import Measured

from elastic.core.data.collectives import CollectiveUse
from elastic.core.errors import UsageError

LINK = {"latency_ms": 0, "mb_per_s": 100}
# Steps 1 to 4 and 5 to 8.
PHASES = [{"name": name, "from_step": step, "node": LINK, "nodes": LINK} for name, step in (("a", 1), ("b", 5))]
TWO = Links.of(PHASES)
STEPS = range(1, 9)
# Seconds of a step in phase a and in phase b.
ALONE = {"all_reduce": (1.0, 4.0), "ring": (2.0, 5.0), "tree": (9.0, 9.0), "hierarchical": (3.0, 2.0)}


def calls(name: str) -> Counter[str]:
    """What a step sends by a strategy."""
    return Counter({f"send {name}": 3})


def run(seconds: Mapping[int, float], travel: list[tuple[int, str]], names: Sequence[str]) -> Measured:
    sent = {step: calls(name) for step, name in zip(STEPS, names, strict=True)}
    return Measured(seconds, sent, {step: spent + 1.0 for step, spent in seconds.items()}, travel)


def five(
    auto: Mapping[int, float], travel: list[tuple[int, str]], names: Sequence[str] | None = None
) -> dict[str, Measured]:
    found = {"auto": run(auto, travel, names or NAMES)}
    for name, (first, second) in ALONE.items():
        seconds = {step: first if step < 5 else second for step in STEPS}
        found[name] = run(seconds, [(1, f"{name}: as the job says")], [name] * len(STEPS))
    return found


# All are tried before one is in use, and another one in step 6; changed two steps after the links have.
AUTO = {1: 1.0, 2: 2.0, 3: 1.0, 4: 1.0, 5: 4.0, 6: 2.0, 7: 2.0, 8: 2.0}
NAMES = ("all_reduce", "ring", "all_reduce", "all_reduce", "all_reduce", *["hierarchical"] * 3)
TRAVEL = [
    (1, "each in turn: until it is known what they cost"),
    (3, "all_reduce: all_reduce 1e+03 ms"),
    (7, "hierarchical: hierarchical 2e+03 ms"),
]


def test_seconds_of_exchange_come_from_the_journal_as_they_count() -> None:
    def step(number: int, generation: int, *seconds: float) -> dict[str, Any]:
        kinds = (("a", "float32"), ("b", "float64"))
        rows = [CollectiveUse(op, "dp", kind, 1, 8, s, s).to_json() for (op, kind), s in zip(kinds, seconds)]  # noqa: B905
        return {"step": number, "generation": generation, "duration_s": 7.0, "collectives": rows}

    last = {**step(2, 2, 0.5), "travel": "ring: ring 1 ms"}
    records = [
        {"type": "generation", "number": 1, "world_size": 4, "first_step": 1},
        {"type": "steps", "steps": [step(1, 1, 0.25, 0.5), step(2, 1, 9.0)]},
        {"type": "generation", "number": 2, "world_size": 4, "first_step": 2},
        {"type": "steps", "steps": [last]},
    ]
    found = Measured.of(records)
    assert found.exchange_s == {1: 0.75, 2: 0.5}
    assert found.calls == {1: {"a dp": 1}, 2: {"a dp": 1}}, "of gradients"
    assert found.step_s == {1: 7.0, 2: 7.0}
    assert found.travel == ((2, "ring: ring 1 ms"),)


def test_brute_force_is_the_best_of_each_phase() -> None:
    runs = five(AUTO, TRAVEL)
    assert links.by_phase(TWO, runs["auto"].exchange_s) == {"a": 5.0, "b": 10.0}
    assert links.bests(TWO, runs) == {"a": "all_reduce", "b": "hierarchical"}
    assert links.least(TWO, links.exchanges(runs)) == 4 * 1.0 + 4 * 2.0


def test_regret_and_what_it_consists_of() -> None:
    found = links.regret_of(TWO, five(AUTO, TRAVEL))
    # 15 seconds in place of 12: a step by the ring, and one by all_reduce that costs 4 in place of 2 seconds.
    assert (found.least_s, found.total_s, found.trials_s, found.late_s) == (12.0, 3.0, 1.0, 2.0)
    assert found.rest_s == 0.0
    assert found.share(found.total_s) == "25.0 %"


def test_what_another_run_of_the_machine_costs_is_the_rest() -> None:
    slower = {step: 1.5 * spent for step, spent in AUTO.items()}
    found = links.regret_of(TWO, five(slower, TRAVEL))
    assert (found.total_s, found.trials_s, found.late_s) == (10.5, 1.0, 2.0)
    assert found.rest_s == 7.5


def test_the_table_has_every_strategy_and_phase() -> None:
    head, *rows = links.costs(TWO, five(AUTO, TRAVEL))
    assert head.split("  ")[0] == "seconds of exchange"
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    assert cells == [
        ["all_reduce", "4.00", "16.00", "20.00", "28.00"],
        ["ring", "8.00", "20.00", "28.00", "36.00"],
        ["tree", "36.00", "36.00", "72.00", "80.00"],
        ["hierarchical", "12.00", "8.00", "20.00", "28.00"],
        ["brute force", "4.00 all_reduce", "8.00 hierarchical", "12.00", "20.00"],
        ["auto", "5.00", "10.00", "15.00", "23.00"],
    ]


def test_what_is_told_of_the_choice() -> None:
    assert list(links.regrets(TWO, five(AUTO, TRAVEL))) == [
        "auto, from step 1 on: each in turn: until it is known what they cost",
        "auto, from step 3 on: all_reduce: all_reduce 1e+03 ms",
        "auto, from step 7 on: hierarchical: hierarchical 2e+03 ms",
        "auto tried others in 3 steps: 1-2, 6",
        "regret against brute force: 25.0 % (trials: 8.3 %; steps by another strategy than the fastest: 16.7 %; the "
        "rest: 0.0 %)",
        "that is more than the 5 % that are aimed at",
        "in whole steps, computation and all, regret is 15.0 %",
        "the best single strategy, all_reduce, is 66.7 % above brute force; auto against it: -25.0 %",
    ]


def test_below_the_aim_nothing_is_said_of_it() -> None:
    best = {step: 1.0 if step < 5 else 2.0 for step in STEPS}
    names = ["all_reduce"] * 4 + ["hierarchical"] * 4
    told = list(links.regrets(TWO, five(best, [(1, "all_reduce: x"), (5, "hierarchical: x")], names)))
    assert any(line.startswith("regret against brute force: 0.0 %") for line in told)
    assert not any("aimed at" in line for line in told)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({1: 2.0, 2: 4.0}, []),
        ({1: 2.0, 2: 4.00001}, []),
        ({1: 2.0, 2: 4.001}, ["the losses of tree and auto differ by 2.5e-04 in step 2, more than 1e-05"]),
        ({1: 2.0, 2: None}, ["the losses of tree and auto differ by nan in step 2, more than 1e-05"]),
        ({1: 2.0, 2: float("nan")}, ["the losses of tree and auto differ by nan in step 2, more than 1e-05"]),
        ({1: 2.0}, ["tree and auto did not do the same steps"]),
    ],
)
def test_losses_agree_relatively(other: dict[int, Any], expected: list[str]) -> None:
    losses = {name: {1: 2.0, 2: 4.0} for name in ("auto", *ALONE)} | {"tree": other}
    assert list(links.problems(losses)) == expected


def test_the_job_of_the_demo_has_its_change_long_before_its_end() -> None:
    job = yaml.safe_load(links.JOB.read_text())
    (change,) = (phase.from_step for phase in links.links_of(job).phases[1:])
    every = job["communication"]["check_every_steps"]
    # There may be a switch `every` steps after another one, and trials come after twice as many at the latest.
    assert change > 3 * every
    assert job["max_steps"] - change > 4 * every


def test_a_job_whose_links_are_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(links.JOB.read_text())
    with pytest.raises(UsageError, match=r"phase 'b' begins with step 5, after the last \(4\)"):
        links.links_of({**job, "config": {"phases": PHASES}, "max_steps": 4})
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump({**job, "config": {**job["config"], "phases": PHASES[1:]}}))
    assert demo.main(["--links", str(bad), "--folder", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "demo.py --links: phases: the first begins with from_step 1, not 5\n"
    assert not (tmp_path / "runs").exists()
    assert demo.main(["--links", str(tmp_path / "none.yaml")]) == 2


def test_another_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--link"]) == 2
    assert capsys.readouterr().err == "demo.py: --link is no option of the demo; there is --links\n"

"""The compute ledger: FLOPs that count and that were repeated, hours by owner, energy that is known or estimated."""

from __future__ import annotations

from typing import Any

from elastic.observe.html.page import page
from elastic.observe.laws.compute import ComputeLedger, compute_ledger
from elastic.observe.report import report
from elastic.observe.summary import summarize

HELD = {"productive": 2700.0, "restore": 900.0}


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "generation": 1, "samples": 10, "time": 1.0, **more}


def journal(flops: float = 5e9, **more: Any) -> list[dict[str, Any]]:
    """Four steps, of which two are done again."""
    return [
        {"type": "run", "status": "running", "run_id": "r", "time": 0.0},
        {"type": "generation", "number": 1, "world_size": 4, "first_step": 1, "time": 1.0},
        {"type": "steps", "steps": [step(1, sample_flops=flops, **more), *(step(n, **more) for n in (2, 3, 4))]},
        {"type": "generation", "number": 2, "world_size": 3, "first_step": 3, "time": 1.0},
        {"type": "steps", "steps": [step(3, **more), step(4)]},
        {"type": "ledger", "seconds": {"productive": 900.0}, "wall_s": 900.0, "held_s": HELD, "time": 9.0},
    ]


def ledger(flops: float = 5e9, **more: Any) -> ComputeLedger:
    return compute_ledger(journal(flops, **more), HELD)


def test_repeated_steps_are_counted_apart() -> None:
    found = ledger()
    assert (found.sample_flops, found.estimated) == (5e9, False)
    assert (found.model_flops, found.repeated_flops) == (2e11, 1e11)
    assert found.sentences == [
        "2e+11 model FLOPs, 5e+09 per sample (counted), and 1e+11 for steps that were rolled back; "
        "5.56e+07 per second of each accelerator held",
        "1 accelerator-hours (1 h 00 min), 75% of them productive",
    ]


def test_an_estimate_says_so() -> None:
    found = ledger(-5e9)
    assert (found.sample_flops, found.estimated, found.model_flops) == (5e9, True, 2e11)
    assert "(estimated as 6 N D)" in found.sentences[0]


def test_measured_energy_is_that_of_all_steps_that_were_computed() -> None:
    found = ledger(energy_j=3.6e5)
    assert (found.energy_j, found.measured_steps, found.steps) == (5 * 3.6e5, 5, 6)
    assert found.sentences[-1] == "0.5 kWh of the devices, measured in 5 of 6 steps"
    assert found.at(700.0) == found, "what the devices tell is not replaced"


def test_energy_is_estimated_from_a_power_that_is_given_and_not_invented() -> None:
    assert ledger().energy_j is None
    found = ledger().at(500.0)
    assert found.energy_j == 500.0 * 3600.0
    assert found.sentences[-1] == "0.5 kWh, estimated from 500 W per accelerator held"
    assert compute_ledger([], {}).at(500.0).energy_j is None


def test_nothing_is_said_of_a_journal_without_figures() -> None:
    assert not compute_ledger([{"type": "steps", "steps": [step(1)]}], {}).known
    assert summarize([{"type": "steps", "steps": [step(1)]}])["compute"] is None


def test_it_is_in_summary_report_and_page() -> None:
    # Two attempts: the hours of both.
    records = [*journal(), *journal()]
    summary = summarize(records)
    assert summary["compute"]["accelerator_s"] == {owner: 2 * value for owner, value in HELD.items()}
    assert "compute: 2 accelerator-hours (2 h 00 min), 75% of them productive" in report(summary)
    assert "kWh" not in page(records)
    document = page(records, watts=250.0)
    assert "0.5 kWh, estimated from 250 W per accelerator held." in document
    assert "<td>productive</td><td>1.5</td><td>75.0%</td>" in document


def test_a_power_that_is_not_used_is_told() -> None:
    unused = "No energy is estimated from 250 W: "
    assert f"{unused}accelerator-hours come with a run&#x27;s end." in page(journal()[:-1], watts=250.0)
    assert f"{unused}the devices have told it." in page(journal(energy_j=3.0), watts=250.0)
    assert unused not in page(journal(), watts=250.0)

"""Samples that make the loss non-finite, in a run on real raylets: the run continues without them and says which."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from harness import Run, given_samples

from elastic.core.data.samples import SampleOrder

pytestmark = pytest.mark.ray

ORDER = SampleOrder(127, 0)


def _run(cluster: LocalCluster, folder: Path, bad: list[int], **more: Any) -> Run:
    """`bad` are positions."""
    config = {"bad": [ORDER.at(position)[1] for position in bad]}
    return Run(cluster, folder, "bad_samples:train", config=config, epochs=1, **more)


def test_the_run_goes_back_to_memory_and_on_with_the_next_samples(cluster: LocalCluster, tmp_path: Path) -> None:
    """Two in a row, the controller killed after them, and a node later on: what is left out stays left out."""
    run = _run(cluster, tmp_path, [43, 58], memory={"every_steps": 1}, every_steps=None)
    run.allow(6)
    run.start()
    # Step 5 fails twice: with positions 40 to 49, then with 50 to 59.
    run.wait_generation(3)
    run.reach(6)
    cluster.kill_process(run.handle.progress()["controller_pid"])
    run.allow(8)
    run.reach(8)
    run.wait_snapshot(8)
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(4)
    run.finish()

    # The second one came before the first step after the first: one incident.
    (found,) = (incident for incident in run.incidents() if incident["kind"] == "anomaly")
    assert (found["step"], found["resumed_step"], found["steps_repeated"], found["source"]) == (4, 4, 0, "memory")
    assert (found["lost_workers"], found["detector"]) == ([], "the ranks' losses and gradients")
    told = [found["evidence"], *found["also"]]
    # One rank had the sample, and says so; the others know it from the gradient.
    assert all("of step 5 is" in sentence for sentence in told), told
    assert sum("the loss of step 5 is nan" in sentence for sentence in told) <= 2, told
    said = run.decisions("anomaly")
    assert "samples 40 to 49 are skipped, step 5 is done with the next ones" in said[0]
    assert "samples 50 to 59 are skipped" in said[1]
    begun = [record for record in run.records("generation") if "first_step" in record]
    assert [record["skips"] for record in begun[:4]] == [[], [[40, 50]], [[40, 60]], [[40, 60]]]
    _assert_everything_but(run, range(40, 60))
    assert max(run.steps()) == 11, "127 samples less twenty, in steps of ten"
    run.assert_time_is_accounted_for()


@pytest.mark.slow
def test_too_many_end_the_run_and_leave_a_checkpoint_of_all_that_was_good(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    memory = {"every_steps": 1}
    run = _run(cluster, tmp_path, [72, 83], every_steps=5, anomalies={"max_anomalies": 1}, memory=memory)
    run.start()
    result = run.ended("gave-up")
    assert "2 anomalies within 1000 steps (at most 1 are tolerated)" in result["reason"]
    assert "step 8 is" in result["reason"]
    # What was in the nodes' memory only is in storage by now.
    assert [record["step"] for record in run.records("checkpoint")] == [5, 7]
    # Resumed with the first ones left out already, it meets the other one and continues without it, too.
    run = _run(cluster, tmp_path, [72, 83], every_steps=5)
    run.start()
    run.finish()
    assert run.summary()["attempts"] == 2
    _assert_everything_but(run, range(70, 90))


@pytest.mark.slow
def test_a_step_may_be_skipped_instead(cluster: LocalCluster, tmp_path: Path) -> None:
    run = _run(cluster, tmp_path, [72], anomalies={"policy": "skip"})
    run.start()
    run.finish()
    assert [generation["number"] for generation in run.summary()["generations"]] == [1]
    (skipped,) = run.events("StepSkipped")
    assert (skipped["step"], skipped["what"], skipped["positions"]) == (8, "the loss is nan", [[70, 80]])
    step = run.steps()[8]
    assert (step["loss"], step["positions"], step["skipped"]) == (None, [], [[70, 80]])
    assert run.summary()["samples"] == {"seen": 117, "missing": 0, "repeated": 0, "skipped": 10}
    assert max(run.steps()) == 13


def _assert_everything_but(run: Run, positions: range) -> None:
    """By the run's own count, and by the files of its workers."""
    counted = run.summary()["samples"]
    left_out = len(positions)
    assert counted == {"seen": 127 - left_out, "missing": 0, "repeated": 0, "skipped": left_out}
    trained: Counter[int] = Counter()
    for by_generation in given_samples(run.folder).values():
        # The newest generation that did a step is the one whose step was not rolled back.
        trained.update(index for indices in by_generation[max(by_generation)].values() for index in indices)
    assert trained == dict.fromkeys((ORDER.at(p)[1] for p in range(127) if p not in positions), 1)

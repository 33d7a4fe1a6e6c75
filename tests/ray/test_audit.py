"""Nodes with wrong gradients or faulty memory, in runs on real raylets: they are named, and left, without harm done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run
from undisturbed import Outcome, Undisturbed, whole_state

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.ray

# What other orders of additions come to: see test_runs.
CEILING = 4e-6


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    made = Undisturbed()
    yield made
    made.close()


def test_a_node_that_computes_wrong_numbers_is_named_and_left(
    cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path, "miscomputing:train", memory={"every_steps": 1}, audit={"every_steps": 3}, epochs=1)
    run.allow(4)
    run.start()
    run.reach(4)
    wrong = run.worker(run.away_from_head()[0])
    # Step 6 is the first that it computes wrongly, and the next that is audited.
    (tmp_path / "wrong").write_text(f"{wrong['node']} 5")
    run.finish()

    # The second audit fails before the first step after the first one: one incident.
    found = run.incidents()[0]
    assert (found["kind"], found["detector"]) == ("audit", "an audit")
    assert (found["step"], found["resumed_step"], found["source"], found["next_world_size"]) == (5, 5, "memory", 3)
    named = [record["data"] for record in run.records("decision") if record["kind"] == "audit"]
    assert named[0] | {"decided": True, "nodes": [wrong["node"]], "suspects": [wrong["worker"]]} == named[0]
    assert f"node {wrong['node'][:8]} is left: 2 audits have named it" in " ".join(run.decisions("audit"))
    assert f"node {wrong['node'][:8]} is quarantined" in run.decisions("quarantine")[0]
    sizes = [generation["world_size"] for generation in run.summary()["generations"]]
    assert sizes[:3] == [4, 4, 3]
    audits = {step: record["audit"] for step, record in run.steps().items() if "audit" in record}
    assert {step for step, told in audits.items() if told == "agreed"} == {3, 6, 9, 12}
    assert run.summary()["samples"] == {"seen": 127, "missing": 0, "repeated": 0, "skipped": 0}
    still = undisturbed.train(run.config, 1, tmp_path / "still", 4)
    state = whole_state(CheckpointStore(run.settings.checkpoint.url, "run"))
    assert still.distance(Outcome(state, run.losses())) <= CEILING


@pytest.mark.parametrize("kind", ["master", pytest.param("exp_avg_sq", marks=pytest.mark.slow)])
def test_a_node_whose_memory_changes_is_named_and_left(
    cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path, kind: str
) -> None:
    run = Run(
        cluster, tmp_path, "miscomputing:train_in_faulty_memory",
        memory={"every_steps": 1}, audit={"every_steps": 3}, epochs=1,
    )  # fmt: skip
    run.allow(4)
    run.start()
    run.reach(4)
    wrong = run.worker(run.away_from_head()[0])
    # In step 5, which is not audited, and in the next one of the next generation.
    (tmp_path / "wrong").write_text(f"{wrong['node']} 4 {kind}")
    run.finish()

    found = run.incidents()[0]
    assert (found["kind"], found["detector"], found["step"]) == ("audit", "an audit", 4)
    # The snapshot of step 4 was read while the bit was wrong.
    assert (found["resumed_step"], found["source"]) == (3, "memory")
    named = [record["data"] for record in run.records("decision") if record["kind"] == "audit"]
    assert named[0] | {"decided": True, "nodes": [wrong["node"]], "suspects": [wrong["worker"]]} == named[0]
    assert f": {kind} of " in run.decisions("audit")[0]
    assert "what was saved after step 3 is not used" in run.decisions("audit")[0]
    assert f"node {wrong['node'][:8]} is left: 2 audits have named it" in " ".join(run.decisions("audit"))
    assert [generation["world_size"] for generation in run.summary()["generations"]][:3] == [4, 4, 3]
    assert run.summary()["samples"] == {"seen": 127, "missing": 0, "repeated": 0, "skipped": 0}
    still = undisturbed.train(run.config, 1, tmp_path / "still", 4)
    state = whole_state(CheckpointStore(run.settings.checkpoint.url, "run"))
    assert still.distance(Outcome(state, run.losses())) <= CEILING

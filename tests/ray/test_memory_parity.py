"""Parity instead of replicas, with storage switched off or far behind, on real raylets and with real kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run, kill_together, wait_until

from elastic.core.checkpoint.parity import Stripe, place_parity

pytestmark = pytest.mark.ray

WIDTH = 3


def _stripes(run: Run) -> tuple[Stripe | None, ...]:
    workers = sorted((w for w in run.handle.progress()["workers"] if w["rank"] is not None), key=lambda w: w["rank"])
    return place_parity([worker["node"] for worker in workers], WIDTH)


def _started(run: Run, step: int = 6) -> Run:
    """At a step whose snapshot is complete on every node, parity included."""
    run.allow(step)
    run.start()
    run.reach(step)

    def whole() -> bool:
        copies = [held for node in run.memory() for held in node if held.step == step]
        own, made = ({held.rank for held in copies if bool(held.stripe) == kind} for kind in (False, True))
        return len(own) == 4 and own == made and not any(held.replica and not held.stripe for held in copies)

    wait_until(whole, f"the snapshot of step {step} to be complete")
    return run


@pytest.mark.slow
def test_a_lost_shard_is_made_of_parity(cluster: LocalCluster, tmp_path: Path) -> None:
    run = _started(Run(cluster, tmp_path, memory={"every_steps": 1, "replicas": 0, "parity": WIDTH}, every_steps=None))
    victim = run.node_of(run.away_from_head()[0])
    cluster.kill_node(victim.name)
    run.walk_until(lambda: run.handle.progress()["world_size"] == 3, "the three others to train on")
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert [incident["lost_nodes"] for incident in lost] == [[victim.node_id]]
    assert [(incident["source"], incident["resumed_step"]) for incident in lost] == [("memory", 6)]
    assert sum(incident["steps_repeated"] for incident in lost) <= 1
    assert not run.events("RestoreFailed")
    # Storage has had nothing to do with it.
    assert [checkpoint["step"] for checkpoint in run.records("checkpoint")] == [max(run.steps())]


@pytest.mark.slow
def test_two_parts_of_one_stripe_are_more_than_parity_makes_good(cluster: LocalCluster, tmp_path: Path) -> None:
    run = _started(Run(cluster, tmp_path, memory={"every_steps": 1, "replicas": 0, "parity": WIDTH}))
    run.wait_checkpoint(5)
    away = run.away_from_head()
    stripe = next(s for s in _stripes(run) if s is not None and set(s.ranks) <= set(away))
    kill_together(cluster, *(run.node_of(rank).name for rank in stripe.ranks))
    run.wait_for("the run to fall back to storage", lambda _: any("from storage" in s for s in run.decisions()))
    run.walk_until(lambda: run.handle.progress()["world_size"] == 2, "the two others to train on")
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert (lost[-1]["source"], lost[-1]["resumed_step"]) == ("storage", 5)
    # Nobody was asked for what was gone: the nodes had said what they hold.
    assert not run.events("RestoreFailed")

"""The rules of a run in over a thousand simulated runs with faults. A failure names its seed; `play(seed)` repeats it
exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.settings import AnomalySettings, FailureSettings, RunSettings, ScalingSettings, SnapshotSettings
from simulation import trace
from simulation.faults import Fault, Plan, draw
from simulation.world import World

# Every branch of interest must be reached by some run; otherwise the thousand runs cover less than they claim.
SOMETIMES = {
    *(f"phase {phase}" for phase in ("Waiting", "Joining", "Training", "Pausing", "Ending", "Closing", "Finished")),
    *(f"controller restart in {phase}" for phase in ("Waiting", "Joining", "Training", "Pausing", "Ending", "Closing")),
    *(f"failure in {phase}" for phase in ("Joining", "Training", "Pausing", "Closing")),
    "controller restart in Finished", "loss in Ending",
    *(f"incident {kind}" for kind in ("resize", "stop", "collective-failed", "hang", "worker-frozen", "worker-lost",
      "node-frozen", "node-lost", "restore-failed", "user-error", "usage-error", "anomaly", "audit")),
    "audit failed", "named it",
    *(f"anomaly, policy {policy}" for policy in ("rollback", "skip", "stop")), "anomalies within",
    "anomaly with a lost node", "eviction", "slow slot given back", "is kept: ", "it is kept",
    *(f"finished: {status}" for status in ("finished", "not-finished", "user-code-failed", "usage", "stopped",
      "gave-up", "no-capacity", "integrity")),
    *(f"stopped in {phase}" for phase in ("Waiting", "Pausing", "Ending")),
    "growth", "planned end without growth", "false alarm", "late waker", "falling back to", "could not be started",
    "recovery from memory", "recovery from storage although there is memory", "resize through memory",
    "a refused snapshot", "begun at the end", "survey without an answer", "every worker process is replaced",
    "nodes that cannot reach each other", "cannot reach each other", "is used again",
    "drained in time", "drained too late", "a drain that was cancelled", "left a node that is going",
    "begun on a node that is going, for want of another", "too few without the node that is going",
    "room made for another run", "let go of everything for another run",
    "has not taken the checkpoint", "finished without its last generation",
    "the control store is away", "begun without the control store", "a start that waited for the control store",
    "a restart that waited for the control store", "a shard made of parity", "next one starts without them",
    "costs less than continuing with", "no replacement has come", "could not be measured", "workers are on others",
    "left a slow node", "a message that was taken and not written down", "a generation that is in no journal",
    "another tp within the run", "a mesh that needs more memory than there is, as all do",
}  # fmt: skip


def play(seed: int) -> World:
    world = World(seed, draw(seed))
    try:
        world.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, {world.clock.now - world.begin_s:.3f} s in: {error}") from error
    return world


@pytest.mark.parametrize("seeds", [range(1_050), pytest.param(range(1_050, 6_000), marks=pytest.mark.slow)], ids=str)
def test_over_a_thousand_failing_runs_keep_every_rule_and_reach_every_branch(seeds: range) -> None:
    seen: set[str] = set()
    for seed in seeds:
        seen |= play(seed).sometimes
    assert seen >= SOMETIMES, f"never reached in {len(seeds)} runs: {sorted(SOMETIMES - seen)}"


@pytest.mark.parametrize("seed", range(0, 1000, 50))
def test_a_seed_repeats_exactly(seed: int) -> None:
    first, second = play(seed).controller, play(seed).controller
    assert first.journal == second.journal
    assert first.history == second.history
    assert first.state == second.state


def test_different_seeds_differ() -> None:
    assert play(1).controller.journal != play(2).controller.journal


def calm(faults: tuple[Fault, ...] = (), memory: bool = False, **more: object) -> Plan:
    settings = RunSettings(
        "calm",
        scaling=ScalingSettings(2, 4),
        snapshots=SnapshotSettings(memory),
        failures=FailureSettings(hang_floor_s=10.0),
    )
    values = {"nodes": 4, "max_steps": 20, "step_s": 1.0, "save_every": 5, "liveness": True, "horizon_s": 60.0, **more}
    return Plan(settings, faults, **values)  # type: ignore[arg-type]


def test_a_run_without_faults_is_one_generation_without_incidents() -> None:
    world = World(0, calm())
    world.run()
    assert (world.controller.state.generation, world.controller.state.trouble.incidents) == (1, 0)
    assert world.clock.now - world.begin_s < 40


def test_a_lost_node_costs_seconds_and_the_steps_since_the_checkpoint() -> None:
    world = World(0, calm((Fault("kill_node", 12.0, 0.0),)))
    world.run()
    assert world.controller.state.trouble.incidents == 1
    assert world.controller.state.generation == 2
    assert world.clock.now - world.begin_s < 50


@pytest.mark.parametrize("memory", [True, False])
def test_a_restore_may_take_as_long_as_it_moves(memory: bool) -> None:
    """Ten times `join_timeout_s` as a whole, less than that between two parts."""
    for seed in range(20):
        plan = calm((Fault("kill_node", 12.0, seed / 20),), memory, horizon_s=900.0, restore_parts=20, part_s=60.0)
        assert plan.settings.failures.join_timeout_s == 120.0
        world = World(seed, plan)
        world.run()
        assert "failure in Joining" not in world.sometimes
        assert sum(isinstance(event, ev.RestoreProgressed) for event, _ in world.controller.journal) >= 3 * 20


def test_a_restore_that_does_not_move_is_a_hang() -> None:
    for seed in range(20):
        plan = calm((Fault("kill_node", 12.0, seed / 20),), liveness=False, restore_parts=20, part_s=130.0)
        world = World(seed, plan)
        world.run()
        assert "failure in Joining" in world.sometimes


def test_with_memory_a_lost_node_costs_one_step_at_most() -> None:
    for seed in range(20):
        world = World(seed, calm((Fault("kill_node", 12.0 + seed / 10, seed / 20),), memory=True, save_every=1000))
        world.run()
        (incident,) = [a.incident for a in world.controller.history if isinstance(a, act.CloseIncident) and not
                       a.incident.planned]  # fmt: skip
        assert incident.source == "memory"
        assert incident.steps_repeated <= 1


def test_two_nodes_that_cannot_reach_each_other_cost_one_of_them_and_a_pause_and_no_flapping() -> None:
    for seed in range(20):
        world = World(seed, calm((Fault("cut", 8.0, seed / 20, 50.0),), memory=True, max_steps=60, horizon_s=90.0))
        world.run()
        incidents = [a.incident for a in world.controller.history if isinstance(a, act.CloseIncident)]
        unplanned = [incident for incident in incidents if not incident.planned]
        assert len(unplanned) == 1
        assert len(unplanned[0].lost_nodes) == 1


def test_a_stop_in_the_middle_of_a_recovery_keeps_what_is_in_memory_only() -> None:
    for seed in range(20):
        faults = (Fault("kill_worker", 12.0, seed / 20), Fault("stop", 0.0, 0.0, phase="Ending"))
        world = World(seed, calm(faults, memory=True, save_every=1000, liveness=False))
        world.run()
        state = world.controller.state
        assert "finished: stopped" in world.sometimes
        assert "a stop that keeps what is in memory only" in world.sometimes
        assert max(step for _, step in world.storage.committed) == state.furthest_step > 5


def test_a_run_that_is_given_up_for_an_anomaly_keeps_what_is_in_memory_only() -> None:
    for seed in range(20):
        plan = calm((Fault("glitch", 9.0 + seed / 10, 0.0),), memory=True, save_every=1000, liveness=False)
        plan.settings = replace(plan.settings, anomalies=AnomalySettings("stop"))
        world = World(seed, plan)
        world.run()
        state = world.controller.state
        (found,) = state.trouble.anomalies
        assert "finished: gave-up" in world.sometimes
        assert max(step for _, step in world.storage.committed) == found.step == state.furthest_step > 3


@pytest.mark.parametrize(("phase", "after_s"), [("Joining", 0.0), ("Training", 0.0), ("", 21.0), ("Closing", 0.0)])
def test_a_message_that_was_taken_and_not_written_down_is_not_waited_for(phase: str, after_s: float) -> None:
    """The controller is killed at that moment; only its restart costs time."""
    lost = 0
    for seed in range(40):
        world = World(seed, calm((Fault("lose_message", after_s + seed / 100, 0.0, 2.0, phase),)))
        world.run()
        lost += "a message that was taken and not written down" in world.sometimes
        assert (world.controller.state.generation, world.controller.state.trouble.incidents) == (1, 0)
        assert world.clock.now - world.begin_s < 45
    assert lost > 10


@pytest.mark.parametrize("memory", [True, False])
def test_a_node_that_is_drained_with_notice_costs_no_step(memory: bool) -> None:
    for seed in range(40):
        world = World(seed, calm((Fault("drain_node", 6.0 + seed / 10, seed / 40, 15.0),), memory=memory, max_steps=40))
        world.run()
        incidents = [a.incident for a in world.controller.history if isinstance(a, act.CloseIncident)]
        assert incidents
        assert all(incident.planned for incident in incidents)
        assert sum(incident.steps_repeated for incident in incidents) == 0
        assert "drained in time" in world.sometimes


def test_a_node_that_the_run_cannot_do_without_is_left_before_its_deadline_with_everything_saved() -> None:
    for seed in range(40):
        fault = Fault("drain_node", 6.0, seed / 40, 25.0)
        world = World(seed, calm((fault,), memory=True, nodes=2, max_steps=60, horizon_s=30.0))
        world.run()
        (first, *_) = [a.incident for a in world.controller.history if isinstance(a, act.CloseIncident)]
        assert first.planned
        assert first.steps_repeated == 0
        assert "too few without the node that is going" in world.sometimes


def test_a_checkpoint_of_an_abandoned_timeline_may_come_as_late_as_it_likes() -> None:
    """Two saves wait for storage while the run begins again; then one of their steps turns out to be an anomaly."""
    faults = (Fault("storage_down", 0.0, 0.0, 25.0), Fault("break_group", 18.0, 0.0), Fault("glitch", 21.0, 0.0))
    for seed in range(20):
        world = World(seed, calm(faults))
        world.run()
        assert "was made after an anomaly" in world.sometimes
        (left_out,) = world.controller.state.trouble.skips
        assert left_out[0] < 50


def test_a_run_whose_last_checkpoint_one_node_cannot_write_is_finished_by_the_others() -> None:
    for seed in range(20):
        world = World(seed, calm((Fault("storage_cut", 8.0, seed / 20, 900.0),), memory=True, horizon_s=900.0))
        world.run()
        assert world.controller.state.phase.status == "finished"
        assert "next one starts without them" in world.sometimes
        (incident,) = [a.incident for a in world.controller.history if isinstance(a, act.CloseIncident)]
        assert (incident.planned, incident.next_world_size, incident.source) == (True, 3, "memory")


def test_a_hundred_servers_live_through_the_worst_weeks_of_a_real_trace() -> None:
    """Eight days with many faults within minutes of each other; a day takes less than seven minutes here."""
    world = World(0, trace.plan(60, 68, slots=100, low=50, seconds_per_day=400))
    world.run()
    assert world.controller.state.trouble.incidents > 25
    assert {"growth", "failure in Joining", "late waker", "incident node-frozen"} <= world.sometimes


def test_a_broken_rule_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.world.World.run", lambda self: 1 / 0)
    with pytest.raises(AssertionError, match="seed 7"):
        play(7)

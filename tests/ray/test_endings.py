"""How runs end: in user code, in bad input, for want of nodes, by a request; and how they continue."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from harness import Run, four_three_two_four, something_in_the_way, wait_until

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.names import CheckpointRef, parse_checkpoint_id
from elastic.core.settings import ScalingSettings

pytestmark = pytest.mark.ray


def test_runs_side_by_side_each_end_for_their_own_reason(cluster: LocalCluster, tmp_path: Path) -> None:
    one, two = ScalingSettings(1, 1), ScalingSettings(2, 2)

    def start(run_id: str, entry: str = "loops:train", scaling: ScalingSettings = one, **more: object) -> Run:
        (tmp_path / run_id).mkdir()
        config = {"fault": {"kind": more.pop("fault", "none"), "rank": scaling.max_workers - 1, "step": 3}}
        config |= {"stop_after": 2}
        return Run(cluster, tmp_path / run_id, entry, run_id=run_id, scaling=scaling, config=config, **more).start()  # type: ignore[arg-type]

    raises = start("raises", scaling=two, fault="raise")
    early = start("early", "loops:returns_early")
    usage = start("usage", "loops:never_trains", global_batch=12)
    idle = start("idle", "loops:never_trains")
    aborts = start("aborts", fault="abort-once")
    # These wait until there is room.
    again = start("again", fault="raise-once", failures={"user_error_retries": 1})
    absent = start("absent", "no_such_module:train")
    nowhere = start("nowhere", resources={"CPU": 1, "GPU": 1}, failures={"capacity_timeout_s": 1.0})

    result = raises.ended("user-code-failed")
    assert "rank 1" in result["reason"]
    assert "ZeroDivisionError: the user's own mistake on rank 1" in result["reason"]
    assert 'loops.py", line' in result["error"]
    assert len(raises.summary()["generations"]) == 1
    (failed,) = raises.events("UserCodeFailed")
    assert failed["step"] == 3
    assert "ZeroDivisionError" in failed["traceback"]
    assert raises.incidents()[0]["kind"] == "user-error"

    early.ended("not-finished")
    assert early.decisions()[-1].startswith(
        "the run is over (not-finished): the training function returned after 2 steps, before the end of the run"
    )
    # Nothing that was done is lost.
    assert CheckpointStore(early.url, "early").list()[0].step == 2
    assert "returned after 0 steps" in idle.ended("not-finished")["reason"]
    reason = usage.ended("usage")["reason"]
    assert "12" in reason
    assert "10" in reason
    assert "\n" not in reason
    reason = absent.ended("usage")["reason"]
    assert "there is no module 'no_such_module'" in reason
    assert "\n" not in reason

    again.ended("finished")
    again.assert_whole()
    assert [generation["first_step"] for generation in again.summary()["generations"]] == [1, 1]

    aborts.ended("finished")
    aborts.assert_whole()
    (aborted,) = aborts.incidents()
    assert "has ended: Fatal Python error: Aborted" in aborted["evidence"], "what only its output tells"

    reason = nowhere.ended("no-capacity")["reason"]
    # What the cluster lacks is reported as well, once that has been looked at.
    waiting, _, lacking = reason.partition("; ")
    assert waiting == "after 1 s still waiting for 1 more worker: 0 of at least 1 ready, 0 starting, 1 slot pending"
    assert not lacking or lacking.startswith("a worker wants GPU: 1, which no node has")
    assert "_group_" not in lacking


def test_a_run_whose_functions_count_by_themselves_ends_once(cluster: LocalCluster, tmp_path: Path) -> None:
    """Neither max_steps nor epochs, 4 to 3 to 2 to 4 workers; the counters of those that join begin later."""
    config = {"stop_after": 26}
    run = Run(cluster, tmp_path, "loops:counts_by_itself", epochs=None, memory={"every_steps": 1}, config=config)
    four_three_two_four(run)
    # Counters are ahead by the steps that were abandoned or repeated.
    repeated = sum(incident["steps_repeated"] + 1 for incident in run.incidents() if incident["lost_nodes"])
    last = max(run.steps())
    assert 26 - repeated <= last <= 26
    assert sorted(run.steps()) == list(range(1, last + 1))
    assert CheckpointStore(run.url, "run").list()[0].step == last
    assert [incident["kind"] for incident in run.incidents()][:2] == ["node-lost"] * 2
    assert {incident["kind"] for incident in run.incidents()[2:]} == {"resize"}


@pytest.mark.parametrize("memory", [{"every_steps": 1}, None], ids=["memory", "storage"])
def test_a_run_whose_functions_save_by_a_counter_loses_nobody_by_it(
    cluster: LocalCluster, tmp_path: Path, memory: dict[str, Any] | None
) -> None:
    """4 to 3 to 2 to 4 workers. Seen: the saves of those that stayed met the reductions of those that joined."""
    every = None if memory else 5
    run = Run(cluster, tmp_path, "loops:saves_by_itself", memory=memory, every_steps=every, keep_last=50, config={})
    four_three_two_four(run)
    assert [incident["kind"] for incident in run.incidents()][:2] == ["node-lost"] * 2
    assert {incident["kind"] for incident in run.incidents()[2:]} == {"resize"}
    assert run.decisions("function-left") == []
    saved = {ref.step for ref in CheckpointStore(run.url, "run").list()}
    by_itself = saved - set(range(5, 100, 5)) if every else saved
    assert len(by_itself) >= 4, saved
    run.assert_whole()


def test_a_stopped_run_goes_on_from_the_newest_checkpoint_that_is_good(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, scaling=ScalingSettings(2, 2), keep_last=10)
    _stop(run, 17)
    store = CheckpointStore(run.url, "run")
    assert [ref.step for ref in store.list()] == [17, 15, 10, 5]

    newest, next_one, *_ = store.list()
    _flip_a_byte(store, newest)
    _delete_a_shard(store, next_one)
    _stop(run, 22)
    (begun,) = (r for r in run.records("generation") if r["number"] == 4 and "first_step" in r)
    assert begun["first_step"] == 11
    passed_over = run.decisions("integrity")
    assert len(passed_over) == 2
    assert "step-00000017-g0001 is passed over" in passed_over[0]
    assert "falling back to step-00000015-g0001 (step 15)" in passed_over[0]
    assert "step-00000015-g0001 is passed over" in passed_over[1]
    assert "falling back to step-00000010-g0001 (step 10)" in passed_over[1]
    # One incident: nothing was done between the two.
    assert [incident["kind"] for incident in run.incidents()] == ["stop", "restore-failed", "stop"]

    copy = tmp_path / "copy"
    shutil.copytree(run.url, copy / "runs")
    run.start()
    run.finish()
    run.assert_samples_once()
    run.assert_generations_are_told()
    assert run.summary()["attempts"] == 3
    (restored,) = (r for r in run.records("restore") if r["generation"] == 5)
    assert restored["step"] == 22

    _all_bad(Run(cluster, copy, scaling=ScalingSettings(1, 1), keep_last=10))


def _stop(run: Run, step: int) -> None:
    """Start the run and stop it at `step`."""
    run.allow(step)
    run.start()
    run.reach(step)
    run.handle.stop("enough for today")
    # From here on none of them can go further.
    run.wait_promises()
    assert "will end at a step boundary: enough for today" in run.decisions()[-1]
    run.allow(step + 1)
    result = run.ended("stopped")
    assert result["reason"] == "enough for today"
    assert result["step"] == step
    assert parse_checkpoint_id(CheckpointStore(run.url, "run").list()[0].id).step == step
    assert run.incidents()[-1]["kind"] == "stop"


def _all_bad(run: Run) -> None:
    store = CheckpointStore(run.url, "run")
    for ref in store.list():
        # Another bit: one of them is flipped already.
        _flip_a_byte(store, ref, 0x20)
    run.start()
    result = run.ended("integrity")
    assert "no checkpoint is left that can be restored" in result["reason"]


def _flip_a_byte(store: CheckpointStore, ref: CheckpointRef, bit: int = 0x10) -> None:
    """In the middle of one tensor of one shard."""
    shard = store.manifest(ref.id).shards[0]
    tensor = next(stored for stored in shard.tensors if stored.key.startswith("exp_avg/"))
    path = Path(store.url) / store.run_id / "checkpoints" / ref.id / shard.file
    data = bytearray(path.read_bytes())
    data[tensor.begin + 2] ^= bit
    path.write_bytes(data)


def _delete_a_shard(store: CheckpointStore, ref: CheckpointRef) -> None:
    (Path(store.url) / store.run_id / "checkpoints" / ref.id / store.manifest(ref.id).shards[1].file).unlink()


def test_training_goes_on_while_storage_takes_nothing_and_last_words_outlive_their_controller(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    failures = {"storage_backoff_s": 0.2, "storage_backoff_limit_s": 0.5}
    run = Run(cluster, tmp_path, scaling=ScalingSettings(2, 2), failures=failures)
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_checkpoint(5)
    folder = Path(run.url) / "run"
    with something_in_the_way(folder / "checkpoints"):
        run.allow(16)
        run.reach(16)
        run.wait_for("the trouble to be told", lambda _: run.decisions("storage"))
        assert run.handle.progress()["generation"] == 1
    run.wait_checkpoint(15)
    # All say that they are done, to a controller that cannot write it down, and have nothing to say after that.
    with something_in_the_way(folder / "checkpoints"), something_in_the_way(folder / "journal"):
        run.allow(1 << 30)
        wait_until(lambda: "the last one" in (run.handle.progress()["doing"] or ""), "all to have said that")
        cluster.kill_process(run.handle.progress()["controller_pid"])
    run.finish()

    run.assert_whole()
    told = run.decisions("storage")
    assert "cannot write its part of the checkpoint" in told[0]
    assert "training continues" in told[0]
    assert any("storage accepts checkpoints again" in sentence for sentence in told[1:])
    assert len(run.summary()["generations"]) == 1
    assert run.events("SaveFailing")
    assert run.summary()["controllers"] == 2
    assert {event["worker"] for event in run.events("WorkerCompleted")} == {0, 1}

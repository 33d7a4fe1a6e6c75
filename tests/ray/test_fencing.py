"""Whatever is left of what is over counts for nothing: threads, processes, controllers of old generations."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from elastic_cluster import LocalCluster
from harness import Run, start_run, wait_until

from elastic.checkpoint.storage import CheckpointStore
from elastic.core import events as ev
from elastic.core.errors import Fenced, UsageError
from elastic.core.settings import ScalingSettings
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.observe.journal_lines import to_line
from elastic.runtime import names
from elastic.runtime.messages import Beat, Item
from elastic.runtime.worker.outbox import Outbox

pytestmark = pytest.mark.ray


def test_nothing_of_a_generation_or_a_controller_that_is_over_counts(cluster: LocalCluster, tmp_path: Path) -> None:
    fault = {"kind": "zombie", "rank": 0, "step": 6}
    # The checkpoint that the zombie writes to is still there after those of the growth and of step 10.
    run = Run(
        cluster, tmp_path, config={"fault": fault}, scaling=ScalingSettings(2, 3), failures={"in_loop": False},
        keep_last=4,
    )  # fmt: skip
    old_controller = JournalWriter(run.url, "run")
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_checkpoint(5)
    written_off = run.worker(1)
    cluster.kill_worker(written_off["pid"])
    run.wait_generation(2)
    # The replacement of the killed worker trains, so that nothing but what is over can change a figure.
    run.grow_to(3)
    run.allow(12)
    run.reach(12)
    run.wait_checkpoint(10)
    # Written down, and then known: another moment.
    wait_until(lambda: run.handle.progress()["last_checkpoint_step"] == 10, "the checkpoint to be known")
    before = run.handle.progress()

    _zombie_of_generation_one(run)
    _worker_that_was_written_off(written_off["worker"], before["generation"])
    _node_that_is_none_of_the_run()
    _controller_before_this_one(run, old_controller)
    with pytest.raises(UsageError, match="is already running"):
        start_run(run.settings, run.entry, run.config, cluster.address)

    now = run.handle.progress()
    for figure in ("generation", "step", "loss", "last_checkpoint", "incidents", "status"):
        assert now[figure] == before[figure], figure
    result = run.finish()

    run.assert_whole()
    left = run.decisions("function-left")
    assert left
    assert all(said.endswith("called again: failures.in_loop is false") for said in left)
    # Five last words and a shard of the zombie's; two messages of the worker that was written off.
    assert result["fenced_messages"] >= 8
    checkpoints = run.records("checkpoint")
    assert "step-00000006-g0001" not in [record["id"] for record in checkpoints]
    # Its shard went with the next checkpoint that was complete.
    store = CheckpointStore(run.url, "run")
    assert [ref.id for ref in store.incomplete() if ref.generation == 1] == []
    assert not [event for event in run.records("event") if "zombie" in json.dumps(event)]


def _zombie_of_generation_one(run: Run) -> None:
    (run.folder / "zombie-go").touch()
    done = run.folder / "zombie-done"
    wait_until(done.exists, "the zombie to have tried everything")
    assert json.loads(done.read_text()) == {
        "write into a complete checkpoint": "Fenced",
        # Taken by this worker's writer, refused by the controller.
        "save a shard": None,
        "report a step": None,
        "continue": "GenerationEnded",
        "use the engine": "GenerationEnded",
        "say last words": None,
    }


def _worker_that_was_written_off(worker: int, generation: int) -> None:
    """The real client of a worker, with messages of the generation that runs."""
    controller = ray.get_actor(names.controller("run"), names.NAMESPACE)
    told = threading.Event()

    def deliver(items: Any, heard: Any) -> Any:
        return ray.get(controller.deliver.remote(worker, list(items), heard), timeout=30)

    outbox = Outbox(deliver, on_fenced=told.set)
    words = ev.UserCodeFailed(generation, worker, 1000, "the zombie's own")
    for event in (words, ev.WorkerCompleted(generation, worker, 1000, True)):
        outbox.put(Item("event", ev.to_json(event)))
    assert told.wait(60.0)
    outbox.close()


def _node_that_is_none_of_the_run() -> None:
    controller = ray.get_actor(names.controller("run"), names.NAMESPACE)
    assert ray.get(controller.beat.remote(Beat("0" * 56, {})), timeout=30).wanted is False


def _controller_before_this_one(run: Run, writer: JournalWriter) -> None:
    with pytest.raises(Fenced, match="incarnation 2 has taken over"):
        writer.append({"type": "event", "event": "StopRequested", "reason": "the zombie's own"})
    with pytest.raises(Fenced):
        JournalWriter(run.url, "run", incarnation=1)
    # One that had looked just before, and was stopped until now.
    zombies = {"seq": 2, "type": "event", "event": "StopRequested", "reason": "the zombie's own"}
    writer._segments.append(1, to_line(zombies))
    reader = JournalReader(run.url, "run")
    assert "StopRequested" not in [record.get("event") for record in reader.records()]
    assert [problem.kind for problem in reader.problems] == ["fenced"]

"""Scripts of accelerate's, whose loop is the platform's, through lost ranks; the oracle is the undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerated import EVALUATED, Rows
from crew import Crew
from test_oracle import _assert_ended

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.core.mesh import Mesh
from elastic.training.user import accelerate_calls

pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
pytestmark = pytest.mark.processes

CLASSIFIES = "accelerated.classifies"
AT, LAST_STEP = 5, 12


@pytest.mark.parametrize("victim", [0, 1])
def test_it_gathers_from_the_ranks_that_there_are_and_rank_0_logs(crew: Crew, tmp_path: Path, victim: int) -> None:
    """3 ranks, one is killed; 2 continue; a newcomer makes them 3. Seen: accelerate knew the ranks of the beginning, so
    that the first `gather` after a loss ended the run, and where rank 0 was lost nobody logged any more."""
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, "checkpoint_every_steps": 1}
    config: dict[str, Any] = {"in_loop": True, "ahead": True, "victim": victim, "stage": 1}
    moved = {**config, "url": str(tmp_path / "moved"), "at": AT}
    crew.begin([0, 1, 2], CLASSIFIES, moved, **more)
    crew.reached(victim, "there")
    crew.reached(0, f"committed step {AT}")
    crew.members[victim].signal(signal.SIGKILL)
    crew.members[victim].process.join()
    stay = [number for number in (0, 1, 2) if number != victim]
    for number in stay:
        crew.abort(number, f"rank {victim} was lost")
    logged = [line for number in stay for line in crew.outcome(number).told.get("log", [])]
    crew.replace(victim)
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    assert store.list()[0].step == AT

    shrunk = crew.run(stay, CLASSIFIES, moved, checkpoint=store.list()[0].id, end_at=AT + 4, **more)
    _assert_ended(shrunk, "ended", AT + 4)
    joins = {**moved, "place": (2, 3)}
    grown = crew.run([*stay, victim], CLASSIFIES, joins, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    logged += [line for outcome in (*shrunk, *grown) for line in outcome.told.get("log", [])]
    assert [outcome.told["process"] for outcome in grown] == [(0, 3), (1, 3), (2, 3)]

    still = crew.run([0, 1, 2], CLASSIFIES, {**config, "url": str(tmp_path / "still")}, **more)
    _assert_ended(still, "finished", LAST_STEP)
    wanted = still[0].told["log"]
    assert [seen for _, seen, _ in wanted] == [EVALUATED] * 3
    # What a killed rank 0 had logged went with it.
    assert sorted(set(logged)) == wanted[1 if victim == 0 else 0 :]


def test_a_worker_that_trained_alone_shares_an_evaluation_with_those_that_join(crew: Crew, tmp_path: Path) -> None:
    """accelerate leaves the DataLoader of a lone process whole, so that it evaluated more batches than the others."""
    for number in (0, 1):
        # accelerate is to look at their processes here for the first time.
        crew.replace(number)
    config = {"in_loop": True, "stage": 1, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BatchSettings(epochs=3), "max_world_size": 2}
    _assert_ended(crew.run([0], CLASSIFIES, config, end_at=AT, **more), "ended", AT)
    saved = CheckpointStore(str(tmp_path), "run").list()[0].id
    grown = crew.run([0, 1], CLASSIFIES, config, checkpoint=saved, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    assert [(epoch, seen) for epoch, seen, _ in grown[0].told["log"]] == [(1, EVALUATED), (2, EVALUATED)]


def test_workers_that_share_layers_evaluate_the_same_samples(crew: Crew, tmp_path: Path) -> None:
    """Two cells of two, one, and two. Seen: each worker was given samples of its own, so that slices of one layer were
    applied to different samples, and accuracies were wrong without a word."""
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 4, "checkpoint_every_steps": 1}
    config: dict[str, Any] = {"in_loop": True, "stage": None, "url": str(tmp_path / "moved")}
    shared: dict[str, Any] = {**more, "engine": "fsdp2", "tp": 2}
    begun = crew.run([0, 1, 2, 3], CLASSIFIES, config, end_at=AT, **shared)
    _assert_ended(begun, "ended", AT)
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    shrunk = crew.run([3, 0], CLASSIFIES, config, checkpoint=store.list()[0].id, end_at=AT + 2, **shared)
    _assert_ended(shrunk, "ended", AT + 2)
    grown = crew.run([3, 0, 1, 2], CLASSIFIES, config, checkpoint=store.list()[0].id, **shared)
    _assert_ended(grown, "finished", LAST_STEP)

    (still,) = crew.run([2], CLASSIFIES, {**config, "url": str(tmp_path / "still")}, engine="fsdp2", **more)
    _assert_ended([still], "finished", LAST_STEP)
    assert {point for member in crew.members for point in member.points if point.startswith("left")} == set()
    told = [outcome.told for outcome in (begun[0], grown[0])]
    assert sorted({line for each in told for line in each["log"]}) == still.told["log"]
    assert {str(labels) for each in told for labels in each["labels"]} == {str(still.told["labels"][0])}
    assert [outcome.told["process"] for outcome in grown] == [(number, 4) for number in range(4)]


def test_one_that_joins_a_cell_streams_the_samples_of_its_cell(crew: Crew, tmp_path: Path) -> None:
    """Its DataLoader is made while the others train. Left to itself accelerate would have it take other items of each
    batch from the first process, which deals none: the others read the stream themselves."""
    for number in range(4):
        # accelerate is to look at their processes here for the first time.
        crew.replace(number)
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 4, "checkpoint_every_steps": 1}
    shared: dict[str, Any] = {**more, "engine": "fsdp2", "tp": 2}
    config: dict[str, Any] = {"in_loop": True, "ahead": True, "stage": None, "streams": True, "url": str(tmp_path)}
    begun = crew.run([0, 1, 2, 3], CLASSIFIES, config, end_at=AT, **shared)
    _assert_ended(begun, "ended", AT)
    crew.replace(3)
    saved = CheckpointStore(str(tmp_path), "run").list()[0].id
    grown = crew.run([0, 1, 2, 3], CLASSIFIES, {**config, "place": (3, 4)}, checkpoint=saved, **shared)
    _assert_ended(grown, "finished", LAST_STEP)
    assert [outcome.told["process"] for outcome in grown] == [(number, 4) for number in range(4)]
    whole = {**config, "url": str(tmp_path / "still")}
    (still,) = crew.run([2], CLASSIFIES, whole, engine="fsdp2", **more)
    # A stream has no length, so that accelerate cannot tell which samples fill up its end.
    assert grown[0].told["labels"] == still.told["labels"]


@pytest.mark.parametrize("stage", [1, None])
def test_samples_that_a_script_deals_by_rank_to_workers_that_share_layers_are_refused(
    crew: Crew, tmp_path: Path, stage: int | None
) -> None:
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 4, "tp": 2}
    config = {"in_loop": True, "stage": stage, "deals": True, "url": str(tmp_path)}
    engine = "fsdp2" if stage is None else "deepspeed"
    for rank, outcome in enumerate(crew.run([0, 1, 2, 3], CLASSIFIES, config, engine=engine, **more)):
        first = rank // 2 * 2
        assert outcome.result.kind == "usage_error"
        assert f"ranks {first}, {first + 1} share each layer (mesh.tp)" in outcome.result.message


def test_batches_that_cannot_be_cut_for_the_workers_are_refused() -> None:
    """Without a word, what is left over of each batch would be evaluated by nobody."""
    from accelerate import PartialState
    from accelerate.data_loader import BatchSamplerShard
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    known = PartialState._shared_state
    known.update(num_processes=2, process_index=1, distributed_type=DistributedType.MULTI_CPU)
    try:
        batches = torch.utils.data.BatchSampler(range(8), batch_size=4, drop_last=False)
        share = BatchSamplerShard(batches, 2, 1, split_batches=True)
        others = BatchSamplerShard(batches, 5, 1)
        accelerate_calls.joined(0, Mesh(4), lambda: None)
        assert (share.num_processes, share.process_index) == (4, 0)
        assert others.num_processes == 5, "the script's own figures"
        with pytest.raises(UsageError, match=r"each batch of 4 into as many parts.*3 now: leave split_batches out"):
            accelerate_calls.joined(0, Mesh(3), lambda: None)
    finally:
        accelerate_calls.left()
        PartialState._reset_state()


def test_batches_that_are_dispatched_to_workers_of_a_cell_are_refused() -> None:
    """accelerate would send each of them other samples."""
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader

    PartialState(cpu=True)
    accelerate_calls.joined(1, Mesh(2, tp=2), lambda: None)
    try:
        data = torch.utils.data.DataLoader(Rows(8, 1), batch_size=2)
        with pytest.raises(UsageError, match=r"others? samples.*mesh: \{tp: 2\}\): leave dispatch_batches out"):
            prepare_data_loader(data, num_processes=4, process_index=1, dispatch_batches=True, put_on_device=True)
    finally:
        accelerate_calls.joined(0, Mesh(1), lambda: None)
        accelerate_calls.left()
        PartialState._reset_state()


def test_its_checkpoints_are_the_platforms(crew: Crew, tmp_path: Path) -> None:
    """Seen: `save_state` wrote the random states alone, without a word."""
    config = {"in_loop": True, "stage": 2, "saves": str(tmp_path / "own"), "url": str(tmp_path / "runs")}
    done = crew.run([0, 1], CLASSIFIES, config, batch=BatchSettings())
    _assert_ended(done, "finished", LAST_STEP)
    steps = [entry.step for entry in CheckpointStore(str(tmp_path / "runs"), "run").list()]
    assert steps == [12, 8, 4]
    assert list((tmp_path / "own").iterdir()) == [], "scripts put files of their own beside"

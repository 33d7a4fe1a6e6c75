"""A loop of accelerate's with the platform's Accelerator; the oracles are accelerate in one process, and the
undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import accelerator_loop
import pytest
import torch
from accelerator_loop import BATCH, EPOCHS, TRAINED
from cells import Run
from crew import Crew, Outcome
from test_oracle import _assert_ended
from test_trainer_in_loop import engine_of, through_a_loss

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
pytestmark = pytest.mark.processes

TRAINS = "accelerator_loop.trains"
# 36 samples, 3 workers with 2 batches of 2.
PER_EPOCH, LAST_STEP = 3, 9
ACCUMULATES = 2


def trained(crew: Crew, url: Path, config: dict[str, Any], world_size: int = 3, **more: Any) -> list[Outcome]:
    config = {"accumulates": ACCUMULATES, **config, "url": str(url)}
    # In stage 0 the watch for non-finite steps knows the norm of gradients.
    more = {"batch": BatchSettings(), "max_world_size": 3, "anomalies": AnomalySettings(), **more}
    return crew.run(list(range(world_size)), TRAINS, config, **more)


@pytest.mark.parametrize("stage", [0, 1, 2, 3, None])
@pytest.mark.parametrize("world_size", [3, 2])
def test_it_trains_as_accelerate_does_in_one_process(
    crew: Crew, tmp_path: Path, stage: int | None, world_size: int
) -> None:
    """With 3 workers, for which it is planned, and with 2: rates, norms before clipping, evaluations and weights."""
    alone = accelerator_loop.plain({"accumulates": ACCUMULATES * 3, "plain": True})
    done = trained(crew, tmp_path, {}, world_size, **engine_of(stage))
    _assert_ended(done, "finished", LAST_STEP)
    for outcome in done:
        assert outcome.told["rates"] == pytest.approx(alone["rates"], rel=1e-12)
        assert outcome.told["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert outcome.told["completed"] == alone["completed"] == LAST_STEP
    assert max(alone["norms"].values()) > accelerator_loop.CLIPPED_TO
    assert [line[:2] for line in done[0].told["log"]] == [line[:2] for line in alone["log"]]
    assert [line[2] for line in done[0].told["log"]] == pytest.approx([line[2] for line in alone["log"]], rel=1e-5)
    assert done[0].told["weights"].keys() == alone["weights"].keys()
    for name, values in alone["weights"].items():
        assert flat(done[0].told["weights"][name]) == pytest.approx(flat(values), abs=1e-5)


@pytest.mark.parametrize(("stage", "victim", "raw"), [(1, 2, False), (3, 1, False), (None, 2, False), (2, 1, True)])
def test_survivors_of_a_killed_rank_stay_in_the_loop(
    crew: Crew, tmp_path: Path, stage: int | None, victim: int, raw: bool
) -> None:
    """With dropout, a shuffled DataLoader, `gather` in each pass, and an average of the weights that is registered; or
    with a schedule that is not prepared."""
    config = {
        "accumulates": ACCUMULATES, "shuffles": True, "dropout": 0.2, "gathers": True,
        # What is registered is replicated: with FSDP2 parameters are not.
        "averages": stage == 1,
        "raw": raw,
    }  # fmt: skip
    grown, still = through_a_loss(crew, tmp_path, TRAINS, config, victim, LAST_STEP, **engine_of(stage))
    assert [outcome.told["process"] for outcome in grown] == [(0, 3), (1, 3), (2, 3)]
    for moved, wanted in zip(grown, still, strict=True):
        for step, rate in moved.told["rates"].items():
            assert rate == pytest.approx(wanted.told["rates"][step], rel=1e-12)
            assert moved.told["norms"][step] == pytest.approx(wanted.told["norms"][step], rel=1e-4)
    assert grown[0].told["rates"].keys() == still[0].told["rates"].keys()
    assert grown[0].told["completed"] == LAST_STEP, "a counter of the script's counts no abandoned step"
    logged = [line[2] for line in grown[0].told["log"]]
    assert logged == pytest.approx([line[2] for line in still[0].told["log"]], rel=1e-5)
    for name, values in still[0].told["weights"].items():
        assert flat(grown[0].told["weights"][name]) == pytest.approx(flat(values), abs=1e-5)
    for name, values in still[0].told["average"].items() if stage == 1 else ():
        assert flat(grown[0].told["average"][name]) == pytest.approx(flat(values), abs=1e-5)


@pytest.mark.parametrize("stage", [2, 3, None])
def test_a_loop_by_range_stays_where_nobody_joins(crew: Crew, tmp_path: Path, stage: int | None) -> None:
    """It evaluates after each epoch. Seen: from the second epoch on every change had the set-up of all done again."""
    ranges = {"ranges": True, "in_loop": True}
    engine = engine_of(stage)
    still = trained(crew, tmp_path / "still", ranges, **engine)
    _assert_ended(trained(crew, tmp_path, ranges, end_at=PER_EPOCH + 1, **engine), "ended", PER_EPOCH + 1)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    fewer = trained(crew, tmp_path, ranges, 2, checkpoint=newest.id, **engine)
    _assert_ended(fewer, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in fewer] == [1, 1]
    assert fewer[0].told["completed"] == LAST_STEP
    assert [line[:2] for line in fewer[0].told["log"]] == [line[:2] for line in still[0].told["log"]]
    logged = [line[2] for line in fewer[0].told["log"]]
    assert logged == pytest.approx([line[2] for line in still[0].told["log"]], rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3, None])
@pytest.mark.parametrize("only_at_ends", [True, False])
def test_a_step_that_is_made_again_is_counted_once(
    crew: Crew, tmp_path: Path, stage: int | None, only_at_ends: bool
) -> None:
    """Two of three workers go back from the fifth step to the third. Seen: the loop of diffusers' script that counted
    five steps twice was left five steps before the others' end."""
    engine, loop = engine_of(stage), {"in_loop": True, "only at ends": only_at_ends, "gathers": True}
    still = trained(crew, tmp_path / "still", loop, **engine)
    fewer = gone_back(crew, tmp_path / "moved", loop, [2, 0], **engine)
    assert [outcome.told["calls"] for outcome in fewer] == [1, 1]
    assert_as(fewer, still)


def test_what_is_registered_sees_a_step_again(crew: Crew, tmp_path: Path) -> None:
    """It goes back with the run."""
    loop = {"in_loop": True, "averages": True}
    still = trained(crew, tmp_path / "still", loop, **engine_of(2))
    fewer = gone_back(crew, tmp_path / "moved", loop, [2, 0], **engine_of(2))
    assert fewer[0].told["completed"] == LAST_STEP + 2
    for name, values in still[0].told["average"].items():
        assert flat(fewer[0].told["average"][name]) == pytest.approx(flat(values), abs=1e-5)


@pytest.mark.parametrize("at_ends", [True, False])
def test_a_step_that_is_made_again_with_a_new_worker(crew: Crew, tmp_path: Path, at_ends: bool) -> None:
    """The new worker is shown its end. So are the others where the loop has collectives of its own at a step's end."""
    loop = {"in_loop": True, "gathers": True, "gathers at ends": at_ends}
    still = trained(crew, tmp_path / "still", loop, **engine_of(2))
    again = gone_back(crew, tmp_path / "moved", loop, [2, 0, 1], **engine_of(2))
    assert [outcome.told["calls"] for outcome in again] == [1, 1, 1]
    assert [outcome.told["completed"] for outcome in again[:2]] == [LAST_STEP + 2 * at_ends] * 2
    assert again[2].told["completed"] == LAST_STEP - PER_EPOCH
    assert_as(again[:2], still, counted=not at_ends)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("stage", "most"), [(0, 8), (3, 8), (None, 8), (1, 7), (1, 6)])
def test_a_loop_that_is_left_by_a_counter_is_left_by_all(
    crew: Crew, tmp_path: Path, stage: int | None, most: int, bounded: bool
) -> None:
    """A new worker counts from its own beginning. Seen: it stood at the next step, and the others in the evaluation
    after their loop, until the run was ended. The last of them leaves where an epoch ends for it. `bounded`: the job
    says where the run ends, too; there the new worker saved the last step, and the others evaluated."""
    loop = {"accumulates": ACCUMULATES, "ranges": True, "in_loop": True, "most": most, "url": str(tmp_path)}
    # After the last step of an epoch the next iteration is the next epoch's, and is left after one step.
    last = 7 if most == 6 else most
    batch = BatchSettings(max_steps=last if bounded else None)
    more: dict[str, Any] = {"batch": batch, "max_world_size": 3, "anomalies": AnomalySettings()}
    still = crew.run([0, 1, 2], TRAINS, {**loop, "url": str(tmp_path / "still")}, **more, **engine_of(stage))
    _assert_ended(still, "finished", last)
    _assert_ended(crew.run([0, 1, 2], TRAINS, loop, end_at=2, **more, **engine_of(stage)), "ended", 2)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    crew.replace(1)
    done = crew.run([0, 2, 1], TRAINS, loop, checkpoint=newest.id, **more, **engine_of(stage))
    _assert_ended(done, "finished", still[0].result.step)
    assert [outcome.told["calls"] for outcome in done] == [1, 1, 1]
    counted = still[0].told["completed"]
    assert [outcome.told["completed"] for outcome in done] == [counted, counted, counted - 2]
    assert_as(done, still, counted=False)


@pytest.mark.parametrize("streams", [False, True])
def test_an_epoch_that_is_left_with_its_last_step_is_over_for_all(crew: Crew, tmp_path: Path, streams: bool) -> None:
    """By a counter, which a new worker does not have: it comes to the epoch's end by itself. All begin the next one."""
    loop = {"ranges": True, "in_loop": True, "leaves at": 2 * PER_EPOCH, "evaluates": False, "streams": streams}
    _assert_ended(trained(crew, tmp_path, loop, end_at=PER_EPOCH + 1, **engine_of(2)), "ended", PER_EPOCH + 1)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    crew.replace(1)
    done = trained(crew, tmp_path, loop, checkpoint=newest.id, **engine_of(2))
    _assert_ended(done, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in done] == [1, 1, 1]
    assert [outcome.told["completed"] for outcome in done] == [9, 5, 9]


@pytest.mark.parametrize("most", [8, LAST_STEP])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("stage", "how"), [(3, "unwrapped"), (3, "in parts"), (None, "unwrapped"), (None, True)])
def test_the_model_itself_is_evaluated_after_the_loop_is_left_by_all(
    crew: Crew, tmp_path: Path, stage: int | None, how: Any, compiled: bool, most: int
) -> None:
    """As summarization scripts do, by `unwrap_model(model).generate`. Seen: its weights were gathered while a worker
    that had joined asked whether the loop was left: it stood still, after the last step."""
    engine = engine_of(stage)
    if stage == 3:
        engine["engine_config"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    loop: dict[str, Any] = {"ranges": True, "in_loop": True, "most": most, "evaluates": how}
    if compiled:
        loop["accelerator"] = {"gradient_accumulation_steps": ACCUMULATES, "dynamo_backend": "eager"}
    still = trained(crew, tmp_path / "still", loop, **engine)
    _assert_ended(trained(crew, tmp_path / "moved", loop, end_at=2, **engine), "ended", 2)
    newest = CheckpointStore(str(tmp_path / "moved"), "run").list()[0]
    crew.replace(1)
    done = trained(crew, tmp_path / "moved", loop, checkpoint=newest.id, **engine)
    _assert_ended(done, "finished", most)
    assert [outcome.told["calls"] for outcome in done] == [1, 1, 1]
    assert [line[:2] for line in done[0].told["log"]] == [line[:2] for line in still[0].told["log"]]
    assert_as(done, still, counted=False)


def test_a_stream_that_is_left_by_a_counter_is_left_by_all(crew: Crew, tmp_path: Path) -> None:
    loop = {"ranges": True, "in_loop": True, "most": 8, "streams": True}
    _assert_ended(trained(crew, tmp_path, loop, end_at=2, **engine_of(2)), "ended", 2)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    crew.replace(1)
    done = trained(crew, tmp_path, loop, checkpoint=newest.id, **engine_of(2))
    _assert_ended(done, "finished", 8)
    assert [outcome.told["completed"] for outcome in done] == [8, 6, 8]


def test_an_epoch_that_is_left_by_a_counter_goes_on_for_all(crew: Crew, tmp_path: Path) -> None:
    """In its second step; its third is the next iteration's, also on the new worker, whose counter leaves nothing."""
    loop = {"accumulates": ACCUMULATES, "ranges": True, "in_loop": True, "leaves at": 5, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, "anomalies": AnomalySettings()}
    _assert_ended(crew.run([0, 1, 2], TRAINS, loop, end_at=1, **more, **engine_of(2)), "ended", 1)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    crew.replace(1)
    done = crew.run([0, 2, 1], TRAINS, loop, checkpoint=newest.id, **more, **engine_of(2))
    _assert_ended(done, "finished", 2 * PER_EPOCH)
    assert [outcome.told["completed"] for outcome in done] == [6, 6, 5]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("stage", "most", "change"), [(0, 8, "values"), (1, 8, "dtype"), (2, LAST_STEP, "values"), (1, LAST_STEP, "dtype")]
)
def test_what_one_worker_does_to_its_weights_after_the_loop_is_its_own(
    crew: Crew, tmp_path: Path, stage: int, most: int, change: str, joined: bool
) -> None:
    """The loop was left by its counter, within an epoch or with its last step, which a worker that has `joined` does
    not count. Seen: copies that had drifted apart ended the run, at diffusers' train_text_to_image's end."""
    loop = {"ranges": True, "in_loop": True, "most": most, "gathers": True}
    trained(crew, tmp_path / "still", loop, **engine_of(stage))
    base, first = None, {"generation": 1}
    if joined:
        _assert_ended(trained(crew, tmp_path / "moved", loop, end_at=2, **engine_of(stage)), "ended", 2)
        (base,) = [entry.id for entry in CheckpointStore(str(tmp_path / "moved"), "run").list()]
        crew.replace(1)
        first = {}
    changes = {**loop, "changes": change}
    done = trained(crew, tmp_path / "moved", changes, checkpoint=base, **first, **engine_of(stage))
    _assert_ended(done, "finished", most)
    still, moved = (Run(tmp_path / name, []).state() for name in ("still", "moved"))
    assert still.keys() == moved.keys()
    for name, values in still.items():
        assert torch.allclose(moved[name], values, atol=1e-5), name


def test_of_a_loop_that_was_left_and_goes_on_the_last_step_is_saved(crew: Crew, tmp_path: Path) -> None:
    """And not that with which it was left, which was copied."""
    done = trained(crew, tmp_path, {"ranges": True, "leaves at": 5}, **engine_of(2))
    _assert_ended(done, "finished", 2 * PER_EPOCH)
    assert CheckpointStore(str(tmp_path), "run").list()[0].step == 2 * PER_EPOCH


def test_collectives_at_a_steps_end_are_left_out_with_it(crew: Crew, tmp_path: Path) -> None:
    """They are in each step all the same: a worker that joins later leaves the others in their loop."""
    loop = {"in_loop": True, "gathers at ends": True}
    fewer = gone_back(crew, tmp_path, loop, [2, 0], end_at=7, **engine_of(2))
    assert [outcome.told.get("completed") for outcome in fewer] == [None, None], "they are in their loop"
    crew.replace(1)
    newest = CheckpointStore(str(tmp_path), "run").list()[0].id
    config = {"accumulates": ACCUMULATES, **loop, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, "anomalies": AnomalySettings()}
    grown = crew.run([2, 0, 1], TRAINS, config, checkpoint=newest, **more, **engine_of(2))
    _assert_ended(grown, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in grown] == [1, 1, 1]
    assert [outcome.told["completed"] for outcome in grown[:2]] == [LAST_STEP] * 2


def gone_back(
    crew: Crew, url: Path, loop: dict[str, Any], who: list[int], end_at: int | None = None, **engine: Any
) -> list[Outcome]:
    config = {"accumulates": ACCUMULATES, **loop, "url": str(url)}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, "anomalies": AnomalySettings(), **engine}
    begun = crew.run([0, 1, 2], TRAINS, config, end_at=5, checkpoint_every_steps=1, **more)
    _assert_ended(begun, "ended", 5)
    (base,) = [each.id for each in CheckpointStore(str(url), "run").list() if each.step == PER_EPOCH]
    if 1 in who:
        crew.replace(1)
    done = crew.run(who, TRAINS, config, checkpoint=base, end_at=end_at, **more)
    _assert_ended(done, "ended" if end_at else "finished", end_at or LAST_STEP)
    return done


def assert_as(done: list[Outcome], still: list[Outcome], counted: bool = True) -> None:
    for outcome in done if counted else ():
        assert outcome.told["completed"] == LAST_STEP
        assert outcome.told["rates"] == pytest.approx(still[0].told["rates"], rel=1e-12)
        assert outcome.told["norms"] == pytest.approx(still[0].told["norms"], rel=1e-4)
    for name, values in still[0].told["weights"].items():
        assert flat(done[0].told["weights"][name]) == pytest.approx(flat(values), abs=1e-5)


def test_rank_0_that_is_lost_leaves_its_part_to_one_whose_set_up_has_not_asked(crew: Crew, tmp_path: Path) -> None:
    """accelerate itself has asked, and learns of the change."""
    config = {"accumulates": ACCUMULATES}
    grown, still = through_a_loss(crew, tmp_path, TRAINS, config, 0, LAST_STEP, **engine_of(2))
    logged = [line for line in grown[0].told["log"]]
    assert [line[0] for line in logged] == [1, 2], "that of the first epoch went with rank 0"
    assert [line[2] for line in logged] == pytest.approx([line[2] for line in still[0].told["log"][1:]], rel=1e-5)


@pytest.mark.parametrize("accumulates", [1, 2])
def test_a_schedule_that_is_not_prepared_steps_as_often_with_fewer_workers(
    crew: Crew, tmp_path: Path, accumulates: int
) -> None:
    """Seen: with each batch of a worker, of which there are more in a step then."""
    config = {"raw": True, "accumulates": accumulates}
    three, two = (trained(crew, tmp_path / str(size), config, size, **engine_of(2)) for size in (3, 2))
    last = TRAINED // (BATCH * 3 * accumulates) * EPOCHS
    for outcome in (*three, *two):
        _assert_ended([outcome], "finished", last)
        assert outcome.told["last epoch"] == last * accumulates
        assert outcome.told["rates"] == three[0].told["rates"]


def test_a_trigger_is_seen_where_a_step_ends(crew: Crew, tmp_path: Path) -> None:
    """Set in the first of three batches. Seen: the loop was left within the step, which ended the run as an error."""
    done = trained(crew, tmp_path, {"stops": 5}, 2, **engine_of(1))
    _assert_ended(done, "finished", 5)


def test_it_is_prepared_piece_by_piece(crew: Crew, tmp_path: Path) -> None:
    first = trained(crew, tmp_path / "first", {"after": True}, **engine_of(2))
    _assert_ended(first, "finished", LAST_STEP)
    other = trained(crew, tmp_path / "other", {}, **engine_of(2))
    assert first[0].told["rates"] == other[0].told["rates"]
    assert first[0].told["weights"] == other[0].told["weights"]
    assert first[0].told["log"] == other[0].told["log"]


@pytest.mark.parametrize("clips", [0, 4])
@pytest.mark.parametrize("stage", [0, 1, None])
def test_nothing_is_clipped_where_the_script_does_not(
    crew: Crew, tmp_path: Path, stage: int | None, clips: int
) -> None:
    """DeepSpeed's own default is 1. The first four steps are clipped, or none."""
    alone = accelerator_loop.plain({"accumulates": ACCUMULATES * 3, "plain": True, "clips": clips})
    done = trained(crew, tmp_path, {"clips": clips}, **engine_of(stage))
    for name, values in alone["weights"].items():
        assert flat(done[0].told["weights"][name]) == pytest.approx(flat(values), abs=1e-5)


@pytest.mark.parametrize("stage", [2, None])
def test_an_iterator_that_is_used_up_clips_nothing(crew: Crew, tmp_path: Path, stage: int | None) -> None:
    """Seen: diffusers' LoRA scripts were refused, since they would clip 0 of 64 parameters."""
    alone = accelerator_loop.plain({"accumulates": ACCUMULATES * 3, "plain": True, "clips none": True})
    done = trained(crew, tmp_path, {"clips none": True}, **engine_of(stage))
    assert set(alone["norms"].values()) == set(done[0].told["norms"].values()) == {0.0}
    for name, values in alone["weights"].items():
        assert flat(done[0].told["weights"][name]) == pytest.approx(flat(values), abs=1e-5)


def test_it_trains_on_a_stream(crew: Crew, tmp_path: Path) -> None:
    """Whose passes are epochs, at any number of workers; it has no length."""
    pytest.importorskip("datasets")
    three, two = (trained(crew, tmp_path / str(size), {"streams": True}, size, **engine_of(2)) for size in (3, 2))
    _assert_ended(three, "finished", LAST_STEP)
    _assert_ended(two, "finished", LAST_STEP)
    assert two[0].told["norms"] == pytest.approx(three[0].told["norms"], rel=1e-4)


@pytest.mark.parametrize(("world_size", "asks", "told"), [(3, False, 0), (2, True, 0), (2, False, 1)])
def test_a_script_that_counts_batches_is_told_where_steps_have_several(
    crew: Crew, tmp_path: Path, world_size: int, asks: bool, told: int
) -> None:
    function, config = "accelerator_loop.counts_batches", {"asks": asks, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, "anomalies": AnomalySettings()}
    done = crew.run(range(world_size), function, config, **more, **engine_of(1))
    _assert_ended(done, "finished", TRAINED // BATCH // 3)
    for outcome in done:
        assert (
            len([said for said in outcome.told["said"] if "has not asked for accelerator.sync_gradients" in said])
            == told
        )


@pytest.mark.parametrize("stage", [1, 3, None])
def test_rank_0_alone_may_ask_for_a_save(crew: Crew, tmp_path: Path, stage: int | None) -> None:
    """As diffusers' scripts do. Seen: in a run's first generation its save met the gradients of the others, and gloo
    ended a process."""
    done = trained(crew, tmp_path, {"saves_every": 4}, **engine_of(stage))
    _assert_ended(done, "finished", LAST_STEP)
    assert sorted(each.step for each in CheckpointStore(str(tmp_path), "run").list()) == [4, 8, LAST_STEP]


def test_its_checkpoints_are_the_platforms(crew: Crew, tmp_path: Path) -> None:
    done = trained(crew, tmp_path / "runs", {"saves": str(tmp_path / "own")}, **engine_of(2))
    _assert_ended(done, "finished", LAST_STEP)
    steps = [entry.step for entry in CheckpointStore(str(tmp_path / "runs"), "run").list()]
    assert steps == [9, 6, 3]
    assert list((tmp_path / "own").iterdir()) == [], "scripts put files of their own beside"


def test_updates_by_a_count_of_batches_are_refused(crew: Crew, tmp_path: Path) -> None:
    """Where a step ends without one."""
    done = trained(crew, tmp_path, {"updates_every": 3, "clips": 0}, **engine_of(2))
    _assert_ended(done, "usage_error", 0)
    assert "a step ends with this batch, and optimizer.step() was not called" in done[0].result.message


def test_a_generator_in_the_place_of_a_data_loader_is_named() -> None:
    """As `cycle(DataLoader(...))` of x-transformers' scripts. Seen: that one of three was missing, not which."""
    from elastic.integrations.accelerate_objects import Pieces

    pieces, model = Pieces(), torch.nn.Linear(2, 1)
    pieces.note((model, torch.optim.SGD(model.parameters()), (each for each in [1])))
    assert not pieces.complete
    assert "What a generator gives is in no DataLoader: prepare the DataLoader" in str(pieces.refusal())


REFUSED = [
    ({"mixed_precision": "fp8"}, {}, r"mixed_precision='fp8'\) is not supported"),
    ({"mixed_precision": "bf16"}, {"bf16": {"enabled": False}}, "the job's `deepspeed` switches bf16 off"),
    ({}, {"gradient_clipping": 1.0}, r"0\.3\), and gradient_clipping in the job is 1.0; leave it out of the job"),
    ({}, {"gradient_accumulation_steps": 4}, "the Accelerator's gradient_accumulation_steps is 1, and gradient_acc"),
]


@pytest.mark.parametrize(("accelerator", "config", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    crew: Crew, tmp_path: Path, accelerator: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    for outcome in trained(crew, tmp_path, {"accelerator": accelerator}, 2, engine_config=config):
        assert outcome.result.kind == "usage_error"
        assert re.search(words, outcome.result.message)


@pytest.mark.parametrize("stage", [0, 2, 3, None])
def test_in_bf16_outputs_are_fp32_and_inputs_may_be(crew: Crew, tmp_path: Path, stage: int | None) -> None:
    """As with accelerate, whose losses these are to bf16's rounding."""
    alone = accelerator_loop.plain({"accumulates": ACCUMULATES * 3, "plain": True, "precision": "bf16"})
    accelerator = {"mixed_precision": "bf16", "gradient_accumulation_steps": ACCUMULATES}
    done = trained(crew, tmp_path, {"accelerator": accelerator}, **engine_of(stage))
    _assert_ended(done, "finished", LAST_STEP)
    assert done[0].told["dtype"] == alone["dtype"] == "torch.float32"
    assert done[0].told["around"] == alone["around"] == "torch.bfloat16", "what the script computes in autocast()"
    assert done[0].told["norms"] == pytest.approx(alone["norms"], rel=0.02)
    assert [line[2] for line in done[0].told["log"]] == pytest.approx([line[2] for line in alone["log"]], rel=0.02)


def flat(values: Any) -> list[float]:
    return [value for row in values for value in (row if isinstance(row, list) else [row])]

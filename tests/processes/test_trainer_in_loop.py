"""transformers' Trainer stays in its loop while ranks are lost and come back; the oracle is the undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Outcome
from test_oracle import _assert_ended, _whole_state

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings

pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
pytestmark = pytest.mark.processes

TRAINS = "hf_trainer.trains"
AT, LAST_STEP = 4, 10
OVER = "left: it has stood by while the others came to the end of an epoch"


def entries(outcome: Outcome) -> list[dict[str, Any]]:
    """The log, without what tells the time."""
    speed = ("runtime", "per_second", "total_flos", "preparation_time")
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in speed)}
        for entry in outcome.told["log"]
    ]


def through_a_loss(
    crew: Crew, folder: Path, trains: str, config: dict[str, Any], victim: int, last: int, at: int = AT, **more: Any
) -> tuple[list[Outcome], list[Outcome]]:
    """3 ranks, one is killed after step `at`; 2 continue; a newcomer makes them 3 again. (What they came to, what an
    undisturbed run comes to); nobody was called again."""
    more = {"batch": BatchSettings(), "max_world_size": 3, "checkpoint_every_steps": 1, **more}
    config = {**config, "in_loop": True, "ahead": True, "victim": victim, "url": str(folder / "moved")}
    crew.begin([0, 1, 2], trains, {**config, "at": at}, **more)
    stay = [number for number in (0, 1, 2) if number != victim]
    crew.reached(victim, "there")
    crew.reached(0, f"committed step {at}")
    crew.lose(victim, stay)
    crew.replace(victim)
    store = CheckpointStore(str(folder / "moved"), "run")
    assert store.list()[0].step == at

    config["at"] = at
    shrunk = crew.run(stay, trains, config, checkpoint=store.list()[0].id, end_at=at + 3, **more)
    _assert_ended(shrunk, "ended", at + 3)
    joins = {**config, "place": (2, 3)}
    grown = crew.run([*stay, victim], trains, joins, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", last)
    points = crew.members[victim].points
    assert points.index("set up") < points.index("waits"), "its Trainer was made while the others trained"
    left = [point for member in crew.members for point in member.points if point.startswith("left")]
    assert left == [], "a function was left"
    assert [outcome.told["calls"] for outcome in grown] == [1, 1, 1]

    quiet = {**config, "at": None, "url": str(folder / "still")}
    still = crew.run([0, 1, 2], trains, quiet, **more)
    _assert_ended(still, "finished", last)
    return grown, still


@pytest.mark.parametrize(("stage", "victim"), [(1, 2), (2, 2), (1, 0), (None, 2)])
def test_survivors_of_a_killed_rank_stay_and_log_what_an_undisturbed_run_logs(
    crew: Crew, tmp_path: Path, stage: int | None, victim: int
) -> None:
    """Rank 0 is no exception: that accelerate has been told another rank does not keep who takes its place from its
    loop. Without a stage with FSDP2."""
    assert_logged_alike(*through_a_loss(crew, tmp_path, TRAINS, {}, victim, LAST_STEP, **engine_of(stage)))


def test_adafactor_goes_on_with_its_factors(crew: Crew, tmp_path: Path) -> None:
    """In stage 0. With FSDP2 sums are added up in another order, and Adafactor divides a gradient that is zero but for
    its last bit by that bit."""
    assert_logged_alike(*through_a_loss(crew, tmp_path, TRAINS, {"optim": "adafactor"}, 2, LAST_STEP, **engine_of(0)))


@pytest.mark.slow
def test_deepspeeds_muon_is_the_configurations(crew: Crew, tmp_path: Path) -> None:
    muon = {"type": "Muon", "params": {"lr": "auto", "momentum": 0.9, "torch_adam": True, "ns_method": "gram"}}
    engine = {"engine_config": {"zero_optimization": {"stage": 2}, "optimizer": muon}}
    assert_logged_alike(*through_a_loss(crew, tmp_path, TRAINS, {}, 2, LAST_STEP, **engine))


@pytest.mark.parametrize(("stage", "strategy"), [(1, "epoch"), (3, "steps"), (None, "epoch")])
def test_survivors_of_a_rank_that_is_killed_in_an_evaluation_stay_and_evaluate_again(
    crew: Crew, tmp_path: Path, stage: int | None, strategy: str
) -> None:
    """That of step 4, which is the last of its epoch: the step is done again, and the evaluation with it."""
    config = {"evaluating": True, "strategy": strategy}
    assert_logged_alike(*through_a_loss(crew, tmp_path, TRAINS, config, 2, LAST_STEP, at=3, **engine_of(stage)))


def engine_of(stage: int | None) -> dict[str, Any]:
    return {"engine": "fsdp2"} if stage is None else {"engine_config": {"zero_optimization": {"stage": stage}}}


def assert_logged_alike(grown: list[Outcome], still: list[Outcome]) -> None:
    for moved, wanted in zip(grown, still, strict=True):
        for key in ("steps", "counted", "zero", "processes", "epoch"):
            assert moved.told[key] == wanted.told[key], key
        assert len(entries(moved)) == len(entries(wanted)) > 6
        for one, other in zip(entries(moved), entries(wanted), strict=True):
            assert one == pytest.approx(other, rel=1e-4)
    assert [outcome.told["zero"] for outcome in grown] == [True, False, False]


@pytest.mark.parametrize("stage", [1, 3, None])
def test_the_best_weights_are_the_models_at_the_end_and_the_last_ones_are_saved(
    crew: Crew, tmp_path: Path, stage: int | None
) -> None:
    """`load_best_model_at_end`: those of step 2, which one rank of three has not lived to and another has not seen."""
    engine = engine_of(stage)
    grown, still = through_a_loss(crew, tmp_path, TRAINS, {"best": True}, 2, LAST_STEP, **engine)
    log = [entry for entry in still[0].told["log"] if "eval_loss" in entry]
    evaluated = {entry["step"]: entry["eval_loss"] for entry in log[:-1]}
    assert log[-1]["step"] == LAST_STEP, "that is of the best weights"
    for folder, outcomes in (("moved", grown), ("still", still)):
        for outcome in outcomes:
            step, url, loss = outcome.told["best"]
            assert (step, url) == (2, str(tmp_path / folder / "run" / "best" / "step-00000002"))
            assert loss == pytest.approx(evaluated[2], rel=1e-5)
    assert abs(evaluated[2] - evaluated[LAST_STEP]) > 1e-2 * evaluated[2]
    plain = {"in_loop": True, "victim": 0, "url": str(tmp_path / "plain")}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, "checkpoint_every_steps": 1, **engine}
    _assert_ended(crew.run([0, 1, 2], TRAINS, plain, **more), "finished", LAST_STEP)
    wanted = _whole_state(CheckpointStore(str(tmp_path / "plain"), "run"))
    for folder in ("moved", "still"):
        for key, value in _whole_state(CheckpointStore(str(tmp_path / folder), "run")).items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("until", "reasons"), [((1, 3), []), ((2, 7), [OVER])], ids=["within-an-epoch", "over-its-end"]
)
def test_one_that_has_stood_by_logs_what_the_others_log(
    crew: Crew, tmp_path: Path, until: tuple[int, int], reasons: list[str]
) -> None:
    """An epoch has three steps and a part of one."""
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, "checkpoint_every_steps": 1}
    config: dict[str, Any] = {"in_loop": True, "victim": 0, "url": str(tmp_path / "moved")}
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    _assert_ended(crew.run([0, 1, 2], TRAINS, config, end_at=until[0], **more), "ended", until[0])
    fewer = crew.run([0, 1], TRAINS, config, end_at=until[1], checkpoint=store.list()[0].id, **more)
    _assert_ended(fewer, "ended", until[1])
    grown = crew.run([0, 1, 2], TRAINS, config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    assert [point for point in crew.members[2].points if point.startswith("left")] == reasons
    still = crew.run([0, 1, 2], TRAINS, {**config, "url": str(tmp_path / "still")}, **more)
    for moved, wanted in zip(grown, still, strict=True):
        assert moved.told["steps"] == wanted.told["steps"]
        assert len(entries(moved)) == len(entries(wanted)) > 8
        for one, other in zip(entries(moved), entries(wanted), strict=True):
            assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_worker_that_joins_has_compiled_before(crew: Crew, tmp_path: Path, stage: int) -> None:
    """The Trainer's model, which `torch_compile` of its arguments has compiled, as torch's own Trainer has it."""
    more: dict[str, Any] = {
        "batch": BatchSettings(), "max_world_size": 2, "checkpoint_every_steps": 1,
        "engine_config": {"zero_optimization": {"stage": stage}},
    }  # fmt: skip
    # An evaluation has graphs of its own, which nobody rehearses.
    config: dict[str, Any] = {
        "in_loop": True,
        "ahead": True,
        "victim": 0,
        "quiet": True,
        "url": str(tmp_path / "plain"),
    }
    plain = crew.run([0, 1], TRAINS, config, **more)
    _assert_ended(plain, "finished", plain[0].result.step)
    config = {**config, "compiled": True, "url": str(tmp_path / "compiled")}
    begun = crew.run([0], TRAINS, config, end_at=AT, **more)
    assert begun[0].told["model passes"]
    crew.replace(1)
    joins = {**config, "place": (1, 2), "passes": begun[0].told["model passes"]}
    store = CheckpointStore(str(tmp_path / "compiled"), "run")
    grown = crew.run([0, 1], TRAINS, joins, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", plain[0].result.step)
    (said,) = [point for point in crew.members[1].points if "ahead of joining" in point]
    made = int(said.rpartition(" ")[2])
    assert said.startswith("made ")
    assert made == grown[1].told["graphs"] > 0, "nothing is compiled in the generation"
    for one, other in zip(entries(grown[0]), entries(plain[0]), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_worker_that_trained_alone_evaluates_with_those_that_join(crew: Crew, tmp_path: Path) -> None:
    """accelerate takes a process for one of several, or for the only one, when it begins."""
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 2, "checkpoint_every_steps": 1}
    config: dict[str, Any] = {"in_loop": True, "ahead": True, "victim": 0, "readers": 1, "url": str(tmp_path / "grown")}
    begun = crew.run([0], TRAINS, config, end_at=AT, **more)
    _assert_ended(begun, "ended", AT)
    store = CheckpointStore(str(tmp_path / "grown"), "run")
    grown = crew.run([0, 1], TRAINS, config, checkpoint=store.list()[0].id, **more)
    last = grown[0].result.step
    _assert_ended(grown, "finished", last)
    still = crew.run([0, 1], TRAINS, {**config, "url": str(tmp_path / "still")}, **more)
    _assert_ended(still, "finished", last)
    assert [outcome.told["processes"] for outcome in grown] == [2, 2]
    assert [outcome.told["zero"] for outcome in grown] == [True, False]
    for one, other in zip(entries(grown[0]), entries(still[0]), strict=True):
        # transformers' mean over an evaluation's last batch is another one for one process.
        if not ("eval_loss" in one and one["step"] <= AT):
            assert one == pytest.approx(other, rel=1e-4)
    assert [outcome.told["calls"] for outcome in grown] == [1, 1]


@pytest.mark.parametrize("stage", [1, 3, None])
def test_the_model_is_saved_where_the_script_says(crew: Crew, tmp_path: Path, stage: int | None) -> None:
    """At stage 3 and with FSDP2 (None), too, where no rank has the weights; seen: the last line of transformers'
    examples failed the run."""
    import transformers

    engine = {"engine": "fsdp2"} if stage is None else {"engine_config": {"zero_optimization": {"stage": stage}}}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3, **engine}
    config = {"in_loop": True, "victim": None, "quiet": True, "saves": True, "url": str(tmp_path)}
    outcomes = crew.run([0, 1], TRAINS, config, **more)
    _assert_ended(outcomes, "finished", LAST_STEP)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    trained = _whole_state(CheckpointStore(str(tmp_path), "run"))
    weights = {key.removeprefix("master/"): value for key, value in trained.items() if key.startswith("master/")}
    assert weights
    for name, value in weights.items():
        assert torch.equal(saved[name].flatten().double(), value), name
    assert (tmp_path / "trainer_state.json").exists()

"""Workers are killed, stopped, added and left out at random, under functions of every kind; the oracle is the
undisturbed run."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import cells
import pytest
from crew import Crew
from test_oracle import BATCH, FLOOR, LAST_STEP, Run, _distance, _engine, _undisturbed

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

FUNCTION = "scheduled.trains"
ENGINES: list[dict[str, Any]] = [*({"stage": stage} for stage in (0, 1, 2, 3)), {"engine": "fsdp2"}]
WHERE = ["batch", "forward", "backward", "step"]
LIMIT_S = 120.0
TRIES = 3
GOES_ON = {"ended", "collective_failed", "restore_failed", "finished"}


class Part(NamedTuple):
    """One generation: its members by rank; a planned end, or the rank that is lost where the run has come to a step."""

    who: Sequence[int]
    end_at: int | None = None
    lost: tuple[int, int, str] | None = None
    mesh: Mapping[str, int] = {}


def function_of(draw: random.Random) -> dict[str, Any]:
    has: dict[str, Any] = {"asks": draw.choice(["no", "variable", "torch", "elastic", "deepspeed"])}
    likely = {"main first": 0.5, "group": 0.4, "name": 0.5, "count": 0.2, "mesh": 0.2, "seed": 0.3, "epochs": 0.7}
    has |= {name: True for name, chance in likely.items() if draw.random() < chance}
    if draw.random() < 0.5:
        has["logs"] = draw.choice(["by step", "by step", "by counter"])
    if draw.random() < 0.4:
        has["evaluates"] = True
    return has


def schedule_of(draw: random.Random, where: Sequence[str] = WHERE) -> list[Part]:
    """Of four workers; a step is done in each generation, or some."""
    parts, step, who = [], 0, draw.sample(range(4), draw.randint(1, 4))
    while step < LAST_STEP - 1 and len(parts) < 5:
        step += draw.randint(0 if len(parts) else 1, 3)
        if step >= LAST_STEP:
            break
        if draw.random() < 0.5:
            parts.append(Part(who, lost=(draw.randrange(len(who)), step, draw.choice(where))))
            stay = [number for place, number in enumerate(who) if place != parts[-1].lost[0]]
        else:
            # Where the step is done already it ends at once.
            parts.append(Part(who, end_at=max(step, 1)))
            stay = list(who)
        others = [number for number in range(4) if number not in stay]
        draw.shuffle(others)
        if draw.random() < 0.5:
            draw.shuffle(stay)
        who = [*stay[: draw.randint(0, len(stay))], *others[: draw.randint(0, len(others))]] or [draw.randrange(4)]
        if draw.random() < 0.3:
            draw.shuffle(who)
    return [*parts, Part(who)]


def places_of(draw: random.Random, parts: Sequence[Part], first: int) -> dict[tuple[int, int], Any]:
    """What is expected of those that join, by generation and rank: mostly right."""
    places: dict[tuple[int, int], Any] = {(-1, 0): None}
    for number, part in enumerate(parts):
        for rank in range(len(part.who)) if number else ():
            told = (rank or 1, len(part.who))
            if draw.random() < 0.2:
                told = (told[0], len(part.who) + 1)
            places[first + number, rank] = told if told[1] > 1 and draw.random() < 0.9 else None
    return places


def outcomes_of(crew: Crew, who: Sequence[int]) -> list[Any]:
    """Of each of these members. When one has failed the others are told, as the controller does."""
    members = [crew.members[number] for number in who]
    told = False
    while pending := {member.pipe: member for member in members if member.outcome is None}:
        failed = [m.number for m in members if m.outcome and m.outcome.result.kind not in ("ended", "finished")]
        if failed and not told:
            told = True
            for member in pending.values():
                crew.abort(member.number, f"member {failed[0]} has failed")
        ready = wait(list(pending), LIMIT_S)
        assert ready, f"{[member.number for member in pending.values()]} of {list(who)} came to no end"
        for pipe, member in pending.items():
            if pipe in ready:
                crew._receive(member, "outcome")
    return [member.outcome for member in members]


def happens(crew: Crew, part: Part, function: str, config: dict[str, Any], more: dict[str, Any]) -> list[Any]:
    crew.begin(part.who, function, config, end_at=part.end_at, **more, **part.mesh)
    if part.lost is not None:
        victim = crew.members[part.who[part.lost[0]]]
        survivors = [number for number in part.who if number != victim.number]
        while "there" not in victim.points and victim.outcome is None:
            crew._receive(victim, "point")
        if victim.outcome is None:
            victim.signal(signal.SIGKILL)
            victim.process.join()
            crew.replace(victim.number)
            for number in survivors:
                crew.abort(number, f"member {victim.number} was lost")
            return outcomes_of(crew, survivors)
    return outcomes_of(crew, part.who)


# One takes about five seconds.
SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_schedule(crew: Crew, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    engine, has, parts = draw.choice(ENGINES), function_of(draw), schedule_of(draw)
    assert_as_undisturbed(crew, tmp_path, draw, engine, has, parts)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))])
def test_any_schedule_of_steps_that_are_left_where_they_fail(crew: Crew, tmp_path: Path, seed: int) -> None:
    """`with elastic.step():` around the passes, collectives of the loop's own, and an evaluation."""
    draw = random.Random(seed)
    engine, has = draw.choice(ENGINES), {**function_of(draw), "strict": True, "evaluates": "within"}
    parts = schedule_of(draw, [*WHERE, "evaluation", "evaluation"])
    assert_as_undisturbed(crew, tmp_path, draw, engine, has, parts)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24))])
def test_any_schedule_of_evaluations_between_epochs(crew: Crew, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    engine, has = draw.choice(ENGINES), {**function_of(draw), "strict": True, "evaluates": "between", "epochs": True}
    parts = schedule_of(draw, [*WHERE, "evaluation", "evaluation", "evaluation", "evaluation"])
    assert_as_undisturbed(crew, tmp_path, draw, engine, has, parts)


@pytest.mark.parametrize("step", [4, LAST_STEP])
@pytest.mark.parametrize("engine", [{"stage": 1}, {"stage": 3}, {"engine": "fsdp2"}], ids=["stage1", "stage3", "fsdp2"])
def test_an_evaluation_between_epochs_is_made_again(
    crew: Crew, tmp_path: Path, engine: dict[str, Any], step: int
) -> None:
    """In the loop that was there: its epoch is given again, with what is left of its steps."""
    has = {"asks": "no", "strict": True, "evaluates": "between", "epochs": True}
    parts = [Part((0, 1, 2), lost=(1, step, "evaluation")), Part((2, 1, 0))]
    outcomes = assert_as_undisturbed(crew, tmp_path, random.Random(0), engine, has, parts)
    told = {number: outcome.told for number, outcome in zip((2, 1, 0), outcomes, strict=True)}
    assert (told[0]["calls"], told[2]["calls"]) == (1, 1)
    assert told[0]["evaluated"] == told[2]["evaluated"] == [4, LAST_STEP]
    assert told[1]["evaluated"] == [each for each in (4, LAST_STEP) if each >= step], "the one in place of the lost one"


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_any_schedule_of_transformers_trainer(crew: Crew, tmp_path: Path, seed: int) -> None:
    """Every line of its log, on every rank."""
    pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
    from test_trainer_in_loop import entries

    draw = random.Random(seed)
    stage = draw.choice([1, 3, None])
    engine = {"engine": "fsdp2"} if stage is None else {"engine_config": {"zero_optimization": {"stage": stage}}}
    parts = schedule_of(draw, ["forward", "evaluation"])
    config: dict[str, Any] = {"strategy": draw.choice(["epoch", "steps"])}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 4, "checkpoint_every_steps": 1, **engine}
    moved, config = through(crew, tmp_path / "moved", draw, "hf_trainer.trains", config, parts, more)
    crew.settle()
    quiet = {**config, "kills": {}, "url": str(tmp_path / "still")}
    (still, *_) = crew.run([0, 1], "hf_trainer.trains", quiet, **more)
    assert still.result.kind == "finished", still.result.traceback
    for outcome in moved:
        assert outcome.told["steps"] == still.told["steps"]
        assert len(entries(outcome)) == len(entries(still)) > 4
        for one, other in zip(entries(outcome), entries(still), strict=True):
            # accelerate fills up the last batch of an evaluation by the number of ranks.
            loose = {"eval_loss": pytest.approx(other["eval_loss"], rel=2e-2)} if "eval_loss" in other else {}
            assert one == {key: pytest.approx(value, rel=1e-3) for key, value in other.items()} | loose


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_any_schedule_of_pipelines(crew: Crew, tmp_path: Path, seed: int) -> None:
    """Of as many stages as each generation's number of workers is a multiple of."""
    draw = random.Random(seed)
    fsdp2 = draw.random() < 0.5
    engine: dict[str, Any] = {"engine": "fsdp2"} if fsdp2 else {"stage": draw.choice([0, 1])}
    likely = {"strict": 0.5, "evaluates": 0.4}
    has = function_of(draw) | {name: True for name, chance in likely.items() if draw.random() < chance}
    for other in {"evaluates"} - {name for name in likely if name in has}:
        has.pop(other, None)
    config = {**engine, "clipping": 0.0, "tied": draw.random() < 0.6, "dropout": draw.choice([0.0, 0.2]), "has": has}
    if fsdp2 and draw.random() < 0.4:
        config |= {"blocks": 6, "fsdp2": {"pipeline_schedule": "Interleaved1F1B"}}
    where = ["batch", "forward", "forward", "backward" if fsdp2 else "loss", "loss", "step"]
    parts = schedule_of(draw, where + ["evaluation"] * ("evaluates" in has))
    meshes = [{"pp": draw.choice([pp for pp in (1, 2, 3, 4) if len(part.who) % pp == 0])} for part in parts]
    parts = [part._replace(mesh=mesh) for part, mesh in zip(parts, meshes, strict=True)]
    assert_as_one_rank(crew, tmp_path, draw, config, parts)


@pytest.mark.parametrize("engine", [{"engine": "fsdp2"}, {"stage": 1}], ids=["fsdp2", "stage1"])
def test_layers_of_other_stages_train_again_after_an_evaluation_that_fails(
    crew: Crew, tmp_path: Path, engine: dict[str, Any]
) -> None:
    """Members 0 and 3 have the other's stage afterwards, and their layers are in training as before the step."""
    has = {"asks": "no", "strict": True, "evaluates": True}
    config = {**engine, "clipping": 0.0, "dropout": 0.3, "has": has}
    lost = Part((0, 1, 2, 3), lost=(1, 4, "evaluation"), mesh={"pp": 2})
    outcomes = assert_as_one_rank(crew, tmp_path, random.Random(0), config, [lost, Part((3, 0), mesh={"pp": 2})])
    assert [outcome.told["calls"] for outcome in outcomes] == [1, 1], "they have stayed in their loop"


def assert_as_one_rank(
    crew: Crew, tmp_path: Path, draw: random.Random, config: dict[str, Any], parts: list[Part]
) -> list[Any]:
    """Returns what the members of the last generation came to."""
    more: dict[str, Any] = {
        "batch": cells.BATCH, "max_world_size": 4, "engine": config.get("engine", "deepspeed"),
        "checkpoint_every_steps": 1, "anomalies": AnomalySettings(policy="stop"),
    }  # fmt: skip
    outcomes, _ = through(crew, tmp_path / "moved", draw, "scheduled.trains_in_stages", config, parts, more)
    crew.settle()
    quiet = {**config, "has": {"asks": "no"}, "kills": {}, "url": str(tmp_path / "still")}
    still = crew.run([0], "scheduled.trains_in_stages", quiet, **more)
    assert still[0].result.kind == "finished", still[0].result.traceback
    one, moved = cells.Run(tmp_path / "still", [still]), cells.Run(tmp_path / "moved", [outcomes])
    assert _distance(one.state(), moved.state()) <= 1e-5
    return outcomes


def assert_as_undisturbed(
    crew: Crew, tmp_path: Path, draw: random.Random, engine: dict[str, Any], has: dict[str, Any], parts: list[Part]
) -> list[Any]:
    """Returns what the members of the last generation came to."""
    config: dict[str, Any] = {**engine, "dropout": 0.1, "has": has}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "engine": _engine(engine), "checkpoint_every_steps": 1}
    outcomes, _ = through(crew, tmp_path / "moved", draw, FUNCTION, config, parts, more)
    crew.settle()
    still = _undisturbed(crew, tmp_path / "still", {**engine, "dropout": 0.1}, 2)
    assert _distance(still.state, Run(tmp_path / "moved", [outcomes]).state) <= 16 * FLOOR
    return outcomes


def through(
    crew: Crew,
    url: Path,
    draw: random.Random,
    function: str,
    config: dict[str, Any],
    parts: list[Part],
    more: dict[str, Any],
) -> tuple[list[Any], dict[str, Any]]:
    """What the members of the last generation came to, and with what configuration."""
    first = crew.generation + 1
    config = {
        **config, "in_loop": True, "ahead": True, "places": places_of(draw, parts, first),
        "kills": {first + number: part.lost for number, part in enumerate(parts)}, "url": str(url),
    }  # fmt: skip
    url.mkdir()
    store = CheckpointStore(config["url"], "run")
    # What is as all others are, but has failed, is tried again, as it would be in a run.
    for part in [*parts, *[parts[-1]._replace(end_at=None, lost=None)] * TRIES]:
        newest = store.list()
        outcomes = happens(crew, part, function, config, {**more, "checkpoint": newest[0].id if newest else None})
        results = [outcome.result for outcome in outcomes]
        assert {result.kind for result in results} <= GOES_ON, (config, parts, part, results)
        if outcomes and all(result.kind == "finished" for result in results):
            return outcomes, config
    raise AssertionError((config, parts, results))

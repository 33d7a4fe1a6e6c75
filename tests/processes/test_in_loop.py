"""The user's function stays in its loop while ranks are lost and come back; the oracle is the undisturbed run."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Outcome
from test_oracle import BATCH, FLOOR, LAST_STEP, Run, _distance, _engine, _undisturbed

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

AT = 4


ENGINES: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "FSDP2": {"engine": "fsdp2"},
    "FSDP2, layers": {"engine": "fsdp2", "fsdp2": {"shard": ["Linear"]}},
    "FSDP2, offload": {"engine": "fsdp2", "fsdp2": {"cpu_offload": True}},
}
# Each engine once, and each place; the other combinations are slow.
_CHOSEN = {
    ("ZeRO-0", "forward"), ("ZeRO-1", "step"), ("ZeRO-2", "backward"), ("ZeRO-3", "step"), ("FSDP2", "forward"),
}  # fmt: skip
CASES = [
    *(
        pytest.param(name, where, False, marks=[] if (name, where) in _CHOSEN else [pytest.mark.slow])
        for name in list(ENGINES)[:5]
        for where in ("forward", "backward", "step")
    ),
    ("ZeRO-1", "backward", True),
    ("ZeRO-3", "forward", True),
    pytest.param("FSDP2, layers", "forward", False, marks=pytest.mark.slow),
    ("FSDP2, layers", "backward", True),
    ("FSDP2, offload", "step", False),
    *(
        pytest.param(name, "evaluation", True, marks=pytest.mark.slow if name == "ZeRO-1" else [])
        for name in ("ZeRO-1", "ZeRO-3", "FSDP2, layers")
    ),
]


@pytest.mark.parametrize(("engine", "where", "strict"), CASES)
def test_survivors_of_a_killed_rank_stay_in_their_loop(
    crew: Crew, tmp_path: Path, engine: str, where: str, strict: bool
) -> None:
    """3 ranks, one is killed within a step; 2 continue; a newcomer makes them 3 again, which is a planned change."""
    plain: dict[str, Any] = {**ENGINES[engine], "dropout": 0.1}
    config = {**plain, "in_loop": True, "strict": strict, "url": str(tmp_path / "moved")}
    config["evaluates"] = where == "evaluation"
    if where == "backward":
        config["num_workers"] = 1
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1, "engine": _engine(plain)}
    crew.begin([0, 1, 2], "train_in_loop", {**config, "victim": 1, "at": AT, "where": where}, **more)
    for number in (0, 1, 2):
        crew.reached(number, "there")
    crew.reached(0, f"committed step {AT}")
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    for number in (0, 2):
        crew.abort(number, "rank 1 was lost")
    ended = [crew.outcome(number) for number in (0, 2)]
    crew.replace(1)
    assert {outcome.result.kind for outcome in ended} <= {"ended", "collective_failed"}
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    assert store.list()[0].step == AT

    shrunk = crew.run([2, 0], "train_in_loop", config, checkpoint=store.list()[0].id, end_at=AT + 2, **more)
    _assert_ended(shrunk, "ended", AT + 2)
    grown = crew.run([0, 1, 2], "train_in_loop", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)

    left = [point for member in crew.members for point in member.points if point.startswith("left")]
    assert left == [], "a function was left"
    for outcome in (grown[0], grown[2]):
        assert outcome.told["calls"] == 1
        assert outcome.told["abandoned"] == 1, "one step was abandoned, and the loop was told"
        assert outcome.told["world sizes"] == [3, 2, 3]
        assert outcome.told["readers"] == [{*outcome.told["readers"][0]}] * 3, "what they have cached stays"
        assert len(outcome.told["readers"][0]) == config.get("num_workers", 0)
    still = _undisturbed(crew, tmp_path / "still", plain, 3)
    moved = Run(tmp_path / "moved", [shrunk, grown])
    # What the killed rank has reported went with it.
    expected = {name: loss for name, loss in still.losses.items() if int(name.removeprefix("loss ")) > AT}
    assert _distance(expected, moved.losses) <= 8 * FLOOR
    assert samples(moved) == samples(still), "each once"
    assert _distance(still.state, moved.state) <= 8 * FLOOR


@pytest.mark.parametrize("engine", ["ZeRO-3", "FSDP2"])
def test_what_a_script_sends_in_an_abandoned_step_reaches_nobody(crew: Crew, tmp_path: Path, engine: str) -> None:
    """A peer may still be in the collective that has failed here: gloo ends its process where more bytes come than it
    waits for (seen with TRL's DPO and adapters at stage 3, which gathers what it logs after each pass)."""
    plain = {**ENGINES[engine], "dropout": 0.1}
    config = {**plain, "in_loop": True, "victim": 1, "survivors": (0, 2), "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1, "engine": _engine(plain)}
    crew.begin([0, 1, 2], "exchanging.trains", {**config, "at": 2}, **more)
    crew.reached(1, "there")
    crew.reached(0, "committed step 2")
    # Without an abort, which would end what they send as well: both are its neighbours, and notice.
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    assert {crew.outcome(number).result.kind for number in (0, 2)} == {"collective_failed"}
    crew.replace(1)
    store = CheckpointStore(str(tmp_path), "run")
    ended = crew.run([0, 1, 2], "exchanging.trains", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(ended, "finished", 4)
    assert [outcome.told.get("arrived") for outcome in ended] == [False, None, False]


def samples(run: Run) -> Counter[tuple[int, int]]:
    """How often each position of the data was trained on in which step, after step `AT`."""
    return Counter(
        (report.step, position)
        for outcome in run.outcomes
        for report in outcome.reports
        if report.step > AT
        for span in report.positions
        for position in range(*span)
    )


@pytest.mark.parametrize("engine", ["ZeRO-1", "ZeRO-3", "FSDP2, layers"])
def test_another_rank_is_lost_before_the_first_pass_with_fewer(crew: Crew, tmp_path: Path, engine: str) -> None:
    """The new engine has seen no pass yet whose shape it could give. Seen: the function was called again."""
    plain: dict[str, Any] = {**ENGINES[engine], "dropout": 0.1}
    config = {**plain, "in_loop": True, "url": str(tmp_path / "moved"), "again": True}
    config = {**config, "victim": 1, "at": AT, "where": "forward"}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1, "engine": _engine(plain)}
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    crew.begin([0, 1, 2], "train_in_loop", config, **more)
    left, first = [0, 1, 2], True
    while len(left) > 1:
        for number in left:
            crew.reached(number, "there" if first else "there again")
        if first:
            crew.reached(0, f"committed step {AT}")
        victim = left[1]
        left.remove(victim)
        crew.lose(victim, left)
        crew.replace(victim)
        if len(left) > 1:
            crew.begin(left, "train_in_loop", config, checkpoint=store.list()[0].id, **more)
        first = False
    (alone,) = crew.run(left, "train_in_loop", config, checkpoint=store.list()[0].id, **more)
    _assert_ended([alone], "finished", LAST_STEP)
    assert (alone.told["calls"], alone.told["world sizes"], alone.told["abandoned"]) == (1, [3, 2, 1], 2)
    still = _undisturbed(crew, tmp_path / "still", plain, 3)
    assert _distance(still.state, Run(tmp_path / "moved", [[alone]]).state) <= 8 * FLOOR


@pytest.mark.parametrize("engine", ["ZeRO-1", "ZeRO-3", "FSDP2, layers"])
def test_a_newcomer_that_is_lost_while_the_engine_is_rebuilt(crew: Crew, tmp_path: Path, engine: str) -> None:
    """The survivors are inside of the engine's construction then, on a model that is half changed."""
    plain: dict[str, Any] = {**ENGINES[engine], "dropout": 0.1}
    config = {**plain, "in_loop": True, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "engine": _engine(plain)}
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    begun = crew.run([0, 1], "train_in_loop", config, end_at=2, **more)
    _assert_ended(begun, "ended", 2)
    crew.begin([0, 1, 2], "setting_up.stays_before_it_initializes", config, checkpoint=store.list()[0].id, **more)
    crew.reached(2, "there")
    for number in (0, 1):
        crew.in_collective(number)
    crew.members[2].signal(signal.SIGKILL)
    crew.members[2].process.join()
    for number in (0, 1):
        crew.abort(number, "rank 2 was lost")
    for number in (0, 1):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(2)
    finished = crew.run([1, 0], "train_in_loop", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(finished, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in finished] == [1, 1]

    still = _undisturbed(crew, tmp_path / "still", plain, 2)
    moved = Run(tmp_path / "moved", [begun, finished])
    assert _distance(still.losses, moved.losses) <= 8 * FLOOR
    assert _distance(still.state, moved.state) <= 8 * FLOOR


def test_nothing_of_an_evaluation_is_invented(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BATCH, "checkpoint_every_steps": 1}
    crew.begin([0, 1], "misbehaving.evaluates_for_ever", config, **more)
    for number in (0, 1):
        crew.reached(number, "there")
    crew.reached(0, "committed step 1")
    for number in (0, 1):
        crew.abort(number, "another rank was lost")
    for number in (0, 1):
        assert crew.outcome(number).result.kind == "ended"
        assert "left: it was not asking for its next batch: an evaluation, say" in crew.members[number].points
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    again = crew.run([0, 1], "misbehaving.evaluates_for_ever", config, checkpoint=newest.id, **more)
    _assert_ended(again, "finished", LAST_STEP)


@pytest.mark.slow  # compiles DeepSpeed's Adam where no cache has it
def test_deepspeeds_adam_updates_alike_on_a_newcomer(crew: Crew, tmp_path: Path) -> None:
    """In C++ it keeps the betas to the power of the step, which it multiplies on from step to step; a process that
    begins at a later step takes the power. Seen with DeepSpeed's CIFAR-10 example, in stage 0: the ranks' weights
    differed in the last bits after a node had joined, which ended two generations and all worker processes."""
    config = {"in_loop": True, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BatchSettings(max_steps=30), "max_world_size": 3, "checkpoint_every_steps": 1}
    _assert_ended(crew.run([0, 1], "by_deepspeeds_adam", config, end_at=20, **more), "ended", 20)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    _assert_ended(crew.run([0, 1, 2], "by_deepspeeds_adam", config, checkpoint=newest.id, **more), "finished", 30)


def test_a_function_that_holds_the_native_engine_is_called_again(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 2, "in_loop": True, "url": str(tmp_path)}
    ended = crew.run([0, 1], "misbehaving.keeps_the_native_engine", config, batch=BATCH, end_at=2)
    _assert_ended(ended, "ended", 2)
    assert all(outcome.clean for outcome in ended)
    reason = "left: it has used engine.deepspeed, which belongs to one generation"
    assert all(reason in crew.members[number].points for number in (0, 1))
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    again = crew.run([0, 1], "misbehaving.keeps_the_native_engine", config, checkpoint=newest.id, batch=BATCH)
    _assert_ended(again, "finished", LAST_STEP)


@pytest.mark.parametrize(
    ("place", "by", "again"),
    [
        ("set-up", "elastic.epochs", 1),
        ("before", "elastic.epochs", 1),
        ("after", "range", 1),
        ("after", "elastic.epochs", 0),
        ("within", "range", 0),
        ("save", "range", 0),
    ],
)
def test_a_worker_that_joins_waits_for_nobody_in_collectives_of_its_own(
    crew: Crew, tmp_path: Path, place: str, by: str, again: int
) -> None:
    """It joins in the second epoch; the others are in their loop, unless the function must be called again on all."""
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path), "place": place, "by": by}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3}
    _assert_ended(crew.run([0, 1], "setting_up.joins_in", config, end_at=6, **more), "ended", 6)
    points = [list(crew.members[number].points) for number in (0, 1)]
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    grown = crew.run([0, 1, 2], "setting_up.joins_in", config, checkpoint=newest.id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    # In its set-up others could be given what they gave, but for their number.
    reason = "all_reduce in its set-up was among 2 ranks" if place == "set-up" else "takes part in collectives"
    for rank in (0, 1):
        left = [point for point in points[rank] + crew.members[rank].points if point.startswith("left")]
        assert len(left) == again
        assert all(reason in why for why in left)


# What the platform does between two batches of a script.
WATCHED = {"noise_every_steps": 2, "audit_every_steps": 2, "checkpoint_every_steps": 2, "anomalies": AnomalySettings()}


@pytest.mark.parametrize(
    ("engine", "watched"), [("ZeRO-1", {}), ("ZeRO-3", {}), ("FSDP2", {}), ("ZeRO-0", WATCHED), ("FSDP2", WATCHED)]
)
def test_who_has_joined_stays_when_another_one_joins(
    crew: Crew, tmp_path: Path, engine: str, watched: dict[str, Any]
) -> None:
    """Seen: the verification of what it began with was taken for collectives of the script's own in its first step,
    and a loop that makes them in some steps and not in others begins with all others."""
    config = {**ENGINES[engine], "in_loop": True, "place": "nowhere", "by": "elastic.epochs", "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "engine": _engine(config), **watched}
    checkpoint = None
    for who, end_at in (([0, 1], 2), ([0, 1, 2], 5), ([0, 1, 2, 3], None)):
        ended = crew.run(who, "setting_up.joins_in", config, end_at=end_at, checkpoint=checkpoint, **more)
        _assert_ended(ended, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
    assert [[p for p in crew.members[number].points if p.startswith("left")] for number in range(3)] == [[], [], []]


@pytest.mark.parametrize(("place", "by"), [("after", "range"), ("before", "elastic.epochs")])
def test_collectives_between_epochs_leave_survivors_in_their_loop(
    crew: Crew, tmp_path: Path, place: str, by: str
) -> None:
    """In the second epoch two of three go on, and later a new worker joins: it alone needs the functions of all."""
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path), "place": place, "by": by}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3}
    checkpoint, left = None, []
    for who, end_at in (([0, 1, 2], 6), ([2, 0], 7), ([2, 0, 1], None)):
        if end_at is None:
            crew.replace(1)
        ended = crew.run(who, "setting_up.joins_in", config, end_at=end_at, checkpoint=checkpoint, **more)
        _assert_ended(ended, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
        left.append([[p for p in crew.members[number].points if p.startswith("left")] for number in (0, 2)])
    assert left[:2] == [[[], []], [[], []]]
    instead = {"range": "`for epoch in elastic.epochs(n)`", "elastic.epochs": "after an epoch's steps, and not before"}
    for (why,) in left[2]:
        assert "between two iterations takes part in collectives" in why
        assert instead[by] in why


@pytest.mark.parametrize("engine", ["ZeRO-1", "ZeRO-3", "FSDP2"])
def test_what_the_set_up_holds_is_not_walked_in_a_pause(crew: Crew, tmp_path: Path, engine: str) -> None:
    """A million objects of the user's, or of the compiler's, take Python 0.1 s."""
    config = {**ENGINES[engine], "in_loop": True, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "engine": _engine(config)}
    _assert_ended(crew.run([0, 1], "train_and_tell_walks", config, end_at=3, **more), "ended", 3)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    grown = crew.run([0, 1, 2], "train_and_tell_walks", config, checkpoint=newest.id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    assert [outcome.told["walks"] for outcome in grown] == [[], [], []]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["ZeRO-3", "FSDP2, layers"])
def test_hundreds_of_generations_leak_nothing(crew: Crew, tmp_path: Path, engine: str) -> None:
    """Engines that leave most behind on the model."""
    config = {**ENGINES[engine], "dropout": 0.1, "in_loop": True, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BatchSettings(max_steps=1000), "engine": _engine(config)}
    store, checkpoint, seen = CheckpointStore(str(tmp_path), "run"), None, []
    for step in range(1, 201):
        outcomes = crew.run([0, 1], "train_in_loop", config, end_at=step, checkpoint=checkpoint, **more)
        _assert_ended(outcomes, "ended", step)
        newest = store.list()[0]
        checkpoint = newest.id
        seen.append([(outcome.threads, outcome.descriptors, outcome.resident_bytes) for outcome in outcomes])
    for rank in (0, 1):
        threads, descriptors, resident = zip(*(generation[rank] for generation in seen), strict=True)
        assert len(set(threads[10:])) == 1
        assert max(descriptors[10:]) <= descriptors[10]
        # Two MB in 150 generations: caches that fill slowly, and cycles until they are collected. An engine of this
        # model and its optimizer are smaller than what DeepSpeed keeps with one of them, 0.3 MB. Of FSDP2 no object
        # stays; torch keeps memory of each `fully_shard`, 10 kB of two layers and two ranks in a script without this
        # project.
        assert resident[-1] - resident[49] < (2 if engine == "ZeRO-3" else 6) << 20


def _assert_ended(outcomes: list[Outcome], kind: str, step: int) -> None:
    for outcome in outcomes:
        assert (outcome.result.kind, outcome.result.step) == (kind, step), outcome.result.traceback


@pytest.mark.parametrize(("by", "steps"), [("next", 6), ("next", 8), ("for", 6)], ids=["next", "at-an-epoch", "for"])
def test_functions_that_count_steps_by_themselves_end_together(crew: Crew, tmp_path: Path, by: str, steps: int) -> None:
    """The counter of a worker that joins begins later. Seen: its next collective met the last save of the others."""
    config = {"url": str(tmp_path), "by": by, "steps": steps, "in_loop": True}
    more: dict[str, Any] = {"batch": BatchSettings(), "max_world_size": 3}
    crew.run([0, 1], "counting.ends_by_itself", config, end_at=3, **more)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    for outcome in crew.run([0, 1, 2], "counting.ends_by_itself", config, checkpoint=newest.id, **more):
        ended = (outcome.result.kind, outcome.result.step, outcome.result.completed)
        assert ended == ("finished", steps, True), outcome.result.traceback
        assert [report.step for report in outcome.reports] == list(range(4, steps + 1))
    assert CheckpointStore(str(tmp_path), "run").list()[0].step == steps


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 4, 6, 8]), (5, [4, 5, 8])])
def test_a_save_by_a_counter_is_that_of_rank_0(crew: Crew, tmp_path: Path, every: int, steps: list[int]) -> None:
    """A worker that joins counts from its own beginning. Seen: the others' save met its reduction, and gloo ended a
    process, again in each generation."""
    config = {"url": str(tmp_path), "every": every, "in_loop": True}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3}
    store = CheckpointStore(str(tmp_path), "run")
    crew.run([0, 1], "counting.saves_by_a_counter", config, end_at=4, **more)
    grown = crew.run([0, 1, 2], "counting.saves_by_a_counter", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    assert sorted(each.step for each in store.list()) == steps

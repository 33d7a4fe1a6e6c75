"""Which mesh a generation trains on, where the job allows several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import Copies, Held, copies_of, place_replicas, recoverable
from elastic.core.mesh import Mesh, MeshSettings
from elastic.core.policy.measured import Measured, TriedMesh
from elastic.core.run import machine
from elastic.core.run.phase import Finished, Training
from elastic.core.settings import RunSettings
from elastic.core.sharding.mesh_memory import HeldState, HeldTensors, KnownMemory, MeshMemory, predict
from elastic.core.sharding.mesh_policy import MeshCandidate, MeshFacts, choose, relative_step, said, shares_of, table
from elastic.core.sharding.placement import members_in_order
from elastic.core.typed_json import decode, encode

EXPERTS = MeshSettings(ep=4, choices={"ep": (1, 2, 4)})
LAYERS = MeshSettings(tp=4, choices={"tp": (1, 2, 4)})
ANY = MeshSettings(tp=4, choices={"tp": (1, 2, 3, 4)}, any_tp=True)
STAGES = MeshSettings(pp=8, choices={"pp": (4, 5, 6, 7, 8)})


def chosen(facts: MeshFacts) -> tuple[int, Mapping[str, int]]:
    found = choose(facts).chosen
    return found.world_size, found.axes


def refusals(facts: MeshFacts) -> dict[str, str]:
    return {said(one.axes): one.refusal for one in choose(facts).candidates if one.refusal}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [(1, (1, {"ep": 1})), (2, (2, {"ep": 2})), (3, (3, {"ep": 1})), (4, (4, {"ep": 4})), (6, (6, {"ep": 2})),
     (7, (7, {"ep": 1})), (8, (8, {"ep": 4}))],
)  # fmt: skip
def test_as_many_as_can_train_and_then_the_most_memory_for_each(
    workers: int, expected: tuple[int, dict[str, int]]
) -> None:
    assert chosen(MeshFacts(EXPERTS, workers)) == expected


@pytest.mark.parametrize(("workers", "expected"), [(16, (16, 4)), (15, (15, 5)), (14, (14, 7)), (11, (10, 5))])
def test_a_pipeline_gets_the_stages_with_which_most_workers_compute(workers: int, expected: tuple[int, int]) -> None:
    """Of 16, in four pipelines of four; keeping four stages would leave up to three idle."""
    facts = MeshFacts(STAGES, workers, passes=128, present={"pp": 4})
    assert chosen(facts) == (expected[0], {"pp": expected[1]})


def test_a_mesh_without_enough_workers_is_refused_by_its_reason() -> None:
    facts = MeshFacts(EXPERTS, 3, least=3)
    assert chosen(facts) == (3, {"ep": 1})
    assert refusals(facts) == {"ep 2": "3 workers, and it needs 4", "ep 4": "3 workers, and it needs 4"}


def test_the_present_mesh_stays_where_nothing_speaks_against_it() -> None:
    assert chosen(MeshFacts(EXPERTS, 4, present={"ep": 2})) == (4, {"ep": 2})
    assert choose(MeshFacts(EXPERTS, 4, present={"ep": 2})).reason == "as fast as any, and no change"


def test_what_was_measured_goes_before_what_is_predicted() -> None:
    tried = [TriedMesh(4, {"ep": 4}, 1.0), TriedMesh(4, {"ep": 2}, 0.6), TriedMesh(4, {"ep": 1}, 0.97)]
    assert chosen(MeshFacts(EXPERTS, 4, tried=tried, present={"ep": 4})) == (4, {"ep": 2})
    # At another size: by what a worker did at the same axes.
    assert chosen(MeshFacts(EXPERTS, 8, tried=tried, present={"ep": 4})) == (8, {"ep": 2})
    near = [replace(one, step_s=(one.step_s or 0) / 100 + 1) for one in tried]
    assert chosen(MeshFacts(EXPERTS, 4, tried=near, present={"ep": 4})) == (4, {"ep": 4}), "no faster than measurable"


def test_a_mesh_whose_memory_did_not_suffice_is_not_taken_again_with_as_few_workers() -> None:
    tried = [TriedMesh(3, {"ep": 1})]
    assert chosen(MeshFacts(EXPERTS, 3, tried=tried)) == (2, {"ep": 2})
    assert refusals(MeshFacts(EXPERTS, 3, tried=tried))["ep 1"] == "memory did not suffice: 3 workers, ep 1"
    assert chosen(MeshFacts(EXPERTS, 5, tried=tried)) == (5, {"ep": 1}), "more workers share more"
    assert refusals(MeshFacts(EXPERTS, 4, tried=[TriedMesh(4, {"ep": 2})])).keys() == {"ep 1", "ep 2"}
    nothing = [*tried, TriedMesh(2, {"ep": 2})]
    assert chosen(MeshFacts(EXPERTS, 3, tried=nothing)) == (2, {"ep": 2}), "the budgets of failures end such a run"


def test_a_changed_number_of_workers_per_layer_is_the_last_resort() -> None:
    facts = MeshFacts(LAYERS, 3, present={"tp": 2})
    assert chosen(facts) == (2, {"tp": 2})
    assert refusals(facts)["tp 1"] == "tp 2 can be kept"
    assert chosen(MeshFacts(LAYERS, 1, present={"tp": 2})) == (1, {"tp": 1})
    assert chosen(MeshFacts(LAYERS, 3, least=3, present={"tp": 2})) == (3, {"tp": 1})
    # What is left otherwise: the fastest step, and of equal ones the most memory.
    assert chosen(MeshFacts(LAYERS, 3, present={"tp": 4})) == (3, {"tp": 1})
    assert chosen(MeshFacts(LAYERS, 2, present={"tp": 4})) == (2, {"tp": 2})
    full = [TriedMesh(2, {"tp": 2})]
    assert chosen(MeshFacts(LAYERS, 4, present={"tp": 2}, tried=[TriedMesh(4, {"tp": 2})])) == (4, {"tp": 4})
    assert chosen(MeshFacts(LAYERS, 6, present={"tp": 2}, tried=full)) == (6, {"tp": 2}), "more workers share more"


def test_stages_change_beside_workers_that_share_each_layer() -> None:
    both = MeshSettings(tp=2, pp=3, choices={"tp": (1, 2), "pp": (1, 2, 3)})
    facts = MeshFacts(both, 6, passes=12, present={"tp": 2, "pp": 2})
    assert chosen(facts) == (6, {"tp": 2, "pp": 1})
    assert {axes for axes, why in refusals(facts).items() if why == "tp 2 can be kept"} == {
        "tp 1, pp 1",
        "tp 1, pp 2",
        "tp 1, pp 3",
    }
    assert chosen(MeshFacts(both, 1, passes=12, present={"tp": 2, "pp": 2})) == (1, {"tp": 1, "pp": 1})


def test_stages_change_beside_workers_that_share_experts() -> None:
    both = MeshSettings(ep=2, pp=2, choices={"ep": (1, 2), "pp": (1, 2)})
    assert chosen(MeshFacts(both, 4, passes=8)) == (4, {"ep": 2, "pp": 1}), "the fastest with the most memory"
    assert chosen(MeshFacts(both, 3, passes=8)) == (3, {"ep": 1, "pp": 1})
    full = [TriedMesh(4, {"ep": 2, "pp": 1})]
    assert chosen(MeshFacts(both, 4, passes=8, tried=full)) == (4, {"ep": 2, "pp": 2})
    assert refusals(MeshFacts(both, 4, tried=full)).keys() == {"ep 1, pp 1", "ep 2, pp 1"}
    assert chosen(MeshFacts(both, 3, passes=8, tried=full)) == (2, {"ep": 1, "pp": 2})


@pytest.mark.parametrize(
    ("size", "passes", "shape", "step"),
    [(4, 8, MeshSettings(), 2.0), (3, 8, MeshSettings(), 3.0), (4, 8, MeshSettings(tp=2), 2.0),
     (3, None, MeshSettings(), 1 / 3), (4, 8, MeshSettings(ep=2), 2.0), (8, 4, MeshSettings(), 1.0),
     (4, 8, MeshSettings(pp=2), 2.5), (4, 8, MeshSettings(pp=2, stages_per_rank=2), 2.25)],
)  # fmt: skip
def test_a_step_takes_the_passes_of_the_group_with_most(
    size: int, passes: int | None, shape: MeshSettings, step: float
) -> None:
    assert relative_step(shape, size, passes) == pytest.approx(step)


@pytest.mark.parametrize(
    "shape",
    [
        MeshSettings(),
        MeshSettings(ep=2),
        MeshSettings(ep=4),
        MeshSettings(tp=2),
        MeshSettings(pp=4),
        MeshSettings(pp=2, tp=2),
        MeshSettings(sp=2, tp=2),
        MeshSettings(sp=2, pp=2),
        MeshSettings(sp=2, tp=2, pp=2),
        MeshSettings(ep=2, tp=2),
        MeshSettings(ep=2, sp=2),
        MeshSettings(ep=2, sp=2, tp=2),
        MeshSettings(ep=2, pp=2),
        MeshSettings(ep=2, sp=2, pp=2),
        MeshSettings(ep=2, tp=2, pp=2),
    ],
)
def test_parts_cover_the_state_once(shape: MeshSettings) -> None:
    parts = [part(shape.mesh(8), rank) for rank in range(8)]
    assert sum((right - left) * (top - low) for left, right, low, top in parts) == pytest.approx(1.0)
    for x, y in product([one / 16 + 1 / 32 for one in range(16)], repeat=2):
        assert sum(left <= x < right and low <= y < top for left, right, low, top in parts) == 1


def part(mesh: Mesh, rank: int) -> tuple[float, float, float, float]:
    (found,) = shares_of(mesh, rank, rank + 1)
    return found


def lost(shape: MeshSettings, size: int, gone: int) -> Copies:
    """One node per rank, replicas on the next ones; node `gone` is lost."""
    names = [f"n{rank}" for rank in range(size)]
    held: dict[str, list[Held]] = {name: [Held(1, 5, rank, size, False)] for rank, name in enumerate(names)}
    for rank, (target,) in enumerate(place_replicas(names, 1, {})):
        held[target].append(Held(1, 5, rank, size, True))
    held.pop(f"n{gone}")
    return copies_of(recoverable(held)[0])


def test_of_meshes_that_are_as_fast_the_one_that_moves_least_is_taken() -> None:
    before = EXPERTS.shape({"ep": 4})
    copies = lost(before, 8, 7)

    def nodes_of(size: int, mesh: MeshSettings) -> list[str]:
        slots = [(f"n{rank}", [rank]) for rank in range(7)]
        return [f"n{worker}" for worker in members_in_order(slots, size, copies, mesh.cell)]

    wide = MeshSettings(ep=4, choices={"ep": (2, 4)})
    verdict = choose(MeshFacts(wide, 4, present={"ep": 4}, before=before.mesh(8), copies=copies, nodes_of=nodes_of))
    by_ep = {one.axes["ep"]: one.moved for one in verdict.candidates}
    assert all(moved is not None and 0.0 < moved < 1.0 for moved in by_ep.values())
    assert verdict.chosen.axes["ep"] == min(by_ep, key=lambda ep: by_ep[ep] or 0.0)
    assert verdict.reason == "as fast as any, and the fewest bytes move"


@pytest.mark.parametrize("axis", ["ep", "tp"])
def test_bytes_are_counted_as_elements_are(axis: str) -> None:
    """Against a count of the cells of a grid that lie on the reader's node."""
    rng = Random(7)
    for size_before, size_after in product((1, 2, 4), repeat=2):
        shape = MeshSettings().shape({axis: size_before})
        before, after = shape.mesh(8), MeshSettings().shape({axis: size_after}).mesh(4)
        copies = lost(shape, 8, rng.randrange(8))
        order = rng.sample([node for node, _, _ in copies.nodes], 4)
        only = replace(MeshSettings().shape({axis: size_after}), choices={axis: (size_after,)})
        verdict = choose(
            MeshFacts(only, 4, before=before, copies=copies, nodes_of=lambda size, mesh, order=order: order)
        )
        held = {
            node: {rank for begin, end in (*first, *others) for rank in range(begin, end)}
            for node, first, others in copies.nodes
        }
        there = 0
        for column, row in product(range(16), repeat=2):
            x, y = column / 16 + 1 / 32, row / 16 + 1 / 32

            def owner(mesh: Any, x: float = x, y: float = y) -> int:
                return next(
                    rank for rank in range(mesh.dp * mesh.per_cell)
                    if part(mesh, rank)[0] <= x < part(mesh, rank)[1] and part(mesh, rank)[2] <= y < part(mesh, rank)[3]
                )  # fmt: skip

            there += owner(before) in held[order[owner(after)]]
        assert verdict.chosen.moved == pytest.approx(1 - there / 256, abs=1e-3), (size_before, size_after)


def test_through_any_sizes_the_mesh_is_admissible_and_comes_to_rest() -> None:
    """Of steps that are measured with 2 % of noise: less than what a change needs."""
    rng = Random(11)
    for settings, _ in product((EXPERTS, LAYERS, STAGES), range(50)):
        speed = {said(axes): rng.uniform(0.5, 2.0) for axes in settings.axes}
        tried: dict[tuple[int, str], TriedMesh] = {}
        present: Mapping[str, int] | None = None
        for _ in range(6):
            size, taken = rng.randint(max(settings.cells), 40), []
            for _ in range(30):
                facts = MeshFacts(settings, size, passes=128, tried=[*tried.values()], present=present)
                found = choose(facts).chosen
                shape = settings.shape(found.axes)
                assert found.axes in settings.axes
                assert 0 < found.world_size <= size
                assert found.world_size % shape.cell == 0
                if settings is LAYERS and present is not None and size >= present["tp"]:
                    assert found.axes == present, "dropout is drawn anew without need"
                step_s = speed[said(found.axes)] * relative_step(shape, found.world_size, 128) * rng.uniform(0.99, 1.01)
                tried[found.world_size, said(found.axes)] = TriedMesh(found.world_size, found.axes, step_s)
                present = found.axes
                taken.append(said(present))
            # A mesh that was expected to be faster is tried once, and may be left again.
            changes = sum(one != other for one, other in pairwise(taken))
            assert changes <= 2 * (len(settings.axes) - 1), taken


MODEL = HeldState("rows", (HeldTensors(120, 10, 1, data_bytes=1, experts=1, group=0),))


def measured(limit: int, rest: int = 150, ep: int = 4, size: int = 4) -> KnownMemory:
    return KnownMemory().measured(MeshMemory(size, {"ep": ep}, rest), limit, MODEL)


def test_a_mesh_that_is_predicted_not_to_fit_is_refused_with_figures_before_it_is_tried() -> None:
    facts = MeshFacts(EXPERTS, 3, present={"ep": 4}, memory=measured(10**6))
    assert chosen(facts) == (3, {"ep": 1})
    need = next(one.need for one in choose(facts).candidates if one.axes == {"ep": 1})
    assert need is not None
    assert (need.state_bytes, need.rest_bytes) == (400, 600)
    tight = replace(facts, memory=measured(999))
    assert chosen(replace(facts, memory=measured(1000))) == (3, {"ep": 1})
    assert refusals(tight)["ep 1"] == f"memory would not suffice: {replace(need, limit_bytes=999)}"
    # Two workers that share experts have 600 elements each, and 300 besides.
    assert chosen(tight) == (2, {"ep": 2})
    assert choose(tight).reason == "nothing else fits into memory"
    assert chosen(replace(tight, workers=5)) == (5, {"ep": 1}), "more workers share more"


def test_where_nothing_is_predicted_to_fit_the_least_is_tried_and_that_is_the_reason() -> None:
    found = choose(MeshFacts(EXPERTS, 3, present={"ep": 4}, memory=measured(500)))
    assert (found.chosen.world_size, found.chosen.axes) == (2, {"ep": 2})
    assert found.reason.startswith("no mesh is predicted to fit into memory; this one needs least, ")
    assert [row["chosen"] for row in table(found)["meshes"]] == [False, True, False]
    # What has failed stays refused, and the next one is tried; ep 1 would leave less memory than ep 2.
    failed = [TriedMesh(3, {"ep": 1})]
    again = choose(MeshFacts(EXPERTS, 3, tried=failed, present={"ep": 1}, memory=measured(500, rest=10)))
    assert (again.chosen.world_size, again.chosen.axes) == (2, {"ep": 2})


def test_a_mesh_that_has_trained_needs_no_prediction() -> None:
    facts = MeshFacts(EXPERTS, 4, present={"ep": 4}, memory=measured(1))
    assert chosen(facts) == (4, {"ep": 4})
    assert choose(facts).reason == "nothing else fits into memory"
    assert chosen(replace(facts, workers=8)) == (8, {"ep": 4})


def test_another_tp_is_taken_where_the_present_one_would_not_fit() -> None:
    cut = HeldState("rows", (HeldTensors(120, 10, 1, data_bytes=1, cut=0, group=0),), slices=2)
    known = KnownMemory().measured(MeshMemory(4, {"tp": 2}, 0), 500, cut)
    assert chosen(MeshFacts(LAYERS, 3, present={"tp": 2}, memory=known)) == (3, {"tp": 1}), "400 elements each, not 600"
    assert chosen(MeshFacts(LAYERS, 3, present={"tp": 2}, memory=replace(known, limit_bytes=600))) == (2, {"tp": 2})


def test_through_any_limits_no_mesh_above_one_is_taken_while_one_below_is_known() -> None:
    rng = Random(12)
    for _ in range(500):
        known, size = measured(rng.randint(100, 2000), rng.randint(0, 400), rng.choice((1, 2, 4))), rng.randint(1, 12)
        verdict = choose(MeshFacts(EXPERTS, size, memory=known))
        needs = {
            said(one.axes): predict(known, EXPERTS, one.axes, one.world_size)
            for one in verdict.candidates
            if one.world_size and not known.fitted(one.world_size, one.axes)
        }
        taken = needs.get(said(verdict.chosen.axes))
        if taken is not None and not taken.suffices:
            formed = [one for one in verdict.candidates if one.world_size]
            assert len(needs) == len(formed), "a mesh that has trained is passed over"
            assert all(need is None or need.peak_bytes >= taken.peak_bytes for need in needs.values())


def test_the_journal_has_every_mesh_and_why_it_was_not_taken() -> None:
    rows = table(choose(MeshFacts(EXPERTS, 6, least=6)))["meshes"]
    assert [(row["axes"], row["world_size"], row["chosen"]) for row in rows] == [
        ({"ep": 1}, 6, False), ({"ep": 2}, 6, True), ({"ep": 4}, 4, False),
    ]  # fmt: skip
    assert rows[2]["refusal"] == "6 workers, and it needs 8"


# --- a whole run ---


def run(low: int = 1, high: int = 4, mesh: MeshSettings = EXPERTS) -> Scenario:
    made = Scenario(low, high)
    made.state = machine.initial(replace(made.state.settings, mesh=mesh), made.now)
    return made


def began(story: Scenario) -> list[tuple[int, dict[str, int]]]:
    return [(len(one.members), dict(one.axes)) for one in story.acts(act.BeginGeneration)]


def test_a_run_changes_its_mesh_with_a_loss() -> None:
    story = run().started(4)
    assert story.state.axes == {"ep": 4}
    story.lose_node(3).left(7)
    assert began(story) == [(3, {"ep": 1})]
    assert "trains on 3 workers with ep 1" in story.said()


def test_what_a_loss_would_leave_is_known_before_it() -> None:
    """Each node has one worker."""
    story = run().started(4)
    first = "1 lost node would leave 3 workers with ep 1 (the fastest step by prediction)"
    second = "2 lost nodes would leave 2 workers with ep 2 (as fast as any, and the most memory left)"
    assert f"{first}; {second}" in story.said()
    story.lose_node(3).left(7)
    assert began(story) == [(3, {"ep": 1})], "what was said"
    story = run(3, 4).started(4)
    first = "1 lost node would leave 3 workers with ep 1 (nothing else can be formed)"
    assert f"{first}; 2 lost nodes would leave 2 workers of the 3 that the run needs" in story.said()
    alone = run(1, 1).started(1)
    assert "would leave" not in alone.said()


def test_a_run_shares_its_layers_by_as_many_as_before_while_it_can() -> None:
    story = run(2, 4, LAYERS).started(4)
    assert story.state.axes == {"tp": 4}
    story.lose_node(3).left(7)
    assert began(story) == [(3, {"tp": 1})]
    said = "trains on 3 workers with tp 1: the fastest step by prediction; dropout inside layers that are cut is drawn"
    assert said in story.said()
    story.train().nodes(1).do(*(ev.StopPromised(story.state.generation, w, 9) for w in story.state.members))
    story.commit(9).left(9)
    assert began(story) == [(4, {"tp": 1})]
    assert "generation 3 trains on 4 workers with tp 1: tp 1 can be kept\n" in story.said() + "\n"


def test_a_training_function_without_memory_is_begun_on_another_mesh() -> None:
    story = run().started(4).lose_node(3).left(7).join()
    story.do(ev.UserCodeFailed(story.state.generation, 0, 7, "OutOfMemoryError: CUDA out of memory.", "", False))
    story.left(7).wait(10.0)
    assert began(story) == [(2, {"ep": 2})]


def test_any_number_of_workers_shares_layers_beginning_with_the_fewest() -> None:
    assert chosen(MeshFacts(ANY, 4, passes=8)) == (4, {"tp": 1})
    assert choose(MeshFacts(ANY, 4, passes=8)).reason == "as fast as any, and the fewest share layers"
    uneven = MeshFacts(ANY, 3, passes=4)
    assert chosen(uneven) == (3, {"tp": 3})
    assert refusals(replace(uneven, refused_tp=(3,)))["tp 3"] == "the model cannot be cut by 3"
    assert chosen(replace(uneven, refused_tp=(3,))) == (3, {"tp": 1})
    listed = replace(ANY, any_tp=False)
    assert chosen(replace(uneven, settings=listed, refused_tp=(3,))) == (3, {"tp": 3}), "an earlier attempt's"
    nothing = replace(uneven, tried=[TriedMesh(3, {"tp": 1})], refused_tp=(2, 3))
    assert choose(nothing).reason == "no other is left to try"
    assert chosen(nothing) == (3, {"tp": 1}), "not what the model refuses"
    full = [TriedMesh(4, {"tp": 1})]
    assert chosen(MeshFacts(ANY, 4, passes=8, tried=full, present={"tp": 1}, refused_tp=(3, 4))) == (4, {"tp": 2})


def test_a_number_that_the_model_refuses_is_left_out_and_costs_no_retry() -> None:
    story = run(1, 4, ANY).started(4)
    assert story.state.axes == {"tp": 1}
    story.do(ev.UserCodeFailed(story.state.generation, 0, 7, "CUDA out of memory", "", False)).left(7).wait(10.0).join()
    for expected in (2, 4):
        assert story.state.axes == {"tp": expected}
        number = story.state.generation
        story.do(*(ev.MeshRefused(number, worker, 7, "4 workers cannot share it") for worker in story.state.members))
        story.left(7).wait(10.0).join()
    assert story.state.axes == {"tp": 3}
    assert story.state.meter.measured.refused_tp == (2, 4)
    assert story.state.trouble.streaks.crashes == 1, "that without memory"
    story.do(ev.MeshRefused(story.state.generation, 0, 7, "3 workers cannot share it")).left(7)
    assert isinstance(story.phase, Finished)
    assert "3 workers cannot share it" in story.said()


def test_nobody_is_let_in_whom_no_mesh_could_use() -> None:
    story = run(2, 4)
    wide = MeshSettings(ep=4, choices={"ep": (2, 4)})
    story.state = machine.initial(replace(story.state.settings, mesh=wide), story.now)
    story.started(2).nodes(1)
    assert story.acts(act.ProposeStop) == []
    story.nodes(1)
    assert story.acts(act.ProposeStop) != []


def test_a_worker_that_would_make_steps_slower_stands_by_and_that_is_said_once() -> None:
    story = run(2, 4)
    unlike = MeshSettings(ep=4, choices={"ep": (3, 4)})
    story.state = machine.initial(replace(story.state.settings, mesh=unlike), story.now)
    story.started(4).do(ev.StepTimeMeasured(story.state.generation, 1.5))
    story.lose_node(3).left(7).train().do(ev.StepTimeMeasured(story.state.generation, 1.0))
    (told,) = [note for note in story.nodes(1).acts(act.Note) if note.kind == "mesh"]
    assert told.sentence == "no growth 3 -> 4: 3 workers with ep 3: the fastest step by what was measured"
    assert [row["chosen"] for row in told.data["meshes"]] == [True, False]
    story.do(ev.Tick(), ev.StepTimeMeasured(story.state.generation, 0.9), ev.Tick())
    assert [note for note in story.acts(act.Note) if note.kind == "mesh"] == []
    assert story.state.world_size == 3
    assert isinstance(story.phase, Training)


def test_a_replay_and_a_restarted_controller_know_the_mesh() -> None:
    story = run().started(4).lose_node(3).left(7)
    state = machine.initial(RunSettings.from_json(story.state.settings.to_json()), 1000.0)
    for event, now in story.journal:
        state, _ = machine.step(state, event, now)
    assert state == story.state
    again = next(one for one in machine.reissue(state) if isinstance(one, act.BeginGeneration))
    assert again == story.acts(act.BeginGeneration)[-1]


def test_what_a_generation_has_measured_decides_the_next_one_also_after_a_restart_and_a_resume() -> None:
    story = run().started(4)
    story.do(ev.MemoryMeasured(story.state.generation, 999, 150, json.loads(json.dumps(encode(MODEL)))))
    (told,) = [one.sentence for one in story.acts(act.Note) if one.kind == "outlook"][-1:]
    assert told.startswith("1 lost node would leave 2 workers with ep 2 (nothing else fits into memory); 2 lost nodes ")
    story.lose_node(3).left(7)
    note = [one for one in story.acts(act.Note) if one.kind == "mesh"][-1]
    assert note.data["meshes"][0]["refusal"].startswith("memory would not suffice: ")
    assert (note.data["meshes"][0]["peak_bytes"], note.data["meshes"][0]["limit_bytes"]) == (1000, 999)
    state = machine.initial(RunSettings.from_json(story.state.settings.to_json()), 1000.0)
    for event, now in story.journal:
        state, _ = machine.step(state, ev.from_json(json.loads(json.dumps(ev.to_json(event)))), now)
    assert state == story.state
    assert decode(Measured, json.loads(json.dumps(encode(state.meter.measured)))) == state.meter.measured
    # Another release's facts are left out, and the run measures anew.
    old = {key: value for key, value in encode(state.meter.measured).items() if key != "memory"}
    again, _ = machine.step(machine.initial(story.state.settings, 0.0), ev.RunStarted(measured=old), 0.0)
    assert again.meter.measured == Measured()
    strange, _ = machine.step(state, ev.MemoryMeasured(state.generation, 1, 1, {"cut_by": "rows"}), 1000.0)
    assert strange.meter == state.meter


def test_a_candidate_says_what_it_is() -> None:
    assert str(MeshCandidate({"ep": 2}, 4)) == "4 workers with ep 2"

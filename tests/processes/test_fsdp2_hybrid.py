"""Copies of shards (`fsdp2: {shard_workers: N}`, torch's HSDP): what travels, copies that drift apart, what is refused.

That runs through other numbers of copies equal the undisturbed one is in test_oracle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cells
import pytest
import test_experts_and_stages as stages
import test_fsdp2_experts as experts
from cells import Run
from crew import Crew
from memory_samples import server
from test_fsdp2_pipeline import FSDP2, LOOPED, assert_survivors_go_on, later, through_stages
from test_oracle import BATCH, _distance
from test_sequences_and_stages import assert_equal
from test_tensor_parallel import ALLOWED, SKEWED, STOP

from elastic.checkpoint.memory.source import Holder
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.snapshots import snapshot_id
from elastic.core.generation_spec import MemoryPlan

pytestmark = pytest.mark.processes

TWO: dict[str, Any] = {"engine": "fsdp2", "fsdp2": {"shard_workers": 2}}
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "engine": "fsdp2"}


def test_weights_travel_within_a_group_and_sums_of_gradients_between_groups(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(range(4), "train", {**TWO, "url": str(tmp_path)}, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    rows = {(use.op, use.axis): use for use in outcomes[0].reports[-1].collectives}
    assert {key for key, use in rows.items() if use.bytes > 8} == {
        ("all_gather_into_tensor", "dp_shard"), ("reduce_scatter_tensor", "dp_shard"), ("all_reduce", "dp_replicate"),
    }  # fmt: skip
    assert rows["all_reduce", "dp_replicate"].bytes * 2 == rows["reduce_scatter_tensor", "dp_shard"].bytes
    told = [report.travel for report in outcomes[0].reports if report.travel]
    assert told == ["shards over 2 workers, sums over 2 copies of each"]


def test_a_world_of_other_than_whole_groups_is_one_group_and_says_so(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(range(3), "train", {**TWO, "url": str(tmp_path)}, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    told = [report.travel for report in outcomes[0].reports if report.travel]
    assert told == ["shards over all workers: 3 are not several whole groups of 2 (fsdp2.shard_workers)"]


@pytest.mark.parametrize(("what", "victim"), [("master/first.weight", 3), ("exp_avg/second.weight", 2)])
def test_copies_of_a_shard_that_drift_apart_are_told_on_all_ranks(
    crew: Crew, tmp_path: Path, what: str, victim: int
) -> None:
    config = {**TWO, "drifts after": 1, "drifts": what, "victim": victim, "url": str(tmp_path)}
    outcomes = crew.run(range(4), "hybrid.train", config, end_at=2, **MORE)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    for rank, outcome in enumerate(outcomes):
        if rank % 2 == victim % 2:
            assert f"{what} on rank {victim} differs" in outcome.result.message
        else:
            assert f"the ranks with shard coordinate {victim % 2}" in outcome.result.message
    assert not CheckpointStore(str(tmp_path), "run").list()


COPIES = "shards over 4 workers, sums over 2 copies of each"
SLICED: dict[str, Any] = {"engine": "fsdp2", "sequences": True, "clipping": 0.3, "fsdp2": {"shard_workers": 4}}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


@pytest.mark.slow
def test_copies_that_drift_apart_between_slices_are_told_on_all_ranks(eight: Crew, tmp_path: Path) -> None:
    """Alike in each copy of the shards."""
    config = {**SLICED, "sequences": False, "skewed at": 1, "skewed": SKEWED, "schedule": False, "url": str(tmp_path)}
    outcomes = eight.run(range(8), "tensor_parallel.train", config, end_at=2, tp=2, **{**MORE, "max_world_size": 8})
    for rank, outcome in enumerate(outcomes):
        assert f"{SKEWED} on rank {rank // 2 * 2 + 1} differs" in outcome.result.message
    assert not CheckpointStore(str(tmp_path), "run").list()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "allowed"),
    [({"sp": 1, "tp": 2}, {}, ALLOWED), ({"sp": 2, "tp": 2}, {}, ALLOWED), ({"sp": 1, "tp": 2}, BF16, 5e-3)],
    ids=["tp", "sp-tp", "tp-bf16"],
)
def test_copies_of_shards_of_slices_equal_one_rank_with_whole_layers(
    eight: Crew, tmp_path: Path, mesh: dict[str, int], options: dict[str, str], allowed: float
) -> None:
    """Two copies of two shards of two slices; no copies on one cell or two; two again."""
    config = {**SLICED, "fsdp2": {**SLICED["fsdp2"], **options}}
    parts: Sequence[cells.Part] = ((range(8), 3), ((5, 0, 6, 3), 5), ((1, 7, 0, 2, 6, 5, 3, 4), None))
    function, more = "tensor_parallel.train", {"anomalies": STOP}
    whole = Run(tmp_path / "whole", cells.through(eight, tmp_path / "whole", function, config, cells.WHOLE, **more))
    config["in_loop"] = True
    run = cells.through(eight, tmp_path / "moved", function, config, parts, **mesh, **more)
    moved = Run(tmp_path / "moved", run, 2)
    assert _distance(whole.losses, moved.losses) <= allowed
    # Adam makes a step of the rounding of a gradient.
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= allowed * (10 if options else 1)
    cells.assert_every_sample_once(moved)
    norms = {report.step: report.grad_norm for report in whole.outcomes[0].reports}
    for outcome in moved.outcomes:
        for report in outcome.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=max(1e-4, allowed)), "each element once"
    told = [report.travel for report in moved.outcomes[0].reports if report.travel]
    assert told == [COPIES]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["backward", "step"])
def test_survivors_of_a_killed_rank_of_a_copy_stay_in_their_loop(eight: Crew, tmp_path: Path, where: str) -> None:
    """Of two copies of two shards of two slices one rank is killed; three cells without copies; two copies again."""
    url, function, then = tmp_path / "moved", "tensor_parallel.train", (6, 3, 0, 5, 2, 7)
    run = cells.with_a_rank_killed(eight, url, function, SLICED, where, then=then, tp=2, anomalies=STOP)
    moved = Run(url, run, 2)
    whole = Run(tmp_path / "whole", cells.through(eight, tmp_path / "whole", function, SLICED, cells.WHOLE))
    assert _distance(whole.after(cells.AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= ALLOWED
    told = [[report.travel for report in generation[0].reports if report.travel] for generation in run]
    no_copies = "shards over all workers: 6 are not several whole groups of 4 (fsdp2.shard_workers)"
    assert told == [[no_copies], [COPIES]]


def test_copies_of_shards_with_shared_sequences_equal_one_rank(crew: Crew, tmp_path: Path) -> None:
    """Two copies, of two ranks each, which share sequences; one cell; two copies."""
    config = {"engine": "fsdp2", "fsdp2": {"shard_workers": 2}}
    whole = Run(tmp_path / "whole", cells.through(crew, tmp_path / "whole", "sequences.train", config, cells.WHOLE))
    config["in_loop"] = True
    moved = cells.through(crew, tmp_path / "moved", "sequences.train", config, cells.MOVED, sp=2)
    assert moved[0][0].reports[0].travel == "shards over 2 workers, sums over 2 copies of each"
    assert _distance(whole.losses, Run(tmp_path / "moved", moved).losses) <= ALLOWED
    assert _distance(whole.state(), Run(tmp_path / "moved", moved).state()) <= ALLOWED


@pytest.mark.slow
def test_copies_of_shards_of_which_some_have_no_rows_equal_one_rank(eight: Crew, tmp_path: Path) -> None:
    """The model has a parameter of three rows: two copies of four shards; four ranks without copies; copies again."""
    config = {"engine": "fsdp2", "fsdp2": {"shard_workers": 4}}
    whole = Run(tmp_path / "whole", cells.through(eight, tmp_path / "whole", "trainings.train", config, cells.WHOLE))
    parts = ((range(8), 3), ((5, 0, 6, 3), 5), ((1, 7, 0, 2, 6, 5, 3, 4), None))
    moved = Run(tmp_path / "moved", cells.through(eight, tmp_path / "moved", "trainings.train", config, parts))
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= ALLOWED


EP: dict[str, Any] = {"ep": 2, "ep_sizes": (1, 2)}
STAGED: dict[str, Any] = {**FSDP2, "fsdp2": {"shard_workers": 2}, "tied": True}
OF_STAGE = "shards over 2 workers of a stage, sums over 2 copies of each"
NO_COPIES = "shards over all workers of a stage: 3 are not several whole groups of 2 (fsdp2.shard_workers)"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        pytest.param({"dropout": 0.2}, {}, id="tied-dropout"),
        pytest.param({**LOOPED, "tied": False}, {}, id="interleaved", marks=SLOW),
        pytest.param({**LOOPED, "fsdp2": later("DualPipeV")}, {}, id="dualpipev", marks=SLOW),
        pytest.param({"fsdp2": {"pipeline_schedule": "GPipe"}, "sequences": True}, {"sp": 2}, id="sp", marks=SLOW),
    ],
)
def test_copies_of_shards_of_stages_equal_one_rank_with_all_layers(
    eight: Crew, tmp_path: Path, config: dict[str, Any], mesh: dict[str, int]
) -> None:
    """Two copies of two shards of two stages; no copies on three or on two ranks of each stage; two copies again; what
    they have saved, without stages and copies."""
    config = {**STAGED, **config, "fsdp2": {**config.get("fsdp2", {}), **STAGED["fsdp2"]}}
    one = cells.through(eight, tmp_path / "one", "staged.train", config, cells.WHOLE, anomalies=STOP)
    fewer = [((5, 0, 6, 3, 1, 2), 2, 3)] if not mesh else []
    parts = [(range(8), 2, 2), *fewer, ((5, 0, 6, 3), 2, 5), ((1, 7, 0, 2, 6, 5, 3, 4), 2, 7), ((3, 2), 1, None, {})]
    moved = through_stages(eight, tmp_path / "moved", config, parts, **mesh)
    assert_equal(Run(tmp_path / "one", one), moved)
    told = [report.travel for outcome in moved.outcomes for report in outcome.reports if report.travel]
    assert told == [OF_STAGE, *(NO_COPIES for _ in fewer), OF_STAGE]


@pytest.mark.slow
def test_copies_of_shards_of_slices_of_stages_equal_one_rank_with_all_layers(tmp_path: Path) -> None:
    """Sixteen ranks: two copies of two shards of two slices of two stages; eight: none; the same: two copies of two
    shards of two slices of all layers; sixteen again."""
    sixteen = Crew(16)
    config = {**STAGED, "fsdp2": {"shard_workers": 4}, "plan": "all", "precision": "float64"}
    half = (9, 0, 3, 12, 1, 5, 7, 15)
    parts = ((range(16), 2, 2), (half, 2, 4), (half, 1, 6), (range(15, -1, -1), 2, None))
    try:
        one = cells.through(sixteen, tmp_path / "one", "staged.train", config, cells.WHOLE, anomalies=STOP)
        moved = through_stages(sixteen, tmp_path / "moved", config, parts, tp=2)
    finally:
        sixteen.close()
    assert_equal(Run(tmp_path / "one", one), moved)
    told = [report.travel for outcome in moved.outcomes for report in outcome.reports if report.travel]
    of_stage = COPIES.replace("workers", "workers of a stage")
    assert told == [of_stage, COPIES, of_stage]


@pytest.mark.slow
def test_a_killed_rank_of_a_copy_of_a_stage_is_survived(eight: Crew, tmp_path: Path) -> None:
    """While rank 0 waits for a gradient of it; three ranks of each stage without copies; two copies again."""
    then = (3, 0, 7, 2, 4, 5)
    generations = assert_survivors_go_on(eight, tmp_path, {**STAGED, "dropout": 0.2}, waits=(0, 2), then=then)
    told = [[report.travel for report in outcomes[0].reports if report.travel] for outcomes in generations]
    assert told == [[NO_COPIES], [OF_STAGE]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "drift", "said", "elsewhere"),
    [
        ("master/norm.weight", [5], "master/norm.weight on rank 5 differs", "pipeline and shard coordinate 2"),
        ("exp_avg/embed.weight", [2], "exp_avg/embed.weight on rank 6 differs", "pipeline and shard coordinate 1"),
        ("step/norm.weight", [1, 5], "optimizer scalars of norm.weight on rank 3, 7", "pipeline coordinate 1"),
        ("master/layers.2.mlp.experts.w2", [7], "experts.w2 on rank 7 differs", "pipeline and shard coordinate 3"),
    ],
)
def test_copies_within_a_stage_that_drift_apart_are_told_on_all_ranks(
    eight: Crew, tmp_path: Path, what: str, drift: list[int], said: str, elsewhere: str
) -> None:
    """Of two stages with two copies of two shards each: of one rank, and of all that have a shard."""
    shared = EP if "experts" in what else {}
    config = {**STAGED, "experts": bool(shared), "drifts after": 2, "drifts": what, "drift": drift}
    more = {**MORE, **shared, "end_at": 2, "pp": 2}
    outcomes = eight.run(range(8), "staged.train", {**config, "url": str(tmp_path)}, **more)
    assert {outcome.result.kind for outcome in outcomes} == {"collective_failed"}
    concerned = [rank for rank, outcome in enumerate(outcomes) if said in outcome.result.message]
    assert concerned == ([1, 3, 5, 7] if "step" in what else [drift[0] % 4, drift[0] % 4 + 4])
    for rank in set(range(8)) - set(concerned):
        assert elsewhere in outcomes[rank].result.message
    assert not CheckpointStore(str(tmp_path), "run").list()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "precision", "more"),
    [(2, "float64", {}), (2, "float32", {}), (4, "float64", {}), (4, "float64", {"tp": 2}), (4, "float64", {"sp": 2})],
)
def test_copies_of_shards_of_experts_equal_one_rank_with_all_experts(
    eight: Crew, tmp_path: Path, workers: int, precision: str, more: dict[str, int]
) -> None:
    """Two copies or more that share experts each; fewer ranks; all experts on each of these; copies again."""
    config = {**experts.FSDP2, "precision": precision, "fsdp2": {"shard_workers": workers}}
    config["dropout"] = 0.0 if more else 0.2
    whole = experts.through(eight, tmp_path / "whole", config, cells.WHOLE)
    some, all_ = (5, 0, 6, 3), (1, 7, 0, 2, 6, 5, 3, 4)
    parts: Sequence[cells.Part] = ((range(8), 2), (some, 4), (some, 6, {**EP, "ep": 1}), (all_, None))
    moved = experts.through(eight, tmp_path / "moved", {**config, "in_loop": True}, parts, **EP, **more)
    experts.assert_equal(whole, moved, experts.EXACT if precision == "float64" else ALLOWED)
    told = [report.travel for outcome in moved.outcomes[:8] for report in outcome.reports if report.travel]
    assert told == [f"shards over {workers} workers, sums over {8 // workers} copies of each"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_survivors_of_a_copy_that_shares_experts_stay_in_their_loop(eight: Crew, tmp_path: Path, workers: int) -> None:
    """One is killed in a backward pass; three pairs that share experts, as copies or none; all again."""
    config = {**experts.DOUBLE, "fsdp2": {"shard_workers": workers}}
    url, function, then = tmp_path / "moved", "routed.train", (6, 3, 0, 5, 2, 7)
    run = cells.with_a_rank_killed(eight, url, function, config, "backward", then=then, anomalies=STOP, **EP)
    moved = Run(url, run)
    whole = experts.through(eight, tmp_path / "whole", config, cells.WHOLE)
    assert _distance(whole.after(cells.AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= experts.EXACT


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"dropout": 0.2, "tied": True}, LOOPED], ids=["1f1b-tied-dropout", "interleaved"])
def test_copies_of_shards_of_experts_of_stages_equal_one_rank_with_all(
    eight: Crew, tmp_path: Path, way: dict[str, Any]
) -> None:
    """Two stages of two copies of two ranks that share experts; one copy; two copies of all experts; as at first."""
    config = {**stages.CONFIG, **way, "fsdp2": {**way.get("fsdp2", {}), "shard_workers": 2}}
    one = stages.through(eight, tmp_path / "one", config, cells.WHOLE)
    parts: Sequence[cells.Part] = (
        (range(8), 2, stages.BOTH), ((5, 0, 6, 3), 4, stages.BOTH), (range(8), 6, stages.STAGES),
        ((1, 7, 0, 2, 6, 5, 3, 4), None, stages.BOTH),
    )  # fmt: skip
    moved = stages.through(eight, tmp_path / "moved", config, parts)
    stages.assert_equal(one, moved)
    told = [report.travel for outcome in moved.outcomes for report in outcome.reports if report.travel]
    assert told == [OF_STAGE, OF_STAGE, OF_STAGE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "mesh"),
    [
        *((2, {"pp": 2}), (2, {"pp": 2, "sp": 2}), (4, {"ep": 2, "pp": 1}), (2, {"ep": 2, "pp": 2})),
        *((4, {"tp": 2}), (4, {"ep": 2, "tp": 2})),
    ],
)
def test_copies_of_shards_on_other_nodes_are_the_replicas(
    eight: Crew, tmp_path: Path, workers: int, mesh: dict[str, int]
) -> None:
    """Of four nodes with the shards of two ranks each, the first and the last are lost; four ranks go on."""
    config = {**STAGED, "experts": "ep" in mesh, "sequences": "sp" in mesh, "plan": "all", "precision": "float64"}
    config["fsdp2"] = {"shard_workers": workers, "global_batch": 8, "micro_batch": 1}
    more: dict[str, Any] = {**MORE, **mesh, **({"ep_sizes": (1, 2)} if "ep" in mesh else {}), "anomalies": STOP}
    nodes = [server() for _ in range(4)]
    names = [node.local_name for node in nodes for _ in range(2)]
    saved = {**config, "url": str(tmp_path / "lost"), "memory": names}
    outcomes = eight.run(range(8), "staged.train", saved, end_at=3, memory=MemoryPlan(every_steps=1), **more)
    assert {outcome.result.kind for outcome in outcomes} == {"ended"}, outcomes[0].result
    for node in (nodes[0], nodes[3]):
        node.close()
    held = {each.rank: (each, node) for node in nodes[1:3] for each in node.held() if each.step == 3}
    assert {each.world_size for each, _ in held.values()} == {4}, "the ranks of one copy"
    records = [node.record(each) for each, node in held.values()]
    manifest = replace(assemble(records, run_id="run"), id=snapshot_id(3, eight.generation))
    holders = {rank: Holder(node.address) for rank, (_, node) in held.items()}
    then = {**config, "url": str(tmp_path / "moved"), "held": (manifest, holders)}
    run = eight.run((5, 0, 6, 3), "staged.train", then, end_at=5, checkpoint=manifest.id, **more)
    for node in nodes:
        node.close()
    assert {outcome.restores[0].source for outcome in run} == {"memory"}
    whole = cells.through(eight, tmp_path / "one", "staged.train", config, [((0,), 5)], anomalies=STOP)
    one, moved = Run(tmp_path / "one", whole), Run(tmp_path / "moved", [run], mesh.get("tp", 1))
    assert _distance(one.after(3), moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state(one.shapes[0])) <= ALLOWED


@pytest.mark.parametrize(
    ("config", "mesh", "sentence"),
    [
        ({"fsdp2": {"shard_workers": 1}}, {}, "shard_workers must be a whole number of workers, at least 2, got 1"),
        (TWO, {"tp": 2}, "shard_workers is 2, and mesh: {tp: 2} makes cells of 2 workers: give several whole cells"),
        (TWO, {"tp": 2, "pp": 2}, "is 2, and mesh: {tp: 2} makes cells of 2 workers: give several whole cells"),
        (TWO, {"ep": 2, "sp": 2}, "shard_workers is 2, and mesh: {sp: 2, ep: 2} makes cells of 4 workers, which have"),
    ],
)
def test_what_cannot_be_done_is_refused(
    crew: Crew, tmp_path: Path, config: dict[str, Any], mesh: dict[str, int], sentence: str
) -> None:
    for outcome in crew.run(range(4), "train", {**config, "engine": "fsdp2", "url": str(tmp_path)}, **MORE, **mesh):
        assert outcome.result.kind == "usage_error"
        assert sentence in outcome.result.message

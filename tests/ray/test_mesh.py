"""Whole runs whose ranks share sequences, layers, experts, stages: nodes are killed and added; the oracle is
undisturbed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_cluster import LocalCluster
from harness import Run, wait_until

import elastic
from elastic.core.mesh import MeshSettings
from elastic.core.settings import ScalingSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Additions in another order, in fp32.
CEILING = 4e-6
FOUR = ScalingSettings(2, 4)


# What ranks share, the function that shares it, and the engine's stage; None: it has none.
SEQUENCES, LAYERS, EXPERTS, STAGES = (MeshSettings(**{axis: 2}) for axis in ("sp", "tp", "ep", "pp"))
SHARED = [
    *(pytest.param("shared_work:sequences", SEQUENCES, stage, id=f"sequences-{stage}") for stage in (0, 1, 2, 3)),
    pytest.param("shared_work:sequences", SEQUENCES, None, id="sequences of torch"),
    *(pytest.param("shared_work:layers", LAYERS, stage, id=f"layers-{stage}") for stage in (0, 1, 2, 3)),
    pytest.param("shared_work:layers", LAYERS, None, id="layers of torch"),
    pytest.param("shared_work:both", MeshSettings(sp=2, tp=2, choices={"tp": (1, 2)}), None, id="both"),
    *(pytest.param("shared_experts:train", EXPERTS, stage, id=f"experts-{stage}") for stage in (0, 1, 2, 3)),
    *(
        pytest.param(
            "shared_experts:train_layers",
            MeshSettings(ep=2, tp=2, choices={"ep": (1, 2)}),
            stage,
            id=f"experts and layers-{stage}",
        )
        for stage in (1, 2, 3)
    ),
    *(pytest.param("shared_experts:train_native", EXPERTS, stage, id=f"deepspeed.moe-{stage}") for stage in (1, 2)),
    pytest.param("shared_experts:train_routed", EXPERTS, None, id="experts of torch"),
    pytest.param(
        "shared_experts:train_routed",
        MeshSettings(ep=2, tp=2, choices={"ep": (1, 2)}),
        None,
        id="experts and layers of torch",
    ),
    *(pytest.param("pipelined_work:train", STAGES, stage, id=f"stages-{stage}") for stage in (0, 1)),
    pytest.param("staged_work:train", STAGES, None, id="stages of torch"),
    pytest.param("staged_work:own_forward", STAGES, None, id="stages by their own forward"),
    pytest.param(
        "staged_work:layers", MeshSettings(pp=2, tp=2, choices={"pp": (1, 2)}), None, id="stages with layers of torch"
    ),
    pytest.param(
        "staged_work:experts",
        MeshSettings(ep=2, pp=2, choices={"ep": (1, 2)}),
        None,
        id="stages with experts of torch",
    ),
]


@dataclass(frozen=True)
class Outcome:
    losses: Mapping[int, float]
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, run: Run, folder: Path) -> Outcome:
        exported = elastic.export(f"{run.url}/{run.settings.run_id}", folder, to="torch") / "model.pt"
        return cls(run.losses(), torch.load(exported, weights_only=True))

    def assert_near(self, other: Outcome) -> None:
        assert list(self.losses) == list(other.losses)
        for step, loss in self.losses.items():
            assert loss == pytest.approx(other.losses[step], rel=CEILING, abs=CEILING), f"step {step}"
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            if name.endswith("passes"):
                continue  # Of one rank, which has as many as its cell gets micro-batches.
            torch.testing.assert_close(weight, other.weights[name], rtol=CEILING, atol=CEILING, msg=name)


# Undisturbed, by function, engine and clipping: one for all stages, which compute the same.
_STILL: dict[tuple[str, str, float], Outcome] = {}


@dataclass(frozen=True)
class Work:
    """What ranks share, as in `SHARED`."""

    function: str
    mesh: MeshSettings
    stage: int | None

    @property
    def engine(self) -> str:
        return "fsdp2" if self.stage is None else "deepspeed"

    @property
    def clipping(self) -> float:
        # In stage 0 DeepSpeed clips rightly where all ranks have all of the model.
        alone = self.stage == 0 and self.function in ("pipelined_work:train", "shared_experts:train")
        return 0.0 if alone else 0.5

    def started(self, cluster: LocalCluster, folder: Path, run_id: str, scaling: ScalingSettings = FOUR) -> Run:
        config = {"stage": self.stage, "gradient_clipping": self.clipping}
        return started(cluster, folder, run_id, self.function, self.mesh, self.engine, config, scaling)

    def undisturbed(self, cluster: LocalCluster, folder: Path) -> Outcome:
        key = (self.function, self.engine, self.clipping)
        if key not in _STILL:
            still = self.started(cluster, folder / "still", "still")
            still.allow(1 << 30)
            still.start().finish()
            _STILL[key] = Outcome.of(still, folder / "still-weights")
        return _STILL[key]


@pytest.mark.parametrize(("function", "mesh", "stage"), SHARED)
def test_cells_lose_nodes_form_anew_and_grow(
    cluster: LocalCluster, tmp_path: Path, function: str, mesh: MeshSettings, stage: int | None
) -> None:
    work = Work(function, mesh, stage)
    still = work.undisturbed(cluster, tmp_path)
    run = work.started(cluster, tmp_path / "moved", "moved")
    # Two cells; of one a node is lost. The other's two ranks continue, or a pair of both; one worker stands by.
    lose_a_node(run)
    assert run.handle.progress()["world_size"] == 2
    run.allow(12)
    run.reach(12)
    run.wait_snapshot(12)
    # The worker that stands by takes the place of the one that is lost.
    run.cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(3)
    assert run.handle.progress()["world_size"] == 2
    run.allow(18)
    run.reach(18)
    run.cluster.add_node()
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()

    assert {generation["world_size"] for generation in run.summary()["generations"]} == {2, 4}
    run.assert_whole()
    assert [why for why in run.decisions("function-left") if "it has stood by" not in why] == []
    Outcome.of(run, tmp_path / "moved-weights").assert_near(still)


@pytest.mark.parametrize(
    ("function", "mesh", "stage"),
    [
        *SHARED,
        pytest.param(
            "shared_experts:train_native", MeshSettings(ep=2, choices={"ep": (1, 2)}), 2, id="deepspeed.moe of any ep"
        ),
    ],
)
def test_cells_through_four_meshes(
    cluster: LocalCluster, tmp_path: Path, function: str, mesh: MeshSettings, stage: int | None
) -> None:
    """Two workers on each of four nodes, of which three are killed, one after another, and one is added."""
    work = Work(function, mesh, stage)
    still = work.undisturbed(cluster, tmp_path)
    run = work.started(cluster, tmp_path / "moved", "moved", ScalingSettings(2, 8, workers_per_slot=2))
    lose_a_node(run)
    for step, generation in ((11, 3), (15, 4)):
        run.allow(step)
        run.reach(step)
        run.wait_snapshot(step)
        run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
        run.wait_generation(generation)
    run.allow(18)
    run.reach(18)
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()

    sizes = {generation["number"]: generation["world_size"] for generation in run.summary()["generations"]}
    meshes = run.meshes()
    assert [sizes[1], sizes[4], max(sizes.items())[1]] == [8, 2, 4]
    assert len({(size, *meshes.get(number, {}).values()) for number, size in sizes.items()}) >= 4
    run.assert_whole()
    assert [why for why in run.decisions("function-left") if "it has stood by" not in why] == []
    Outcome.of(run, tmp_path / "moved-weights").assert_near(still)


def test_a_worker_that_stands_by_over_the_end_of_an_epoch_joins_again(cluster: LocalCluster, tmp_path: Path) -> None:
    """One too many for a cell; its loop is in the epoch before, at whose end ranks wait for each other."""
    config = {"stage": 1, "agrees": True}
    run = started(cluster, tmp_path / "moved", "moved", "shared_work:sequences", SEQUENCES, "deepspeed", config)
    lose_a_node(run)
    assert run.handle.progress()["world_size"] == 2
    run.allow(16)
    run.reach(16)
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()
    run.assert_whole()
    (why,) = run.decisions("function-left")
    assert "stood by while the others came to the end of an epoch" in why


def test_workers_of_a_new_cell_set_up_while_the_others_train(cluster: LocalCluster, tmp_path: Path) -> None:
    """They ask for their places first, come to a barrier and agree on a name, in their set-up."""
    config = {"asks": True}
    run = started(cluster, tmp_path / "grown", "grown", "shared_work:layers_after_set_up", LAYERS, "fsdp2", config)
    hold = run.folder / "hold"
    lose_a_node(run)
    run.cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(3)
    hold.touch()
    run.cluster.add_node()
    run.cluster.add_node()

    def told() -> list[str]:
        return sorted(path.read_text() for path in run.folder.glob("told-*") if "." not in path.name)

    run.allow(12)
    everyone = [f"{rank} of 4" for rank in range(4)]
    wait_until(lambda: told() == sorted([*everyone, "2 of 4", "3 of 4"]), "both to be in their set-up")
    run.allow(16)
    run.reach(16)
    assert run.handle.progress()["generation"] == 3
    hold.unlink()
    run.grow_to(4)
    run.finish()
    run.assert_whole()
    assert run.decisions("function-left") == []


@pytest.mark.parametrize(
    ("function", "engine"),
    [
        ("shared_experts:train", "deepspeed"),
        ("shared_experts:train_native", "deepspeed"),
        ("shared_experts:train_routed", "fsdp2"),
    ],
)
def test_experts_are_shared_by_as_many_as_each_generation_can(
    cluster: LocalCluster, tmp_path: Path, function: str, engine: str
) -> None:
    """Four workers share them, after a loss three have all of them each, and the state comes from memory each time."""
    experts = (function, MeshSettings(ep=4, choices={"ep": (1, 4)}), engine)
    still = started(cluster, tmp_path / "still", "still", *experts)
    still.allow(1 << 30)
    still.start().finish()

    run = started(cluster, tmp_path / "moved", "moved", *experts)
    lose_a_node(run)
    run.allow(12)
    run.reach(12)
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()

    chosen = [note["data"]["meshes"] for note in run.records("decision") if note["kind"] == "mesh"]
    taken = [next((row["world_size"], row["axes"]["ep"]) for row in rows if row["chosen"]) for rows in chosen]
    assert taken[:2] == [(4, 4), (3, 1)]
    assert taken[-1][0] == 4
    assert chosen[1][1]["refusal"] == "3 workers, and it needs 4"
    assert {incident["source"] for incident in run.summary()["incidents"]} == {"memory"}
    run.assert_whole()
    assert list(run.losses()) == list(still.losses())
    for step, loss in run.losses().items():
        assert loss == pytest.approx(still.losses()[step], rel=CEILING, abs=CEILING), f"step {step}"


@pytest.mark.parametrize(
    ("function", "engine", "sp", "stages"),
    [
        pytest.param("pipelined_work:train", "deepspeed", 1, 3, id="deepspeed"),
        pytest.param("staged_work:train", "fsdp2", 1, 3, id="fsdp2"),
        pytest.param("staged_work:sequences", "fsdp2", 2, 1, id="fsdp2 over sequences"),
    ],
)
def test_a_pipeline_has_other_stages_after_a_loss(
    cluster: LocalCluster, tmp_path: Path, function: str, engine: str, sp: int, stages: int
) -> None:
    """Two pipelines of two; three workers are one of three rather than one of two and a worker that stands by. Where
    two share each sequence, one pipeline of two; two of three workers have all layers."""
    mesh = MeshSettings(sp=sp, pp=max(2, stages), choices={"pp": tuple(sorted((2, stages)))})
    still = started(cluster, tmp_path / "still", "still", function, MeshSettings(sp=sp, pp=2), engine)
    still.allow(1 << 30)
    still.start().finish()

    run = started(cluster, tmp_path / "moved", "moved", function, mesh, engine)
    # A run grows only to what it has measured to be faster, or predicts.
    run.config["slower_with_pp"] = {str(stages): 2.0}
    lose_a_node(run)
    assert run.handle.progress()["world_size"] == sp * stages
    run.allow(14)
    run.reach(14)
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()

    assert [generation["world_size"] for generation in run.summary()["generations"]] == [4, sp * stages, 4]
    assert [axes["pp"] for axes in run.meshes().values()] == [2, stages, 2]
    run.assert_whole()
    assert list(run.losses()) == list(still.losses())
    for step, loss in run.losses().items():
        assert loss == pytest.approx(still.losses()[step], rel=CEILING, abs=CEILING), f"step {step}"


def lose_a_node(run: Run) -> None:
    """After the run's seventh step."""
    run.allow(7)
    run.start()
    run.reach(7)
    run.wait_snapshot(7)
    run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)


def started(
    cluster: LocalCluster,
    folder: Path,
    run_id: str,
    function: str,
    mesh: MeshSettings,
    engine: str,
    config: Mapping[str, Any] | None = None,
    scaling: ScalingSettings = FOUR,
) -> Run:
    folder.mkdir()
    run = Run(
        cluster,
        folder,
        function,
        run_id=run_id,
        scaling=scaling,
        resources={"CPU": 1.0 / scaling.workers_per_slot},
        memory={"every_steps": 1},
        every_steps=None,
        config={"engine": engine, **(config or {})},
    )
    run.settings = replace(run.settings, mesh=mesh)
    return run

"""What the ledger has of a step: bytes of every stage, and a rank's own time, although all steps take equally long."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from crew import Crew, Outcome

from elastic.core.generation_spec import BatchSettings
from elastic.planner.wire import advice

pytestmark = pytest.mark.processes

BUSY_S = 0.05
# Of the model in `trainings`: its gradient in fp32.
_GRADIENT = 323 * 4
# The payload of a step of two micro-batches in units of that. Stages 1 and 2 reduce gradients to all ranks by default.
_VOLUMES = {
    0: {"all_reduce": 1},
    1: {"all_reduce": 1, "all_gather_into_tensor": 1},
    2: {"all_reduce": 2, "all_gather_into_tensor": 1},
    3: {"reduce_scatter_tensor": 2, "all_gather_into_tensor": 2},
}


def _volumes(outcome: Outcome) -> dict[str, int]:
    """Of the last step: the first one does what is done once."""
    sizes = {use.op: round(use.bytes / _GRADIENT) for use in outcome.reports[-1].collectives if use.axis == "dp"}
    return {op: size for op, size in sizes.items() if size}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_slow_rank_works_and_the_others_wait(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "url": str(tmp_path), "slow": 1, "busy_s": BUSY_S}
    outcomes = crew.run([0, 1, 2], "train_with_a_slow_rank", config, batch=BatchSettings(max_steps=8))
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    # Two micro-batches per rank and step: what the loop does for certain, however busy the machine is.
    assert all(report.noncollective_s >= 2 * BUSY_S for report in outcomes[1].reports)
    assert all(0.0 < report.noncollective_s < report.duration_s for outcome in outcomes for report in outcome.reports)
    own = [median(report.noncollective_s for report in outcome.reports) for outcome in outcomes]
    assert max(own[0], own[2]) < own[1], own
    assert _volumes(outcomes[0]) == _VOLUMES[stage]
    for use in outcomes[0].reports[-1].collectives:
        assert 0.0 < use.waited_s <= use.seconds < outcomes[0].reports[-1].duration_s, use
    assert [outcome.reports[-1].collectives for outcome in outcomes[1:]] == [(), ()], "one rank's are enough"


def test_fsdp2_gathers_and_scatters(crew: Crew, tmp_path: Path) -> None:
    config = {"engine": "fsdp2", "url": str(tmp_path)}
    outcomes = crew.run([0, 1, 2], "train", config, batch=BatchSettings(max_steps=3), engine="fsdp2")
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    # The weights stay gathered between the forward and the backward pass of one module only.
    assert _volumes(outcomes[0]) == {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 2}
    assert all(0.0 < report.noncollective_s < report.duration_s for outcome in outcomes for report in outcome.reports)


@pytest.mark.parametrize(("stage", "least"), [(3, 1), (None, 8)])
def test_passes_within_gathered_gather_nothing(crew: Crew, tmp_path: Path, stage: int | None, least: int) -> None:
    """As completions are made; FSDP2 gathered layer by layer for each token. DeepSpeed keeps small weights gathered."""
    config = {"url": str(tmp_path), **({"engine": "fsdp2"} if stage is None else {"stage": stage})}
    engine = "deepspeed" if stage else "fsdp2"
    batch = BatchSettings(max_steps=2)
    outcomes = crew.run([0, 1], "exchanging.gathers_at_once", config, batch=batch, max_world_size=2, engine=engine)
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    for apart, within, after in outcomes[0].told["gathers"]:
        assert within == 0
        assert min(apart, after) >= least, "of three passes through three layers, before and after"


def test_with_hpz_backward_passes_gather_from_a_group(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 3, "url": str(tmp_path), "zero": {"zero_hpz_partition_size": 2}}
    outcomes = crew.run(range(4), "train", config, batch=BatchSettings(max_steps=3), max_world_size=4)
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    gathered = {use.axis: use.bytes for use in outcomes[0].reports[-1].collectives if use.op.startswith("all_gather")}
    assert gathered.keys() == {"dp", "hpz"}
    assert outcomes[0].reports[0].travel == "weights are gathered from 2 of 4 workers in backward passes (hpZ)"


def test_what_is_advised_saves_bytes_and_trains_alike(crew: Crew, tmp_path: Path) -> None:
    losses = []
    for flag in (True, False):
        config = {"stage": 2, "url": str(tmp_path), "zero": {"use_multi_rank_bucket_allreduce": flag}}
        outcomes = crew.run([0, 1, 2], "train", config, batch=BatchSettings(max_steps=4))
        assert outcomes[0].result.kind == "finished", outcomes[0].result.traceback
        losses.append([sum(outcome.reports[step].loss for outcome in outcomes) for step in range(4)])
        assert bool(advice(outcomes[0].reports[-1].collectives, 3)) == flag
    assert _volumes(outcomes[0]) == {"reduce": 2, "all_gather_into_tensor": 1}
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_communication_data_type_is_what_travels(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "url": str(tmp_path), "top": {"communication_data_type": "bf16"}}
    outcomes = crew.run([0, 1, 2], "train", config, batch=BatchSettings(max_steps=3))
    assert outcomes[0].result.kind == "finished", outcomes[0].result.traceback
    (reduced,) = [use for use in outcomes[0].reports[-1].collectives if use.op == "all_reduce" and use.bytes > 8]
    assert reduced.dtype == "bfloat16"
    assert round(reduced.bytes / _GRADIENT, 1) == (1.0 if stage == 2 else 0.5), "half of what travels in fp32"


def test_the_backend_is_left_as_it_was(crew: Crew, tmp_path: Path) -> None:
    """A proxy that stayed would be wrapped anew with every generation."""
    config = {"stage": 2, "url": str(tmp_path)}
    for _ in range(2):
        for outcome in crew.run([0, 1], "train_and_tell_the_backend", config, batch=BatchSettings(max_steps=2)):
            assert outcome.result.kind == "finished", outcome.result.traceback
            assert (outcome.told["before"], outcome.told["inside"]) == ("TorchBackend", ["_Counted", "TorchBackend"])

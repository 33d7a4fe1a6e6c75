"""The checks that all front ends share: what is found, in which words, and that nothing is started or written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster.chaos import Chaos
from elastic_jobs.job_file.checks import Finding, check, check_plan, refuse
from elastic_jobs.running.run_plan import Job, Output, Place, RunPlan

from elastic.core.data.adaptive_batch import AdaptiveBatch
from elastic.core.errors import UsageError
from elastic.core.mesh import MeshSettings
from elastic.core.settings import (
    AnomalySettings,
    AuditSettings,
    CheckpointSettings,
    CommunicationSettings,
    GradientNoiseSettings,
    RunSettings,
    ScalingSettings,
)

SETTINGS = RunSettings("r", scaling=ScalingSettings(2, 4), checkpoint=CheckpointSettings("/ckpt"), storage_url="/runs")
JOB = Job(SETTINGS, "train.py:main")


def changed(**settings: Any) -> Job:
    return replace(JOB, settings=replace(SETTINGS, **settings))


ISLANDS = CommunicationSettings("local", "diloco")
LATE = CommunicationSettings("async", staleness=2)
SERVED = CommunicationSettings("async", "parameter_server")


def test_a_good_job_has_no_findings() -> None:
    assert check(JOB) == []
    refuse([])


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_mesh_that_the_fewest_workers_cannot_form_is_checked_with_the_fewest_that_can(axis: str) -> None:
    mesh = MeshSettings(choices={axis: (2, 4)}).shape({axis: 4})
    more: dict[str, Any] = {"mesh": replace(mesh, choices={axis: (2, 4)}), "global_batch": 8, "micro_batch": 2}
    assert check(changed(**more, engine_config={"zero_optimization": {"stage": 1}})) == []
    (found,) = check(
        changed(**more, engine_config={"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 3}})
    )
    assert "autotp_size" in found.sentence


@pytest.mark.parametrize(
    ("job", "place", "key", "sentence"),
    [
        (changed(run_id="../x"), None, "run id", "run id '../x' must be letters"),
        (changed(storage_url="s3://me:pass@b/x"), None, "storage_url", "holds credentials"),
        (changed(checkpoint=CheckpointSettings("s3://me:pass@b/x")), None, "checkpoint.url", "holds credentials"),
        (replace(JOB, config={"api_key": "abc"}), None, "config", "config.api_key looks like a secret"),
        (changed(engine="fsdp"), None, "engine", "engine 'fsdp' is unknown; the engines are: deepspeed"),
        (changed(engine_config={"elasticity": {}}), None, "deepspeed", "deepspeed: DeepSpeed option elasticity"),
        (
            changed(communication=CommunicationSettings(), engine_config={"zero_optimization": {"stage": 3}}),
            None,
            "communication",
            "communication is not supported with ZeRO stage 3",
        ),
        (
            changed(communication=ISLANDS, engine_config={"zero_optimization": {"stage": 1}}),
            None,
            "communication",
            "ZeRO stage 1 where islands train by themselves (semantics: local); leave one of them out",
        ),
        (
            changed(communication=LATE, engine_config={"bf16": {"enabled": True}}),
            None,
            "communication",
            "bf16 where gradients are applied late (semantics: async); leave one of them out",
        ),
        (
            changed(communication=SERVED, anomalies=AnomalySettings("skip")),
            None,
            "communication",
            "anomalies.policy: skip where a parameter server makes the updates (rollback, stop and off do)",
        ),
        (
            changed(communication=LATE, audit=AuditSettings(every_steps=5)),
            None,
            "communication",
            "communication.semantics: async does not go with audit.every_steps",
        ),
        (
            changed(
                adaptive_batch=AdaptiveBatch("linear"),
                engine_config={"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            ),
            None,
            "deepspeed",
            "must be a multiple of micro_batch (4) times the most data-parallel workers",
        ),
        (
            changed(communication=ISLANDS, audit=AuditSettings(every_steps=5)),
            None,
            "communication",
            "communication.semantics: local does not go with audit.every_steps",
        ),
        (
            changed(communication=ISLANDS, gradient_noise=GradientNoiseSettings(every_steps=5)),
            None,
            "communication",
            "communication.semantics: local does not go with gradient_noise.every_steps",
        ),
        (changed(engine_config={"x": {"password": "p"}}), None, "deepspeed", "deepspeed.x.password looks like"),
        (JOB, Place(nodes=1), "place", "1 node can hold 1 worker, but min_workers is 2"),
        (JOB, Place(max_nodes=1), "place", "--max-nodes goes with --autoscale"),
        (JOB, Place("a:1", autoscale=True), "place", "--autoscale starts a local cluster"),
        (JOB, Place("a:1", faults=Chaos.parse("kill-node@step=1")), "place", "--chaos works on a local cluster only"),
    ],
)
def test_what_is_wrong_is_found(job: Job, place: Place | None, key: str, sentence: str) -> None:
    found = check(job) if place is None else check_plan(RunPlan(job, place))
    assert [finding.key for finding in found] == [key] * len(found)
    assert any(sentence in finding.sentence for finding in found)


def test_all_findings_are_named_at_once() -> None:
    job = replace(changed(run_id="../x", engine_config={"amp": {}}), config={"password": "abc"})
    with pytest.raises(UsageError, match=r"run id '../x' .*\(also wrong: config, deepspeed\)$"):
        refuse(check(job))
    with pytest.raises(UsageError, match=r"^one$"):
        refuse([Finding("x", "one")])


def test_storage_is_not_touched_before_user_code_imports(tmp_path: Path) -> None:
    job = replace(changed(storage_url=str(tmp_path / "runs")), folder=str(tmp_path))
    (only,) = check_plan(RunPlan(job, Place(nodes=3)))
    assert only.key == "entry_point"
    assert "there is no file" in only.sentence
    summary, _ = check_plan(RunPlan(job, Place(), Output(str(tmp_path / "no" / "s.json"))))
    assert summary == Finding("--summary", f"--summary {tmp_path}/no/s.json: cannot write a file there")
    assert list(tmp_path.iterdir()) == []

"""The model of a job file: its keys, their limits, and the settings of a run made from them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, model_validator

from elastic.core.data.adaptive_batch import AdaptiveBatch, refused_adaptive
from elastic.core.data.audits import refused_audit
from elastic.core.data.micro_batches import refused_noise
from elastic.core.policy.communication import refused_communication
from elastic.core.settings import (
    GPU_FAILURES,
    AnomalySettings,
    AuditSettings,
    CalibrationSettings,
    CheckpointSettings,
    CommunicationSettings,
    FailureSettings,
    GradientNoiseSettings,
    RunSettings,
    ScalingSettings,
    SinkSettings,
    SnapshotSettings,
    StragglerSettings,
    refused_resources,
)
from elastic.engines.select import stages_per_rank
from elastic.entrypoint import parse_entry_point
from elastic_jobs.job_file.kubernetes_section import KubernetesSpec
from elastic_jobs.job_file.sections import (
    CONFIG,
    AnomalySpec,
    AuditSpec,
    BatchSpec,
    CalibrationSpec,
    CheckpointSpec,
    CommunicationSpec,
    Count,
    GradientNoiseSpec,
    MeshSpec,
    SinkSpec,
    SnapshotSpec,
    StragglerSpec,
    WeightsSpec,
    checked_failures,
)
from elastic_jobs.job_file.submit_section import SubmitSpec
from elastic_jobs.run_folder import default_storage, new_run_id
from elastic_jobs.running.run_plan import Job


class JobSpec(BaseModel):
    """One job. Batches count samples; None leaves them to the DeepSpeed config of the user's script."""

    model_config = CONFIG

    entry_point: str
    config: dict[str, Any] = Field(default_factory=dict)
    name: str = ""
    min_workers: Count = 1
    max_workers: Count
    workers_per_slot: Count = 1
    spare_slots: Annotated[int, Field(ge=0)] = 0
    mesh: MeshSpec = Field(default_factory=MeshSpec)
    gather_s: Annotated[float, Field(ge=0)] = ScalingSettings.gather_s
    priority: Annotated[int, Field(ge=-1000, le=1000)] = ScalingSettings.priority
    share_after_s: Annotated[float, Field(gt=0)] = ScalingSettings.share_after_s
    scaling_policy: Literal["eager", "measured", "patient"] = ScalingSettings.policy
    price_per_node_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    resources_per_worker: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=lambda: {"CPU": 1.0})
    fork_workers: bool = False
    numa_binding: Literal["off", "node", "exclusive"] = RunSettings.numa_binding
    device_faults: Literal["off", "report", "evict"] = RunSettings.device_faults
    engine: str = RunSettings.engine
    deepspeed: dict[str, Any] | str | None = None
    weights: WeightsSpec | None = None
    fsdp2: dict[str, Any] | None = None
    global_batch: Count | None = None
    micro_batch: Count | None = None
    batch: BatchSpec | None = None
    max_steps: Count | None = None
    epochs: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    snapshots: SnapshotSpec = Field(default_factory=SnapshotSpec)
    failures: Annotated[FailureSettings, PlainValidator(checked_failures)] = Field(default_factory=FailureSettings)
    anomalies: AnomalySpec = Field(default_factory=AnomalySpec)
    stragglers: StragglerSpec = Field(default_factory=StragglerSpec)
    gradient_noise: GradientNoiseSpec = Field(default_factory=GradientNoiseSpec)
    audit: AuditSpec = Field(default_factory=AuditSpec)
    calibration: CalibrationSpec = Field(default_factory=CalibrationSpec)
    communication: CommunicationSpec | None = None
    sinks: list[SinkSpec] = Field(default_factory=list)
    storage_url: str | None = None
    kubernetes: KubernetesSpec | None = None
    submit: SubmitSpec = Field(default_factory=SubmitSpec)

    @model_validator(mode="before")
    @classmethod
    def _limits_of_gpus(cls, data: Any) -> Any:
        """With GPUs some limits have longer defaults; given keys are kept."""
        resources, failures = (data.get(key) or {} for key in ("resources_per_worker", "failures"))
        if not (isinstance(resources, dict) and resources.get("GPU") and isinstance(failures, dict)):
            return data
        return {**data, "failures": {**GPU_FAILURES, **failures}}

    @model_validator(mode="after")
    def _workers(self) -> JobSpec:
        low, high, slot = self.min_workers, self.max_workers, self.workers_per_slot
        if low > high:
            raise ValueError(f"min_workers ({low}) is above max_workers ({high})")
        if low % slot or high % slot:
            raise ValueError(
                f"min_workers ({low}) and max_workers ({high}) must be multiples of workers_per_slot ({slot})"
            )
        fewest, most = self.sizes
        if fewest % slot or most % slot:
            cells = " or ".join(map(str, self.mesh.settings().cells))
            raise ValueError(
                f"min_workers ({fewest}) and max_workers ({most}), in whole cells of {cells}, "
                f"must be multiples of workers_per_slot ({slot}) too"
            )
        return self

    @model_validator(mode="after")
    def _one_device(self) -> JobSpec:
        refused = refused_resources(self.resources_per_worker, self.numa_binding)
        if refused is not None:
            raise ValueError(refused)
        return self

    @model_validator(mode="after")
    def _one_engine(self) -> JobSpec:
        for name in ("deepspeed", "fsdp2"):
            if getattr(self, name) is not None and self.engine != name:
                raise ValueError(f"{name} is given, but engine is {self.engine}; set engine: {name}, or leave it out")
        mesh = self.mesh.settings()
        given = [axis for axis in ("sp", "tp", "ep", "pp") if getattr(mesh, axis) > 1]
        alone = mesh.pp > 1 or (mesh.ep > 1 and min(mesh.sp, mesh.tp) > 1)
        if alone and len(given) > 1 and self.engine != "fsdp2":
            raise ValueError(f"{' and '.join(given)} are supported together with engine: fsdp2; give one of them")
        return self

    @model_validator(mode="after")
    def _batches(self) -> JobSpec:
        if self.global_batch is not None and self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch ({self.micro_batch}) is above global_batch ({self.global_batch})")
        late = self.communication is not None and self.communication.semantics in ("local", "async")
        refused = refused_adaptive(
            rollback=self.anomalies.policy == "rollback",
            audited=self.audit.every_steps is not None,
            late=late,
            measured=self.scaling_policy == "measured",
        )
        if self.batch is not None and refused is not None:
            raise ValueError(refused)
        for axis, parts in (("pp", "pipelines"), ("tp", "cells")):
            if axis in self.mesh.settings().choices and None in (self.global_batch, self.micro_batch):
                raise ValueError(
                    f"mesh.{axis} may change: give the job's global_batch and micro_batch, which would follow from the "
                    f"number of {parts} otherwise"
                )
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError("max_steps and epochs are both given; a run has one end")
        return self

    @model_validator(mode="after")
    def _measurable(self) -> JobSpec:
        mesh = self.mesh.settings()
        if self.gradient_noise.every_steps is not None:
            refused = refused_noise(mesh.sp, self.global_batch, self.micro_batch, mesh.tp, mesh.ep, mesh.pp)
            if refused is not None:
                raise ValueError(refused)
        if self.audit.every_steps is not None:
            refused = refused_audit(mesh.sp, False, mesh.tp, mesh.ep, mesh.pp)
            if refused is not None:
                raise ValueError(refused)
        return self

    @model_validator(mode="after")
    def _gradients_travel(self) -> JobSpec:
        asked, mesh = self._communication, self.mesh.settings()
        refused = None if asked is None else refused_communication(asked, self.engine, mesh.tp, mesh.ep, mesh.pp)
        if refused is not None:
            raise ValueError(refused)
        return self

    @property
    def _communication(self) -> CommunicationSettings | None:
        return None if self.communication is None else CommunicationSettings(**dict(self.communication))

    @property
    def sizes(self) -> tuple[int, int]:
        """`min_workers` and `max_workers` in whole cells of the mesh."""
        fewest, most, _ = self.mesh.cells(self.min_workers, self.max_workers)
        return fewest, most

    def job(self, file: Path, run_id: str | None) -> Job:
        """The job of one run, under a new id where `run_id` is None. `file` is where the job was read from.

        Raises UsageError for an entry point or a run id that cannot be used.
        """
        entry = parse_entry_point(self.entry_point, file.absolute().parent)
        named = run_id or new_run_id(self.name or file.stem, time.time())
        return Job(self.settings(named, default_storage(None)), str(entry), self.config, entry.folder)

    def settings(self, run_id: str, storage_url: str) -> RunSettings:
        """The settings of a run; `storage_url` is used if the job names no storage."""
        fewest, most, mesh = self.mesh.cells(self.min_workers, self.max_workers)
        checkpoint_url = self.checkpoint.url or self.storage_url or storage_url
        return RunSettings(
            run_id=run_id,
            name=self.name,
            seed=self.seed,
            scaling=ScalingSettings(
                fewest,
                most,
                self.workers_per_slot,
                self.gather_s,
                self.spare_slots,
                self.priority,
                self.share_after_s,
                self.scaling_policy,
                self.price_per_node_hour,
            ),
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            adaptive_batch=None if self.batch is None else AdaptiveBatch(self.batch.adaptive, self.batch.warmup_steps),
            max_steps=self.max_steps,
            epochs=self.epochs,
            checkpoint=CheckpointSettings(
                checkpoint_url, self.checkpoint.every_steps, self.checkpoint.keep_last, self.checkpoint.keep_every_steps
            ),
            snapshots=SnapshotSettings(**dict(self.snapshots)),
            failures=self.failures,
            anomalies=AnomalySettings(**dict(self.anomalies)),
            stragglers=StragglerSettings(**dict(self.stragglers)),
            gradient_noise=GradientNoiseSettings(**dict(self.gradient_noise)),
            audit=AuditSettings(**dict(self.audit)),
            calibration=CalibrationSettings(**dict(self.calibration)),
            communication=self._communication,
            sinks=tuple(SinkSettings(sink.kind, sink.path.replace("{run_id}", run_id)) for sink in self.sinks),
            resources_per_worker=self.resources_per_worker,
            fork_workers=self.fork_workers,
            numa_binding=self.numa_binding,
            device_faults=self.device_faults,
            engine=self.engine,
            weights=self.weights.settings() if self.weights is not None else None,
            engine_config=self.fsdp2 if self.engine == "fsdp2" else _mapping(self.deepspeed),
            mesh=replace(mesh, stages_per_rank=stages_per_rank(self.engine, self.fsdp2 or {})),
            storage_url=self.storage_url or self.checkpoint.url or storage_url,
        )


def _mapping(config: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A path that is not resolved yet does not count as a configuration."""
    return config if isinstance(config, dict) else None

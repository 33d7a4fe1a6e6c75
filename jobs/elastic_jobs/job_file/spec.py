"""job.yaml: what a user asks for. Everything is checked here, before any node is asked for."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, create_model, model_validator

from elastic.core.errors import UsageError
from elastic.core.settings import (
    GPU_FAILURES,
    AnomalySettings,
    CheckpointSettings,
    FailureSettings,
    RunSettings,
    ScalingSettings,
    SinkSettings,
    SnapshotSettings,
    StragglerSettings,
    WeightsSettings,
    refused_resources,
)
from elastic.entrypoint import parse_entry_point
from elastic_jobs.job_file import kubernetes_section
from elastic_jobs.job_file.kubernetes_section import KubernetesSpec
from elastic_jobs.job_file.submit_section import SubmitSpec
from elastic_jobs.job_file.validation_messages import sentence
from elastic_jobs.job_file.yaml_lines import Document, parse
from elastic_jobs.run_folder import absolute_url, default_storage, new_run_id
from elastic_jobs.running.run_plan import Job
from elastic_jobs.terminal import say

Count = Annotated[int, Field(ge=1)]

# Strict: a "4" or a `yes` where a number belongs is a slip worth hearing about, not worth guessing at.
# Old section -> present one. Both are read for one release.
_RENAMED = {"memory": "snapshots"}

_CONFIG = ConfigDict(extra="forbid", frozen=True, strict=True)


def _mirror(settings: type[Any]) -> type[BaseModel]:
    """A model with the fields and defaults of a settings class, so that neither can drift from the other.

    Durations must be above zero; counts may be zero (no retry).
    """
    hints = get_type_hints(settings)
    fields = {
        f.name: (Annotated[hints[f.name], Field(ge=0) if hints[f.name] is int else Field(gt=0)], f.default)
        for f in dataclasses.fields(settings)
    }
    return create_model(settings.__name__, __config__=_CONFIG, **fields)  # type: ignore[call-overload, no-any-return]


_FAILURES = _mirror(FailureSettings)


def _failures(value: Any) -> FailureSettings:
    checked = value if isinstance(value, FailureSettings) else FailureSettings(**dict(_FAILURES.model_validate(value)))
    if not checked.heartbeat_s < checked.suspect_after_s:
        raise ValueError(
            f"heartbeat_s ({checked.heartbeat_s}) must be below suspect_after_s ({checked.suspect_after_s})"
        )
    return checked


class CheckpointSpec(BaseModel):
    """`url` None: the run's storage."""

    model_config = _CONFIG

    url: str | None = None
    every_steps: Count | None = None
    keep_last: Count = 2
    keep_every_steps: Count | None = None


class SnapshotSpec(BaseModel):
    """See `SnapshotSettings`."""

    model_config = _CONFIG

    enabled: bool = SnapshotSettings.enabled
    required: bool = False
    replicas: Annotated[int, Field(ge=0, le=8)] = SnapshotSettings.replicas
    parity: Annotated[int, Field(ge=0, le=16)] = SnapshotSettings.parity
    every_steps: Count | None = None
    cost_limit: Annotated[float, Field(gt=0, le=1)] = SnapshotSettings.cost_limit
    domain_label: Annotated[str, Field(min_length=1)] = SnapshotSettings.domain_label

    @model_validator(mode="before")
    @classmethod
    def _parity_alone(cls, data: Any) -> Any:
        """Setting `parity` turns the default replicas off."""
        return {"replicas": 0, **data} if isinstance(data, dict) and data.get("parity") else data

    @model_validator(mode="after")
    def _one_kind(self) -> SnapshotSpec:
        if self.parity and self.replicas:
            both = f"parity ({self.parity}) takes the place of replicas ({self.replicas})"
            raise ValueError(f"{both}: leave one of them out, or set it to 0")
        return self


class AnomalySpec(BaseModel):
    """See `AnomalySettings`."""

    model_config = _CONFIG

    policy: Literal["stop", "skip", "rollback", "off"] = AnomalySettings.policy
    max_anomalies: Annotated[int, Field(ge=0)] = AnomalySettings.max_anomalies
    window_steps: Count = AnomalySettings.window_steps
    max_overflows: Annotated[int, Field(ge=0)] = AnomalySettings.max_overflows


class StragglerSpec(BaseModel):
    """See `StragglerSettings`."""

    model_config = _CONFIG

    policy: Literal["off", "report", "evict"] = StragglerSettings.policy
    factor: Annotated[float, Field(gt=1)] = StragglerSettings.factor
    window_steps: Count = StragglerSettings.window_steps
    windows: Count = StragglerSettings.windows
    calibration_windows: Count = StragglerSettings.calibration_windows


class SinkSpec(BaseModel):
    """See `SinkSettings`. `{run_id}` in `path` stands for the run's id."""

    model_config = _CONFIG

    kind: Literal["jsonl", "prometheus"]
    path: Annotated[str, Field(pattern=r"^/.*[^/]$")]


class WeightsSpec(BaseModel):
    """See `WeightsSettings`."""

    model_config = _CONFIG

    source: Annotated[str, Field(min_length=1)]
    allow_missing: list[str] = Field(default_factory=list)
    allow_unexpected: list[str] = Field(default_factory=list)
    allow_pickle: bool = False

    def settings(self) -> WeightsSettings:
        return WeightsSettings.from_json(dict(self))


class JobSpec(BaseModel):
    """One job. Batches count samples; None leaves them to the DeepSpeed config of the user's script."""

    model_config = _CONFIG

    entry_point: str
    config: dict[str, Any] = Field(default_factory=dict)
    name: str = ""
    min_workers: Count = 1
    max_workers: Count
    workers_per_slot: Count = 1
    spare_slots: Annotated[int, Field(ge=0)] = 0
    gather_s: Annotated[float, Field(ge=0)] = ScalingSettings.gather_s
    priority: Annotated[int, Field(ge=-1000, le=1000)] = ScalingSettings.priority
    share_after_s: Annotated[float, Field(gt=0)] = ScalingSettings.share_after_s
    scaling_policy: Literal["eager", "patient"] = ScalingSettings.policy
    resources_per_worker: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=lambda: {"CPU": 1.0})
    engine: str = RunSettings.engine
    deepspeed: dict[str, Any] | str | None = None
    weights: WeightsSpec | None = None
    fsdp2: dict[str, Any] | None = None
    global_batch: Count | None = None
    micro_batch: Count | None = None
    max_steps: Count | None = None
    epochs: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    snapshots: SnapshotSpec = Field(default_factory=SnapshotSpec)
    failures: Annotated[FailureSettings, PlainValidator(_failures)] = Field(default_factory=FailureSettings)
    anomalies: AnomalySpec = Field(default_factory=AnomalySpec)
    stragglers: StragglerSpec = Field(default_factory=StragglerSpec)
    sinks: list[SinkSpec] = Field(default_factory=list)
    storage_url: str | None = None
    kubernetes: KubernetesSpec | None = None
    submit: SubmitSpec = Field(default_factory=SubmitSpec)

    @model_validator(mode="before")
    @classmethod
    def _limits_of_gpus(cls, data: Any) -> Any:
        """What takes long on a device has other defaults there; keys that are given are kept."""
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
        return self

    @model_validator(mode="after")
    def _one_device(self) -> JobSpec:
        refused = refused_resources(self.resources_per_worker)
        if refused is not None:
            raise ValueError(refused)
        return self

    @model_validator(mode="after")
    def _one_engine(self) -> JobSpec:
        for name in ("deepspeed", "fsdp2"):
            if getattr(self, name) is not None and self.engine != name:
                raise ValueError(f"{name} is given, but engine is {self.engine}; set engine: {name}, or leave it out")
        return self

    @model_validator(mode="after")
    def _batches(self) -> JobSpec:
        if self.global_batch is not None and self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch ({self.micro_batch}) is above global_batch ({self.global_batch})")
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError("max_steps and epochs are both given; a run has one end")
        return self

    def begun_from(self, weights: WeightsSpec | None) -> JobSpec:
        """The job with other weights to begin from, None: with its own."""
        return self if weights is None else self.model_copy(update={"weights": weights})

    def job(self, file: Path, run_id: str | None, storage_url: str | None) -> Job:
        """The job of one run. `file` is where it was read from; `storage_url` replaces the job's own storage.

        None: a new id, made of the job's name and the time; the job's own storage, or else the default. Raises
        UsageError for an entry point or a storage address that cannot be used.
        """
        entry = parse_entry_point(self.entry_point, file.absolute().parent)
        named = run_id or new_run_id(self.name or file.stem, time.time())
        where = default_storage(storage_url)
        spec = self if storage_url is None else self.model_copy(update={"storage_url": where})
        return Job(spec.settings(named, where), str(entry), self.config, entry.folder)

    def settings(self, run_id: str, storage_url: str) -> RunSettings:
        """The settings of a run; `storage_url` is used if the job names no storage."""
        checkpoint_url = self.checkpoint.url or self.storage_url or storage_url
        return RunSettings(
            run_id=run_id,
            name=self.name,
            seed=self.seed,
            scaling=ScalingSettings(
                self.min_workers,
                self.max_workers,
                self.workers_per_slot,
                self.gather_s,
                self.spare_slots,
                self.priority,
                self.share_after_s,
                self.scaling_policy,
            ),
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            max_steps=self.max_steps,
            epochs=self.epochs,
            checkpoint=CheckpointSettings(
                checkpoint_url, self.checkpoint.every_steps, self.checkpoint.keep_last, self.checkpoint.keep_every_steps
            ),
            snapshots=SnapshotSettings(**dict(self.snapshots)),
            failures=self.failures,
            anomalies=AnomalySettings(**dict(self.anomalies)),
            stragglers=StragglerSettings(**dict(self.stragglers)),
            sinks=tuple(SinkSettings(sink.kind, sink.path.replace("{run_id}", run_id)) for sink in self.sinks),
            resources_per_worker=self.resources_per_worker,
            engine=self.engine,
            weights=self.weights.settings() if self.weights is not None else None,
            engine_config=self.fsdp2 if self.engine == "fsdp2" else _mapping(self.deepspeed),
            storage_url=self.storage_url or self.checkpoint.url or storage_url,
        )


def _mapping(config: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A path that was not resolved yet is no configuration."""
    return config if isinstance(config, dict) else None


def load_job(file: str | Path) -> JobSpec:
    """The job in `file`, with relative paths and URLs resolved against its folder. Raises UsageError."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"job file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"job file {path} is not UTF-8 text") from error
    return parse_job(parse(text, str(path)), path.absolute().parent)


def parse_job(document: Document, folder: Path) -> JobSpec:
    """Raises UsageError naming the place, the key, and the nearest valid key where one is unknown."""
    if not isinstance(document.data, dict):
        raise UsageError(f"{document.name}: a job is a mapping of keys to values; see examples/gpt.yaml")
    document = _with_present_names(document)
    try:
        spec = JobSpec.model_validate(document.data)
    except ValidationError as error:
        raise UsageError(sentence(error, document, _keys())) from error
    return _resolve(spec, document, folder)


def _with_present_names(document: Document) -> Document:
    """The document with old names of sections replaced, and one warning for each. Raises UsageError."""
    data, lines = dict(document.data), dict(document.lines)
    for old, new in _RENAMED.items():
        if old not in data:
            continue
        place = document.place([old])
        if new in data:
            raise UsageError(f"{place}: {old!r} is the old name of {new!r}, and both are given; keep {new!r}")
        say(f"{place}: {old!r} is now called {new!r}; the old name will be refused in the next release")
        data[new] = data.pop(old)
        lines.update({(new, *path[1:]): line for path, line in document.lines.items() if path[0] == old})
    return Document(document.name, data, lines)


def _keys() -> dict[tuple[str, ...], list[str]]:
    """The valid keys of each section."""
    return {
        (): list(JobSpec.model_fields),
        ("checkpoint",): list(CheckpointSpec.model_fields),
        ("snapshots",): list(SnapshotSpec.model_fields),
        ("anomalies",): list(AnomalySpec.model_fields),
        ("stragglers",): list(StragglerSpec.model_fields),
        ("weights",): list(WeightsSpec.model_fields),
        ("sinks",): list(SinkSpec.model_fields),
        ("submit",): list(SubmitSpec.model_fields),
        ("failures",): [f.name for f in dataclasses.fields(FailureSettings)],
        **kubernetes_section.keys(),
    }


def _resolve(spec: JobSpec, document: Document, folder: Path) -> JobSpec:
    deepspeed = spec.deepspeed
    if isinstance(deepspeed, str):
        deepspeed = _read_deepspeed(folder / Path(deepspeed).expanduser(), document.place(["deepspeed"]))
    checkpoint = spec.checkpoint
    if checkpoint.url is not None:
        checkpoint = checkpoint.model_copy(update={"url": absolute_url(checkpoint.url, folder)})
    storage = absolute_url(spec.storage_url, folder) if spec.storage_url is not None else None
    weights = spec.weights
    if weights is not None:
        weights = weights.model_copy(update={"source": absolute_url(weights.source, folder)})
    changes = {"deepspeed": deepspeed, "checkpoint": checkpoint, "storage_url": storage, "weights": weights}
    return spec.model_copy(update=changes)


def _read_deepspeed(path: Path, place: str) -> dict[str, Any]:
    try:
        # JSON is YAML, so one parser gives line numbers for both.
        data = parse(path.read_text(encoding="utf-8"), str(path)).data
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: the DeepSpeed config {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{place}: the DeepSpeed config {path} is not a JSON object")
    return data

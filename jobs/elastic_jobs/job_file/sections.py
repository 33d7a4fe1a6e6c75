"""The sections of a job file, with their limits. Defaults are those of `elastic.core.settings`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from elastic.core.mesh import MeshSettings, described, whole_cells
from elastic.core.settings import (
    AnomalySettings,
    AuditSettings,
    FailureSettings,
    SnapshotSettings,
    StragglerSettings,
    WeightsSettings,
)

Count = Annotated[int, Field(ge=1)]

# Strict: a "4" or a `yes` in place of a number is reported, not converted.
CONFIG = ConfigDict(extra="forbid", frozen=True, strict=True)


def _mirror(settings: type[Any]) -> type[BaseModel]:
    """A model with the fields and defaults of a settings class, so that neither can drift from the other.

    Durations must be above zero; counts may be zero (no retry).
    """
    hints = get_type_hints(settings)
    fields = {
        f.name: (Annotated[hints[f.name], Field(ge=0) if hints[f.name] is int else Field(gt=0)], f.default)
        for f in dataclasses.fields(settings)
    }
    return create_model(settings.__name__, __config__=CONFIG, **fields)  # type: ignore[call-overload, no-any-return]


_FAILURES = _mirror(FailureSettings)


def checked_failures(value: Any) -> FailureSettings:
    checked = value if isinstance(value, FailureSettings) else FailureSettings(**dict(_FAILURES.model_validate(value)))
    if not checked.heartbeat_s < checked.suspect_after_s:
        raise ValueError(
            f"heartbeat_s ({checked.heartbeat_s}) must be below suspect_after_s ({checked.suspect_after_s})"
        )
    return checked


class MeshSpec(BaseModel):
    """See `MeshSettings`. Other axes are refused by their names."""

    model_config = CONFIG

    sp: Count = 1
    tp: Count = 1

    @model_validator(mode="before")
    @classmethod
    def _known_axes(cls, data: Any) -> Any:
        for axis in ("ep", "pp"):
            if isinstance(data, dict) and axis in data:
                raise ValueError(f"{axis} is not supported: sp and tp are the axes beside data parallelism so far")
        if isinstance(data, dict) and "dp" in data:
            raise ValueError("dp follows from the number of workers, which changes; leave it out")
        return data

    @model_validator(mode="after")
    def _one_axis(self) -> MeshSpec:
        if self.sp > 1 and self.tp > 1:
            raise ValueError("sp and tp are not supported together; give one of them")
        return self

    def cells(self, low: int, high: int) -> tuple[int, int, MeshSettings]:
        """Worker counts in whole cells: the smallest rounded up, the largest down. ValueError without any."""
        cell = self.sp * self.tp
        fewest, most = -(-low // cell) * cell, whole_cells(high, cell)
        if most < fewest:
            raise ValueError(
                f"min_workers ({low}) to max_workers ({high}) has no multiple of {cell} ({described(self.sp, self.tp)})"
            )
        changes = [
            f"{name} {given} was rounded to {made}"
            for name, given, made in (("min_workers", low, fewest), ("max_workers", high, most))
            if given != made
        ]
        return fewest, most, MeshSettings(self.sp, ", ".join(changes), self.tp)


class CheckpointSpec(BaseModel):
    """`url` None: the run's storage."""

    model_config = CONFIG

    url: str | None = None
    every_steps: Count | None = None
    keep_last: Count = 2
    keep_every_steps: Count | None = None


class SnapshotSpec(BaseModel):
    """See `SnapshotSettings`."""

    model_config = CONFIG

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

    model_config = CONFIG

    policy: Literal["stop", "skip", "rollback", "off"] = AnomalySettings.policy
    max_anomalies: Annotated[int, Field(ge=0)] = AnomalySettings.max_anomalies
    window_steps: Count = AnomalySettings.window_steps
    max_overflows: Annotated[int, Field(ge=0)] = AnomalySettings.max_overflows


class StragglerSpec(BaseModel):
    """See `StragglerSettings`."""

    model_config = CONFIG

    policy: Literal["off", "report", "evict"] = StragglerSettings.policy
    factor: Annotated[float, Field(gt=1)] = StragglerSettings.factor
    window_steps: Count = StragglerSettings.window_steps
    windows: Count = StragglerSettings.windows
    calibration_windows: Count = StragglerSettings.calibration_windows


class GradientNoiseSpec(BaseModel):
    """See `GradientNoiseSettings`."""

    model_config = CONFIG

    every_steps: Count | None = None


class AuditSpec(BaseModel):
    """See `AuditSettings`."""

    model_config = CONFIG

    every_steps: Count | None = AuditSettings.every_steps
    strikes: Count = AuditSettings.strikes
    rollback: Literal["newest", "agreed"] = AuditSettings.rollback


class SinkSpec(BaseModel):
    """See `SinkSettings`. `{run_id}` in `path` stands for the run's id."""

    model_config = CONFIG

    kind: Literal["jsonl", "prometheus"]
    path: Annotated[str, Field(pattern=r"^/.*[^/]$")]


class WeightsSpec(BaseModel):
    """See `WeightsSettings`."""

    model_config = CONFIG

    source: Annotated[str, Field(min_length=1)]
    allow_missing: list[str] = Field(default_factory=list)
    allow_unexpected: list[str] = Field(default_factory=list)
    allow_pickle: bool = False

    def settings(self) -> WeightsSettings:
        return WeightsSettings.from_json(dict(self))

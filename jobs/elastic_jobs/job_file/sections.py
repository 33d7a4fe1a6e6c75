"""The sections of a job file, with their limits. Defaults are those of `elastic.core.settings`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from elastic.core.data.adaptive_batch import AdaptiveBatch
from elastic.core.mesh import MeshSettings, whole_cells
from elastic.core.settings import (
    AnomalySettings,
    AuditSettings,
    CalibrationSettings,
    CommunicationSettings,
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


# What `tp: any` may be, up to the workers of a large node: in every layer they wait for each other.
_ANY_TP = (1, 2, 3, 4, 5, 6, 7, 8)


class MeshSpec(BaseModel):
    """See `MeshSettings`. Other axes are refused by their names. All but `sp` may be several sizes, of which each
    generation has one."""

    model_config = CONFIG

    sp: Count = 1
    tp: Count | list[Count] | Literal["any"] = 1
    ep: Count | list[Count] = 1
    pp: Count | list[Count] = 1

    @model_validator(mode="before")
    @classmethod
    def _known_axes(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if not isinstance(data.get("sp", 1), int):
            raise ValueError("sp is one number: dropout depends on it, so that it is fixed for a run")
        if isinstance(data.get("ep"), str):
            raise ValueError(
                "ep: say the sizes that a generation may have, as ep: [1, 2, 4]; each must divide the number of "
                "experts, which is not known before the model is built"
            )
        if "cp" in data:
            raise ValueError(
                "cp (context parallelism, ring attention) is not supported: torch 2.13's does not train on a CPU, and "
                "no test can show it right; share sequences with sp instead"
            )
        if "dp" in data:
            raise ValueError("dp follows from the number of workers, which changes; leave it out")
        return data

    @model_validator(mode="after")
    def _sizes_ascend(self) -> MeshSpec:
        for axis, sizes in self.changing().items():
            if not sizes or sorted(set(sizes)) != sizes:
                raise ValueError(f"{axis}: the sizes, each once, the smallest first, not {sizes}")
        return self

    def changing(self, most: int | None = None) -> dict[str, list[int]]:
        """The axes of which several sizes are given. `most` workers there are at most."""
        found = {axis: sizes for axis, sizes in (("ep", self.ep), ("pp", self.pp)) if isinstance(sizes, list)}
        if self.tp == "any":
            return {"tp": [size for size in _ANY_TP if most is None or self.sp * size <= max(most, self.sp)], **found}
        return {"tp": self.tp, **found} if isinstance(self.tp, list) else found

    def settings(self, rounded: str = "", most: int | None = None) -> MeshSettings:
        changing = self.changing(most)
        choices = {axis: tuple(sizes) for axis, sizes in changing.items() if len(sizes) > 1}
        given = {"tp": self.tp, "ep": self.ep, "pp": self.pp}
        tp, ep, pp = (changing[axis][-1] if axis in changing else int(str(size)) for axis, size in given.items())
        return MeshSettings(self.sp, rounded, tp, ep, choices, pp, any_tp=self.tp == "any")

    def cells(self, low: int, high: int) -> tuple[int, int, MeshSettings]:
        """Worker counts in whole cells: the smallest rounded up, the largest down. ValueError without any."""
        mesh = self.settings(most=high)
        fewest, most = min(-(-low // cell) * cell for cell in mesh.cells), whole_cells(high, *mesh.cells)
        if most < fewest:
            sizes = " or ".join(map(str, mesh.cells))
            raise ValueError(f"min_workers ({low}) to max_workers ({high}) has no multiple of {sizes} ({mesh})")
        changes = [
            f"{name} {given} was rounded to {made}"
            for name, given, made in (("min_workers", low, fewest), ("max_workers", high, most))
            if given != made
        ]
        return fewest, most, self.settings(", ".join(changes), high)


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
    collective_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = StragglerSettings.collective_factor


class GradientNoiseSpec(BaseModel):
    """See `GradientNoiseSettings`."""

    model_config = CONFIG

    every_steps: Count | None = None


class CalibrationSpec(BaseModel):
    """See `CalibrationSettings`."""

    model_config = CONFIG

    policy: Literal["off", "report", "refuse"] = CalibrationSettings.policy
    slow_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = CalibrationSettings.slow_factor
    refuse_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = CalibrationSettings.refuse_factor
    deviations: Annotated[float, Field(ge=0, allow_inf_nan=False)] = CalibrationSettings.deviations

    @model_validator(mode="after")
    def _ordered(self) -> CalibrationSpec:
        if self.refuse_factor < self.slow_factor:
            raise ValueError(f"refuse_factor ({self.refuse_factor:g}) is below slow_factor ({self.slow_factor:g})")
        return self


class AuditSpec(BaseModel):
    """See `AuditSettings`."""

    model_config = CONFIG

    every_steps: Count | None = AuditSettings.every_steps
    strikes: Count = AuditSettings.strikes
    rollback: Literal["newest", "agreed"] = AuditSettings.rollback


class BatchSpec(BaseModel):
    """See `elastic.core.data.adaptive_batch`."""

    model_config = CONFIG

    adaptive: Literal["linear", "sqrt", "constant"]
    warmup_steps: Annotated[int, Field(ge=0)] = AdaptiveBatch.warmup_steps

    @model_validator(mode="before")
    @classmethod
    def _names_the_rule(cls, data: Any) -> Any:
        if data == "adaptive":
            raise ValueError(
                "batch: adaptive must say how the learning rate follows the batch: batch: {adaptive: linear} for SGD, "
                "{adaptive: sqrt} for Adam, or {adaptive: constant}"
            )
        return data


class CommunicationSpec(BaseModel):
    """See `CommunicationSettings`."""

    model_config = CONFIG

    semantics: str = CommunicationSettings.semantics
    strategy: str = CommunicationSettings.strategy
    bucket_mb: float = CommunicationSettings.bucket_mb
    density: Annotated[float, Field(gt=0, le=1)] = CommunicationSettings.density
    rank: Count = CommunicationSettings.rank
    check_every_steps: Count = CommunicationSettings.check_every_steps
    islands: Count | None = None
    every_steps: Count = CommunicationSettings.every_steps
    outer_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = CommunicationSettings.outer_lr
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = CommunicationSettings.outer_momentum
    fragments: Count = CommunicationSettings.fragments
    overlap_steps: Annotated[int, Field(ge=0)] = CommunicationSettings.overlap_steps
    mix: Annotated[float, Field(ge=0, lt=1)] = CommunicationSettings.mix
    staleness: Annotated[int, Field(ge=0)] = CommunicationSettings.staleness


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

"""A run's job, the place where it starts, and the output at its end: made once, handed through, and stored as JSON only
where a process or storage boundary is crossed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_cluster.chaos import Chaos

from elastic.core.errors import IntegrityError
from elastic.core.settings import RunSettings


@dataclass(frozen=True)
class Job:
    """The settings of a run and its training function. `job.json` in the run's folder is the JSON form.

    `entry_point` is "module:function" or "file.py:function"; modules are looked for in `folder`.
    """

    settings: RunSettings
    entry_point: str
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "."

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "settings": self.settings.to_json()}

    def record(self) -> dict[str, Any]:
        """The content of `job.json`, from which `elastic resume` continues."""
        return {**self.to_json(), "created_at": round(time.time(), 3)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """Inverse of `to_json` and `record`. Raises IntegrityError for other content, and UsageError for
        settings of a newer version."""
        settings, entry_point, config = data.get("settings"), data.get("entry_point"), data.get("config") or {}
        folder = data.get("folder") or "."
        if not (isinstance(settings, dict) and isinstance(config, dict)) or not (
            isinstance(entry_point, str) and isinstance(folder, str)
        ):
            raise IntegrityError("job.json is damaged: its settings, entry point, config or folder cannot be read")
        return cls(RunSettings.from_json(settings), entry_point, config, folder)


@dataclass(frozen=True)
class Place:
    """The Ray cluster at `address`, or a local cluster of `nodes` nodes that is started for the run.

    With `autoscale` the local cluster grows to `max_nodes`; see `elastic_jobs.running.backend.growth`. `faults` are
    injected by step.
    """

    address: str | None = None
    nodes: int | None = None
    autoscale: bool = False
    max_nodes: int | None = None
    node_every_s: float | None = None
    faults: Chaos = field(default_factory=Chaos)


@dataclass(frozen=True)
class Output:
    """The output for a run's follower: a report (or JSON) on stdout, and a summary file."""

    summary_file: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class RunPlan:
    job: Job
    place: Place = field(default_factory=Place)
    output: Output = field(default_factory=Output)

    def with_faults(self, left: Chaos) -> RunPlan:
        """The plan with the faults that are left to inject."""
        return replace(self, place=replace(self.place, faults=left))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` of it is equal to self."""
        place = {**vars(self.place), "faults": str(self.place.faults)}
        return {"job": self.job.to_json(), "place": place, "output": dict(vars(self.output))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunPlan:
        place = {**data["place"], "faults": Chaos.parse(data["place"]["faults"])}
        return cls(Job.from_json(data["job"]), Place(**place), Output(**data["output"]))

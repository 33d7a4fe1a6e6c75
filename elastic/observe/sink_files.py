"""Sinks that write files on the controller's node: JSON lines, and gauges for Prometheus.

The format of the latter is Prometheus' text exposition format, as its node_exporter's textfile collector reads it from
`*.prom` files (https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from elastic.core.settings import SinkSettings
from elastic.observe.records import Record
from elastic.observe.sinks import RunInfo, Sink


class JsonLinesSink:
    """Appends each record as one line of JSON, with the run's id as `run_id`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file: IO[str] | None = None
        self._run: RunInfo | None = None

    def open(self, run: RunInfo) -> None:
        self._run = run
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def write(self, record: Record) -> None:
        assert self._file is not None
        assert self._run is not None
        line = {**record, "run_id": self._run.run_id, "incarnation": self._run.incarnation}
        self._file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class PrometheusSink:
    """Keeps one file with the newest values of a run; each change replaces the file at once.

    Gauges: elastic_step, elastic_loss, elastic_step_seconds, elastic_world_size, elastic_generation, elastic_incidents,
    elastic_checkpoint_step, elastic_save_stall_seconds, elastic_running (0 after the end), and elastic_metric with the
    label `name` for each of the user's metrics. All have the label `run`.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._run = ""
        self._values: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._incidents: set[Any] = set()

    def open(self, run: RunInfo) -> None:
        self._run = run.run_id
        self._values["running"] = 1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._replace()

    def write(self, record: Record) -> None:
        if self._follow(record):
            self._replace()

    def close(self) -> None:
        """The file stays: it holds the run's last values."""

    def _follow(self, record: Record) -> bool:
        match record["type"]:
            case "steps":
                for step in record["steps"]:
                    self._step(step)
            case "generation" if "first_step" in record:
                self._set(generation=record["number"], world_size=record["world_size"])
            case "checkpoint":
                self._set(checkpoint_step=record["step"], save_stall_seconds=record.get("stall_s"))
            case "incident":
                # An incident is written again when its lost steps have been done again.
                self._incidents.add(record["id"])
                self._set(incidents=len(self._incidents))
            case "run":
                self._set(running=int(record["status"] == "running"))
            case _:
                return False
        return True

    def _step(self, step: Record) -> None:
        self._set(step=step["step"], loss=step["loss"], step_seconds=step["duration_s"])
        self._metrics.update({name: value for name, value in step["metrics"].items() if _is_number(value)})

    def _set(self, **values: float | None) -> None:
        self._values.update({name: value for name, value in values.items() if value is not None})

    def _replace(self) -> None:
        """A reader finds the old file or the new one, never a partial one."""
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        new.write_text("".join(self._lines()), encoding="utf-8")
        os.replace(new, self._path)

    def _lines(self) -> list[str]:
        run = _label(self._run)
        lines = []
        for name, value in sorted(self._values.items()):
            lines += [f"# TYPE elastic_{name} gauge\n", f'elastic_{name}{{run="{run}"}} {_number(value)}\n']
        if self._metrics:
            lines.append("# TYPE elastic_metric gauge\n")
        for name, value in sorted(self._metrics.items()):
            lines.append(f'elastic_metric{{run="{run}",name="{_label(name)}"}} {_number(value)}\n')
        return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def file_sinks(settings: Iterable[SinkSettings]) -> dict[str, Sink]:
    """The sinks of a job file's `sinks`, by name. A new kind is added here and to `SinkSettings.kind`."""
    return {f"{sink.kind} {sink.path}": _KINDS[sink.kind](sink.path) for sink in settings}


_KINDS: dict[str, Callable[[str], Sink]] = {"jsonl": JsonLinesSink, "prometheus": PrometheusSink}

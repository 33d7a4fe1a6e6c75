"""DeepSpeed's monitors (tensorboard, wandb, comet, csv_monitor) in a run that changes its workers.

DeepSpeed 0.19.8 opens them anew on rank 0 of every generation: deepspeed/monitor/{csv_monitor,wandb}.py.
"""

from __future__ import annotations

import csv
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.core.errors import UsageError

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def refuse_missing(config: Mapping[str, Any]) -> None:
    """Raise UsageError where a monitor is enabled whose package is not installed here."""
    for section, package in _PACKAGES.items():
        monitor = config.get(section)
        if isinstance(monitor, Mapping) and monitor.get("enabled") and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"DeepSpeed option {section}.enabled: the package {package} is not installed; install it, or remove "
                "the block"
            )


def name_run(run_id: str) -> None:
    """Before an engine is built: every generation writes into one run of Weights & Biases, unless the user says
    otherwise."""
    os.environ.setdefault("WANDB_RUN_ID", "".join(c if c.isalnum() or c in "-_" else "-" for c in run_id))
    os.environ.setdefault("WANDB_RESUME", "allow")


def continue_csv(engine: Any, samples: int) -> None:
    """Rank 0, after a restore at `samples` consumed: the curves in the CSV files end there, and have one header."""
    monitor = getattr(engine.monitor, "csv_monitor", None)
    folder = getattr(monitor, "log_dir", None)
    if monitor is None or folder is None:
        return
    for path in sorted(Path(folder).glob("*.csv")):
        _cut(path, samples)
        # The header is there already.
        monitor.filenames.append(path.stem)


def _cut(path: Path, samples: int) -> None:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    kept = rows[:1] + [row for row in rows[1:] if row and row[0].isdigit() and int(row[0]) <= samples]
    if kept != rows:
        new = path.with_suffix(".csv.new")
        with new.open("w", newline="") as file:
            csv.writer(file).writerows(kept)
        new.replace(path)

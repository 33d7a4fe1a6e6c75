"""ray-elastic: a DeepSpeed run that loses a node and carries on.

Names are resolved when they are first used: importing this package imports neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_jobs.trainer import ElasticTrainer

    from elastic import data, sequence
    from elastic.core.errors import ElasticError, UsageError
    from elastic.core.settings import AnomalySettings, FailureSettings, SnapshotSettings, StragglerSettings
    from elastic.engines.model.pipeline import Pipeline
    from elastic.interchange.export import export
    from elastic.training.api import (
        busy,
        epochs,
        get_context,
        initialize,
        keep,
        prepare_data_loader,
        report,
        state,
        step,
    )
    from elastic.training.context import Context

__all__ = [
    "AnomalySettings", "Context", "ElasticError", "ElasticTrainer", "FailureSettings", "Pipeline",
    "SnapshotSettings", "StragglerSettings", "UsageError", "busy", "data", "epochs", "export", "get_context",
    "initialize", "keep", "prepare_data_loader", "report", "sequence", "state", "step",
]  # fmt: skip

_HOMES = {
    "AnomalySettings": "elastic.core.settings",
    "Context": "elastic.training.context",
    "ElasticError": "elastic.core.errors",
    "ElasticTrainer": "elastic_jobs.trainer",
    "FailureSettings": "elastic.core.settings",
    "Pipeline": "elastic.engines.model.pipeline",
    "SnapshotSettings": "elastic.core.settings",
    "StragglerSettings": "elastic.core.settings",
    "UsageError": "elastic.core.errors",
    "busy": "elastic.training.api",
    "epochs": "elastic.training.api",
    "export": "elastic.interchange.export",
    "get_context": "elastic.training.api",
    "initialize": "elastic.training.api",
    "keep": "elastic.training.api",
    "prepare_data_loader": "elastic.training.api",
    "report": "elastic.training.api",
    "state": "elastic.training.api",
    "step": "elastic.training.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ray-elastic")
    if name in ("data", "sequence"):
        return import_module(f"elastic.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

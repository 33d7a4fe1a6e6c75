"""The kinds of engine, and the one that a run trains with."""

from __future__ import annotations

import importlib

from elastic.core.errors import UsageError
from elastic.engines.base import EngineKind

# One name for each package here whose module `kind` has a `KIND`. The job file's key `engine` takes these names.
ENGINES = ("deepspeed",)


def check_engine(name: str) -> None:
    """Raises UsageError for an unknown kind. Imports no engine: a job file is checked without one."""
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is unknown; the engines are: {', '.join(ENGINES)}")


def engine_kind(name: str) -> EngineKind:
    """The kind of that name. Imports torch and the engine's library. Raises UsageError for an unknown name."""
    check_engine(name)
    kind: EngineKind = importlib.import_module(f"elastic.engines.{name}.kind").KIND
    return kind

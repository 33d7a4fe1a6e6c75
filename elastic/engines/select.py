"""The kinds of engine, and the one that a run trains with."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.engines.base import EngineKind
from elastic.engines.fsdp2.config import read_options

# One name for each package here whose module `kind` has a `KIND`, and `config` a `check`. The job file's key `engine`
# takes these names.
ENGINES = ("deepspeed", "fsdp2")


def check_engine(name: str) -> None:
    """Raises UsageError for an unknown kind. Imports no engine: a job file is checked without one."""
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is unknown; the engines are: {', '.join(ENGINES)}")


def check_config(
    name: str, config: Mapping[str, Any], batch: BatchSettings, workers: tuple[int, int], tp: int = 1, ep: int = 1,
    pp: int = 1,
) -> None:  # fmt: skip
    """What the engine of that name says about a job's configuration of it, without its library.

    `workers` are the smallest and the largest number of ranks with samples of their own; `tp` ranks share each layer,
    `ep` the experts, or `pp` the layers. Raises UsageError for what the engine cannot honour.
    """
    try:
        importlib.import_module(f"elastic.engines.{name}.config").check(config, batch, workers, tp, ep, pp)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}") from error


def stages_per_rank(name: str, config: Mapping[str, Any]) -> int:
    """How many stages of a pipeline a job's configuration gives each rank; 1 where `check_config` refuses it."""
    try:
        return read_options(config).stages_per_rank if name == "fsdp2" else 1
    except UsageError:
        return 1


def engine_kind(name: str) -> EngineKind:
    """The kind of that name. Imports torch and the engine's library. Raises UsageError for an unknown name."""
    check_engine(name)
    kind: EngineKind = importlib.import_module(f"elastic.engines.{name}.kind").KIND
    return kind

"""Which kind of engine a process trains with."""

from __future__ import annotations

from elastic.engines.base import EngineKind


def engine_kind() -> EngineKind:
    # Imported late: the job file's checks need the configuration of an engine without the engine itself.
    from elastic.engines.deepspeed.kind import DeepSpeed

    return DeepSpeed()
